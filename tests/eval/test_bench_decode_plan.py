"""Does a throughput plan measure what it names, refuse what it cannot, and go on where it was killed?"""

from __future__ import annotations

import shutil
import sys

import pytest
import torch
from programs import needs_plans, program, run_plan, system, words, write_words

pytestmark = [needs_plans, pytest.mark.usefixtures("from_the_root")]
PLAN = """
name = "toy"
max_new_tokens = 10
batch_sizes = [1, 2]
batches = 1
repeats = 2
memory = false
"""
PLAN += system("cast", dtype="float32", levels=["mxfp4"], num_draft_tokens=3, confidence_threshold=0.0)
PLAN += system("chain", dtype="float32", levels=["mxfp4", "{models}/."], num_draft_tokens=[4, 2],
               confidence_threshold=0.0) + words(3)
ABLATION = """
[[ablation]]
system = "chain"
level = 2
num_draft_tokens = [1, 3]
batch = 2
"""


@pytest.fixture
def bench(tmp_path, saved_model, capsys):
    """Runs a plan on three prompts: -> exit status, what was said on stderr, the result lines."""
    write_words(tmp_path, ({"prompt": text} for text in ("def f(", "a", "class A:")))

    def run(plan: str = PLAN + ABLATION):
        (tmp_path / "plan.toml").write_text(plan)
        status, found = run_plan("bench_decode", tmp_path, saved_model, "--threads", "1")
        return status, capsys.readouterr().err, found

    run.folder = tmp_path
    return run


def test_a_plan_measures_every_contender_at_every_batch_size(bench):
    status, _, found = bench()
    decoded = [line for line in found if line["kind"] == "decode"]
    ours = ["stock greedy", "stock assisted", "target alone", "cast", "chain"]
    assert [(e["batch"], e["contender"]) for e in decoded] == [
        *((1, name) for name in ours), *((2, name) for name in ours if name != "stock assisted")]
    for line in decoded:
        assert line["over"][line["contender"]] == pytest.approx(1) if line["contender"] in line["over"] else True
        assert line["over"].keys() == {"stock greedy", "target alone"} | ({"stock assisted"} if line["batch"] == 1
                                                                          else set())
        assert line["units"] == 2
        assert line["machine"]["threads"] == 1
        assert line["probe_bytes_per_second"] > 0
        if line["seconds"] is not None:
            spent = line["seconds"]
            assert spent["total"] == pytest.approx(spent["target"] + sum(spent["levels"]) + spent["other"])
            assert len(spent["levels"]) == len(line["levels"])
            assert line["bandwidth_share"] > 0
    chain = decoded[4]
    assert chain["levels"][0] == "mxfp4"
    assert chain["rows_compared"] == 2
    assert (status == 1) == any(line.get("rows_differing") for line in decoded)
    accepted = [line for line in found if line["kind"] == "acceptance" and line["system"] == "chain"]
    assert [(e["batch"], e["level_index"]) for e in accepted] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert {(e["format"], e["precision"]) for e in accepted} == {(None, None)}  # what a draft is for
    assert all(0 < e["accepted"] <= e["tested"] <= e["drafted"] for e in accepted)
    assert [e["tokens_per_pass"] is None for e in accepted] == [False, True] * 2  # of the target's passes
    varied = [line for line in found if line["kind"] == "ablation"]
    assert [(e["num_draft_tokens"], e["batch"], e["system"]) for e in varied] == [
        ([4, 1], 2, "chain"), ([4, 3], 2, "chain")]


def test_a_killed_run_goes_on_and_decodes_no_unit_twice(bench, monkeypatch):
    running, decoded = program("bench_decode.run"), []
    real = running.unit

    def counted(decoder, there, rows, first, probe):
        if len(decoded) == 2:
            raise KeyboardInterrupt
        decoded.append(first)
        return real(decoder, there, rows, first, probe)

    with monkeypatch.context() as patch:
        patch.setattr(running, "unit", counted)
        status, said, found = bench()
    assert (status, found) == (130, [])
    assert "the same command goes on" in said
    kept = (bench.folder / "results" / "toy" / "decode.jsonl").read_text()
    again = []
    monkeypatch.setattr(running, "unit", lambda *asked: again.append(asked) or real(*asked))
    _, _, found = bench()
    assert (len(decoded), len(again)) == (2, 2)
    assert (bench.folder / "results" / "toy" / "decode.jsonl").read_text().startswith(kept)
    table = (bench.folder / "results" / "toy.jsonl").read_text()
    assert bench()[2] == found
    assert len(again) == 2
    assert (bench.folder / "results" / "toy.jsonl").read_text() == table


