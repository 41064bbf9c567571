"""How does a model come to hold its own 4-bit draft inside its exact BF16 weights, and how is it undone?"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..formats import NestedWeight
from ..formats.nested import FORMAT
from ..formats.nested.codebooks import require_codebook_name
from .adapters import without_wrapper
from .agreement import agreed
from .calibration import by_memory, hessians, read_samples
from .castable import holds_draft, listed, require_dense, require_finite_float, require_plain_inputs
from .expert_modules import is_experts
from .linear import is_dense
from .nest_experts import nest_experts, require_finite_experts
from .nest_in_place import NestingInPlace, can_nest_in_place
from .nest_plan import Plan, nothing_to_nest, plan_of
from .nest_swap import AnySwap, PartSwap, Swap, nested_swaps, undone
from .nested import NestedLinear
from .packed import PackedModule
from .replace import attach_quantizer, detach_quantizer
from .settings import cache_settings
from .shards import Laid, is_sharded, is_shared, local, local_linear, mesh_of, split_as, style_of
from .state import state_of
from .switch import PrecisionSwitch

MOST_ESCAPED_ROWS = 0.01  # of a weight's rows: they are kept whole beside the planes, and read by every exact product


def nest(
    model: PreTrainedModel, codebook: str = "lloyd_max", calibration: Iterable | None = None
) -> PreTrainedModel:
    """Convert every linear weight of ``model`` in place to one that holds its own 4-bit draft: 16.25 bits, exact.

    Every bfloat16 ``nn.Linear`` whose in_features is a multiple of 32 becomes a ``NestedLinear`` (docs/formats.md,
    "Nested BF16"), an embedding tied to the output head a ``NestedEmbedding`` over the head's parameters, a module of
    bfloat16 experts ``NestedExperts``. The model's results stay the same, bit for bit with the compiled kernels, and
    it can draft for itself: ``model.generate(..., assistant_models=["nested"])`` reads 4.25 of the 16.25 bits. It can
    be moved, saved and loaded like any model. ``unnest`` restores the plain model exactly. Adapters (PEFT) stay as
    they are, beside nested weights. Processes that share a model (``tp_plan``) each nest their part.

    codebook: magnitudes of the draft: "lloyd_max", "mxfp4" (those of MXFP4) or "fitted" (to each tensor).
    calibration: input_ids, tensors ``[tokens]`` or ``[rows, tokens]`` or lists of ids: the bits of the draft are then
        chosen with GPTQ's error feedback (arXiv 2210.17323) on this text; exact values do not change. A few samples of
        some hundred tokens are enough; each runs through the model once for every 256 MB of Hessians. The drafts of
        experts are the nearest levels, without it.

    Tensors are converted one at a time, the largest first, on the CPU in their own memory. The peak is the size of the
    result (1.016 times the linear weights) plus 0.28 of one weight. One weight exists twice for a moment on a GPU,
    with calibration, if 16 does not divide the number of outputs, or if something else holds the tensor (an optimizer,
    an early_exit view, the caller); the other holder keeps the old tensor. A warning names the layers that stay plain:
    other in_features, weights that are not bfloat16, shared by several linears, or with too many values below 2^-30 of
    their block; experts of an unknown kind; Conv1D. After an error the model is as it was before the call.

    Raises TypeError if ``model`` is not a PreTrainedModel; ValueError if it is nested already, quantized, not in
    bfloat16 or not wholly in memory, for NaN or Inf (naming the tensor), an unknown codebook, or invalid calibration
    text.
    """
    given, model = model, without_wrapper(model, "nest")
    with agreed(model):
        plan = _checked_plan(model, codebook)
        samples = None if calibration is None else _read(model, calibration)
    nest_planned(model, plan, codebook, PrecisionSwitch("nested"), samples)
    if not any(map(holds_draft, model.modules())):
        raise ValueError(nothing_to_nest(model, plan))
    settings = {"format": FORMAT.written, "codebook": codebook, "modules_to_not_convert": kept_linears(model, plan)}
    attach_quantizer(model, settings)
    tell_kept(model, plan)
    return given


def _read(model: PreTrainedModel, calibration: Iterable) -> list[Tensor]:
    if is_shared(model):
        raise ValueError("nest: processes share this model, and each sees a part of what layers multiply: leave "
                         "calibration out, or nest the whole model")
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return read_samples(calibration, vocabulary, next(model.parameters()).device)


def unnest(model: PreTrainedModel) -> PreTrainedModel:
    """Undo ``nest`` in place: plain ``nn.Linear`` and ``nn.Embedding`` modules with the exact bfloat16 weights.

    If the model's other parameters are float32, the weights become float32 with the same values. Raises ValueError if
    the model is not nested, is a draft that also has layers of another format, or has a dtype that cannot hold the
    weights exactly; TypeError if it is not a model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unnest takes a model, not a {type(model).__name__}")
    given, model = model, without_wrapper(model, "unnest")
    if is_shared(model):
        raise ValueError("unnest: processes share this model, and its weights are parts: load it again")
    learns = any(parameter.requires_grad for parameter in model.parameters())
    dtype = getattr(model, "dtype", torch.bfloat16)
    swaps = nested_swaps(model, learns, dtype)
    if not swaps:
        raise ValueError(f"unnest: this {type(model).__name__} is not nested: there is nothing to undo")
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"unnest: the model is {dtype}, which cannot hold its weights: model.to(torch.bfloat16) first"
        )
    other = next((m for m in model.modules() if isinstance(m, PackedModule) and not holds_draft(m)), None)
    if other is not None:
        raise ValueError(
            f"unnest: this {type(model).__name__} holds a {type(other).__name__} and nested weights, as a cast does: "
            "unnest the model that it was made from"
        )
    require_plain_inputs(model, "unnest")
    for swap in swaps:
        swap.put_back(model)
    if isinstance(model, PreTrainedModel):
        kept = cache_settings(model)
        detach_quantizer(model)
        if kept:
            attach_quantizer(model, {"format": None, **kept})
        _tie_again(model)
    return given


