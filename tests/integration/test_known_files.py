"""Does the first call of a process build no level that is known to lose, and all others, with the same ids?"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from built_levels import levels_built
from models import near, prompts
from transformers import AutoModelForCausalLM

from hf_mlspec import NewTokens, generate_stream
from hf_mlspec.integration import known
from hf_mlspec.integration.costs import known_file, learned, probe
from hf_mlspec.nn.state import state_of
from hf_mlspec.speculation.controller import Controller
from hf_mlspec.speculation.costs import PassCosts
from hf_mlspec.speculation.plans import Plan, Situation
from hf_mlspec.speculation.search import Choice

pytestmark = pytest.mark.plans
CHEAP, DEAR = (PassCosts((1, 64), (s, 1.05 * s), (0.0, 0.0)) for s in (1e-3, 0.05))
ROWS = [[5, 6, 7, 8, 9, 5, 6, 7, 8], [3, 4, 3, 4]]


@pytest.fixture
def built(monkeypatch, tmp_path):
    """Files are kept, in a folder of this test. -> per call of Wiring the levels that it built."""
    monkeypatch.setenv("MLSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(learned, "_open", {})
    monkeypatch.setattr(known, "file_of", known_file.file_of)
    monkeypatch.setattr(known, "any_known", known_file.any_known)
    return levels_built(monkeypatch)


@pytest.fixture
def draft(saved_model, tmp_path) -> str:
    """The folder of a draft that is nearly the target."""
    folder = tmp_path / "draft"
    near(AutoModelForCausalLM.from_pretrained(saved_model), 0.01).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def cost(monkeypatch):
    """-> what a pass of a level costs. One of the target takes a millisecond."""
    levels = [DEAR]

    def measured(engine, **_):
        own = engine.follow is not None or engine.model.config.name_or_path.endswith("draft")
        return levels[0] if own else CHEAP

    monkeypatch.setattr(probe, "measured", measured)
    return levels


@pytest.fixture
def load(saved_model):
    """The saved model as another process would load it."""
    return lambda: AutoModelForCausalLM.from_pretrained(saved_model, dtype="float32").eval()


def write(model, levels: list, new_tokens: int = 30, **options) -> torch.Tensor:
    torch.manual_seed(4)
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
    return model.generate(**prompts([9, 4]), assistant_models=levels, **{**settings, **options})


def described(folder: Path) -> list[Path]:
    return sorted((folder / "known").glob("*.json"))


def levels_of(kind: str, draft: str) -> list[str]:
    return {"cast": ["mxfp4"], "folder": [draft], "two": ["mxfp4", draft], "view": ["early_exit:1"]}[kind]


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["cast", "folder", "two", "view"])
def test_another_process_builds_no_level_that_loses(built, cost, load, draft, tmp_path, kind, sampling):
    levels = levels_of(kind, draft)
    ids = write(load(), levels, **sampling)
    assert [bool(names) for names in built] == [True]
    assert len(described(tmp_path)) == 1
    built.clear()
    other = load()
    for _ in range(3):
        assert torch.equal(write(other, levels, **sampling), ids)
    assert built == [[]] * 3
    told = state_of(other).last_stats
    assert list(told.plans) == ["off"]
    assert len(told.levels) == len(levels)
    assert not [level for level in state_of(other).levels if isinstance(level, tuple)]  # no cast, no folder


@pytest.fixture
def three(monkeypatch):
    """Every choice is a draft of three tokens by the first level."""

    def choose(self: Controller, situation: Situation) -> Plan:
        plan = Plan((3, *[0] * (len(self.levels) - 1)))
        self.choice = Choice(plan, [3] * len(situation.rooms), self.forecast)
        return plan

    monkeypatch.setattr(Controller, "choose", choose)


def test_levels_that_pay_come_in_the_first_call(built, cost, load, draft, three):
    alone = write(load(), [])
    assert torch.equal(write(load(), [draft]), alone)
    built.clear()
    other = load()
    assert torch.equal(write(other, [draft]), alone)
    assert built == [[], ["draft"]]
    (level,) = state_of(other).last_stats.levels
    assert level.accepted > 0


def test_levels_come_in_the_middle_of_a_stream(built, cost, load, draft, three):
    """Rows join and leave around it; who drafted a token is told from then on."""
    rows = [ROWS[r % 2] for r in range(5)]

    def stream(model) -> tuple[list, list]:
        options = {"assistant_models": ["mxfp4", draft], "max_new_tokens": 20, "eos_token_id": None, "events": True}
        ended, told = [], []
        for one in generate_stream(model, rows, max_batch=2, **options):
            ended += [] if isinstance(one, NewTokens) else [one.new_tokens]
            told += one.levels if isinstance(one, NewTokens) else []
        return sorted(ended), told

    first, other = load(), load()
    ids, told = stream(first)
    built.clear()
    again, others_told = stream(other)
    assert built == [[], ["mxfp4", "draft"]]
    assert again == ids
    assert set(others_told) == set(told) == {None, "mxfp4"}
    assert len(others_told) == 5 * 20
    assert state_of(other).last_stats.levels[0].accepted > 0


def test_a_call_between_two_rounds_of_a_stream_keeps_its_own_counts(built, cost, load, draft, three):
    """The levels of the stream come behind it, and are counted where the stream is looked at."""
    options = {"assistant_models": [draft], "max_new_tokens": 20, "eos_token_id": None, "max_batch": 2}
    list(generate_stream(load(), ROWS, **options))
    model, between = load(), []

    def source():
        yield ROWS[0]
        write(model, ["ngram"], 4, speculation_config={"num_draft_tokens": 2})
        between.append(state_of(model).last_stats)
        yield ROWS[1]

    built.clear()
    list(generate_stream(model, source(), **options))
    assert built == [[], ["ngram"], ["draft"]]
    assert [level.name for level in between[0].levels] == ["ngram"]
    assert state_of(model).last_stats.levels[0].accepted > 0


@pytest.mark.parametrize("change", ["a file of the level", "another machine", "damaged", "no costs", "other options"])
def test_where_anything_changed_all_levels_are_built(built, cost, load, draft, tmp_path, change):
    ids = write(load(), [draft])
    (file,) = described(tmp_path)
    options = {}
    if change == "a file of the level":
        os.utime(Path(draft) / "config.json", (1, 1))
    elif change == "another machine":
        said = json.loads(file.read_text())
        file.write_text(json.dumps({**said, "machine": {**said["machine"], "device": "an abacus"}}))
    elif change == "damaged":
        said = json.loads(file.read_text())
        file.write_text(json.dumps({**said, "chain": {**said["chain"], "levels": [{}]}}))
    elif change == "no costs":
        for costs in (tmp_path / "costs").glob("*.json"):
            costs.unlink()
    else:
        options = {"speculation_config": {"shared_cache": False}}
    built.clear()
    assert torch.equal(write(load(), [draft], **options), ids)
    assert built[-1] == ["draft"]


@pytest.mark.parametrize("change", [
    {"names": "d"}, {"names": []}, {"kinds": []}, {"kinds": [[1, None]]}, {"kinds": [[True, "9"]]}, {"seen": -1},
    {"seen": 0}, {"key": {}}, {"key": [{}]}, {"captured": 0}, {"follows": None}, {"seconds": float("nan")},
    {"seconds": 10**400}, {"levels": [3]}, {"levels": [{"twin": 7}]}, {"levels": [{"prior": 2}]},
    {"levels": [{"most_slots": "x"}]}, {"levels": [{"model": ["x"]}]}, {"levels": None},
], ids=str)  # fmt: skip
def test_a_description_with_a_wrong_value_is_none(built, cost, load, draft, tmp_path, change):
    ids = write(load(), [draft])
    (file,) = described(tmp_path)
    said = json.loads(file.read_text())
    levels = said["chain"]["levels"]
    if isinstance(change.get("levels"), list) and isinstance(change["levels"][0], dict):
        change = {"levels": [*levels[:-1], {**levels[-1], **change["levels"][0]}]}
    file.write_text(json.dumps({**said, "chain": {**said["chain"], **change}}))
    built.clear()
    assert torch.equal(write(load(), [draft]), ids)
    assert built[-1] == ["draft"]


def test_what_no_process_knew_is_not_sought_in_every_call(built, cost, load, tmp_path, monkeypatch):
    (tmp_path / "known").mkdir()
    sought, found = [], known._found
    monkeypatch.setattr(known, "_found", lambda *given: sought.append(1) or found(*given))
    monkeypatch.setattr(known, "remember", lambda *_: None)  # as of a head, whose levels are built in every call
    model = load()
    for _ in range(3):
        write(model, ["mxfp4"])
    assert len(sought) == 1


def test_a_target_knows_the_chains_that_it_had_last(built, cost, load, monkeypatch):
    monkeypatch.setattr(known, "_MOST_KNOWN", 3)
    model = load()
    for level in ("mxfp4", "ngram", "prompt_lookup", "early_exit:1", "mxfp4"):
        write(model, [level], 3)
    assert [asked[-1][1] for asked in state_of(model).known] == ["prompt_lookup", "early_exit:1", "mxfp4"]


def test_costs_that_forbid_a_level_are_timed_again(built, cost, load, draft):
    write(load(), [draft])
    other = load()
    write(other, [draft])
    (openings,) = state_of(other).openings.values()
    openings.due = 0.0  # as after fifty times what building the level takes
    built.clear()
    write(other, [draft])
    assert built[-1] == ["draft"]


@pytest.mark.parametrize(("used", "builds"), [(0.0, [[]]), (1e4, [[], ["draft"]])])
def test_levels_of_costs_that_are_due_are_built_where_that_is_little(
    built, cost, load, draft, monkeypatch, used, builds
):
    """Beside the time that the process has used so far; costs are old, and no process has timed them again."""
    now = [1e9]
    monkeypatch.setattr(probe, "time", lambda: now[0])
    monkeypatch.setattr(probe, "process_time", lambda: used)
    of_any = probe.measured
    monkeypatch.setattr(probe, "measured", lambda engine, **how: replace(of_any(engine, **how), measured=now[0]))
    write(load(), [draft])
    built.clear()
    now[0] += 1e5
    write(load(), [draft])
    assert built == builds


def test_a_level_that_went_bad_is_told_by_the_call_that_uses_it(built, cost, load, draft):
    write(load(), [draft])
    (Path(draft) / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="draft"):
        write(load(), [draft])


def test_in_captured_rounds_calls_end_without_levels_that_lose(built, cost, load, draft):
    options = {"speculation_config": {"engine": "cuda"}}
    ids = write(load(), [draft], **options)
    built.clear()
    other = load()
    for _ in range(8):
        assert torch.equal(write(other, [draft], **options), ids)
    assert built == [[]] * 8
    told = state_of(other).last_stats
    assert (list(told.plans), told.plans["off"].rounds) == (["off"], 30)
    write(other, [draft], **options)  # one in nine builds them
    assert built[-1] == ["draft"]


def test_in_captured_rounds_a_call_beside_which_building_is_little_has_its_levels(built, cost, load, draft, tmp_path):
    options = {"speculation_config": {"engine": "cuda"}}
    write(load(), [draft], **options)
    (file,) = described(tmp_path)
    said = json.loads(file.read_text())
    said["chain"]["seconds"] = 1e-4
    file.write_text(json.dumps(said))
    built.clear()
    write(load(), [draft], **options)
    assert built == [[], ["draft"]]


@pytest.mark.parametrize("kind", ["cast", "folder", "two", "view"])
def test_a_stream_does_without_levels_that_lose(built, cost, load, draft, kind):
    levels = levels_of(kind, draft)

    def ids(model) -> list[list[int]]:
        found = generate_stream(model, ROWS, assistant_models=levels, max_new_tokens=20, eos_token_id=None)
        return sorted(one.new_tokens for one in found)

    model = load()
    first = ids(model)
    assert [bool(names) for names in built] == [True]
    built.clear()
    for stream in (model, other := load()):
        assert ids(stream) == first
    assert built == [[]] * 2
    told = state_of(other).last_stats
    assert list(told.plans) == ["off"]
    assert len(told.levels) == len(levels)


def test_a_chain_is_described_once(built, cost, load, draft, monkeypatch):
    written = []
    monkeypatch.setattr(known, "write_description", lambda *given: written.append(given))
    model = load()
    for _ in range(4):
        write(model, [draft])
        for openings in state_of(model).openings.values():
            openings.due = 0.0  # the next call builds its levels, too
    assert built == [["draft"], *[["draft"]] * 3]
    assert len(written) == 1
