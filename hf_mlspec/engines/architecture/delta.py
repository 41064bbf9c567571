"""Which gated delta net, or Mamba-2, does a layer of a model have in place of attention, and how large are all?"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from torch import nn

from ...ops.compiled_decoder import DeltaNet, DeltaSizes
from .description import Delta
from .parts import UnknownArchitecture

MOST_TAPS, MOST_DIM = 8, 256  # MLSPEC_DELTA_MAX_TAPS, MLSPEC_DELTA_MAX_DIM
_UNBOUNDED = (0.0, float("inf"))  # time steps: they are above 0 anyway


def delta_sizes(entry: Delta, layer: nn.Module) -> DeltaSizes:
    """The sizes of a layer's net; UnknownArchitecture for those that the decoder has no room for."""
    net = layer.get_submodule(entry.net)
    sizes = DeltaSizes(*_of(net, entry.heads), entry.grouped, entry.skip is not None)
    if sizes.additive:
        normed = getattr(layer.get_submodule(entry.norm), "group_size", None) or sizes.values
        sizes = replace(sizes, normed=normed)
    if max(sizes.key_dim, sizes.value_dim) > MOST_DIM or not 2 <= sizes.taps <= MOST_TAPS:
        raise UnknownArchitecture(
            f"its recurrent layers have heads of {sizes.key_dim} and {sizes.value_dim} elements and {sizes.taps} "
            f"taps, the compiled decoder takes {MOST_DIM} elements and 2 to {MOST_TAPS} taps"
        )
    return sizes


def delta_net(entry: Delta, layer: nn.Module, index: int) -> DeltaNet:
    """Numbers of the net of layer ``index``, float32, beside its linears."""
    net = layer.get_submodule(entry.net)
    said = _of(net, entry.activations)
    if set(said) != {"silu"}:
        raise UnknownArchitecture(f"{entry.net} of layer {index} says {', '.join(said)}, the decoder has silu alone")
    bias, additive = getattr(net.get_submodule("conv1d"), "bias", None), entry.skip is not None
    if bias is not None and not additive:
        raise UnknownArchitecture(f"the convolution of layer {index} has a bias")
    if additive and tuple(getattr(net, entry.limits, _UNBOUNDED)) != _UNBOUNDED:
        said = getattr(net, entry.limits)
        raise UnknownArchitecture(f"time steps of layer {index} are bounded by {said}, which transformers does not do "
                                  "to a single token: the decoder has no bounds")  # fmt: skip
    taps, rate, shift, norm = (
        layer.get_parameter(place).detach().float().contiguous()
        for place in (entry.taps, entry.rate, entry.shift, f"{entry.norm}.weight")
    )
    (eps,) = _of(layer.get_submodule(entry.norm), ("variance_epsilon",))
    skip = layer.get_parameter(entry.skip).detach().float().contiguous() if additive else None
    bias = None if bias is None else bias.detach().float().contiguous()
    return DeltaNet(taps[:, 0].t().contiguous(), (-rate.exp()).contiguous(), shift, norm, float(eps), bias, skip)


def delta_shapes(sizes: DeltaSizes, hidden: int) -> dict[str, tuple[int, int]]:
    """(in, out) features of the linears of a net."""
    keys, values = 2 * sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
    if sizes.additive:
        inputs = {"delta_qkv": keys + 2 * values + sizes.value_heads}
    elif sizes.grouped:
        inputs = {"delta_qkv": keys + 2 * values, "delta_b": 2 * sizes.value_heads}
    else:
        inputs = {"delta_qkv": keys + values, "delta_z": values}
        inputs |= dict.fromkeys(("delta_b", "delta_a"), sizes.value_heads)
    return {**{name: (hidden, out) for name, out in inputs.items()}, "delta_out": (values, hidden)}


def _of(module: nn.Module, names: tuple[str, ...]) -> list:
    found = []
    for name in names:
        try:
            found.append(attrgetter(name)(module))
        except AttributeError:
            raise UnknownArchitecture(f"its {type(module).__name__} has no {name}") from None
    return found
