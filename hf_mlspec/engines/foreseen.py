"""Would a compiled decoder run a model that has no memory yet? Its class, sizes and weight formats tell."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .. import ops
from ..nn.linear import is_transposed
from ..nn.packed import PackedLinear
from ..nn.transforms import ORDER
from ..ops.compiled_decoder import has_compiled_decoder
from .architecture import UnknownArchitecture, outline, require_format
from .cpu import weights as cpu
from .cuda import weights as cuda
from .cuda.served import require_read
from .rows import cache_format_of
from .slots import order_of, require_experts, require_one_order, rotation_of, slot_of

_SLOTS = {"cpu": cpu.SLOTS, "cuda": cuda.SLOTS}
_READ_TOGETHER = (("q", "k", "v"), ("gate", "up"), ("delta_qkv", "delta_z"), ("delta_b", "delta_a"))


def why_not_decoded(model: nn.Module, word: str) -> str | None:
    """Why the compiled decoder of the "cpu" or "cuda" engine would not run a model on the meta device once it is
    loaded there; None where it would. Orders of inputs are looked at where they have memory."""
    if word == "cpu" and not has_compiled_decoder():
        return f"no compiled kernels: {ops.why_not_compiled()}"
    if word == "cuda" and (reason := ops.why_no_cuda_kernels()) is not None:
        return reason
    try:
        if word == "cuda":
            require_read(cache_format_of(model), torch.device("cuda"))
        found = outline(model, torch.device("meta"), word)
        for block in found.blocks:
            _require_read(block.modules, word)
            if block.experts is not None:
                require_experts(block.experts, word.upper())
                _require_read(block.experts.shared, word)
        beside = {} if found.inputs is None else {"token_inputs": found.inputs.projection}
        _require_read({**beside, "lm_head": found.head}, word)
    except UnknownArchitecture as error:
        return str(error)
    return None


def _require_read(modules: Mapping[str, nn.Module], word: str) -> None:
    for name, module in modules.items():
        if isinstance(module, PackedLinear):
            slot_of(_SLOTS[word], module, name, word.upper())
        else:
            turned = is_transposed(module) and not module.weight.is_contiguous()  # a decoder may have laid it out so
            require_format(module.weight.t() if turned else module.weight, name, halves=word == "cpu")
        rotation_of(module, name)
    for group in _READ_TOGETHER:
        if len({_stored(modules[name]) for name in group if name in modules}) > 1:
            raise UnknownArchitecture(f"its {', '.join(group)} projections have weights of different formats")
        there = [name for name in group if name in modules]
        if len(there) > 1:
            require_one_order([_order(modules[name]) for name in there], ", ".join(there))


def _order(module: nn.Module) -> Tensor | None:
    """Of a module that orders its inputs, where the order is known; None for inputs as they come."""
    known = isinstance(module, PackedLinear) and module.transform is ORDER and not module.transform_order.is_meta
    return order_of(module) if known else None


def _stored(module: nn.Module) -> tuple:
    if isinstance(module, PackedLinear):
        return module.format, getattr(module, "group_size", None), module.switch.bits
    return (module.weight.dtype,)
