"""Does mlspec tune measure, tell and keep what calls then use, and refuse in one line what cannot be?"""

from __future__ import annotations

import json
import os

import pytest
import torch
from refused_command import refusal

import hf_mlspec
from hf_mlspec.cli import main, picture
from hf_mlspec.cli.tables import show_plans
from hf_mlspec.integration import adaptive
from hf_mlspec.integration.costs import learned, probe
from hf_mlspec.integration.levels.load import load_causal_lm
from hf_mlspec.nn.state import state_of
from hf_mlspec.speculation.costs import TOKENS, PassCosts
from hf_mlspec.speculation.plans import TARGET
from hf_mlspec.speculation.stats import PlanStats, SpeculationStats

pytestmark = pytest.mark.plans


@pytest.fixture
def no_probe(monkeypatch):
    """Calls find their costs somewhere: nothing is measured."""
    def measured(*_, **__):
        raise AssertionError("costs were measured anew")

    monkeypatch.setattr(probe, "measured", measured)


def told(capsys, *argv: object) -> dict:
    assert main([str(word) for word in (*argv, "--json")]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_number_of_tokens_is_timed_for_every_model(capsys, cache, saved_model):
    found = told(capsys, "tune", saved_model, "--level", "mxfp4+prompt_lookup", "--repeats", "2")
    mxfp4, lookup = found["levels"]
    assert (mxfp4["name"], lookup) == ("mxfp4", {"name": "prompt_lookup", "costs": None})
    for costs in (found["target"], mxfp4["costs"]):
        assert costs["tokens"] == list(TOKENS)
        assert costs["seconds"] == sorted(costs["seconds"])
        assert costs["attention"] == 0.0  # its rows hold 512 tokens
    assert found["chooses"]
    assert found["machine"]["threads"] == str(torch.get_num_threads())


def test_plans_are_told_for_every_batch_and_acceptance(capsys, cache, saved_model):
    plans = told(capsys, "tune", saved_model, "--level", "mxfp4", "--repeats", "2")["plans"]
    assert [(one["rows"], one["acceptance"]) for one in plans] == [
        (rows, rate) for rows in (1, 4, 8, 32) for rate in (0.5, 0.7, 0.9)]
    for one in plans:
        assert one["plan"] == ("off" if one["lengths"] == [0] else f"mxfp4 {one['lengths'][0]}")
        assert one["speedup"] == 1.0 if one["plan"] == "off" else one["speedup"] >= 1.0


def test_a_cheap_draft_is_worth_its_rounds_and_a_dear_one_is_off(saved_model, monkeypatch):
    """The example is the equation of Leviathan et al., theorem 3.8, but for the first step of a draft."""
    from hf_mlspec.integration.costs import survey

    costs = iter([0.01, 0.0001, 0.01, 0.01])
    monkeypatch.setattr(survey, "measured",
                        lambda *_, **__: PassCosts((1, 256), (cost := next(costs), cost), (0.0, 0.0)))
    for expected in ("mxfp4 16", "off"):
        model, tokenizer = load_causal_lm(str(saved_model))
        found = survey.Survey(model, tokenizer, ["mxfp4"], hf_mlspec.SpeculationConfig())
        found.measure(budget=1.0, repeats=1)
        example = found.example(1, 0.9)
        assert example.plan == expected
        if expected != "off":
            tokens = (1 - 0.9**17) / (1 - 0.9)
            assert example.speedup == pytest.approx(tokens / (1 + 16 * 0.01), rel=1e-2)


def test_the_next_call_measures_nothing(capsys, cache, saved_model, no_probe):
    found = told(capsys, "tune", saved_model, "--level", "mxfp4", "--repeats", "1")
    assert found["kept_in"] == str(cache)
    assert len(list(cache.iterdir())) == 2
    written = told(capsys, "generate", "--model", saved_model, "--level", "mxfp4", "--prompt", "x",
                   "--max-new-tokens", "6")
    assert sum(plan["rounds"] for plan in written["speculation"]["plans"].values()) > 0


def test_a_profile_serves_where_the_cache_is_gone(capsys, cache, tmp_path, saved_model, no_probe, monkeypatch):
    profile = tmp_path / "profile.json"
    told(capsys, "tune", saved_model, "--level", "mxfp4", "--repeats", "1", "--output", profile)
    assert [one["name"] for one in json.loads(profile.read_text())["models"].values()] == [saved_model.name, "mxfp4"]
    monkeypatch.setenv("MLSPEC_CACHE", str(tmp_path / "another"))
    told(capsys, "generate", "--model", saved_model, "--level", "mxfp4", "--prompt", "x", "--max-new-tokens", "4",
         "--profile", profile)
    assert capsys.readouterr().err == ""


def test_the_tables_say_what_was_measured(capsys, cache, tmp_path, saved_model):
    assert main(["tune", str(saved_model), "--level", "mxfp4", "--level", "ngram", "--repeats", "1", "--output",
                 str(tmp_path / "p.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(", 1 threads, float32")
    assert lines[1].endswith("; ngram: a lookup, no costs")
    assert [line.split(":")[0].strip() for line in lines[2 : 2 + len(TOKENS)]] == [str(count) for count in TOKENS]
    assert lines[2].startswith("  1: target ")
    assert sum(line.startswith(("  1: 50%", "  4: 50%", "  8: 50%", "  32: 50%")) for line in lines) == 4
    assert lines[-2:] == [f"costs for the next calls are in {cache}", f"profile written to {tmp_path / 'p.json'}"]


def test_a_cache_that_cannot_be_written_is_no_error(capsys, tmp_path, saved_model, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLSPEC_CACHE", str(tmp_path / "file"))
    found = told(capsys, "tune", saved_model, "--level", "mxfp4", "--repeats", "1")
    assert found["kept_in"] is None
    assert found["levels"][0]["costs"]["tokens"] == list(TOKENS)


@pytest.mark.parametrize("suffix", [".png", ".SVG"])
def test_the_picture_is_drawn(capsys, cache, tmp_path, saved_model, suffix):
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"speed{suffix}"
    assert told(capsys, "tune", saved_model, "--level", "mxfp4", "--level", "ngram", "--repeats", "1", "--plot",
                picture)["plot"] == str(picture)
    assert picture.read_bytes()[:4] == (b"\x89PNG" if suffix == ".png" else b"<?xm")


def test_the_lines_of_the_picture_are_the_speeds_of_the_paper():
    pytest.importorskip("matplotlib")
    from hf_mlspec.cli.tune_plot import curves, ratios_of, speedup

    target, draft = (PassCosts((1, 256), (cost, cost), (0.0, 0.0)) for cost in (0.01, 0.001))
    assert ratios_of(target, {"draft": draft, "ngram": None}) == {"draft": pytest.approx(0.1)}
    best = max((1 - 0.8 ** (k + 1)) / (1 - 0.8) / (0.1 * k + 1) for k in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16))
    assert speedup(target, 0.1, 0.8) == pytest.approx(best, rel=1e-2)
    left, right = curves(target, {"draft": 0.1}).axes
    assert [line.get_label() for line in left.lines][-2:] == ["draft: cost 0.1", "_child6"]
    assert [list(line.get_xdata()) for line in right.lines if line.get_label() == "draft"] == [[0.1, 0.1]]


def test_what_was_accepted_so_far_is_a_point_of_the_picture():
    pytest.importorskip("matplotlib")
    from hf_mlspec.cli.tune_plot import curves, speedup

    target = PassCosts((1, 64), (1e-3, 1e-3), (0.0, 0.0))
    left, right = curves(target, {"draft": 0.1}, {"draft": 0.7, "a lookup, which costs nothing": 0.5}).axes
    points = [[line.get_xydata().tolist() for line in axes.get_lines() if line.get_marker() == "o"]
              for axes in (left, right)]
    speed = speedup(target, 0.1, 0.7)
    assert points == [[[[0.7, speed]]], [[[0.1, speed]]]]
    assert "draft: 70% kept so far" in [text.get_text() for text in left.get_legend().get_texts()]


def test_what_earlier_calls_accepted_is_told(capsys, cache, saved_model, monkeypatch):
    monkeypatch.setattr(adaptive, "learned_of", learned.learned_of)
    monkeypatch.setattr(learned, "_open", {})
    asked = "tune", saved_model, "--level", "prompt_lookup", "--repeats", "1", "--dtype", "bfloat16"
    assert told(capsys, *asked)["accepted"] == {}
    model, _ = load_causal_lm(str(saved_model), dtype="bfloat16")
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6, 7, 5]])
    model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None, assistant_models=["prompt_lookup"])
    learned.write_what_is_due(0.0)
    learned._open.clear()
    (memory,) = state_of(model).memories.values()
    assert told(capsys, *asked)["accepted"] == {"prompt_lookup": pytest.approx(memory.pairs[0, TARGET].mean)}
    assert main([str(word) for word in asked]) == 0
    assert "in earlier calls so many were kept: prompt_lookup" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("change", "message"), [
    ([], "no --level given"),
    (["--level", "mxpf4"], "did you mean 'mxfp4'"),
    (["--level", "ngram", "--level", "mxfp4"], "cannot check drafts"),
    (["--level", "mxfp4", "--output", "nowhere/p.json"], "that folder does not exist"),
    (["--level", "mxfp4", "--output", "."], "which is a folder; name a file"),
    (["--level", "mxfp4", "--plot", "p.jpeg"], "a picture's name ends with .png, .svg, .pdf"),
    (["--level", "mxfp4", "--plot", "nowhere/p.png"], "that folder does not exist"),
    (["--level", "mxfp4", "--plot", "p.png", "--output", "./p.png"], "name two files"),
    (["--level", "mxfp4", "--repeats", "0"], "--repeats: 0 is not 1 or more"),
    (["--level", "mxfp4", "--repeats", "many"], "--repeats"),
    (["--level", "mxfp4", "--dtype", "int8"], "int8"),
    (["--level", "nested"], "add --dtype bfloat16")])
