"""Which arguments of a program can be refused before anything is read?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

Named = Iterable[tuple[str, Path | str | None]]  # option, and what it was given; None: nothing


def refused(device: str, models: Named = (), texts: Named = (), written: Named = ()) -> str | None:
    """One sentence on the first that cannot be; None for arguments that can.

    models: folders of models. texts: files and folders that are read. written: files and folders to be made.
    """
    for option, path in models:
        if path is not None and not (Path(path) / "config.json").is_file():
            return f"{option} {path} is no folder of a model: name one that holds config.json"
    for option, path in texts:
        if path is not None and not Path(path).exists():
            return f"{option} {path} does not exist: name a file or a folder that is there"
    for option, path in written:
        if path is not None and not Path(path).absolute().parent.is_dir():
            return f"{option} {path} cannot be written: make the folder {Path(path).absolute().parent} first"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        return f"--device {device} is none that torch knows: name cpu or cuda"
    if kind == "cuda" and not torch.cuda.is_available():
        return f"--device {device}: torch finds no GPU here, name cpu"
    return None
