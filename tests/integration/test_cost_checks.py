"""Are kept costs timed again, and measured anew where those that were kept must have been disturbed?"""

from __future__ import annotations

import json
from time import perf_counter
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_mlspec.integration import adaptive
from hf_mlspec.integration.config import SpeculationConfig
from hf_mlspec.integration.costs import probe
from hf_mlspec.nn.state import state_of
from hf_mlspec.speculation.controller import Controller
from hf_mlspec.speculation.costs import PassCosts
from hf_mlspec.speculation.rounds import steering

pytestmark = pytest.mark.plans


@pytest.fixture
def model(saved_model):
    return AutoModelForCausalLM.from_pretrained(saved_model).eval()


def call(model, **config):
    """Tokens of a short call with a level."""
    ids = torch.tensor([[5, 6, 7]])
    return model.generate(ids, max_new_tokens=8, do_sample=False, assistant_models=["mxfp4"],
                          speculation_config=SpeculationConfig(**config)).tolist()


@pytest.fixture
def timed(monkeypatch):
    """A clock, and what passes of one token and of eight take whenever they are timed; -> both, how often all was
    measured, and whether rounds say that costs do not hold."""
    said = {"clock": 0.0, "seconds": 0.004, "eight": None, "measured": 0, "checked": 0, "disproved": False}

    def measured(engine, *, budget, **_):
        said["measured" if budget else "checked"] += 1
        seconds = said["seconds"], said["eight"] or 2 * said["seconds"]
        return PassCosts((1, 8), seconds, (0.0, 0.0), measured=1e9 + said["clock"])

    monkeypatch.setattr(probe, "measured", measured)
    monkeypatch.setattr(probe, "monotonic", lambda: said["clock"])
    monkeypatch.setattr(probe, "time", lambda: 1e9 + said["clock"])
    monkeypatch.setattr(Controller, "disproves_costs", property(lambda _: said["disproved"]))
    return said


def kept_seconds(model, cache) -> tuple[set[float], set[float]]:
    """Of one token: in this process, and in the cache folder."""
    files = [json.loads(file.read_text()) for file in cache.glob("*.json")]
    states = [state_of(model), *(state_of(built[1]) for built in state_of(model).levels.values())]
    held = {costs.seconds[0] for state in states for costs in state.costs.values()}
    return held, {one["seconds"][0] for file in files for one in file["models"].values()}


def test_costs_that_were_measured_beside_a_load_are_measured_anew(model, cache, timed):
    """A level that was thought forty times as dear as it is would never draft, nor show that it is not."""
    call(model)
    assert timed["measured"] == 2
    timed.update(clock=1.0, seconds=0.0001)
    call(model)
    assert timed["checked"] == 0  # not due
    timed["clock"] = 100.0
    expected = call(model)
    assert (timed["checked"], timed["measured"]) == (2, 4)
    assert kept_seconds(model, cache) == ({0.0001}, {0.0001})
    call(model)
    assert timed["checked"] == 2
    assert call(model) == expected


def test_costs_that_are_too_low_time_after_time_are_measured_anew(model, cache, timed):
    """Once a slower pass may well be another program's doing."""
    call(model)
    seen = ((100.0, 0.008, 0.004), (1000.0, 0.004, 0.004), (1e4, 0.007, 0.004), (1e5, 0.009, 0.004),
            (1e6, 0.008, 0.007))  # fmt: skip
    for clock, passes, kept in seen:
        timed.update(clock=clock, seconds=passes)
        expected = call(model)
        assert kept_seconds(model, cache) == ({kept}, {kept}), clock
    assert (timed["checked"], timed["measured"]) == (10, 4)
    assert call(model) == expected
    timed.update(clock=1e7, seconds=0.003)
    call(model)
    assert kept_seconds(model, cache) == ({0.003}, {0.003})


def test_measuring_costs_is_no_part_of_what_choosing_takes(model, cache, timed, monkeypatch):
    """Else the next calls would go on with what this one chose for hundreds of rounds, however little they bring."""
    measured, took = probe.measured, []

    def slow(engine, **how):
        took.append(100.0)
        return measured(engine, **how)

    monkeypatch.setattr(probe, "measured", slow)
    for module in (adaptive, steering):
        monkeypatch.setattr(module, "perf_counter", lambda: perf_counter() + sum(took))
    call(model)
    (openings,) = state_of(model).openings.values()
    assert len(took) == 2
    assert 0.0 < openings.choosing_seconds < 100.0


