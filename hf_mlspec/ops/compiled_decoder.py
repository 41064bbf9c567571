"""How does Python build and call the compiled decoder? One object per model, one call per step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats.hadamard import Hadamard
from ..precision import OWN_BITS, Bits
from .attention import MAX_HEAD_DIM as MAX_HEAD_DIM  # mlspec::kMaxHeadDim
from .hadamard import matrix_on
from .library import KernelError, why_not_compiled
from .rows import ACTIVATIONS
from .zipper_table import ZipperTable

BF16, F32, MXFP4, INT4, NESTED, PLANES, LUT, ZIPPER = range(8)  # mlspec::WeightFormat


@dataclass(frozen=True)
class Weight:
    """A linear layer as the compiled decoder reads it; the tensors stay where they are.

    format: BF16 or F32 (weight ``[out, in]``), or one whose weight, scale, zero and low are tiles of
    ``ops.prepack_*``. bias: float32 ``[out]``. bits: the layer's own, of the packed formats. codebook and escapes: of
    NESTED, as ``ops.nested_linear`` takes them; zero_doubled: of PLANES. tables: of LUT, tiles of ``ops.prepack_lut``.
    high: of ZIPPER, ``split`` of ``ops.prepack_zipper``.
    order: int32 ``[in]``, a permutation, of packed weights but NESTED: column i multiplies element order[i] of the
    input; None: element i. rotation: of o, down and delta_out: what the input is multiplied by first; None: nothing.
    activation_clip: of INT4, of its 4-bit activations.
    resident_planes: of PLANES that are streamed, how many are always where ``weight`` has them; the others are while
    the reader of the decoder (`set_plane_reader`) holds them there for ``key``. 0: all are there.
    adapter: of linears of a layer, (down float32 ``[rank, in]``, up float32 ``[out, rank]``): up (down x) is added, x
    before any rounding; None: nothing. Not beside a rotation.
    outliers: of INT4, 128 where the tiles are of ``ops.prepack_int4_int8``; then order, int32 ``[in + 128]``, has its
    last 128 entries twice.
    """

    format: int
    weight: Tensor
    in_features: int
    out_features: int
    scale: Tensor | None = None
    zero: Tensor | None = None
    bias: Tensor | None = None
    group_size: int = 0
    bits: Bits = OWN_BITS
    low: Tensor | None = None
    codebook: Tensor | None = None
    escape_rows: Tensor | None = None
    escape_weight: Tensor | None = None
    zero_doubled: int = 0
    order: Tensor | None = None
    tables: Tensor | None = None
    high: Tensor | None = None
    rotation: Hadamard | None = None
    outliers: int = 0
    activation_clip: float = 1.0
    resident_planes: int = 0
    key: int = 0
    adapter: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Sigmoids:
    """How experts are chosen by sigmoids of the router's logits: those with the largest sums of it and of bias,
    float32 ``[count]``, in the chosen_groups best of groups. Weights are the sigmoids, divided by their sum where they
    are renormalized, times scale."""

    bias: Tensor
    groups: int
    chosen_groups: int
    scale: float


@dataclass(frozen=True)
class Experts:
    """What stands in a layer for gate, up and down.

    router: float32 ``[count, hidden]``, or one row more, whose sigmoid weighs the shared expert; router_bias:
    float32, one a row. chosen: experts of a token, those of the largest logits, of equal ones the lower numbers.
    renormalize: whether the weights of a token, softmax over all, are divided by their sum. up, down: of all experts,
    BF16, F32, MXFP4, INT4, NESTED or PLANES; their tensors, biases too, have a first axis of experts: ``[count, 2
    inner, hidden]``, rows of gate before rows of up, ``[count, hidden, inner]``. clamp: slope and limit where rows of
    gate and up come in turns, as `gated_pairs` reads them. sigmoids: in place of softmax; None: softmax. shared: gate,
    up and down, or {}. weighs_inputs: weights multiply what experts read.
    """

    router: Tensor
    router_bias: Tensor | None
    chosen: int
    renormalize: bool
    up: Weight
    down: Weight
    clamp: tuple[float, float] | None
    sigmoids: Sigmoids | None
    shared: dict[str, Weight]
    weighs_inputs: bool = False


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of gated delta nets, or of layers of Mamba-2, all of a decoder alike. taps: of the convolution. grouped:
    delta_qkv computes of every key head its query, key, values and gates, and delta_b of every one its b and a
    (Qwen3-Next). additive: Mamba-2 (arXiv 2405.21060): a state takes values as they are, delta_qkv computes gates,
    values, keys (B), queries (C) and a time step a head, and there is no delta_z, _b or _a. normed: elements of what
    heads give that are normed together, None: those of a head."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    grouped: bool = False
    additive: bool = False
    normed: int | None = None

    @property
    def values(self) -> int:
        """Elements of what all heads give."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def kept_width(self) -> int:
        """Numbers of a token from which states are made again: its channels, decays and betas."""
        return self.channels + 2 * self.value_heads


