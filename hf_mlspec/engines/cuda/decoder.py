"""How does a whole model run on a device as a fixed list of kernels that only enqueues?

One step of all layers over rows whose lengths are read on the device, so that a CUDA graph can hold it. On the CPU the
same list runs through the same ops.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ... import ops
from ...formats import stored_format
from ...formats.zipper import LOW
from ...nn.coded_embedding import CodedEmbedding
from ...nn.nested import NestedEmbedding
from ...nn.shards import is_shared
from ...nn.switch import filled
from ...nn.zipper_embedding import ZipperEmbedding
from ...ops.compiled_decoder import ACTIVATIONS
from ...ops.delta import AT_START
from ...ops.zipper_table import ZipperTable
from ...precision import OWN_BITS, Bits
from ..architecture import Block, rotary
from ..built import bit_choices, device_of, standing, switches
from ..capturing import free_cached, wait_for
from ..own_part import own_part
from ..rows import cache_format_of
from .adapted import AdaptedLinear
from .codes import coding_of, times_turned
from .experts import ExpertRows, Routed
from .heads_and_norms import heads_order, norm_of, normed_sum, normed_together
from .layer import Layer, LayerLinear, read_layer
from .ranks import exchange_of
from .row_bits import BitsOfBlock, BlockBits, at, outside, times
from .served import require_read, served_outline
from .states import DeltaStates
from .streamed import StreamedPlanesLinear
from .weights import OrderedLinear, RotatedLinear, joined
from .zipper import ZipperTilesLinear


class Packing(NamedTuple):
    """Where the real tokens of a step lie that has padding: nothing but attention computes the others.

    take: int64 ``[n]``, their places in the flattened ids. place: int64 ``[batch * width]``, of each of those places
    the number of its token among the n, any for padding.
    """

    take: Tensor
    place: Tensor


class CudaDecoder:
    """A model's layers as calls of ops, on the weights the model has.

    q|k|v and gate|up become one weight each: the modules' parameters are views of it from then on. ``extra_bytes``:
    what could not be shared so (packed weights whose outputs do not fill their tiles). num_layers: those that keep
    keys and values. num_recurrent: those that keep a state. vocab_size: entries of its logits. dtype: of keys, values
    and logits. ranks: the processes that share the model; None: nobody does. max_positions: the length past which the
    model's rotation changes for the whole row; None where it never does. positions: for how many there are rotary
    tables. bit_choices: what calls may ask of the packed weights, () where it has none. logit_softcap: what
    ``ops.choose_rows`` is to be given. codes: whether rows become integers in the kernel that makes them, where a
    linear multiplies integers: so on GPUs, for the same bits. fingerprint: changes with every address that a captured
    call would hold.
    """

    def __init__(self, model: nn.Module, codes: bool | None = None):
        """UnknownArchitecture where the model's weights or sizes are not served; its weights move, see above."""
        device = device_of(model)
        require_read(cache_format_of(model), device)
        part = own_part(model) if is_shared(model) else None
        found = served_outline(model if part is None else part.model, device)
        if device.type != "cpu":
            wait_for(device)  # weights are about to move, and other streams may be reading them
        self.sizes, self.dtype, self.device = found.sizes, found.dtype, device
        self.vocab_size = found.sizes.vocab if part is None else part.vocab
        self.logit_softcap, self.ranks = found.sizes.logit_softcap, part and exchange_of(part.ranks)
        self.codes, self._shares_head = _codes_on(device, codes), self.vocab_size != found.sizes.vocab
        self.num_recurrent = sum(block.delta is not None for block in found.blocks)
        self.num_layers = len(found.blocks) - self.num_recurrent
        self._rotation, self._positions = found.rotation, found.positions
        self._learned = None if found.positions is None else len(found.positions)
        self.max_positions, self.positions = rotary.rotary_border(model), 0
        self._known = rotary.known_positions(rotary.text_config(model))
        self._growing, self._ropes, self._outgrown = threading.Lock(), [], []
        self.reserve_positions(min(rotary.FIRST_POSITIONS, self._learned or rotary.FIRST_POSITIONS))
        self._final_norm = norm_of(found.final_norm, found, device)
        self._layers = [read_layer(block, found, device, index) for block, index in indexed(found.blocks)]
        self._heads_order = heads_order(found.sizes, device)
        self._gated_heads = found.sizes.heads * found.sizes.head_dim if found.sizes.gated_heads else 0  # elements
        self._head = joined([found.head], "lm_head")
        self._embedding = _read_table(found.embedding)
        self._activation = ACTIVATIONS[found.sizes.activation]
        if part is not None:
            part.give_back()
        self.bit_choices, self._own = bit_choices(model), [switch.bits for switch in switches(model)]
        linears = [one for layer in self._layers for one in layer.linears()]
        self.extra_bytes = sum(linear.extra_bytes for linear in linears)
        self.extra_bytes += sum(layer.experts.extra_bytes for layer in self._layers if layer.experts is not None)
        self._captured_bits = min(map(_captured_bits, [*linears, self._head]))
        streamed = [one for one in map(_plain, [*linears, self._head]) if isinstance(one, StreamedPlanesLinear)]
        self.plane_sources = tuple({id(own.source): own.source for own in streamed}.values())
        self._weights = standing(model)
        if device.type != "cpu":
            wait_for(device)  # other streams may read them from now on
            free_cached()  # what weights moved from is of other sizes than what comes next

    @property
    def fingerprint(self) -> tuple:
        """What a captured call depends on besides its own tensors: the weights, and the rotary tables."""
        return self._weights, self.positions

    def captures(self, bits: Bits | BlockBits) -> bool:
        """Whether a graph can hold a call at these bits: not where the CPU computes a part of it, planes are fetched
        for it from elsewhere than pinned memory, or the host waits for a choice."""
        if not isinstance(bits, Bits) and bits.waits:
            return False
        most = bits if isinstance(bits, Bits) else bits.widest
        return all(filled(most, own).weight <= self._captured_bits for own in self._own)

    def blocks(self) -> list[tuple[LayerLinear | None, LayerLinear | None, Tensor | None]]:
        """Of every layer in turn, as of `Layer.blocks`: those that `BlockBits` knows by their number."""
        return [block for layer in self._layers for block in layer.blocks()]

    def reserve_positions(self, count: int) -> None:
        """Rotary tables for at least ``count`` positions (fewer only where the rotation changes beyond them).

        New tables mean a new fingerprint. The old ones, half as long at most, stay: a captured call holds their
        addresses, and a step on another stream may be reading them.
        """
        rotary.require_learned(count, self._learned)
        with self._growing, torch.inference_mode(False), torch.no_grad():
            positions = rotary.grown_positions(count, self.positions, self.max_positions, self._known)
            if positions > self.positions:
                tables = self._rotation.tables(positions)
                self._outgrown.append(self._ropes)
                self._ropes = [(cos.to(self.device), sin.to(self.device)) for cos, sin in tables]
                self.positions = positions  # last: other threads look at it

    def forward(
        self, ids: Tensor, starts: Tensor, counts: Tensor, kv: Tensor, *, pick: Tensor | None = None,
        bits: Bits | BlockBits = OWN_BITS, packing: Packing | None = None, draft_window: int = 0,
        states: DeltaStates | None = None, settles: int = AT_START, at_once: int = 0,
    ) -> Tensor:  # fmt: skip
        """Write keys and values of int32 ids ``[batch, width]``; -> logits ``[m, vocab]`` before their soft cap.

        Token t of row r has position and slot ``starts[r] + t`` and is padding from ``counts[r]`` on (int32
        ``[batch]``, on the device): the caller has reserved those positions and slots. kv: ``new_kv``, or its first
        rows; its dtype says whether it holds codes. pick: int64 ``[m]``, indices into the flattened ids (into
        packing.take where that is given), None: all. bits: one of bit_choices, 0: what the model's switch says; or
        those of every block. packing: of ids with padding. draft_window: of every layer, as of `ops.ragged_attention`.
        states: of the rows, where layers keep any; settles: what becomes of them, as of `ops.delta_rows`. at_once:
        tokens whose MLP is computed together, 0: all; more take more memory and give the same bits. Only enqueues.
        ValueError for operands that do not fit.
        """
        self._require(ids, kv, bits, states)
        eps, lanes = self.sizes.norm_eps, (*ids.shape, starts, counts, packing, draft_window)
        total = self._embed(ids, starts, packing)
        added = None  # what the next norm adds to the residual stream first
        for number, layer in enumerate(self._layers):
            how = self._coding(layer.qkv, bits)
            normed, total = normed_sum(total, added, layer.attention_norm, eps, layer.qkv_order, how)
            added = self._mix(layer, normed, kv, (states, settles), lanes, at(bits, 2 * number, normed, starts))
            beside, added = (added, None) if self.sizes.parallel else (None, self._of_all_ranks(added))
            if layer.attention_out is not None:
                added, _ = normed_sum(added, None, layer.attention_out, eps)
            if self.sizes.no_mlp:
                continue
            how = self._coding(layer.gate_up, bits) if at_once < 1 or at_once >= len(total) else None
            normed, total, routed = self._normed_for_mlp(layer, total, added, how)
            own = at(bits, 2 * number + 1, normed, starts)
            added = self._feed_forward(layer, normed, own, routed, at_once)
            added = self._of_all_ranks(added if beside is None else beside + added)
            if layer.mlp_out is not None:
                added, _ = normed_sum(added, None, layer.mlp_out, eps)
        if states is not None:
            states.settle(starts, counts, settles)
        return self._logits(total, added, pick, outside(bits))

    def _mix(
        self, layer: Layer, normed: Tensor | ops.Codes, kv: Tensor, kept: tuple, lanes: tuple, bits: BitsOfBlock
    ) -> Tensor:
        """What a layer's attention, or its delta net, adds. kept: states, and what becomes of them."""
        if layer.delta is not None:
            return layer.delta(normed, lanes, *kept, bits)
        return self._attend(layer, normed, kv[layer.index], lanes, bits)

    def _logits(self, total: Tensor, added: Tensor | None, pick: Tensor | None, bits: Bits) -> Tensor:
        normed, _ = normed_sum(total, added, self._final_norm, self.sizes.norm_eps)
        logits = self._head(normed if pick is None else normed.index_select(0, pick), bits)
        return self.ranks.side_by_side(logits) if self._shares_head else logits

    def _of_all_ranks(self, added: Tensor | ExpertRows) -> Tensor | ExpertRows:
        """What a block adds, of which this process has a part."""
        if self.ranks is None:
            return added
        return self.ranks.summed(added.summed() if isinstance(added, ExpertRows) else added)

    def _position_rows(self, ids: Tensor, starts: Tensor, packing: Packing | None) -> Tensor:
        """Learned embeddings of the positions of a step's tokens; of padding, of any."""
        steps = torch.arange(ids.shape[1], device=starts.device)
        places = (starts[:, None] + steps).reshape(-1).clamp(0, len(self._positions) - 1)
        if packing is not None:
            places = places.index_select(0, packing.take)
        return self._positions.index_select(0, places)

    def _normed_for_mlp(
        self, layer: Layer, total: Tensor, added: Tensor | None, how: ops.CodesOf | None
    ) -> tuple[Tensor | ops.Codes, Tensor, Routed | None]:
        """What the MLP or the experts read, the sum, and where it goes where the same kernel says so."""
        norm, eps = layer.mlp_norm, self.sizes.norm_eps
        fits = isinstance(added, Tensor) and isinstance(norm, Tensor)
        if fits and layer.experts is not None and layer.experts.norms(total):
            return layer.experts.norm_and_route(added, total, norm, eps)
        return *normed_sum(total, added, norm, eps, layer.gate_up_order, how), None

    def _coding(self, linear: LayerLinear | None, bits: BitsOfBlock | BlockBits) -> ops.CodesOf | None:
        """How the kernel in front of a linear codes its inputs; None: it writes rows."""
        return coding_of(linear, bits) if self.codes else None

    def _feed_forward(
        self, layer: Layer, normed: Tensor | ops.Codes, bits: BitsOfBlock, routed: Routed | None, at_once: int = 0
    ) -> Tensor | ExpertRows:
        """What a layer's MLP, or its experts, add; of experts not summed yet, where the next norm does it. at_once: as
        of `forward`."""
        if 0 < at_once < len(normed):
            return _joined([self._feed_forward(layer, part, bits, routed) for part in normed.split(at_once)])
        if layer.experts is not None:
            added = layer.experts(normed, self._activation, bits, routed)
            return added if layer.mlp_out is None and not self.sizes.parallel else added.summed()
        gate_up, how = times(layer.gate_up, normed, bits), self._coding(layer.down, bits)
        return times(layer.down, self._gated(layer, gate_up, how), bits)

    def _gated(self, layer: Layer, gate_up: Tensor, how: ops.CodesOf | None) -> Tensor | ops.Codes:
        """What `down` reads, coded where `how` says how."""
        turned = layer.down_order if layer.down_rotation is None else layer.down_rotation
        if self.sizes.plain_mlp:
            inner = ops.activated(gate_up, self._activation)
            if how is not None and turned is not None:
                return ops.row_codes(inner, turned, how)
            if layer.down_rotation is not None:
                return ops.hadamard_rows(inner, layer.down_rotation)
            return inner if layer.down_order is None else ops.ordered_rows(inner, layer.down_order)
        if how is not None:
            return ops.gated_codes(gate_up, self._activation, turned, how)
        if layer.down_rotation is not None:
            return ops.gated_hadamard(gate_up, self._activation, layer.down_rotation)
        if layer.down_order is None:
            return ops.gated(gate_up, self._activation)
        return ops.gated_in_order(gate_up, self._activation, layer.down_order)

    def _embed(self, ids: Tensor, starts: Tensor, packing: Packing | None) -> Tensor:
        flat = ids.reshape(-1)
        flat = flat if packing is None else flat.index_select(0, packing.take)
        if isinstance(self._embedding, Tensor):
            rows = ops.embed_rows(flat, self._embedding, self.sizes.embedding_scale)
        elif isinstance(self._embedding, ZipperTable):
            rows = ops.zipper_rows(flat, *self._embedding, self.sizes.embedding_scale)
        else:
            tiles, escapes = self._embedding
            rows = ops.nested_rows(flat, *tiles, self.sizes.embedding_scale, **escapes)
        return rows if self._positions is None else rows + self._position_rows(ids, starts, packing)

    def _attend(self, layer: Layer, normed: Tensor | ops.Codes, kv: Tensor, lanes: tuple, bits: BitsOfBlock) -> Tensor:
        """What a layer's attention adds; its keys and values are written. lanes: batch, width, starts, counts and how
        the tokens are packed, the draft window."""
        keys, values = kv.unbind()
        batch, width, starts, counts, packing, draft_window = lanes
        sizes, (cos, sin) = self.sizes, self._ropes[layer.rope]
        qkv = times(layer.qkv, normed, bits)
        if self._heads_order is not None:
            qkv = ops.ordered_rows(qkv, self._heads_order)
        norms = layer.q_norm, layer.k_norm, sizes.norm_eps
        if layer.heads_together is not None:
            qkv = normed_together(qkv, *layer.heads_together, sizes.norm_eps)
        if self._gated_heads:
            qkv, gates = qkv.split([qkv.shape[1] - self._gated_heads, self._gated_heads], dim=1)
        qkv = (qkv.contiguous() if packing is None else qkv.index_select(0, packing.place)).view(batch, width, -1)
        q = ops.rope_write_rows(qkv, *norms, cos, sin, starts, counts, keys, values, sizes.heads)
        scale, softcap = sizes.attention_scale, sizes.attention_softcap
        rule = scale, layer.window, softcap, draft_window
        mixed = ops.ragged_attention_rows(q, keys, values, starts, counts, *rule, layer.sinks)
        mixed = mixed.view(batch * width, -1)
        mixed = mixed if packing is None else mixed.index_select(0, packing.take)
        mixed = ops.sigmoid_gated(mixed, gates) if self._gated_heads else mixed
        return times_turned(layer.o, mixed, bits) if self.codes else times(layer.o, mixed, bits)

    def _require(self, ids: Tensor, kv: Tensor, bits: Bits | BlockBits, states: DeltaStates | None) -> None:
        sizes = self.sizes
        if (states is not None) != (self.num_recurrent > 0) or (states is not None and states.rows != len(ids)):
            given = "none" if states is None else f"those of {states.rows} rows"
            raise ValueError(f"states are {given}; {self.num_recurrent} layers keep states of {len(ids)} rows")
        if ids.ndim != 2:
            raise ValueError(f"ids has shape {list(ids.shape)}, expected [batch, width]")
        expected = (self.num_layers, 2, len(ids), sizes.kv_heads, kv.shape[4] if kv.ndim == 6 else "slots")
        kept = None if kv.dtype == self.dtype else stored_format(kv.dtype)
        if kv.device != self.device or (kept is None and kv.dtype != self.dtype):
            raise ValueError(f"kv is {kv.dtype} on {kv.device}, the model is {self.dtype} on {self.device}")
        expected += (sizes.head_dim if kept is None else kept.width(sizes.head_dim),)
        if tuple(kv.shape) != expected:
            raise ValueError(f"kv has shape {list(kv.shape)}, {len(ids)} rows of this model take {list(expected)}")
        if not isinstance(bits, Bits) or bits == OWN_BITS:
            return
        if not (self._own and {filled(bits, own) for own in self._own} <= set(self.bit_choices)):
            choices = ", ".join(map(str, map(tuple, self.bit_choices)))
            way = f"choose one of {choices}, or 0 for the layers' own" if choices else "and no weights are packed"
            raise ValueError(f"bits (of weights, of activations) are {tuple(bits)}, {way}")


