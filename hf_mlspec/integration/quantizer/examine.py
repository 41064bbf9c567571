"""What is a checkpoint, and what becomes of it here? Its config.json, the headers of its files and its scales tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from ... import ops
from ...checkpoints.anyprecision import AnyPrecisionReader
from ...checkpoints.layer import LayerPlan, Reader
from ...checkpoints.readers import PACKAGES, method_of, reader_for
from ...checkpoints.safetensors_file import StoredTensor
from ...engines.foreseen import why_not_decoded
from ...formats import FORMATS, ZipperWeight, casts
from ...formats.weight import INPUT_DTYPES
from ...nn.expert_modules import is_experts
from ...nn.experts import PackedExperts
from ...nn.linear import is_dense
from ...nn.packed import PackedLinear, PackedModule
from ...nn.packed_formats import PACKINGS
from ...nn.switch import PrecisionSwitch
from ...nn.transforms import NONE, ORDER
from ...nn.zipper import ZipperLinear
from ...nn.zipper_embedding import ZipperEmbedding
from ...precision import Precision
from ..levels.load import require_folder
from ..levels.words import LOOKUPS, require_no_head
from .blank import blank_model, plan_folder, quantization_of, read_checkpoint
from .checkpoint import Checkpoint, require_packed, require_plain
from .config import QUANT_METHOD, MLSpecConfig
from .ends import put_empty_embedding
from .nested_loading import escapes_of, plain_experts, tied_to_tables
from .packing import packed_modules, packed_parameters, packed_weights, put_packed
from .research import Research, research_of
from .source import missing_packages
from .source_config import is_gguf
from .source_experts import ENDS, MXFP4, SourceExperts
from .source_layers import by_module, shared_switch, tensors_of
from .source_mixtures import SourceMixture

_OPS = {"mxfp4": "mxfp4_linear", "int4": "int4_linear", "nested": "nested_linear", "planes": "bitplane_linear",
        "lut": "lut_linear", "int4_int8": "int4_int8_linear", "zipper": "zipper_high_linear"}  # fmt: skip
_DENSE_OPS = {torch.bfloat16: "bf16_linear", torch.float32: "f32_linear"}
_INDEXES = ("g_idx", "weight_g_idx")  # the group of every input


@dataclass(frozen=True)
class Layers:
    """Linear layers, or modules of experts, that are stored alike: in words, how many, their weights, their bytes on
    disk, what they become here, and why that is dense where it is."""

    stored_as: str
    count: int
    weights: int
    stored_bytes: int
    becomes: str
    why_dense: str = ""

    @property
    def bits_per_weight(self) -> float:
        """On disk, scales included."""
        return self.stored_bytes * 8 / self.weights


@dataclass(frozen=True)
class Examined:
    """A checkpoint. method: its quant_method, "" for none. title: what people call that. dtype: of what is not packed,
    once it is loaded by `hf_mlspec.load`. kv_cache: in which format keys and values are kept, "" for as they are
    computed. dense: linear layers that stay dense. engines: what runs it on a CPU and on
    a GPU of this machine. kernels: op -> kernel on this CPU. stock: whether transformers alone would load it. levels:
    words for levels below it. high_zeros: of zipper weights, by layer, the part whose high part is 0."""

    folder: str
    method: str
    title: str
    model_class: str
    dtype: str
    kv_cache: str
    files: int
    stored_bytes: int
    weights: int
    layers: list[Layers]
    dense: list[str]
    engines: dict[str, str]
    kernels: dict[str, str]
    stock: str
    levels: list[str]
    high_zeros: dict[str, float] = field(default_factory=dict)


def examine(folder: str) -> Examined:
    """What the checkpoint in ``folder`` is. No weight is loaded but zipper's. ValueError or TypeError, in one line,
    for a folder that is missing, holds no model, is damaged, or is of a kind that is not read."""
    require_folder(folder)
    if not Path(folder).is_dir() and not is_gguf(folder):
        raise ValueError(f"{folder!r} is no folder: give that of a checkpoint, or a GGUF file")
    require_no_head(folder)
    research = research_of(folder)
    if research is not None:
        return _research(folder, research)
    found = quantization_of(folder)
    method, kept = method_of(found), ""
    reader = None if found is None or method == QUANT_METHOD else reader_for(found)
    checkpoint = read_checkpoint(folder, reader)
    if found is None:
        model, layers, title = *_unquantized(folder, checkpoint), "not quantized"
    elif method == QUANT_METHOD:
        config, title = MLSpecConfig(**found), "hf_mlspec"
        kept = config.kv_cache or ""
        examined = _unquantized(folder, checkpoint) if config.record is None else _ours(folder, config, checkpoint)
        model, layers = examined
        model.config.quantization_config = config
    else:
        title = reader.title
        model, layers = _foreign(folder, reader, checkpoint)
    engines = {word: _engine(model, word) for word in ("cpu", "cuda") if word == "cpu" or torch.cuda.is_available()}
    return Examined(
        folder=folder, method=method, title=title, model_class=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."), kv_cache=kept, files=len(checkpoint.checksums),
        stored_bytes=sum(tensor.end - tensor.begin for tensor in checkpoint.tensors.values()),
        weights=_weights(model), layers=layers,
        dense=sorted(name for name, module in model.named_modules() if is_dense(module)),
        engines=engines, kernels=_kernels(model), stock=_stock(method), levels=_levels(model),
        high_zeros=_high_zeros(model, checkpoint) if method == QUANT_METHOD else {},
    )  # fmt: skip


def _research(folder: str, found: Research) -> Examined:
    """Of a folder that becomes no model, so that nothing runs it."""
    checkpoint = read_checkpoint(folder)
    floats = [t for t in checkpoint.tensors.values() if t.dtype is not None and t.dtype.is_floating_point]
    layers = _grouped(found.layers(checkpoint.tensors))
    stored = sum(map(_bytes, checkpoint.tensors.values()))
    return Examined(
        folder=folder, method=str(found.config.get("model_type", "")), title=found.title,
        model_class=next(iter(found.config.get("architectures") or ()), "no model"),
        dtype=str(floats[0].dtype).removeprefix("torch.") if floats else "", kv_cache="",
        files=len(checkpoint.checksums), stored_bytes=stored,
        weights=sum(own.weights for own in layers) + sum(math.prod(tensor.shape) for tensor in floats), layers=layers,
        dense=[], engines={"cpu": f"nothing: {found.why}; {found.reader} dequantizes it"}, kernels={}, stock="no",
        levels=[],
    )  # fmt: skip


def _dtype(folder: str, checkpoint: Checkpoint) -> torch.dtype | None:
    """As `hf_mlspec.load` chooses it: that of config.json, bfloat16 in place of float16, else that of the first
    tensor."""
    if is_gguf(folder):
        return torch.bfloat16
    told = getattr(AutoConfig.from_pretrained(folder), "dtype", None)
    if told is not None:
        return torch.bfloat16 if told == torch.float16 else told
    return next((tensor.dtype for tensor in checkpoint.tensors.values() if tensor.dtype in INPUT_DTYPES), None)


def _unquantized(folder: str, checkpoint: Checkpoint) -> tuple[PreTrainedModel, list[Layers]]:
    model = blank_model(folder, _dtype(folder, checkpoint))
    require_plain(checkpoint, model)
    stored, plans = by_module(checkpoint.tensors), []
    for name, module in model.named_modules():
        if is_dense(module):
            held = tensors_of(name, stored, model).get("weight")
            dtype = held.dtype if held is not None else module.weight.dtype
            count, word = module.weight.numel(), str(dtype).removeprefix("torch.")
            plans.append((f"dense, {word}", count, count * dtype.itemsize, "dense", ""))
    return model, _grouped(plans)


def _foreign(folder: str, reader: Reader, checkpoint: Checkpoint) -> tuple[PreTrainedModel, list[Layers]]:
    experts = {name: m for name, m in blank_model(folder, reader=reader).named_modules() if is_experts(m)}
    model, plans = plan_folder(folder, reader, _dtype(folder, checkpoint))
    found = [
        (plan.stored_as, plan.layer.in_features * plan.layer.out_features, plan.stored_bytes, plan.read_as,
         plan.why_dense) for plan in plans
    ]  # fmt: skip
    for name, module in list(model.named_modules()):
        if isinstance(module, SourceExperts):
            held = PackedExperts.empty(experts[name], MXFP4, None, name)
            stored = sum(tensor.nbytes for own, tensor in module.named_parameters() if own.endswith(ENDS))
            model.set_submodule(name, held.eval())
            found.append(("MXFP4, experts", packed_weights(held), stored, FORMATS[MXFP4].title, ""))
        elif isinstance(module, SourceMixture):
            weights = sum(one.layer.in_features * one.layer.out_features for one in module.each())
            found.append((module.stored_as, weights, module.stored_bytes, module.read_as, module.choice.why))
            model.set_submodule(name, module.empty().eval())
    _put_empty(model, plans)
    return model, _grouped(found)


def _put_empty(model: PreTrainedModel, plans: Iterable[LayerPlan]) -> None:
    """The layers as they will be, without memory."""
    plans = list(plans)
    ordered = any(plan.ordered for plan in plans)
    switches: dict[tuple, PrecisionSwitch] = {}
    for plan in plans:
        name, sizes = plan.layer.name, (plan.layer.in_features, plan.layer.out_features)
        bias = model.get_submodule(name).bias
        linear = nn.Linear(*sizes, bias=False, device="meta", dtype=model.dtype)
        linear.bias = bias
        if plan.format:
            switch = shared_switch(switches, plan.format, plan.options)
            linear = PACKINGS[plan.format].linear.empty(linear, name=name, switch=switch, **plan.options)
            linear = linear.transform_(ORDER, {"order": _order(plan)}) if ordered else linear
        model.set_submodule(name, linear.eval())


def _order(plan: LayerPlan) -> torch.Tensor:
    """int32 ``[in]``: the inputs group by group, as its reader has them."""
    index = next((plan.layer.tensors[name] for name in _INDEXES if name in plan.layer.tensors), None)
    if index is None or not plan.ordered:
        return torch.arange(plan.layer.in_features, dtype=torch.int32)
    return torch.argsort(index.load().long(), stable=True).to(torch.int32)


def _ours(folder: str, config: MLSpecConfig, checkpoint: Checkpoint) -> tuple[PreTrainedModel, list[Layers]]:
    model = blank_model(folder, _dtype(folder, checkpoint))
    require_plain(checkpoint, model)
    kept = set(config.modules_to_not_convert)
    kept |= tied_to_tables(model) | plain_experts(model, checkpoint) if config.record.in_place else set()
    put_packed(model, config, kept, with_sources=False, escapes=escapes_of(checkpoint))
    if config.head_and_embedding:
        put_empty_embedding(model, config)
    guard = min(packed_modules(model), key=lambda own: not isinstance(own[1], PackedLinear))  # the first linear
    ignored = {*(model._keys_to_ignore_on_load_unexpected or ()), rf"{guard[0]}\.{guard[1].names[0]}$"}
    model._keys_to_ignore_on_load_unexpected = ignored
    require_packed(checkpoint, model, packed_parameters(model), headers_only=True)
    stored = by_module(checkpoint.tensors)
    for name, module in packed_modules(model):
        if isinstance(module, PackedLinear) and module.transform is ORDER:
            module.transform_(ORDER, {"order": tensors_of(name, stored, model)["transform_order"].load()})
    settings = ", ".join(f"{name} {value}" for name, value in config.format_settings.items())
    word = config.format + (f" ({settings})" if settings else "")
    word += f", 4-bit activations clipped at {config.activation_clip:g}" if config.activation_clip else ""
    word += f", inputs transformed ({config.transform})" if config.transform != NONE.word else ""
    return model, _grouped(
        (word + _kind(module), packed_weights(module),
         sum(map(_bytes, _packed_tensors(name, module, stored, model))), f"{config.record.title}, as it is", "")
        for name, module in packed_modules(model)
    )  # fmt: skip


def _kind(module: PackedModule) -> str:
    if isinstance(module, PackedLinear):
        return ""
    return ", embedding" if isinstance(module, ZipperEmbedding) else ", experts"


def _high_zeros(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, float]:
    stored, found = by_module(checkpoint.tensors), {}
    for name, module in packed_modules(model):
        if isinstance(module, ZipperLinear):
            own = tensors_of(name, stored, model)
            weight = ZipperWeight(*[own[f"weight_{part}"].load() for part in module.record.parts], name)
            found[name] = weight.validate(module.out_features, module.in_features).high_zeros()
    return found


def _packed_tensors(
    name: str, module: PackedModule, stored: dict[str, dict[str, StoredTensor]], model: PreTrainedModel
) -> Iterator[StoredTensor]:
    parts = {f"{own}_{part}" for own in module.names for part in module.record.parts}
    return (tensor for own, tensor in tensors_of(name, stored, model).items() if own in parts)


def _bytes(tensor: StoredTensor) -> int:
    return tensor.end - tensor.begin


def _grouped(found: Iterable[tuple[str, int, int, str, str]]) -> list[Layers]:
    """(stored as, weights, bytes, becomes, why dense) of every layer -> those that are alike together, most first."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for stored_as, weights, stored_bytes, becomes, why in found:
        sums = groups.setdefault((stored_as, becomes, why), [0, 0, 0])
        for index, value in enumerate((1, weights, stored_bytes)):
            sums[index] += value
    layers = [Layers(stored_as, *sums, becomes, why) for (stored_as, becomes, why), sums in groups.items()]
    return sorted(layers, key=lambda own: -own.weights)


