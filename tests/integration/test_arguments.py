"""Is an argument of generate that means nothing one clear error?"""

from __future__ import annotations

import shutil

import pytest
import torch
from models import tiny

import hf_mlspec

IDS = torch.tensor([[5, 9, 3]])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"is_assistant": True}, ValueError, "is_assistant=True .* leave it out"),
        ({"logits_processor": "x"}, TypeError, r"logits_processor is a str, .*LogitsProcessorList\(\[\.\.\.\]\)"),
        ({"logits_processor": lambda ids, scores: scores}, TypeError, "logits_processor is a function"),
        ({"logits_processor": [1]}, TypeError, r"logits_processor\[0\] is 1, which cannot be called"),
        ({"stopping_criteria": 5}, TypeError, r"stopping_criteria is a int, .*StoppingCriteriaList"),
        ({"do_sample": True, "top_p": 2}, ValueError, "top_p is 2, it must be from 0 to 1"),
        ({"assistant_models": ["mxfp4", "mxfp4"]}, ValueError, r"level 1 \(mxfp4\) is level 0 once more"),
        ({"assistant_models": ["early_exit:1"] * 2}, ValueError, r"level 1 \(early_exit:1\) is level 0 once more"),
        ({"assistant_models": ["mxfp4,mxfp4"]}, ValueError, "several levels are several entries of the list"),
        ({"assistant_models": ["[m]"]}, ValueError, r"level '\[m\]' is neither an existing folder nor a known word"),
    ],
)
def test_it_is_named_with_the_remedy(options, error, words):
    with pytest.raises(error, match=words):
        tiny("llama", dtype=torch.float32).generate(
            IDS, max_new_tokens=2, **{"assistant_models": ["prompt_lookup"], **options}
        )


def test_lists_and_shares_that_mean_something_are_taken():
    options = {"logits_processor": [lambda ids, scores: scores], "do_sample": True, "top_p": 1.0}
    model = tiny("llama", dtype=torch.float32)
    assert model.generate(IDS, max_new_tokens=2, assistant_models=["prompt_lookup"], **options).shape[1] <= 5


def test_an_index_that_is_no_json_is_named(tmp_path):
    folder, _ = hf_mlspec.demo_pair()
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").write_text('{"weight_map": {"a"')
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is damaged: it holds no JSON"):
        hf_mlspec.load(tmp_path / "model")