@dataclass(frozen=True)
class DeltaNet:
    """What stands in a layer for q, k, v and o, beside its linears delta_qkv, _z, _b, _a and _out; float32.

    taps: ``[taps, channels]`` of the convolution, of the oldest token first. rate, shift: ``[value_heads]``; the log
    of a decay is rate * softplus(a + shift). norm: ``[value_dim]``, of Mamba-2 ``[values]``, with eps. bias:
    ``[channels]`` of the convolution, None: there is none. skip: ``[value_heads]``, of Mamba-2 alone: how much of its
    values a head gives beside what its state says.
    """

    taps: Tensor
    rate: Tensor
    shift: Tensor
    norm: Tensor
    eps: float
    bias: Tensor | None = None
    skip: Tensor | None = None


@dataclass(frozen=True)
class NestedTable:
    """Embeddings as the tiles of a nested weight, with the rows that have escapes."""

    draft: Tensor
    exponents: Tensor
    low: Tensor
    escape_rows: Tensor | None = None
    escape_weight: Tensor | None = None


@dataclass(frozen=True)
class Sizes:
    """Sizes and numbers of a decoder; `activation` is a key of ACTIVATIONS, soft caps are 0 where there are none.

    norms_have_mean: layer norms, not RMS norms. rotates_pairs: an element and its neighbour. parallel: attention and
    MLP read one sum. grouped_qkv: q computes the queries, key and value of one key head after the other.
    norms_behind_rotation: of queries and keys. plain_mlp: down(activation(up)). gated_heads: q computes of every head
    its query and a gate of what the head gives. delta: of layers that are gated delta nets or Mamba-2, None where
    there are none. no_mlp: no layer has one.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    embeddings: int
    rotary_dim: int
    activation: str
    norm_eps: float
    embedding_scale: float = 1.0
    attention_scale: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    norms_have_mean: bool = False
    rotates_pairs: bool = False
    parallel: bool = False
    grouped_qkv: bool = False
    norms_behind_rotation: bool = False
    plain_mlp: bool = False
    gated_heads: bool = False
    delta: DeltaSizes | None = None
    no_mlp: bool = False


def has_compiled_decoder() -> bool:
    """Whether the compiled library is loaded and holds the decoder."""
    return why_not_compiled() is None and _class() is not None


def compiled_decoder(
    sizes: Sizes,
    kv_dtype: torch.dtype,
    embedding: Tensor | NestedTable | ZipperTable,
    final_norm: Tensor,
    final_bias: Tensor | None = None,
):
    """A decoder without layers; see kernels_ext/bindings/cpu/decoder.cpp. KernelError without the compiled library."""
    if not has_compiled_decoder():
        raise KernelError(f"no compiled decoder: {why_not_compiled()}")
    dims = [sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.intermediate, sizes.vocab]
    dims += [sizes.embeddings, sizes.rotary_dim, ACTIVATIONS[sizes.activation], int(kv_dtype == torch.bfloat16)]
    dims += map(int, (sizes.norms_have_mean, sizes.rotates_pairs, sizes.parallel, sizes.grouped_qkv))
    dims += map(int, (sizes.norms_behind_rotation, sizes.plain_mlp, sizes.gated_heads, sizes.no_mlp))
    numbers = [sizes.norm_eps, sizes.embedding_scale, sizes.attention_scale]
    numbers += [sizes.attention_softcap, sizes.logit_softcap]
    if isinstance(embedding, Tensor):
        return _class()(dims, numbers, embedding.detach(), final_norm, final_bias)
    decoder = _class()(dims, numbers, torch.empty(0, sizes.hidden, dtype=torch.bfloat16), final_norm, final_bias)
    if isinstance(embedding, ZipperTable):
        decoder.set_zipper_embedding(*embedding)
        return decoder
    table = embedding.draft, embedding.exponents, embedding.low, embedding.escape_rows, embedding.escape_weight
    decoder.set_nested_embedding(*table)
    return decoder


def set_linear(decoder, name: str, weight: Weight) -> None:
    """Give the newest layer its linear `name` (q, k, v, o, gate, up, down, or delta_* of a delta net), or the decoder
    its head. ValueError naming what does not fit: q, k and v share their inputs and so their order, as do gate and
    up."""
    _set_weight(decoder, name, weight)
    if weight.order is not None:
        decoder.set_order(name, weight.order)
    if weight.format == INT4 and weight.activation_clip != 1:
        decoder.set_activation_clip(name, weight.activation_clip)
    if weight.resident_planes:
        decoder.set_streamed(name, weight.resident_planes, weight.key)
    if weight.rotation is not None:
        how = weight.rotation
        decoder.set_hadamard(name, matrix_on(how.order, torch.device("cpu")), how.size, how.inner)
    if weight.adapter is not None:
        decoder.set_adapter(name, *weight.adapter)


def set_delta_sizes(decoder, sizes: DeltaSizes) -> None:
    """Say how large recurrent layers are, before the first."""
    heads = sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim
    how = int(sizes.grouped), int(sizes.additive), sizes.normed or sizes.value_dim
    decoder.set_delta_shape([*heads, sizes.taps, *how])


def set_delta(decoder, net: DeltaNet) -> None:
    """Make the newest layer a gated delta net, or one of Mamba-2; its linears follow."""
    decoder.set_delta(net.taps, net.rate, net.shift, net.norm, net.eps, net.bias, net.skip)


def set_experts(decoder, experts: Experts) -> None:
    """Give the newest layer its experts. ValueError naming the expert and what does not fit."""
    weighs_shared = len(experts.router) > len(experts.up.weight)
    how = experts.chosen, experts.renormalize, bool(experts.shared), weighs_shared
    decoder.set_router(experts.router, experts.router_bias, *how)
    if experts.sigmoids is not None:
        own = experts.sigmoids
        decoder.set_sigmoids(own.bias, own.groups, own.chosen_groups, own.scale)
    if experts.clamp is not None:
        decoder.set_pairs(*experts.clamp)
    if experts.weighs_inputs:
        decoder.weigh_inputs()
    for name, weight in (("up", experts.up), ("down", experts.down)):
        if weight.format == NESTED:
            tiles = weight.weight, weight.scale, weight.low, weight.codebook
            escapes = weight.escape_rows, weight.escape_weight
            shape = weight.in_features, weight.out_features
            decoder.set_nested_experts(name, *shape, *tiles, *escapes, weight.bias, *weight.bits)
            continue
        if weight.format == PLANES:
            how = weight.group_size, weight.zero_doubled, weight.bits.weight
            shape = weight.in_features, weight.out_features
            decoder.set_plane_experts(name, *shape, weight.weight, weight.scale, weight.bias, *how)
            continue
        tensors = weight.weight, weight.scale, weight.zero, weight.bias
        shape = weight.format, weight.in_features, weight.out_features
        decoder.set_experts(name, *shape, *tensors, weight.group_size, weight.bits.activation or 16)
    for name, weight in experts.shared.items():
        set_linear(decoder, f"shared_{name}", weight)


def _set_weight(decoder, name: str, weight: Weight) -> None:
    shape = weight.in_features, weight.out_features
    if weight.format == NESTED:
        tiles = weight.weight, weight.scale, weight.low, weight.codebook
        escapes = weight.escape_rows, weight.escape_weight
        decoder.set_nested(name, *shape, *tiles, *escapes, weight.bias, *weight.bits)
        return
    if weight.format == PLANES:
        how = weight.group_size, weight.zero_doubled, weight.bits.weight
        decoder.set_planes(name, *shape, weight.weight, weight.scale, weight.bias, *how)
        return
    if weight.format == LUT:
        decoder.set_lut(name, *shape, weight.weight, weight.tables, weight.bias, weight.bits.weight)
        return
    if weight.format == ZIPPER:
        tiles = weight.weight, weight.scale, weight.high
        decoder.set_zipper(name, *shape, *tiles, weight.bias, weight.group_size, *weight.bits)
        return
    if weight.outliers:
        decoder.set_outliers(name, *shape, weight.weight, weight.scale, weight.bias, weight.bits.activation or 16)
        return
    tensors = weight.weight, weight.scale, weight.zero, weight.bias
    decoder.set_linear(name, weight.format, *shape, *tensors, weight.group_size, weight.bits.activation or 16)


def _class():
    try:
        return torch.classes.mlspec.Decoder
    except RuntimeError:  # a library of an earlier version
        return None
