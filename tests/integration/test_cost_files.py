"""Are costs kept, and read again where they hold? Is a file that does not hold ignored, with one warning?"""

from __future__ import annotations

import copy
import hashlib
import json
import multiprocessing
import os
import threading
from pathlib import Path

import pytest
import torch
from models import tiny
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import hf_mlspec
from hf_mlspec.integration.config import SpeculationConfig
from hf_mlspec.integration.costs import file as cost_file
from hf_mlspec.integration.costs import identity, probe
from hf_mlspec.integration.costs.file import NotAProfile, cache_folder, read, write
from hf_mlspec.integration.costs.survey import Survey
from hf_mlspec.nn.state import state_of
from hf_mlspec.ops import cuda_library
from hf_mlspec.speculation.costs import PassCosts

MACHINE = {"device": "abacus", "threads": "1"}
COSTS = PassCosts((1, 8), (0.001, 0.002), (0.0, 0.1), 1e-8)
LEVEL = "mxfp4"
pytestmark = pytest.mark.plans


@pytest.fixture
def model(saved_model):
    return AutoModelForCausalLM.from_pretrained(saved_model).eval()


@pytest.fixture
def probed(monkeypatch):
    """Names of the engines whose costs are measured, in their order; measuring takes no time."""
    names = []

    def measured(engine, **_):
        names.append(type(engine.model).__name__)
        return COSTS

    monkeypatch.setattr(probe, "measured", measured)
    return names


def call(model, **config):
    """Tokens of a short call with a level."""
    ids = torch.tensor([[5, 6, 7]])
    return model.generate(ids, max_new_tokens=8, do_sample=False, assistant_models=[LEVEL],
                          speculation_config=SpeculationConfig(**config)).tolist()


def profile_of(model, path) -> dict:
    """The content of a profile of this model and its level, which is written to `path`."""
    survey = Survey(model, None, [LEVEL], SpeculationConfig())
    survey.costs = [COSTS, COSTS]
    survey.write(path, "target")
    return json.loads(path.read_text())


def test_costs_are_measured_once_for_all_processes(cache, model, saved_model, probed):
    call(model)
    assert len(probed) == 2
    call(model)
    call(AutoModelForCausalLM.from_pretrained(saved_model).eval())  # as another process would
    assert len(probed) == 2
    assert len(list(cache.glob("*.json"))) == 2


def test_a_profile_is_used_instead_of_measuring(cache, tmp_path, model, probed, caplog):
    profile_of(model, tmp_path / "p.json")
    call(model, profile=tmp_path / "p.json")
    assert (probed, caplog.messages) == ([], [])
    assert not cache.exists()


def test_a_model_that_the_profile_lacks_is_measured(cache, tmp_path, model, probed, caplog):
    content = profile_of(model, tmp_path / "p.json")
    first = next(iter(content["models"]))
    (tmp_path / "p.json").write_text(json.dumps(content | {"models": {first: content["models"][first]}}))
    call(model, profile=tmp_path / "p.json")
    assert len(probed) == 1


