"""What does an MLSpecConfig ask of calibration, and what of it does not fit together?"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...calibration.coding import DAMPING
from ...calibration.methods import ROW_SCALED, Method, method_for, word_of

SAMPLES, TOKENS = 32, 512
AUTO = "auto"  # activation_clip: the one that serves the model best
CHOICES = {"seed": 0, "damping": DAMPING, "act_order": False, "search_bits": None, "rotations": None}  # of methods
OPTIONS = {"tokenizer": None, "samples": SAMPLES, "tokens": TOKENS, **CHOICES}  # all that go with a method


@dataclass(frozen=True)
class Request:
    """How a model is calibrated once its weights are loaded. text: anything that `hf_mlspec.quantize` takes. given:
    the options that were given, of OPTIONS."""

    method: Method
    text: Any
    given: Mapping[str, Any]

    def __deepcopy__(self, memo: dict) -> Request:
        return self  # a text may be a stream, or a data set of any size

    def option(self, name: str) -> Any:
        """What was given, or the default."""
        return self.given.get(name, OPTIONS[name])

    @property
    def choices(self) -> dict[str, Any]:
        """All options of methods."""
        return {name: self.option(name) for name in CHOICES}

    def told(self) -> dict[str, Any]:
        """For to_dict: what was given, without text and tokenizer, so that nobody reads it back and has another
        model: there is no method without a text."""
        told = {name: own for name, own in self.given.items() if name != "tokenizer"}
        if told.get("rotations") is not None:
            told["rotations"] = os.fspath(told["rotations"])
        return {"method": self.method.word, **told}


def steps_of(method: Any, format: Any, smoothing: Any, rotation: Any, asked: dict[str, Any]) -> Any:
    """The word of the method with the steps that ``smoothing`` and ``rotation`` name; a file of rotations becomes the
    option ``rotations`` in ``asked``. ValueError, of MLSpecConfig, for other formats and values."""
    if smoothing is None and rotation is None:
        return method
    name, value = ("smoothing", smoothing) if rotation is None else ("rotation", rotation)
    if format != ROW_SCALED:
        raise ValueError(f"MLSpecConfig: {name} is {value!r}, a word of format {ROW_SCALED!r}: use it there, or name "
                         "a method with that step")  # fmt: skip
    if rotation is not None and not isinstance(rotation, str | os.PathLike):
        raise TypeError(f"MLSpecConfig: rotation is a {type(rotation).__name__}, expected 'hadamard' or a file")
    if rotation not in (None, "hadamard"):
        if asked.get("rotations") is not None:
            raise ValueError("MLSpecConfig: rotation and rotations name files: give one of them")
        asked["rotations"] = rotation
    try:
        return word_of(method, smoothing, rotation)
    except ValueError as error:
        raise ValueError(f"MLSpecConfig: {error}") from error


def requested(
    method: Any, format: str | None, calibration: Any, given: dict[str, Any]
) -> tuple[Request | None, dict[str, Any] | None]:
    """What is to be done, and the record of what was done: one or neither.

    given: options of OPTIONS. ValueError, of MLSpecConfig, for a method without a text and the reverse, a method that
    is unknown or does not fit ``format``, and options that do not fit the method.
    """
    if method is None:
        for name in given:
            raise ValueError(f"MLSpecConfig: {name} goes with a method, which chooses codes on a text: add method")
        return None, _record(calibration)
    try:
        request = Request(method_for(method, format), calibration, given)
        require_choices(request.method, **request.choices)
    except (TypeError, ValueError) as error:
        raise type(error)(f"MLSpecConfig: {error}") from error
    if calibration is None:
        raise ValueError(
            f"MLSpecConfig: method {method!r} chooses codes on a text: add calibration, a text file, texts, a data "
            "set or rows of token ids"
        )
    return request, None


def _record(calibration: Any) -> dict[str, Any] | None:
    """As config.json has it. It is told from text by its word for the method."""
    if calibration is not None and not (type(calibration) is dict and "method" in calibration):
        raise ValueError(
            f"MLSpecConfig: calibration is a {type(calibration).__name__}, and there is no method that chooses codes "
            "on it: add one, such as method='gptq'"
        )
    return copy.deepcopy(calibration)


def require_seed(seed: Any) -> None:
    """ValueError for what is no whole number."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed is {seed!r}, it must be a whole number")


def require_choices(
    chosen: Method, seed: int, damping: float, act_order: bool, search_bits: int | None,
    rotations: str | os.PathLike | None,
) -> None:  # fmt: skip
    """ValueError for a value that cannot be, and for an option that the method has no use for."""
    require_seed(seed)
    if isinstance(damping, bool) or not isinstance(damping, int | float) or not 0 < damping < math.inf:
        raise ValueError(f"damping is {damping!r}, it must be a number above 0")
    if not isinstance(act_order, bool):
        raise ValueError(f"act_order is {act_order!r}, it must be True or False")
    if act_order and chosen.coding != "gptq":
        raise ValueError(f"act_order is GPTQ's, method {chosen.word!r} has none: leave it out")
    if act_order and chosen.reorders:
        raise ValueError(f"act_order and {chosen.word!r} are two orders of a layer's inputs: leave act_order out")
    if damping != DAMPING and chosen.coding != "gptq":
        raise ValueError(f"damping is GPTQ's, method {chosen.word!r} has none: leave it out")
    if search_bits not in (None, 4, 8):
        raise ValueError(f"search_bits is {search_bits!r}, SmoothQuant's search assumes 8 or 4")
    if search_bits is not None and chosen.scaling != "smoothquant":
        raise ValueError(f"search_bits is SmoothQuant's, method {chosen.word!r} has no such search: leave it out")
    if rotations is None:
        return
    if not isinstance(rotations, str | os.PathLike):
        raise TypeError(f"rotations is a {type(rotations).__name__}, it must be the name of a file such as R.bin")
    if not chosen.rotates or chosen.reorders:
        raise ValueError(f"rotations are of quarot and quarot+gptq, method {chosen.word!r} has none: leave them out")
