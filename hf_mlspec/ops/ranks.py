"""How do GPUs of several processes add up what each computed? Each writes into boxes in the memory of the others.

A box and its kernels: kernels_ext/cuda/ranks/. All processes make the same calls in the same order.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .cuda_library import why_no_cuda_kernels
from .library import KernelError


class Boxes(Protocol):
    """The box of this process and, once they are open, those of the others."""

    def handle(self) -> Tensor:
        """uint8 on the CPU, by which other processes of this machine open this one's box."""

    def open(self, rank: int, handle: Tensor) -> None:
        """The box of another process. RuntimeError where its GPU cannot be reached from this one."""

    def sum(self, x: Tensor) -> Tensor:
        """bfloat16, a multiple of 4 elements: the sum over all processes, in float32 in their order. Only enqueues."""

    def gather(self, x: Tensor) -> Tensor:
        """bfloat16 ``[n, width]``, width a multiple of 4 -> ``[n, count * width]``. Only enqueues."""


def new_boxes(device: torch.device, index: int, count: int) -> Boxes:
    """Memory on a GPU for process `index` of `count`. KernelError without kernels for it; ValueError for more than 8
    processes; RuntimeError where there is no memory."""
    reason = why_no_cuda_kernels(device)
    if reason is not None:
        raise KernelError(reason)
    return torch.classes.mlspec.Boxes(device.index, index, count)
