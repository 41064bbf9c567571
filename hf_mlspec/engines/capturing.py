"""Who may capture a graph, wait for a whole GPU or have its unused memory freed? One thread of the process at a time.

CUDA forbids to wait for a device while a stream of it captures, whoever does it: the wait is an error, and the capture
is spoiled. torch frees no cached memory meanwhile, and captures hold back Python's collection of garbage, which is one
for all devices: hence one lock, and not one for each. What waits for a stream or an event of its own, allocates,
launches or replays goes on beside a capture, which is thread-local.

Order of locks: this one comes behind those of models, chains and levels, and before those of streamed planes, of a
decoder's rotary tables and of a weight's layout, which are taken while a graph is captured or a decoder built. Nobody
asks for one of the former while he holds it.
"""

from __future__ import annotations

import threading

import torch

# A thread that has it gets it again: what it gives back while a decoder is built may wait for the device, too.
capturing = threading.RLock()


def wait_for(device: torch.device) -> None:
    """Until the device has nothing to do."""
    with capturing:
        torch.cuda.synchronize(device)


def free_cached() -> None:
    """Give memory that torch keeps for later back to the devices."""
    with capturing:
        torch.cuda.empty_cache()
