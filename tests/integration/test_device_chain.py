"""Do captured rounds return what the target alone returns? On the CPU a round runs as it would be captured.

The engine of GPUs, over the same ops: `prepare(model, engine="cuda")` lets models on the CPU run on it. What a round
enqueues, how its lengths move, how rows leave and buckets shrink is all here; only graphs and kernels are not.
"""

from __future__ import annotations

import pytest
import torch
from device_path import OPTIONS, draft, on_cuda, rounds, stepwise, target
from frequencies import check_sampled_frequencies
from models import EOS, near, packed, prompts, tiny

import hf_mlspec
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

__all__ = ["draft", "rounds", "target"]
pytestmark = [
    pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built"),
    pytest.mark.usefixtures("nothing_said_yet"),
]

BATCHES = {"one row": prompts([9]), "three": prompts([3, 17, 1]), "eight": prompts([3, 17, 1, 9, 9, 2, 30, 5])}


def chains(draft) -> dict[str, list]:
    return {
        "alone": [],
        "draft": [draft],
        "mxfp4": ["mxfp4"],
        "early exit": ["early_exit:1"],
        "mxfp4, draft": ["mxfp4", draft],
        "mxfp4, early exit": ["mxfp4", "early_exit:1"],
        "draft, early exit of it": [draft, hf_mlspec.early_exit(draft, 1) if draft else None],
        "mxfp4, draft, draft": ["mxfp4", draft, draft],
    }


CHAINS = list(chains(None))
CONFIGS = {
    "defaults": {},
    "never stops": {"num_draft_tokens": 3, "confidence_threshold": 0.0},
    "stops early": {"num_draft_tokens": 4, "confidence_threshold": 0.9},
    "own caches": {"num_draft_tokens": 2, "confidence_threshold": 0.0, "shared_cache": False},
}


# Every batch with the defaults and every config with three rows; the other pairs are among the slow tests.
PAIRS = [pytest.param(config, batch, marks=[] if config == "defaults" or batch == "three" else [pytest.mark.slow])
         for config in CONFIGS for batch in BATCHES]


@pytest.mark.parametrize(("config", "batch"), PAIRS)
@pytest.mark.parametrize("chain", CHAINS)
def test_greedy_ids_are_those_of_the_target_alone(rounds, target, draft, chain, config, batch):
    inputs = BATCHES[batch]
    alone = stepwise(target, inputs)
    levels = chains(draft)[chain]
    out = target.generate(**inputs, **OPTIONS, assistant_models=levels, speculation_config=CONFIGS[config])
    assert torch.equal(out, alone)
    assert rounds
    stats = hf_mlspec.last_stats(target)
    assert stats.new_tokens == alone[:, inputs["input_ids"].shape[1] :].numel()
    assert all(level.accepted > 0 for level in stats.levels)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3"])
def test_architectures(rounds, kind):
    target, inputs = on_cuda(tiny(kind, seed=2, dtype=torch.bfloat16)), BATCHES["three"]
    alone = stepwise(target, inputs)
    out = target.generate(**inputs, **OPTIONS, assistant_models=["mxfp4", near(target, 0.05)])
    assert torch.equal(out, alone)
    assert rounds


@pytest.mark.parametrize("chain", CHAINS)
def test_ids_are_those_of_the_engine_of_the_cpu(rounds, chain):
    """In float32, where both round alike."""
    target, inputs = tiny(seed=2, dtype=torch.float32), BATCHES["three"]
    draft = near(target, 0.05)
    asked = {**inputs, **OPTIONS, "assistant_models": chains(draft)[chain]}
    out = target.generate(**asked, speculation_config={"engine": "cuda"})
    assert rounds
    assert torch.equal(out, target.generate(**asked, speculation_config={"engine": "cpu"}))


QSPEC = [["w4a8"], ["w4a4"], ["qspec"], ["w4a8", "w4a4"], ["w4a8", "early_exit:1"]]


@pytest.mark.parametrize("levels", QSPEC, ids=str)
@pytest.mark.parametrize("inputs", BATCHES.values(), ids=BATCHES)
def test_a_packed_target_drafts_for_itself(rounds, levels, inputs):
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    target = on_cuda(packed(tiny(seed=2, dtype=torch.bfloat16, **shape), "int4"))
    alone = stepwise(target, inputs)
    assert torch.equal(target.generate(**inputs, **OPTIONS, assistant_models=levels), alone)
    assert rounds
    assert all(level.accepted > 0 for level in hf_mlspec.last_stats(target).levels)


