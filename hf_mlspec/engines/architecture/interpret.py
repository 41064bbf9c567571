"""Which parts of a model does a compiled decoder take, and does it know them all?

The one reader of models: it follows the description of a model's class (known.py), for both decoders.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ...nn.adapters import is_lora, of_adapters
from ...nn.coded_embedding import CodedEmbedding
from ...nn.experts import PackedExperts
from ...nn.hooks import has_hooks
from ...nn.linear import KernelLinear
from ...nn.nested import NestedEmbedding
from ...nn.transforms import TransformedLinear
from ...nn.zipper_embedding import ZipperEmbedding
from ...ops.compiled_decoder import ACTIVATIONS, MAX_HEAD_DIM, Sizes
from ..modules.states import config_window
from .adapted import require_low_rank
from .delta import delta_net, delta_shapes, delta_sizes
from .description import NORMS, Description, not_served
from .families.wrappers import TEXT, WRAPPERS, inside
from .kinds import absent_linears, layer_form, rope_kind, rope_kinds, token_inputs, window_of
from .known import KNOWN, recognised
from .mixture import UnreadExperts, expert_block
from .parts import (
    Block,
    Outline,
    UnknownArchitecture,
    as_read,
    is_packed,
    linear_shape,
    norm_of,
    part,
    require_format,
    table_dtype,
)
from .rotary import COLUMNS, UNROTATED, Rotation, rope_tables, text_config
from .scales import embedding_scale, logit_scale, named, scale_blocks

# Modules of a known class that are not transformers' own, beside the packed linears of registered formats.
_BLOCKS = {nn.Linear, KernelLinear, nn.Embedding, NestedEmbedding, ZipperEmbedding, nn.ModuleList, nn.Dropout}
_BLOCKS |= {nn.SiLU, nn.GELU, nn.ReLU, nn.Identity, nn.Conv1d, TransformedLinear}
OF_ATTENTION = ("q", "k", "v", "qkv", "qkv_by_head", "o")
CPU = torch.device("cpu")


def outline(model: nn.Module, device: torch.device = CPU, decoder: str = "cpu") -> Outline:
    """Sizes, norms and modules of a model that is whole on ``device``, for the decoder of the "cpu" or "cuda" engine.
    UnknownArchitecture names the first thing that does not fit; ValueError experts that no token can go to."""
    require_known(model, device, decoder)
    config, entry = text_config(model), described(model)
    table = part(model, entry.embedding)
    _require_width(config, table.embedding_dim, "embedding")
    stored = table_dtype(table)
    if not isinstance(table, CodedEmbedding):
        require_format(table.weight, "embedding", halves=decoder == "cpu")
        table = as_read(table.weight.detach())
    kinds, layers = rope_kinds(entry, config), part(model, entry.layers)[: config.num_hidden_layers]
    blocks = [
        _block(entry, config, layers, i, kinds.index(rope_kind(entry, config, i)), window_of(entry, config, i))
        for i in range(len(layers))
    ]
    inputs = token_inputs(entry, model, stored, len(layers))
    sizes = _sizes(entry, model, blocks)
    sizes = scale_blocks(entry, config, sizes, blocks)
    for index, block in enumerate(blocks):
        _require_sizes(sizes, block, index, 0 if inputs is None else inputs.width)
        _require_head_norms(entry, sizes, block, index)
    final_norm, head = norm_of(part(model, entry.final_norm), entry, sizes.hidden), part(model, entry.head)
    _require_width(config, linear_shape(head, "lm_head")[0], "lm_head")
    scale = logit_scale(entry, config, head)
    rotary = None if kinds == [UNROTATED] else part(model, entry.rotary_embedding)
    rotation = Rotation(rotary, kinds, sizes.rotary_dim // 2, COLUMNS[entry.rotation])
    positions = None if entry.position_embedding is None else as_read(_positions(entry, model, stored))
    return Outline(sizes, table.dtype, table, final_norm.times(scale), head, blocks, rotation, positions, inputs)


def _positions(entry: Description, model: nn.Module, dtype: torch.dtype) -> Tensor:
    """The rows that are added to embeddings of this dtype."""
    table = part(model, entry.position_embedding).weight.detach()[entry.position_offset :]
    _require_width(text_config(model), table.shape[1], "embedding of positions")
    if table.dtype != dtype:
        raise UnknownArchitecture(f"its embedding of positions is {table.dtype}, and that of tokens {dtype}")
    require_format(table, "embedding of positions", halves=True)
    return table


def _require_width(config, width: int, name: str) -> None:
    if width != config.hidden_size:
        raise UnknownArchitecture(f"its {name} has {width} columns, and its layers {config.hidden_size}")


def require_known(model: nn.Module, device: torch.device = CPU, decoder: str = "cpu") -> None:
    """Raise UnknownArchitecture unless the decoder of the "cpu" or "cuda" engine runs this class in its present state
    and place, which is ``device``.
    """
    entry, config = described(model), text_config(model)
    asked = not_served(entry, decoder)
    if asked is not None:
        raise UnknownArchitecture(f"its description says {asked}")
    for name in entry.unset:
        if getattr(config, name, None) not in (None, False):
            said = getattr(config, name)
            raise UnknownArchitecture(f"its config says {name}={said!r}, and the compiled decoder has none")
    flags = dict.fromkeys(entry.needed, True)
    if entry.residual_flag is not None:
        flags[entry.residual_flag] = entry.residual == "parallel"
    for name, wanted in flags.items():
        said = getattr(config, name, None)
        if bool(said) != wanted:
            raise UnknownArchitecture(f"its config says {name}={said!r}, and the compiled decoder takes {wanted}")
    window = config_window(config)
    if entry.windows == "none" and window is not None:
        said = "its cache forgets what is further back, and its attention hides nothing"
        raise UnknownArchitecture(f"its config says sliding_window={window}: {said}")
    if getattr(config, "use_bidirectional_attention", False) not in (None, False, "vision"):
        raise UnknownArchitecture("it attends in both directions")
    require_low_rank(model)
    elsewhere = next((p.device for p in model.parameters() if p.device != device), None)
    if elsewhere is not None:
        if device == CPU:
            raise UnknownArchitecture(f"it is on {elsewhere}, and the compiled decoder runs on the CPU")
        raise UnknownArchitecture(f"it is on {device} and {elsewhere}, and a compiled decoder needs it on one device")
    altered = next(_altered(model, entry), None)
    if altered is not None:
        raise UnknownArchitecture(f"it {altered}")


def described(model: nn.Module) -> Description:
    """What is known of a model's class; UndescribedClass where nothing is."""
    kind, name = type(model), type(model).__name__
    entry = _of_wrapper(model, name) if name in WRAPPERS else KNOWN.get(name)
    known = entry is not None and kind.__module__.startswith(entry.package)
    return entry if known else recognised(kind, text_config(model))


