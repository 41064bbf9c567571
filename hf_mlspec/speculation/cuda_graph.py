"""How does what a function enqueues become a CUDA graph, and how does a device say that it has no memory for one?"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

_capturing = threading.Lock()  # one thread captures at a time


def recorded(run: Callable[[], None], device: torch.device, pool=None) -> torch.cuda.CUDAGraph:
    """What `run` enqueues, as a graph, captured on a stream of its own; the device has run the like before."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    how = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
    with _capturing, torch.cuda.device(device), torch.cuda.graph(graph, **how):
        run()
    return graph


def out_of_memory(error: RuntimeError) -> bool:
    """Whether a device had no memory left: while a graph is being captured torch reports it in several ways."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
