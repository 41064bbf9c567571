"""Does the GPU benchmark read its arguments, find what is wrong, isolate its groups and write whole tables?"""

from __future__ import annotations

import importlib
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from programs import program

from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.evaluation import replay_captured

pytestmark = pytest.mark.usefixtures("from_the_root")


def finding(**changes):
    Finding = program("bench_gpu.findings").Finding
    return Finding(**{"group": "linear", "what": "M = 1", "contender": "bf16", "value": 36.0, "unit": "us", **changes})


def bench(**changes):
    Bench = program("bench_gpu.findings").Bench
    return Bench(torch.device("cpu"), Path("models"), Path("data"), quick=True, **changes)


def test_groups_are_named_and_put_in_order():
    assert program("bench_gpu").groups("step, linear,step") == ["linear", "step"]
    assert program("bench_gpu").parse([]).only == list(program("bench_gpu").GROUPS)


@pytest.mark.parametrize("text", ["", "lines", "linear,,step"])
def test_an_unknown_group_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        program("bench_gpu").parse([f"--only={text}"])
    assert "is no group: choose from linear, step" in capsys.readouterr().err


def test_every_group_is_there():
    for name, module in program("bench_gpu").GROUPS.items():
        assert callable(getattr(importlib.import_module(module), name))
        assert name in program("bench_gpu.report").TITLES


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing to refuse")
def test_without_a_gpu_nothing_is_run(capsys):
    assert program("bench_gpu").main(["--only", "linear"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_large_shapes_are_not_for_a_cpu(capsys):
    assert program("bench_gpu").main(["--device", "cpu"]) == 2
    assert "--quick" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "target", "at_least", "met"), [
    (36.0, 37.0, False, True), (38.0, 37.0, False, False), (2.0, 2.0, True, True), (1.9, 2.0, True, False),
    (5.0, None, True, None)])
def test_targets(value, target, at_least, met):
    assert finding(value=value, target=target, at_least=at_least).met is met


def test_a_group_that_fails_is_told_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    bench_gpu, out, written = program("bench_gpu"), tmp_path / "out.jsonl", tmp_path / "table.md"

    def broken(bench):
        yield finding(what="M = 1")
        raise ValueError("no more | of it")

    def whole(bench):
        yield finding(group="step", what="batch 1", contender="BF16", value=4.2, unit="ms", target=4.5, share=0.9)

    monkeypatch.setattr(program("bench_gpu.products"), "linear", broken)
    monkeypatch.setattr(program("bench_gpu.step"), "step", whole)
    asked = ["--quick", "--device", "cpu", "--only", "linear,step", "--out", str(out), "--table", str(written)]
    assert bench_gpu.main(asked) == 1
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["kind"], line["group"], line["value"], line["met"]) for line in lines] == [
        ("gpu", "linear", 36.0, None), ("gpu", "step", 4.2, True)]
    assert all(line["machine"]["torch"] == torch.__version__ and line["read_bandwidth"] > 0 for line in lines)
    shown = capsys.readouterr().out
    assert written.read_text() in shown
    assert "| M = 1 | 36 us |" in shown
    assert "| batch 1 | 4.20 ms (0.90); <= 4.5: met |" in shown
    assert "**linear failed**: ValueError: no more | of it" in shown


def test_a_table_has_every_contender_and_says_what_was_missed():
    lines = [finding(value=40.0, target=37.0), finding(what="M = 2", contender="torch|bf16", value=33.25)]
    text = program("bench_gpu.report").group_table([line.to_dict() for line in lines])
    assert text.splitlines() == [
        "|  | bf16 | torch\\|bf16 |", "|---|--:|--:|", "| M = 1 | 40 us; <= 37: MISSED |  |", "| M = 2 |  | 33.2 us |"]


def products():
    return program("bench_gpu.products")


def test_products_are_right_and_timed():
    found = list(products().linear(bench()))
    ours = {line.contender for line in found} - {"torch bf16"}
    assert ours == {"bf16", "mxfp4 a16", "mxfp4 a8", "int4 g128 a16", "int4 g128 a8"}
    assert all(0 < line.more["error_of_allowed"] <= 1 for line in found if line.contender in ours)
    assert all(line.value > 0 and line.share > 0 for line in found)


@pytest.mark.parametrize("wrong", [
    lambda y: y * 1.02, lambda y: y.roll(1, 0), lambda y: y.index_fill(1, torch.tensor([3]), torch.nan)])
def test_a_product_that_is_wrong_is_found(wrong):
    product = products()._bf16((128, 128), torch.device("cpu"), 0, ours=True)
    x = torch.randn(4, 128).to(torch.bfloat16)
    assert products().error(product, x) <= 1
    run = product.run
    product.run = lambda x, copy: wrong(run(x, copy))
    assert not products().error(product, x) <= 1


