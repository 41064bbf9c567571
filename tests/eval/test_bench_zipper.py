"""Does eval.bench_zipper say what it lacks, and what it can time?"""

from __future__ import annotations

import argparse
import itertools

import pytest
import torch

from eval.bench_zipper import memory, models
from eval.bench_zipper.__main__ import main, parse
from eval.targets import random_model
from hf_mlspec.nn.zipper import ZipperLinear
from hf_mlspec.nn.zipper_embedding import ZipperEmbedding


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/cuda times it")
def test_without_a_gpu_it_ends_with_the_reason(capsys):
    assert main([]) == 1
    assert "torch finds none here" in capsys.readouterr().err


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--part", "nothing"])
    assert "products" in capsys.readouterr().err
    assert parse(["--quick"]).places == ["host", "device", "dense"]
    assert parse(["--quick"]).part == ["products", "host", "timeline", "rates", "replayed", "prefill", "memory"]


@pytest.mark.parametrize("head", [False, True])
def test_models_have_the_part_of_the_host_that_is_asked_for(monkeypatch, head):
    options = argparse.Namespace(model=None, quick=True, layers=2, mode="paper")
    monkeypatch.setattr(models, "random_model", lambda shape, device, seed, **sizes: random_model(shape, "cpu", seed))
    model = models.in_two_parts(options, "host", head, embedding=head)
    assert isinstance(model.get_input_embeddings(), ZipperEmbedding) == head
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    layers = [module for module in model.modules() if isinstance(module, ZipperLinear)]
    assert len(layers) == 2 * 7 + head
    assert {layer.high_part for layer in layers} == {"host"}
    assert {layer.how.mode for layer in layers} == {"paper"}


def test_memory_is_that_of_all_layers(monkeypatch):
    options = argparse.Namespace(model=None, quick=True, layers=2, mode="paper")
    monkeypatch.setattr(models, "random_model", lambda shape, device, seed, **sizes: random_model(shape, "cpu", seed))
    plainer, head, embedding = itertools.islice(memory.lines(options), 3)
    assert [(line["head"], line["embedding"]) for line in (plainer, head, embedding)] == [
        (False, False), (True, False), (True, True)]  # fmt: skip
    assert embedding["packed_mib"] == head["packed_mib"] > plainer["packed_mib"]
    assert embedding["whole_mib"] < head["whole_mib"]
    assert embedding["whole_times_smaller"] > head["whole_times_smaller"]
    assert memory._with_layers(100, 20, 2, 32) == 400
