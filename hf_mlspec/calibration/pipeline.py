"""How does a model get its codes, block by block, each on what the packed blocks before it compute?

A block is run once as it is, to see what its layers multiply; scales are folded, codes chosen, layers replaced; then
the packed block computes the inputs of the next one. What is held beside the model: statistics and trial weights of
one block, and the hidden states of all samples in the model's dtype, which may wait in a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..formats import Int4Weight, PackedWeight, ZipperWeight, format_named
from ..formats.zipper import Split
from ..nn.castable import has_dense_weight
from ..nn.hooks import keep_hook
from ..nn.linear import KernelLinear
from ..nn.packed import PackedLinear
from ..nn.packed_formats import PACKINGS
from ..nn.switch import PrecisionSwitch
from ..nn.transforms import Transform, TransformedLinear
from .blocks import Call, blocks_of, first_inputs
from .coding import DAMPING, clipped_weight, factor_of, feedback_weight, outlier_weight
from .families import Feed, feeds_of
from .finished import FinishedBlocks
from .fold import fold, shared
from .freed import release_free, release_pages
from .methods import ROW_SCALED, Method
from .row_codes import row_feedback_weight
from .scaling import best_scales
from .statistics import Inputs, collect
from .trials import Trial, int4_trial, zipper_trial


@dataclass(frozen=True)
class Plan:
    """What is to be done. search_bits: activation bits that SmoothQuant's search assumes. act_order: GPTQ rounds the
    inputs of the largest squares first. transform: of the inputs of every packed layer; of a rotated model the
    rotations. activation_clip: of 4-bit ones. kept: full names of linears that stay. format: its word, and options:
    those of zipper weights, whose scales are per row: no group_size and symmetric."""

    method: Method
    group_size: int
    symmetric: bool
    activation_bits: int
    search_bits: int
    act_order: bool
    transform: Transform
    kept: frozenset[str]
    damping: float = DAMPING
    activation_clip: float = 1.0
    format: str = "int4"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def row_scaled(self) -> bool:
        """Whether a scale is a row's: weights in two parts."""
        return self.format == ROW_SCALED

    @property
    def split(self) -> Split:
        """Of weights in two parts."""
        return Split(self.options["bits"], self.options["low_bits"], self.options["mode"])

    @property
    def trial(self) -> Trial:
        """What weights give in this format, by which scales are judged."""
        bits = 16 if self.method.scaling == "awq" else self.search_bits
        if self.row_scaled:
            return zipper_trial(self.split, bits)
        return int4_trial(self.group_size, self.symmetric, bits, self.activation_clip)


@dataclass(frozen=True)
class LayerReport:
    """sqnr: of the layer's outputs on kept inputs, in decibels: power of the product with the scaled, unrounded weight
    over that of the difference. alpha: of the scale folded into what feeds it, None without."""

    block: int
    name: str
    sqnr: float | None
    alpha: float | None


@torch.no_grad()
def calibrate(
    model: nn.Module, samples: list[Tensor], plan: Plan, switch: PrecisionSwitch,
    finished: FinishedBlocks | None = None, progress: Callable[[int], None] = lambda index: None,
    rotated: Iterator[int] | None = None, hidden: MutableSequence[Tensor] | None = None,
) -> list[LayerReport]:  # fmt: skip
    """Pack every dense linear of the blocks that ``plan.kept`` does not name, in place, under ``switch``.

    samples: int64 ``[1, tokens]`` each. finished: blocks that are done are taken from there, and others put there.
    progress: called behind every block. rotated: rotates the next block, in the end the head (`rotate_ends`).
    hidden: empty, where hidden states wait (`waiting_states`); None: in a list.
    ValueError names block and layer; the model is then packed in part.
    """
    blocks, work = blocks_of(model), _Work(model, plan, switch)
    release_pages(model.parameters())
    hidden = [] if hidden is None else hidden
    calls = first_inputs(model, samples, hidden)
    reports: list[LayerReport] = []
    for index, (name, block) in enumerate(blocks):
        if rotated is not None:
            next(rotated)
        passes = _passes(block, samples, hidden, {size: own[index] for size, own in calls.items()})
        if finished is not None and index in finished:
            tensors, told = finished.read(index)
            work.put_back(block, name, tensors)
            reports += [LayerReport(**entry) for entry in told]
        else:
            made = work.pack(block, name, index, passes)
            reports += made
            if finished is not None:
                finished.write(index, dict(block.state_dict()), [asdict(report) for report in made])
        if index + 1 < len(blocks):
            for place, run in enumerate(passes):  # what a sample was is freed as soon as it is what comes next
                hidden[place] = run()
        release_free()
        progress(index)
    if rotated is not None:
        next(rotated, None)
    return reports