def test_a_wrong_product_fails_its_group_behind_the_right_ones(monkeypatch):
    module = products()
    right = module._int4

    def skewed(*arguments):
        product = right(*arguments)
        run = product.run
        product.run = lambda x, copy: run(x, copy) * 1.5
        return product

    monkeypatch.setattr(module, "_int4", skewed)
    found = []
    with pytest.raises(module.WrongResult, match=r"int4 g128 a16: 1 tokens: .* the error allowed; int4 g128 a8: "):
        found.extend(module.linear(bench()))


def test_a_peer_that_fails_takes_no_part(monkeypatch):
    module = products()

    def failing(*arguments):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(module, "_torch_int4", failing)
    one = bench()
    assert len(list(module.linear(one))) > 10
    assert one.missing["torch int4 g128"] == "torch int4 g128: no such kernel"


def test_a_captured_step_that_chooses_other_tokens_is_found(monkeypatch):
    """On a CPU the replay is the work itself, so that a second run in a changed state stands for a bad capture."""
    step = program("bench_gpu.step")
    model = program("bench_gpu.models").random_model("tiny", torch.device("cpu"))
    decoder = step.decoder_of(model, "cuda")
    case = step.Case("batch 2", 2, 1, None)
    assert step.Step(decoder, case, 16).timed().median > 0
    one = step.Step(decoder, case, 16)

    def capture(work, device):
        one.first += 1
        return work

    monkeypatch.setattr(step, "capture", capture)
    with pytest.raises(step.WrongStep, match="batch 2: the captured step chooses"):
        one.timed()


def test_bytes_of_a_step_leave_an_untied_embedding_out():
    step = program("bench_gpu.step")
    model = program("bench_gpu.models").random_model("tiny", torch.device("cpu"))
    whole = sum(p.nbytes for p in model.parameters())
    assert step.read_bytes(model) == whole - model.get_input_embeddings().weight.nbytes
    model.lm_head.weight = model.model.embed_tokens.weight
    assert step.read_bytes(model) == sum(p.nbytes for p in model.parameters())


def test_random_int4_models_decode_at_every_width():
    models = program("bench_gpu.models")
    packed = importlib.import_module("eval.random_packed")
    model = models.without_end(packed.random_int4_model("tiny", torch.device("cpu")))
    from hf_mlspec import precision_switch

    assert precision_switch(model).choices == (16, 8, 4)
    ids = torch.randint(90, (2, 6))
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, pad_token_id=0,
                         assistant_models=["w4a8"])
    assert out.shape == (2, 11)


def test_rows_that_differ():
    differ = program("bench_gpu.decoding").rows_that_differ
    assert differ(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]])) == 1
    assert differ(torch.tensor([[1, 2, 0]]), torch.tensor([[1, 2]])) == 0
    assert differ(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2]])) == 1


def test_ids_end_at_an_end():
    until_end = program("bench_gpu.exact").until_end
    assert until_end([5, 6, 2, 0, 0], [2, 9]) == [5, 6, 2]
    assert until_end([5, 6], [2]) == [5, 6]


def test_a_chain_that_differs_is_counted_and_fails(monkeypatch):
    exact = program("bench_gpu.exact")
    real = exact._decoded

    def decoded(bench, model, rows, case, batch):
        found = real(bench, model, rows, case, batch)
        if case.name == '["mxfp4"]' and batch == 1:
            found[2] = [*found[2][:-1], -1]
        return found

    monkeypatch.setattr(exact, "_decoded", decoded)
    found = []
    with pytest.raises(exact.Differences, match=r'\["mxfp4"\], batch 1: 1 of 4 prompts differ, first \[2\]$'):
        found.extend(exact.exact(bench()))
    assert sum(line.value for line in found) == 1
    assert len(found) == 12


def test_missing_prompts_and_models_are_named(tmp_path):
    prompts, models = program("bench_gpu.prompts"), program("bench_gpu.models")
    full = bench()
    full.quick, full.data, full.models = False, tmp_path, tmp_path
    with pytest.raises(ValueError, match=r"HumanEval\.jsonl does not exist: --data names the folder"):
        prompts.texts(full)
    with pytest.raises(ValueError, match="code-21m is no folder: --models names the folder"):
        models.real_model(prompts.folders(full)[0], torch.device("cpu"))
    file = tmp_path / "humaneval" / "HumanEval.jsonl"
    file.parent.mkdir()
    file.write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match="holds 1 prompts, 164 are compared"):
        prompts.texts(full)


def test_a_stock_step_is_timed_with_the_hook_out_and_back():
    import hf_mlspec

    stock, models = program("bench_gpu.stock"), program("bench_gpu.models")
    model = models.random_model("tiny", torch.device("cpu"))
    prompt = torch.randint(90, (2, 6))
    assert stock.eager_step(model, prompt, 5) > 0
    assert stock.graph_step(model, prompt) > 0
    assert hf_mlspec.enabled()


def test_a_build_that_fails_says_why(monkeypatch, tmp_path):
    startup = program("bench_gpu.startup")
    (tmp_path / "setup.py").write_text("raise SystemExit('no compiler')\n")
    monkeypatch.setattr(startup, "ROOT", tmp_path)
    with pytest.raises(startup.BuildFailed, match="no compiler"):
        startup.build_seconds()


