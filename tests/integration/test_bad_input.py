"""Are levels that cannot work refused with one specific error, before any model runs?"""

from __future__ import annotations

import json

import models
import pytest
import torch
from models import letters, near, prompts, tiny
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    LogitsProcessorList,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_mlspec import NGram

TARGET = tiny(seed=2)
NEAR = near(TARGET, 0.02)
INPUTS = prompts([6])


def bert(kind=BertModel):
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return kind(BertConfig(**shape, vocab_size=64))


def t5():
    return T5ForConditionalGeneration(T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64))


def forgetful():
    """A model that keeps a state, whose forward somebody replaced by one that takes none."""
    shape = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(vocab_size=64, lru_width=32, **shape))
    model.forward = lambda input_ids=None: None
    return model


def offloaded():
    return tiny().to("meta")


def far_table():
    table = NGram()
    table.learn(list(range(3, 99)))
    return table


def own_settings(**settings):
    level = near(TARGET)
    for name, value in settings.items():
        setattr(level.generation_config, name, value)
    return level


def refused(error: type[Exception], words: str, inputs: dict | None = None, target=TARGET, **options) -> None:
    """`models.refused` for the target and the prompt of this file."""
    models.refused(error, words, INPUTS if inputs is None else inputs, target, **options)


LEVELS = {
    "a number": ([3], TypeError, r"a level is a model, a path, a word or a drafter.* got int"),
    "None": ([None], TypeError, r"got NoneType"),
    "a module": ([nn.Linear(2, 2)], TypeError, r"level 0 .*Linear, not a transformers model"),
    "the empty word": ([""], ValueError, r"level '' is neither an existing folder nor a known word"),
    "an unknown word": (["mxfp8"], ValueError, r"level 'mxfp8' .* words are mxfp4, .*early_exit:N"),
    "a word in capitals": (["MXFP4"], ValueError, r"did you mean 'mxfp4';"),
    "levels in one text": (["mxfp4+ngram"], ValueError, r"several entries of the list, as in \['mxfp4', 'ngram'\]"),
    "a missing folder": (["./nowhere"], ValueError, r"level './nowhere' is neither an existing folder"),
    "a missing folder to cast": (["./nowhere@mxfp4"], ValueError, r"'./nowhere@mxfp4' is neither"),
    "no number of layers": (["early_exit:"], ValueError, r"takes a number of layers, as in 'early_exit:4'"),
    "an odd number of layers": (["early_exit:²"], ValueError, r"takes a number of layers"),
    "no layers": (["early_exit:0"], ValueError, r"num_layers is 0, LlamaForCausalLM has 2: choose 1 to 1"),
    "all layers": (["early_exit:2"], ValueError, r"num_layers is 2, LlamaForCausalLM has 2: choose 1 to 1"),
    "a lookup in the middle": (["prompt_lookup", NEAR], ValueError, r"level 0 \(prompt_lookup\) cannot check.*last"),
    "one model, no list": (NEAR, TypeError, r"takes a list of levels, got LlamaForCausalLM.*\[level, ...\]"),
    "one word, no list": ("mxfp4", TypeError, r"takes a list of levels, got str"),
    "a generator": ((level for level in [NEAR]), TypeError, r"takes a list of levels, got generator"),
    "float64 to cast": (["mxfp4"], TypeError, r"weight is torch.float64, only float32, bfloat16 and float16"),
}


@pytest.mark.parametrize("name", LEVELS)
def test_levels(name):
    levels, error, words = LEVELS[name]
    refused(error, words, assistant_models=levels)


