"""Do blocks of a GGUF file hold our weights bit for bit, as our reader and the gguf package see them?"""

import numpy as np
import pytest
import torch

from hf_mlspec.checkpoints.gguf_blocks import VALUES, int4_parts, int4_parts_of_minima
from hf_mlspec.checkpoints.gguf_writer import SIZES, block_rows, ggml_type_of
from hf_mlspec.formats import Int4Weight, Mxfp4Weight, PlanesWeight
from hf_mlspec.formats.packing import pack_nibbles
from tests.gguf_files import random_blocks, values_of


def written(weight, rows=None):
    """The type, and all blocks: uint8 ``[rows, bytes]``."""
    kind = ggml_type_of(weight)
    return kind, torch.cat(list(block_rows(weight, kind, rows)))


def int4(zeros, scales=None, groups=4, size=32):
    """Random codes, with zero points out of ``zeros``; None: symmetric."""
    generator = torch.Generator().manual_seed(len(zeros or ()))
    codes = torch.randint(0, 16, (6, groups * size), dtype=torch.uint8, generator=generator)
    scale = torch.rand(6, groups, generator=generator).half() + 6e-8 if scales is None else scales.expand(6, groups)
    if zeros is not None:
        zeros = torch.tensor(zeros, dtype=torch.uint8).repeat(6 * groups)[: 6 * groups].view(6, -1)
    return Int4Weight(pack_nibbles(codes), scale.contiguous(), zeros, "layer")


def dense(rows=6, cols=256):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(1))


WEIGHTS = {
    "symmetric": (int4(None), "Q4_0"), "groups of 64": (int4(None, size=64), "Q4_0"),
    "groups of 128": (int4(None, size=128), "Q4_0"), "zero 7 and 8": (int4([7, 8, 8]), "Q4_0"),
    "zeros of few bits": (int4([0, 3, 15], torch.tensor([2.0**-3, 2.0**-7, 0.75, 2.0**-24]).half()), "Q4_1"),
    "groups of 64 with zeros": (int4([1, 14], torch.tensor([0.5, 1.5, 2.0**-9, 1.0]).half(), size=64), "Q4_1"),
    "mxfp4": (Mxfp4Weight.from_dense(dense(), name="layer"), "MXFP4"),
    "8 planes": (PlanesWeight.from_dense(dense(), 8, 64), "Q8_0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_values_are_the_same(name):
    weight, expected = WEIGHTS[name]
    kind, raw = written(weight)
    assert (kind, raw.dtype) == (expected, torch.uint8)
    assert raw.shape == (weight.out_features, weight.in_features // 32 * SIZES[kind])
    values = weight.dequantize(torch.float32)
    assert torch.equal(values_of(raw.numpy(), kind), values)
    assert torch.equal(VALUES[kind](raw.unflatten(-1, (-1, SIZES[kind]))).flatten(-2), values)


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_planes_that_are_0_at_the_middle(bits):
    generator = torch.Generator().manual_seed(bits)
    planes = torch.randint(0, 256, (bits, 6, 16), dtype=torch.uint8, generator=generator)
    scale = torch.rand(6, 4, generator=generator).half() + 0.1
    weight = PlanesWeight(planes, scale, torch.tensor([1 << bits]), "layer")
    kind, raw = written(weight)
    assert kind == ("Q4_0" if bits == 4 else "Q8_0")
    assert torch.equal(values_of(raw.numpy(), kind), weight.dequantize(torch.float32))


def test_rows_come_in_the_order_that_is_asked_for():
    weight, order = WEIGHTS["zero 7 and 8"][0], torch.tensor([3, 0, 5, 1, 4, 2])
    _, raw = written(weight, order)
    assert torch.equal(values_of(raw.numpy(), "Q4_0"), weight.dequantize(torch.float32)[order])


def test_blocks_of_ggml_come_back_as_they_were():
    """With scales of either sign; a zero scale becomes 1, the values stay."""
    raw = random_blocks("Q4_0", 5, 8)
    parts = int4_parts(torch.from_numpy(raw).unflatten(-1, (-1, 18)))
    kind, again = written(Int4Weight(*parts, "layer"))
    assert kind == "Q4_0"
    assert torch.equal(values_of(again.numpy(), kind), values_of(raw, "Q4_0"))
    live = raw.reshape(-1, 18)[:, :2].copy().view(np.float16).ravel() != 0
    assert (again.numpy().reshape(-1, 18)[live] == raw.reshape(-1, 18)[live]).all()


@pytest.mark.parametrize("name", ["zeros of few bits", "groups of 64 with zeros"])
def test_zero_points_come_back(name):
    weight, _ = WEIGHTS[name]
    _, raw = written(weight)
    again = Int4Weight(*int4_parts_of_minima(raw.unflatten(-1, (-1, 20))), "layer").validate(6, weight.in_features)
    assert torch.equal(again.weight_packed, weight.weight_packed)
    repeats = weight.group_size // 32
    assert torch.equal(again.weight_zero, weight.weight_zero.repeat_interleave(repeats, -1))
    assert torch.equal(again.weight_scale, weight.weight_scale.repeat_interleave(repeats, -1))


@pytest.mark.parametrize(("scale", "zero"), [(0.1, 3), (60000.0, 15), (2.0**-3 + 2.0**-13, 5)])
def test_zero_points_that_float16_does_not_hold_are_refused(scale, zero):
    weight = int4([0, 0, 0, 0, 0, 0, zero], torch.tensor([scale]).half())
    with pytest.raises(ValueError, match=rf"layer: row 1, group 2 has the zero point {zero} and .*symmetric=True"):
        ggml_type_of(weight)


def test_planes_without_a_middle_code_are_refused():
    with pytest.raises(ValueError, match=r"layer: the codes of its 3 bit-planes are 0 at 3\.5"):
        ggml_type_of(PlanesWeight.from_dense(dense(), 3, 32, name="layer"))


def test_blocks_that_hold_other_values_are_not_given():
    with pytest.raises(ValueError, match="layer: GGUF blocks of Q4_0 would hold other values"):
        list(block_rows(int4([3]), "Q4_0"))
