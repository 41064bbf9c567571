"""How does one layer of the compiled decoder differ from the others, beside its norms and weights?"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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


NO_FORM = LayerForm()
