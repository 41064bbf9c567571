"""Where may a head come from, and what of its target may it take?"""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys

import pytest
import torch
from accelerate import dispatch_model
from heads import write_head
from models import prompts, refused, tiny

import hf_mlspec
from hf_mlspec.integration.levels.heads import load_head


@pytest.fixture
def target():
    return tiny(seed=2, dtype=torch.float32)


def test_a_head_is_no_model(target, tmp_path):
    folder = write_head(tmp_path, target)
    with pytest.raises(ValueError, match="holds a trained head, which is no model"):
        hf_mlspec.load(folder)


def test_a_head_is_made_again_for_a_target_with_another_table(target, tmp_path):
    folder, model = str(write_head(tmp_path, target)), copy.deepcopy(target)
    inputs = prompts([4])
    alone = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    with_head = model.generate(**inputs, max_new_tokens=8, do_sample=False, assistant_models=[folder])
    assert torch.equal(alone, with_head)
    model.resize_token_embeddings(80)
    refused(ValueError, "a target of 64 tokens.*has 80", inputs, model, assistant_models=[folder])


def test_a_head_without_output_rows_takes_those_of_an_offloaded_target(target, tmp_path):
    folder = write_head(tmp_path, target, tensors={"lm_head.weight": None})
    whole = load_head(target, str(folder), None)
    places = {"model": "cpu", "lm_head": "disk"}
    offloaded = dispatch_model(copy.deepcopy(target), places, offload_dir=tmp_path / "off")
    assert offloaded.lm_head.weight.is_meta
    head = load_head(offloaded, str(folder), None)
    assert torch.equal(head.lm_head.weight, whole.lm_head.weight)
    inputs = prompts([4])
    asked = {"max_new_tokens": 8, "do_sample": False}
    drafted = offloaded.generate(**inputs, **asked, assistant_models=[str(folder)])
    assert torch.equal(target.generate(**inputs, **asked), drafted)


_HUB = """
import sys, torch, hf_mlspec
from hf_mlspec.integration.levels.words import is_head_folder
assert is_head_folder("some/head") and not is_head_folder("some/other")
target = hf_mlspec.load(sys.argv[1])
ids = torch.arange(4)[None]
alone = target.generate(ids, max_new_tokens=8, do_sample=False)
drafted = target.generate(ids, max_new_tokens=8, do_sample=False, assistant_models=["some/head"])
assert torch.equal(alone, drafted)
assert [level.name for level in hf_mlspec.last_stats(target).levels] == ["head"]
"""


def test_a_head_by_its_name_on_the_hub(target, tmp_path):
    place = tmp_path / "hub" / "models--some--head"
    shutil.copytree(write_head(tmp_path, target), place / "snapshots" / "abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    target.save_pretrained(tmp_path / "target")
    hub = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    run = [sys.executable, "-c", _HUB, str(tmp_path / "target")]
    done = subprocess.run(run, env={**os.environ, **hub}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
