"""Which tensors lie one behind the other in one piece of memory, and how are they laid there?"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def make_views(weights: list[nn.Parameter], whole: Tensor) -> None:
    """Let parameters be views of ``whole``, which holds their values one behind the other."""
    first = 0
    for weight in weights:
        weight.data = whole[first : first + len(weight)]
        first += len(weight)


def neighbours(tensors: Sequence[Tensor]) -> Tensor | None:
    """One tensor over several that lie one behind the other in one piece of memory, else None."""
    first = tensors[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == storage and tensor.data_ptr() == end
        if not same or not tensor.is_contiguous() or tensor.shape[1:] != first.shape[1:]:
            return None
        end += tensor.nbytes
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
