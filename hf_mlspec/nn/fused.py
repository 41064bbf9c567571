"""How does a whole model become one compiled call, on the very tensors it has?

`prepare` builds a compiled decoder over a model's weights and remembers it; `restore` forgets it. Modules stay as they
are: BF16 and float32 weights are read in place, packed weights are put into the kernels' order in place.
"""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import ops
from ..ops.compiled_decoder import compiled_decoder, has_compiled_decoder, set_linear
from . import architecture
from .architecture import UnknownArchitecture
from .linear import KernelLinear, is_dense
from .packed import PackedLinear
from .replace import fingerprint
from .switch import PrecisionSwitch

logger = logging.getLogger(__name__)
_FIRST_POSITIONS = 1024


class FusedDecoder:
    """A model's compiled decoder: `handle` has one call per step (kernels_ext/bindings_decoder.cpp).

    vocab_size: entries of its logits. dtype: of its keys and values. max_positions: the length past which the model's
    rotation changes for the whole row, so that cached keys would no longer fit; None where it never does.
    activation_choices: the widths of activations that its calls may ask of the 4-bit weights, () where it has none.
    """

    def __init__(self, model: nn.Module):
        """UnknownArchitecture where the compiled decoder cannot run the model; KernelError without kernels."""
        found = architecture.read(model)
        self.sizes, self.dtype = found.sizes, found.dtype
        self.vocab_size, self.num_layers = found.sizes.vocab, len(found.layers)
        self._rotary, self._kinds = model.model.rotary_emb, found.rope_kinds
        self.max_positions, self.positions = _rotary_border(model), 0
        self._growing = threading.Lock()
        self.handle = compiled_decoder(found.sizes, found.dtype, found.embedding, found.final_norm)
        self.reserve_positions(_FIRST_POSITIONS)
        for layer in found.layers:
            self.handle.add_layer(layer.norms, layer.window, layer.rope_table)
            for name, weight in layer.linears.items():
                set_linear(self.handle, name, weight)
        set_linear(self.handle, "head", found.head)
        switches = _switches(model)
        self.activation_choices = tuple(b for b in (16, 8, 4) if switches and all(b in s.choices for s in switches))
        self.handle.set_dequantize(_multiply(switches) == "dequant")

    def reserve_positions(self, count: int) -> None:
        """Rotary tables for at least `count` positions (fewer only where the rotation changes beyond them)."""
        with self._growing:
            if count <= self.positions or self.positions == self.max_positions:
                return
            positions = max(count, 2 * self.positions, _FIRST_POSITIONS)
            positions = positions if self.max_positions is None else min(positions, self.max_positions)
            for index, table in enumerate(architecture.rope_tables(self._rotary, self._kinds, positions)):
                self.handle.set_rope(index, *table)
            self.positions = positions  # last: other threads look at it

    def new_kv(self, batch: int, slots: int) -> Tensor:
        """Keys and values `[layers, 2, batch, kv_heads, slots, head_dim]`, zeros."""
        sizes = self.sizes
        shape = (self.num_layers, 2, batch, sizes.kv_heads, slots, sizes.head_dim)
        return torch.zeros(shape, dtype=self.dtype)


@dataclass
class _Prepared:
    fingerprint: tuple
    decoder: FusedDecoder | None  # None: an unknown architecture, linear by linear
    asked: bool  # by the user, not by a call with levels


_prepared: weakref.WeakKeyDictionary[nn.Module, _Prepared] = weakref.WeakKeyDictionary()
_said: set[str] = set()
_building = threading.Lock()  # threads that ask for the same decoder get one


