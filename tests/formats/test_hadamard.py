"""Are the matrices Hadamard matrices, does every width get one, and does a rotation keep what rotations keep?"""

from __future__ import annotations

import pytest
import torch

from hf_mlspec.formats.hadamard import ORDERS, Hadamard, fitting_hadamard, hadamard_matrix

WIDTHS = {  # of models: what each is rotated by
    64: (64, 1), 80: (80, 20), 96: (96, 12), 112: (112, 28), 576: (576, 36), 896: (896, 28), 1408: (128, 1),
    2816: (256, 1), 4096: (4096, 1), 4864: (4864, 76), 5632: (512, 1), 8960: (8960, 140), 9728: (9728, 76),
    11008: (11008, 172), 13696: (128, 1), 13824: (13824, 108), 14336: (14336, 28), 17408: (1024, 1), 18944: (512, 1),
    25600: (1024, 1), 29568: (128, 1), 9: (1, 1), 14: (2, 1), 28: (28, 28), 40: (40, 20), 24: (24, 12),
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_the_matrix_of_an_order_has_orthogonal_rows_of_signs(order):
    matrix = hadamard_matrix(order)
    assert matrix.dtype == torch.int8
    wide = matrix.double()
    assert bool((wide.abs() == 1).all())
    assert torch.equal(wide @ wide.T, order * torch.eye(order, dtype=torch.float64))
    assert bool((matrix[:, 0] == 1).all())
    assert hadamard_matrix(order) is matrix


def test_every_known_order_is_there():
    assert ORDERS == (1, 12, 20, 28, 36, 40, 52, 60, 76, 108, 140, 156, 172)


@pytest.mark.parametrize(("width", "expected"), WIDTHS.items(), ids=str)
def test_a_width_is_rotated_whole_or_in_blocks_of_a_power_of_two(width, expected):
    found = fitting_hadamard(width)
    assert (found.size, found.order) == expected
    found.require_width(width, "x")
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    turned = found.rotate(x)
    assert torch.allclose(found.rotate(turned, back=True), x, atol=1e-12)
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-12)


@pytest.mark.parametrize("how", [Hadamard(8), Hadamard(24, 12), Hadamard(20, 20), Hadamard(56, 28, 5)], ids=str)
def test_a_rotation_is_the_product_with_the_matrix(how):
    sylvester = torch.ones(1, 1, dtype=torch.float64)
    while len(sylvester) * how.order < how.size:
        sylvester = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), sylvester)
    one = torch.kron(hadamard_matrix(how.order).double(), sylvester) / how.size**0.5
    whole = torch.kron(torch.eye(2, dtype=torch.float64), torch.kron(one, torch.eye(how.inner, dtype=torch.float64)))
    x = torch.randn(4, len(whole), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(how.rotate(x), x @ whole.T, atol=1e-12)
    assert torch.allclose(how.rotate(x, back=True), x @ whole, atol=1e-12)


def test_what_is_no_hadamard_matrix_is_refused():
    with pytest.raises(ValueError, match="order 16: choose one of"):
        Hadamard(16, 16)
    with pytest.raises(ValueError, match="size 36 over 1 elements is none of order 12"):
        Hadamard(36, 12)
    with pytest.raises(ValueError, match="size 0"):
        Hadamard(0)
    with pytest.raises(ValueError, match="choose one of"):
        hadamard_matrix(92)
    with pytest.raises(ValueError, match="layer: Hadamard matrices of size 8 over 2 neighbours do not divide 24"):
        Hadamard(8, 1, 2).require_width(24, "layer")
