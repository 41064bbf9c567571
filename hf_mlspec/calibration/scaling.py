"""By which scales are a layer's input channels multiplied before its weight is rounded? Searched by output error.

Both searches round trial weights to nearest, in the format that they are for (trials.py), and compare outputs of some
kept inputs. AWQ (Lin et al., arXiv 2306.00978, equation 5): ``s = mean|x| ** alpha``, inputs as they are.
SmoothQuant (Xiao et al., arXiv 2211.10438, equation 4):
``s = max|x| ** alpha / max|w| ** (1 - alpha)``, inputs rounded to integers as the layer will round them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .statistics import Inputs
from .trials import Trial

_AWQ_STEPS, _SMOOTH_STEPS = 20, 10
_LEAST = 1e-5  # of a channel, as a share of the largest: the scale of an idle channel stays finite


def best_scales(
    scaling: str, weights: list[Tensor], inputs: Inputs, share: Callable[[Tensor], Tensor], trial: Trial
) -> tuple[Tensor, float]:
    """weights float ``[out, in]`` of all layers that read these inputs -> scales float32 ``[in]`` and their alpha; 1
    everywhere and 0 where no scale beats none. trial: what a rounded weight gives."""
    rows = inputs.rows.float()
    wanted = [F.linear(rows, weight.float()) for weight in weights]
    proposals = _awq(inputs, share) if scaling == "awq" else _smooth(weights, inputs, share)
    best, least, chosen = torch.ones_like(inputs.largest), torch.inf, 0.0
    for alpha, scales in proposals:
        outputs = trial(rows / scales, (weight.to(torch.float32, copy=True).mul_(scales) for weight in weights))
        error = sum(
            float((found - output).square().sum(dtype=torch.float64))
            for found, output in zip(outputs, wanted, strict=True)
        )
        if error < least:
            best, least, chosen = scales, error, alpha
    return best, chosen


def _awq(inputs: Inputs, share: Callable[[Tensor], Tensor]) -> Iterator[tuple[float, Tensor]]:
    mean = _floored(share(inputs.absolute))
    for step in range(_AWQ_STEPS):
        scales = mean ** (step / _AWQ_STEPS)
        yield step / _AWQ_STEPS, scales / (scales.max() * scales.min()).sqrt()


def _smooth(
    weights: list[Tensor], inputs: Inputs, share: Callable[[Tensor], Tensor]
) -> Iterator[tuple[float, Tensor]]:
    yield 0.0, torch.ones_like(inputs.largest)
    largest = _floored(share(inputs.largest))
    columns = _floored(torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0))
    for step in range(1, _SMOOTH_STEPS):
        alpha = step / _SMOOTH_STEPS
        scales = largest**alpha / columns ** (1 - alpha)
        yield alpha, scales / (scales.max() * scales.min()).sqrt()


def _floored(values: Tensor) -> Tensor:
    most = values.max()
    return values.clamp(min=most * _LEAST) / most if most > 0 else torch.ones_like(values)
