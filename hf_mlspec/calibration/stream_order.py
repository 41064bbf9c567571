"""Which channels of the residual stream are its outliers, in all blocks at once?

Atom reorders the inputs of every layer for itself. Where norms have no gain, as `rotate` leaves them, what they write
has its outliers in much the same channels in all blocks: one order serves all, and is folded into the weights as any
orthogonal matrix is. What no norm writes, the inputs of o_proj and down_proj, gets Hadamard matrices (QuaRot).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..engines.architecture.known import KNOWN
from .turned_weights import READERS

SAMPLES = 8  # that are read, at most


@torch.no_grad()
def stream_order(model: nn.Module, samples: list[Tensor]) -> Tensor:
    """A permutation for ``rotate(model, residual=...)``, float64 ``[hidden_size, hidden_size]``: the channels of a
    dense model's residual stream by the squares of what its norms write, without gains, the largest last.

    samples: int64 ``[1, tokens]`` each. ValueError, naming the block, where that is NaN or Inf."""
    entry = KNOWN[type(model).__name__]
    layers = model.get_submodule(entry.layers)
    squares = torch.zeros(model.config.hidden_size, dtype=torch.float64, device=samples[0].device)

    def see(name: str) -> Callable[..., None]:
        def add(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows = args[0].reshape(-1, len(squares)).float().square()
            shares = (rows / rows.mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)).sum(0)
            if not shares.isfinite().all():
                raise ValueError(f"{name} norms NaN or Inf: calibrate in bfloat16 or float32, or on other text")
            squares.add_(shares)

        return add

    hooks = [layer.get_submodule(entry.norms[norm]).register_forward_pre_hook(see(f"{entry.layers}.{index}"))
             for index, layer in enumerate(layers) for norm in READERS]  # fmt: skip
    try:
        for ids in samples[:SAMPLES]:
            model.base_model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.eye(len(squares), dtype=torch.float64)[:, squares.cpu().argsort(stable=True)]