def nest_planned(
    model: nn.Module, plan: Plan, codebook: str, switch: PrecisionSwitch, samples: list[Tensor] | None = None
) -> None:
    """Nest what the plan holds; what stays after all is noted in it. Whatever is raised, the model is as it was."""
    state_of(model).drop_engines()  # compiled over the plain weights, and holding them; the next call builds anew
    groups = [[name] for name in _largest_first(model, plan)] if samples is None else _groups(model, plan)
    # transformers' own bar: it honours disable_progress_bar() and HF_HUB_DISABLE_PROGRESS_BARS.
    bar = logging.tqdm(total=len(plan.paths) + len(plan.experts), desc="Nesting", unit="tensor", leave=False)
    with bar, undone(model) as done, agreed(model):
        for name, paths in plan.experts.items():
            why = nest_experts(model, name, paths, codebook, switch, done)
            if why is not None:
                plan.kept |= dict.fromkeys(paths, why)
            bar.update()
        for names in groups:
            found = {}
            if samples is not None:
                found = hessians(model, [(name, model.get_submodule(name)) for name in names], samples)
            for name in names:
                why = _nest_one(model, plan, name, codebook, switch, found.pop(name, None), done)
                if why is not None:
                    plan.kept |= dict.fromkeys(plan.paths[name], why)
                bar.update()
    _untie(model)


# Both give names only: a list of modules would keep every weight in memory that gave its place to a nested one.
def _largest_first(model: nn.Module, plan: Plan) -> list[str]:
    """The largest weight is there twice for a moment: best before all others have grown by their exponent bytes."""
    return sorted(plan.paths, key=lambda name: -model.get_submodule(name).weight.numel())


def _groups(model: nn.Module, plan: Plan) -> list[list[str]]:
    groups = by_memory([(name, model.get_submodule(name)) for name in plan.paths])
    return [[name for name, _ in group] for group in groups]


def _nest_one(
    model: nn.Module, plan: Plan, name: str, codebook: str, switch: PrecisionSwitch, hessian: Tensor | None,
    done: list[AnySwap],
) -> str | None:  # fmt: skip
    """Why the weight stays as it is after all."""
    linear = model.get_submodule(name)
    swap = Swap(plan.paths[name], plan.tables.get(name, []), type(linear), linear.weight.requires_grad)
    if is_sharded(linear):
        return _nest_part(model, plan, name, codebook, switch, done)
    if hessian is None and can_nest_in_place(linear, owners=1 + bool(swap.tables)):
        return _nest_in_place(model, name, codebook, switch, swap, done)
    weight = NestedWeight.from_dense(linear.weight.detach(), codebook, f"{name}.weight", hessian)
    if why := _too_many_escapes(weight.weight_escape_index, *linear.weight.shape):
        return why
    layer = NestedLinear(weight, linear.bias, switch)
    done.append(swap)
    swap.put_nested(model, layer)
    return None


