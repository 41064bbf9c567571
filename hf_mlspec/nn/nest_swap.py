"""How does a linear of a model, with the tables tied to it, or a module of experts give its place to a nested one?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .castable import is_nested
from .hooks import keep_hook
from .linear import KernelLinear
from .nested import NestedEmbedding, NestedLinear
from .nested_experts import NestedExperts
from .shards import EXPERTS, Laid, run_as

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


@dataclass(frozen=True)
class Swap:
    """Where a linear stands and where its tied tables stand, and what the linear was or is to be."""

    paths: list[str]
    tables: list[str]
    kind: type[nn.Linear] = nn.Linear
    requires_grad: bool = False
    dtype: torch.dtype = torch.bfloat16  # or float32, which holds it exactly

    def put_nested(self, model: nn.Module, layer: NestedLinear) -> None:
        """``layer`` in the linear's place, and a table over it in place of the tables."""
        _take_over(model.get_submodule(self.paths[0]), layer)
        if self.tables:
            table = model.get_submodule(self.tables[0])
            nested = NestedEmbedding(layer, table)
            _take_over(table, nested)
            _put(model, self.tables, nested)
        _put(model, self.paths, layer)

    def put_back(self, model: nn.Module) -> None:
        """The linear with its exact weight, and the tables over it, in place of what is nested of them."""
        linear = model.get_submodule(self.paths[0])
        if is_nested(linear):
            linear = self._dense(linear)
        for path in self.tables:
            table = model.get_submodule(path)
            if isinstance(table, NestedEmbedding):
                plain = table.dense(linear.weight)
                _take_over(table, plain)
                _put(model, self.tables, plain)
        _put(model, self.paths, linear)

    def _dense(self, layer: NestedLinear) -> nn.Linear:
        linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        weight = layer.dequantized(self.dtype)
        linear.weight, linear.bias = nn.Parameter(weight, requires_grad=self.requires_grad), layer.bias
        _take_over(layer, linear)
        return KernelLinear.over(linear) if self.kind is KernelLinear else linear


@dataclass(frozen=True)
class PartSwap:
    """Where a linear stands whose weight processes share, and how they do."""

    paths: list[str]
    style: str
    laid: Laid

    def put_nested(self, model: nn.Module, layer: NestedLinear) -> None:
        """``layer`` in the linear's place."""
        _take_over(model.get_submodule(self.paths[0]), layer)
        _put(model, self.paths, layer)

    def put_back(self, model: nn.Module) -> None:
        """The linear with this process's part of its weight."""
        layer = model.get_submodule(self.paths[0])
        if not is_nested(layer):
            return
        linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        linear.weight, linear.bias = self.laid.whole(layer.dequantized(torch.bfloat16)), layer.bias
        _take_over(layer, linear)
        _put(model, self.paths, run_as(linear, self.style, self.laid.mesh))


@dataclass(frozen=True)
class ExpertSwap:
    """Where a module of experts stands, and what its weights were or are to be; laid: how processes share them."""

    paths: list[str]
    requires_grad: bool = False
    dtype: torch.dtype = torch.bfloat16
    laid: dict[str, Laid] | None = None

    def put_nested(self, model: nn.Module, experts: NestedExperts) -> None:
        """``experts`` in place of the dense ones."""
        _take_over(model.get_submodule(self.paths[0]), experts)
        _put(model, self.paths, experts)

    def put_back(self, model: nn.Module) -> None:
        """The dense experts with their exact weights in place of what is nested of them."""
        experts = model.get_submodule(self.paths[0])
        if not isinstance(experts, NestedExperts):
            return
        dense = experts.dequantized_module(self.dtype)
        for key in experts.names:
            getattr(dense, key).requires_grad_(self.requires_grad)
        for key, laid in (self.laid or {}).items():
            dense._parameters[key] = laid.whole(getattr(dense, key).detach())
        if self.laid:
            run_as(dense, EXPERTS, laid.mesh)
        _take_over(experts, dense)
        _put(model, self.paths, dense)


AnySwap = Swap | PartSwap | ExpertSwap


@contextmanager
def undone(model: nn.Module) -> Iterator[list[AnySwap]]:
    """A list for what is nested inside; whatever is raised there, an interrupt too, all of it is put back."""
    done: list[AnySwap] = []
    try:
        yield done
    except BaseException:
        for swap in reversed(done):
            swap.put_back(model)
        raise


def nested_swaps(model: nn.Module, requires_grad: bool, dtype: torch.dtype) -> list[AnySwap]:
    """All that is nested in a model; requires_grad, dtype: of the weights that it is to get back."""
    linears: dict[int, list[str]] = {}
    tables: dict[int, list[str]] = {}
    experts: dict[int, list[str]] = {}
    heads = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if is_nested(module):
            linears.setdefault(id(module), []).append(path)
            heads[id(module)] = module
        elif isinstance(module, NestedEmbedding):
            tables.setdefault(id(module), []).append(path)
        elif isinstance(module, NestedExperts):
            experts.setdefault(id(module), []).append(path)
    of_head = {
        key: [path for paths in tables.values() if model.get_submodule(paths[0]).shares(head) for path in paths]
        for key, head in heads.items()
    }
    swaps = [Swap(paths, of_head[key], nn.Linear, requires_grad, dtype) for key, paths in linears.items()]
    return swaps + [ExpertSwap(paths, requires_grad, dtype) for paths in experts.values()]


def _put(model: nn.Module, paths: list[str], module: nn.Module) -> None:
    for path in paths:
        model.set_submodule(path, module)


def _take_over(old: nn.Module, new: nn.Module) -> None:
    """Whatever was hooked to the old module goes on with the new one."""
    for name in _HOOKS:
        vars(new)[name] = vars(old)[name]
    new.train(old.training)
    keep_hook(old, new)
