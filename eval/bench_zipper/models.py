"""Which models in two parts are timed? One of random weights and few layers, or the one in a folder."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from eval.targets import random_model
from hf_mlspec.formats import ZipperWeight
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.nn.zipper import ZipperLinear
from hf_mlspec.nn.zipper_embedding import ZipperEmbedding


def plain(options: argparse.Namespace) -> PreTrainedModel:
    """In bfloat16, on the GPU."""
    if options.model is not None:
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).cuda().eval()
    shape, layers = ("tiny", 2) if options.quick else ("llama-3-8b", options.layers)
    return random_model(shape, "cuda", 0, num_hidden_layers=layers)


def in_two_parts(
    options: argparse.Namespace, high_part: str, head: bool = False, embedding: bool = False
) -> PreTrainedModel:
    """The same with every linear but the head in two parts; head: that, too; embedding: and its rows as codes."""
    model, switch = plain(options), PrecisionSwitch("zipper")
    kept = None if head else model.get_output_embeddings()
    if embedding:
        how = {"mode": options.mode, "high_part": high_part}
        model.set_input_embeddings(ZipperEmbedding.from_embedding(model.get_input_embeddings(), switch=switch, **how))
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not kept:
            weight = ZipperWeight.from_dense(module.weight.detach(), mode=options.mode, high_part=high_part)
            model.set_submodule(path, ZipperLinear(weight, module.bias, switch).eval())
    return model
