"""Do hidden states that wait in a file come back as they were, leave nothing behind, and change no code?"""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest
import torch
from models import tiny

import hf_mlspec
from hf_mlspec.calibration import hidden_states, needed, pipeline
from hf_mlspec.calibration.hidden_states import FiledStates, waiting_states

ROWS = [torch.randint(3, 64, (40 - n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(4)]
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


def quantize(model, method: str = "gptq", **options):
    return hf_mlspec.quantize(model, method, calibration=ROWS, group_size=32, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_states_come_back_as_they_were(tmp_path, dtype):
    file = (tmp_path / "states").open("w+b")
    states = FiledStates(file)
    put = [torch.randn(1, length, 8).to(dtype) for length in (5, 1, 7)]
    states.extend(put)
    assert all(torch.equal(one, states[index]) for index, one in enumerate(put))
    put[1], put[0] = put[1].neg(), torch.randn(1, 9, 8).to(dtype).transpose(0, 1)  # of as many bytes, and of more
    states[1], states[0] = put[1], put[0]
    assert [one.shape for one in states] == [one.shape for one in put]
    assert all(torch.equal(one, found) and one.dtype == found.dtype for one, found in zip(put, states, strict=True))
    del states[1]
    assert len(states) == 2
    assert torch.equal(states[1], put[2])
    file.close()


def test_the_file_has_no_name_and_ends_with_the_block(tmp_path):
    with waiting_states(tmp_path, 4096) as states:
        states.append(torch.ones(1, 4, 8))
        assert not list(tmp_path.iterdir())  # so that nothing is left whatever ends the process
        if hasattr(os, "posix_fallocate"):
            assert os.fstat(states._file.fileno()).st_size == 4096
    with pytest.raises(ValueError, match="closed file"):
        states[0]
    with waiting_states(None, 4096) as states:
        assert states == []


def test_a_file_that_lost_bytes_is_told(tmp_path):
    with waiting_states(tmp_path, 0) as states:
        states.append(torch.ones(1, 4, 8))
        states._file.truncate(100)
        with pytest.raises(OSError, match="100 of 128 bytes of hidden states were read"):
            states[0]


@pytest.mark.parametrize("method", ["rtn", "awq+gptq", "quarot+gptq"])
def test_codes_are_those_of_states_in_memory(tmp_path, monkeypatch, method):
    held, filed = tiny("llama", dtype=torch.bfloat16), tiny("llama", dtype=torch.bfloat16)
    quantize(held, method)
    made, own = [], FiledStates.__init__
    monkeypatch.setattr(FiledStates, "__init__", lambda self, *given: made.append(self) or own(self, *given))
    reserved, reserve = [], hidden_states._reserve
    monkeypatch.setattr(hidden_states, "_reserve", lambda *given: reserved.append(given[1:]) or reserve(*given))
    quantize(filed, method, work_folder=tmp_path / "work")
    (states,) = made
    assert states._end == sum(map(len, ROWS)) * filed.config.hidden_size * 2
    assert reserved == ([(states._end, tmp_path / "work")] if hasattr(os, "posix_fallocate") else [])
    assert states._file.closed
    assert all(torch.equal(tensor, filed.state_dict()[name]) for name, tensor in held.state_dict().items())
    names = {file.name for file in (tmp_path / "work").iterdir()}
    assert names == {"calibration.json", "block_0000.safetensors", "block_0001.safetensors"}


def test_a_run_that_breaks_off_gives_its_disk_back(tmp_path, monkeypatch):
    made, own = [], FiledStates.__init__
    monkeypatch.setattr(FiledStates, "__init__", lambda self, *given: made.append(self) or own(self, *given))

    def stops(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline._Work, "pack", stops)
    with pytest.raises(KeyboardInterrupt):
        quantize(tiny("llama", dtype=torch.float32), work_folder=tmp_path / "work")
    assert made[0]._file.closed


def test_a_disk_too_small_for_them_is_said_before_the_first_block(tmp_path, monkeypatch):
    model = tiny("llama", dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = sum(map(len, ROWS)) * model.config.hidden_size * 4
    monkeypatch.setattr(needed.shutil, "disk_usage", lambda place: SimpleNamespace(free=states))
    with pytest.raises(OSError, match=rf"finished blocks and hidden states need \d+ bytes, {states} are free"):
        quantize(model, work_folder=tmp_path / "work")
    assert not (tmp_path / "work").exists()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system reserves no disk")
def test_a_disk_that_others_fill_meanwhile_is_said_before_the_first_block(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hidden_states.os, "posix_fallocate", full)
    model = tiny("llama", dtype=torch.float32)
    words = r"hidden states need \d+ bytes \(No space left on device\): use another disk: '.*work'"
    with pytest.raises(OSError, match=words):
        quantize(model, "quarot", work_folder=tmp_path / "work")
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_states_in_a_file_need_no_memory_but_for_one():
    model, samples = tiny("llama", dtype=torch.bfloat16), [torch.tensor([row]) for row in ROWS]
    held, filed = (needed.memory_needed(model, samples, True, filed) for filed in (False, True))
    assert held - filed == sum(map(len, ROWS[1:])) * model.config.hidden_size * 2