@pytest.mark.parametrize("seconds", [0.004, 0.0035, 0.1])
def test_costs_that_are_no_less_stay(model, cache, timed, seconds):
    call(model)
    timed.update(clock=100.0, seconds=seconds)
    call(model)
    assert (timed["checked"], timed["measured"]) == (2, 2)
    assert kept_seconds(model, cache) == ({0.004}, {0.004})


def test_costs_of_a_check_that_were_measured_beside_a_load_are_measured_anew(model, cache, timed):
    """What was timed by chance without a load stays."""
    call(model)
    timed.update(clock=100.0, seconds=0.005, eight=0.006)
    call(model)
    assert (timed["checked"], timed["measured"]) == (2, 4)
    (file, *_) = cache.glob("*.json")
    (one,) = json.loads(file.read_text())["models"].values()
    assert (one["seconds"], one["measured"]) == ([0.004, 0.006], 1e9 + 100)


def test_costs_are_timed_again_by_their_age_whichever_process_it_is(saved_model, cache, timed):
    """A process may end before costs are due, as may the next one: each begins where the last one ended."""
    seen = []
    for clock in (0.0, 10.0, 20.0, 30.0, 50.0, 60.0, 190.0, 210.0, 220.0):
        timed.update(clock=clock, checked=0)
        call(AutoModelForCausalLM.from_pretrained(saved_model).eval())
        seen.append(timed["checked"])
    # First at 20 seconds, 8 passes of 4 ms being .002 of that, then when they are four times as old.
    assert seen == [0, 0, 2, 0, 0, 0, 2, 0, 0]
    assert timed["measured"] == 2


@pytest.mark.parametrize("why", ["a profile", "no folder that can be written"])
def test_costs_that_nobody_can_tell_others_of_are_not_timed_in_the_first_call(
    saved_model, cache, timed, monkeypatch, tmp_path, caplog, why
):
    """Else each process would time them before its first token, however often they held."""
    call(AutoModelForCausalLM.from_pretrained(saved_model).eval())
    given, profile = {}, tmp_path / "profile.json"
    if why == "a profile":
        files = [json.loads(file.read_text()) for file in cache.glob("*.json")]
        models = {key: value for one in files for key, value in one["models"].items()}
        profile.write_text(json.dumps(files[0] | {"models": models}))
        given["profile"] = str(profile)
    else:
        monkeypatch.setattr("os.access", lambda *_: False)
        monkeypatch.setattr(probe, "write", lambda *_: pytest.fail("it cannot be written"))
    for clock in (1000.0, 2000.0):
        timed.update(clock=clock, checked=0)
        model = AutoModelForCausalLM.from_pretrained(saved_model).eval()
        call(model, **given)
        assert timed["checked"] == 0
        timed["clock"] += 100.0
        call(model, **given)
        assert timed["checked"] == 2  # it has run for so long
    assert (timed["measured"], caplog.messages) == (2, [])


def test_costs_that_rounds_disprove_are_timed_again_in_the_next_call_once(model, cache, timed):
    call(model)
    timed.update(clock=1.0, seconds=0.001, disproved=True)
    expected = call(model)
    assert timed["checked"] == 0  # it shows what the rounds take
    assert [call(model) for _ in range(3)] == [expected] * 3
    assert (timed["checked"], timed["measured"]) == (2, 4)
    assert kept_seconds(model, cache) == ({0.001}, {0.001})


def test_a_clock_that_was_set_back_makes_nothing_due(saved_model, cache, timed, monkeypatch):
    call(AutoModelForCausalLM.from_pretrained(saved_model).eval())
    monkeypatch.setattr(probe, "time", lambda: 5.0)
    call(AutoModelForCausalLM.from_pretrained(saved_model).eval())
    assert timed["checked"] == 0


def test_costs_are_checked_less_and_less_often(model, cache, timed):
    for second in range(0, 600, 3):
        timed["clock"] = float(second)
        call(model)
    assert 4 <= timed["checked"] <= 10


def test_where_plans_follow_counts_costs_stay(model, cache, timed):
    call(model, engine="modules")
    timed.update(clock=1000.0, seconds=0.0001)
    call(model, engine="modules")
    assert timed["checked"] == 0


def test_costs_of_captured_rounds_are_timed_again_too(model, cache, timed):
    """Rounds as a device replays them begin with what earlier calls chose: one of the next few makes a controller."""
    expected = call(model, engine="cuda")
    assert (timed["checked"], timed["measured"]) == (0, 2)
    timed.update(clock=100.0, seconds=0.0001)
    assert all(call(model, engine="cuda") == expected for _ in range(10))
    assert (timed["checked"], timed["measured"]) == (2, 4)
    assert kept_seconds(model, cache) == ({0.0001}, {0.0001})


