"""Do the parts of a layer have the sizes that the model says? UnknownArchitecture names what does not."""

from __future__ import annotations

from ...ops.compiled_decoder import Sizes
from .delta import delta_shapes
from .description import NORMS, Description
from .linears import linear_shape
from .parts import Block, UnknownArchitecture


def require_sizes(sizes: Sizes, block: Block, index: int, inputs: int = 0) -> None:
    kv_heads, head_dim, inner = block.form.sizes or (sizes.kv_heads, sizes.head_dim, sizes.intermediate)
    if kv_heads < 1 or sizes.heads % kv_heads:
        raise UnknownArchitecture(f"layer {index} has {kv_heads} key heads for {sizes.heads} heads")
    queries, keys = sizes.heads * head_dim, kv_heads * head_dim
    gates = queries if sizes.gated_heads else 0
    outputs = {"q": queries + gates, "k": keys, "v": keys, "gate": inner, "up": inner}
    outputs |= {"qkv": queries + 2 * keys, "qkv_by_head": queries + 2 * keys, "gate_up": 2 * inner}
    outputs |= {"inputs_gate": inputs}
    expected = {name: (sizes.hidden, out) for name, out in outputs.items()}
    expected |= {"o": (queries, sizes.hidden), "down": (inner, sizes.hidden), "inputs_out": (inputs, sizes.hidden)}
    expected |= {} if block.delta is None else delta_shapes(sizes.delta, sizes.hidden)
    for name, module in block.modules.items():
        shape = linear_shape(module, name)
        if shape != expected[name]:
            found = f"{shape[0]} to {shape[1]} features"
            raise UnknownArchitecture(f"{name} of layer {index} maps {found}, {expected[name]} are those of the model")
    if block.sinks is not None and tuple(block.sinks.shape) != (sizes.heads,):
        shape = list(block.sinks.shape)
        raise UnknownArchitecture(f"sinks of layer {index} have shape {shape}, the model has {sizes.heads} heads")


def require_head_norms(entry: Description, sizes: Sizes, block: Block, index: int) -> None:
    together = entry.head_norms == "all heads"
    kv_heads, head_dim, _ = block.form.sizes or (sizes.kv_heads, sizes.head_dim, 0)
    for name, heads in (("q", sizes.heads), ("k", kv_heads)):
        norm = block.norms[NORMS.index(name)]
        expected = head_dim * (heads if together else 1)
        if norm is not None and norm.weight.numel() != expected:
            found = f"has {norm.weight.numel()} elements, {expected} are those of {entry.head_norms}"
            raise UnknownArchitecture(f"the {name} norm of layer {index} {found}")
