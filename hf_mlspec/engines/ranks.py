"""How do processes that share a model reach one another, and are they alike?

Each computes a part of every block; parts are added in the order of the processes, so that all of them go on with the
same bits, whatever else is in the call.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import ops
from ..nn.agreement import exchange_of
from ..nn.shards import group_of, is_shared
from ..nn.state import state_of
from .built import device_of, fingerprint


class Ranks:
    """The processes that share a model by tensor parallelism. index: of this one among `count`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self.index, self.count = dist.get_rank(group), dist.get_world_size(group)
        self._exchange = exchange_of(group) if device.type == "cpu" else None

    def told(self, said: object) -> list:
        """What every process says, in their order: each of them has to ask."""
        if self._exchange is not None:
            return self._exchange.told(said)
        every: list = [None] * self.count
        dist.all_gather_object(every, said, group=self.group)
        return every

    def parts(self, own: Tensor) -> list[Tensor]:
        """A dense tensor of every process, of one shape. RankFailed where another process of a CPU fails."""
        if self._exchange is not None:
            return self._exchange.parts(own)
        every = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(every, own, group=self.group)
        return every

    def summed(self, own: Tensor) -> Tensor:
        """The sum of all processes' tensors, in float32, in the dtype of `own`: the same bits on each."""
        first, *others = self.parts(own.contiguous())
        total = first.float()
        for part in others:
            total = total + part
        return total.to(own.dtype)

    def side_by_side(self, own: Tensor) -> Tensor:
        """``[n, width]`` of every process -> ``[n, count * width]``."""
        return torch.cat(self.parts(own.contiguous()), dim=1)

    def require_alike(self, said: dict[str, object]) -> None:
        """ValueError, on all processes, where one says something else than the first; names both and what differs."""
        first, *others = self.told(said)
        for index, other in enumerate(others, 1):
            for name, own in first.items():
                if other[name] != own:
                    raise ValueError(
                        f"processes that share a model differ in their {name}: {own} on rank 0, {other[name]} on rank "
                        f"{index}; start all of them with the same program, versions and checkpoint"
                    )


def require_alike_on_ranks(target: nn.Module, models: list[nn.Module]) -> None:
    """ValueError, on all processes that share a target, where models of which each holds all differ between them:
    one whose drafts differ would make other passes than the rest, which wait for it for ever. Each model is looked at
    once, and again when its weights changed."""
    ranks = None
    for model in models:
        state, now = state_of(model), fingerprint(model)
        if is_shared(model) or state.alike == now:
            continue
        ranks = ranks or Ranks(group_of(target), device_of(target))
        ranks.require_alike(identity(dict(model.named_parameters()), device_of(model)))
        state.alike = now


def identity(tensors: dict[str, Tensor], device: torch.device) -> dict[str, object]:
    """What processes that share a model have to have alike. tensors: those of which each holds all, by name."""
    sums = [(name, *map(int, _checksum(tensors[name]))) for name in sorted(tensors)]
    return {
        "version of torch": torch.__version__,
        "kernels": ops.library_hash(device.type)[:16],
        "weights": hashlib.sha256(repr(sums).encode()).hexdigest()[:16],
    }


def _checksum(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Of a tensor's bits and of where they are."""
    words = tensor.detach().contiguous().view(torch.uint8 if tensor.element_size() == 1 else torch.int16)
    rows = words.reshape(len(words), -1) if words.ndim > 1 else words.reshape(1, -1)
    return _weighed(rows.sum(0, dtype=torch.int64)), _weighed(rows.sum(1, dtype=torch.int64))


def _weighed(sums: Tensor) -> Tensor:
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()