def _passes(
    block: nn.Module, samples: list[Tensor], hidden: MutableSequence[Tensor], calls: Mapping[int, Call]
) -> list[Callable[[], Tensor]]:
    """The block, run on each of the hidden states of ``samples``; calls: by their tokens."""
    sizes = [ids.shape[-1] for ids in samples]
    return [lambda place=place, size=size: calls[size].run(block, hidden[place]) for place, size in enumerate(sizes)]


class _Work:
    """What is done with one block after another."""

    def __init__(self, model: nn.Module, plan: Plan, switch: PrecisionSwitch) -> None:
        config = model.config.get_text_config(decoder=True)
        self.plan, self.switch = plan, switch
        self.heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        self.record = format_named(plan.format)
        scaling = plan.method.scaling
        everywhere = plan.row_scaled and not plan.method.rotates  # a rotated input takes no scale of channels
        self.feeds = feeds_of(type(model).__name__, scaling, everywhere) if scaling else ()

    def pack(self, block: nn.Module, where: str, index: int, passes: list[Callable[[], Tensor]]) -> list[LayerReport]:
        """Choose the codes of a block's layers and replace them."""
        linears = self._linears(block, where)
        with _fast_linears(block):
            seen = collect(
                {name: block.get_submodule(name) for name in linears}, passes, where, self.plan.method.needs_hessians
            )
        release_free()
        alphas = {}
        for feed in self.feeds:
            alphas |= self._scale(block, feed, seen)
        reports = []
        for inputs in seen:
            order = self._order(inputs)
            if order is not None and inputs.hessian is not None:
                inputs.reorder_hessian_(order)
            if self.plan.method.coding == "gptq":
                inputs.hessian = factor_of(inputs.hessian, f"{where}.{inputs.names[0]}", self.plan.damping)
            for name in inputs.names:
                sqnr = self._replace(block, f"{where}.{name}", name, inputs, order)
                reports.append(LayerReport(index, name, sqnr, alphas.get(name)))
                release_free()
            inputs.hessian = None
        return reports

    def _order(self, inputs: Inputs) -> Tensor | None:
        """Of inputs by their squares: GPTQ's begins with the largest, Atom's outliers come last."""
        method = self.plan.method
        if not (self.plan.act_order or (method.reorders and not method.rotates)):
            return None
        return inputs.squares.argsort(descending=self.plan.act_order, stable=True)

    def _linears(self, block: nn.Module, where: str) -> list[str]:
        found = [name for name, module in block.named_modules() if has_dense_weight(module)]
        return [name for name in found if f"{where}.{name}" not in self.plan.kept]

    def _scale(self, block: nn.Module, feed: Feed, seen: list[Inputs]) -> dict[str, float]:
        """Fold the best scale; -> its alpha by layer, nothing where no layer behind it is packed."""
        inputs = next((inputs for inputs in seen if set(inputs.names) & set(feed.consumers)), None)
        if inputs is None:
            return {}
        weights = [block.get_submodule(name).weight for name in inputs.names]
        scales, alpha = best_scales(
            self.plan.method.scaling, weights, inputs,
            lambda values: shared(feed, values, self.heads, self.kv_heads), self.plan.trial,
        )  # fmt: skip
        fold(block, feed, scales, self.heads, self.kv_heads)
        inputs.divide_(scales)
        return dict.fromkeys(inputs.names, alpha)

    def _replace(
        self, block: nn.Module, path: str, name: str, inputs: Inputs, order: Tensor | None
    ) -> float | None:
        linear = block.get_submodule(name)
        wide, rows = linear.weight.detach(), inputs.rows.float()
        if order is not None:
            wide, rows = wide[:, order], rows[:, order]
        weight = self._coded(wide, inputs.hessian, path)
        own = linear.transform_tensors() if isinstance(linear, TransformedLinear) else None
        packed = self._module(linear, weight, own if order is None else {"order": order.int()})
        block.set_submodule(name, packed)
        signal, noise = _power(rows, wide.float()), _power(rows, weight.dequantize().sub_(wide))
        release_pages([linear.weight])
        return 10 * math.log10(signal / noise) if signal and noise else None

    def _coded(self, wide: Tensor, products: Tensor | None, path: str) -> PackedWeight:
        """products: of the inputs, for GPTQ their factor."""
        plan = self.plan
        if plan.row_scaled and plan.method.coding == "gptq":
            return row_feedback_weight(wide, products, plan.options, path)
        if plan.row_scaled:
            return ZipperWeight.from_dense(wide, **plan.options, name=path)
        if plan.method.reorders:
            return outlier_weight(wide, products, path)
        if plan.method.coding == "gptq":
            return feedback_weight(wide, products, plan.group_size, plan.symmetric, path)
        if plan.method.coding == "clip" and not path.endswith(("q_proj", "k_proj")):  # as AWQ: they meet in a product
            return clipped_weight(wide, products, plan.group_size, plan.symmetric, path)
        return Int4Weight.from_dense(wide, plan.group_size, plan.symmetric, path)

    def _module(self, linear: nn.Module, weight: PackedWeight, tensors: dict[str, Tensor] | None) -> PackedLinear:
        packed = PACKINGS[self.record.word].linear(weight, linear.bias, self.switch).train(linear.training)
        keep_hook(linear, packed)
        packed._hf_quantized_needs_local_tp = True  # transformers' tensor parallelism: forward sees its own shard
        return packed.transform_(self.plan.transform, tensors)

    def put_back(self, block: nn.Module, where: str, tensors: dict[str, Tensor]) -> None:
        """Make the block what it was when `tensors`, its state, was kept."""
        for name in self._linears(block, where):
            linear = block.get_submodule(name)
            device = linear.weight.device
            held = [tensors.get(f"{name}.weight_{part}") for part in self.record.parts]
            parts = [None if part is None else part.to(device) for part in held]
            weight = self.record.weight(*parts, f"{where}.{name}")
            own = self.plan.transform.tensors(linear.in_features, device)
            own = {word: tensors[f"{name}.transform_{word}"].to(device) for word in own}
            block.set_submodule(name, self._module(linear, weight, own))
        packed = tuple(f"{name}." for name in self._linears_packed(block))
        for name, parameter in list(block.named_parameters()):
            if not name.startswith(packed) or name.endswith(".bias"):
                owner, _, own = name.rpartition(".")
                value = nn.Parameter(tensors[name].to(parameter.device), requires_grad=parameter.requires_grad)
                setattr(block.get_submodule(owner), own, value)

    def _linears_packed(self, block: nn.Module) -> list[str]:
        return [name for name, module in block.named_modules() if isinstance(module, PackedLinear)]


def _power(rows: Tensor, weight: Tensor) -> float:
    return float(F.linear(rows, weight).square_().sum(dtype=torch.float64))


class _fast_linears:
    """While it lasts, linears of a block run in the compiled kernels where these serve."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.own = {name: module for name, module in block.named_modules() if type(module) is nn.Linear}

    def __enter__(self) -> None:
        for name, linear in self.own.items():
            if linear.weight.device.type == "cpu" and linear.weight.dtype == torch.bfloat16:
                self.block.set_submodule(name, KernelLinear.over(linear))

    def __exit__(self, *_: object) -> None:
        for name, linear in self.own.items():
            self.block.set_submodule(name, linear)
