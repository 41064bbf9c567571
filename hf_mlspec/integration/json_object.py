"""What does a JSON file hold? An object, or an error that names the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def read_object(file: str | os.PathLike) -> dict[str, Any]:
    """The object in a file. ValueError naming the file for one that holds no JSON, or another value than an object;
    OSError where it cannot be read."""
    try:
        found = json.loads(Path(file).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(file)} is damaged: it holds no JSON ({error}); restore the file") from error
    if not isinstance(found, dict):
        held = "null" if found is None else f"a {type(found).__name__}"
        raise ValueError(f"{os.fspath(file)} is damaged: it holds {held}, no JSON object; restore the file")
    return found
