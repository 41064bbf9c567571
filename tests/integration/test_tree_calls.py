"""Do calls with trees write what the target alone writes, and is what cannot have one refused by name?"""

from __future__ import annotations

import pytest
import torch
from models import EOS, alone, letters, near, prompts, refused, tiny, together
from transformers import GPTJConfig, GPTJForCausalLM, MambaConfig, MambaForCausalLM

import hf_mlspec
from hf_mlspec import (
    ChainCandidateGenerator,
    LookupTree,
    NGram,
    PromptLookup,
    Request,
    SpeculationConfig,
    generate_stream,
)
from hf_mlspec.evaluation import record_trace
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.draft import Draft
from hf_mlspec.speculation.stats import LevelStats

compiled = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
ENGINES = ["modules", pytest.param("cpu", marks=compiled)]
TARGET = tiny(seed=2, dtype=torch.float32)
DRAFT = near(TARGET, 0.05)
COMPILED = tiny(seed=2, dtype=torch.bfloat16)
BESIDE = {"modules": (TARGET, DRAFT), "cpu": (COMPILED, near(COMPILED, 0.05))}
LEVELS = [["prompt_lookup"], ["ngram"], ["lookups"], ["draft"], ["mxfp4"], ["mxfp4", "draft"], ["mxfp4", "lookups"],
          ["early_exit:1", "draft"]]  # fmt: skip


def levels_of(words: list[str], engine: str) -> list:
    return [BESIDE[engine][1] if word == "draft" else word for word in words]


@pytest.mark.parametrize("words", LEVELS, ids="+".join)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_writes_what_the_target_alone_writes(engine, words):
    target, inputs = BESIDE[engine][0], prompts([9, 4, 13])
    until = {"max_new_tokens": 24, "eos_token_id": EOS}
    if engine == "cpu":  # whose bits are its own
        wanted = together(target, inputs, [], speculation_config={"engine": engine}, **until)
    else:
        wanted = alone(target, inputs, **until)
    how = {"tree": [3, 2], "num_draft_tokens": 4, "confidence_threshold": 0.0, "engine": engine}
    assert together(target, inputs, levels_of(words, engine), speculation_config=how, **until) == wanted
    stats = hf_mlspec.last_stats(target)
    if words[-1] == "draft":
        assert stats.levels[-1].accepted > 0


@pytest.mark.parametrize("words", [["lookups"], ["draft"], ["mxfp4", "draft"]], ids="+".join)
@pytest.mark.parametrize("engine", ENGINES)
def test_samples_with_processors_are_those_of_rows(engine, words):
    target, inputs = BESIDE[engine][0], prompts([9, 4])
    how = {"do_sample": True, "temperature": 0.8, "top_k": 12, "repetition_penalty": 1.3, "max_new_tokens": 16,
           "output_scores": True, "return_dict_in_generate": True}  # fmt: skip

    def written(levels: list, **config):
        torch.manual_seed(3)
        config = {"engine": engine, **config}
        return target.generate(**inputs, assistant_models=levels, speculation_config=config, **how)

    plain, found = written([]), written(levels_of(words, engine), tree=[2, 2], num_draft_tokens=3)
    assert torch.equal(plain.sequences, found.sequences)
    for one, other in zip(plain.scores, found.scores, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tree_accepts_more_than_its_first_branch(engine):
    target, draft = BESIDE[engine]
    draft, passes = near(tiny(seed=2, dtype=target.dtype), 0.25), []
    for tree in (None, [4, 2, 1]):
        how = {"tree": tree, "num_draft_tokens": 3, "confidence_threshold": 0.0, "engine": engine}
        together(target, prompts([8]), [draft], max_new_tokens=48, speculation_config=how)
        passes.append(hf_mlspec.last_stats(target).target_passes)
    assert passes[1] < passes[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stream_with_trees(engine):
    target, draft = BESIDE[engine]
    rows = [[5, 9, 13, 7, 21], [7, 8, 7, 8, 7], [3, 4]]
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 9, "seed": 4}
    requests = [Request(row, max_new_tokens=12, **(sampled if n == 1 else {})) for n, row in enumerate(rows)]
    for levels in ([draft], ["lookups"]):
        how = {"tree": [3, 2], "num_draft_tokens": 3, "confidence_threshold": 0.0, "engine": engine}
        found = {tuple(out.request.input_ids): out.new_tokens for out in generate_stream(
            target, requests, max_batch=2, assistant_models=levels, speculation_config=how)}
        plain = {tuple(out.request.input_ids): out.new_tokens for out in generate_stream(
            target, requests, max_batch=2, assistant_models=[], speculation_config={"engine": engine})}
        assert found == plain


def test_depth_is_that_of_the_tree_unless_a_number_is_given():
    for tree, number, depth in (([2, 2], None, 2), ([2, 2], 5, 5)):
        how = {"tree": tree, "num_draft_tokens": number, "confidence_threshold": 0.0}
        together(TARGET, prompts([9]), [DRAFT], max_new_tokens=20, speculation_config=how)
        level = hf_mlspec.last_stats(TARGET).levels[0]
        assert level.forwards >= depth


class Siblings:
    """Behind every row all tokens."""

    name = "siblings"

    def __init__(self):
        self.stats = LevelStats(self.name)

    def start(self, batch, device): ...
    def rollback(self, lengths): ...
    def select(self, keep): ...
    def admit(self, count): ...
    def replace(self, row): ...

    def propose(self, rows, limits):
        trees = [list(range(64)) if limit else [] for limit in limits]
        return Draft.trees(trees, [[-1] * len(tree) for tree in trees])


def test_a_drafter_of_ones_own_may_propose_trees():
    inputs = prompts([6, 9])
    wanted = alone(TARGET, inputs, max_new_tokens=12, eos_token_id=EOS)
    assert together(TARGET, inputs, [Siblings()], max_new_tokens=12, eos_token_id=EOS) == wanted
    stats = hf_mlspec.last_stats(TARGET)
    assert stats.target_passes <= 7  # one of all 64 is always right


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"tree": 3}, TypeError, r"tree is 3: it takes .* a list such as \[3, 2, 1\]"),
        ({"tree": []}, ValueError, r"tree is \[\]: every depth has a positive number"),
        ({"tree": [3, 0]}, ValueError, r"tree is \[3, 0\]: every depth"),
        ({"tree": [True]}, ValueError, r"tree is \[True\]: every depth"),
        ({"tree": [2.0]}, ValueError, r"tree is \[2.0\]: every depth"),
        ({"tree": [3, 2], "num_draft_tokens": 1}, ValueError, r"2 deep, and num_draft_tokens is 1: ask for 2 or more"),
        ({"tree": [3, 2], "num_draft_tokens": [9, 1]}, ValueError, r"2 deep, and num_draft_tokens is 1"),
        ({"tree": [4, 4, 4, 4]}, ValueError, r"340 tokens in all, and at most 256 are checked together"),
        ({"tree": [8], "num_draft_tokens": 40}, ValueError, r"drafts of up to 40 tokens, 320 tokens in all"),
    ],
)
def test_shapes_that_cannot_be_are_refused(config, error, words):
    with pytest.raises(error, match=words):
        SpeculationConfig(**config)
    refused(error, words, prompts([5]), TARGET, assistant_models=["lookups"], speculation_config=config)