def _of_wrapper(model: nn.Module, name: str) -> Description:
    """What is known of the text model in one that also sees images."""
    kind = type(part(model, TEXT))
    entry = KNOWN.get(WRAPPERS[name].get(kind.__name__))
    if entry is None or not kind.__module__.startswith(entry.package):
        raise UnknownArchitecture(f"the compiled decoder does not know the {kind.__name__} in it")
    return inside(entry, name)


def _looked_at(model: nn.Module, entry: Description) -> Iterator[tuple[str, nn.Module]]:
    """Paths and modules of what a prompt of text goes through."""
    if entry.text is None:
        yield from model.named_modules()
        return
    whole = ("", entry.text.rpartition(".")[0])
    yield from ((path, model.get_submodule(path)) for path in whole)
    for place in (entry.text, entry.head):
        yield from part(model, place).named_modules(prefix=place)


def _altered(model: nn.Module, entry: Description) -> Iterator[str]:
    """Why what a module computes may not be what its class says."""
    origins, of_others = ("transformers.", entry.package), of_adapters(model)
    for path, module in _looked_at(model, entry):
        place = f"its module {path}" if path else "the model"
        if module.training and not isinstance(module, nn.ModuleList):  # a slice of a list starts in training mode
            yield f"is in training mode ({place}): call model.eval()"
        if has_hooks(module):
            yield f"has forward hooks ({place})"
        if "forward" in vars(module):
            yield f"has a replaced forward ({place})"
        if id(module) in of_others or is_lora(module):
            continue
        known = type(module) in _BLOCKS or isinstance(module, PackedExperts) or is_packed(module)
        known = known or (type(module) is nn.LayerNorm and entry.has_layer_norms)
        known = known or type(module).__module__.startswith(origins)
        if not known:
            yield f"has a {type(module).__module__}.{type(module).__name__} ({place})"