def test_a_draft_that_is_the_target_is_always_right(rounds, target):
    """Its own cache lacks nothing when a round begins: neither after full acceptance, nor at depth two."""
    twin, other = near(target, 0.0), near(target, 0.0)
    config = {"num_draft_tokens": [8, 3], "confidence_threshold": 0.0}
    for levels, given in (([twin], 3), ([twin, other], config["num_draft_tokens"])):
        target.generate(**BATCHES["three"], **OPTIONS, assistant_models=levels,
                        speculation_config={**config, "num_draft_tokens": given})  # fmt: skip
        for level in hf_mlspec.last_stats(target).levels:
            assert level.accepted == level.drafted > 0


def test_levels_draft_what_they_draft_step_by_step(rounds, target, draft):
    """Thresholds, limits near the end of a row and what each level accepts, with one inner round for a draft."""
    config = {"num_draft_tokens": [4, 4], "confidence_threshold": [0.3, 0.5]}
    for levels, given in ((["mxfp4"], {"num_draft_tokens": 5, "confidence_threshold": 0.5}), ([draft], {}),
                          ([draft], {"num_draft_tokens": 3, "confidence_threshold": 0.7})):  # fmt: skip
        counts = []
        for run in (stepwise, lambda model, inputs, levels, **more: model.generate(
            **inputs, **OPTIONS, assistant_models=levels, **more
        )):  # fmt: skip
            run(target, BATCHES["three"], levels, speculation_config=given)
            counts.append([(one.drafted, one.accepted) for one in hf_mlspec.last_stats(target).levels])
        # The ordinary loop checks the prompt before a level in the target's cache drafts: its first round is another.
        if levels != ["mxfp4"]:
            assert counts[0] == counts[1]
        assert all(0 < accepted <= drafted for drafted, accepted in counts[1])
    target.generate(**BATCHES["three"], **OPTIONS, assistant_models=["mxfp4", draft], speculation_config=config)
    assert rounds


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 8, 9, 10])
@pytest.mark.parametrize("chain", CHAINS)
def test_rows_end_at_their_last_token(rounds, target, draft, chain, new_tokens):
    inputs = BATCHES["three"]
    alone = stepwise(target, inputs, max_new_tokens=new_tokens)
    asked = {**OPTIONS, "max_new_tokens": new_tokens}
    out = target.generate(**inputs, **asked, assistant_models=chains(draft)[chain])
    assert torch.equal(out, alone)
    assert out.shape[1] == 17 + new_tokens


@pytest.mark.parametrize("chain", CHAINS)
def test_rows_end_with_the_sequence_and_buckets_shrink(rounds, target, draft, chain):
    """An end may sit inside a block; rows that go on move together when half of the places are idle."""
    inputs = BATCHES["eight"]
    rows = stepwise(target, inputs)[:, 30:].tolist()
    ends = sorted({row[place] for row, place in zip(rows, (1, 5, 9, 11, 17, 22), strict=False)})
    asked = {"eos_token_id": ends, "pad_token_id": 0}
    alone = stepwise(target, inputs, **asked)
    rounds.clear()
    out = target.generate(**inputs, **{**OPTIONS, **asked}, assistant_models=chains(draft)[chain])
    assert torch.equal(out, alone)
    assert rounds[0] == 8
    assert rounds[-1] < 8
    assert rounds == sorted(rounds, reverse=True)
    if chain == "alone":
        assert hf_mlspec.last_stats(target).tokens_per_target_pass == 1.0


def test_a_stop_criterion_ends_a_row_inside_a_block(rounds, target):
    inputs = prompts([9])
    text = stepwise(target, inputs)[0].tolist()

    class Stop:
        def __call__(self, ids, scores, **_):
            return torch.tensor([ids.shape[1] >= 14])

    out = target.generate(**inputs, **OPTIONS, stopping_criteria=[Stop()], assistant_models=["mxfp4"])
    assert out[0].tolist() == text[:14]


