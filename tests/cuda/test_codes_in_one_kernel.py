"""On a GPU: have rows that become integers where they are made the bits of two kernels, one behind the other?"""

from __future__ import annotations

import pytest
import torch
from decoders import Lanes, random_model
from linear_cases import DEVICE, poison
from models import packed, prompts
from test_rotated import SHAPE, rotated_model
from torch import Tensor

import hf_mlspec
from hf_mlspec import ops
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.formats.hadamard import Hadamard, fitting_hadamard
from hf_mlspec.nn.switch import precision_switch
from hf_mlspec.ops import Codes, CodesOf

WIDTHS = (512, 896, 1024, 4864, 5632, 9728, 11008, 13696, 14336, 18944, 28672, 29568)
ROWS = (1, 3, 9, 33, 130)
HOW = (CodesOf(128, 4, 0.85), CodesOf(128, 8), CodesOf(128, 4, 1.0, 128), CodesOf(64, 4), CodesOf(32, 8))


def seeded(*shape: int, seed: int = 0) -> Tensor:
    """Rows with a few large columns."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * torch.exp(torch.randn(*shape, generator=generator))
    return x.bfloat16().to(DEVICE)


def any_order(width: int) -> Tensor:
    return torch.randperm(width, generator=torch.Generator().manual_seed(1)).int().to(DEVICE)


def coded(rows: Tensor, how: CodesOf) -> Codes:
    """By kernels of their own, from rows that one wrote; put in the layout in torch."""
    inner = rows.shape[1] - how.outliers
    parts = [ops.quantize_rows(rows[:, :inner].contiguous(), *how[:3])]
    if how.outliers:
        parts.append(ops.quantize_rows(rows[:, inner:].contiguous(), how.group_size, 8))
    codes, scales = (torch.cat(two, 1) for two in zip(*parts, strict=True))
    room = torch.zeros(-(-rows.shape[1] // 128) * 128 // how.group_size, -(-len(rows) // 4) * 4, device=DEVICE)
    room[: scales.shape[1], : len(rows)] = scales.T
    return Codes(codes.view(len(rows), -1, 2, 8).transpose(2, 3).flatten(1), room)


def alike(ours: Codes, rows: Tensor, how: CodesOf) -> bool:
    codes, scales = coded(rows, how)
    return torch.equal(ours.codes, codes) and torch.equal(ours.scales.view(torch.int32), scales.view(torch.int32))


def fitting(width: int) -> list[CodesOf]:
    return [how for how in HOW if width % how.group_size == 0]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", ROWS)
def test_gated_rows_of_the_sizes_of_models(width, count):
    gate_up, order, rotation = seeded(count, 2 * width), any_order(width), fitting_hadamard(width)
    for how in fitting(width):
        for turned, rows in (
            (None, ops.gated(gate_up, 0)),
            (order, ops.gated_in_order(gate_up, 0, order)),
            (rotation, ops.gated_hadamard(gate_up, 0, rotation)),
        ):
            poison((count, width))
            assert alike(ops.gated_codes(gate_up, 0, turned, how), rows, how), (how, type(turned))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", ROWS)
def test_normed_rows_and_rows_as_they_are(width, count):
    x, residual = seeded(count, width), seeded(count, width, seed=1)
    weight, order, rotation = 1 + seeded(width, seed=2).float() / 4, any_order(width), fitting_hadamard(width)
    for how in fitting(width):
        for beside, own_order in ((None, None), (residual, None), (residual, order)):
            poison((count, width))
            codes, total = ops.norm_codes(x, weight, 1e-5, beside, own_order, how)
            normed, expected = ops.rms_norm(x, weight, 1e-5, beside)
            assert torch.equal(total, expected)
            assert alike(codes, normed if own_order is None else ops.ordered_rows(normed, order), how), how
        assert alike(ops.row_codes(x, order, how), ops.ordered_rows(x, order), how), how
        assert alike(ops.row_codes(x, rotation, how), ops.hadamard_rows(x, rotation), how), how


@pytest.mark.parametrize("activation", range(5))
def test_every_activation(activation):
    gate_up, how = seeded(5, 2 * 896), CodesOf(128, 4)
    rotation, order = fitting_hadamard(896), any_order(896)
    assert alike(ops.gated_codes(gate_up, activation, None, how), ops.gated(gate_up, activation), how)
    assert alike(ops.gated_codes(gate_up, activation, order, how), ops.gated_in_order(gate_up, activation, order), how)
    if activation < 4:
        turned = ops.gated_hadamard(gate_up, activation, rotation)
        assert alike(ops.gated_codes(gate_up, activation, rotation, how), turned, how)


def test_matrices_across_heads_and_those_that_no_kernel_codes():
    across = (32, 1, 128), (28, 28, 128), (12, 12, 64), (16, 1, 64), (8, 1, 96)
    apart = (24, 12, 1), (60, 60, 8), (12, 12, 24), (4, 1, 24), (2, 1, 1)
    for rotation in [Hadamard(*sizes) for sizes in across + apart]:
        width = rotation.size * rotation.inner * (32 if (rotation.size * rotation.inner) % 32 else 2)
        for how in (CodesOf(32, 8), CodesOf(64, 4, 0.9), CodesOf(128, 4)):
            for count in (1, 7):
                x = seeded(count, width)
                assert alike(ops.row_codes(x, rotation, how), ops.hadamard_rows(x, rotation), how), (rotation, how)


def test_values_that_are_none():
    x, how = seeded(6, 512), CodesOf(128, 4, 0.9)
    x[0, :128], x[1, 5], x[2, 7], x[3, 128:256] = 0, torch.nan, torch.inf, 1e-39
    order = any_order(512)
    for turned, rows in ((order, ops.ordered_rows(x, order)), (Hadamard(512), ops.hadamard_rows(x, Hadamard(512)))):
        codes, scales = coded(rows, how)
        ours = ops.row_codes(x, turned, how)
        assert torch.equal(ours.codes, codes)
        assert torch.equal(ours.scales.isnan(), scales.isnan())
        assert torch.equal(ours.scales.nan_to_num(0), scales.nan_to_num(0))


@pytest.mark.parametrize("count", [1, 3, 17, 200])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_linear_of_codes_has_the_bits_of_a_linear_of_rows(count, how):
    generator = torch.Generator().manual_seed(3)
    x, out, width = seeded(count, 1024), 264, 1024 - how.outliers
    packed_codes = torch.randint(0, 256, (out, width // 2), generator=generator).to(torch.uint8)
    scale = torch.rand(out, width // how.group_size, generator=generator).half()
    bias = torch.randn(out, generator=generator).to(DEVICE)
    rows = ops.row_codes(x, any_order(1024), how)
    x = ops.ordered_rows(x, any_order(1024))
    bits = {"activation_bits": how.bits, "activation_clip": how.activation_clip}
    if how.outliers:
        outlier = torch.randint(-119, 120, (out, 128), generator=generator).to(torch.int8)
        parts = packed_codes, scale, outlier, torch.rand(out, generator=generator).half()
        tiles = ops.prepack_int4_int8(*[part.to(DEVICE) for part in parts])
        expected = ops.int4_int8_linear(x, *tiles, out, bias, **bits)
        ours = ops.int4_codes_linear(rows, *tiles, None, out, bias, group_size=128, outliers=128)
    else:
        zero = torch.randint(0, 16, scale.shape, generator=generator).to(torch.uint8)
        tiles = ops.prepack_int4(packed_codes.to(DEVICE), scale.to(DEVICE), zero.to(DEVICE))
        expected = ops.int4_linear(x, *tiles, out, bias, group_size=how.group_size, **bits)
        ours = ops.int4_codes_linear(rows, *tiles, out, bias, group_size=how.group_size)
    assert torch.equal(ours, expected)


def models() -> dict:
    """Of int4: as they are, rotated, in orders."""
    plain = packed(random_model("llama", torch.bfloat16, **SHAPE), "int4", keep_head=False)
    return {"plain": lambda: plain.cuda(), "rotated": rotated_model}


@pytest.mark.parametrize("word", ["w4a8", "w4a4"])
@pytest.mark.parametrize("kind", ["plain", "rotated"])
def test_a_step_has_the_bits_of_a_step_of_kernels_apart(kind, word):
    model = models()[kind]()
    ids = torch.randint(1, 199, (3, 40), generator=torch.Generator().manual_seed(7)).tolist()
    with precision_switch(model).at(word):
        together, apart = CudaDecoder(model), CudaDecoder(model, codes=False)
        assert together.codes
        ours, expected = (torch.stack(Lanes(one, 3, slots=128).feed(ids)) for one in (together, apart))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("kind", ["plain", "rotated"])
def test_a_captured_chain_over_codes_writes_what_the_target_alone_writes(kind):
    model = hf_mlspec.prepare(models()[kind](), engine="cuda")
    inputs = {name: value.cuda() for name, value in prompts([5, 9, 40]).items()}
    options = {"do_sample": False, "max_new_tokens": 32, "eos_token_id": None, "pad_token_id": 0}
    alone = model.generate(**inputs, **options, assistant_models=[])
    chain = model.generate(**inputs, **options, assistant_models=["w4a4"], speculation_config={"num_draft_tokens": 3})
    assert torch.equal(chain, alone)


BAD = [
    ({"bits": 16}, "bits is 16, choose one of"),
    ({"group_size": 48}, "group_size is 48"),
    ({"activation_clip": 0.0}, "activation_clip is 0"),
    ({"outliers": 64}, "outliers is 64 of 512 columns in groups of 128, expected 0, or 128 behind whole groups"),
    ({"width": 40}, "have 40 columns, expected a multiple of 32"),
]


@pytest.mark.parametrize(("changed", "message"), BAD, ids=[message[:20] for _, message in BAD])
def test_what_does_not_fit(changed, message):
    given = {**CodesOf(128, 4)._asdict(), **changed}
    x = seeded(3, given.pop("width", 512))
    with pytest.raises(ValueError, match=message):
        ops.row_codes(x, Hadamard(8), CodesOf(**given))
    with pytest.raises(ValueError, match=message):
        ops.gated_codes(torch.cat([x, x], 1), 0, None, CodesOf(**given))
    with pytest.raises(ValueError, match=message):
        ops.norm_codes(x, torch.ones(x.shape[1], device=DEVICE), 1e-5, None, None, CodesOf(**given))
