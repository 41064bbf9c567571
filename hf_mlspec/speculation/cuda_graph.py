"""How does what a function enqueues become a CUDA graph, and how does a device say that it has no memory for one?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..nn.prepared import capturing


def recorded(run: Callable[[], None], device: torch.device, pool=None) -> torch.cuda.CUDAGraph:
    """What `run` enqueues, as a graph, captured on a stream of its own; the device has run the like before."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    how = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
    # A capture that fails at its end leaves its stream the current one: the caller's is put back here.
    callers = torch.cuda.stream(torch.cuda.current_stream(device))
    with capturing, torch.cuda.device(device), callers, torch.cuda.graph(graph, **how):
        run()
    return graph


def out_of_memory(error: BaseException | None) -> bool:
    """Whether a device had no memory left: torch reports it in several ways while a graph is being captured, also as
    a capture that failed for an error before."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
