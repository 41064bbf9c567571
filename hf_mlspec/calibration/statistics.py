"""What do the linear layers of a block multiply on calibration text? Layers that read one tensor are told it once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..nn.transforms import TransformedLinear

KEPT_ROWS = 256  # inputs that searches and the summary compare outputs on
_SOME = 128  # rows or columns of a Hessian


@dataclass
class Inputs:
    """Inputs of the layers ``names`` of a block, which read the same tensor.

    absolute, squares, largest: float32 ``[in]``, the sums of ``|x|`` and ``x^2``, and the maximum of ``|x|``. rows:
    some inputs, ``[KEPT_ROWS or more, in]`` in the model's dtype. hessian: float32 ``[in, in]``, the sum of ``x^T x``;
    None where none was asked for.
    """

    names: list[str]
    absolute: Tensor
    squares: Tensor
    largest: Tensor
    kept: list[Tensor]
    hessian: Tensor | None

    @property
    def rows(self) -> Tensor:
        """The kept inputs, one below the other."""
        return torch.cat(self.kept)

    def add(self, x: Tensor, keep: int) -> None:
        """x ``[tokens, in]``; ``keep`` of them, evenly spaced, are kept."""
        size = x.abs().float()
        self.absolute += size.sum(0)
        self.largest = torch.maximum(self.largest, size.amax(0))
        self.squares += size.square_().sum(0)
        del size  # its memory is that of the next float32 copy
        spread = torch.linspace(0, len(x) - 1, min(keep, len(x)), device=x.device).long()
        self.kept.append(x[spread].clone())
        if self.hessian is not None:
            wide = x.float()
            self.hessian.addmm_(wide.T, wide)

    def reorder_hessian_(self, order: Tensor) -> None:
        """Inputs in another order, in the Hessian alone; some rows and columns at a time."""
        for some in self.hessian.split(_SOME):
            some.copy_(some[:, order])
        for some in self.hessian.split(_SOME, 1):
            some.copy_(some[order])

    def divide_(self, scales: Tensor) -> None:
        """As they are when what feeds the layers was divided by ``scales`` ``[in]``."""
        self.absolute, self.largest = self.absolute / scales, self.largest / scales
        self.squares = self.squares / scales.square()
        self.kept = [(rows.float() / scales).to(rows.dtype) for rows in self.kept]
        if self.hessian is not None:
            self.hessian.div_(scales[:, None]).div_(scales)


def collect(
    linears: dict[str, nn.Module], passes: list[Callable[[], object]], where: str, with_hessians: bool
) -> list[Inputs]:
    """What the weights of layers, by name in the block, multiply in some forward passes of it.

    ValueError for NaN or Inf, naming ``where`` and the layer, and for a layer that nothing reached.
    """
    found: dict[str, Inputs] = {}
    keep = -(-KEPT_ROWS // len(passes))
    latest: list[tuple[Tensor, str]] = []  # inputs of this pass, and the layer that read each first

    def see(name: str, x: Tensor) -> None:
        first = next((other for tensor, other in latest if tensor is x), None)
        if first is not None:
            if name not in found[first].names:
                found[first].names.append(name)
            return
        latest.append((x, name))
        rows = x.detach().reshape(-1, x.shape[-1])
        _require_finite(rows, where, name)
        if name not in found:
            zeros = torch.zeros(rows.shape[1], device=rows.device)
            hessian = zeros.new_zeros(rows.shape[1], rows.shape[1]) if with_hessians else None
            found[name] = Inputs([name], zeros, zeros.clone(), zeros.clone(), [], hessian)
        found[name].add(rows, keep)

    hooks = [
        linear.register_forward_pre_hook(lambda layer, args, name=name: see(name, _multiplied(layer, args[0])))
        for name, linear in linears.items()
    ]
    try:
        for run in passes:
            latest.clear()
            run()
    finally:
        for hook in hooks:
            hook.remove()
    _require_reached(linears, found, where)
    return list(found.values())


def _multiplied(layer: nn.Module, x: Tensor) -> Tensor:
    """What the weight of a layer multiplies where its inputs are x."""
    if isinstance(layer, TransformedLinear):
        return layer.transform.apply(x, layer.transform_tensors())
    return x


def _require_finite(rows: Tensor, where: str, name: str) -> None:
    if not rows.isfinite().all():
        raise ValueError(
            f"{where}: the inputs of {name} hold NaN or Inf: calibrate in bfloat16 or float32, or on other text"
        )


def _require_reached(linears: dict[str, nn.Module], found: dict[str, Inputs], where: str) -> None:
    reached = {name for inputs in found.values() for name in inputs.names}
    if missing := sorted(set(linears) - reached):
        raise ValueError(f"{where}: no token reached {missing[0]}: keep it in 16 bits with skip_modules")
