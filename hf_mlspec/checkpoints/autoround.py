"""How is an AutoRound checkpoint read? Its words are those of GPTQ or AWQ; only the settings are its own.

    packing_format                           words         zero points
    auto_round:auto_gptq, auto_round:gptq    GPTQ          one less, each code by itself
    auto_round, auto_round:gptqmodel         GPTQ          as they are
    auto_round:auto_awq, auto_round:awq      AWQ "gemm"    as they are

GPTQ words have 2 to 8 bits, AWQ words 4. ``extra_config`` has settings of single layers, by name or by a regular
expression: other bits, groups and symmetry, or 16 bits, which leaves a layer dense. Scales may be negative.

Source: arXiv 2309.05516; the layout is that of auto-round 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .awq import AwqReader
from .codes import unpack_words
from .gptq import GptqReader
from .layer import LayerPlan, StoredLayer, require_tensor
from .scales import SCALES

BITS = range(2, 9)
_LESS, _PLAIN, _AWQ = "one less", "as they are", "awq"
_PACKINGS = {
    "auto": _LESS,
    "auto_round:auto_gptq": _LESS,
    "auto_round:gptq": _LESS,
    "auto_round": _PLAIN,
    "auto_round:gptqmodel": _PLAIN,
    "auto_round:auto_awq": _AWQ,
    "auto_round:awq": _AWQ,
}
_DEFAULT = "auto_round:auto_gptq"
_TENSORS = {"qweight", "qzeros", "scales", "g_idx", "bias"}
_SETTINGS = ("bits", "group_size", "sym", "data_type", "act_bits")


class AutoRoundReader:
    """Reads folders of Intel's AutoRound: integers of 2 to 8 bits in GPTQ's words, of 4 bits in AWQ's, any groups."""

    method, title = "auto-round", "AutoRound"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: ``quantization_config`` of config.json. ValueError for a packing that is not read, rotated weights,
        and settings that no integers have."""
        packing = str(config.get("packing_format") or _DEFAULT)
        if packing not in _PACKINGS:
            known = ", ".join(repr(word) for word in _PACKINGS if word != "auto")
            raise ValueError(f"this AutoRound checkpoint has packing_format {packing!r}: {known} are read")
        if config.get("rotation_config"):
            raise ValueError(
                "this AutoRound checkpoint's weights were rotated (rotation_config): a model that does not rotate its "
                "inputs, too, would compute something else, and none here does yet"
            )
        self._packing = _PACKINGS[packing]
        self._settings = {"bits": 4, "group_size": 128, "sym": True} | _known(config)
        self._layers = _layer_settings(config.get("extra_config"))
        if self._settings["bits"] != 16:  # then some layers alone are quantized
            _require_integers(self._settings, "this AutoRound checkpoint", self._packing)

    def holds(self, layer: StoredLayer) -> bool:
        """Whether the layer has words of codes."""
        return "qweight" in layer.tensors

    def plan(self, layer: StoredLayer) -> LayerPlan:
        """ValueError or TypeError naming layer and tensor, as `Reader.plan`."""
        own = self._of(layer.name)
        _require_integers(own, layer.name, self._packing)
        unknown = sorted(layer.tensors.keys() - _TENSORS)
        if unknown:
            raise ValueError(f"{layer.tensors[unknown[0]].place} is no tensor of an AutoRound layer that is read here")
        size = own["group_size"] if own["group_size"] > 0 else layer.in_features
        groups = -(-layer.in_features // size)
        require_tensor(layer, "scales", SCALES, (groups, layer.out_features))
        own = own | {"group_size": size}
        return (_AwqWords if self._packing == _AWQ else _GptqWords)(own, self._packing).plan(layer)

    def _of(self, name: str) -> dict[str, Any]:
        """The settings of a layer: by its name, which may have a prefix that a model without head lacks, else by the
        first expression that matches, else the config's own."""
        named = (own for word, own in self._layers.items() if word == name or word.endswith(f".{name}"))
        found = next(named, None)
        if found is None:
            found = next((own for word, own in self._layers.items() if _matches(word, name)), {})
        return self._settings | found


