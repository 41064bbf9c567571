"""How does a router choose on the device how many planes are read, and a product read as many, without the host?

The widths are int32 on the device. A choice is an MLP over the mean of a prompt, or over that mean moved towards a
token: linear, SiLU, linear; the largest score wins, the narrower width of equal ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...formats.planes import GROUP_SIZES, zeros_doubled
from ..cuda_library import why_no_cuda_kernels
from ..operator import REFERENCES, Operands, like_x, operator
from . import (
    _bitplane_part,
    _check_weight,
    _check_weight_apart,
    _check_whole,
    on_cpu_order,
    stored_planes,
    with_apart,
)

MOST_HIDDEN, MOST_CANDIDATES = 256, 8
_HOPPER = "sm_90a"  # what `cuda_linears` calls its kernels


class ChooserWeights(NamedTuple):
    """A router's MLP for one block, and what its calls share.

    inner float32 ``[hidden, width]``, inner_bias ``[hidden]``, outer ``[candidates, hidden]``, outer_bias
    ``[candidates]``; candidates: int32, rising widths. failed: int32 ``[1]``, set to 1 where a score is NaN or
    infinite; then the widest is chosen. arrived: int32 zeros, which a call leaves zeros: as many as a step has tokens,
    and for a prompt 1 more than a block has parts of 256 features.
    """

    inner: Tensor
    inner_bias: Tensor
    outer: Tensor
    outer_bias: Tensor
    candidates: Tensor
    failed: Tensor
    arrived: Tensor


def _check_router(given: Operands) -> int:
    """The width of x."""
    given.require_float("x")
    if given.x.ndim != 2 or not len(given.x) or given.inner.ndim != 2 or given.outer.ndim != 2:
        shapes = [list(own.shape) for own in (given.x, given.inner, given.outer)]
        raise ValueError(f"{given.op}: x, inner, outer have shapes {shapes}, expected [tokens, width], [hidden, "
                         "width], [candidates, hidden]")  # fmt: skip
    width, hidden, choices = given.x.shape[1], len(given.inner), len(given.outer)
    if not 1 <= hidden <= MOST_HIDDEN or not 1 <= choices <= MOST_CANDIDATES:
        raise ValueError(f"{given.op}: {hidden} hidden units and {choices} candidates, expected 1 to {MOST_HIDDEN} "
                         f"and 1 to {MOST_CANDIDATES}")  # fmt: skip
    given.require_part("inner", torch.float32, (hidden, width))
    given.require_part("inner_bias", torch.float32, (hidden,))
    given.require_part("outer", torch.float32, (choices, hidden))
    given.require_part("outer_bias", torch.float32, (choices,))
    given.require_numbers("candidates", choices)
    given.require_numbers("failed", 1)
    given.require_numbers("arrived", None)
    return width


def _check_prompt(given: Operands) -> None:
    given.require_part("mean", torch.float32, (_check_router(given),))


def _check_steps(given: Operands) -> None:
    width = _check_router(given)
    rows = len(given.means) if given.means.ndim else 0
    given.require_part("means", torch.float32, (rows, width))
    if not rows or len(given.x) % rows:
        raise ValueError(f"{given.op}: x has {len(given.x)} tokens of {rows} rows, expected as many of every row")
    for name in ("starts", "lengths", "known"):
        given.require_numbers(name, rows)


def _chosen(features: Tensor, given: tuple[Tensor, ...], failed: Tensor) -> Tensor:
    """int32 ``[n]`` of float32 ``[n, width]``; every one on its own, so that its neighbours change no bit."""
    inner, inner_bias, outer, outer_bias, candidates = given
    found = []
    for own in features:
        scores = F.linear(F.silu(F.linear(own[None], inner, inner_bias)), outer, outer_bias)[0]
        fails = not bool(torch.isfinite(scores).all())
        if fails:
            failed.fill_(1)
        found.append(candidates[-1] if fails else candidates[scores.argmax()])
    return torch.stack(found)


@operator(
    _check_prompt, lambda given: given.candidates.new_empty(1), writes=("mean", "failed", "arrived"),
    composed_on_cpu=True,
)  # fmt: skip
def _choose_of_prompt(
    x: Tensor, mean: Tensor, inner: Tensor, inner_bias: Tensor, outer: Tensor, outer_bias: Tensor, candidates: Tensor,
    failed: Tensor, arrived: Tensor,
) -> Tensor:  # fmt: skip
    mean.copy_(x.float().mean(0))
    return _chosen(mean[None], (inner, inner_bias, outer, outer_bias, candidates), failed)


@operator(
    _check_steps, lambda given: given.candidates.new_empty(len(given.x)), writes=("failed", "arrived"),
    composed_on_cpu=True,
)  # fmt: skip
def _choose_of_steps(
    x: Tensor, starts: Tensor, lengths: Tensor, known: Tensor, means: Tensor, inner: Tensor, inner_bias: Tensor,
    outer: Tensor, outer_bias: Tensor, candidates: Tensor, failed: Tensor, arrived: Tensor, share: float,
) -> Tensor:  # fmt: skip
    each = len(x) // len(means)
    of_rows = means.repeat_interleave(each, 0)
    features = torch.lerp(of_rows, x.float(), share)
    chosen = _chosen(features, (inner, inner_bias, outer, outer_bias, candidates), failed)
    places = (starts[:, None] + torch.arange(each, device=x.device)).flatten()
    return torch.where(places < lengths.repeat_interleave(each), known.repeat_interleave(each), chosen).int()


def choose_of_prompt(x: Tensor, mean: Tensor, weights: ChooserWeights) -> Tensor:
    """The width that the mean of x ``[tokens, width]`` chooses, int32 ``[1]``; float32 mean ``[width]`` is written."""
    return _choose_of_prompt(x, mean, *weights)


def choose_of_steps(
    x: Tensor, starts: Tensor, lengths: Tensor, known: Tensor, means: Tensor, weights: ChooserWeights, share: float
) -> Tensor:
    """Widths of the tokens of rows, x ``[rows * tokens, width]`` -> int32 ``[rows * tokens]``.

    Token t of row r has position ``starts[r] + t``. In front of ``lengths[r]`` it gets ``known[r]``; from there on
    what ``means[r]``, moved by ``share`` towards its own x, chooses.
    """
    return _choose_of_steps(x, starts, lengths, known, means, *weights, share)


def _check_chosen(given: Operands) -> None:
    given.require_choice("group_size", GROUP_SIZES)
    beside = given.resident is not None or given.fetched is not None
    in_features, stored = _check_weight_apart(given)[:2] if beside else _check_weight(given)
    _check_whole(given, stored)
    least, most = zeros_doubled(given.total_planes)
    if not least <= given.zero_doubled <= most:
        raise ValueError(f"{given.op}: zero_doubled is {given.zero_doubled}, expected {least} to {most}")
    given.require_rows(in_features, given.out_features)
    tokens = given.x.numel() // in_features
    if given.widths.ndim != 1 or len(given.widths) not in (1, tokens):
        raise ValueError(
            f"{given.op}: widths has shape {list(given.widths.shape)}, expected [1], or [{tokens}], one for each token"
        )
    given.require_numbers("widths", None)


@operator(_check_chosen, like_x, composed_on_cpu=True)
def _bitplane_chosen(
    x: Tensor, plane_tiles: Tensor, scale_tiles: Tensor, resident: Tensor | None, fetched: Tensor | None,
    widths: Tensor, out_features: int, bias: Tensor | None, group_size: int, zero_doubled: int, total_planes: int,
    outputs_of_weight: int,
) -> Tensor:  # fmt: skip
    planes, scale = on_cpu_order(
        with_apart(plane_tiles, resident, fetched, total_planes), scale_tiles, out_features
    )
    flat, stored = x.reshape(-1, x.shape[-1]), len(planes)
    own = widths.clamp(1, stored).expand(len(flat))
    multiply = REFERENCES["bitplane_part"] if x.is_cuda else _bitplane_part
    out = flat.new_empty(len(flat), out_features)
    for width in own.unique().tolist():
        which = own == width
        how = group_size, zero_doubled, width, total_planes, outputs_of_weight
        out[which] = multiply(flat[which], planes, scale, out_features, bias, *how)
    return out.view(*x.shape[:-1], out_features)


def bitplane_chosen(
    x: Tensor, plane_tiles: Tensor, scale_tiles: Tensor, widths: Tensor, out_features: int,
    bias: Tensor | None = None, *, group_size: int, zero_doubled: int, total_planes: int | None = None,
    outputs_of_weight: int = 0, apart: Sequence[Tensor | None] = (),
) -> Tensor:  # fmt: skip
    """``bitplane_linear`` of as many planes as int32 ``widths`` says: ``[1]`` of all tokens, or one for each, 1 to
    those that are there, in the tiles or apart (others are moved into that). A token's bits are those of
    ``bitplane_linear`` at its number. total_planes, outputs_of_weight, apart: as there."""
    resident, fetched = (*apart, None, None)[:2]
    total = total_planes or stored_planes(plane_tiles)
    how = group_size, zero_doubled, total, outputs_of_weight
    return _bitplane_chosen(x, plane_tiles, scale_tiles, resident, fetched, widths, out_features, bias, *how)


def chooses_on_device(device: torch.device) -> bool:
    """Whether products there read widths that the host does not know: on the CPU, and with Hopper's kernels."""
    if device.type != "cuda":
        return device.type == "cpu"
    return why_no_cuda_kernels(device) is None and torch.ops.mlspec.cuda_linears(device.index) == _HOPPER
