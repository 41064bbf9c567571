"""Is a GGUF file read as it was written, and a damaged one refused before memory is allocated?"""

import os
import random
import struct
import tracemalloc

import numpy as np
import pytest
import torch

from hf_mlspec.checkpoints.gguf import GgufReader, dense, stored_layer
from hf_mlspec.checkpoints.gguf_file import GGML_TYPES, open_gguf
from hf_mlspec.checkpoints.gguf_names import config_of, parameters, row_orders
from tests.gguf_files import by_hand, entry, gguf, info, random_blocks, text, write

T = gguf.GGUFValueType
FUZZED = int(os.environ.get("MLSPEC_FUZZ", "2000"))  # headers; 100000 take a minute
F32, Q4_0 = 0, 2


def number(letter: str, value) -> bytes:
    return struct.pack(f"<{letter}", value)


def array_of(kind: int, count: int, data: bytes = b"") -> bytes:
    return number("I", kind) + number("Q", count) + data


@pytest.fixture
def opened(tmp_path):
    """Bytes -> the header of a file of them."""

    def opens(data: bytes):
        (tmp_path / "x.gguf").write_bytes(data)
        return open_gguf(tmp_path / "x.gguf")

    return opens


def test_every_type_is_known_as_the_gguf_package_has_it():
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: ggml[:3] for kind, ggml in GGML_TYPES.items()} == theirs


def test_metadata_of_every_type(tmp_path):
    written = {
        "a.u8": (255, T.UINT8), "a.i8": (-128, T.INT8), "a.u16": (65535, T.UINT16), "a.i16": (-5, T.INT16),
        "a.u32": (1 << 31, T.UINT32), "a.i32": (-(1 << 31), T.INT32), "a.f32": (0.5, T.FLOAT32),
        "a.yes": (True, T.BOOL), "a.text": ("näh", T.STRING), "a.u64": ((1 << 64) - 1, T.UINT64),
        "a.i64": (-(1 << 63), T.INT64), "a.f64": (0.1, T.FLOAT64),
        "a.words": ["x", "", "yz"], "a.ints": [1, -2, 3], "a.floats": [0.5, 0.25],
        "a.bools": [True, False],
    }  # fmt: skip
    file = open_gguf(write(tmp_path / "x.gguf", {}, written))
    assert file.version == 3
    assert file.metadata["general.architecture"] == "llama"
    for key, value in written.items():
        read, value = file.metadata[key], value[0] if isinstance(value, tuple) else value
        assert list(read) == value if isinstance(value, list) else read == value
    assert file.metadata["a.yes"] is True