def test_bad_input_is_refused_before_a_model_is_loaded(capsys, tmp_path, monkeypatch, change, message):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hf_mlspec.cli.request.load_causal_lm", None)  # a call of it would be another error
    assert message in refusal(capsys, "tune", "./model", *change)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused(capsys, tmp_path):
    tmp_path.chmod(0o500)
    line = refusal(capsys, "tune", "./model", "--level", "mxfp4", "--output", tmp_path / "p.json")
    assert "nothing may be written to that folder" in line


def test_a_picture_without_matplotlib_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    line = refusal(capsys, "tune", "./model", "--level", "mxfp4", "--plot", tmp_path / "p.png")
    assert line == "mlspec tune: --plot needs matplotlib: pip install matplotlib, or leave --plot out\n"


def test_a_profile_that_is_no_file_is_refused(capsys, saved_model):
    line = refusal(capsys, "generate", "--model", saved_model, "--level", "mxfp4", "--prompt", "x", "--profile", "no")
    assert line == "mlspec generate: --profile is 'no', which is no file; mlspec tune --output writes one\n"


def test_a_level_that_names_its_length_is_told(capsys, cache, tmp_path, saved_model):
    model, tokenizer = load_causal_lm(str(saved_model))
    model.generation_config.num_assistant_tokens = 3
    draft = tmp_path / "draft"
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    assert not told(capsys, "tune", saved_model, "--level", draft, "--repeats", "1")["chooses"]
    assert main(["tune", str(saved_model), "--level", str(draft), "--repeats", "1"]) == 0
    assert "generation_config names its draft length" in capsys.readouterr().out


