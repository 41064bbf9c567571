"""What is done to the inputs of a packed layer before they meet its weight, alike at every precision?

A layer computes ``transform(x) W^T + b``: W was made for inputs that were permuted, rotated or scaled first. There are
`NONE` and `ORDER`; another is a `Transform` that was registered, and tensors of its own that each layer holds and
saves as ``transform_<name>``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats.damage import ValueCheck, require_permutation


@dataclass(frozen=True)
class Transform:
    """One kind of transform.

    word: what MLSpecConfig and config.json call it. tensors: ``(in_features, device)`` -> what a layer holds for it,
    by name, of the shapes and dtypes on disk. apply: ``(x [..., in], tensors)`` -> ``[..., in]`` of x's dtype, each
    row by itself. plain: ``(W [out, in], tensors)`` -> the W that multiplies inputs as they come; None: there is none
    as good. check: of the values of its tensors.
    """

    word: str
    tensors: Callable[[int, torch.device], Mapping[str, Tensor]]
    apply: Callable[[Tensor, Mapping[str, Tensor]], Tensor]
    plain: Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None = None
    check: ValueCheck | None = None

    def __deepcopy__(self, memo: dict) -> Transform:
        """A kind is one object, in copies of a layer, too."""
        return self

    def __reduce__(self) -> tuple:
        """In a pickle it is its word."""
        return transform_named, (self.word,)


NONE = Transform("none", lambda in_features, device: {}, lambda x, tensors: x, lambda weight, tensors: weight)
# Column i of W multiplies input order[i] (int32 [in], a permutation): GPTQ's act-order, whose groups of inputs were no
# neighbours before the columns were moved.
ORDER = Transform(
    "order",
    lambda in_features, device: {"order": torch.arange(in_features, dtype=torch.int32, device=device)},
    lambda x, tensors: x.index_select(-1, tensors["order"]),
    lambda weight, tensors: weight[:, tensors["order"].argsort()],
    require_permutation,
)
TRANSFORMS = {NONE.word: NONE, ORDER.word: ORDER}


def register_transform(transform: Transform) -> Transform:
    """Make a kind known to MLSpecConfig. ValueError when the word is taken."""
    if transform.word in TRANSFORMS:
        raise ValueError(f"transform {transform.word!r} is taken: choose another word")
    TRANSFORMS[transform.word] = transform
    return transform


def unregister_transform(word: str) -> None:
    """Make a kind unknown again; KeyError when it is not known."""
    del TRANSFORMS[word]


def transform_named(word: object) -> Transform:
    """The kind of a word; ValueError naming those there are."""
    if not isinstance(word, str) or word not in TRANSFORMS:
        raise ValueError(f"transform is {word!r}, choose one of {', '.join(TRANSFORMS)}")
    return TRANSFORMS[word]
