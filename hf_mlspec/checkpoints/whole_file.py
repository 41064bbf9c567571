"""How is a file written so that, whatever goes wrong, it is there whole, or as it was before?"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Another name in the folder of ``path``, to write to; at the end that file is on the disk, and takes its place.

    An error leaves nothing of it, and what was at ``path`` before. A file that is replaced hands on its permissions.
    """
    path = Path(path)
    # torch.save writes a file's name up to its last dot into it, which must be there, and the same every time.
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        yield beside
        _flush(beside)
        if path.exists():
            os.chmod(beside, path.stat().st_mode & 0o777)
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def _flush(file: Path) -> None:
    """On the disk before it is renamed: a machine that stops may else keep the name and not the bytes."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