def test_a_check_that_took_long_is_not_soon_repeated(monkeypatch):
    monkeypatch.setattr(probe, "monotonic", lambda: 50.0)
    check = probe.Check(due=50.0, wait=2.0)
    check.again(seconds=1.0)
    assert check.due >= 50.0 + 400.0


@pytest.fixture
def widths(timed, monkeypatch):
    """Passes of 1, 8, 32 and 128 tokens, of which those of 128 take so long; -> that, what `timed` says, and the
    tokens of each check."""
    found = {"long": 0.1, "checks": []}

    def measured(engine, *, budget, tokens=(1, 8, 32, 128), repeats=3, long=True, **_):
        if repeats == probe._CHECK_REPEATS and tokens[:2] == (1, 8):
            found["checks"].append((tuple(tokens), long))
        seconds = [{1: 1e-4, 8: 2e-4, 32: 1e-3, 128: found["long"]}.get(count, 2e-3) for count in tokens]
        return PassCosts(tuple(tokens), tuple(sorted(seconds)), (0.0,) * len(tokens), measured=1e9 + timed["clock"])

    monkeypatch.setattr(probe, "measured", measured)
    return found


def of_many(model) -> set[float]:
    return {costs.of(128.0) for state in (state_of(model), *(state_of(built[1])
            for built in state_of(model).levels.values())) for costs in state.costs.values()}  # fmt: skip


def test_passes_of_many_tokens_are_timed_again_once_they_are_little(model, cache, timed, widths):
    """Calls of many rows rest on them; costs of one token and of eight may be right all the same."""
    expected = call(model)
    widths["long"] = 2.5e-3
    for clock, tokens, kept in ((3.0, (1, 8), 0.1), (30.0, (1, 8, 32), 0.1), (1e5, (1, 8, 32, 128), 2.5e-3)):
        timed["clock"], widths["checks"] = clock, []
        assert call(model) == expected
        assert widths["checks"] == [(tokens, False)] * 2, clock
        assert of_many(model) == {kept}, clock


@pytest.mark.parametrize("engine", ["cpu", "cuda"])
def test_costs_that_a_trial_disproves_are_timed_at_all_widths_once(model, cache, timed, widths, monkeypatch, engine):
    """Its levels are there, so that nothing has to wait; of captured rounds, too, whose first check is far off."""
    expected = call(model, engine=engine)
    widths["long"], start = 2.5e-3, Controller.start

    def tried(self: Controller, rows: int) -> None:
        start(self, rows)
        self.on_disproved()

    monkeypatch.setattr(Controller, "start", tried)
    (openings,) = state_of(model).openings.values()
    openings.doubt()
    assert all(call(model, engine=engine) == expected for _ in range(20))
    assert openings.by_trial
    assert not probe.is_due(openings.due)  # else no call would do without its levels
    assert widths["checks"] == [((1, 8, 32, 128), True)] * 2
    assert of_many(model) == {2.5e-3}


@pytest.mark.parametrize(("seconds", "tokens"), [((1e-3, 2e-3, 8e-3, 0.03), (1, 8, 32, 128)),
                                                 ((0.1, 0.11, 0.2, 0.6), (1, 8, 32)),
                                                 ((0.4, 0.5, 0.8, 3.0), (1, 8))])  # fmt: skip
def test_a_call_does_not_wait_long_for_costs_that_a_trial_disproves(model, cache, timed, monkeypatch, seconds, tokens):
    """`mlspec tune` has all the time of the world, and measures passes of 128 tokens of the largest model."""
    asked, kept = [], PassCosts((1, 8, 32, 128), seconds, (0.0,) * 4, measured=1e9)

    def measured(engine, *, tokens, **_):
        asked.append(tuple(tokens))
        return PassCosts((1, 8), seconds[:2], (0.0, 0.0), measured=1e9)

    monkeypatch.setattr(probe, "measured", measured)
    engine = SimpleNamespace(model=model, name="cpu", bits=None, dtype=torch.float32, kept_in=None)
    how = {"budget": 1.0, "prepare": True, "replayed": False, "profile": "tuned.json"}
    for _ in range(2):
        probe._check(engine, engine, kept, disproved=True, **how)
    assert asked == [tokens]
