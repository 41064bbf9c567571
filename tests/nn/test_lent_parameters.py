"""Do packed modules leave alone what tensor parallelism puts in their parameters' place for one call?

There it is a process's share of each parameter, on torch 2.11 the very tensor that is saved later.
"""

import pytest
import torch
from test_experts import experts_of, routing

from hf_mlspec.nn.experts import PackedExperts
from hf_mlspec.nn.linear import Int4Linear, Mxfp4Linear
from hf_mlspec.nn.planes import PlanesLinear

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")
LINEARS = {"int4": (Int4Linear, {"group_size": 32}), "mxfp4": (Mxfp4Linear, {}),
           "planes": (PlanesLinear, {"group_size": 32})}


def lend(module) -> dict[str, torch.Tensor]:
    """Put plain tensors of the same memory in the place of the parameters."""
    shares = {name: tensor.data for name, tensor in module._parameters.items() if tensor is not None}
    module._parameters.update(shares)
    return shares


def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", LINEARS)
def test_a_linear_multiplies_with_them_and_leaves_them(linear, x, kind):
    made, options = LINEARS[kind]
    layer = made.from_linear(linear, **options)
    own, expected = dict(layer._parameters), layer(x)
    layer.unprepack_()
    shares = lend(layer)
    before = shapes(shares)
    assert torch.equal(layer(x), expected)
    assert all(layer._parameters[name] is tensor for name, tensor in shares.items())
    assert shapes(shares) == before
    layer._parameters.update(own)
    assert not layer.is_prepacked
    assert torch.equal(layer(x), expected)
    assert layer.is_prepacked


def test_experts_multiply_with_them_and_leave_them():
    module = experts_of("mixtral")
    packed, inputs = PackedExperts.from_module(module), routing(module)
    own, expected = dict(packed._parameters), packed(*inputs)
    packed.unprepack_()
    shares = lend(packed)
    before = shapes(shares)
    assert torch.equal(packed(*inputs), expected)
    assert shapes(shares) == before
    packed._parameters.update(own)
    assert not packed.is_prepacked
