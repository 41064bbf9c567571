"""Which random tiny model does a case decode with, and what is the same model in float64?

A world is a dict of plain values, so that a case can be printed, changed and made again.
"""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from decoders import CPU_CONFIGS, HYBRIDS, MIXTURES, in_float64, random_model
from lut_models import lut_packed
from models import letters, near, packed
from torch import nn

import hf_mlspec

NAMES = (*CPU_CONFIGS, *MIXTURES, *HYBRIDS)
# Formats of a target's weights, and the words of levels that read a part of them.
FORMATS = {
    "dense": (),
    "int4": ("w4a8", "w4a4", "qspec"),
    "mxfp4": ("mxfp4a8",),
    "nested": ("nested", "nested4a8"),
    "planes": ("planes6", "planes4", "planes2"),
    "int4_int8": ("w4a8", "w4a4"),
    "lut": ("planes4", "planes3"),
    "zipper": ("zipper-low",),
}
CASTS = ("mxfp4", "int3", "int2", "ternary")
_VOCABULARIES = (67, 96, 128, 199, 251)
_FIXED = ("mamba", "bamba", "granite-hybrid")  # whose widths follow from each other
_KEPT_ALIVE = 24


def draw_world(chance: random.Random) -> dict[str, Any]:
    """Any described architecture, in odd sizes. Not every draw can be built."""
    name = chance.choice(NAMES)
    mixed = name in MIXTURES
    weights = "dense" if chance.random() < 0.5 else chance.choice(list(FORMATS))
    if mixed and weights not in ("dense", "mxfp4", "nested"):
        weights = "dense"
    dtype = "bfloat16" if weights == "nested" else chance.choice(["bfloat16", "float32"])
    _, own = {**CPU_CONFIGS, **MIXTURES, **HYBRIDS}[name]
    shape: dict[str, Any] = {"vocab_size": chance.choice(_VOCABULARIES)}
    if not name.startswith(_FIXED):
        shape["hidden_size"] = chance.choice([32, 64, 64, 64, 128] if weights == "dense" else [64, 96])
    if not mixed and "intermediate_size" not in own and chance.random() < 0.7:
        shape["intermediate_size"] = chance.choice([56, 64, 100, 128] if weights == "dense" else [96, 160])
    if weights == "int4_int8":
        shape |= {"hidden_size": 256, "intermediate_size": 256}
    if weights in ("nested", "zipper", "planes", "int4", "lut", "mxfp4") and "head_dim" not in own:
        shape["head_dim"] = 32
    if own.get("sliding_window") and chance.random() < 0.7:
        shape["sliding_window"] = chance.choice([2, 3, 5, 8, 16])
    if name in ("gemma2", "vaultgemma"):
        shape |= {"attn_logit_softcapping": chance.choice([None, 5.0, 50.0]),
                  "final_logit_softcapping": chance.choice([None, 5.0, 30.0])}  # fmt: skip
    if "num_key_value_heads" not in own and chance.random() < 0.4:
        shape["num_attention_heads"], shape["num_key_value_heads"] = chance.choice([(4, 1), (2, 2), (4, 4), (2, 1)])
    if chance.random() < 0.3:
        shape["tie_word_embeddings"] = chance.random() < 0.7
    return {"name": name, "seed": chance.randrange(1 << 20), "dtype": dtype, "weights": weights, "shape": shape}


@dataclass
class World:
    """A model as a target, `wide`: its values in float64, and what belongs to it. Everything is made once."""

    said: dict[str, Any]
    target: nn.Module
    wide: nn.Module
    tokenizer: Any
    kept: dict[Any, Any] = field(default_factory=dict)  # what was made for it: levels, answers

    def near(self, noise: float, seed: int, wide: bool) -> nn.Module:
        """A dense model of its own that mostly agrees with the target."""
        key = "near", noise, seed, wide
        if key not in self.kept:
            model = near(self.wide, noise, seed)
            self.kept[key] = model if wide else model.to(getattr(torch, self.said["dtype"]))
        return self.kept[key]


_worlds: OrderedDict[str, World] = OrderedDict()


def world_of(said: dict[str, Any]) -> World:
    """The world, made now or kept. ValueError and its like where the sizes do not fit together."""
    key = json.dumps(said, sort_keys=True)
    if key not in _worlds:
        _worlds[key] = _made(said)
        while len(_worlds) > _KEPT_ALIVE:
            _worlds.popitem(last=False)
    _worlds.move_to_end(key)
    return _worlds[key]


def _made(said: dict[str, Any]) -> World:
    model = random_model(said["name"], getattr(torch, said["dtype"]), seed=said["seed"], **said["shape"])
    model.generation_config.eos_token_id = None
    weights = said["weights"]
    if weights in ("dense", "nested"):
        wide = in_float64(model)
        target = model if weights == "dense" else hf_mlspec.nest(model)
    elif weights == "lut":
        target = lut_packed(model, 5, 2)
        wide = in_float64(target)
    elif weights == "mxfp4" and said["name"] in MIXTURES:
        target = hf_mlspec.direct_cast(model, "mxfp4", activation_bits=16, cast_head=False)
        wide = in_float64(target)
    else:
        target = packed(model, weights)
        wide = in_float64(target)
    if hasattr(wide, "set_experts_implementation"):
        wide.set_experts_implementation("eager")
    if hasattr(wide.config, "quantization_config"):
        del wide.config.quantization_config
    with torch.no_grad():
        target(torch.tensor([[3, 4]]))  # sizes that the class itself cannot compute
    return World(said, target, wide, tokenizer_of(said["shape"]["vocab_size"]))


@lru_cache(maxsize=8)
def tokenizer_of(size: int):
    """Single letters, as many tokens as there are rows."""
    return letters(size - 64)


@lru_cache(maxsize=64)
def other_model(name: str, vocabulary: int, dtype: str, seed: int) -> nn.Module:
    """A small model of another class and the same vocabulary, as a level."""
    model = random_model(name, getattr(torch, dtype), seed=seed, vocab_size=vocabulary)
    if name in MIXTURES:
        model.set_experts_implementation("eager")
    return model