def _nest_part(
    model: nn.Module, plan: Plan, name: str, codebook: str, switch: PrecisionSwitch, done: list[AnySwap]
) -> str | None:
    """This process's part of a weight, beside it."""
    linear, style = model.get_submodule(name), style_of(model, name)
    own = local_linear(linear)
    weight = NestedWeight.from_dense(own.weight.detach(), codebook, f"{name}.weight")
    if why := _too_many_escapes(weight.weight_escape_index, *own.weight.shape):
        return why
    layer = split_as(NestedLinear(weight, None, switch), linear, style, mesh_of(model))
    swap = PartSwap(plan.paths[name], style, Laid.of(linear.weight))
    done.append(swap)
    swap.put_nested(model, layer)
    return None


def _nest_in_place(
    model: nn.Module, name: str, codebook: str, switch: PrecisionSwitch, swap: Swap, done: list[AnySwap]
) -> str | None:
    linear = model.get_submodule(name)
    nesting = NestingInPlace(linear.weight.detach(), codebook, f"{name}.weight")
    if why := _too_many_escapes(nesting.index, *linear.weight.shape):
        return why
    try:
        layer = NestedLinear.in_tiles(linear, nesting.tiles(), switch)
        done.append(swap)
        swap.put_nested(model, layer)
    except BaseException:
        if model.get_submodule(name) is linear:  # else it is nested, and undone like those before it
            nesting.restore()
        raise
    return None


def _checked_plan(model: PreTrainedModel, codebook: str) -> Plan:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"nest takes a transformers PreTrainedModel, not {type(model).__name__}")
    if not isinstance(codebook, str):
        raise TypeError(f"nest: codebook is {codebook!r}, expected a name")
    require_codebook_name(codebook)
    if any(holds_draft(module) for module in model.modules()):
        raise ValueError(
            f"nest: this {type(model).__name__} is already nested; call hf_mlspec.unnest(model) first to nest it again"
        )
    require_dense(model, "nest", adapters=True, or_sharded=is_shared(model))
    plan = plan_of(model)
    if not plan.paths and not plan.experts:
        raise ValueError(nothing_to_nest(model, plan))
    for name in plan.paths:
        require_finite_float(f"{name}.weight", local(model.get_submodule(name).weight.detach()), "nest")
    require_finite_experts(model, plan)
    return plan


def _too_many_escapes(index: Tensor | None, out_features: int, in_features: int) -> str | None:
    if index is None:
        return None
    rows = len((index // in_features).unique())
    if rows <= MOST_ESCAPED_ROWS * out_features:
        return None
    return (
        f"{len(index)} values below 2^-30 of their block's largest in {rows} of {out_features} rows, "
        f"at most {MOST_ESCAPED_ROWS:.0%} are nested"
    )


def kept_linears(model: nn.Module, plan: Plan) -> list[str]:
    """Those of the plan's kept modules that loading would nest if the config did not name them."""
    kept = [path for path in plan.kept if _is_module(model, path)]
    return sorted(path for path in kept if is_dense(own := model.get_submodule(path)) or is_experts(own))


def _is_module(model: nn.Module, path: str) -> bool:
    parent, _, name = path.rpartition(".")  # a parameter of experts of an unknown kind is kept, too
    return name in model.get_submodule(parent)._modules


def tell_kept(model: nn.Module, plan: Plan) -> None:
    """One warning with the names of what stays as it is."""
    if plan.kept:
        warnings.warn(
            f"nest: {len(plan.kept)} weights of {type(model).__name__} stay as they are: {listed(plan.kept)}",
            UserWarning,
            stacklevel=3,
        )


def _untie(model: nn.Module) -> None:
    """What transformers would tie again is one nested weight now, under no name that it knows."""
    for module in model.modules():
        tied = getattr(module, "all_tied_weights_keys", None) if isinstance(module, PreTrainedModel) else None
        gone = {name for name in tied or () if not _has_weight(module, name)}
        if gone:
            module.all_tied_weights_keys = {name: source for name, source in tied.items() if name not in gone}
            module._tied_weights_keys = None  # this model's own; the class keeps its


def _has_weight(model: nn.Module, name: str) -> bool:
    path, _, key = name.rpartition(".")
    return key in model.get_submodule(path)._parameters


def _tie_again(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and "_tied_weights_keys" in vars(module):
            del module._tied_weights_keys
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and hasattr(module, "all_tied_weights_keys"):
            module.all_tied_weights_keys = module.get_expanded_tied_weights_keys(all_submodels=True)
