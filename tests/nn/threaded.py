"""What does a module return to several threads that call it at once?"""

from __future__ import annotations

import threading

from torch import Tensor, nn


def in_four_threads(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """What the module returned to each of four threads; a thread that raised is missing, which fails here."""
    results = []
    threads = [threading.Thread(target=lambda: results.append(module(*inputs))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    return results