MODELS = {
    "an encoder": (bert, TypeError, r"level 0 .*BertModel.* is no causal language model.*AutoModelForCausalLM"),
    "an encoder with a head": (lambda: bert(BertLMHeadModel), TypeError, r"BertLMHeadModel\) is an encoder"),
    "an encoder-decoder": (t5, ValueError, r"level 0 .*encoder-decoder model; .*decoder-only"),
    "a state that no call hands over": (forgetful, ValueError, r"keeps a state that can be neither copied"),
    "weights elsewhere": (offloaded, ValueError, r"meta device.*load it onto"),
    "another vocabulary": (
        lambda: tiny(vocab_size=300),
        ValueError,
        r"vocabulary of 300 tokens.*64.*tokenizer=.*assistant_tokenizers",
    ),
    "a table of another tokenizer": (far_table, ValueError, r"holds token 98, the model above it has 64"),
    "own count": (lambda: own_settings(num_assistant_tokens=-1), ValueError, r"num_assistant_tokens of .* is -1"),
    "own zero": (lambda: own_settings(num_assistant_tokens=0), ValueError, r"num_assistant_tokens of level .* is 0"),
    "own threshold": (
        lambda: own_settings(assistant_confidence_threshold=1.5),
        ValueError,
        r"assistant_confidence_threshold of level .* is 1.5",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_as_levels(name):
    make, error, words = MODELS[name]
    refused(error, words, assistant_models=[make()])
    refused(error, words.replace("level 0", "level 1"), assistant_models=[NEAR, make()])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [(t5, ValueError, "the target .*encoder-decoder"), (forgetful, ValueError, "the target .*neither copied nor")],
    ids=["T5", "RecurrentGemma"],
)
def test_targets(make, error, words):
    with pytest.raises(error, match=words):
        make().generate(input_ids=INPUTS["input_ids"], max_new_tokens=3, assistant_models=["mxfp4"])


def test_a_class_with_a_generate_of_its_own():
    class Own(type(TARGET)):
        def generate(self, *args, **kwargs):
            return super().generate(*args, **kwargs)

    model = tiny()
    model.__class__ = Own
    with pytest.raises(ValueError, match=r"Own overrides generate.*leave assistant_models out"):
        model.generate(**INPUTS, assistant_models=["early_exit:1"])


@pytest.fixture
def folder(tmp_path):
    tiny(dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


def test_folders(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    refused(ValueError, r"cannot be loaded as a causal language model", assistant_models=[str(empty)])
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (b"not safetensors at all", whole[: len(whole) // 2], b""):
        weights.write_bytes(broken)
        refused(ValueError, rf"level '{folder}' cannot be loaded", assistant_models=[str(folder)])
    weights.unlink()
    refused(ValueError, r"cannot be loaded as a causal language model", assistant_models=[str(folder)])
    (folder / "config.json").write_text("{")
    refused(ValueError, r"cannot be loaded as a causal language model", assistant_models=[str(folder)])
    (folder / "config.json").write_text(json.dumps({"model_type": "no such thing"}))
    refused(ValueError, r"cannot be loaded as a causal language model", assistant_models=[str(folder)])


def test_a_name_that_is_no_folder_is_looked_up_once_and_named():
    refused(ValueError, r"level 'someone/something' cannot be loaded", assistant_models=["someone/something"])


TOKENIZERS = {
    "too many": ([None, None], ValueError, r"one entry per level .* for 1 levels"),
    "too few": ([], ValueError, r"one entry per level"),
    "no list": ("letters", ValueError, r"one entry per level"),
    "not a tokenizer": (["letters"], TypeError, r"assistant_tokenizers\[0\] is a str, not a tokenizer"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers(name):
    tokenizers, error, words = TOKENIZERS[name]
    options = {"assistant_models": [NEAR], "assistant_tokenizers": tokenizers, "tokenizer": letters()}
    refused(error, words, **options)


def nan_head(model):
    with torch.no_grad():
        model.lm_head.weight[3, 4] = float("nan")
    return model


@pytest.mark.parametrize("levels", [[], ["prompt_lookup"]])
def test_a_processor_that_leaves_no_token_is_among_the_causes(levels):
    def none_left(ids, scores):
        return torch.full_like(scores, -float("inf"))

    options = {"logits_processor": LogitsProcessorList([none_left]), "max_new_tokens": 5, "do_sample": True}
    with pytest.raises(FloatingPointError, match=r"NaN: its weights .*, or a logits processor left no token; check"):
        TARGET.generate(**INPUTS, **options, assistant_models=levels)


@pytest.mark.parametrize("do_sample", [True, False])
def test_nan_weights(do_sample):
    options = {"max_new_tokens": 5, "do_sample": do_sample}
    bad = nan_head(near(TARGET))
    with pytest.raises(FloatingPointError, match=r"logits of the target are NaN.*check the checkpoint"):
        bad.generate(**INPUTS, **options, assistant_models=[])
    for chain in ([bad], [bad, NEAR], [NEAR, bad]):
        with pytest.raises(FloatingPointError, match=r"logits of .*LlamaForCausalLM are NaN.*checkpoint"):
            TARGET.generate(**INPUTS, **options, assistant_models=chain)
    cast = nan_head(tiny(dtype=torch.float32))
    with pytest.raises(ValueError, match=r"lm_head.weight holds 1 NaN or Inf"):
        cast.generate(**INPUTS, **options, assistant_models=["mxfp4"])


@pytest.mark.parametrize("do_sample", [True, False])
def test_float16_overflow_in_a_draft(do_sample):
    level = tiny(dtype=torch.float16)
    with torch.no_grad():
        level.model.embed_tokens.weight *= 1e4
        level.lm_head.weight *= 3e4
    target = tiny(dtype=torch.float16)
    with pytest.raises(FloatingPointError, match=r"overflows in torch.float16"):
        target.generate(**INPUTS, max_new_tokens=5, do_sample=do_sample, assistant_models=[level],
                        speculation_config={"engine": "modules"})


def test_a_linear_that_cannot_be_cast_stays_and_is_named():
    target = tiny(dtype=torch.float32, hidden_size=48, head_dim=12, intermediate_size=64)
    with pytest.warns(UserWarning, match=r"stay as they are.*in_features 48 is no multiple of 32"):
        out = target.generate(**INPUTS, max_new_tokens=5, do_sample=False, assistant_models=["mxfp4"])
    assert torch.equal(out, target.generate(**INPUTS, max_new_tokens=5, do_sample=False))
