"""Are bit planes read as the weights that their tables hold, bit for bit, at every width?"""


import pytest
import torch

from hf_mlspec.checkpoints.anyprecision import AnyPrecisionConfig, AnyPrecisionLayer, AnyPrecisionReader
from hf_mlspec.checkpoints.layer import HeldTensor, StoredLayer

SEED, PARENT = 3, 5


def encoded(codes: list[list[int]], parent: int) -> torch.Tensor:
    """int32 [parent, N, K / 32], one bit at a time, from the words of the layout."""
    rows, count = len(codes), len(codes[0])
    planes = [[[0] * (count // 32) for _ in range(rows)] for _ in range(parent)]
    for row in range(rows):
        for element in range(count):
            chunk, within = divmod(element, 1024)
            words = min(1024, count - chunk * 1024) // 32
            s, rest = divmod(within, 8 * words)
            t, j = divmod(rest, 8)
            for plane in range(parent):
                bit = codes[row][element] >> (parent - 1 - plane) & 1
                planes[plane][row][chunk * 32 + t] |= bit << (31 - (8 * s + j))
    signed = [[[word - (1 << 32) if word >> 31 else word for word in row] for row in plane] for plane in planes]
    return torch.tensor(signed, dtype=torch.int32)


def example(rows: int, count: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << PARENT, (rows, count), generator=generator)
    tables = {bits: torch.randn(rows, 1 << bits, generator=generator).half() for bits in range(SEED, PARENT + 1)}
    return codes, tables


def stored(codes, tables, **changed) -> StoredLayer:
    tensors = {"qweight": encoded(codes.tolist(), PARENT), **{f"lut{bits}": table for bits, table in tables.items()}}
    tensors.update(changed)
    held = {name: HeldTensor(f"q.{name} in f", tensor) for name, tensor in tensors.items() if tensor is not None}
    return StoredLayer("q", codes.shape[1], codes.shape[0], held)


READER = AnyPrecisionReader(AnyPrecisionConfig(SEED, PARENT))


def test_one_word_by_hand():
    words = torch.tensor([[[-(1 << 31)]], [[1]]], dtype=torch.int32)  # bit 31 is weight 0, bit 0 is weight 31
    layer = AnyPrecisionLayer("q", words, {2: torch.tensor([[0.0, 1.0, 2.0, 3.0]]).half()})
    assert layer.indices(1).tolist() == [[1] + [0] * 31]
    assert layer.indices(2).tolist() == [[2] + [0] * 30 + [1]]
    assert layer.dequantize(2).tolist() == [[2.0] + [0.0] * 30 + [1.0]]


def test_words_of_a_chunk_are_interleaved_by_eights():
    words = torch.zeros(1, 1, 2, dtype=torch.int32)
    words[0, 0, 1] = 1 << 31 - (8 * 2 + 3)  # s = 2, j = 3, t = 1, T = 2
    assert AnyPrecisionLayer("q", words, {}).indices(1)[0].nonzero().tolist() == [[2 * 16 + 8 + 3]]


@pytest.mark.parametrize("count", [32, 64, 992, 1024, 1056, 2048, 2752])
def test_every_width_bit_for_bit(count):
    codes, tables = example(3, count, seed=count)
    layer = READER.layer_of(stored(codes, tables))
    assert layer.widths == (3, 4, 5)
    for bits in layer.widths:
        index = (codes >> (PARENT - bits)).tolist()
        expected = [[tables[bits][row, code].item() for code in index[row]] for row in range(3)]
        assert layer.indices(bits).tolist() == index
        assert layer.indices(bits).dtype == torch.uint8
        assert layer.dequantize(bits).dtype == torch.float16
        assert layer.dequantize(bits).tolist() == expected


def test_widths_nest():
    layer = READER.layer_of(stored(*example(2, 1056)))
    assert torch.equal(layer.indices(5) >> 1, layer.indices(4))
    assert torch.equal(layer.indices(4) >> 1, layer.indices(3))


def test_a_layer_of_many_rows_is_read_in_parts(monkeypatch):
    monkeypatch.setattr("hf_mlspec.checkpoints.anyprecision._WORDS", 5)
    codes, tables = example(7, 64)
    layer = READER.layer_of(stored(codes, tables))
    assert layer.dequantize(5).tolist() == tables[5].gather(1, codes).tolist()


def test_a_plan_reads_every_table():
    codes, tables = example(4, 96)
    layer = stored(codes, tables, weight=torch.zeros(4, 96).half())  # the original weight may have stayed
    assert READER.holds(layer)
    plan = READER.plan(layer)
    assert (plan.format, plan.ordered, dict(plan.options)) == ("lut", False, {"num_planes": 5, "least_planes": 3})
    assert plan.read_as == "lookup-table planes (num_planes 5, least_planes 3)"
    assert set(plan.tensors) == {"qweight", "lut3", "lut4", "lut5"}
    assert plan.stored_as == "Any-Precision, 3 to 5 bits, a table a row"
    read = plan.read({name: tensor.load() for name, tensor in plan.tensors.items()})
    for bits in (3, 4, 5):
        dense = tables[bits].gather(1, codes >> PARENT - bits)
        assert torch.equal(read.weight.validate().dequantize(torch.float16, bits), dense)
    assert read.order is None


def test_a_layer_without_planes_is_not_quantized():
    assert not READER.holds(StoredLayer("q", 32, 2, {"weight": HeldTensor("q.weight in f", torch.ones(2, 32))}))


@pytest.mark.parametrize(("changed", "error", "message"), [
    ({"lut4": None}, ValueError, "q: lut4 is missing"),
    ({"qweight": None}, ValueError, "q: qweight is missing"),
    ({"lut4": torch.ones(4, 8).half()}, ValueError, r"q.lut4 in f has shape \[4, 8\], expected \[4, 16\]"),
    ({"lut5": torch.ones(4, 32)}, TypeError, "q.lut5 in f is torch.float32, expected torch.float16"),
    ({"lut3": torch.full((4, 8), float("nan")).half()}, ValueError, "q: lut3 holds 32 values that are NaN or Inf"),
    ({"qweight": torch.zeros(5, 4, 2, dtype=torch.int32)}, ValueError, r"q.qweight in f has shape \[5, 4, 2\]"),
    ({"qweight": torch.zeros(4, 4, 3, dtype=torch.int32)}, ValueError, r"q.qweight in f has shape \[4, 4, 3\]"),
    ({"qweight": torch.zeros(5, 4, 3, dtype=torch.int64)}, TypeError, "q.qweight in f is torch.int64"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(changed, error, message):
    layer = stored(*example(4, 96), **changed)
    with pytest.raises(error, match=message):
        READER.plan(layer)
    with pytest.raises(error, match=message):
        READER.layer_of(layer)


def test_widths_that_are_not_there_are_refused():
    layer = READER.layer_of(stored(*example(2, 32)))
    with pytest.raises(ValueError, match=r"q: lut2 is missing, there are tables of 3, 4, 5 bits"):
        layer.dequantize(2)
    with pytest.raises(ValueError, match=r"q has 5 bit planes, not 6"):
        layer.indices(6)
    with pytest.raises(ValueError, match=r"q: 40 inputs are no multiple of 32"):
        READER.plan(StoredLayer("q", 40, 2, {}))


def test_settings_are_read():
    settings = {"seed_precision": 3, "parent_precision": 8, "group_count": 1}
    assert AnyPrecisionConfig.of_config({"anyprec": settings}) == AnyPrecisionConfig(3, 8)


@pytest.mark.parametrize("settings", [
    None, {}, {"seed_precision": 4, "parent_precision": 3}, {"seed_precision": 3, "parent_precision": 9},
    {"seed_precision": 3, "parent_precision": 8, "group_count": 2}, {"seed_precision": "3", "parent_precision": 8},
])  # fmt: skip
def test_other_settings_are_refused(settings):
    with pytest.raises(ValueError, match=r"config.json: anyprec"):
        AnyPrecisionConfig.of_config({"anyprec": settings})
