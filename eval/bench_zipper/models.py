"""Which models in two parts are timed? One of random weights and few layers, or the one in a folder."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from eval.targets import random_model
from hf_mlspec.formats import ZipperWeight
from hf_mlspec.formats.zipper import to_codes
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.nn.zipper import ZipperLinear


def plain(options: argparse.Namespace) -> PreTrainedModel:
    """In bfloat16, on the GPU."""
    if options.model is not None:
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).cuda().eval()
    shape, layers = ("tiny", 2) if options.quick else ("llama-3-8b", options.layers)
    return random_model(shape, "cuda", 0, num_hidden_layers=layers)


class CodeTable(nn.Module):
    """An embedding whose rows are looked up in the codes of a weight and one scale a row, without planes that are 0 in
    all of them: those of mode "paper" lack the last. For measuring: no decoder of the package reads it."""

    def __init__(self, table: nn.Embedding, mode: str):
        super().__init__()
        weight = ZipperWeight.from_dense(table.weight.detach(), mode=mode)
        self.bits, self.dtype = len(weight.weight_planes), table.weight.dtype
        kept = self.bits - int(not weight.weight_planes[-1].any())
        self.planes = nn.Parameter(weight.weight_planes[:kept].transpose(0, 1).contiguous(), requires_grad=False)
        self.scale = nn.Parameter(weight.weight_scale, requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Integers of any shape -> ``[..., width]``."""
        planes = self.planes[ids.flatten()].transpose(0, 1)
        absent = planes.new_zeros(self.bits - len(planes), *planes.shape[1:])
        codes = to_codes(torch.cat([planes, absent]))
        return (codes * self.scale[ids.flatten()].float()).to(self.dtype).view(*ids.shape, -1)


def in_two_parts(
    options: argparse.Namespace, high_part: str, head: bool = False, embedding: bool = False
) -> PreTrainedModel:
    """The same with every linear but the head in two parts; head: that, too; embedding: and its rows as codes."""
    model, switch = plain(options), PrecisionSwitch("zipper")
    kept = None if head else model.get_output_embeddings()
    if embedding:
        model.set_input_embeddings(CodeTable(model.get_input_embeddings(), options.mode))
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not kept:
            weight = ZipperWeight.from_dense(module.weight.detach(), mode=options.mode, high_part=high_part)
            model.set_submodule(path, ZipperLinear(weight, module.bias, switch).eval())
    return model