def test_tensors_of_every_readable_dtype(tmp_path):
    arrays = {f"t{n}": np.arange(24).reshape(shape).astype(dtype) for n, (shape, dtype) in enumerate([
        ((24,), np.float32), ((2, 12), np.float16), ((2, 3, 4), np.int8), ((1, 2, 3, 4), np.int16), ((6, 4), np.int32),
        ((24, 1), np.int64), ((3, 8), np.float64)])}  # fmt: skip
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for name, data in arrays.items():
        writer.add_tensor(name, data)
    half = torch.randn(3, 4).bfloat16()
    writer.add_tensor("bf16", half.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
    blocks = random_blocks("Q4_0", 5, 3)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = open_gguf(tmp_path / "x.gguf").tensors
    for name, data in arrays.items():
        assert torch.equal(tensors[name].load(), torch.from_numpy(data))
        assert tensors[name].shape == tensors[name].values_shape == data.shape
    assert torch.equal(tensors["bf16"].load(), half)
    own = tensors["blocks"]
    assert (own.ggml_type, own.values_shape, own.shape, own.dtype) == ("Q4_0", (5, 96), (5, 54), torch.uint8)
    assert torch.equal(own.load(), torch.from_numpy(blocks))
    assert own.place == f"blocks in {tmp_path / 'x.gguf'}"


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_a_file_by_hand(opened, version, alignment):
    """Two tensors in another order than their places, the first one padded; the file may end without padding."""
    values = torch.arange(3.0), torch.arange(4.0, 8.0)
    place = max(16, alignment)
    data = values[0].numpy().tobytes().ljust(place, b"\0") + values[1].numpy().tobytes()
    infos = [info("b", (2, 2), F32, place), info("a", (3,), F32, 0)]
    entries = [entry("general.alignment", 4, number("I", alignment)),
               entry("nested", 9, array_of(9, 2, array_of(0, 2, b"\1\2") + array_of(8, 1, text("x"))))]  # fmt: skip
    file = opened(by_hand(entries, infos, data, version, alignment))
    assert list(file.tensors) == ["b", "a"]
    assert torch.equal(file.tensors["a"].load(), values[0])
    assert torch.equal(file.tensors["b"].load(), values[1].view(2, 2))
    assert [list(part) for part in file.metadata["nested"]] == [[1, 2], ["x"]]


def test_an_unknown_type_is_refused_when_it_is_read(opened):
    file = opened(by_hand((), [info("new", (64, 2), 77, 0), info("a", (4,), F32, 640)], bytes(656)))
    assert torch.equal(file.tensors["a"].load(), torch.zeros(4))
    assert file.tensors["new"].values_shape == (2, 64)
    with pytest.raises(ValueError, match=r"new in .* is of ggml's type 77, which this package does not know"):
        file.tensors["new"].load()


def test_bytes_in_a_vocabulary_are_kept(opened):
    file = opened(by_hand([entry("words", 9, array_of(8, 2, text(b"\xff\xfe") + text("ok")))]))
    assert [word.encode(errors="surrogateescape") for word in file.metadata["words"]] == [b"\xff\xfe", b"ok"]


ONE = info("a", (32,), F32, 0)
DAMAGED = {
    "empty": (b"", "it has 0 bytes"),
    "short": (b"GGUF\3\0\0\0", "it has 8 bytes"),
    "magic": (by_hand(magic=b"GGML"), "it opens with b'GGML'"),
    "version 1": (by_hand(version=1), "its version is 1, this package reads 2 and 3"),
    "version 4": (by_hand(version=4), "its version is 4"),
    "big-endian": (by_hand(version=3 << 24), "written for big-endian machines"),
    "many tensors": (by_hand(counts=(1 << 60, 0)), "it says that it has a header of 1152921504606846976 tensors"),
    "many entries": (by_hand(counts=(0, 1 << 63)), "9223372036854775808 metadata entries"),
    "more tensors than bytes": (by_hand(counts=(1000, 0)), "1000 tensors and 0 metadata entries at byte 24 needs"),
    "key": (by_hand([text("x" * 70000) + bytes(20)]), "has 70000 bytes"),
    "empty key": (by_hand([entry("", 0, b"\1"), entry("x" * 9, 0, b"\1")]), "has 0 bytes"),
    "key that is no text": (by_hand([entry(b"\xff\xff", 0, b"\1")]), "which is no UTF-8"),
    "length of a key": (by_hand([number("Q", 1 << 62) + bytes(30)]), "needs 4611686018427387904 bytes, and the file"),
    "key twice": (by_hand([entry("x", 0, b"\1"), entry("x", 0, b"\2")]), "metadata key 'x' occurs twice"),
    "value type": (by_hand([entry("x", 13, b"\1\0\0\0")]), "x is of type 13, which does not exist"),
    "value cut": (by_hand([entry("xyz", 10, b"\1\0\0\0")]), "xyz at byte 39 needs 8 bytes, and the file has 4 more"),
    "bool": (by_hand([entry("x", 7, b"\2")]), "x holds 2, a bool is 0 or 1"),
    "bools": (by_hand([entry("x", 9, array_of(7, 3, b"\0\1\3"))]), "x holds 3"),
    "long string": (by_hand([entry("x", 8, number("Q", (1 << 64) - 1))]), "x at byte 45 needs 18446744073709551615"),
    "long array": (by_hand([entry("x", 9, array_of(10, 1 << 61))]), "x, an array of 2305843009213693952,"),
    "long array of strings": (by_hand([entry("x", 9, array_of(8, 1 << 40))]), "needs 8796093022208 bytes"),
    "long array of arrays": (by_hand([entry("x", 9, array_of(9, 1 << 40))]), "needs 13194139533312 bytes"),
    "array of nothing": (by_hand([entry("x", 9, array_of(99, 1, bytes(20)))]), "x is of type 99"),
    "deep array": (by_hand([entry("x", 9, array_of(9, 1) * 9 + array_of(0, 0))]), "nested too deep"),
    "alignment 0": (by_hand([entry("general.alignment", 4, number("I", 0))]), "general.alignment is 0"),
    "alignment 48": (by_hand([entry("general.alignment", 4, number("I", 48))]), "is 48, expected a power of two"),
    "alignment of 2 GB": (by_hand([entry("general.alignment", 4, number("I", 1 << 31))]), "is 2147483648"),
    "alignment a text": (by_hand([entry("general.alignment", 8, text("32"))]), "is '32'"),
    "tensor name": (by_hand((), [info(b"\xff", (32,), F32, 0)], bytes(128)), "no UTF-8"),
    "tensor twice": (by_hand((), [ONE, info("a", (32,), F32, 128)], bytes(256)), "tensor 'a' occurs twice"),
    "no axes": (by_hand((), [info("abcdefghi", (), F32, 0)], bytes(128)), "abcdefghi has 0 axes, expected 1 to 4"),
    "five axes": (by_hand((), [info("a", (2,) * 5, F32, 0)], bytes(128)), "a has 5 axes"),
    "no elements": (by_hand((), [info("a", (4, 0), F32, 0)], bytes(128)), "a has shape [0, 4]"),
    "overflow": (by_hand((), [info("a", (1 << 33, 1 << 33), F32, 0)], bytes(128)), "which no tensor has"),
    "wrapped to 0": (by_hand((), [info("a", (1 << 32, 1 << 32), Q4_0, 0)], bytes(128)), "which no tensor has"),
    "beyond the file": (by_hand((), [info("a", (1 << 40,), F32, 0)], bytes(128)), "a ends at 4398046511168: it is"),
    "truncated": (by_hand((), [ONE], bytes(127)), "it has 191 bytes, a ends at 192: it is truncated"),
    "offset": (by_hand((), [info("a", (32,), F32, 1 << 50)], bytes(128)), "a ends at 1125899906842816: it is"),
    "unaligned": (by_hand((), [info("a", (32,), F32, 16)], bytes(160)), "offset 16, no multiple of the alignment 32"),
    "overlap": (by_hand((), [ONE, info("b", (32,), F32, 96)], bytes(256)), "b begins at byte 192, what is before it"),
    "same place": (by_hand((), [ONE, info("b", (32,), F32, 0)], bytes(256)), "b begins at byte 96, what is before it"),
    "gap": (by_hand((), [ONE, info("b", (32,), F32, 160)], bytes(288)), "b begins at byte 256, what is before it"),
    "longer": (by_hand((), [ONE], bytes(256)), "it is longer than what was saved"),
    "nothing behind": (by_hand([entry("x", 0, b"\1")]) + bytes(64), "it is longer than what was saved"),
    "part of a block": (by_hand((), [info("a", (48,), Q4_0, 0)], bytes(64)), "a block of Q4_0 holds 32 values of"),
}


@pytest.mark.parametrize(("data", "expected"), DAMAGED.values(), ids=DAMAGED)
def test_damage_is_refused(opened, tmp_path, data, expected):
    tracemalloc.start()
    with pytest.raises(ValueError, match="is damaged") as raised:
        opened(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    said = str(raised.value)
    assert expected in said
    assert said.startswith(f"{tmp_path / 'x.gguf'} is damaged: ")
    assert said.endswith("; download or write the checkpoint again")


def test_every_truncation_of_a_file_is_refused(tmp_path, opened):
    whole = write(tmp_path / "whole.gguf", {"t": ("Q8_0", random_blocks("Q8_0", 2, 2))},
                  {"a.words": ["one", "two"], "a.number": 7}).read_bytes()  # fmt: skip
    opened(whole)
    padding = 32 - 136 % 32  # behind the last tensor: nothing is lost with it
    for length in range(len(whole) - padding):
        with pytest.raises(ValueError, match="is damaged"):
            opened(whole[:length])


def small_model(path):
    """A file of one block of a llama: what names and configurations are made of."""
    blocks = {name: ("Q4_0", random_blocks("Q4_0", 64, 2, seed)) for seed, name in enumerate(
        ["token_embd.weight", *(f"blk.0.{stem}.weight" for stem in (
            "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"))])}  # fmt: skip
    norms = {name: ("F32", np.ones(64)) for name in ("output_norm.weight", "blk.0.attn_norm.weight",
                                                     "blk.0.ffn_norm.weight")}  # fmt: skip
    sizes = {"context_length": 128, "embedding_length": 64, "feed_forward_length": 64, "block_count": 1,
             "attention.head_count": 4, "attention.head_count_kv": 4, "rope.dimension_count": 16}  # fmt: skip
    metadata = {f"llama.{key}": (value, T.UINT32) for key, value in sizes.items()}
    metadata |= {"llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.tokens": [f"w{n}" for n in range(64)]}
    return write(path, {**blocks, **norms}, metadata)


def mutated(whole: bytes, header: int, rng: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(header)
        kind = rng.randrange(5)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            data[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63,
                                                               (1 << 64) - 1)))  # fmt: skip
        elif kind == 3:
            del data[at : at + rng.randrange(1, 16)]
        else:
            data[at:at] = rng.randbytes(rng.randrange(1, 16))
    return bytes(data[: rng.randrange(len(data))]) if rng.randrange(10) == 0 else bytes(data)


def test_no_mutated_header_does_more_than_be_refused(tmp_path):
    """ValueError or TypeError, or a file whose tensors lie within it and can be read."""
    whole = small_model(tmp_path / "whole.gguf").read_bytes()
    file = open_gguf(tmp_path / "whole.gguf")
    header = min(tensor.begin for tensor in file.tensors.values())
    assert len(parameters(file)) == len(file.tensors)
    rng, path, refused = random.Random(5), tmp_path / "x.gguf", 0
    for _ in range(FUZZED):
        path.write_bytes(mutated(whole, header, rng))
        try:
            read_all(path)
        except (ValueError, TypeError):
            refused += 1
    assert FUZZED * 0.5 < refused < FUZZED


def read_all(path) -> None:
    file = open_gguf(path)
    size = path.stat().st_size
    for tensor in file.tensors.values():
        assert 0 <= tensor.begin <= tensor.end <= size
    config_of(file)
    orders = row_orders(file)
    reader = GgufReader(orders)
    for name, tensor in parameters(file).items():
        layer = stored_layer(name.removesuffix(".weight"), tensor) if len(tensor.shape) == 2 else None
        if layer is not None and reader.holds(layer):
            plan = reader.plan(layer)
            plan.read({"weight": tensor.load()})
        else:
            dense(tensor)
