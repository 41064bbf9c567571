"""What does the word or path of a level say?"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from ...formats import FORMATS, casts
from ...precision import Precision, Spelled, spelled
from ..quantizer.source_config import is_gguf
from .hub import why_not_on_hub

_MOST_DIGITS = 9
SEPARATORS = re.compile("[+,]")  # of the levels of a chain that is written as one text
# Views of the target by the word in front of their number, and what that counts.
_VIEWS = {"early_exit": "layers", "experts": "experts a token"}
_HEAD_CLASS = "Eagle3"  # in the names of all classes of such heads
_CONFIGS: dict[str, Path] = {}  # of hub names that were asked for
_MTP = "mtp"
LOOKUPS = ("prompt_lookup", "ngram", "lookups")
_OTHER_WORDS = (
    "qspec", "routed", "PATH", "PATH@mxfp4", _MTP, f"{_MTP}:PATH", *LOOKUPS, "early_exit:N", "experts:N",
)  # fmt: skip


@dataclass(frozen=True)
class Word:
    """A parsed level word: kind "cast", "precision", "routed", "load", "mtp", "prompt_lookup", "ngram", "lookups" or
    one of `_VIEWS`.

    path: of a loaded model, or of the checkpoint whose MTP layer is meant, None for the target's own. cast: the format
    that the target (kind "cast") or what is loaded is cast to, None for the latter as it is. precision: None for
    "qspec", whose weights are whatever the target's are. number: of layers, or experts.
    """

    kind: str
    path: str | None = None
    cast: str | None = None
    number: int = 0
    precision: Precision | None = None


def parse_level(text: str) -> Word:
    """Read a level word.

    Raises ValueError for a word that is neither known nor a folder nor shaped like a hub name.
    """
    if text in (*LOOKUPS, "routed"):
        return Word(text)
    if _is_cast(text):
        return Word("cast", cast=text)
    if text == "qspec":
        return Word("precision")
    found = None if "/" in text else spelled(text)  # no word has a slash
    if found is not None and found.family.levels and _says_enough(found):
        return Word("precision", precision=Precision.parse(text))
    for kind, what in _VIEWS.items():
        if text.startswith(f"{kind}:"):
            number = text.removeprefix(f"{kind}:")
            if not number.isdecimal() or len(number) > _MOST_DIGITS:
                raise ValueError(f"level {text[:80]!r}: {kind} takes a number of {what}, as in '{kind}:4'")
            return Word(kind, number=int(number))
    path, at, suffix = text.rpartition("@")
    cast = suffix if at and _is_cast(suffix) else None
    path = path if cast else text
    if path == _MTP or path.startswith(f"{_MTP}:"):
        return Word("mtp", path=_mtp_path(path), cast=cast)
    if is_hub_name(path) or _is_there(path):
        return Word("load", path=path, cast=cast)
    words = _words()
    if len(parts := [part for part in SEPARATORS.split(text) if part]) > 1:
        raise ValueError(f"level {text!r} is no folder: several levels are several entries of the list, as in {parts}")
    alike = [] if text in FORMATS else difflib.get_close_matches(text.lower(), words, n=1)
    meant, told = f"; did you mean {alike[0]!r}" if alike else "", ", ".join(words)
    raise ValueError(f"level {text!r} is neither an existing folder nor a known word{meant}; words are {told}")


def _mtp_path(text: str) -> str | None:
    """The folder or hub name behind "mtp:", None for "mtp" alone."""
    path = text.removeprefix(f"{_MTP}:") if text != _MTP else None
    if path is not None and not (is_hub_name(path) or _is_there(path)):
        raise ValueError(f"level {text[:80]!r}: mtp takes an existing folder or a hub name, as in 'mtp:FOLDER'")
    return path


def is_hub_name(path: str) -> bool:
    """Whether a text can be the name of a model on the hub, by its form."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~"))


def _is_there(path: str) -> bool:
    """Whether a text names a folder, or a GGUF file; most texts are no path, and some could be none."""
    try:
        return bool(path) and (Path(path).is_dir() or is_gguf(path))
    except OSError:  # too long for a name
        return False


def is_head_folder(path: str) -> bool:
    """Whether the config.json of a folder or hub name is of a head that drafts with its target's hidden states, read
    here or not."""
    return head_kind(path) is not None


def head_kind(path: str) -> str | None:
    """Of such a head what kind it is, "eagle3", "mtp" or what the `speculators` package calls it; None for none."""
    file = _config_file(path)
    if file is None:
        return None
    try:
        said = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None  # whoever loads a model from it says what is wrong
    if not isinstance(said, dict):
        return None
    names = said.get("architectures")
    names = names if isinstance(names, list) else []
    kind = "eagle3" if any(_HEAD_CLASS in str(name) for name in names) else None
    return str(said.get("speculators_model_type", kind)) if "speculators_model_type" in said else kind


def require_no_head(path: str) -> None:
    """ValueError for a folder or hub name that holds a head where a model is asked for."""
    if is_head_folder(path):
        raise ValueError(f"{path!r} holds a trained head, which is no model: give it as a level of its target")


def _config_file(path: str) -> Path | None:
    """The config.json of a folder, or of a hub name where the hub or its cache has one; the hub is asked once."""
    file = Path(path) / "config.json"
    if file.is_file():
        return file
    if Path(path).exists() or not is_hub_name(path):
        return None
    if path not in _CONFIGS:
        if why_not_on_hub(path) is not None:
            return None  # as below
        quiet = ("missing_entries", "connection_errors", "gated_repo")
        found = cached_file(path, "config.json", **{f"_raise_exceptions_for_{what}": False for what in quiet})
        if found is None:
            return None  # whoever loads it says why
        _CONFIGS[path] = Path(found)
    return _CONFIGS[path]


def _is_cast(text: str) -> bool:
    return any(cast.word == text for record in FORMATS.values() for cast in record.casts)


def _says_enough(found: Spelled) -> bool:
    """Whether a word names a level: "w4" alone is a model's weights."""
    return found.activation_bits is not None or not found.family.tells_activations


def _words() -> list[str]:
    """Every word for a level, for messages."""
    parts_first = sorted(FORMATS.values(), key=lambda record: not record.reads_part)
    examples = [word for record in parts_first for word in record.level_examples]
    return list(dict.fromkeys([*casts(), *examples, *_OTHER_WORDS]))


def as_words(levels: Iterable[Any]) -> list[Any]:
    """The levels, path objects among them as the words that name their folders, everything else as it is.

    A path object is a folder whatever it is called: one named "mxfp4" is no cast. ValueError where there is none; a
    word or a hub name is a string.
    """
    return [_folder_word(level) if isinstance(level, os.PathLike) else level for level in levels]


def _folder_word(path: os.PathLike) -> str:
    text = os.fsdecode(path)
    if not Path(text).is_dir():
        raise ValueError(
            f"level {path!r} is not an existing folder; pass a word or a hub name as a string, as in "
            "'mxfp4' or 'PATH@mxfp4'"
        )
    text = text if "/" in text else f"./{text}"  # no word has a slash, and none of "PATH@mxfp4" ends with one
    return f"{text}/" if "@" in text else text