def _sizes(entry: Description, model: nn.Module, blocks: list[Block]) -> Sizes:
    config, layers = text_config(model), part(model, entry.layers)
    embed = part(model, entry.embedding)
    delta = next((delta_sizes(entry.delta, layers[i]) for i, b in enumerate(blocks) if b.delta is not None), None)
    activation = named(config, entry, "activation")
    if activation not in ACTIVATIONS:
        raise UnknownArchitecture(f"the compiled decoder has no activation {activation!r}")
    heads, kv_heads, head_dim, attention = _heads(entry, config, layers, blocks)
    if head_dim > MAX_HEAD_DIM:
        raise UnknownArchitecture(f"its heads have {head_dim} elements, the compiled attention takes {MAX_HEAD_DIM}")
    rotary_dim, kinds = head_dim // 2 * 2, [kind for kind in rope_kinds(entry, config) if kind != UNROTATED]
    if kinds:
        rotary, columns = part(model, entry.rotary_embedding), COLUMNS[entry.rotation]
        rotary_dim = rope_tables(rotary, kinds[:1], 1, columns=columns)[0][0].shape[1] * 2
    return Sizes(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_intermediate(entry, config, blocks),
        vocab=linear_shape(part(model, entry.head), "lm_head")[1],
        embeddings=embed.num_embeddings,
        rotary_dim=rotary_dim,
        activation=activation,
        norm_eps=entry.norm_eps if isinstance(entry.norm_eps, float) else named(config, entry, "norm_eps"),
        embedding_scale=embedding_scale(entry, config, embed),
        attention_scale=1.0 if attention is None else named(attention, entry, "attention_scale"),
        attention_softcap=0.0 if attention is None else named(attention, entry, "attention_softcap") or 0.0,
        logit_softcap=named(config, entry, "logit_softcap") or 0.0,
        norms_have_mean=entry.has_layer_norms,
        rotates_pairs=entry.rotation.startswith("pairs"),
        parallel=entry.residual == "parallel",
        grouped_qkv="qkv_by_head" in entry.linears,
        norms_behind_rotation=entry.head_norms == "per rotated head",
        plain_mlp=entry.mlp == "plain",
        gated_heads=entry.head_gates != "none",
        delta=delta,
        no_mlp=entry.mlp == "none",
    )


def _intermediate(entry: Description, config, blocks: list[Block]) -> int:
    """Elements between the projections of an MLP, or of an expert where no layer has an MLP."""
    if entry.mlp == "none":
        return config.hidden_size  # nobody reads it
    if entry.heads == "by layer":
        return _widest(blocks)[2]
    dense = next((block for block in blocks if block.experts is None), None)
    return blocks[0].experts.inner if dense is None else linear_shape(dense.modules["down"], "down")[0]