def _weights(model: PreTrainedModel) -> int:
    modules = [module for _, module in packed_modules(model)]
    parts = {id(part) for module in modules for name in module.names for part in module.held(name)}
    return sum(map(packed_weights, modules)) + sum(p.numel() for p in model.parameters() if id(p) not in parts)


def _engine(model: PreTrainedModel, word: str) -> str:
    why = why_not_decoded(model, word)
    return "a compiled decoder" if why is None else f"module by module: {why}"


def _kernels(model: PreTrainedModel) -> dict[str, str]:
    """The kernel of this CPU for every op that its linear layers need."""
    used = {_OPS[module.format] for _, module in packed_modules(model) if module.format in _OPS}
    used |= {_DENSE_OPS[m.weight.dtype] for m in model.modules() if is_dense(m) and m.weight.dtype in _DENSE_OPS}
    return {op: kernel for op, device, kernel in ops.kernel_table() if device == "cpu" and op in used}


def _stock(method: str) -> str:
    if method == QUANT_METHOD:
        return "with import hf_mlspec"
    if method == AnyPrecisionReader.method:
        return "no, it would give the layers new weights"
    missing = missing_packages(method)
    if missing:
        return f"no, it needs {' and '.join(missing)}, not installed here"
    packages = PACKAGES.get(method, ())
    return f"yes, with {' and '.join(packages)}" if packages else "yes"


def _levels(model: PreTrainedModel) -> list[str]:
    """Words for levels that need no other model."""
    switches = {id(module.switch): module.switch for _, module in packed_modules(model)}
    early = [f"early_exit:{max(1, getattr(model.config.get_text_config(), 'num_hidden_layers', 2) // 2)}"]
    if not switches:
        nested = ["nested"] if model.dtype == torch.bfloat16 else []
        return [*casts(), *nested, *early, *LOOKUPS]
    own: list[str] = []
    if len(switches) == 1:
        (switch,) = switches.values()
        record, choices = switch.record, switch.bit_choices
        own = list(record.level_words) or [str(Precision(record.family, *bits)) for bits in choices[1:]]
    return [*own, *early, *LOOKUPS]