def _known(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in _SETTINGS if settings.get(name) is not None}


def _layer_settings(extra: object) -> dict[str, dict[str, Any]]:
    """``extra_config``, of each layer what is of use here. ValueError where it is something else."""
    extra = {} if extra is None else extra
    if not isinstance(extra, Mapping) or not all(isinstance(own, Mapping) for own in extra.values()):
        raise ValueError("this AutoRound checkpoint's extra_config holds no settings by layer: it is damaged")
    return {str(name): _known(own) for name, own in extra.items()}


def _matches(word: str, name: str) -> bool:
    try:
        return re.search(word, name) is not None
    except re.error:
        return False


def _require_integers(own: Mapping[str, Any], what: str, packing: str) -> None:
    """ValueError, which begins with ``what``, for settings that are not read."""
    bits, size, known = own["bits"], own["group_size"], (4,) if packing == _AWQ else BITS
    if isinstance(bits, bool) or bits not in known:
        told = "4" if packing == _AWQ else f"{BITS[0]} to {BITS[-1]}"
        raise ValueError(f"{what} has {bits!r} bits in config.json, {told} are read in this packing_format")
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise ValueError(f"{what} has group_size {size!r} in config.json, a number above 0 or -1 is read")
    if not isinstance(own["sym"], bool):
        raise ValueError(f"{what} has sym {own['sym']!r} in config.json, true or false is read")
    if str(own.get("data_type", "int")) not in ("int", "int_sym", "int_asym"):
        raise ValueError(f"{what} has data_type {own['data_type']!r} in config.json, 'int' is read")
    if own.get("act_bits", 16) not in (16, 32):
        raise ValueError(f"{what} has activations of {own['act_bits']!r} bits in config.json, 16 are read")


class _GptqWords(GptqReader):
    """One layer in GPTQ's words. packing: how its zero points are stored."""

    title, widths = AutoRoundReader.title, tuple(BITS)

    def __init__(self, own: Mapping[str, Any], packing: str) -> None:
        super().__init__({"bits": own["bits"], "group_size": own["group_size"]})
        self._less, self._symmetric = packing == _LESS, own["sym"]

    def _zeros(self, words: Tensor, bits: int, out_features: int, place: str) -> Tensor:
        """uint8 ``[groups, out]``. Nothing is guessed: what config.json says is how auto-round itself reads them."""
        stored, largest = unpack_words(words, bits, out_features), (1 << bits) - 1
        if self._less and bool((stored == largest).any()):
            raise ValueError(
                f"{place} holds zero points of {largest + 1}, which codes of {bits} bits do not have: the checkpoint "
                "was written by an auto-round that wrote zero points of 0 wrong; write it again"
            )
        zero = stored + 1 if self._less else stored
        _require_middle(zero, self._symmetric, bits, place)
        return zero


class _AwqWords(AwqReader):
    """One layer in AWQ's words."""

    title = AutoRoundReader.title

    def __init__(self, own: Mapping[str, Any], packing: str) -> None:
        super().__init__({"bits": own["bits"], "group_size": own["group_size"]})
        self._symmetric = own["sym"]

    def _zeros(self, layer: StoredLayer, count: int) -> Tensor:
        zero = super()._zeros(layer, count)
        _require_middle(zero, self._symmetric, 4, layer.tensors["qzeros"].place)
        return zero


def _require_middle(zero: Tensor, symmetric: bool, bits: int, place: str) -> None:
    middle = torch.tensor(1 << (bits - 1), dtype=zero.dtype)
    if symmetric and bool((zero != middle).any()):
        found = int(zero[zero != middle][0])
        raise ValueError(
            f"{place} holds a zero point of {found}, and config.json says that the layer is symmetric, which makes "
            f"it {int(middle)}: sym or packing_format is wrong, or the file is damaged"
        )