def _heads(
    entry: Description, config, layers: nn.ModuleList, blocks: list[Block]
) -> tuple[int, int, int, nn.Module | None]:
    """How many heads and key heads there are, how many elements each has, and the attention of the first layer that
    has one. Where none attends, as in Mamba-2 or the first layers of a hybrid: those of the whole model, or the least
    that a decoder takes."""
    attending = next((index for index, block in enumerate(blocks) if block.delta is None), None)
    if attending is None:
        heads = getattr(config, "num_attention_heads", None)
        if heads is None:
            return 1, 1, 16, None  # of which the attention kernels of GPUs take multiples
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return heads, named(config, entry, "kv_heads"), head_dim, None
    attention, block = part(layers[attending], entry.attention), blocks[attending]
    if entry.heads == "by layer":
        return config.num_attention_heads, *_widest(blocks)[:2], attention
    if "k" in block.modules:
        kv_heads = named(config, entry, "kv_heads")
        head_dim = linear_shape(block.modules["k"], "k")[1] // kv_heads
    else:
        head_dim = named(attention, entry, "head_dim")
        whole = next(block.modules[name] for name in ("qkv", "qkv_by_head") if name in block.modules)
        kv_heads = (linear_shape(whole, "qkv")[1] // head_dim - config.num_attention_heads) // 2
    return config.num_attention_heads, kv_heads, head_dim, attention


def _block(entry: Description, config, layers: nn.ModuleList, index: int, rope_table: int, window: int) -> Block:
    layer = layers[index]
    try:
        experts = None if entry.experts is None else expert_block(entry.experts, layer, index)
    except UnreadExperts as error:
        raise UnknownArchitecture(str(error)) from None
    places = {name: place for name, place in entry.linears.items() if experts is None or name in OF_ATTENTION}
    norms, delta = entry.norms, None
    if entry.delta is not None and getattr(layer, entry.delta.net, None) is not None:
        delta = delta_net(entry.delta, layer, index)
        places = {name: place for name, place in places.items() if name not in OF_ATTENTION}
        places |= {f"delta_{name}": place for name, place in entry.delta.linears.items()}
        norms = {name: place for name, place in norms.items() if name not in ("q", "k")}
    absent = absent_linears(entry, layer)
    modules = {name: part(layer, place) for name, place in places.items() if name not in absent}
    norms = {name: place for name, place in norms.items() if name not in absent}
    unrotated = entry.head_norms == "per rotated head" and rope_kind(entry, config, index) == UNROTATED
    flag = entry.head_norms_flag is None or named(config, entry, "head_norms_flag")
    without = ("q", "k") if unrotated or not flag else ()
    norms = {name: part(layer, place) for name, place in norms.items() if name not in without}
    width = linear_shape(modules["o" if delta is None else "delta_out"], "o")[1]
    own = getattr(part(layer, entry.attention), "head_dim", width) if {"q", "k"} & norms.keys() else width
    found = {
        name: norm_of(norm, entry, own if name in ("q", "k") else width)
        for name, norm in norms.items()
        if type(norm) is not nn.Identity
    }
    sinks = None if entry.sinks is None else part(layer, entry.sinks, nn.Module.get_parameter).detach()
    norms = [found.get(name) for name in NORMS]
    form = layer_form(entry, config, layers, index, modules, width)
    return Block(modules, norms, window, rope_table, experts, sinks, delta, form)


def _widest(blocks: list[Block]) -> tuple[int, int, int]:
    """Sizes that all layers, which have some of their own, fit in."""
    key_heads, head_dim, intermediate = zip(*(block.form.sizes for block in blocks), strict=True)
    return max(key_heads), max(head_dim), max(intermediate)


def _require_sizes(sizes: Sizes, block: Block, index: int, inputs: int = 0) -> None:
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


def _require_head_norms(entry: Description, sizes: Sizes, block: Block, index: int) -> None:
    together = entry.head_norms == "all heads"
    kv_heads, head_dim, _ = block.form.sizes or (sizes.kv_heads, sizes.head_dim, 0)
    for name, heads in (("q", sizes.heads), ("k", kv_heads)):
        norm = block.norms[NORMS.index(name)]
        expected = head_dim * (heads if together else 1)
        if norm is not None and norm.weight.numel() != expected:
            found = f"has {norm.weight.numel()} elements, {expected} are those of {entry.head_norms}"
            raise UnknownArchitecture(f"the {name} norm of layer {index} {found}")
