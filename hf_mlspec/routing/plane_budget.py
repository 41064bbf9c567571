"""How many bytes of planes may lie on a device, as a user writes it?"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from ..engines.memory import bytes_in

TOP_PLANES = 4


class Streaming(NamedTuple):
    """What `hf_mlspec.stream_planes` is to be called with."""

    budget: int
    top_planes: int
    folder: str | None


def bytes_of(budget: int | str) -> int:
    """Bytes, or accelerate's words for them: "6GiB", "500MB". ValueError for what is none."""
    if type(budget) is int and budget > 0:
        return budget
    size = bytes_in(budget) if type(budget) is str else None
    if not size:
        raise ValueError(f"plane_budget is {budget!r}: give bytes, or a word such as '6GiB' or '500MB'")
    return size


def asked_to_stream(budget: Any, top_planes: Any, folder: Any, has_planes: bool) -> Streaming | None:
    """What a config says of it; None without a budget. ValueError for other weights than bit-planes, TypeError for a
    folder that is no path."""
    if type(top_planes) is not int or not 1 <= top_planes <= 7:
        raise ValueError(f"top_planes is {top_planes!r}: 1 to 7 planes of every layer can be resident always")
    if budget is None:
        if folder is not None or top_planes != TOP_PLANES:
            raise ValueError("top_planes and plane_folder go with a plane_budget, which is None")
        return None
    if not has_planes:
        raise ValueError(f"plane_budget is {budget!r}, and only bit-planes are streamed: use it with format='planes'")
    if folder is not None and not isinstance(folder, str | os.PathLike):
        raise TypeError(f"plane_folder is {folder!r}, it must be the path of a folder")
    return Streaming(bytes_of(budget), top_planes, None if folder is None else os.fspath(folder))