def _broken(content: dict, how: str) -> str:
    """The text of a profile that does not hold here."""
    models = {key: {**costs, "seconds": [-1.0] * len(costs["seconds"])} for key, costs in content["models"].items()}
    changed = {
        "machine": {"machine": content["machine"] | {"device": "abacus"}},
        "threads": {"machine": content["machine"] | {"threads": "999"}},
        "package": {"machine": content["machine"] | {"hf_mlspec": "0.0.1"}},
        "version": {"mlspec_profile": 99}, "no machine": {"machine": None}, "no models": {"models": [1]},
        "seconds": {"models": models}, "no costs": {"models": {"key": 3}},
    }.get(how)
    if changed is not None:
        return json.dumps(content | changed)
    return {"half": json.dumps(content)[: len(json.dumps(content)) // 2], "list": "[]", "empty": ""}[how]


BROKEN = [("machine", "was measured elsewhere: device 'abacus'"), ("threads", "threads '999', here"),
          ("package", "hf_mlspec '0.0.1', here"), ("version", "is no profile of `mlspec tune`"),
          ("no machine", "it does not say where"), ("no models", "names no models"),
          ("seconds", "is damaged: seconds are"), ("no costs", "is damaged: these are no costs"),
          ("half", "cannot be read"), ("list", "is no profile"), ("empty", "cannot be read")]


@pytest.mark.parametrize(("how", "message"), BROKEN, ids=[how for how, _ in BROKEN])
def test_a_profile_that_does_not_hold_is_ignored_with_one_warning(cache, tmp_path, model, probed, caplog, how,
                                                                   message):
    expected = call(copy.deepcopy(model), num_draft_tokens=2)
    (tmp_path / "p.json").write_text(_broken(profile_of(model, tmp_path / "p.json"), how))
    for _ in range(2):
        assert call(model, profile=tmp_path / "p.json") == expected
    said = [line for line in caplog.messages if "profile is ignored" in line]
    assert len(said) == 1
    assert message in said[0]
    assert len(probed) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"mlspec_profile": 1}', b"[1, 2]"])
def test_a_damaged_cache_file_is_measured_anew_and_replaced(cache, model, saved_model, probed, caplog, content):
    call(model)
    files = sorted(cache.glob("*.json"))
    whole = [path.read_bytes() for path in files]
    for path in files:
        path.write_bytes(content)
    again = AutoModelForCausalLM.from_pretrained(saved_model).eval()
    call(again)
    assert len([line for line in caplog.messages if "kept costs are ignored" in line]) == 1
    assert len(probed) == 4
    assert [path.read_bytes() for path in files] == whole


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, model, probed, caplog, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLSPEC_CACHE", str(tmp_path / "file"))
    expected = call(copy.deepcopy(model), num_draft_tokens=2)
    assert call(model) == expected
    assert call(model) == expected
    said = [line for line in caplog.messages if "are not kept for the next process" in line]
    assert len(said) == 1
    assert "name a folder in MLSPEC_CACHE" in said[0]
    assert not any("kept costs are ignored" in line for line in caplog.messages)  # there are none
    assert len(probed) == 2


def test_the_folder_is_that_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MLSPEC_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("MLSPEC_CACHE", "~/costs")
    assert cache_folder() == Path.home() / "costs"
    monkeypatch.delenv("MLSPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "hf_mlspec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "hf_mlspec"


def test_a_user_without_a_home_folder_is_told_where_costs_could_be_kept(model, probed, monkeypatch, caplog):
    def homeless(*_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MLSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(OSError, match="home directory"):
        cache_folder()
    call(model)
    assert len(probed) == 2
    assert any("not kept for the next process" in line and "MLSPEC_CACHE" in line for line in caplog.messages)


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "new" / "p.json"
    write(path, MACHINE, {"key": ("name", COSTS)})
    assert read(path, MACHINE) == {"key": COSTS}
    assert [found.name for found in path.parent.iterdir()] == ["p.json"]
    umask = os.umask(0o022)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask  # readable by whom other files are


@pytest.mark.parametrize("fails", ["replace", "write"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, fails):
    path = tmp_path / "p.json"
    write(path, MACHINE, {"key": ("name", COSTS)})
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((cost_file.os, "replace") if fails == "replace" else (Path, "write_text")), full)
    with pytest.raises(OSError, match="No space left"):
        write(path, MACHINE, {})
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["p.json"]


def test_a_reader_never_sees_half_a_file(tmp_path):
    """Threads write files of different sizes while others read: each reads one of them whole."""
    path, kinds = tmp_path / "p.json", [{f"key{i}": ("name", COSTS) for i in range(count)} for count in (1, 200)]
    write(path, MACHINE, kinds[0])
    done = threading.Event()

    def keep_writing(models):
        while not done.is_set():
            write(path, MACHINE, models)

    writers = [threading.Thread(target=keep_writing, args=(models,)) for models in kinds]
    for thread in writers:
        thread.start()
    try:
        sizes = {len(read(path, MACHINE)) for _ in range(100)}
    finally:
        done.set()
        for thread in writers:
            thread.join()
    assert sizes <= {1, 200}
    assert [found.name for found in tmp_path.iterdir()] == ["p.json"]


def _write_often(path: Path, count: int, start) -> None:
    start.wait()
    for _ in range(50):
        write(path, MACHINE, {f"key{i}": ("name", COSTS) for i in range(count)})


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_processes_leave_one_valid_file(tmp_path):
    path, system = tmp_path / "p.json", multiprocessing.get_context("fork")
    start = system.Event()
    both = [system.Process(target=_write_often, args=(path, count, start)) for count in (1, 100)]
    for one in both:
        one.start()
    start.set()
    for one in both:
        one.join(120)
    assert [one.exitcode for one in both] == [0, 0]
    assert len(read(path, MACHINE)) in (1, 100)
    assert [found.name for found in tmp_path.iterdir()] == ["p.json"]


def test_a_profile_that_is_not_there_is_an_error(tmp_path):
    for path in (tmp_path / "p.json", tmp_path):
        with pytest.raises(ValueError, match=r"is no file: write it with `mlspec tune"):
            SpeculationConfig(profile=path)


def test_a_file_that_is_a_folder_is_no_profile(tmp_path):
    with pytest.raises(NotAProfile, match="cannot be read"):
        read(tmp_path, MACHINE)


def test_no_pass_is_longer_than_the_model(cache):
    """A model with a table of 40 positions, which more tokens would leave."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=40, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    survey = Survey(model, None, [LEVEL], SpeculationConfig())
    survey.measure(budget=5.0, repeats=1)
    assert [max(costs.tokens) for costs in survey.costs] == [32, 32]
    assert [costs.attention for costs in survey.costs] == [0.0, 0.0]


def test_of_a_chain_that_cannot_be_captured_the_target_alone_is_measured_so_too(cache, tmp_path, monkeypatch):
    """A call asks whether captured rounds without the levels are faster: the profile says so."""
    target = hf_mlspec.prepare(tiny(seed=2, dtype=torch.bfloat16), engine="cuda")
    survey = Survey(target, None, ["ngram"], SpeculationConfig())
    assert (survey.replayed, survey.alone) == (False, True)
    steps = []
    survey.measure(budget=5.0, repeats=1, step=lambda: steps.append(1))
    assert len(steps) == survey.steps
    profile = tmp_path / "profile.json"
    survey.write(profile, "tiny")
    found = survey.example(1, 0.5)
    assert found.plan == "off" or found.speedup > 1.0
    hf_mlspec.clear(target)
    monkeypatch.setenv("MLSPEC_CACHE", str(tmp_path / "another"))
    target = hf_mlspec.prepare(target, engine="cuda")
    measured = []
    monkeypatch.setattr(probe, "measured", lambda *args, **how: measured.append(how))
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    target.generate(torch.tensor([[5, 6, 7]]), **options, assistant_models=["ngram"],
                    speculation_config={"profile": str(profile)})  # fmt: skip
    assert not measured
    assert state_of(target).shelved


def test_costs_of_kernels_that_were_compiled_anew_do_not_hold(monkeypatch):
    """A build is told from another by what this process loaded, so that one on disk since then changes nothing."""
    found = [identity._kernels.__wrapped__("cpu")]
    monkeypatch.setattr("hf_mlspec.ops.library._HASH", "another build")
    found += [identity._kernels.__wrapped__("cpu")]
    assert found[0] != found[1]


def test_a_library_that_is_rebuilt_while_a_process_runs_changes_no_key(monkeypatch, tmp_path):
    before = identity._kernels.__wrapped__("cpu")
    (tmp_path / "_C.so").write_bytes(b"kernels of today")
    (tmp_path / "_CUDA.so").write_bytes(b"not of ours")
    monkeypatch.setattr("hf_mlspec.ops.library._PACKAGE", tmp_path)
    monkeypatch.setattr("hf_mlspec.ops.cuda_library._PACKAGE", tmp_path)
    assert identity._kernels.__wrapped__("cpu") == before


def test_the_hash_of_a_library_is_of_its_bytes(tmp_path):
    file = tmp_path / "_C.so"
    file.write_bytes(b"kernels")
    assert cuda_library.content_hash(file) == hashlib.sha256(b"kernels").hexdigest()


def test_a_library_that_cannot_be_read_is_said_once_and_costs_are_measured(
    model, probed, cache, monkeypatch, tmp_path, caplog
):
    """Nothing is kept under a name that other kernels would have; the tokens are the same."""
    expected = call(model)
    hf_mlspec.clear(model)
    probed.clear()
    for file in cache.rglob("*.json"):
        file.unlink()
    caplog.clear()
    monkeypatch.setattr("hf_mlspec.ops.library._HASH", cuda_library.content_hash(tmp_path / "gone.so"))
    identity._kernels.cache_clear()
    try:
        assert call(model) == call(model) == expected
    finally:
        identity._kernels.cache_clear()
    assert len(probed) == 2
    assert not list(cache.rglob("*.json"))
    told = [record.getMessage() for record in caplog.records if "cannot be read" in record.getMessage()]
    assert len(told) == 1
    assert "gone.so" in told[0]
