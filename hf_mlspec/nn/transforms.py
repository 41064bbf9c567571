"""What is done to the inputs of a packed layer before they meet its weight, alike at every precision?

A layer computes ``transform(x) W^T + b``: W was made for inputs that were permuted, rotated or scaled first. There are
`NONE`, `ORDER` and `HADAMARD`; another is a `Transform` that was registered, and tensors of its own that each layer
holds and saves as ``transform_<name>``. All packed layers of a model have the same kind; as ``tensors`` has them, a
kind changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..formats.damage import ValueCheck, require_permutation
from ..formats.hadamard import Hadamard
from ..ops.hadamard import hadamard_rows, matrix_on
from ..ops.operator import REFERENCES
from .hooks import keep_hook


@dataclass(frozen=True)
class Transform:
    """One kind of transform.

    word: what MLSpecConfig and config.json call it. tensors: ``(in_features, device)`` -> what a layer holds for it,
    by name, of the shapes and dtypes on disk. apply: ``(x [..., in], tensors)`` -> ``[..., in]`` of x's dtype, each
    row by itself. plain: ``(W [out, in], tensors)`` -> the W that multiplies inputs as they come; None: there is none
    as good. check: ``(in_features)`` -> the check of the values of its tensors.
    """

    word: str
    tensors: Callable[[int, torch.device], Mapping[str, Tensor]]
    apply: Callable[[Tensor, Mapping[str, Tensor]], Tensor]
    plain: Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None = None
    check: Callable[[int], ValueCheck] | None = None

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
    lambda in_features: require_permutation,
)
_known_records: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor -> (its version, what it says)


def hadamard_of(tensors: Mapping[str, Tensor]) -> Hadamard:
    """What the record of `HADAMARD` says: int32 ``[3]``, size, order and inner of a `Hadamard`. Read from the device
    once."""
    record = tensors["hadamard"]
    version = 0 if record.is_inference() else record._version
    known = _known_records.get(record)
    if known is None or known[0] != version:
        known = version, Hadamard(*record.tolist())
        _known_records[record] = known
    return known[1]


def _rotated(x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    how = hadamard_of(tensors)
    if x.dtype == torch.float64:
        return how.rotate(x)
    if torch.is_grad_enabled() and x.requires_grad and not how.is_nothing:
        if x.is_cuda:  # whose kernel is of bfloat16 alone
            return REFERENCES["hadamard_rows"](x, matrix_on(how.order, x.device), how.size, how.inner)
        return _Rotated.apply(x, how)
    return hadamard_rows(x, how)


class _Rotated(torch.autograd.Function):
    """`hadamard_rows`, whose gradient takes the way back."""

    @staticmethod
    def forward(ctx, x: Tensor, how: Hadamard) -> Tensor:
        ctx.how = how
        return hadamard_rows(x, how)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return hadamard_rows(gradient.contiguous(), ctx.how, back=True), None


def _fits_width(in_features: int) -> ValueCheck:
    def require(name: str, tensor_name: str, tensor: Tensor) -> None:
        if tensor.is_meta:
            return
        try:
            Hadamard(*tensor.tolist()).require_width(in_features, f"{name}.{tensor_name}")
        except ValueError as error:
            place = f"{name}.{tensor_name}"
            raise ValueError(str(error) if str(error).startswith(place) else f"{place}: {error}") from error

    return require


# W multiplies rotated inputs: QuaRot's and SpinQuant's online rotations, in a layer whose W took the way back.
HADAMARD = Transform(
    "hadamard",
    lambda in_features, device: {"hadamard": torch.ones(3, dtype=torch.int32, device=device)},
    _rotated,
    lambda weight, tensors: hadamard_of(tensors).rotate(weight, back=True).to(weight.dtype),
    _fits_width,
)
TRANSFORMS = {kind.word: kind for kind in (NONE, ORDER, HADAMARD)}


def record_of(how: Hadamard) -> dict[str, Tensor]:
    """The tensors of `HADAMARD` for a layer; the pair of `hadamard_of`."""
    return {"hadamard": torch.tensor([how.size, how.order, how.inner], dtype=torch.int32)}


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


def held_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """The buffers ``transform_<name>`` of a layer, by name."""
    held = {name: tensor for name, tensor in layer._buffers.items() if name.startswith("transform_")}
    return {name.removeprefix("transform_"): tensor for name, tensor in held.items()}


class TransformedLinear(nn.Linear):
    """A dense linear whose weight was made for transformed inputs: what packed layers that transform theirs are made
    of. Its weight alone is not what it computes, so it has no state_dict: ValueError."""

    @classmethod
    def over(cls, linear: nn.Linear, kind: Transform, tensors: Mapping[str, Tensor]) -> TransformedLinear:
        """With the parameters of ``linear``, whose weight was made for inputs that ``kind`` transforms."""
        own = cls.__new__(cls)
        vars(own).update(vars(linear))
        for name in ("_hf_hook", "forward", "_old_forward"):  # accelerate's, bound to the linear
            vars(own).pop(name, None)
        own._buffers = {}
        own.transform = kind
        for name, tensor in tensors.items():
            own.register_buffer(f"transform_{name}", tensor.to(linear.weight.device))
        return keep_hook(linear, own)

    def transform_tensors(self) -> dict[str, Tensor]:
        """Those of its transform, by name."""
        return held_tensors(self)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]`` in x.dtype."""
        return super().forward(self.transform.apply(x, self.transform_tensors()))

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        raise ValueError(
            f"{prefix.rstrip('.')} is dense and transforms its inputs ({self.transform.word}), which no checkpoint of "
            "dense weights says: quantize the model first, packed layers are saved with their transforms"
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, transform={self.transform.word}"
