"""Which integers are behind the float weights of QuaRot's simulated quantization?

QuaRot's ``--save_qmodel_path`` (arXiv 2404.00456) is a torch.save of {"w_quantizers": {name: quantizer}, "model":
state_dict}, read with `read_pickle`. Weights are float16, already dequantized: integer * scale, rounded. A quantizer
has a scale and a zero point for every row. Modules are wrapped, so that names may have ``.module`` behind them, and
weights may be there twice. Integers are round(weight / scale), clamped to -8..7, and have to explain every weight
within the rounding of its dtype. The sign of a zero is not kept.

With groups (``--w_groupsize``) QuaRot keeps the scale of the last group only; such a file is refused, for its integers
do not follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..formats.damage import require_finite, require_positive
from ..formats.packing import pack_nibbles
from .layer import HeldTensor, ReadLayer, Stored, StoredLayer, require_tensor
from .llama_shape import LlamaShape
from .pickles import WeightQuantizer, held_tensors
from .quarot import (
    HADAMARD,
    RotatedCheckpoint,
    int4_or_dense,
    online_hadamard,
    require_untied,
    row_scaled,
    sort_others,
)
from .rotation import RotatedPlan, Rotation, require_heads
from .scales import exact_float16, fitting_group

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST = 15
_ELEMENTS = 1 << 20  # in flight
NOT_FLOAT16 = "its scales are no float16 numbers, and codes times rounded scales are not its weights"


@dataclass(frozen=True)
class QuantizerSettings:
    """Of one layer. bits: of its integers. symmetric: whether they lie around 0."""

    bits: int
    symmetric: bool


def sort_pickle(held: Any, file: Path, config: Mapping[str, Any]) -> RotatedCheckpoint:
    """What `read_pickle` made of ``file``, and the config.json of the model that was quantized.

    A model whose norms have one element each was rotated; one with whole norms was not. ValueError naming the file and
    what is wrong: no such dictionary, a tensor missing or of no known meaning, two copies that differ, a quantizer
    without scale, tied embeddings or heads whose rotations do not cancel in a rotated model.
    """
    quantizers = held.get("w_quantizers") if isinstance(held, Mapping) else None
    if not isinstance(quantizers, Mapping) or "model" not in held:
        raise ValueError(f"{file} holds no w_quantizers and model: QuaRot's --save_qmodel_path writes both")
    shape = LlamaShape.of_config(config)
    tensors = _unwrapped(held_tensors(held["model"], file))
    by_name = {_bare(name): quantizer for name, quantizer in quantizers.items()}
    rotated = _rotated(tensors, shape, file)
    layers, settings = _layers(tensors, by_name, shape, file)
    read = {f"{name}.{kind}" for name in layers for kind in ("weight", "had_K")}
    rest = [name for name in tensors if name not in read and "quantizer." not in name]
    # The norms of a rotated model are placeholders of one element, zero: their gains are in the linears behind them.
    ignored = {f"{norm}.weight" for norm in shape.norms()} if rotated else set()
    others, unused = sort_others(rest, tensors, shape, ignored)
    rotation = Rotation(False)
    if rotated:
        require_untied(shape, tensors)
        require_heads(shape.heads, shape.head_dim, str(file))
        rotation = Rotation(True, shape.norms(), shape.head_dim, shape.heads, shape.intermediate_size)
    return RotatedCheckpoint(layers, others, unused, rotation, SimulatedReader(shape, settings, rotated))


def _layers(
    tensors: Mapping[str, HeldTensor], quantizers: Mapping[str, Any], shape: LlamaShape, file: Path
) -> tuple[dict[str, StoredLayer], dict[str, QuantizerSettings]]:
    layers, settings = {}, {}
    for prefix, linear, out_features, in_features in shape.named_linears():
        name = f"{prefix}.{linear}"
        if f"{name}.weight" not in tensors:
            raise ValueError(f"{name}.weight is missing in {file}: it is of another model, or damaged")
        stored: dict[str, Stored] = {"weight": tensors[f"{name}.weight"]}
        if name in quantizers:
            found, settings[name] = _quantizer_tensors(name, quantizers[name], file)
            stored.update(found)
        if f"{name}.had_K" in tensors:
            stored[HADAMARD] = tensors[f"{name}.had_K"]
        layers[name] = StoredLayer(name, in_features, out_features, stored)
    return layers, settings


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "module")


def _unwrapped(tensors: Mapping[str, HeldTensor]) -> dict[str, HeldTensor]:
    """By names without ``.module``; ValueError for two that differ."""
    bare: dict[str, HeldTensor] = {}
    for name, tensor in tensors.items():
        first = bare.setdefault(_bare(name), tensor)
        if first is not tensor and not _same(first.tensor, tensor.tensor):
            raise ValueError(f"{first.place} and {name} are one module's and differ: which was used is not known")
    return bare


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return (one.data_ptr() == other.data_ptr() and one.stride() == other.stride()) or torch.equal(one, other)


def _rotated(tensors: Mapping[str, HeldTensor], shape: LlamaShape, file: Path) -> bool:
    found = {tensors[f"{norm}.weight"].shape for norm in shape.norms() if f"{norm}.weight" in tensors}
    if found <= {(1,)}:
        return True
    if found == {(shape.hidden_size,)} and all(f"{norm}.weight" in tensors for norm in shape.norms()):
        return False
    shapes = ", ".join(str(list(one)) for one in sorted(found))
    raise ValueError(
        f"{file}: norms have the shapes {shapes}; all [1] are of a rotated model, all [{shape.hidden_size}] of one "
        "that was not rotated"
    )


def _quantizer_tensors(name: str, quantizer: Any, file: Path) -> tuple[dict[str, Stored], QuantizerSettings]:
    if isinstance(quantizer, Mapping):
        plain, quantizer = quantizer, WeightQuantizer()
        quantizer.__setstate__(plain)
    if not isinstance(quantizer, WeightQuantizer):
        raise ValueError(f"{name}: its quantizer in {file} is a {type(quantizer).__name__}")
    scale, zero, bits = quantizer.value("scale"), quantizer.value("zero"), quantizer.value("bits", 4)
    symmetric = quantizer.value("sym", True)
    if not isinstance(scale, Tensor) or type(bits) is not int or not isinstance(symmetric, bool):
        raise ValueError(f"{name}: its quantizer in {file} has no scale, or bits {bits!r} and sym {symmetric!r}")
    found = {"scale": HeldTensor(f"{name} scale in {file}", scale.reshape(-1, 1))}
    if not symmetric:
        if not isinstance(zero, Tensor):
            raise ValueError(f"{name}: its quantizer in {file} is not symmetric and has no zero points")
        found["zero"] = HeldTensor(f"{name} zero in {file}", zero.reshape(-1, 1))
    return found, QuantizerSettings(bits, symmetric)


class SimulatedReader:
    """Reads the linears of `sort_pickle`."""

    method = "quarot"
    title = "QuaRot, simulated"

    def __init__(self, shape: LlamaShape, settings: Mapping[str, QuantizerSettings], rotated: bool) -> None:
        self.shape, self.settings, self.rotated = shape, settings, rotated

    def holds(self, layer: StoredLayer) -> bool:
        """Whether the layer has a quantizer."""
        return "scale" in layer.tensors

    def plan(self, layer: StoredLayer) -> RotatedPlan:
        """int4 where codes times float16 scales round to the stored weights, which are read for it; else dense, the
        weights as they are. ValueError or TypeError naming layer and tensor: shapes, dtypes, scales, zero points, a
        weight that is no integer times its scale, a Hadamard matrix that is missing or is none."""
        shape = (layer.out_features, layer.in_features)
        stored = {"weight": require_tensor(layer, "weight", _FLOATS, shape)}
        online = online_hadamard(layer, self.shape) if self.rotated else None
        settings = self.settings.get(layer.name)
        if settings is None or settings.bits != 4:
            why = "it is not quantized" if settings is None else f"it has {settings.bits} bits"
            require_finite(layer.name, "weight", stored["weight"].load())
            return RotatedPlan(layer, f"QuaRot, {why}", stored, _as_stored, why_dense=why, online=online)
        for name in ("scale",) if settings.symmetric else ("scale", "zero"):
            stored[name] = require_tensor(layer, name, _FLOATS, (shape[0], 1))
        loaded = {name: tensor.load() for name, tensor in stored.items()}
        require_positive(layer.name, "scale", loaded["scale"])
        group, kind = fitting_group(shape[1], shape[1]), int4_or_dense(None)
        codes, zero = recovered(layer.name, **loaded)
        if group is not None:
            fits = _explains(loaded["weight"], codes, zero, float16_scale(loaded["scale"]))
            kind = int4_or_dense(group, settings.symmetric) if fits else {"why_dense": NOT_FLOAT16}

        def read_layer(tensors: Mapping[str, Tensor]) -> ReadLayer:
            codes, zero = recovered(layer.name, **tensors)
            scale, zeros = float16_scale(tensors["scale"]), None if settings.symmetric else zero.to(torch.uint8)
            return ReadLayer(row_scaled(layer.name, pack_nibbles(codes), scale, zeros, group))

        stored_as = f"QuaRot, simulated, 4 bits{'' if settings.symmetric else ', zero points'}, a scale a row"
        return RotatedPlan(
            layer, stored_as, stored, read_layer if "format" in kind else _as_stored, **kind, online=online
        )


def _as_stored(tensors: Mapping[str, Tensor]) -> ReadLayer:
    return ReadLayer(tensors["weight"])


def recovered(name: str, weight: Tensor, scale: Tensor, zero: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Floats ``[out, in]``, scales ``[out, 1]`` above 0, integer zero points ``[out, 1]`` or None (8) -> codes 0..15
    uint8 ``[out, in]`` and zero points float32 ``[out, 1]``; value = (code - zero) * scale.

    ValueError naming ``name``, the row, and the numbers, for zero points beyond 0..15 and for a weight that differs
    from its integer times the scale by more than the rounding of both.
    """
    zeros = torch.full_like(scale, 8.0, dtype=torch.float32) if zero is None else zero.float()
    if not bool(((zeros >= 0) & (zeros <= _LARGEST) & (zeros == zeros.round())).all()):
        raise ValueError(f"{name}: zero holds numbers other than the integers 0 to {_LARGEST}")
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    step = max(1, _ELEMENTS // max(weight.shape[1], 1))
    for first in range(0, weight.shape[0], step):
        part = slice(first, first + step)
        wide, steps = weight[part].double(), scale[part].double()
        code = ((wide / steps).round() + zeros[part]).clamp(0, _LARGEST)
        values = (code - zeros[part]) * steps
        precision = torch.finfo(weight.dtype)
        far = ~((wide - values).abs() <= values.abs() * precision.eps + precision.smallest_normal * precision.eps)
        if bool(far.any()):
            row, column = far.nonzero()[0].tolist()
            raise ValueError(
                f"{name}: weight holds {int(far.sum())} numbers of rows {first} to {first + len(wide) - 1} that are "
                f"no integer times their row's scale, the first ({wide[row, column].item():g}, scale "
                f"{steps[row, 0].item():g}) at row {first + row}, column {column}: the file is damaged, or was "
                "written with --w_groupsize, whose scales it does not hold"
            )
        codes[part] = code.to(torch.uint8)  # NaN is far from everything
    return codes, zeros


def float16_scale(scale: Tensor) -> Tensor:
    """The scales in float16, rounded where they have to be."""
    exact = exact_float16(scale)
    return scale.to(torch.float16) if exact is None else exact


def _explains(weight: Tensor, codes: Tensor, zeros: Tensor, scale: Tensor) -> bool:
    """Whether codes times these scales, rounded to the weight's dtype, are the weight."""
    if not bool((scale.isfinite() & (scale > 0)).all()):
        return False
    step = max(1, _ELEMENTS // max(weight.shape[1], 1))
    parts = [slice(first, first + step) for first in range(0, weight.shape[0], step)]
    return all(
        torch.equal(((codes[part].float() - zeros[part]) * scale[part].float()).to(weight.dtype), weight[part])
        for part in parts
    )