def test_draft_lengths_that_two_curves_share_are_decoded_once(bench):
    plans, plan = program("bench_decode.plan"), PLAN + ABLATION + """
[[ablation]]
system = "chain"
num_draft_tokens = [4, 6]
batch = 2
"""
    (bench.folder / "plan.toml").write_text(plan.replace("[1, 3]", "[1, 2]"))
    found = plans.contenders(plans.read_plan(bench.folder / "plan.toml"))
    assert [one.system.num_draft_tokens for one in found if one.ablation] == [[4, 1], [4, 2], [6, 2]]


def test_units_of_other_settings_never_meet(bench):
    bench()
    status, said, _ = bench(PLAN.replace("max_new_tokens = 10", "max_new_tokens = 12"))
    assert status == 2
    assert "plan.max_new_tokens: 10 -> 12" in said


def test_other_weights_under_the_same_name_are_noticed(bench, saved_model, tmp_path):
    draft = shutil.copytree(saved_model, tmp_path / "draft")
    plan = PLAN.replace('"{models}/."', '"{data}/draft"')
    assert bench(plan)[0] == 0
    (weights,) = draft.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
    status, said, _ = bench(plan)
    assert status == 2
    assert "weights.chain[1].{data}/draft: " in said


def test_a_corrected_plan_finds_no_journal_in_its_way(bench):
    plan = PLAN
    for wrong, named in ((("max_new_tokens = 10", "max_new_tokens = 512"), "exceed the target's 512 positions"),
                         (('levels = ["mxfp4"]', 'levels = ["w4a4"]'), "'cast': levels ['w4a4']")):
        status, said, _ = bench(plan.replace(*wrong))
        assert (status, said.count("\n")) == (2, 1)
        assert named in said
    assert bench(plan)[0] == 0


@pytest.mark.parametrize(("change", "named"), [
    (("repeats = 2", "repeats = 2\nseed = -1"), "seed is -1, it must be at least 0"),
    (("repeats = 2", "repeats = 0"), "repeats holds 0, it must be at least 1"),
    (("batch_sizes = [1, 2]", "batch_sizes = [1, 2, 8]"), "count is 3, which does not fill a batch of 8"),
    (("batch_sizes = [1, 2]", "batch_sizes = []"), "no batch_sizes"),
    (('levels = ["mxfp4"]\nnum_draft_tokens = 3\nconfidence_threshold = 0.0', ""), "the target alone takes part"),
    (('name = "cast"', 'name = "target-alone"\ngroup_size = 8'), "group_size is None, that of 'target-alone' is 8"),
    (('levels = ["mxfp4"]', 'levels = ["{models}/no"]'), "/no holds no config.json"),
    (('words.jsonl', 'no.jsonl'), "no.jsonl is no file"),
    (("[4, 2]", "[4, 2, 1]"), "num_draft_tokens has 3 entries for 2 levels"),
    (("repeats = 2", "repeat = 2"), "unknown key 'repeat'"),
    (('system = "chain"', 'system = "no"'), "[[ablation]] 1: system is 'no', the plan has cast, chain"),
    (("level = 2", "level = 3"), "level is 3, 'chain' has 2"),
    (("[1, 3]", "[3]"), "two or more different lengths"),
    (("batch = 2", "batch = 4"), "batch is 4, which no data is decoded with"),
])  # fmt: skip
def test_a_plan_that_cannot_be_is_refused_before_anything_is_decoded(bench, change, named):
    plan = PLAN + ABLATION
    assert change[0] in plan
    status, said, found = bench(plan.replace(*change))
    assert (status, found) == (2, [])
    assert named in said
    assert said.count("\n") == 1
    assert not (bench.folder / "results").exists()


def test_a_plan_says_what_the_other_options_say(capsys):
    wrong = ((["p.toml", "--count", "3"], "--count does not go with a plan"),
             (["--results", "x"], "--results goes with a plan"), (["p.toml", "--threads", "0"], "--threads is 0"))
    for asked, named in wrong:
        with pytest.raises(SystemExit):
            program("bench_decode").parse(asked)
        assert named in capsys.readouterr().err


