"""Do recorded rounds agree with the counts of generate, and does a replay take as many passes on any shape?"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from models import EOS, near, packed, prompts, tiny

import hf_mlspec
from hf_mlspec.evaluation import Journal, Trace, level_acceptance, read_trace, record_trace, replay, write_trace
from hf_mlspec.evaluation import traces as recording
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.drafters.checked import CheckedDrafter
from hf_mlspec.speculation.traces.file import trace_from_dict, trace_to_dict

LENGTHS = [5, 3, 9]


def rows_of(lengths=LENGTHS):
    inputs = prompts(lengths)
    return [line[flags.bool()].tolist() for line, flags in
            zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]


@pytest.fixture(scope="module")
def target():
    return tiny(dtype=torch.float32)


@pytest.fixture(scope="module")
def draft(target):
    return near(target, 0.03)


def test_what_levels_saw_is_recorded(target, draft, tmp_path):
    if not has_compiled_decoder():
        pytest.skip("levels that run module by module see all")
    config = {"draft_window": 20, "draft_cache": "int8", "num_draft_tokens": 3}
    trace = record_trace(target, None, rows_of(), ["mxfp4", draft], max_new_tokens=4, speculation_config=config)
    assert [(level.draft_window, level.draft_cache) for level in trace.levels] == [(20, None), (20, "int8")]
    write_trace(trace, tmp_path / "t.json")
    assert read_trace(tmp_path / "t.json") == trace
    old = trace_to_dict(trace)
    for level in old["levels"]:  # as earlier versions wrote it
        del level["draft_window"], level["draft_cache"]
    assert [(level.draft_window, level.draft_cache) for level in trace_from_dict(old).levels] == [(0, None)] * 2


CHAINS = {
    "a cast": (lambda draft: ["mxfp4"], {}),
    "a draft": (lambda draft: [draft], {"num_draft_tokens": 5}),
    "two levels": (lambda draft: ["mxfp4", draft], {"num_draft_tokens": [6, 3], "confidence_threshold": [0.3, 0.2]}),
    "two models": (lambda draft: [draft, near(draft, 0.05)], {"confidence_threshold": 0.0}),
    "a lookup": (lambda draft: ["prompt_lookup"], {}),
    "three levels": (lambda draft: ["mxfp4", draft, "ngram"], {"num_draft_tokens": [7, 4, 2]}),
    "module by module": (lambda draft: ["mxfp4", draft], {"prepare": False}),
    "own caches": (lambda draft: ["mxfp4", draft], {"shared_cache": False}),
}


@pytest.fixture(params=CHAINS, scope="module")
def recorded(request, target, draft):
    """(levels, config, the trace of a batch of three with generate's counts for the same call)."""
    build, config = CHAINS[request.param]
    levels = build(draft)
    hf_mlspec.clear(target)
    trace = record_trace(target, None, rows_of(), levels, max_new_tokens=24, batch_size=3, speculation_config=config)
    return levels, config, trace, hf_mlspec.last_stats(target)


def test_counts_are_those_of_last_stats(recorded):
    _, _, trace, stats = recorded
    assert (trace.new_tokens, trace.passes) == (stats.new_tokens, stats.row_passes)
    found = level_acceptance(trace)
    assert [(one.level, one.drafted, one.accepted, one.tested) for one in found] == [
        (one.name, one.drafted, one.accepted, one.tested) for one in stats.levels]
    assert found[0].tokens_per_pass == stats.tokens_per_target_pass
    for one in found:
        assert sum(tested for tested, _ in one.by_position) == one.tested
        assert sum(accepted for _, accepted in one.by_position) == one.accepted
        assert sum(length * count for length, count in enumerate(one.draft_lengths)) == one.drafted


def test_rows_are_the_prompts(recorded):
    trace = recorded[2]
    assert [row.prompt_tokens for row in trace.rows] == LENGTHS
    assert trace.prompts_sha256 == recording.prompts_hash(rows_of())
    assert trace.target.hidden == 32
    assert trace.target.weights == "float32"


def test_a_replay_takes_the_passes_of_the_real_chain(recorded, target):
    levels, config, trace, stats = recorded
    kept = {name: value for name, value in config.items() if name in ("prepare", "shared_cache")}
    found = replay(target, trace, levels, batch_size=3, speculation_config=kept)
    assert found.tokens == stats.new_tokens
    assert (found.stats.target_passes, found.stats.row_passes) == (stats.target_passes, stats.row_passes)
    for again, was in zip(found.stats.levels, stats.levels, strict=True):
        assert again.name == f"{was.name} (replayed)"
        for count in ("drafted", "accepted", "tested", "forwards"):
            assert getattr(again, count) == getattr(was, count), count
    assert 0 < found.decode_seconds < found.seconds


def test_recording_changes_no_token(target, draft):
    inputs, levels = prompts(LENGTHS), ["mxfp4", draft]
    heard = []

    def generated(watch):
        options = {**inputs, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
        call = recording.prepare_call(target, options)
        call.levels, call.watch = levels, watch
        return recording.run(target, call)

    def watch(chain, emit):
        recorder = recording.TraceRecorder()
        heard.append(recorder)
        return recorder.watch(chain.target, chain.drafter, LENGTHS, emit)

    plain = target.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=0, assistant_models=levels)
    assert torch.equal(generated(None), plain)
    assert torch.equal(generated(watch), plain)
    assert sum(row.new_tokens for row in heard[0].rows()) > 20


@pytest.mark.skipif(not has_compiled_decoder(), reason="no compiled kernels: no rounds inside one call")
def test_rounds_inside_one_call_are_those_step_by_step(target, draft, monkeypatch):
    settings = {"max_new_tokens": 24, "batch_size": 3, "speculation_config": {"confidence_threshold": [0.3, 0.2]}}
    levels, ways = ["mxfp4", draft], []
    run_fused = CheckedDrafter._propose_in_engine
    monkeypatch.setattr(CheckedDrafter, "_propose_in_engine", lambda *args: ways.append(1) or run_fused(*args))
    fused = record_trace(target, None, rows_of(), levels, **settings)
    assert ways
    monkeypatch.setattr(CheckedDrafter, "_runs_in_engine", lambda *args: False)
    assert record_trace(target, None, rows_of(), levels, **settings).rows == fused.rows


def test_an_end_of_sequence_ends_a_row_inside_a_round(draft):
    """Every token is an end, so the first of a round's settled tokens is the last that counts."""
    target = tiny(dtype=torch.float32)
    target.generation_config.eos_token_id = [EOS, *range(3, 64)]
    trace = record_trace(target, None, rows_of(), [draft], max_new_tokens=9, speculation_config={
        "confidence_threshold": 0.0})
    assert [row.new_tokens for row in trace.rows] == [1, 1, 1]
    assert all(len(row.rounds) == 1 for row in trace.rows)
    assert max(row.rounds[0].settled for row in trace.rows) > 1
    assert replay(target, trace, [draft], batch_size=3).tokens == 3


@pytest.fixture(scope="module")
def two_levels(target, draft):
    return record_trace(target, None, rows_of(), ["mxfp4", draft], max_new_tokens=24, batch_size=3, data="words")


def test_another_shape_repeats_the_rounds(two_levels):
    """Other sizes, other vocabularies, a level in a cache of its own."""
    big = tiny("qwen3", seed=5, dtype=torch.float32, vocab_size=200, num_hidden_layers=3)
    small = tiny("qwen2", seed=6, dtype=torch.float32, vocab_size=90, hidden_size=64)
    middle = tiny("mistral", seed=7, dtype=torch.float32, vocab_size=130)
    for levels in (["mxfp4", small], [middle, small], [small, middle]):
        found = replay(big, two_levels, levels, batch_size=2)
        counts = [(one.drafted, one.accepted) for one in level_acceptance(two_levels)]
        assert [(one.drafted, one.accepted) for one in found.stats.levels] == counts
        assert found.stats.row_passes == two_levels.passes


def test_one_model_at_two_precisions_repeats_the_rounds(draft, target):
    trace = record_trace(target, None, rows_of(), [draft], max_new_tokens=12)
    model = packed(tiny(seed=9, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"row 0 of the trace drafts before .*'shared_cache': False"):
        replay(model, trace, ["w4a8"])
    found = replay(model, trace, ["w4a8"], speculation_config={"shared_cache": False})
    assert found.stats.levels[0].accepted == level_acceptance(trace)[0].accepted


def test_the_target_alone_is_replayed_a_token_a_pass(two_levels, target):
    found = replay(target, two_levels.alone(), [], batch_size=3)
    assert found.tokens == found.stats.row_passes == two_levels.new_tokens
    assert found.stats.levels == []


def test_fewer_tokens_and_other_rows(two_levels, target, draft):
    found = replay(target, two_levels, ["mxfp4", draft], batch_size=2, rows=[2, 0, 2], max_new_tokens=5, name="x")
    assert (found.tokens, found.rows) == (15, 3)
    said = found.to_dict()
    assert (said["name"], said["data"]) == ("x (replayed)", "words")
    assert (said["replayed"], said["fused_rounds"]) == (True, False)
    assert said["tokens_per_second"] > 0


def test_finished_batches_are_not_decoded_again(target, draft, tmp_path, monkeypatch):
    def once(**more):
        with Journal(tmp_path / "rows.jsonl", {"a": 1}) as journal:
            return record_trace(target, None, rows_of(), [draft], max_new_tokens=8, journal=journal, **more)

    decode, decoded = recording.run, []

    def failing(model, call):
        if len(decoded) == 2:
            raise KeyboardInterrupt
        decoded.append(len(call.input_ids))
        return decode(model, call)

    monkeypatch.setattr(recording, "run", failing)
    with pytest.raises(KeyboardInterrupt):
        once()
    monkeypatch.setattr(recording, "run", lambda model, call: decoded.append(3) or decode(model, call))
    trace = once()
    assert decoded == [1, 1, 3]
    assert trace == record_trace(target, None, rows_of(), [draft], max_new_tokens=8)
    assert once() == trace  # all from the journal


def refusals(target, draft, trace):
    short = tiny(seed=3, dtype=torch.float32, max_position_embeddings=20)
    levels, lengths = ["mxfp4", draft], {"num_draft_tokens": 3}
    return {
        "one level": (r"the trace has 2 levels \(mxfp4, \w+\), the replay is given 1", (target, trace, ["mxfp4"]), {}),
        "no level": ("the replay is given 0", (target, trace, []), {}),
        "levels of none": ("has 0 levels", (target, trace.alone(), levels), {}),
        "row 3": ("3 rows, numbered from 0; there is no row 3", (target, trace, levels), {"rows": [3]}),
        "batch": ("a batch of 4 needs as many rows, and 3", (target, trace, levels), {"batch_size": 4}),
        "no rows": ("a batch of 1 needs as many rows, and 0", (target, trace, levels), {"rows": []}),
        "batch 0": ("batch_size is 0", (target, trace, levels), {"batch_size": 0}),
        "25 tokens": ("was recorded with 24; use 1 to that many", (target, trace, levels), {"max_new_tokens": 25}),
        "0 tokens": ("max_new_tokens is 0", (target, trace, levels), {"max_new_tokens": 0}),
        "short target": ("and the target has 20", (short, trace, levels), {}),
        "short level": (r"needs 3\d positions .* and LlamaForCausalLM has 20", (target, trace, ["mxfp4", short]), {}),
        "lengths": ("are those of the trace", (target, trace, levels), {"speculation_config": lengths}),
        "a word": ("neither an existing folder nor a known word", (target, trace, ["mxfp4", "nonsense"]), {}),
    }


def test_what_cannot_be_replayed_is_refused(target, draft, two_levels, monkeypatch):
    monkeypatch.setattr("hf_mlspec.evaluation.traces_replay.decode", lambda *args, **more: pytest.fail("decoded"))
    for words, given, more in refusals(target, draft, two_levels).values():
        with pytest.raises(ValueError, match=words):
            replay(*given, **more)


@pytest.mark.parametrize(("given", "words"), [
    ({"prompts": []}, "no prompts to record on"),
    ({"prompts": "text"}, "no prompts to record on"),
    ({"prompts": [[1], []]}, "prompt 1 of 2 has no tokens"),
    ({"prompts": ["text"]}, "tokenizer is None"),
    ({"prompts": [[5] * 500]}, "prompt 0 of 1: 500 prompt tokens"),
    ({"batch_size": 0}, "batch_size is 0"),
    ({"max_new_tokens": True}, "max_new_tokens is True"),
])
def test_what_cannot_be_recorded_is_refused(given, words, target, monkeypatch):
    monkeypatch.setattr(recording, "run", lambda *args: pytest.fail("decoded"))
    asked = {"prompts": [[5]], "max_new_tokens": 24, **given}
    with pytest.raises(ValueError, match=words):
        record_trace(target, None, asked.pop("prompts"), ["mxfp4"], **asked)


def test_inner_rounds_of_another_vocabulary_are_refused(target):
    from models import letters

    other = tiny(seed=4, dtype=torch.float32, vocab_size=80)
    texts = {"assistant_tokenizers": [letters(16), None], "max_new_tokens": 6}
    with pytest.raises(ValueError, match="record it as the last level"):
        record_trace(target, letters(), ["a word"], [other, "prompt_lookup"], **texts)
    one = record_trace(target, letters(), ["a word"], [other], max_new_tokens=6, assistant_tokenizers=[letters(16)])
    assert one.new_tokens == 6


def test_a_trace_is_the_same_from_its_file(two_levels, tmp_path):
    write_trace(two_levels, tmp_path / "t.json")
    again = read_trace(tmp_path / "t.json")
    assert isinstance(again, Trace)
    assert again == two_levels


DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")


def test_the_documented_example_is_a_trace():
    text = re.search(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)[1]
    trace = trace_from_dict(json.loads(text))
    assert trace.prompts_sha256 == recording.prompts_hash([[1, 2, 3, 4, 5, 6]])
    assert [(one.drafted, one.accepted) for one in level_acceptance(trace)] == [(11, 9), (9, 8)]
    keys = re.findall(r"^\| (`.*?) \|", DOCUMENT.partition("### Example")[0], re.MULTILINE)
    named = {name for key in keys for name in re.findall(r"`(\w+)`", key)}
    assert named == set(trace_to_dict(trace)) - {"schema"}


def test_the_documented_program_runs(capsys):
    exec(compile(re.search(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)[1], "docs/traces.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "mxfp4 " in shown
    assert "(replayed)" in shown
