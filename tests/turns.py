"""Has a turn of inputs and weights the gradient that plain torch gives rotated ones?"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_mlspec.calibration import learning


def check_gradient_of_a_turn(start: Tensor) -> None:
    """start: an orthogonal matrix, float32 ``[64, 64]``, on the device that computes."""
    seed, shapes = torch.Generator().manual_seed(4), ((2, 5, 64), (32, 64), (2, 5, 32))
    x, weight, wanted = (torch.randn(shape, generator=seed).to(start.device) for shape in shapes)
    matrix, given = start.clone().requires_grad_(), x.clone().requires_grad_()
    turned = given @ matrix
    codes = turned + (learning._coded(turned.detach(), 32, 4) - turned).detach()
    expected = F.linear(codes, weight @ matrix)
    (expected * wanted).sum().backward()
    turn, read = torch.zeros_like(start, requires_grad=True), x.clone().requires_grad_()
    found = F.linear(learning._Turned.apply(read, start, turn, 32, 4), weight)
    (found * wanted).sum().backward()
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.allclose(read.grad, given.grad, rtol=1e-4, atol=1e-4)
    along, ours = matrix.grad @ start.T, turn.grad
    assert (along - along.T).norm() > 1
    assert torch.allclose(ours - ours.T, along - along.T, rtol=1e-3, atol=1e-3)
