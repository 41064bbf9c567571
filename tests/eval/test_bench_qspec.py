"""Does the benchmark of QSpec write a line for every way to use an int4 model, and find what differs?"""

from __future__ import annotations

import importlib
import json
import math

import pytest
import torch
from programs import program
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_mlspec

pytestmark = pytest.mark.usefixtures("from_the_root")


@pytest.fixture
def qspec_run(saved_model, tmp_path):
    """Runs the QSpec benchmark on three prompts of different lengths; its exit status and its lines."""
    prompts, out = tmp_path / "words.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("def f(", "a", "How many apples are left?")))

    def run(*options: str):
        asked = ["--model", str(saved_model), "--prompts", str(prompts), "--group-size", "32", "--quick", "--threads",
                 "1", "--count", "3", "--json", str(out), *options]
        status = program("bench_qspec").main(asked)
        return status, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    run.file, run.model = out, saved_model
    return run


QSPEC = ["QSpec dequant, w4a8", "QSpec w4a8", "QSpec w4a4", "QSpec w4a8, own cache"]


def test_every_way_to_use_an_int4_model_has_a_line(qspec_run, capsys):
    status, found = qspec_run("--draft", str(qspec_run.model), "--batch", "1,3", "--gamma", "2,3")
    decoded = [line for line in found if line["kind"] == "decode"]
    drafting = [*QSPEC, f"[{qspec_run.model.name}]"]
    assert [(e["batch"], e["contender"], e["gamma"]) for e in decoded] == [
        (batch, name, gamma) for batch in (1, 3) for names, gammas in (
            (["w16a16", "w4a8", "w4a4", "w4a16", "w4a16 dequant"], [None]), (drafting, [2, 3]))
        for name in names for gamma in gammas]
    for line in decoded:
        parts = line["ms_per_token"]
        assert sum(parts.values()) * line["tokens_per_second"] == pytest.approx(1000)
        assert (parts["draft"] > 0) == (line["gamma"] is not None)
        assert line["machine"]["threads"] == 1
    promised = [line for line in decoded if line["reference"]]
    assert len(promised) == 2 * (2 + 10)
    assert all(e["rows_compared"] == e["batch"] for e in promised)
    differing = sum(e["rows_differing"] for e in promised)
    assert differing == 0 or decoded[0]["not_prepared"]  # module by module, ties fall either way
    assert status == (differing > 0)
    assert {e["contender"] for e in decoded if e["draft_cache_bytes"]} == set(drafting[3:])
    alone = next(e for e in decoded if e["contender"] == "w4a16" and e["batch"] == 3)
    assert alone["over"]["w4a16"] == pytest.approx(1)
    assert (alone["tokens_per_pass"], alone["tokens_compared"]) == (1, 36)
    assert f"{differing} rows differ" in capsys.readouterr().out


def test_averages_are_over_batch_sizes(qspec_run):
    ways = ("--only", "QSpec w4a8", "--batch", "1,2,3", "--gamma", "2,4")
    found = qspec_run(*ways)[1]
    ratios = {(e["batch"], e["gamma"]): e["over"]["w4a16"] for e in found if e.get("contender") == "QSpec w4a8"
              and e["kind"] == "decode"}
    averages = {e["gamma"]: e for e in found if e["kind"] == "average" and e["contender"] == "QSpec w4a8"}
    assert list(averages) == [2, 4, "best"]
    assert averages[2]["over_reference"] == pytest.approx(math.prod(ratios[b, 2] for b in (1, 2, 3)) ** (1 / 3))
    best = [max(ratios[b, gamma] for gamma in (2, 4)) for b in (1, 2, 3)]
    assert averages["best"]["over_reference_small"] == pytest.approx(math.prod(best) ** (1 / 3))
    assert averages["best"]["batches"] == [1, 2, 3]


def test_acceptance_covers_every_prompt_once(qspec_run, capsys):
    status, found = qspec_run("--acceptance", "--batch", "2")
    assert status == 0
    assert [(e["level"], e["data"], e["prompts"], e["new_tokens"], e["gamma"]) for e in found] == [
        (level, "words", 3, 36, 3) for level in ("w4a4", "w4a8")]
    for line in found:
        assert 0 < line["accepted"] <= line["tested"] <= line["drafted"]
        assert line["acceptance"] == line["accepted"] / line["tested"]
    assert "acceptance" in capsys.readouterr().out


def test_lines_are_reported_again_and_a_difference_fails(qspec_run, capsys):
    bench = program("bench_qspec")
    found = qspec_run("--only", "QSpec w4a4", "--batch", "1,2", "--gamma", "3")[1]
    write = qspec_run.file.write_text
    found = [{**line, "rows_differing": 0} if "rows_differing" in line else line for line in found]
    write("".join(json.dumps(line) + "\n" for line in found))
    capsys.readouterr()
    assert bench.main(["--report", str(qspec_run.file)]) == 0
    assert "batch 2: decode-only" in capsys.readouterr().out
    found[2]["rows_differing"] = 1
    write("".join(json.dumps(line) + "\n" for line in found))
    assert bench.main(["--report", str(qspec_run.file)]) == 1
    assert "1 rows differ" in capsys.readouterr().out


def test_a_token_that_differs_is_counted():
    contenders, differences = program("bench_qspec.contenders"), program("bench_qspec.report").differences
    stats = importlib.import_module("hf_mlspec").SpeculationStats(new_tokens=5, target_passes=1)
    alone = contenders.Take.of(stats, [[3, 4, 5], [3, 4, 0]])
    other = contenders.Take.of(stats, [[3, 9], [3, 4]])
    assert differences([alone], [alone])["rows_differing"] == 0
    found = differences([other], [alone])
    assert (found["rows_compared"], found["tokens_compared"]) == (2, 5)
    assert (found["rows_differing"], found["tokens_differing"]) == (2, 3)


def test_memory_of_a_contender_counts_target_draft_and_caches(qspec_run):
    memory, contenders = program("bench_qspec.memory"), program("bench_qspec.contenders")
    import hf_mlspec

    target = contenders.Target(str(qspec_run.model), {"group_size": 32, "symmetric": True})
    saved = qspec_run.file.parent / "saved"
    target.int4.save_pretrained(saved)

    def found(name, **more):
        one = contenders.Contender(name, "w4a16", gamma=3, **more)
        return memory.measure(memory.request(one, target, str(saved), [[5, 6, 7], [8]], 12))

    alone, shared, own = found("a"), found("b", levels=("w4a8",)), found("c", levels=("w4a8",), shared_cache=False)
    ordinary = found("d", levels=(str(qspec_run.model),))
    assert alone["batch"] == 2
    assert (shared["weight_bytes"], shared["kv_bytes"]) == (alone["weight_bytes"], alone["kv_bytes"])
    assert (own["weight_bytes"], own["kv_bytes"]) == (alone["weight_bytes"], 2 * alone["kv_bytes"])
    assert ordinary["weight_bytes"] == alone["weight_bytes"] + hf_mlspec.resident_bytes(target.bfloat16)
    assert memory.level_bytes("prompt_lookup") == 0 < memory.level_bytes(f"{qspec_run.model}@mxfp4")


def test_memory_is_measured_in_a_fresh_process(qspec_run, monkeypatch):
    memory, ids = program("bench_qspec.memory"), []
    fresh = memory.ask

    def once(asked):
        ids.append(asked["contender"]["name"])
        return fresh(asked) if len(ids) == 1 else memory.measure(asked)

    monkeypatch.setattr(memory, "ask", once)
    status, found = qspec_run("--memory", "--only", "w4a8, own", "--batch", "2", "--gamma", "2,3")
    assert status == 0
    assert [(e["kind"], e["contender"], e["gamma"], e["batch"]) for e in found] == [
        ("memory", "w4a16", None, 2), ("memory", "w4a16 dequant", None, 2), ("memory", QSPEC[3], 3, 2)]
    assert found[0]["weight_bytes"] == found[1]["weight_bytes"]
    assert all(e["rss_peak_bytes"] is None or e["rss_peak_bytes"] > e["weight_bytes"] for e in found)


def test_a_process_that_fails_says_why():
    fresh = program("records.fresh_process")
    with pytest.raises(RuntimeError, match=r"memory of 'x' failed: (.|\n)*No module named no_such_program"):
        fresh.in_fresh_process({"contender": {"name": "x"}}, "no_such_program")


def test_more_rows_than_prompts_are_refused(qspec_run, capsys):
    assert qspec_run("--batch", "1,8")[0] == 2
    assert "a batch of 8 needs as many prompts, and 3 were read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        program("bench_qspec").main(["--model", "no/such/folder"])
    assert "no/such/folder does not exist" in capsys.readouterr().err


def test_a_quantized_folder_is_measured_as_it_is(qspec_run, tmp_path, capsys):
    folder, source = tmp_path / "quantized", qspec_run.model
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    text = ["def f(x): return x\n" * 200]
    hf_mlspec.quantize(model, "gptq", calibration=text, tokenizer=tokenizer, samples=2, tokens=32, group_size=32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    bench, prompts = program("bench_qspec"), qspec_run.file.parent / "words.jsonl"
    asked = ["--model", str(folder), "--prompts", str(prompts), "--quick", "--threads", "1", "--count", "3",
             "--json", str(qspec_run.file), "--only", "QSpec w4a4"]
    assert bench.main(asked) == 0
    found = [line for line in map(json.loads, qspec_run.file.read_text().splitlines()) if line["kind"] == "decode"]
    assert {line["contender"] for line in found} == {"w4a16", "w4a16 dequant", "QSpec w4a4"}  # there is no w16a16
    assert all(line["rows_differing"] == 0 for line in found if line["reference"])
    with pytest.raises(SystemExit):
        bench.main([*asked, "--asymmetric"])
    assert "is quantized already: leave --group-size and --asymmetric out" in capsys.readouterr().err


def test_weights_that_are_never_dequantized_whole_have_no_such_contender(qspec_run):
    bench, contenders = program("bench_qspec"), program("bench_qspec.contenders")
    args = bench.parse(["--model", str(qspec_run.model), "--quick"])
    plain, mixed = ({one.name for one in bench.chosen(args, _target(contenders, by))} for by in ("rtn", "atom"))
    assert plain - mixed == {"w4a16 dequant", "QSpec dequant, w4a8"}
    one = contenders.Contender("w4a16", "w4a16")
    take = contenders.Take(1, 1.0, 1, 1, 1.0, 0, 0.0, [[1]], hf_mlspec.SpeculationStats([]))
    over = program("bench_qspec.report").summaries(1, {one: [take]}, 1)[0]["over"]
    assert over == {"w4a16": pytest.approx(1), "w4a16 dequant": None}


def _target(contenders, method: str):
    config = LlamaConfig(vocab_size=32, hidden_size=256, intermediate_size=256, num_hidden_layers=1,
                         num_attention_heads=2)
    target = contenders.Target("no folder", None)
    target.int4 = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    hf_mlspec.quantize(target.int4, method, calibration=[[number % 32 for number in range(400)]], samples=2, tokens=32)
    return target


def test_the_picture_is_drawn_of_lines(qspec_run, monkeypatch):
    pictures, file = program("bench_qspec.plot"), qspec_run.file.parent / "out.png"
    with pytest.raises(ValueError, match="no line is of kind 'decode'"):
        pictures.plot([{"kind": "memory"}], file)
    with monkeypatch.context() as patch:
        patch.setattr(pictures.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ModuleNotFoundError, match=r"hf-mlspec\[eval\]"):
            qspec_run("--plot", str(file))
    pytest.importorskip("matplotlib")
    qspec_run("--only", "QSpec w4a8", "--plot", str(file))
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_batches_hold_rows_of_every_file_and_are_whole():
    bench = program("bench_qspec")
    rows = bench.mixed({"a": [[1], [2], [3]], "b": [[4, 4]]})
    assert rows == [[1], [4, 4], [2], [3]]
    assert bench.batches_of(rows, [1, 3], None) == {1: [[[1]], [[4, 4]], [[2]], [[3]]], 3: [[[1], [4, 4], [2]]]}
    assert bench.batches_of(rows, [2], 1) == {2: [[[1], [4, 4]]]}
    by_size = bench.batches_of([[0]] * 200, [1, 8, 16, 32, 64], None)
    assert [len(found) for found in by_size.values()] == [4, 4, 2, 1, 1]
    with pytest.raises(ValueError, match="a batch of 5 needs as many prompts, and 4 were read"):
        bench.batches_of(rows, [5], None)
