"""Is what cannot be said to the harness refused in one sentence, before a model is loaded?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra eval)")

from hf_mlspec import SpeculationConfig
from hf_mlspec.evaluation import MLSpecLM
from hf_mlspec.evaluation.harness_arguments import Arguments, parse_levels
from hf_mlspec.evaluation.harness_requests import Generation, generation_keys, request_key

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("given", "words"), [
    ({"level": "mxfp4"}, "unknown model argument level; there are .*levels.*num_draft_tokens"),
    ({"levels": "mxfp5"}, "level 'mxfp5' is neither an existing folder nor a known word"),
    ({"levels": "mxfp4+"}, "level '' is neither"),
    ({"levels": 4}, "levels is 4"),
    ({"num_draft_tokens": 0}, "num_draft_tokens is 0"),
    ({"num_draft_tokens": "8+x"}, "num_draft_tokens is '8\\+x'"),
    ({"num_draft_tokens": "8+4"}, "num_draft_tokens has 2 entries for 1 levels"),
    ({"confidence_threshold": 1.5}, "confidence_threshold is 1.5"),
    ({"speculation": {}, "max_ngram": 2}, "max_ngram and speculation set the same options"),
    ({"format": "int5"}, "format 'int5' is unknown"),
    ({"group_size": 64}, "group_size=64 without a format"),
    ({"format": "mxfp4", "group_size": 64}, "has no group_size"),
    ({"format": "int4", "precision": "w4a5"}, "5 activation bits"),
    ({"format": "mxfp4", "precision": "w4a4"}, "this model's weights are mxfp4"),
    ({"dtype": "int8"}, "dtype is 'int8'"),
    ({"batch_size": 0}, "batch_size is 0"),
    ({"batch_size": "many"}, "batch_size is 'many'"),
    ({"max_length": -1}, "max_length is -1"),
    ({"max_gen_toks": 0}, "max_gen_toks is 0"),
    ({"seed": "x"}, "seed is 'x'"),
    ({"think_end_token": 5}, "think_end_token is 5"),
    ({"journal": "no/such/journal.jsonl"}, "journal is 'no/such/journal.jsonl', and no folder"),
    ({"levels": "ngram+mxfp4"}, "level 0 \\(ngram\\) cannot check drafts, so no level can be below it"),
    ({"levels": "tests"}, "level 'tests' cannot be loaded as a causal language model: the folder"),
])
def test_wrong_arguments_are_refused_before_loading(given, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=words):
        MLSpecLM("no/such/folder", **({"levels": "mxfp4"} | given))


@pytest.mark.parametrize(("given", "error", "words"), [
    ({}, ValueError, "no model is named: add pretrained=FOLDER"),
    ({"pretrained": "no/such/folder"}, ValueError, "'no/such/folder'"),
    ({"pretrained": torch.nn.Linear(1, 1)}, TypeError, "pretrained is a Linear"),
])
def test_a_model_is_needed(given, error, words):
    with pytest.raises(error, match=words):
        MLSpecLM(**given)


@pytest.mark.parametrize(("given", "words"), [
    ({"precision": "w4a4"}, "precision=w4a4 is what is read of packed weights: add format=mxfp4, int4, nested"),
    ({"levels": "qspec"}, "level 'qspec' drafts with the target's own 4-bit weights"),
    ({"levels": "early_exit:9"}, "early_exit"),
    ({"max_length": 513}, "max_length is 513, and the model has 512 positions"),
    ({"device": "cuda:77"}, "device 'cuda:77' cannot be used"),
    ({"tokenizer": "/no/such/tokenizer"}, "'/no/such/tokenizer' does not exist"),
    ({"format": "int4"}, "in_features"),
])
def test_what_does_not_fit_the_model_is_refused_before_a_request(saved_model, given, words):
    with pytest.raises(ValueError, match=words):
        MLSpecLM(str(saved_model), **given)


def test_a_live_model_is_not_packed(saved_model):
    lm = MLSpecLM(str(saved_model), dtype="float32")
    with pytest.raises(ValueError, match="format, revision and trust_remote_code are for a model that is loaded"):
        MLSpecLM(lm.model, lm.tokenizer, format="int4")
    lm.model.config.name_or_path = ""
    with pytest.raises(ValueError, match="from no folder: pass its tokenizer"):
        MLSpecLM(lm.model)


def test_levels_and_numbers_are_read(tmp_path):
    folder = tmp_path / "a+b"
    folder.mkdir()
    assert parse_levels(None) == parse_levels("") == []
    assert parse_levels("mxfp4+prompt_lookup") == ["mxfp4", "prompt_lookup"]
    assert parse_levels(str(folder)) == [str(folder)]
    assert parse_levels(f"mxfp4+{folder}@mxfp4+ngram") == ["mxfp4", f"{folder}@mxfp4", "ngram"]
    assert parse_levels(f"mxfp4=12:0.2,{folder}=5:0.4") == ["mxfp4=12:0.2", f"{folder}=5:0.4"]
    assert parse_levels(f"{tmp_path}/a+c") == [f"{tmp_path}/a", "c"]  # no such folder
    assert parse_levels("mxfp4,ngram") == ["mxfp4", "ngram"]
    assert parse_levels([str(folder), "ngram"]) == parse_levels([folder, "ngram"]) == [str(folder), "ngram"]
    asked = Arguments.of({"pretrained": "x/y", "levels": "mxfp4+ngram", "num_draft_tokens": "12+5",
                          "confidence_threshold": "0.2", "max_ngram": 2, "batch_size": "auto:3", "max_batch_size": 5})
    assert asked.speculation == SpeculationConfig(num_draft_tokens=[12, 5], confidence_threshold=0.2, max_ngram=2)
    assert asked.batch_size == 5
    assert Arguments.of({"pretrained": "x/y", "batch_size": "3"}).batch_size == 3


@pytest.mark.parametrize(("gen_kwargs", "expected"), [
    ({}, Generation([], 256, {"do_sample": False})),
    ({"until": "a", "max_gen_toks": 5, "temperature": 0, "top_p": 0.5}, Generation(["a"], 5, {"do_sample": False})),
    ({"until": ["", "b"], "max_tokens": 7, "temperature": 0.5},
     Generation(["b"], 7, {"do_sample": True, "temperature": 0.5})),
    ({"do_sample": True, "temperature": 0.0}, Generation([], 256, {"do_sample": False})),
    ({"do_sample": True, "top_k": 3, "seed": 9}, Generation([], 256, {"do_sample": True, "top_k": 3}, 9)),
    ({"max_gen_toks": 64.0, "repetition_penalty": 1.1},
     Generation([], 64, {"do_sample": False, "repetition_penalty": 1.1})),
])  # fmt: skip
def test_generation_kwargs_are_read(gen_kwargs, expected):
    assert Generation.of(gen_kwargs, 256) == expected


@pytest.mark.parametrize(("gen_kwargs", "words"), [
    ({"until": 5}, "until is 5"), ({"until": ["a", 5]}, "until is"), ({"max_gen_toks": 0}, "max_gen_toks is 0"),
    ({"max_gen_toks": 2.5}, "max_gen_toks is 2.5"), ({"max_length": 9}, "say max_gen_toks"),
    ({"temperature": "hot"}, "temperature is 'hot'"), ("x", "it must be a mapping"),
    ({"max_gen_toks": "many"}, "max_gen_toks is 'many'"),
])
def test_generation_kwargs_that_cannot_be_are_refused(gen_kwargs, words):
    with pytest.raises(ValueError, match=words):
        Generation.of(gen_kwargs, 256)


def test_an_option_that_generate_does_not_know_is_an_error(saved_model):
    from lm_eval.api.instance import Instance

    lm = MLSpecLM(str(saved_model), dtype="float32")
    request = Instance("generate_until", {}, ("abc", {"max_gen_toks": 3, "heat": 3}), 0, ("t", 0, 1))
    with pytest.raises(ValueError, match="heat"):
        lm.generate_until([request], disable_tqdm=True)


def test_keys_do_not_depend_on_the_order_of_settings():
    one, other = {"until": ["a"], "max_gen_toks": 3}, {"max_gen_toks": 3, "until": ["a"]}
    assert request_key("generate_until", ("x", one)) == request_key("generate_until", ("x", other))
    assert request_key("generate_until", ("x", one)) != request_key("loglikelihood", ("x", one))
    drawn = {"do_sample": True}
    keys = generation_keys([("x", one), ("x", drawn), ("x", drawn), ("x", other)])
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3
    with pytest.raises(ValueError, match="its arguments are no JSON"):
        request_key("generate_until", ("x", {"until": {1, 2}}))
