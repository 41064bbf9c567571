"""Is a file of torch.save read without running anything that is in it?"""

import contextlib
import os
import pickle
import struct
import sys
import types
import zipfile
from collections import OrderedDict

import pytest
import torch

from hf_mlspec.checkpoints import pickles
from hf_mlspec.checkpoints.pickles import WeightQuantizer, held_tensors, read_pickle


class Touch:
    """Unpickled by a reader that runs things, it writes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class Evaluated(Touch):
    def __reduce__(self):
        return eval, (f"open({self.path!r}, 'w').close()",)


class Nested(Touch):
    def __reduce__(self):
        return pickle.loads, (pickle.dumps(Touch(self.path)),)


class Large(Touch):
    def __reduce__(self):
        return bytearray, (1 << 50,)


@pytest.fixture
def quantizer_class(monkeypatch):
    """A class as QuaRot has it: a module with buffers, in a top-level module quant_utils."""
    module = types.ModuleType("quant_utils")

    class Quantizer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("maxq", torch.tensor(7))
            self.register_buffer("scale", torch.tensor([[0.5], [0.25]]))
            self.register_buffer("zero", torch.zeros(2, 1))
            self.bits, self.sym, self.perchannel = 4, True, True

    Quantizer.__module__, Quantizer.__qualname__, Quantizer.__name__ = "quant_utils", *["WeightQuantizer"] * 2
    module.WeightQuantizer = Quantizer
    monkeypatch.setitem(sys.modules, "quant_utils", module)
    return Quantizer


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_and_plain_containers_are_read(tmp_path, zipped):
    held = {
        "a": torch.arange(6.0).view(2, 3), "b": [torch.tensor([1, 2], dtype=torch.int16), 3, "x", None, 2.5, {4}],
        "dtype": torch.float16, "shape": torch.Size([2]), "half": torch.ones(3, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(2)), "ordered": OrderedDict(c=torch.zeros(1)),
    }  # fmt: skip
    torch.save(held, tmp_path / "f.pt", _use_new_zipfile_serialization=zipped)
    read = read_pickle(tmp_path / "f.pt")
    assert read["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (read["b"][0].tolist(), read["b"][1:]) == ([1, 2], [3, "x", None, 2.5, {4}])
    assert (read["dtype"], read["shape"], read["half"].tolist()) == (torch.float16, torch.Size([2]), [1, 1, 1])
    assert (read["parameter"].tolist(), list(read["ordered"])) == ([1, 1], ["c"])


def test_a_quantizer_becomes_an_inert_stub(tmp_path, quantizer_class):
    torch.save({"w_quantizers": {"q": quantizer_class()}}, tmp_path / "f.pt")
    stub = read_pickle(tmp_path / "f.pt")["w_quantizers"]["q"]
    assert type(stub) is WeightQuantizer
    assert stub.value("scale").tolist() == [[0.5], [0.25]]
    assert (stub.value("bits"), stub.value("sym"), stub.value("absent", 3)) == (4, True, 3)
    assert not callable(stub)


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_a_legacy_pickle_with_the_source_of_a_class_is_refused(tmp_path, quantizer_class):
    torch.save(quantizer_class(), tmp_path / "f.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"refused: Only persistent_load of storage is allowed") as refused:
        read_pickle(tmp_path / "f.pt")
    assert "will likely succeed" not in str(refused.value)


def test_the_stub_is_forgotten_after_the_call(tmp_path, quantizer_class):
    torch.save(quantizer_class(), tmp_path / "f.pt")
    read_pickle(tmp_path / "f.pt")
    assert not any("WeightQuantizer" in str(known) for known in torch.serialization.get_safe_globals())


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("hostile", "named"),
    [(Touch, "posix.system"), (Evaluated, "__builtin__.eval"), (Nested, "loads"), (Large, "__builtin__.bytearray")],
)
def test_a_hostile_pickle_is_refused_by_name_and_runs_nothing(tmp_path, hostile, named, zipped):
    torch.save({"w": torch.ones(2), "x": [hostile(tmp_path / "hit")]}, tmp_path / "f.pt",
               _use_new_zipfile_serialization=zipped)  # fmt: skip
    with pytest.raises(ValueError, match=r"f.pt is refused: it names .*" + named):
        read_pickle(tmp_path / "f.pt")
    assert not (tmp_path / "hit").exists()


def test_one_hidden_in_a_tensors_attributes_is_refused(tmp_path):
    tensor = torch.ones(2)
    tensor.note = Touch(tmp_path / "hit")
    torch.save({"w": tensor}, tmp_path / "f.pt")
    with pytest.raises(ValueError, match=r"it names posix.system, torch.Tensor, torch._tensor._rebuild_from_type_v2"):
        read_pickle(tmp_path / "f.pt")
    assert not (tmp_path / "hit").exists()


def test_one_hidden_in_a_quantizer_is_refused(tmp_path, quantizer_class):
    quantizer = quantizer_class()
    quantizer.note = Touch(tmp_path / "hit")
    torch.save(quantizer, tmp_path / "f.pt")
    with pytest.raises(ValueError, match=r"it names posix.system;"):
        read_pickle(tmp_path / "f.pt")
    assert not (tmp_path / "hit").exists()


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_bare_pickle_of_any_protocol_is_refused(tmp_path, protocol):
    (tmp_path / "f.pt").write_bytes(pickle.dumps(Touch(tmp_path / "hit"), protocol=protocol))
    with pytest.raises(ValueError, match=r"f.pt is refused"):
        read_pickle(tmp_path / "f.pt")
    assert not (tmp_path / "hit").exists()


def test_names_taken_from_the_stack_are_refused(tmp_path):
    torch.save({"x": OrderedDict()}, tmp_path / "f.pt", pickle_protocol=4)
    with pytest.raises(ValueError, match=r"a global by STACK_GLOBAL"):
        read_pickle(tmp_path / "f.pt")


def rewritten(source, target, change, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(source) as before, zipfile.ZipFile(target, "w", compression) as after:
        for entry in before.infolist():
            after.writestr(entry.filename, change(entry.filename, before.read(entry)))


def test_a_compressed_part_is_refused(tmp_path):
    torch.save(torch.zeros(100_000), tmp_path / "a.pt")
    rewritten(tmp_path / "a.pt", tmp_path / "b.pt", lambda name, data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match=r"is compressed, torch.save compresses nothing"):
        read_pickle(tmp_path / "b.pt")


def test_parts_that_claim_more_than_the_file_has_are_refused(tmp_path):
    torch.save(torch.zeros(4), tmp_path / "f.pt")
    data = bytearray((tmp_path / "f.pt").read_bytes())
    central = data.rfind(b"PK\x01\x02")
    data[central + 20 : central + 28] = struct.pack("<II", 1 << 31, 1 << 31)  # compressed and uncompressed size
    (tmp_path / "f.pt").write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"its parts claim 2147"):
        read_pickle(tmp_path / "f.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_tensor_beyond_its_storage_is_refused(tmp_path, zipped):
    torch.save(torch.zeros(1).expand(1 << 40), tmp_path / "f.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=r"a tensor of shape \[1099511627776\] claims 4398046511104 bytes, 4 are"):
        read_pickle(tmp_path / "f.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_storage_that_claims_more_than_its_record_is_refused(tmp_path, zipped):
    torch.save(torch.zeros(77), tmp_path / "f.pt", _use_new_zipfile_serialization=zipped)
    small, large = b"K\x4d", b"J\xff\xff\xff\x7f"  # 77 and 2^31 - 1 in a pickle's words
    if zipped:
        rewritten(tmp_path / "f.pt", tmp_path / "g.pt", lambda name, data: data.replace(small, large)
                  if name.endswith("data.pkl") else data)  # fmt: skip
    else:
        (tmp_path / "g.pt").write_bytes((tmp_path / "f.pt").read_bytes().replace(small, large))
    with pytest.raises(ValueError, match=r"g.pt is refused"):
        read_pickle(tmp_path / "g.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path, zipped):
    torch.save({"w": torch.arange(8.0)}, tmp_path / "f.pt", _use_new_zipfile_serialization=zipped)
    data = (tmp_path / "f.pt").read_bytes()
    for length in range(1, len(data), 7):
        (tmp_path / "g.pt").write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"g.pt is refused"):
            read_pickle(tmp_path / "g.pt")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_every_changed_byte_gives_a_value_or_a_value_error(tmp_path):
    torch.save({"w": torch.arange(4.0)}, tmp_path / "f.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "f.pt").read_bytes()
    for place in range(0, len(data), 3):
        changed = bytearray(data)
        changed[place] ^= 0x41
        (tmp_path / "g.pt").write_bytes(bytes(changed))
        with contextlib.suppress(ValueError):
            read_pickle(tmp_path / "g.pt")


def test_a_missing_file_is_no_damage(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_pickle(tmp_path / "absent.pt")


def test_a_state_dict_gives_stored_tensors(tmp_path):
    torch.save({"w": torch.arange(6.0).view(2, 3).T, "n": 3}, tmp_path / "f.pt")
    stored = held_tensors(read_pickle(tmp_path / "f.pt"), tmp_path / "f.pt")
    assert list(stored) == ["w"]
    assert (stored["w"].dtype, stored["w"].shape) == (torch.float32, (3, 2))
    assert stored["w"].place == f"w in {tmp_path / 'f.pt'}"
    copy = stored["w"].load()
    assert copy.is_contiguous()
    copy.zero_()
    assert stored["w"].load().tolist() == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(ValueError, match=r"holds no state_dict"):
        held_tensors([1], tmp_path / "f.pt")


def test_the_list_of_names_is_short():
    assert len(pickles._ALLOWED) == 11
