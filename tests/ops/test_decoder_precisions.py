"""Does the compiled decoder refuse nested weights and bit-planes that do not fit, by name and number?"""

from __future__ import annotations

import pytest
import torch

from hf_mlspec.ops.compiled_decoder import Sizes, compiled_decoder, has_compiled_decoder

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")

OUT, IN = 40, 64
SIZES = Sizes(IN, 2, 2, 32, 64, OUT, OUT, 32, "silu", 1e-5)


def decoder(embedding=None):
    table = torch.zeros(OUT, IN, dtype=torch.bfloat16) if embedding is None else embedding
    return compiled_decoder(SIZES, torch.float32, table, torch.ones(IN))


def nested(**other) -> list:
    """Arguments of set_nested for a head."""
    tiles = {part: torch.zeros(3, 2, size, dtype=torch.uint8) for part, size in (("draft", 256), ("exponents", 16),
                                                                                ("low", 768))}  # fmt: skip
    parts = {"name": "head", "in": IN, "out": OUT, **tiles, "codebook": torch.arange(8, dtype=torch.uint8),
             "rows": None, "weight": None, "bias": None, "weight_bits": 16, "activation_bits": 16}  # fmt: skip
    return list({**parts, **other}.values())


def planes(**other) -> list:
    parts = {"name": "head", "in": IN, "out": OUT, "planes": torch.zeros(4, 3, 2, 64, dtype=torch.uint8),
             "scale": torch.ones(3, 2, 16, dtype=torch.float16), "bias": None, "group": 32, "zero_doubled": 16,
             "num_planes": 4}  # fmt: skip
    return list({**parts, **other}.values())


def whole_rows(*rows: int) -> dict:
    return {"rows": torch.tensor(rows), "weight": torch.zeros(len(rows), IN, dtype=torch.bfloat16)}


def test_what_fits_is_taken():
    decoder().set_nested(*nested(**whole_rows(3, 39), bias=torch.zeros(OUT)))
    decoder().set_planes(*planes(num_planes=2))
    tiles = nested()[3:6]
    decoder(torch.zeros(0, IN, dtype=torch.bfloat16)).set_nested_embedding(*tiles, None, None)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (whole_rows(3, 3), r"escape_rows\[1\] is 3, expected ascending rows of 40"),
        (whole_rows(40), r"escape_rows\[0\] is 40, expected ascending rows of 40"),
        (whole_rows(-1), r"escape_rows\[0\] is -1, expected ascending"),
        ({"rows": torch.tensor([1])}, "escape_rows and escape_weight come together"),
        ({**whole_rows(1), "weight": torch.zeros(1, 32, dtype=torch.bfloat16)}, r"escape_weight has shape \[1, 32\]"),
        ({"low": torch.zeros(3, 2, 512, dtype=torch.uint8)}, r"low_tiles has shape \[3, 2, 512\]"),
        ({"codebook": torch.zeros(16, dtype=torch.uint8)}, r"codebook has shape \[16\]"),
        ({"weight_bits": 16, "activation_bits": 8}, "weight_bits is 16 and activation_bits 8, choose 16 and 16"),
        ({"weight_bits": 8}, "weight_bits is 8 and activation_bits 16, choose"),
        ({"in": 48}, "a nested weight takes in_features a multiple of 32, not 48"),
    ],
)
def test_nested_weights_that_do_not_fit(other, words):
    with pytest.raises(ValueError, match=words):
        decoder().set_nested(*nested(**other))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"num_planes": 5}, "weight_bits is 5, the weight stores 4 bit-planes: choose 1 to 4"),
        ({"zero_doubled": 31}, "zero_doubled is 31, twice a code of 4 planes is 0 to 30"),
        ({"planes": torch.zeros(8, 3, 2, 64, dtype=torch.uint8), "zero_doubled": 200}, "every level from 254 to 256"),
        ({"group": 48}, "groups of 32, 64 or 128 that divide 64, not of 48"),
        ({"planes": torch.zeros(3, 2, 64, dtype=torch.uint8)}, r"plane_tiles has shape \[3, 2, 64\], expected"),
    ],
)
def test_planes_that_do_not_fit(other, words):
    with pytest.raises(ValueError, match=words):
        decoder().set_planes(*planes(**other))


def test_a_nested_table_takes_the_place_of_no_rows():
    with pytest.raises(ValueError, match="takes the place of a bfloat16 embedding without rows"):
        decoder().set_nested_embedding(*nested()[3:6], None, None)
    empty = decoder(torch.zeros(0, IN, dtype=torch.bfloat16))
    cache = torch.zeros(0, 2, 1, 2, 4, 32)
    with pytest.raises(ValueError, match="no embedding yet"):
        empty.score(cache, [1], [1], [0], [1], False, False, 0, 0, 0, [], [])
