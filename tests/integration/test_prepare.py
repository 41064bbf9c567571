"""Does a chain over a prepared BF16 target return exactly what that target alone returns, and who runs when?"""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from frequencies import check_sampled_frequencies
from models import near, prompts, tiny
from transformers import TextIteratorStreamer
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

import hf_mlspec
from hf_mlspec.nn.state import is_prepared
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = [
    pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built"),
    pytest.mark.usefixtures("nothing_said_yet"),
]

OPTIONS = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
ONE_ROW = prompts([9])
BATCHES = {"one row": ONE_ROW, "four ragged rows": prompts([3, 17, 1, 9])}


@pytest.fixture
def target():
    return tiny(seed=2, dtype=torch.bfloat16)


@pytest.fixture
def draft(target):
    return near(target, 0.05)


def chains(draft) -> dict[str, list]:
    return {
        "draft": [draft],
        "mxfp4": ["mxfp4"],
        "mxfp4, draft": ["mxfp4", draft],
        "mxfp4, early_exit": ["mxfp4", "early_exit:1"],
        "draft, prompt_lookup": [draft, "prompt_lookup"],
    }


CHAINS = list(chains(None))


@pytest.mark.parametrize("inputs", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "phi3"])
def test_greedy_ids_are_those_of_the_prepared_target_alone(kind, chain, inputs):
    target = tiny(kind, seed=2, dtype=torch.bfloat16)
    levels = chains(near(target, 0.05))[chain]
    alone = target.generate(**inputs, **OPTIONS, assistant_models=[])
    out = target.generate(**inputs, **OPTIONS, assistant_models=levels)
    assert torch.equal(out, alone)
    stats = hf_mlspec.last_stats(target)
    assert stats.levels[0].accepted > 0
    hf_mlspec.prepare(target)
    assert torch.equal(target.generate(**inputs, **OPTIONS), alone)


