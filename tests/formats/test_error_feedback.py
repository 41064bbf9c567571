"""Do codes that make up for each other's errors bring the draft's output nearer, and leave the exact weight alone?"""

import pytest
import torch

from hf_mlspec.formats import NestedWeight, nested
from hf_mlspec.formats.nested import codebooks
from hf_mlspec.formats.nested.error_feedback import feedback_indices
from hf_mlspec.formats.packing import unpack_nibbles


@pytest.fixture(scope="module")
def layer() -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and correlated inputs: few directions and a little noise, as activations have them."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(96, 288, generator=generator) * 0.03).bfloat16()
    weight[3, 40], weight[9, 200] = 1e-20, -1e-25  # escapes
    inputs = torch.randn(2000, 24, generator=generator) @ torch.randn(24, 288, generator=generator)
    return weight, inputs + 0.5 * torch.randn(2000, 288, generator=generator)


def output_error(weight: torch.Tensor, draft: torch.Tensor, inputs: torch.Tensor) -> float:
    exact = inputs.double() @ weight.double().T
    return float((inputs.double() @ draft.double().T - exact).norm() / exact.norm())


@pytest.mark.parametrize("codebook", ["lloyd_max", "mxfp4", "fitted"])
def test_outputs_come_nearer_and_the_exact_weight_stays(layer, codebook):
    weight, inputs = layer
    hessian = inputs.T @ inputs
    nearest = NestedWeight.from_dense(weight, codebook)
    chosen = NestedWeight.from_dense(weight, codebook, hessian=hessian)
    before, after = (output_error(weight, w.dequantize_draft(), inputs) for w in (nearest, chosen))
    assert after < 0.6 * before, (before, after)
    for name in ("weight_scale", "weight_low", "weight_high", "weight_codebook", "weight_escape_index"):
        assert torch.equal(getattr(chosen, name), getattr(nearest, name))
    assert torch.equal(unpack_nibbles(chosen.weight_packed) & 8, unpack_nibbles(nearest.weight_packed) & 8)
    assert torch.equal(chosen.validate().join().view(torch.int16), weight.view(torch.int16))


def test_against_the_algorithm_column_by_column(layer):
    """GPTQ as its paper has it: solve for the rest with the inverse of what is left of H, no factor, no blocks."""
    weight, inputs = layer[0][:8], layer[1]
    codebook = codebooks.codebook_of("lloyd_max")
    scale = nested.split(weight, codebook).scale
    hessian = inputs.double().T @ inputs.double()
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(288, dtype=torch.float64)
    inverse, targets = damped.inverse(), weight.double().clone()
    unit = nested.draft_scales(scale).double().repeat_interleave(32, 1) * torch.where(weight.signbit(), -1.0, 1.0)
    expected = torch.empty(8, 288, dtype=torch.uint8)
    for column in range(288):
        units = targets[:, column] / unit[:, column]
        expected[:, column] = (units[:, None] - codebook.double()).abs().argmin(1)
        error = targets[:, column] - codebook.double()[expected[:, column].int()] * unit[:, column]
        targets -= error[:, None] / inverse[column, column] * inverse[column]
        inverse = inverse - inverse[:, column, None] * inverse[column] / inverse[column, column]
        inverse[column, column] = 1.0  # done with: no more than its zeros would be read
    index = feedback_indices(weight, scale, codebook, hessian.float())
    assert (index == expected).float().mean() > 0.995  # ties of float32 against float64


def test_white_inputs_leave_the_nearest_codes(layer):
    weight, _ = layer
    nearest = NestedWeight.from_dense(weight)
    chosen = NestedWeight.from_dense(weight, hessian=torch.eye(288) * 7)
    same = unpack_nibbles(chosen.weight_packed) == unpack_nibbles(nearest.weight_packed)
    assert same.float().mean() > 0.9999  # of ties and escapes


def test_inputs_that_are_always_zero_do_no_harm(layer):
    weight, inputs = layer
    idle = inputs.clone()
    idle[:, 30:60] = 0
    chosen = NestedWeight.from_dense(weight, hessian=idle.T @ idle)
    assert output_error(weight, chosen.dequantize_draft(), idle) < 0.6 * output_error(
        weight, NestedWeight.from_dense(weight).dequantize_draft(), idle
    )
    silent = NestedWeight.from_dense(weight, hessian=torch.zeros(288, 288))
    assert torch.equal(silent.weight_packed, NestedWeight.from_dense(weight, hessian=torch.eye(288)).weight_packed)


@pytest.mark.parametrize(
    ("hessian", "damping", "message"),
    [
        (torch.eye(64), 0.01, r"q: the Hessian has shape \[64, 64\], expected \[288, 288\]"),
        (torch.eye(288).fill_diagonal_(torch.nan), 0.01, "q: the Hessian holds 288 NaN or Inf: calibrate"),
        (torch.eye(288) * torch.inf, 0.01, "NaN or Inf"),
        (-torch.eye(288), 0.01, r"q: the Hessian \[288, 288\] damped by 0.01 has no Cholesky factor in float32"),
        (torch.eye(288), 0.0, "q: damping is 0.0, it must be above 0"),
        (torch.eye(288), torch.nan, "damping is nan"),
    ],
)
def test_a_hessian_that_does_not_serve_is_told(layer, hessian, damping, message):
    with pytest.raises(ValueError, match=message):
        NestedWeight.from_dense(layer[0], name="q", hessian=hessian, damping=damping)