def prepare(model: nn.Module) -> nn.Module:
    """Let `model` decode through compiled steps, batch-invariant: a token's bits never depend on the rest of the call.

    Returns the model. No weight is copied. Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (text) and Phi-3 run as one
    compiled call per step; of other architectures each linear runs through its kernel, said once. From then on plain
    `model.generate` decodes this way too where it can (greedy and sampling); a call that it cannot serve runs in
    transformers' own loop, which is said once. A later change of the weights, or of what a PrecisionSwitch says, is
    noticed (a cast of them made before a change through `.data` is not made anew: it drafts worse, no token changes).
    A deep copy is not prepared.
    KernelError when no kernels are built (with the command that builds them), TypeError for what is no model,
    ValueError when the model is not on the CPU or its weights are neither bfloat16 nor float32.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepare takes a model, not a {type(model).__name__}")
    if not has_compiled_decoder():
        raise ops.KernelError(f"prepare needs the compiled kernels: {ops.why_not_compiled()}")
    elsewhere = next((p.device for p in model.parameters() if not p.is_cpu), None)
    if elsewhere is not None:
        raise ValueError(f"prepare: the model is on {elsewhere}; this version has compiled decoders for the CPU only")
    try:
        decoder = FusedDecoder(model)
    except UnknownArchitecture as error:
        _serve_linears(model, error)
        decoder = None
    _prepared[model] = _Prepared(_fingerprint(model), decoder, True)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `prepare`, also in a copy of a prepared model; ValueError where there is nothing to undo."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"restore takes a model, not a {type(model).__name__}")
    entry = _prepared.pop(model, None)
    served = [module for module in model.modules() if type(module) is KernelLinear]
    if entry is None and not served:
        raise ValueError(f"restore: this {type(model).__name__} is not prepared")
    for module in served:
        module.__class__ = nn.Linear
    return model


def is_prepared(model: nn.Module) -> bool:
    """Whether the user called `prepare` on the model."""
    entry = _prepared.get(model)
    return entry is not None and entry.asked


def fused_decoder(model: nn.Module) -> FusedDecoder | None:
    """The compiled decoder of a model, built when first asked for and again when its weights changed.

    None where there is none: no kernels, autocast, a model off the CPU, or one the decoder does not know (said once).
    """
    if not has_compiled_decoder() or torch.is_autocast_enabled("cpu"):
        return None
    if not is_prepared(model) and not all(p.is_cpu for p in model.parameters()):
        return None  # nobody asked for a compiled decoder there
    try:
        architecture.require_known(model)
        with _building:
            return _up_to_date(model)
    except UnknownArchitecture as error:
        _say(f"{type(model).__name__} runs module by module: {error}")
        return None


def _up_to_date(model: nn.Module) -> FusedDecoder:
    entry = _prepared.get(model)
    if entry is None or entry.decoder is None or entry.fingerprint != _fingerprint(model):
        decoder = FusedDecoder(model)
        entry = _Prepared(_fingerprint(model), decoder, entry is not None and entry.asked)
        _prepared[model] = entry
    return entry.decoder


def _serve_linears(model: nn.Module, reason: UnknownArchitecture) -> None:
    linears = [m for m in model.modules() if is_dense(m)]
    odd = next((m for m in linears if m.weight.dtype not in (torch.bfloat16, torch.float32)), None)
    if odd is not None:
        raise ValueError(f"prepare: weights are {odd.weight.dtype}; load the model in bfloat16 or float32")
    for linear in linears:
        linear.__class__ = KernelLinear
    _say(f"the {len(linears)} linear layers of {type(model).__name__} run through the kernels one by one: {reason}")


def _say(message: str) -> None:
    """Once per message, which names the class of the model."""
    if message not in _said:
        _said.add(message)
        logger.warning("%s", message)


def _fingerprint(model: nn.Module) -> tuple:
    """The weights, what norms and biases hold, for the decoder copied those, and how packed layers multiply."""
    vectors = tuple(hash(_bytes(p)) for p in model.parameters() if p.ndim == 1)
    return fingerprint(model), vectors, tuple((s.activation_bits, s.multiply) for s in _switches(model))


def _switches(model: nn.Module) -> list[PrecisionSwitch]:
    """Those of a model's packed layers, each once."""
    return list({id(m.switch): m.switch for m in model.modules() if isinstance(m, PackedLinear)}.values())


def _multiply(switches: list[PrecisionSwitch]) -> str:
    ways = {switch.multiply for switch in switches}
    if len(ways) > 1:
        raise UnknownArchitecture(f"its packed layers multiply in {len(ways)} ways: {', '.join(sorted(ways))}")
    return ways.pop() if ways else "fused"


def _bytes(vector: Tensor) -> bytes:
    return vector.detach().contiguous().view(torch.uint8).numpy().tobytes()


def _rotary_border(model: nn.Module) -> int | None:
    """The length past which a rotary embedding changes its frequencies, None where it never does."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    borders = [
        one.get("original_max_position_embeddings") or model.config.max_position_embeddings
        for one in (rope, *(value for value in rope.values() if isinstance(value, dict)))
        if one.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(borders, default=None)
