"""Do changed tensors of research checkpoints and of gpt-oss become what they say, or end in an error? As layers.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hf_mlspec.checkpoints.anyprecision import AnyPrecisionReader
from hf_mlspec.checkpoints.gpt_oss_original import config_of, is_original, parameters
from hf_mlspec.checkpoints.layer import HeldTensor
from hf_mlspec.checkpoints.pickles import WeightQuantizer
from hf_mlspec.checkpoints.quarot_pickle import sort_pickle
from hf_mlspec.checkpoints.readers import reader_for
from hf_mlspec.formats import PackedWeight
from tests.checkpoints.memory import stored
from tests.checkpoints.rotated_files import CONFIG, LAYER, SHAPES, hadamard12, held, integers, scales
from tests.checkpoints.test_fuzzed_layers import INPUTS, OUTPUTS
from tests.checkpoints.test_fuzzed_research import KINDS, Rotated

from .harness import Target, Wrong
from .layers import ERRORS, chance_of, changed_tensors, read_layer, require_same
from .mutate import changed_values


def _of_research(name: str) -> Callable[[bytes], None]:
    """What reads one of the checkpoints of research projects, a linear of its own each time, or of gpt-oss."""
    checkpoint = KINDS[name][0]
    whole, several = checkpoint.whole(), isinstance(checkpoint, Rotated)

    def read(data: bytes) -> None:
        chance = chance_of(data)
        linears = ((chance.choice(list(SHAPES)),),) if several else ()
        if several and chance.random() < 0.2:
            sizes = {"num_attention_heads": chance.choice((1, 5, 12, 20, 24)), "hidden_size": chance.choice((96, 192))}
            config = changed_values(checkpoint.config, chance) if chance.random() < 0.7 else sizes
            if isinstance(config, dict):
                checkpoint.sort(held(whole), {"model_type": checkpoint.config["model_type"], **config})
            return
        tensors = changed_tensors(whole, chance)
        if (found := checkpoint.read(tensors, *linears)) is not None:
            require_same(found, checkpoint.meant(tensors, *linears))

    return read


_PLANES = KINDS["any-precision"][0].whole()


def _any_precision_config(data: bytes) -> None:
    chance, whole = chance_of(data), _PLANES
    config = changed_values({"anyprec": {"seed_precision": 3, "parent_precision": 5, "group_count": 1}}, chance)
    if isinstance(config, dict):
        read_layer(reader_for({**config, "quant_method": AnyPrecisionReader.method}), whole, (64, 4))


@cache
def simulated() -> dict[str, Any]:
    """What QuaRot pickles, with one layer of 3 bits and one that is not quantized."""
    state, quantizers = {}, {}
    for seed, (linear, shape) in enumerate(SHAPES.items()):
        name, scale = f"{LAYER}.{linear}", scales(shape[0], seed)
        state[f"{name}.weight"] = (integers(shape, seed).float() * scale.float()).half()
        quantizer = WeightQuantizer()
        zero = torch.full_like(scale, 8.0)
        quantizer.__setstate__({"_buffers": {"scale": scale, "zero": zero}, "bits": 4, "sym": linear[-6] != "k"})
        quantizers[f"{name}.module"] = quantizer
    del quantizers[f"{LAYER}.mlp.up_proj.module"]
    quantizers[f"{LAYER}.mlp.gate_proj.module"].__setstate__({"bits": 3})
    for norm in ("model.norm", f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm"):
        state[f"{norm}.weight"] = torch.zeros(1)
    for place in ("mlp.down_proj", "self_attn.o_proj"):
        state[f"{LAYER}.{place}.had_K"] = hadamard12().float()
    state["model.embed_tokens.weight"] = state["lm_head.weight"] = torch.ones(5, 192).half()
    state["lm_head.module.weight"] = state["lm_head.weight"]
    return {"w_quantizers": quantizers, "model": state}


def _simulated(data: bytes) -> None:
    chance, whole = chance_of(data), simulated()
    state, quantizers, config = dict(whole["model"]), dict(whole["w_quantizers"]), CONFIG
    how = chance.random()
    if chance.random() < 0.2:  # a model that was not rotated
        norms = [name for name in state if "norm" in name]
        state |= dict.fromkeys(norms[: len(norms) - (how > 0.9)], torch.ones(192))
    if how < 0.5:
        state = changed_tensors(state, chance)
    elif how < 0.85:
        name = chance.choice(list(quantizers))
        quantizer = WeightQuantizer()
        quantizer.__setstate__(dict(quantizers[name].__dict__))
        if chance.random() < 0.7:
            quantizer.__setstate__({"_buffers": dict(changed_tensors(quantizer.__dict__["_buffers"], chance))})
        else:
            plain = {key: quantizer.__dict__[key] for key in ("bits", "sym")}
            other = changed_values(plain, chance)
            quantizer.__setstate__(other if isinstance(other, dict) else {"bits": other})
        quantizers[name] = quantizer if chance.random() < 0.9 else chance.choice((None, 3, {}))
    else:
        config = changed_values(CONFIG, chance)
        if not isinstance(config, dict):
            return
    whole = {"w_quantizers": quantizers, "model": state}
    if chance.random() < 0.02:
        del whole[chance.choice(list(whole))]
    found = sort_pickle(whole, Path("q.pt"), config)
    layer = found.layers[f"{LAYER}.{chance.choice(list(SHAPES))}"]
    if found.reader.holds(layer):
        plan = found.reader.plan(layer)
        read = plan.read({name: one.load() for name, one in plan.tensors.items()}).weight
        if isinstance(read, PackedWeight):
            wide = read.dequantize(torch.float32).to(layer.tensors["weight"].dtype)
            if not torch.equal(wide, layer.tensors["weight"].load()):
                raise Wrong("integers times their scales are not the weight that was pickled")


def _gpt_oss_names(data: bytes) -> None:
    """The original layout of gpt-oss: its config.json, and the names of its tensors."""
    chance = chance_of(data)
    config, names = changed_values(_GPT_OSS, chance) if chance.random() < 0.6 else _GPT_OSS, list(_NAMES)
    for _ in range(chance.choice((0, 1, 2))):
        names.pop(chance.randrange(len(names)))
    if chance.random() < 0.2:
        names.append("block.7.x")
    if not isinstance(config, dict) or not is_original(config):
        return
    rows = 6 if chance.random() < 0.9 else chance.choice((0, 5, 7))
    tensors = {name: HeldTensor(f"{name} in f", _HELD[rows if ".qkv." in name else 0]) for name in names}
    found = parameters(tensors, config_of(config, "config.json"), "a folder")
    for name in ("q", "k", "v"):
        rows = found[f"model.layers.0.self_attn.{name}_proj.bias"]
        if tuple(rows.load().shape) != rows.shape or rows.dtype != torch.int64 or "qkv" not in rows.place:
            raise Wrong(f"{name} has other rows than it says")


_GPT_OSS = {
    "num_hidden_layers": 1, "num_experts": 2, "experts_per_token": 1, "vocab_size": 8, "hidden_size": 4,
    "intermediate_size": 4, "head_dim": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "sliding_window": 4,
    "initial_context_length": 16, "rope_theta": 1e4, "rope_scaling_factor": 2.0, "rope_ntk_alpha": 1.0,
    "rope_ntk_beta": 32.0, "swiglu_limit": 7.0,
}  # fmt: skip
_NAMES = (
    "embedding.weight", "norm.scale", "unembedding.weight", *(f"block.0.{name}" for name in (
        "attn.norm.scale", "attn.sinks", "attn.out.weight", "attn.out.bias", "mlp.norm.scale", "mlp.gate.weight",
        "mlp.gate.bias", "mlp.mlp1_weight.blocks", "mlp.mlp1_weight.scales", "mlp.mlp1_bias",
        "mlp.mlp2_weight.blocks", "mlp.mlp2_weight.scales", "mlp.mlp2_bias", "attn.qkv.weight", "attn.qkv.bias")),
)  # fmt: skip
_HELD = {rows: torch.arange(rows) for rows in (0, 5, 6, 7)}


def _gpt_oss_linear(data: bytes) -> None:
    """Its linears are never quantized, whatever they hold."""
    reader = reader_for({"quant_method": "mxfp4"})
    layer = stored(changed_tensors(KINDS["gpt-oss"][0].whole(), chance_of(data)), INPUTS, OUTPUTS)
    if reader.holds(layer):
        raise Wrong("a linear of gpt-oss is held to be quantized")
    if data[0] % 8 == 0:
        reader.plan(layer)


def targets() -> tuple[Target, ...]:
    """One for each kind of checkpoint."""
    found = {f"{name} layer": _of_research(name) for name in KINDS}
    found |= {"any-precision config": _any_precision_config, "quarot pickle": _simulated,
              "gpt-oss names": _gpt_oss_names, "gpt-oss linear": _gpt_oss_linear}  # fmt: skip
    return tuple(Target(name, (), read, ERRORS, suffixes=(), drawn=True) for name, read in found.items())