@pytest.mark.parametrize("captured", [False, True], ids=["pass by pass", "in rounds"])
def test_chains_are_replayed(monkeypatch, captured):
    chain = program("bench_gpu.chain")
    if captured:
        monkeypatch.setattr(chain, "replay", partial(chain.replay_captured, speculation_config={"engine": "cuda"}))
    found = list(chain.chain(bench()))
    whats = {line.what for line in found}
    assert whats == {f"{name}, {data}, batch {batch} (replayed)" for data in ("HumanEval", "GSM8K")
                     for name, batch in (('["mxfp4"]', 1), ('["mxfp4", tiny]', 1), ('["mxfp4"]', 2))}
    for line in found:
        assert line.value > 0
        assert line.target is None
    speeds = {(line.what, line.contender): line.value for line in found}
    for what in whats:
        assert speeds[what, "x alone"] == pytest.approx(speeds[what, "tokens/s"] / speeds[what, "alone, tokens/s"])


def test_rows_are_spread():
    spread = program("bench_gpu.chain").spread
    assert spread(32, 4) == [0, 8, 16, 24]
    assert spread(32, 32) == spread(32, 40) == list(range(32))


def test_every_target_of_a_chain_is_measured():
    chain = program("bench_gpu.chain")
    data = {"HumanEval", "GSM8K"}
    measured = {(one.name, name, 1) for one in chain.CHAINS for name in data}
    measured |= {(chain.CHAINS[0].name, name, batch) for name in data for batch in chain.LARGE_BATCHES}
    assert set(chain.RATIO_TARGETS) <= measured
    assert {(*key, 1) for key in chain.RATE_TARGETS} <= measured
    for one in chain.CHAINS:
        for name in ("humaneval", "gsm8k"):
            assert (chain.TRACES / f"{one.trace}-{name}.json").is_file()


def test_a_replay_in_captured_rounds_from_the_shell(monkeypatch, tmp_path, capsys):
    out, shell = tmp_path / "out.jsonl", program("replay")
    on_cuda = partial(shell.replay_captured, speculation_config={"engine": "cuda"})
    monkeypatch.setattr(shell, "replay_captured", on_cuda)
    asked = ["--quick", "--device", "cpu", "--captured", "6,2", "--prompt-tokens", "9", "--json", str(out)]
    assert shell.main(asked) == 0
    alone, chain = (json.loads(line) for line in out.read_text().splitlines())
    assert (alone["fused_rounds"], chain["fused_rounds"], chain["replayed"]) == (True, True, True)
    assert chain["num_draft_tokens"] == [6, 2]
    assert chain["rescheduled"]["prompt_tokens"] == 9
    assert chain["over"]["target alone (replayed)"] > 0
    capsys.readouterr()
    assert shell.main([*asked[:4], "3"]) == 2
    assert "1 numbers and the trace 2 levels" in capsys.readouterr().err


def test_a_replay_in_captured_rounds_with_windows(monkeypatch, tmp_path):
    out, shell, windows = tmp_path / "out.jsonl", program("replay"), []
    forward = CudaDecoder.forward

    def told(self, *operands, draft_window: int = 0, **how):
        windows.append(draft_window)
        return forward(self, *operands, draft_window=draft_window, **how)

    def on_cuda(*given, speculation_config=None, **how):
        return replay_captured(*given, speculation_config={**(speculation_config or {}), "engine": "cuda"}, **how)

    monkeypatch.setattr(CudaDecoder, "forward", told)
    monkeypatch.setattr(shell, "replay_captured", on_cuda)
    asked = ["--quick", "--device", "cpu", "--captured", "6,2", "--prompt-tokens", "200", "--draft-window", "0,16"]
    assert shell.main([*asked, "--json", str(out)]) == 0
    alone, whole, part = (json.loads(line) for line in out.read_text().splitlines())
    assert (alone["fused_rounds"], whole["fused_rounds"], part["fused_rounds"]) == (True, True, True)
    assert part["contender"].endswith("window 16 (replayed)")
    assert whole["tokens_per_pass"] == part["tokens_per_pass"] > 1
    assert set(windows) == {0, 16}


def test_a_replay_of_long_prompts_with_windows(tmp_path, capsys):
    out, shell = tmp_path / "out.jsonl", program("replay")
    asked = ["--quick", "--device", "cpu", "--prompt-tokens", "200", "--draft-window", "0,16", "--json", str(out)]
    assert shell.main(asked) == 0
    alone, whole, part = (json.loads(line) for line in out.read_text().splitlines())
    assert [line["contender"].split("]")[-1] for line in (whole, part)] == [
        ", window none (replayed)", ", window 16 (replayed)"]  # fmt: skip
    assert alone["tokens_per_pass"] == 1.0
    assert whole["tokens_per_pass"] == part["tokens_per_pass"] > 1.0
    for wrong in ("0,x", "-1", ""):
        with pytest.raises(SystemExit):
            shell.parse(["--quick", "--draft-window", wrong])
        assert "no list of numbers of tokens" in capsys.readouterr().err
