"""How does a whole model become one compiled call, on the very tensors it has?

`prepare` builds a compiled decoder over a model's weights and remembers it; `restore` forgets it. Modules stay as they
are: BF16 and float32 weights are read in place, packed weights are put into the kernels' order in place.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from .. import ops
from ..ops.compiled_decoder import compiled_decoder, has_compiled_decoder, set_linear
from . import architecture, compiled_weights, rotary
from .architecture import UnknownArchitecture
from .device_decoder import DeviceDecoder, device_of
from .linear import KernelLinear, is_dense
from .prepared import bit_choices, drop_decoders, forget, is_prepared, remember, say, switches, up_to_date
from .switch import PrecisionSwitch


class FusedDecoder:
    """A model's compiled decoder: `handle` has one call per step (kernels_ext/bindings_decoder.cpp).

    vocab_size: entries of its logits. dtype: of its keys and values. max_positions: the length past which the model's
    rotation changes for the whole row, so that cached keys would no longer fit; None where it never does.
    bit_choices: what its calls may ask of the packed weights, () where it has none.
    """

    def __init__(self, model: nn.Module):
        """UnknownArchitecture where the compiled decoder cannot run the model; KernelError without kernels."""
        found = compiled_weights.read(model)
        self.sizes, self.dtype = found.sizes, found.dtype
        self.vocab_size, self.num_layers = found.sizes.vocab, len(found.layers)
        self._rotary, self._kinds = model.model.rotary_emb, found.rope_kinds
        self.max_positions, self.positions = rotary.rotary_border(model), 0
        self._growing = threading.Lock()
        self.handle = compiled_decoder(found.sizes, found.dtype, found.embedding, found.final_norm)
        self.reserve_positions(rotary.FIRST_POSITIONS)
        for layer in found.layers:
            self.handle.add_layer(layer.norms, layer.window, layer.rope_table)
            for name, weight in layer.linears.items():
                set_linear(self.handle, name, weight)
        set_linear(self.handle, "head", found.head)
        self.bit_choices = bit_choices(model)
        self.handle.set_dequantize(_multiply(switches(model)) == "dequant")

    def reserve_positions(self, count: int) -> None:
        """Rotary tables for at least `count` positions (fewer only where the rotation changes beyond them)."""
        with self._growing:
            positions = rotary.grown_positions(count, self.positions, self.max_positions)
            if positions == self.positions:
                return
            for index, table in enumerate(rotary.rope_tables(self._rotary, self._kinds, positions)):
                self.handle.set_rope(index, *table)
            self.positions = positions  # last: other threads look at it

    def new_kv(self, batch: int, slots: int) -> Tensor:
        """Keys and values `[layers, 2, batch, kv_heads, slots, head_dim]`, zeros."""
        sizes = self.sizes
        shape = (self.num_layers, 2, batch, sizes.kv_heads, slots, sizes.head_dim)
        return torch.zeros(shape, dtype=self.dtype)


def prepare(model: nn.Module) -> nn.Module:
    """Let `model` decode through compiled steps, batch-invariant: a token's bits never depend on the rest of the call.

    Returns the model. No weight is copied. Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (text) and Phi-3 run as one
    compiled call per step, on a GPU as kernels that a CUDA graph can hold; of other architectures each linear runs
    through its kernel, said once. From then on plain `model.generate` decodes this way too where it can (greedy and
    sampling); a call that it cannot serve runs in transformers' own loop, which is said once. A later change of the
    weights, or of what a PrecisionSwitch says, is noticed (a cast of them made before a change through `.data` is not
    made anew: it drafts worse, no token changes; on a GPU norms and biases changed through `.data` go unnoticed).
    A deep copy is not prepared. On a GPU the weights of q, k, v and of gate, up move together, as views of one tensor.
    KernelError when no kernels are built (with the command that builds them), TypeError for what is no model,
    ValueError when the model is on several devices or on one that has no kernels, or when its weights are neither
    bfloat16 nor, on the CPU, float32.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepare takes a model, not a {type(model).__name__}")
    device = _one_device(model)
    if device.type == "cpu" and not has_compiled_decoder():
        raise ops.KernelError(f"prepare needs the compiled kernels: {ops.why_not_compiled()}")
    if device.type == "cuda":
        _require_gpu_serves(model, device)
    try:
        up_to_date(model, FusedDecoder if device.type == "cpu" else DeviceDecoder)
    except UnknownArchitecture as error:
        _serve_linears(model, error)
    remember(model)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `prepare`, also in a copy of a prepared model; one that is not prepared stays as it is. Returns the
    model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"restore takes a model, not a {type(model).__name__}")
    served = [module for module in model.modules() if type(module) is KernelLinear]
    forget(model)
    for module in served:
        module.__class__ = nn.Linear
    return model


def _one_device(model: nn.Module) -> torch.device:
    """Where the model is; ValueError for several devices, or one that no kernels exist for."""
    places = list(dict.fromkeys(parameter.device for parameter in model.parameters()))
    if len(places) > 1:
        raise ValueError(
            f"prepare: the model is on {places[0]} and {places[1]}; a compiled decoder needs it on one device, "
            "load it without device_map, or with device_map={'': 0}"
        )
    device = places[0] if places else torch.device("cpu")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"prepare: the model is on {device}; there are compiled decoders for the CPU and for CUDA")
    return device


def _require_gpu_serves(model: nn.Module, device: torch.device) -> None:
    reason = ops.why_no_cuda_kernels(device)
    if reason is not None:
        raise ops.KernelError(f"prepare needs the CUDA kernels: {reason}")
    for name, module in model.named_modules():
        if (is_dense(module) or isinstance(module, nn.Embedding)) and module.weight.dtype != torch.bfloat16:
            raise ValueError(
                f"prepare: {name}.weight is {module.weight.dtype} on {device}, where the kernels take bfloat16: load "
                "the model with dtype=torch.bfloat16"
            )


def fused_decoder(model: nn.Module) -> FusedDecoder | None:
    """The compiled decoder of a model, built when first asked for and again when its weights changed.

    None where there is none: no kernels, autocast, a model off the CPU, or one the decoder does not know (said once).
    """
    if not has_compiled_decoder() or torch.is_autocast_enabled("cpu"):
        return None
    if device_of(model).type == "cuda":
        return None  # device_decoder's to serve, or to say why not
    if not is_prepared(model) and not all(p.is_cpu for p in model.parameters()):
        return None  # nobody asked for a compiled decoder there
    try:
        architecture.require_known(model)
        return up_to_date(model, FusedDecoder)
    except UnknownArchitecture as error:
        drop_decoders(model)
        say(f"{type(model).__name__} runs module by module: {error}")
        return None


def _serve_linears(model: nn.Module, reason: UnknownArchitecture) -> None:
    linears = [m for m in model.modules() if is_dense(m)]
    odd = next((m for m in linears if m.weight.dtype not in (torch.bfloat16, torch.float32)), None)
    if odd is not None:
        raise ValueError(f"prepare: weights are {odd.weight.dtype}; load the model in bfloat16 or float32")
    for linear in linears:
        linear.__class__ = KernelLinear
    say(f"the {len(linears)} linear layers of {type(model).__name__} run through the kernels one by one: {reason}")


def _multiply(found: list[PrecisionSwitch]) -> str:
    ways = {switch.multiply for switch in found}
    if len(ways) > 1:
        raise UnknownArchitecture(f"its packed layers multiply in {len(ways)} ways: {', '.join(sorted(ways))}")
    return ways.pop() if ways else "fused"
