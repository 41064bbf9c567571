"""Do checkpoints of other libraries that this package writes hold the very values of its weights, as others read them?

GPTQ is decoded here number by number, as its layout says; compressed-tensors by that library itself, where it is
installed.
"""

from __future__ import annotations

import pytest
import torch

from hf_mlspec.checkpoints.codes import pack_words, unpack_words
from hf_mlspec.checkpoints.layer import HeldTensor, StoredLayer
from hf_mlspec.checkpoints.readers import reader_for
from hf_mlspec.checkpoints.writers import WRITERS, written
from hf_mlspec.formats import Int4Weight, Mxfp4Weight, PlanesWeight
from hf_mlspec.formats.planes import pack_planes

GPTQ, COMPRESSED = WRITERS["gptq"], WRITERS["compressed-tensors"]
OUT, IN = 32, 256


def dense(seed: int = 0) -> torch.Tensor:
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(seed))


def planes(bits: int, group: int = 64) -> PlanesWeight:
    """Random codes that are 0 at the middle one, as symmetric checkpoints of others have them."""
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (OUT, IN), generator=generator, dtype=torch.uint8)
    scale = (torch.rand(OUT, IN // group, generator=generator) + 0.01).half()
    return PlanesWeight(pack_planes(codes, bits), scale, torch.tensor([2**bits], dtype=torch.int32)).validate()


def order_by_group(group: int) -> torch.Tensor:
    """An order in which the inputs of every group ascend, as readers make them."""
    groups = torch.arange(IN)[torch.randperm(IN, generator=torch.Generator().manual_seed(5))] // group
    return torch.argsort(groups, stable=True)


INTEGERS = {
    **{f"int4 {group} {'symmetric' if symmetric else 'zeros'}": (group, symmetric)
       for group in (32, 64, 128) for symmetric in (True, False)},
    **{f"{bits} planes": bits for bits in (2, 3, 8)},
}


def weight_of(name: str) -> Int4Weight | PlanesWeight:
    what = INTEGERS[name]
    return planes(what) if isinstance(what, int) else Int4Weight.from_dense(dense(), *what)


def read_back(writer, weight, order=None):
    tensors = written(writer, weight, order)
    held = {name: HeldTensor(name, tensor) for name, tensor in tensors.items()}
    reader = reader_for(writer.config({"layer": writer.kind(weight, order)}, []))
    plan = reader.plan(StoredLayer("layer", weight.in_features, weight.out_features, held))
    return plan.read({name: tensors[name] for name in plan.tensors})


@pytest.mark.parametrize("ordered", [False, True], ids=["", "ordered"])
@pytest.mark.parametrize("writer", [GPTQ, COMPRESSED], ids=lambda writer: writer.method)
@pytest.mark.parametrize("name", INTEGERS)
def test_what_is_written_reads_back_bit_for_bit(name, writer, ordered):
    weight = weight_of(name)
    order = order_by_group(weight.group_size) if ordered else None
    again = read_back(writer, weight, order)
    assert type(again.weight) is type(weight)
    for part, other in zip(again.weight.parts, weight.parts, strict=True):
        assert (part is None) == (other is None)
        assert part is None or torch.equal(part, other)
    assert torch.equal(again.order, order) if ordered else again.order is None


def number(words: list[int], bits: int, place: int) -> int:
    """Code ``place`` of a stream of words, the lowest bits first."""
    stream = sum((word & 0xFFFFFFFF) << (32 * index) for index, word in enumerate(words))
    return stream >> (bits * place) & (2**bits - 1)


def decoded(tensors: dict[str, torch.Tensor], bits: int) -> torch.Tensor:
    """GPTQ as its papers and files have it, a Python number at a time: (code - zero) * scale, with 1 added to every
    zero point of a word at once."""
    ones = sum(1 << bits * place for place in range(32 // bits)) if bits != 3 else 0
    zeros = [[word + ones for word in row] for row in tensors["qzeros"].tolist()]
    columns = tensors["qweight"].t().tolist()
    scales, groups = tensors["scales"], tensors["g_idx"].tolist()
    values = torch.empty(OUT, IN)
    for out, words in enumerate(columns):
        stream = sum((word & 0xFFFFFFFF) << (32 * index) for index, word in enumerate(words))
        for place, group in enumerate(groups):
            zero = (number(zeros[group], bits, out) + (bits == 3)) % 2**bits
            code = stream >> (bits * place) & (2**bits - 1)
            values[out, place] = (code - zero) * float(scales[group, out])
    return values


@pytest.mark.parametrize("name", ["int4 32 symmetric", "int4 128 zeros", "3 planes", "8 planes"])
def test_gptq_by_a_plain_decoder(name):
    weight = weight_of(name)
    order = order_by_group(weight.group_size)
    tensors = GPTQ.tensors(weight, order)
    bits = GPTQ.kind(weight, order).bits
    assert {key: value.dtype for key, value in tensors.items()} == {
        "qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16, "g_idx": torch.int32}
    assert list(tensors["qweight"].shape) == [IN * bits // 32, OUT]
    assert torch.equal(decoded(tensors, bits)[:, order], weight.dequantize())


def test_gptq_of_a_zero_point_of_0_borrows_from_its_neighbour():
    weight = Int4Weight.from_dense(dense().abs() + 1, 32, symmetric=False)
    assert bool((weight.weight_zero == 0).any())
    tensors = GPTQ.tensors(weight)
    assert 15 in unpack_words(tensors["qzeros"], 4, OUT)
    assert torch.equal(decoded(tensors, 4), weight.dequantize())


@pytest.mark.parametrize("name", INTEGERS)
def test_compressed_integers_by_that_library(name):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    weight = weight_of(name)
    values = decompressed(PackedQuantizationCompressor, weight)
    assert values.dtype == torch.float16
    assert torch.equal(values, weight.dequantize(torch.float16))


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_integers_are_stored_as_that_library_stores_them(symmetric):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    weight = Int4Weight.from_dense(dense(), 64, symmetric)
    config = COMPRESSED.config({"layer": COMPRESSED.kind(weight)}, [])
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    wide = {"weight": weight.dequantize(torch.float16), "weight_scale": weight.weight_scale}
    zeros = {} if symmetric else {"weight_zero_point": weight.weight_zero.to(torch.int8) - 8}
    theirs, ours = PackedQuantizationCompressor.compress({**wide, **zeros}, scheme), COMPRESSED.tensors(weight)
    assert theirs.keys() == ours.keys()
    assert all(theirs[name].dtype == ours[name].dtype and torch.equal(theirs[name], ours[name]) for name in ours)


@pytest.mark.parametrize("small", [1.0, 2.0**-40])
def test_compressed_mxfp4_by_that_library(small):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor

    weight = Mxfp4Weight.from_dense(dense() * small)
    values = decompressed(MXFP4PackedCompressor, weight)
    assert torch.equal(values.float(), weight.dequantize())
    assert torch.equal(read_back(COMPRESSED, weight).weight.weight_packed, weight.weight_packed)


def decompressed(compressor, weight):
    from compressed_tensors.quantization import QuantizationConfig

    config = COMPRESSED.config({"layer": COMPRESSED.kind(weight)}, ["lm_head"])
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    assert compressor.can_compress(torch.nn.Linear, scheme)
    return compressor.decompress(COMPRESSED.tensors(weight), scheme)["weight"]


def test_compressed_layers_that_differ_are_told_by_name():
    weights = {"a": Int4Weight.from_dense(dense(), 32), "b": planes(8), "c": Mxfp4Weight.from_dense(dense())}
    config = COMPRESSED.config({name: COMPRESSED.kind(weight) for name, weight in weights.items()}, ["lm_head"])
    assert config["format"] == "mixed-precision"
    assert [group["targets"] for group in config["config_groups"].values()] == [["a"], ["b"], ["c"]]
    reader_for(config)


def test_gptq_settings():
    symmetric, zeros = Int4Weight.from_dense(dense(), 32), Int4Weight.from_dense(dense(), 32, symmetric=False)
    kinds = {"a": GPTQ.kind(symmetric), "b": GPTQ.kind(zeros, order_by_group(32))}
    config = GPTQ.config(kinds, ["model.x", "lm_head"])
    assert (config["sym"], config["desc_act"], config["lm_head"]) == (False, True, False)
    assert config["dynamic"] == {r"-:^model\.x$": {}}
    with pytest.raises(ValueError, match=r"c has 8 bits, groups of 64, symmetric, a has 4 bits, groups of 32"):
        GPTQ.config({**kinds, "c": GPTQ.kind(planes(8))}, [])


def nines() -> Int4Weight:
    weight = Int4Weight.from_dense(dense(), 32, symmetric=False)
    return Int4Weight(weight.weight_packed, weight.weight_scale, torch.full_like(weight.weight_zero, 9), name="nines")


@pytest.mark.parametrize(("writer", "weight", "message"), [
    (GPTQ, Mxfp4Weight.from_dense(dense(), name="x"), "x is MXFP4: GPTQ has integers only"),
    (GPTQ, PlanesWeight.from_dense(dense(), 5, name="x"), "x has 5 bits: GPTQ has 2, 3, 4 and 8"),
    (GPTQ, nines(), "nines: all its zero points are 9, which GPTQ files store as 8"),
    (GPTQ, Int4Weight.from_dense(dense()[:12], name="x"), "x: 12 outputs of 4 bits fill no whole words of 32"),
    (COMPRESSED, PlanesWeight.from_dense(dense(), 3, name="x"), "x: the codes of its 3 bit-planes are 0 at 3.5"),
    (COMPRESSED, PlanesWeight.from_dense(dense(), "ternary", name="x"), "bit-planes are 0 at 1; .* here 2"),
    (COMPRESSED, PlanesWeight.from_dense(dense(), 1, name="x"), "its 1 bit-planes are 0 at 0.5")])
def test_what_a_layout_cannot_say_is_refused(writer, weight, message):
    with pytest.raises(ValueError, match=message):
        writer.kind(weight)
    with pytest.raises(ValueError, match=message):
        written(writer, weight)


def test_ordered_mxfp4_is_refused():
    with pytest.raises(ValueError, match="orders integers only"):
        COMPRESSED.kind(Mxfp4Weight.from_dense(dense()), order_by_group(32))


def test_the_order_of_the_inputs_is_none():
    weight = Int4Weight.from_dense(dense(), 32)
    assert "weight_g_idx" not in COMPRESSED.tensors(weight, torch.arange(IN))
    assert not GPTQ.kind(weight, torch.arange(IN)).ordered


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [32, 33, 40, 100])
def test_words_and_codes(bits, count):
    codes = torch.randint(0, 2**bits, (3, count), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    words = pack_words(codes, bits)
    assert words.shape == (3, -(-count * bits // 32))
    assert torch.equal(unpack_words(words, bits, count), codes)