def test_levels_that_cannot_have_a_tree_are_refused():
    how = {"speculation_config": {"tree": [2]}}
    refused(ValueError, "level siblings is a drafter of yours", prompts([5]), TARGET,
            assistant_models=[Siblings()], **how)
    other = tiny(seed=3, vocab_size=80)
    refused(ValueError, "has another vocabulary than the level above, which translates rows", prompts([5]), TARGET,
            assistant_models=[other], tokenizer=letters(), assistant_tokenizers=[letters(16)], **how)


def test_targets_that_cannot_check_a_tree_are_refused():
    how = {"assistant_models": ["lookups"], "speculation_config": {"tree": [2], "engine": "cuda"}}
    with pytest.raises(ValueError, match=r"checked by the target, which runs on engine 'cuda': .*leave tree"):
        COMPILED.generate(**prompts([5]), max_new_tokens=5, **how)


@pytest.mark.parametrize(("kind", "why"), [("gptj", "runs row by row"), ("mamba", "keeps a state")])
def test_why_a_target_goes_through_rows_alone(kind, why):
    settings = {"vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8, "n_positions": 64}
    if kind == "gptj":
        target = GPTJForCausalLM(GPTJConfig(**settings, n_inner=32)).eval()
    else:
        target = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1)).eval()
    with pytest.raises(ValueError, match=f"checked by the target, which {why}: it goes through rows alone"):
        target.generate(**prompts([5]), max_new_tokens=5, assistant_models=["lookups"],
                        speculation_config={"tree": [2]})  # fmt: skip


def test_traces_tell_of_rows():
    with pytest.raises(ValueError, match=r"tree is \[2\]: a trace tells of drafts that are rows; leave tree out"):
        record_trace(TARGET, None, [[1, 2]], ["lookups"], max_new_tokens=2, speculation_config={"tree": [2]})


    with pytest.raises(ValueError, match=r"level lookups has widths \[2\]: a trace tells of drafts that are rows"):
        record_trace(TARGET, None, [[1, 2]], [LookupTree([NGram()], [2])], max_new_tokens=2)
    with pytest.raises(ValueError, match="is to check a tree and a trace tells of drafts that are rows: draft rows"):
        record_trace(TARGET, None, [[1, 2]], [Siblings()], max_new_tokens=2)


def test_padding_beside_a_tree_changes_no_rotation():
    """A long row at its end beside a short one with a wide tree: the frequencies change past 48 tokens."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4,
            "original_max_position_embeddings": 48}  # fmt: skip
    target = tiny("phi3", max_position_embeddings=128, original_max_position_embeddings=48, rope_parameters=rope)
    inputs = prompts([36, 5])
    wanted = alone(target, inputs, max_new_tokens=12, eos_token_id=EOS)
    for tree in ([4, 4, 2], None):
        how = {"tree": tree, "num_draft_tokens": 3, "confidence_threshold": 0.0, "engine": "modules"}
        found = together(target, inputs, [near(target)], max_new_tokens=12, eos_token_id=EOS, speculation_config=how)
        assert found == wanted


def test_candidates_for_stock_decoding_are_rows():
    with pytest.raises(ValueError, match=r"tree is \[2\], and transformers' own loop checks candidates that are"):
        ChainCandidateGenerator(TARGET, ["lookups"], speculation_config={"tree": [2]})
    made = ChainCandidateGenerator(TARGET, [Siblings()])
    with pytest.raises(ValueError, match="level siblings proposes a tree, and transformers' own loop"):
        made.get_candidates(torch.tensor([[5, 9]]))


@pytest.mark.plans
def test_lookups_of_ones_own_are_merged_and_fix_the_lengths():
    lookups, inputs = LookupTree([PromptLookup(), NGram()], [3, 2]), prompts([9, 4])
    found = together(TARGET, inputs, [lookups], max_new_tokens=16, eos_token_id=EOS)
    assert found == alone(TARGET, inputs, max_new_tokens=16, eos_token_id=EOS)
    stats = hf_mlspec.last_stats(TARGET)
    assert stats.plans == {}
    assert stats.levels[0].drafted > 0