SAMPLERS = {
    "plain": {},
    "top_k": {"top_k": 12, "temperature": 1.5},
    "top_p": {"top_p": 0.7, "top_k": 0},
    "min_p": {"min_p": 0.05, "top_k": 0},
    "typical": {"typical_p": 0.6, "top_k": 0},
    "epsilon": {"epsilon_cutoff": 0.01, "top_k": 0},
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("chain", ["alone", "mxfp4", "mxfp4, draft"])
def test_sampled_ids_are_those_of_the_target_alone_with_the_same_seed(rounds, target, draft, chain, sampler):
    inputs = BATCHES["three"]
    asked = {**OPTIONS, "do_sample": True, **SAMPLERS[sampler]}
    texts = []
    for levels, seed in (([], 5), (chains(draft)[chain], 5), (chains(draft)[chain], 6)):
        torch.manual_seed(seed)
        texts.append(target.generate(**inputs, **asked, assistant_models=levels).tolist())
    assert texts[0] == texts[1] != texts[2]
    assert all(level.accepted > 0 for level in hf_mlspec.last_stats(target).levels)
    assert len(rounds) > 3


def test_sampled_frequencies_are_the_targets(rounds, target, draft):
    check_sampled_frequencies(target, [draft])
    assert rounds


def test_end_of_sequence_of_the_model_itself(rounds, target, draft):
    """Without eos_token_id=None the model's own end counts."""
    inputs = prompts([4, 9, 2, 6])
    asked = {"max_new_tokens": 60, "do_sample": False}
    alone = stepwise(target, inputs, **{**asked, "eos_token_id": EOS})
    assert torch.equal(target.generate(**inputs, **asked, assistant_models=[draft]), alone)


@pytest.mark.parametrize(("lengths", "new_tokens"), [
    ([1, 1, 1], 1), ([1, 1, 1], 2), ([1], 30), ([1, 1, 1], 30), ([2, 1], 30),
    *(pytest.param(lengths, count, marks=pytest.mark.slow) for lengths in ([1], [2, 1]) for count in (1, 2))], ids=str)
@pytest.mark.parametrize("chain", CHAINS)
def test_prompts_of_one_token(rounds, target, draft, chain, lengths, new_tokens):
    inputs, asked = prompts(lengths), {**OPTIONS, "max_new_tokens": new_tokens}
    out = target.generate(**inputs, **asked, assistant_models=chains(draft)[chain])
    assert torch.equal(out, stepwise(target, inputs, **asked))
    assert rounds


def test_more_rows_than_the_largest_bucket(rounds, target, draft):
    inputs = prompts([3, 9, 1] * 30)
    rows = stepwise(target, inputs)[:, 9:].tolist()
    ends = sorted({rows[row][place] for row, place in ((0, 2), (1, 9), (2, 20), (40, 30))})
    asked = {"eos_token_id": ends, "pad_token_id": 0}
    alone = stepwise(target, inputs, **asked)
    assert torch.equal(target.generate(**inputs, **{**OPTIONS, **asked}, assistant_models=["mxfp4", draft]), alone)
    assert rounds[0] == 128
    assert rounds[-1] <= 64


def test_rows_of_one_prompt_are_sampled_apart_and_the_seed_repeats_them(rounds, target, draft):
    asked = {**prompts([5]), **OPTIONS, "do_sample": True, "temperature": 2.0, "num_return_sequences": 3}
    torch.manual_seed(1)
    first = target.generate(**asked, assistant_models=[draft])
    other = target.generate(**asked, assistant_models=[draft])
    torch.manual_seed(1)
    again = target.generate(**asked, assistant_models=["mxfp4", draft])
    assert len({tuple(row) for row in first.tolist()}) == 3
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert rounds


@pytest.mark.parametrize("chain", ["draft", "mxfp4, draft", "mxfp4, draft, draft"])
def test_sampled_rows_that_end_move_and_grow_keep_their_noise(rounds, target, draft, chain, monkeypatch):
    inputs = prompts([250, 3, 240, 9, 9, 2, 30, 5])
    asked = {"max_new_tokens": 90, "do_sample": True, "top_k": 20, "temperature": 1.3, "eos_token_id": [5, 9]}
    texts = []
    for levels, first in (([], 4096), (chains(draft)[chain], 4)):
        monkeypatch.setattr("hf_mlspec.integration.capture._FIRST_NEW_TOKENS", first)
        torch.manual_seed(3)
        texts.append(target.generate(**inputs, **asked, pad_token_id=0, assistant_models=levels))
    assert torch.equal(*texts)
    assert rounds[0] == 8 > rounds[-1]


def test_a_chain_does_not_take_over_the_settings_of_the_call_before(rounds, target, draft):
    inputs = prompts([5, 3])
    for temperature in (0.5, 2.0, 0.5):
        asked, texts = {**OPTIONS, "do_sample": True, "temperature": temperature}, []
        for levels in ([draft], []):
            torch.manual_seed(3)
            texts.append(target.generate(**inputs, **asked, assistant_models=levels))
        assert torch.equal(*texts)
    assert rounds
