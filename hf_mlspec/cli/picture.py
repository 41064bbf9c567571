"""Can a picture be drawn and written where --plot names it? Asked before a model is loaded."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ..evaluation.certificate_badge import check_folder

PICTURES = (".png", ".svg", ".pdf")


def require_picture(path: str) -> None:
    """ValueError for another suffix, a folder that is not there, and where matplotlib, which is optional, is not."""
    if Path(path).suffix.lower() not in PICTURES:
        raise ValueError(f"--plot is {path!r}; a picture's name ends with {', '.join(PICTURES)}")
    check_folder(path, "the picture")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or leave --plot out")
