"""How does a whole model become one compiled call per step, on the very tensors it has?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...nn.shards import is_shared
from ...nn.switch import PrecisionSwitch
from ...ops.callbacks import address_of, width_chooser
from ...ops.compiled_decoder import (
    PLANES,
    Sizes,
    Weight,
    compiled_decoder,
    set_delta,
    set_delta_sizes,
    set_experts,
    set_linear,
)
from ...ops.layer_forms import LayerForm, TokenInputs
from ..architecture import CPU, Norm, UnknownArchitecture, rotary
from ..built import bit_choices, switches
from ..own_part import own_part
from . import weights
from .ranks import SharedSums
from .streamed import keep_failure, read_planes, reading_alone, taken_failure

_OF_MLP = "gate", "up", "down"


class CpuDecoder:
    """A model in compiled code: `handle` has one call per step (kernels_ext/bindings/cpu/decoder.cpp).

    num_layers: those that keep keys and values. num_recurrent: those that keep a state. cache_sizes: of each that
    keeps keys and values its key heads and elements of a head; `sizes` has the most of all.
    vocab_size: entries of its logits. dtype: of its keys and values. max_positions: the length past which the model's
    rotation changes for the whole row, so that cached keys would no longer fit; None where it never does.
    bit_choices: what its calls may ask of the packed weights, () where it has none. blocks: of the attention and the
    MLP of every layer in turn, outputs of its linears in bit-planes; 0 where others are among them.
    """

    def __init__(self, model: nn.Module):
        """UnknownArchitecture where it cannot run the model; KernelError without kernels."""
        self._part = own_part(model) if is_shared(model) else None
        found = weights.read(model if self._part is None else self._part.model)
        if self._part is not None:
            found = replace(found, sizes=replace(found.sizes, vocab=self._part.vocab))
        self.sizes, self.dtype, self.device = found.sizes, found.dtype, CPU
        self.vocab_size = found.sizes.vocab
        self.num_recurrent = sum(layer.delta is not None for layer in found.layers)
        forms = [layer.form for layer in found.layers if layer.delta is None]
        self.cache_sizes = _cache_sizes(forms, found.sizes)
        self.num_layers = len(self.cache_sizes)
        self._rotation = found.rotation
        self.max_positions, self.positions = rotary.rotary_border(model), 0
        self._known = rotary.known_positions(rotary.text_config(model))
        self._learned = None if found.positions is None else len(found.positions)
        self._growing = threading.Lock()
        norm = found.final_norm.weight, found.final_norm.bias
        self.handle = compiled_decoder(found.sizes, found.dtype, found.embedding, *norm)
        if found.positions is not None:
            self.handle.set_position_embedding(found.positions)
        self.reserve_positions(min(rotary.FIRST_POSITIONS, self._learned or rotary.FIRST_POSITIONS))
        self._reader = read_planes(self.handle, model)
        self._ranks = None if self._part is None else SharedSums(self.handle, self._part.ranks)
        _add_layers(self.handle, found)
        set_linear(self.handle, "head", found.head)
        self.bit_choices = bit_choices(model)
        self.blocks = [block for layer in found.layers for block in _blocks(layer.linears)]
        self.handle.set_dequantize(_multiply(switches(model)) == "dequant")

    def call(self, name: str, *arguments: Any, beside: CpuDecoder | None = None) -> tuple:
        """One call of `handle`. What streamed planes could not be read for is raised as it is. beside: another decoder
        that the call computes with."""
        own, readers = getattr(self.handle, name), [one._reader for one in (self, beside) if one and one._reader]
        if not readers and self._ranks is None:
            return own(*arguments)
        try:
            with reading_alone(*readers):
                found = own(*arguments)
        except RuntimeError as error:
            failure = taken_failure()
            if failure is None:
                raise
            raise failure from error
        if (failure := taken_failure()) is not None:  # planes came, and to let go of them failed: an interrupt
            raise failure
        return found

    def score_choosing(
        self, *arguments: Any, choose: Callable[[int, Tensor], list[int]], mixes: bool = False
    ) -> tuple:
        """`score_choosing` of `handle`. choose(block, inputs ``[tokens, hidden]``): how many planes each token reads;
        all of them as many, unless the call ``mixes`` them;
        what it raises is raised as it is. ValueError for planes that the weights do not have."""
        known = {own.weight for own in self.bit_choices}

        def chosen(block: int, inputs: Tensor) -> list[int] | None:
            try:
                widths = choose(block, inputs)
                if unknown := set(widths) - known:  # nobody looks behind the border
                    told = f"{unknown.pop()} planes were picked for block {block}: its weights have 1 to {max(known)}"
                    raise ValueError(told)
                return widths
            except BaseException as error:
                keep_failure(error)
                return None

        callback = width_chooser(chosen, self.sizes.hidden)
        try:
            return self.call("score_choosing", *arguments, address_of(callback), mixes)
        except RuntimeError as error:
            failure = taken_failure()  # else `call` has told it
            if failure is None:
                raise
            raise failure from error

    def reserve_positions(self, count: int) -> None:
        """Rotary tables for at least `count` positions (fewer only where the rotation changes beyond them)."""
        rotary.require_learned(count, self._learned)
        if count <= self.positions:
            return
        with self._growing:
            positions = rotary.grown_positions(count, self.positions, self.max_positions, self._known)
            if positions == self.positions:
                return
            for index, table in enumerate(self._rotation.tables(positions)):
                self.handle.set_rope(index, *table)
            self.positions = positions  # last: other threads look at it


def _add_layers(handle: Any, found: weights.Architecture) -> None:
    if found.inputs is not None:
        _set_token_inputs(handle, found.inputs)
    if found.sizes.delta is not None:
        set_delta_sizes(handle, found.sizes.delta)
    for layer in found.layers:
        seen = layer.window, layer.rope_table, layer.sinks
        _add_layer(handle, _tensors(layer.norms), *seen, layer.form)
        if layer.delta is not None:
            set_delta(handle, layer.delta)
        for name, weight in layer.linears.items():
            set_linear(handle, name, weight)
        if layer.experts is not None:
            set_experts(handle, layer.experts)
    if found.inputs is not None:
        set_linear(handle, "token_inputs", found.projection)


def _add_layer(
    decoder: Any, norms: list[Tensor | None], window: int, rope_table: int, sinks: Tensor | None, form: LayerForm
) -> None:
    """A layer behind the others; its linears follow. norms: six weights, then their biases."""
    if form.sizes is not None:
        decoder.set_layer_sizes(*form.sizes)
    decoder.add_layer(norms, window, rope_table, sinks)
    if form.keys_of is not None:
        decoder.reuse_keys(form.keys_of)
    if form.value_norm is not None or form.values_are_keys:
        decoder.set_values(form.value_norm, form.values_are_keys)
    if form.span or form.query_scale is not None:
        decoder.set_view(form.span, *(form.query_scale or (0.0, 1.0)))
    if form.inputs_norm is not None:
        decoder.set_inputs(form.inputs_norm)
    if form.scale != 1:
        decoder.set_scale(form.scale)


def _set_token_inputs(decoder, inputs: TokenInputs) -> None:
    """Before the first layer that has inputs; the linear token_inputs comes behind the layers."""
    norm = inputs.norm.float().contiguous()
    decoder.set_token_inputs(inputs.table.detach(), norm, inputs.width, inputs.eps, inputs.scale)


def _cache_sizes(forms: list[LayerForm], sizes: Sizes) -> list[tuple[int, int]]:
    """Of every layer that keeps keys and values: its key heads, and elements of each."""
    own = [form.sizes or (sizes.kv_heads, sizes.head_dim, 0) for form in forms if form.keys_of is None]
    return [(heads, dim) for heads, dim, _ in own]


def _blocks(linears: dict[str, Weight]) -> list[int]:
    """As of `CpuDecoder.blocks`, of one layer."""
    if "inputs_gate" in linears:
        return [0, 0]
    parts = [[own for name, own in linears.items() if (name in _OF_MLP) == mlp] for mlp in (False, True)]
    fit = [all(one.format == PLANES and one.order is None and one.rotation is None for one in part) for part in parts]
    return [sum(one.out_features for one in part) * own for part, own in zip(parts, fit, strict=True)]


def _tensors(norms: list[Norm | None]) -> list[Tensor | None]:
    """Weights, then biases."""
    return [norm and norm.weight for norm in norms] + [norm and norm.bias for norm in norms]


def _multiply(found: list[PrecisionSwitch]) -> str:
    ways = {switch.multiply for switch in found}
    if len(ways) > 1:
        raise UnknownArchitecture(f"its packed layers multiply in {len(ways)} ways: {', '.join(sorted(ways))}")
    return ways.pop() if ways else "fused"
