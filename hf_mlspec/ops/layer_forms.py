"""How does one layer of the compiled decoder differ from the others, beside its norms and weights?"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .compiled_decoder import Sizes


@dataclass(frozen=True)
class LayerForm:
    """What no decoder but that of the CPU computes. As it is made without arguments, a layer has none of it.

    sizes: key heads, elements of a head, elements between the projections of the MLP; None: the decoder's.
    keys_of: the layer before it whose keys and values it reads, having no k and v; None: its own.
    value_norm: float32 ``[elements of a head]``, of values, each head for itself; None: none. values_are_keys: values
    are what k computes, neither normed like keys nor rotated, and there is no v.
    span: a token sees no slot before the last multiple of it; 0: no such bound. query_scale: (scale, stretch): queries
    at position p are multiplied by 1 + scale log(1 + floor((p + 1) / stretch)).
    inputs_norm: float32 ``[hidden]``, behind what the layer makes of its inputs (`TokenInputs`) with its linears
    inputs_gate and inputs_out; None: it has no inputs. scale: of the residual stream behind the layer.
    """

    sizes: tuple[int, int, int] | None = None
    keys_of: int | None = None
    value_norm: Tensor | None = None
    values_are_keys: bool = False
    span: int = 0
    query_scale: tuple[float, float] | None = None
    inputs_norm: Tensor | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class TokenInputs:
    """Inputs of all layers, `width` elements each, side by side, of every token: ``norm`` of the linear token_inputs
    of its embedding, each layer's for itself with ``eps``, and ``scale`` times its row of the table ``[embeddings,
    layers * width]``, whose rows may lie apart. norm: float32 ``[width]``, times what the sum is multiplied by."""

    table: Tensor
    norm: Tensor
    width: int
    eps: float
    scale: float


def add_layer(decoder, norms: list[Tensor | None], window: int, rope_table: int, sinks, form: LayerForm, sizes: Sizes):
    """A layer behind the others; its linears follow. norms: six weights, then their biases; sizes: the decoder's."""
    decoder.set_layer_sizes(*(form.sizes or (sizes.kv_heads, sizes.head_dim, sizes.intermediate)))
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


def set_token_inputs(decoder, inputs: TokenInputs) -> None:
    """Before the first layer that has inputs; the linear token_inputs comes behind the layers."""
    norm = inputs.norm.float().contiguous()
    decoder.set_token_inputs(inputs.table.detach(), norm, inputs.width, inputs.eps, inputs.scale)


def cache_sizes(forms: list[LayerForm], sizes: Sizes) -> list[tuple[int, int]]:
    """Of every layer that keeps keys and values: its key heads, and elements of each."""
    own = [form.sizes or (sizes.kv_heads, sizes.head_dim, 0) for form in forms if form.keys_of is None]
    return [(heads, dim) for heads, dim, _ in own]


def widest(forms: list[LayerForm]) -> tuple[int, int, int]:
    """Sizes that all of these layers, which have some of their own, fit in."""
    key_heads, head_dim, intermediate = zip(*(form.sizes for form in forms), strict=True)
    return max(key_heads), max(head_dim), max(intermediate)


NO_FORM = LayerForm()
