"""Does eval/lossless cover every batch once, go on where it stopped, and report what it found?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import needs_plans, program, run_plan, words, write_words

pytestmark = needs_plans
CONFIGS = Path(__file__).resolve().parents[2] / "eval" / "configs"
PLAN = """
name = "toy"
target = "{models}"
dtype = "float32"
max_new_tokens = 6
batch_sizes = [1, 2]
chains = [["mxfp4"], ["prompt_lookup"]]

""" + words(3)


@pytest.fixture
def lossless(tmp_path, saved_model, from_the_root, capsys):
    """Runs the program on three prompts; its exit status and what it prints."""
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    write_words(tmp_path, [{"prompt": "def f("}, {"prompt": "a"}, {"question": "How many?"}, {"prompt": "not asked"}])

    def run(*options: str) -> tuple[int, str]:
        status, _ = run_plan("lossless", tmp_path, saved_model, "--device", "cpu", *options)
        return status, capsys.readouterr().out

    run.results = tmp_path / "results"
    return run


def entries(folder: Path) -> list[dict]:
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def test_shards_cover_everything_once_and_a_second_run_does_nothing(lossless):
    assert lossless("--shard", "0/2")[0] == 0
    first = entries(lossless.results)
    lossless("--shard", "1/2")
    both = entries(lossless.results)
    assert 0 < len(first) < len(both) == 2 * (3 + 2)
    assert len({(e["batch_size"], e["batch"], tuple(e["chain"])) for e in both}) == len(both)
    assert sum("reference_ids" in e for e in both) == 3 + 2  # the target alone: once per batch, not per chain
    lossless()
    assert entries(lossless.results) == both
    rows = [line for line in lossless("--report")[1].splitlines() if line.startswith(("| mxfp4", "| prompt_lookup"))]
    assert [row.split(" | ")[:6] for row in rows] == [
        [f"| {chain}", "words", batch, "3", "18", "0"] for chain in ("mxfp4", "prompt_lookup") for batch in "12"]


def test_a_difference_is_reported(lossless):
    lossless()
    file = next(lossless.results.glob("*.jsonl"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    known = next(line for line in lines if "reference_ids" in line and line["batch_size"] == 1)
    known["reference_ids"][0][2] ^= 1
    file.write_text(json.dumps(known) + "\n")  # the rest is decoded again, and held against one wrong id
    assert lossless()[0] == 1
    report = lossless("--report")[1]
    assert f"prompt {known['batch']}, new token 2: alone {known['reference_ids'][0][2]}" in report
    assert "1 difference:" in report


def test_results_of_another_run_are_not_mixed_in(lossless, tmp_path):
    lossless()
    plan = tmp_path / "plan.toml"
    plan.write_text(plan.read_text().replace("max_new_tokens = 6", "max_new_tokens = 7"), encoding="utf-8")
    with pytest.raises(SystemExit, match="another folder as --results"):
        lossless()


def test_results_of_a_plan_whose_name_goes_on_lie_beside(lossless, tmp_path):
    lossless()
    plan = tmp_path / "plan.toml"
    more = plan.read_text().replace('"toy"', '"toy-bf16"').replace("max_new_tokens = 6", "max_new_tokens = 7")
    text = plan.read_text()
    plan.write_text(more, encoding="utf-8")
    assert lossless()[0] == 0
    plan.write_text(text, encoding="utf-8")
    assert "| mxfp4 | words | 1 | 3 | 18 | 0 |" in lossless("--report")[1]


def test_an_interrupted_write_is_noticed(lossless):
    lossless()
    file = next(lossless.results.glob("*.jsonl"))
    file.write_text(file.read_text()[:-20])
    with pytest.raises(SystemExit, match="in the middle of a line"):
        lossless()


QUANTIZED = """
[quantize]
format = "int4"
group_size = 32
"""


def test_a_plan_may_quantize_its_target(lossless, tmp_path):
    plan = tmp_path / "plan.toml"
    chains = '[["w4a8"], ["w4a4", "prompt_lookup"]]'
    text = plan.read_text().replace('[["mxfp4"], ["prompt_lookup"]]', chains)
    plan.write_text(text + QUANTIZED, encoding="utf-8")
    assert lossless()[0] == 0
    found = entries(lossless.results)
    assert len(found) == 2 * (3 + 2)
    assert all(e["differences"] == [] and e["asked"]["quantize"]["format"] == "int4" for e in found)
    assert found[0]["speculation"]["levels"][0]["name"] == "w4a8"
    report = lossless("--report")[1]
    assert "float32, format int4, group_size 32, 6 new tokens" in report
    assert "| w4a4 <- prompt_lookup | words | 2 | 3 | 18 | 0 |" in report
    plan.write_text(text + QUANTIZED.replace("32", "64"), encoding="utf-8")
    with pytest.raises(SystemExit, match="another folder as --results"):
        lossless()


def test_a_difference_from_a_quantized_target_is_looked_at_in_float64(lossless, tmp_path):
    plan = tmp_path / "plan.toml"
    text = plan.read_text().replace('[["mxfp4"], ["prompt_lookup"]]', '[["w4a8"]]')
    plan.write_text(text.replace("[1, 2]", "[3]") + QUANTIZED, encoding="utf-8")
    lossless()
    (known,) = entries(lossless.results)
    known["reference_ids"][1][2] ^= 1
    next(lossless.results.glob("*.jsonl")).write_text(json.dumps({**known, "chain": ["w4a4"]}) + "\n")
    assert lossless()[0] == 1
    (difference,) = entries(lossless.results)[1]["differences"]
    assert (difference["prompt"], difference["position"]) == (1, 2)
    assert difference["top2_float64"][0][0] == difference["got"]
    assert difference["gap_float64"] == pytest.approx(difference["gap"], rel=0.1)


def test_the_plan_of_qspec_is_complete(from_the_root):
    import hf_mlspec

    plan = program("lossless").read_plan(CONFIGS / "lossless_qspec.toml")
    config = hf_mlspec.MLSpecConfig(**plan["quantize"])
    assert (config.format, config.group_size, config.symmetric) == ("int4", 128, True)
    assert plan["batch_sizes"] == [1, 8, 32]
    assert [data["count"] for data in plan["data"]] == [164, 300]
