"""Does a model that drafts on fewer bits of its own weights write what it writes alone, whichever way it runs?"""

from __future__ import annotations

import pytest
import torch
from models import EOS, near, packed, prompts, refused, tiny
from torch import nn
from transformers.generation import LogitsProcessorList

import hf_mlspec
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.integration.levels import wiring
from hf_mlspec.integration.levels.resolve import resolve
from hf_mlspec.integration.processing import Prompts
from hf_mlspec.nn.switch import precision_switch
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.precision import Bits
from hf_mlspec.speculation.rounds.captured import CapturedRounds

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
INPUTS = prompts([9, 4, 17])
OPTIONS = {"max_new_tokens": 32, "eos_token_id": None, "pad_token_id": EOS}
compiled = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
WAYS = ["modules", pytest.param("cpu", marks=compiled), pytest.param("cuda", marks=compiled)]
CHAINS = {
    "nested": ["nested"],
    "nested4": ["nested4"],
    "nested over a model": ["nested", "tiny"],
    "nested over a layer": ["nested", "early_exit:1"],
    "nested over text": ["nested", "prompt_lookup"],
    "planes4": ["planes4"],
    "planes4 over planes2": ["planes4", "planes2"],
    "planes6 over planes3 over a model": ["planes6", "planes3", "tiny"],
}


def dense(kind: str = "llama"):
    return tiny(kind, seed=2, dtype=torch.bfloat16, **SHAPE)


def target(weights: str, kind: str = "llama"):
    """Nested it computes what `dense` does; planes are a model of their own."""
    return hf_mlspec.nest(dense(kind)) if weights == "nested" else packed(dense(kind), "planes", keep_head=False)


def of(chain: str) -> tuple[object, list]:
    """A target of the chain's weights, and the chain."""
    levels = [near(dense(), 0.05) if level == "tiny" else level for level in CHAINS[chain]]
    return target(CHAINS[chain][0].rstrip("0123456789a")), levels


@pytest.fixture
def run(request, monkeypatch):
    """How to generate along a way; on the CUDA engine's, with what its captured rounds were."""
    config = {"engine": request.param}
    if request.param == "cuda":
        rounds, play = [], CapturedRounds.run
        monkeypatch.setattr(CapturedRounds, "run", lambda self, *args: rounds.append(1) or play(self, *args))

    def generate(model, levels, inputs=INPUTS, **options) -> torch.Tensor:
        options = {**OPTIONS, "do_sample": False, "speculation_config": config, **options}
        return model.generate(**inputs, assistant_models=levels, **options)

    generate.way = request.param
    return generate


@pytest.mark.parametrize("run", WAYS, indirect=True)
@pytest.mark.parametrize("chain", CHAINS)
def test_greedy_ids_are_those_of_the_target_alone(run, chain):
    model, levels = of(chain)
    if run.way == "modules":  # where stock attention decides between near ties in bfloat16
        for one in filter(lambda level: isinstance(level, nn.Module), (model, *levels)):
            nn.Module.float(one)  # norms and tables: packed weights stay what they are
    alone = run(model, [])
    assert torch.equal(run(model, levels), alone)
    stats = hf_mlspec.last_stats(model)
    assert len(stats.levels) == len(levels)
    assert 0 < stats.levels[0].accepted <= stats.levels[0].drafted
    if chain.startswith("nested") and run.way != "modules":
        assert torch.equal(alone, run(dense(), []))