def _read_table(table: Tensor | CodedEmbedding) -> Tensor | tuple:
    """What ops read rows of."""
    if isinstance(table, ZipperEmbedding):
        return table.table()
    return table.tiles() if isinstance(table, NestedEmbedding) else table


def _codes_on(device: torch.device, asked: bool | None) -> bool:
    return (device.type != "cpu" and ops.why_no_cuda_kernels(device) is None) if asked is None else asked


def _joined(parts: list) -> Tensor | ExpertRows:
    """Of tokens one behind the other; what is whole as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def indexed(blocks: list[Block]) -> Iterator[tuple[Block, int]]:
    """Every layer, and its number among those that keep what it keeps: keys and values, or a state."""
    seen = [0, 0]
    for block in blocks:
        kind = block.delta is not None
        yield block, seen[kind]
        seen[kind] += 1


def _plain(linear: LayerLinear) -> LayerLinear:
    """Without the order or the rotation of its inputs, and without adapters."""
    return linear.linear if isinstance(linear, OrderedLinear | RotatedLinear | AdaptedLinear) else linear


def _captured_bits(linear: LayerLinear) -> float:
    """Up to how many bits of its weights a call only enqueues."""
    own = _plain(linear)
    if isinstance(own, StreamedPlanesLinear):
        return float("inf") if own.source.copies_in_graphs else own.resident
    return LOW.weight if isinstance(own, ZipperTilesLinear) and own.hosts else float("inf")
