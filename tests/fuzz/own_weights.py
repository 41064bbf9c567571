"""What does a weight of each of our formats look like, and what becomes of one whose parts were changed?"""

from __future__ import annotations

from functools import cache

import torch

from hf_mlspec.formats import FORMATS, PackedWeight

from .harness import Target, Wrong
from .layers import ERRORS, chance_of, changed_tensors


@cache
def weights() -> dict[str, PackedWeight]:
    """One of every format."""
    torch.manual_seed(0)
    dense, found = torch.randn(8, 256).bfloat16(), {}
    for word, record in FORMATS.items():
        if record.why_not_quantized:
            parts = record.zeros((8, 256), torch.device("cpu"), num_planes=4, least_planes=2)
            parts = [torch.randint(0, 256, part.shape, dtype=torch.uint8) if part.dtype == torch.uint8
                     else torch.randn(part.shape).to(part.dtype) for part in parts]  # fmt: skip
            found[word] = record.weight(*parts, name="up_proj")
        else:
            found[word] = record.weight.from_dense(dense, name="up_proj")
    return found


def _own_weight(data: bytes) -> None:
    """A weight of one of our formats, with parts that were changed: what it validates has numbers, a row for each."""
    chance = chance_of(data)
    word = chance.choice(list(weights()))
    weight, record = weights()[word], FORMATS[word]
    parts = {name: part for name, part in zip(record.parts, weight.parts, strict=True) if part is not None}
    parts = changed_tensors(parts, chance)
    if any(parts.get(name) is None for name, part in zip(record.parts, weight.parts, strict=True) if part is not None):
        return  # a file that lacks a tensor never gets so far
    made = record.weight(*[parts.get(name) for name in record.parts], name="up_proj").validate(8, 256)
    for name, part in parts.items():
        if (check := record.value_check(name, part.dtype)) is not None:
            check("up_proj", name, part)
    if made.dequantize().shape != (8, 256):
        raise Wrong(f"{word} of another shape")


TARGET = Target("own weight", (), _own_weight, ERRORS, suffixes=(), drawn=True)