@pytest.mark.parametrize("run", WAYS[1:], indirect=True)
@pytest.mark.parametrize("weights", ["nested", "planes"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3"])
def test_architectures(run, kind, weights):
    model, levels = target(weights, kind), ["nested"] if weights == "nested" else ["planes4", "planes2"]
    alone = run(model, [])
    assert torch.equal(run(model, levels), alone)
    assert hf_mlspec.last_stats(model).levels[0].accepted > 0
    if weights == "nested":
        assert torch.equal(alone, run(dense(kind), []))


@compiled
@pytest.mark.parametrize("run", ["cuda"], indirect=True)
@pytest.mark.parametrize("chain", [chain for chain in CHAINS if "text" not in chain])
def test_sampled_ids_are_those_of_the_target_alone_at_the_same_seed(run, chain):
    """Captured rounds draw with noise that all levels share."""
    (model, levels), original = of(chain), dense()
    for seed in range(3):
        asked = {"do_sample": True, "temperature": 1.5, "top_k": 20}
        torch.manual_seed(seed)
        alone = run(model, [], **asked)
        torch.manual_seed(seed)
        assert torch.equal(run(model, levels, **asked), alone)
        if chain.startswith("nested"):
            torch.manual_seed(seed)
            assert torch.equal(run(original, [], **asked), alone)


@compiled
@pytest.mark.parametrize("chain", CHAINS)
def test_sampled_streams_are_those_of_the_target_alone_at_the_same_seed(chain):
    model, levels = of(chain)
    rows = [line[mask.bool()].tolist() for line, mask in zip(*INPUTS.values(), strict=True)]
    requests = [{"input_ids": row, "id": i, "seed": i, "temperature": 1.5} for i, row in enumerate(rows)]
    asked = {"max_new_tokens": 20, "do_sample": True, "eos_token_id": None}

    def texts(model, chain) -> dict:
        done = hf_mlspec.generate_stream(model, requests, max_batch=2, assistant_models=chain, **asked)
        return {one.id: one.new_tokens for one in done}

    alone = texts(model, [])
    assert texts(model, levels) == alone
    if chain.startswith("nested"):
        assert texts(dense(), []) == alone


@compiled
@pytest.mark.parametrize("weights", ["nested", "planes"])
def test_a_checked_cache_is_that_of_the_target_alone(weights):
    """What the draft wrote is overwritten, bit for bit."""
    model, levels = target(weights), [Bits(4, 16)] if weights == "planes" else [Bits(4, 8), Bits(4, 16)]
    decoder = decoder_of(model, "cpu")
    rows, limits = [[5, 9, 12], [7], [20, 21, 22, 23, 24]], [6, 3, 9]
    alone = CpuEngine(None, decoder)
    alone.start(3, torch.device("cpu"))
    expected = alone.draft(rows, limits, 0.0)
    for bits in levels:
        upper = CpuEngine(None, decoder)
        lower = CpuEngine(None, decoder, follow=upper, bits=bits)
        upper.start(3, torch.device("cpu"))
        lower.start(3, torch.device("cpu"))
        options = {"num_draft_tokens": 3, "tiny_threshold": 0.0, "threshold": 0.0}
        settled, checks, *_ = upper.draft_checked(lower, rows, limits, **options)
        assert settled == expected
        assert 0 < sum(checks[1::2]) <= sum(checks[::2])
        for r, (row, line) in enumerate(zip(rows, settled, strict=True)):
            true = slice(0, len(row) + len(line) - 1)
            assert torch.equal(upper.cache.kv[:, :, r, :, true], alone.cache.kv[:, :, r, :, true])
        written = upper.cache.kv.clone()
        lower.lengths = [0] * 3
        lower.draft(rows, limits, 0.0)
        assert not torch.equal(upper.cache.kv, written)  # the draft writes something else


def test_a_level_drafts_like_a_cast_and_not_like_qspec():
    """Eight tokens, as long as they are probable; the bits are those of "mxfp4" casts."""
    model = target("nested")
    chain = wired(model, ["nested"])
    assert chain.num_draft_tokens == 8
    assert chain.levels[0].threshold == 0.4
    assert level_bits(model, ["nested"]) == [Bits(4, 8)]
    assert level_bits(model, ["nested4"]) == [Bits(4, 16)]
    assert level_bits(target("planes"), ["planes4", "planes2"]) == [Bits(4, 16), Bits(2, 16)]


def level_bits(model, words: list[str]) -> list[Bits]:
    return [level.bits for level in resolve(model, words, None, hf_mlspec.SpeculationConfig())]


def wired(model, words: list[str]) -> wiring.Chain:
    config = hf_mlspec.SpeculationConfig()
    how = {"processors": LogitsProcessorList(), "capacity": 1}
    how["prompts"] = Prompts(torch.zeros(1, 1, dtype=torch.int64), None)
    return wiring.Wiring(model, None, config, **how).build(resolve(model, words, None, config))


REFUSED = [
    (None, "nested", r"the target's own nested weights \(these are torch.bfloat16\), and this LlamaForCausalLM has"),
    (None, "nested", r"nest it with hf_mlspec.nest\(model\), or load it with .*MLSpecConfig\(format='nested-bf16'\)"),
    (None, "planes4", r"level 'planes4' drafts with the target's own bit-planes .*format='bitplanes'"),
    (None, "qspec", "level 'qspec' drafts with the target's own 4-bit weights"),
    ("nested", "planes4", "of this LlamaForCausalLM are nested BF16: its levels are called 'nested', 'nested4' or"),
    ("nested", "qspec", "level 'qspec' .* are nested BF16: its levels are called 'nested', 'nested4' or"),
    ("nested", "w4a8", "level 'w4a8' .* are nested BF16"),
    ("nested", "nested nested", r"level 1 \(nested\) drafts with the bits of nested4a8 for level 0 \(nested\), which"),
    ("nested", "nested4a8 nested4", "the bits of nested4 for level 0 .nested4a8., which has those of nested4a8"),
    ("planes", "nested", "level 'nested' .* are bit-planes: its levels are called 'planes7', 'planes6'"),
    ("planes", "planes8", "level 0 .planes8. drafts with the bits of planes8 for the target, which has those of pl"),
    ("planes", "planes2 planes4", "level 1 .planes4. drafts with the bits of planes4 for level 0 .planes2., which"),
    ("planes", "w4a8", "level 'w4a8' drafts with the target's own weights, .* are bit-planes"),
]


@pytest.mark.parametrize(("weights", "levels", "words"), REFUSED)
def test_what_the_weights_cannot_be_is_said_before_anything_runs(weights, levels, words):
    model = dense() if weights is None else target(weights)
    refused(ValueError, words, INPUTS, model, assistant_models=levels.split())


def test_more_planes_than_there_are_are_refused():
    model = packed(dense(), "planes", num_planes=6)
    words = "level 'planes7': the weights of this LlamaForCausalLM have 6 bit-planes; its levels are called 'planes5'"
    refused(ValueError, words, INPUTS, model, assistant_models=["planes7"])


def test_another_default_of_the_switch_is_the_targets():
    """A nested model whose own bits are the draft's has nothing below them that it could draft with."""
    model = target("nested")
    precision_switch(model).bits = Bits(4, 8)
    words = "drafts with the bits of nested4a8 for the target, which has those of nested4a8"
    refused(ValueError, words, INPUTS, model, assistant_models=["nested"])