def test_memory_is_that_of_target_levels_and_caches(saved_model, bench, monkeypatch):
    memory = program("bench_decode.memory")
    monkeypatch.setattr(memory, "ask", memory.measure)  # a fresh process costs seconds; test_bench_qspec.py starts one
    monkeypatch.setattr(program("records.machine").PeakMemory, "__exit__", lambda self, *_: setattr(self, "peak", 5))
    _, _, found = bench(PLAN.replace("memory = false", ""))
    held = {(e["contender"], e["batch"]): e for e in found if e["kind"] == "memory"}
    alone, cast, chain = (held[name, 2] for name in ("target alone", "cast", "chain"))
    assert alone["weights_bytes"] < cast["weights_bytes"] < alone["weights_bytes"] * 1.4
    assert chain["weights_bytes"] == cast["weights_bytes"] + alone["weights_bytes"]
    assert alone["kv_bytes"] == cast["kv_bytes"] < chain["kv_bytes"]
    assert alone["kv_bytes"] > held["target alone", 1]["kv_bytes"]
    assert held["stock greedy", 1]["kv_bytes"] is None
    assert alone["peak_bytes"] == 5


@pytest.mark.parametrize(("said", "expected"), [
    ("Traceback (most recent call last):\\n  File x\\nValueError: no such model",
     "failed: ValueError: no such model;"),
    ("", "failed: it was killed or said nothing;"),
])
def test_a_memory_process_that_fails_is_one_sentence(bench, monkeypatch, said, expected):
    failing = f'import sys; sys.stderr.write("{said}"); sys.exit(9)'
    fresh, real = program("records.fresh_process"), program("records.fresh_process").subprocess.run
    monkeypatch.setattr(fresh.subprocess, "run", lambda command, **options: real(
        [sys.executable, "-c", failing] if "eval.bench_decode.memory" in command else command, **options))
    status, stderr, found = bench(PLAN.replace("memory = false", "").replace("[1, 2]", "[1]"))
    (sentence,) = (line for line in stderr.splitlines() if line.startswith("error: "))
    assert (status, found) == (2, [])
    assert "memory of 'stock greedy' " + expected in sentence
    assert "Traceback" not in stderr
    kept = (bench.folder / "results" / "toy" / "decode.jsonl").read_text()
    assert "repeat 1" in kept


def test_a_pass_reads_all_but_the_embedding(saved_model):
    from transformers import AutoModelForCausalLM

    import hf_mlspec

    reads = program("bench_decode.memory").reads
    target = AutoModelForCausalLM.from_pretrained(saved_model, dtype=torch.float32)
    table = target.get_input_embeddings().weight.nbytes
    whole = hf_mlspec.resident_bytes(target)
    assert reads(None, target) == reads(str(saved_model), target) == whole - table
    assert reads("prompt_lookup", target) == reads("ngram", target) == 0
    assert 0 < reads("mxfp4", target) < reads(None, target) / 4
    assert reads(f"{saved_model}@mxfp4", target) == reads("mxfp4", target)
    assert 0 < reads("early_exit:1", target) < reads(None, target)


def test_a_pass_reads_no_table_of_codes_but_the_whole_of_one_that_is_the_heads():
    import hf_mlspec
    from hf_mlspec.nn.switch import PrecisionSwitch
    from hf_mlspec.nn.zipper_embedding import ZipperEmbedding
    from tests.models import tiny

    reads = program("bench_decode.memory").reads
    tied, model = (tiny(dtype=torch.bfloat16, tie_word_embeddings=tie) for tie in (True, False))
    assert reads(None, tied) == hf_mlspec.resident_bytes(tied)
    before = reads(None, model)
    coded = ZipperEmbedding.from_embedding(model.get_input_embeddings(), switch=PrecisionSwitch("zipper"))
    model.set_input_embeddings(coded)
    assert reads(None, model) == before < hf_mlspec.resident_bytes(model)


def test_ratios_are_of_takes_of_the_same_unit():
    over = program("bench_decode.lines").over

    def unit(mine, its):
        return {"takes": {name: {"decode_tokens": rate, "decode_seconds": 1.0} for name, rate in
                          (("x", mine), ("target alone", its))}}

    # A machine that became four times slower between the units: the ratios do not see it.
    assert over("x", [unit(400, 200), unit(100, 50)]) == {"target alone": pytest.approx(2)}
    assert over("x", [unit(400, 200), unit(0, 50)]) == {"target alone": pytest.approx(2)}
    assert over("x", [unit(0, 200)]) == {}
