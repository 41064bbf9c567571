"""Which rotation of the residual stream loses least to 4-bit activations? Learned on calibration text.

SpinQuant (arXiv 2405.16406, section 3): the model stays as it is, only an orthogonal matrix R moves, by the gradient
of the loss of the next token while linears multiply quantized activations. Weights are not quantized, as GPTQ or
another rounding comes behind. It starts from the matrix of QuaRot. Steps stay orthogonal by Cayley transforms (Li et
al., arXiv 2002.01113): with momentum M and the gradient G of the loss,

    M = .9 M + G        A = M R^T - R (R^T M R^T) / 2        W = A - A^T        M = W R
    R becomes (I + t W / 2)^-1 (I - t W / 2) R        t = rate (1 - step / steps) sqrt(width) / |W|

so that a step turns rows by an angle of ``rate``, whatever the size of the gradient. A quantized activation passes its
gradient on as it is. W sees of ``G R^T`` the difference from its transpose alone, so that is all that is computed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engines.architecture.known import KNOWN
from ..formats import activations
from ..nn.transforms import TransformedLinear
from ..ops import quantize_rows
from .blocks import blocks_of
from .rotation import rotate, separate_head, stream_matrix
from .turned_weights import READERS

STEPS, RATE, BATCH = 48, 0.001, 2
_MOMENTUM = 0.9


def learned_rotation(
    model: nn.Module, samples: list[Tensor], *, group_size: int = 128, activation_bits: int = 4, seed: int = 0,
    steps: int = STEPS, rate: float = RATE, batch: int = BATCH, progress: Callable[[int], None] = lambda step: None,
) -> Tensor:  # fmt: skip
    """The rotation of a dense model's residual stream, float64 ``[hidden_size, hidden_size]``, for
    ``rotate(model, residual=...)``; the model stays as it is.

    samples: int64 ``[1, tokens]`` each, of two tokens or more; ``batch`` of them a step, drawn by ``seed``, which also
    draws the signs of the rotation that it starts from. rate: radians of the first step, less and less behind it.
    progress: called behind every step. Beside the model, a float32 copy of it is held, and the activations of one
    sample. ValueError as of `rotate`, and for a loss that is not finite.
    """
    turned = copy.deepcopy(model).float().eval().requires_grad_(False)
    start = stream_matrix(turned, seed)
    separate_head(turned)  # or rotate would say that it does
    rotate(turned, seed=seed)
    with torch.enable_grad():
        learned = torch.eye(len(start), device=samples[0].device)
        turn = nn.Parameter(torch.zeros_like(learned))
        with _quantized(turned, learned, turn, group_size, activation_bits):
            _learn(turned, learned, turn, samples, torch.Generator().manual_seed(seed), steps, rate, batch, progress)
    return start @ learned.cpu().double()


def _learn(
    model: nn.Module, learned: Tensor, turn: nn.Parameter, samples: list[Tensor], drawn: torch.Generator, steps: int,
    rate: float, batch: int, progress: Callable[[int], None],
) -> None:  # fmt: skip
    momentum = torch.zeros_like(learned)
    for step in range(steps):
        for index in torch.randint(len(samples), (batch,), generator=drawn).tolist():
            ids = samples[index]
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            loss = F.cross_entropy(logits.float(), ids[0, 1:]) / batch
            if not math.isfinite(loss.item()):
                raise ValueError(f"the loss of sample {index} is {loss.item()}: no rotation is learned from it")
            loss.backward()
        with torch.no_grad():
            momentum = _step(learned, _MOMENTUM * momentum + turn.grad @ learned, rate * (1 - step / steps))
        turn.grad = None
        progress(step)


def _step(learned: Tensor, momentum: Tensor, rate: float) -> Tensor:
    """Move along the orthogonal matrices; -> the momentum, along them."""
    now = learned.data
    part = momentum @ now.T - now @ (now.T @ momentum @ now.T) / 2
    skew = part - part.T
    size = rate * math.sqrt(len(now)) / max(float(skew.norm()), 1e-12)
    half, one = (size / 2 * skew).double(), torch.eye(len(now), dtype=torch.float64, device=now.device)
    learned.data = torch.linalg.solve(one + half, (one - half) @ now.double()).to(now.dtype)
    return skew @ now


def _coded(x: Tensor, group_size: int, bits: int) -> Tensor:
    """x as its codes stand for."""
    quantize = activations.quantize_rows if x.is_cuda else quantize_rows  # GPUs' kernel is of bfloat16 alone
    return activations.dequantize_rows(*quantize(x, group_size, bits), group_size, x.dtype)


class _Quantized(torch.autograd.Function):
    """Activations as their codes stand for; the gradient passes."""

    @staticmethod
    def forward(ctx, x: Tensor, group_size: int, bits: int) -> Tensor:
        return _coded(x, group_size, bits)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class _Turned(torch.autograd.Function):
    """``y = Q(x R) R^T``: ``y W^T`` is ``Q(x R) (W R)^T``, and not every weight is rotated, but a sample once.

    turn: T of a matrix ``(1 + T) R``, zeros. With a gradient d of y and R orthogonal that of x is d, and that of T is
    ``x^T d + d^T y``. It is given as ``(x - y)^T d``, which is the same but for a symmetric part, which turns nothing.
    """

    @staticmethod
    def forward(ctx, x: Tensor, learned: Tensor, turn: Tensor, group_size: int, bits: int) -> Tensor:
        y = _coded(x @ learned, group_size, bits) @ learned.T
        ctx.save_for_backward(x - y)
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, Tensor, None, None]:
        (lost,) = ctx.saved_tensors
        return gradient, None, lost.flatten(0, -2).T @ gradient.flatten(0, -2), None, None


@contextmanager
def _quantized(model: nn.Module, learned: Tensor, turn: Tensor, group_size: int, bits: int) -> Iterator[None]:
    """Linears of a rotated model's blocks multiply quantized inputs; those that read the residual stream, inputs that
    the matrix rotated once more, by weights that it rotated, too. turn: as of `_Turned`."""
    entry = KNOWN[type(model).__name__]
    readers = {entry.linears[name] for names in READERS.values() for name in names if name in entry.linears}
    latest: list[Tensor] = []  # what readers were given last, and what they multiply in its place

    def turned(x: Tensor) -> Tensor:
        if not latest or latest[0] is not x:
            latest[:] = x, _Turned.apply(x, learned, turn, group_size, bits)
        return latest[1]

    def over(linear: nn.Linear, turns: bool) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if isinstance(linear, TransformedLinear):
                x = linear.transform.apply(x, linear.transform_tensors())
            read = turned(x) if turns else _Quantized.apply(x, group_size, bits)
            return F.linear(read, linear.weight, linear.bias)

        return forward

    linears = [(block.get_submodule(place), place in readers)
               for _, block in blocks_of(model) for place in entry.linears.values()]  # fmt: skip
    for linear, turns in linears:
        linear.forward = over(linear, turns)
    try:
        yield
    finally:
        for linear, _ in linears:
            del linear.forward
