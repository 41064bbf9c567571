"""Do levels that read fewer bits of the target's own weights write what it writes, and refuse what they lack?"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.integration.levels import resolve as levels_module
from hf_mlspec.nn.state import state_of
from tests.models import prompts, tiny

BF16 = torch.bfloat16
INPUTS = prompts([8, 5])
OPTIONS = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


@pytest.fixture
def nested():
    return hf_mlspec.nest(tiny("llama", dtype=BF16, tie_word_embeddings=True))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    tiny("llama", dtype=BF16).save_pretrained(folder)
    return folder


def planes(dense, num_planes=8):
    config = MLSpecConfig("bitplanes", num_planes=num_planes, group_size=32)
    return AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)


def write(target, *chain, **options):
    return target.generate(**INPUTS, **{**OPTIONS, **options}, assistant_models=list(chain))


@pytest.mark.parametrize("chain", [["nested"], ["nested", "ngram"], ["nested4a8"], ["nested", "mxfp4"], ["mxfp4"],
                                   ["early_exit:1"]])  # fmt: skip
def test_a_nested_target_writes_what_it_writes_alone(nested, chain):
    assert torch.equal(write(nested, *chain), write(nested))
    assert hf_mlspec.last_stats(nested).levels == []
    write(nested, *chain)
    first = hf_mlspec.last_stats(nested).levels[0]
    assert first.drafted > 0
    assert first.name == chain[0]


@pytest.mark.parametrize("chain", [["planes4"], ["planes4", "planes2"], ["planes6", "prompt_lookup"]])
def test_a_target_of_planes_writes_what_it_writes_alone(dense, chain):
    target = planes(dense)
    assert torch.equal(write(target, *chain), write(target))


@pytest.mark.parametrize("given", [None, 8, 16])
def test_activation_bits_reach_the_nested_draft(monkeypatch, nested, given):
    asked = []
    check = levels_module.check_descent

    def watched(target, bits, levels):
        asked.extend(bits)
        return check(target, bits, levels)

    monkeypatch.setattr(levels_module, "check_descent", watched)
    write(nested, "nested", speculation_config={"cast_activation_bits": given})
    assert asked == [(4, given or 8)]


def test_casts_of_a_nested_target_are_kept_and_made_anew_when_it_changes(monkeypatch):
    made, cast = [], levels_module.direct_cast
    monkeypatch.setattr(levels_module, "direct_cast", lambda *args, **kw: made.append(1) or cast(*args, **kw))
    target = tiny("llama", dtype=BF16)
    for _ in range(2):
        write(target, "mxfp4")
    assert len(made) == 1
    hf_mlspec.nest(target)
    for _ in range(3):
        write(target, "mxfp4")
    assert len(made) == 2
    hf_mlspec.unnest(target)
    write(target, "mxfp4")
    assert len(made) == 3


@pytest.mark.parametrize("word", ["int3", "int2", "ternary"])
def test_words_for_few_bits_cast_like_direct_cast(word, tmp_path):
    target = tiny("llama", dtype=BF16, hidden_size=64, intermediate_size=128, head_dim=16)
    assert torch.equal(write(target, word), write(target))
    (kept,) = (entry[1] for entry in state_of(target).levels.values())
    draft = hf_mlspec.direct_cast(target, word)
    assert torch.equal(kept(INPUTS["input_ids"]).logits, draft(INPUTS["input_ids"]).logits)
    draft.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.quantization_config.num_planes == word
    states = draft.state_dict(), again.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    target.save_pretrained(tmp_path / "target")
    assert torch.equal(write(target, f"{tmp_path / 'target'}@{word}"), write(target))
    assert hf_mlspec.last_stats(target).levels == []


@pytest.mark.parametrize(("chain", "words"), [
    (["nested"], r"level 'nested' .*nested weights.* this LlamaForCausalLM has none: .*hf_mlspec\.nest\(model\)"),
    (["planes4"], r"level 'planes4' .*bit-planes.* this LlamaForCausalLM has none: .*format='bitplanes'"),
    (["planes9"], "planes9: 9 weight bits, must be 1 to 8"),
    (["nested4a4"], "4 activation bits, must be 8 or 16"),
    (["int4"], "neither an existing folder nor a known word; words are mxfp4, int3, int2, ternary, nested, planes1"),
])  # fmt: skip
def test_words_that_a_plain_target_has_no_weights_for(chain, words):
    with pytest.raises(ValueError, match=words):
        write(tiny("llama", dtype=BF16), *chain)


def test_words_that_do_not_fit_the_weights(nested, dense):
    with pytest.raises(ValueError, match="those of this LlamaForCausalLM are nested BF16"):
        write(nested, "planes4")
    with pytest.raises(ValueError, match="each level must have fewer"):
        write(nested, "nested", "nested4")
    target = planes(dense, 4)
    with pytest.raises(ValueError, match="level 'planes6': the weights of this LlamaForCausalLM have 4 bit-planes"):
        write(target, "planes6")
    with pytest.raises(ValueError, match="each level must have fewer"):
        write(target, "planes4")
    with pytest.raises(ValueError, match="each level must have fewer"):
        write(target, "planes2", "planes3")