def test_commands_tell_the_plans_of_a_call(capsys, cache, saved_model):
    asked = ["generate", "--model", str(saved_model), "--level", "mxfp4", "--prompt", "x", "--max-new-tokens", "24"]
    assert main(asked) == 0
    assert "\nplans, chosen round by round\n" in capsys.readouterr().out
    assert main([*asked, "--compare"]) == 0
    assert "\nplans, chosen round by round\n" in capsys.readouterr().out
    assert main([*asked, "--num-draft-tokens", "3"]) == 0
    assert "plans" not in capsys.readouterr().out


def test_the_most_frequent_plans_stand_first(capsys):
    from rich.console import Console

    plans = {f"mxfp4 {n}": PlanStats(n, n, 2 * n, 0.1, 2.5 * n, 0.1, 0.2) for n in range(1, 8)}
    show_plans(Console(), SpeculationStats(plans={**plans, "off": PlanStats(rounds=9)}))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  off: rounds 9, expected tokens/s -, tokens/s -, gain over off -"
    assert lines[2] == "  mxfp4 7: rounds 7, expected tokens/s 175.0, tokens/s 140.0, gain over off 2.00 x"
    assert len(lines) == 7
    assert lines[-1] == "  all 8 plans: rounds 37, expected tokens/s 100.0, tokens/s 80.0, gain over off 2.00 x"


def test_info_names_the_folder_of_costs(capsys, cache):
    found = told(capsys, "info")
    assert found["costs_folder"] == str(cache)
    assert found["MLSPEC_CACHE"] == str(cache.parent)
