"""Does a process begin with what another one learned of a chain? Is a file that does not hold ignored?"""

from __future__ import annotations

import json

import pytest
import torch
from models import tiny
from transformers import AutoModelForCausalLM
from transformers.generation import BaseStreamer

import hf_mlspec
from hf_mlspec.integration import adaptive
from hf_mlspec.integration.costs import learned, probe
from hf_mlspec.nn.state import state_of
from hf_mlspec.speculation.costs import PassCosts
from hf_mlspec.speculation.memory import Memory
from hf_mlspec.speculation.plans import TARGET, Plan

pytestmark = pytest.mark.plans
FAST_DRAFTS = PassCosts((1, 64), (1e-3, 1.1e-3), (0.0, 0.0))  # of target and level: the draft is the target itself


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The folder of files, with nothing of other tests in memory. Costs take no time to measure."""
    monkeypatch.setenv("MLSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(learned, "_open", {})
    monkeypatch.setattr(adaptive, "learned_of", learned.learned_of)
    monkeypatch.setattr(probe, "measured", lambda engine, **_: FAST_DRAFTS)
    return tmp_path / "learned"


@pytest.fixture
def load(saved_model):
    """The saved model as another process would load it."""
    return lambda: AutoModelForCausalLM.from_pretrained(saved_model, dtype="bfloat16").eval()


def decode(model, **more) -> list[list[int]]:
    more |= {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "assistant_models": ["prompt_lookup"]}
    return model.generate(torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6, 7, 5]]), **more).tolist()


def memory_of(model) -> Memory:
    (found,) = state_of(model).memories.values()
    return found


def as_another_process() -> None:
    learned.write_what_is_due(0.0)
    learned._open.clear()


def test_another_process_begins_with_what_was_learned(files, load):
    first, second = load(), load()
    ids = decode(first)
    seen = memory_of(first).pairs[0, TARGET]
    assert seen.total.tried > 0
    as_another_process()
    assert len(list(files.glob("*.json"))) == 1
    assert decode(second) == ids
    begun = memory_of(second).pairs[0, TARGET]
    assert begun.prior == seen.mean  # of the level's kind before
    assert 0 < begun.prior_weight <= 12


def test_all_rounds_of_a_call_are_learned_of(files, load):
    """The last ones, too, which wait until somebody asks."""
    model = load()
    decode(model)
    (level,) = hf_mlspec.last_stats(model).levels
    assert memory_of(model).pairs[0, TARGET].reached[0].tried == level.rounds > 0


def test_rounds_of_a_call_that_breaks_off_are_learned_of(files, load):
    class Breaks(BaseStreamer):
        """Like a user who has read enough."""

        def put(self, value):
            seen = hf_mlspec.last_stats(model)
            if seen is not None and seen.levels and seen.levels[0].rounds >= 3:
                raise KeyboardInterrupt

        def end(self):
            pytest.fail("it did not break off")

    model = load()
    with pytest.raises(KeyboardInterrupt):
        decode(model, streamer=Breaks())
    (level,) = hf_mlspec.last_stats(model).levels
    assert memory_of(model).pairs[0, TARGET].reached[0].tried == level.rounds >= 3


def test_what_is_kept_is_what_a_later_call_of_the_process_would_begin_with(files, load):
    model = load()
    decode(model)
    memory = memory_of(model)
    assert Memory.from_dict(json.loads(json.dumps(memory.to_dict())), 1).to_dict() == memory.kept().to_dict()


def test_how_long_rounds_took_is_worth_little_in_another_process():
    memory = Memory()
    for _ in range(50):
        memory.correct(Plan((4,)), 1, 2.0)
    found = Memory.from_dict(memory.to_dict(), 1)
    ((key, told),), ((own, seen),) = found.ratios.items(), memory.ratios.items()
    assert key == own
    assert (seen.tried, seen.kept) == (50, 100)
    assert (told.tried, told.kept) == (6, 12)


def test_a_ratio_of_no_rounds_is_none():
    known, empty = {"rounds": [[1], 3, 1], "counted": [2.0, 2.0]}, {"rounds": [[0], 4, 1], "counted": [0.0, 0.0]}
    memory = Memory.from_dict({"pairs": [], "ratios": [empty, known]}, 2)
    assert list(memory.ratios) == [((1,), 3, 1)]
    assert memory.factors([(1,)], 1)
    assert memory.factor_of_off(1) > 0


@pytest.mark.parametrize("kept", [0.0, 1e-300])
def test_rounds_that_took_no_time_are_no_measurement(kept):
    with pytest.raises(ValueError, match=r"nothing that a controller learned.*of 2\.0 rounds"):
        Memory.from_dict({"pairs": [], "ratios": [{"rounds": [[], 0, 1], "counted": [2.0, kept]}]}, 2)


def test_nothing_is_written_before_it_is_due_and_nothing_twice(files, load, monkeypatch):
    decode(load())
    learned.write_what_is_due()
    assert not files.exists()
    written = []
    monkeypatch.setattr(learned, "write_json", lambda path, said: written.append(said))
    learned.write_what_is_due(0.0)
    learned.write_what_is_due(0.0)
    assert len(written) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda said: "",
        lambda said: "[]",
        lambda said: json.dumps({**said, "mlspec_learned": 2}),
        lambda said: json.dumps({**said, "machine": {**said["machine"], "device": "abacus"}}),
        lambda said: json.dumps({**said, "memory": {**said["memory"], "pairs": [{"levels": [7, -1]}]}}),
        lambda said: json.dumps(said).replace('"weight": ', '"weight": 1e9'),
        lambda said: json.dumps(said).replace('"mean": ', '"mean": NaN, "was": '),
        lambda said: json.dumps(said).replace('"kept": [[', '"kept": [[-1'),
    ],
    ids=["empty", "a list", "version", "machine", "levels", "weight", "mean", "counts"],
)
def test_a_file_that_does_not_hold_is_as_none(files, load, damage):
    first, second = load(), load()
    ids = decode(first)
    as_another_process()
    (path,) = files.glob("*.json")
    path.write_text(damage(json.loads(path.read_text())))
    assert decode(second) == ids
    assert memory_of(second).pairs[0, TARGET].prior == 0.35


def test_a_folder_that_cannot_be_written_stops_nothing(files, load):
    files.write_text("a file where the folder should be")
    decode(load())
    learned.write_what_is_due(0.0)
    assert files.read_text() == "a file where the folder should be"


def test_a_model_without_a_name_has_no_file(files):
    decode(tiny(seed=1, dtype=torch.bfloat16))
    learned.write_what_is_due(0.0)
    assert not files.exists()


def test_models_module_by_module_neither_read_nor_write(files, load):
    model = load()
    hf_mlspec.prepare(model, engine="modules")
    decode(model)
    learned.write_what_is_due(0.0)
    assert not files.exists()


def test_other_levels_and_settings_have_files_of_their_own(files, load):
    model = load()
    decode(model)
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6, 7, 5]])
    model.generate(ids, max_new_tokens=40, do_sample=True, eos_token_id=None, assistant_models=["prompt_lookup"])
    learned.write_what_is_due(0.0)
    assert len(list(files.glob("*.json"))) == 2