@pytest.mark.parametrize("inputs", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("chain", CHAINS)
def test_scores_and_logits_are_the_same_bits(target, draft, chain, inputs):
    asked = {**OPTIONS, "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
             "repetition_penalty": 1.3}  # fmt: skip
    alone = target.generate(**inputs, **asked, assistant_models=[])
    out = target.generate(**inputs, **asked, assistant_models=chains(draft)[chain])
    assert torch.equal(out.sequences, alone.sequences)
    for name in ("scores", "logits"):
        assert len(out[name]) == len(alone[name]) == 40
        assert all(torch.equal(a, b) for a, b in zip(out[name], alone[name], strict=True))
    assert not torch.equal(out.scores[0], out.logits[0])


def test_a_row_is_the_same_alone_and_in_a_batch(target):
    inputs = BATCHES["four ragged rows"]
    rows = target.generate(**inputs, **OPTIONS, assistant_models=["mxfp4"])[:, 17:]
    for row, ids, mask in zip(rows, inputs["input_ids"], inputs["attention_mask"].bool(), strict=True):
        prompt = ids[mask][None]
        alone = target.generate(prompt, attention_mask=torch.ones_like(prompt), **OPTIONS, assistant_models=[])
        assert torch.equal(alone[0, prompt.shape[1] :], row)


@pytest.mark.parametrize("chain", CHAINS)
def test_a_sampled_chain_repeats_and_draws_what_the_target_may(target, draft, chain):
    """With top_k=1 the only token there is; with a seed the same text again."""
    inputs, levels = BATCHES["four ragged rows"], chains(draft)[chain]
    alone = target.generate(**inputs, **OPTIONS, assistant_models=[])
    narrow = {**OPTIONS, "do_sample": True, "top_k": 1}
    assert torch.equal(target.generate(**inputs, **narrow, assistant_models=levels), alone)
    texts = []
    for _ in range(2):
        torch.manual_seed(5)
        texts.append(target.generate(**inputs, **{**OPTIONS, "do_sample": True}, assistant_models=levels))
    assert torch.equal(*texts)
    assert not torch.equal(texts[0], alone)


def test_sampled_frequencies_are_the_targets(target, draft):
    """First tokens, drafted by a chain that keeps its own caches, against the probabilities of the target alone."""
    stats = check_sampled_frequencies(target, [draft, near(draft, 0.1)])
    assert stats.levels[0].drafted >= 2000


@pytest.mark.parametrize("levels", ["draft", "mxfp4, draft", "draft, prompt_lookup"])
@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_a_draft_whose_rotation_changes_drafts_past_that_length(target, rope_type, levels, runners):
    """Rotary tables of a compiled decoder end where a longer row would turn all its keys anew."""
    rope = {"rope_type": rope_type, "rope_theta": 10000.0}
    rope |= {"factor": 4.0} if rope_type == "dynamic" else {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    bounds = {"max_position_embeddings": 32} if rope_type == "dynamic" else {"original_max_position_embeddings": 32}
    draft = tiny("phi3" if rope_type == "longrope" else "llama", seed=2, dtype=torch.bfloat16, rope_parameters=rope,
                 **bounds)  # fmt: skip
    asked = {**ONE_ROW, **OPTIONS, "max_new_tokens": 80}
    alone = target.generate(**asked, assistant_models=[])
    assert torch.equal(target.generate(**asked, assistant_models=chains(draft)[levels]), alone)
    assert set(runners) == {"CpuEngine"}
    assert hf_mlspec.last_stats(target).levels[0].drafted > 0


def test_prepare_false_runs_module_by_module(target, runners):
    inputs = BATCHES["one row"]
    target.generate(**inputs, **OPTIONS, assistant_models=["mxfp4"], speculation_config={"prepare": False})
    assert runners == ["ModuleEngine", "ModuleEngine"]
    runners.clear()
    target.generate(**inputs, **OPTIONS, assistant_models=["mxfp4"])
    assert runners == ["CpuEngine", "CpuEngine"]
    assert not is_prepared(target)
    runners.clear()
    target.generate(**inputs, **OPTIONS)
    assert runners == []


def test_prepare_and_restore_switch_plain_generate(target, runners, caplog):
    inputs = BATCHES["four ragged rows"]
    stock = target.generate(**inputs, **OPTIONS)
    assert hf_mlspec.prepare(target) is target
    assert torch.equal(target.generate(**inputs, **OPTIONS), target.generate(**inputs, **OPTIONS, assistant_models=[]))
    assert runners == ["CpuEngine"] * 2
    target.generate(**inputs, **OPTIONS, assistant_models=[], speculation_config={"prepare": False})
    assert runners == ["CpuEngine"] * 3  # prepared by hand counts
    hf_mlspec.restore(target)
    assert torch.equal(target.generate(**inputs, **OPTIONS), stock)
    assert runners == ["CpuEngine"] * 3
    assert not caplog.records


class Reseeded(UnbatchedClassifierFreeGuidanceLogitsProcessor):
    """Stands for any processor with a state of its own."""

    def __init__(self): ...

    def __call__(self, ids, scores):
        return scores


LONG = {"max_new_tokens": 80}
HIDDEN = {**prompts([9]), "position_ids": torch.arange(2, 11)[None]}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"num_beams": 2}, "num_beams is 2"),
        ({"use_cache": False}, "use_cache is False"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions was given"),
        ({"cache_implementation": "static"}, "cache_implementation was given"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens was given"),
        (HIDDEN, "position_ids was given"),
        ({"logits_processor": [Reseeded()]}, "Reseeded keeps state between tokens"),
        (LONG, r"exceed the 64 positions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_runs_in_the_stock_loop_and_says_why_once(target, asked, words, caplog):
    target.config._attn_implementation = "eager"  # for attentions
    target.config.max_position_embeddings = 64
    asked = {**BATCHES["one row"], **OPTIONS, **asked}
    expected = target.generate(**copy.deepcopy(asked))
    hf_mlspec.prepare(target)
    got = [target.generate(**copy.deepcopy(asked)) for _ in range(2)]
    for out in got:
        ids = out if isinstance(out, torch.Tensor) else out.sequences
        assert torch.equal(ids, expected if isinstance(expected, torch.Tensor) else expected.sequences)
    said = [r.getMessage() for r in caplog.records if "transformers' own loop" in r.getMessage()]
    assert len(said) == 1
    assert words in said[0]
    assert "LlamaForCausalLM" in said[0]


def test_a_streamer_and_stop_strings_are_served(target, runners, caplog):
    from models import letters

    tokenizer = letters()
    hf_mlspec.prepare(target)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    out = target.generate(**BATCHES["one row"], **OPTIONS, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(out[0, 9:])
    target.generate(**BATCHES["one row"], **OPTIONS, tokenizer=tokenizer, stop_strings=["q"])
    assert runners == ["CpuEngine"] * 2
    assert not caplog.records


def test_no_message_for_what_was_not_asked(target, draft, caplog):
    with caplog.at_level(logging.INFO, "hf_mlspec"):
        target.generate(**BATCHES["one row"], **OPTIONS, assistant_models=["mxfp4", draft])
        target.generate(**BATCHES["one row"], **OPTIONS, num_beams=2)
    assert [r.getMessage() for r in caplog.records if r.name.startswith("hf_mlspec")] == []
