"""How does a mixture in gpt-oss's form with random MXFP4 codes stand in memory, and how long are its steps here?"""

from __future__ import annotations

import itertools
import time

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from eval.targets import random_model
from hf_mlspec.nn.expert_modules import is_experts
from hf_mlspec.nn.experts import PackedExperts
from hf_mlspec.nn.switch import PrecisionSwitch

_DRAWN = 1 << 22  # elements that are drawn; the rest repeats them, in memory of its own
_SCALE = 121  # 2^-6


def made(shape: str, layers: int | None = None) -> PreTrainedModel:
    """The shape in BF16 with experts in MXFP4. Nothing is quantized: codes are drawn."""
    sizes = {} if layers is None else {"num_hidden_layers": layers}
    model, switch = random_model(shape, "meta", **sizes), PrecisionSwitch("mxfp4", 16)
    for path, module in list(model.named_modules()):
        if is_experts(module):
            model.set_submodule(path, PackedExperts(module, "mxfp4", switch, path).eval())
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                drawn = nn.Parameter(_filled(name, parameter), requires_grad=False)
                module._parameters[name] = drawn
    model.tie_weights()
    return _with_buffers(model, shape, sizes)


def _filled(name: str, like: Tensor) -> Tensor:
    if name.endswith("_scale"):
        return torch.full(like.shape, _SCALE, dtype=like.dtype)
    whole, count = torch.empty(like.shape, dtype=like.dtype), min(like.numel(), _DRAWN)
    draw = torch.Generator().manual_seed(like.numel())
    if like.dtype == torch.uint8:
        few = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=draw)
    else:
        few = (torch.randn(count, generator=draw) * 0.02).to(like.dtype)
        few = few + 1 if "norm" in name else few
    flat = whole.view(-1)
    for first in range(0, len(flat), count):
        flat[first : first + count] = few[: len(flat) - first]
    return whole


def _with_buffers(model: PreTrainedModel, shape: str, sizes: dict[str, int]) -> PreTrainedModel:
    """Buffers of the meta device, those of rotary embeddings, are a small model's of the same head size."""
    small = random_model(shape, "cpu", **{**sizes, "num_hidden_layers": 1, "num_local_experts": 1, "vocab_size": 8,
                                          "num_experts_per_tok": 1})  # fmt: skip
    given = dict(small.named_buffers())
    for path, module in model.named_modules():
        for name in list(module._buffers):
            if module._buffers[name] is not None and module._buffers[name].is_meta:
                module._buffers[name] = given[f"{path}.{name}"]
    return model


def active_bytes(model: PreTrainedModel) -> int:
    """Of weights that a step of one row reads: embeddings give one row, experts those that are chosen."""
    held = [module for module in model.modules() if isinstance(module, PackedExperts)]
    routed = sum(parameter.nbytes for module in held for parameter in module.parameters())
    whole = sum(parameter.nbytes for parameter in model.parameters())
    table = model.get_input_embeddings().weight.nbytes
    config = model.config
    return whole - table - routed + routed * config.num_experts_per_tok // config.num_local_experts


class _Clock(BaseStreamer):
    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def steps_of(model: PreTrainedModel, prompt: int, steps: int) -> tuple[float, list[float]]:
    """Seconds of a prompt with its first token, and of every step behind it; by the compiled decoder alone."""
    ids, clock = torch.arange(1, prompt + 1).unsqueeze(0), _Clock()
    begun = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps + 1, do_sample=False, streamer=clock,
                   assistant_models=[], pad_token_id=0, eos_token_id=None)  # fmt: skip
    times = clock.times[1:]  # the prompt itself comes first
    return times[0] - begun, [after - before for before, after in itertools.pairwise(times)]
