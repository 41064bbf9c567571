"""Which levels stand below a target, and how do they draft? Drawn as plain values, and made of a world."""

from __future__ import annotations

import random
from typing import Any

from decoders import MIXTURES
from models import letters

import hf_mlspec

from .worlds import CASTS, FORMATS, World, other_model

_DRAFTS_ONLY = ("prompt_lookup", "ngram", "table")
_OTHERS = ("llama", "gemma2", "gpt2", "qwen3", "mixtral", "mamba2")


def draw_chain(chance: random.Random, world: dict[str, Any], engine: str) -> dict[str, Any]:
    """levels: as `level_of` reads them. config: of SpeculationConfig."""
    count = chance.choice([1, 1, 1, 2, 2, 3])
    levels = [_draw_level(chance, world) for _ in range(count)]
    levels = [level for level in levels[:-1] if level[0] not in _DRAFTS_ONLY] + levels[-1:]
    levels = [level for n, level in enumerate(levels) if level not in levels[:n]]
    lower = [[word] for word in FORMATS.get(world["weights"], ())]
    found = [level for level in lower if level in levels][: 1 if world["weights"] in ("nested", "int4") else None]
    levels = [level for level in levels if level not in lower or level in found]
    places = [place for place, level in enumerate(levels) if level in found]
    for place, level in zip(places, found, strict=True):  # each reads fewer bits than the one above it
        levels[place] = level
    config: dict[str, Any] = {"engine": engine}
    if chance.random() < 0.97:
        config["num_draft_tokens"] = chance.choice([1, 2, 3, 5, 8])
        if len(levels) > 1 and chance.random() < 0.3:
            config["num_draft_tokens"] = [chance.choice([1, 2, 4, 7]) for _ in levels]
    if chance.random() < 0.6:
        config["confidence_threshold"] = chance.choice([0.0, 0.0, 0.2, 0.6, 0.95])
    for word, chances, values in (
        ("shared_cache", 0.2, [False]), ("draft_cache", 0.1, ["int8", "int4"]), ("draft_window", 0.1, [1, 4, 9]),
        ("cast_head", 0.2, [False]), ("cast_activation_bits", 0.2, [8, 16]), ("max_ngram", 0.1, [1, 2, 5]),
        ("ngram_order", 0.1, [2, 3]), ("materialize", 0.05, [True]),
    ):  # fmt: skip
        if chance.random() < chances:
            config[word] = chance.choice(values)
    return {"levels": levels, "config": config}


def _draw_level(chance: random.Random, world: dict[str, Any]) -> list:
    kinds = ["near", "near", "early_exit:1", "early_exit:2", "prompt_lookup", "ngram", "other", "self", "table"]
    if world["weights"] == "dense":
        kinds += [*(CASTS if _wide(world) else ()), "mxfp4", "mxfp4", "cast", "cross"]
    elif world["weights"] == "float64":
        kinds += ["cross"]
    else:
        kinds += 3 * list(FORMATS[world["weights"]])
    if world["weights"] == "nested":
        kinds += ["mxfp4", "int3"]
    if world["name"] in MIXTURES:
        kinds += ["experts:1", "experts:1"]
    kind = chance.choice(kinds)
    if kind == "near":
        return [kind, chance.choice([0.0, 0.02, 0.1, 1.0]), chance.randrange(3)]
    if kind == "other":
        return [kind, chance.choice(_OTHERS), chance.randrange(3)]
    if kind == "cast":
        return [kind, chance.choice(CASTS if _wide(world) else ["mxfp4"])]
    if kind == "cross":
        return [kind, chance.choice([3, 40]), chance.randrange(2)]
    if kind == "table":
        return [kind, chance.choice([2, 3])]
    return [kind]


def _wide(world: dict[str, Any]) -> bool:
    """Whether groups of 64 divide its widths."""
    return world["shape"].get("hidden_size", 64) % 64 == 0


def level_of(world: World, level: list, wide: bool) -> Any:
    """What stands in assistant_models. wide: below a target in float64."""
    kind, dtype = level[0], "float64" if wide else world.said["dtype"]
    target = world.wide if wide else world.target
    vocabulary = world.said["shape"]["vocab_size"]
    if kind == "near":
        return world.near(level[1], level[2], wide)
    if kind == "other":
        return other_model(level[1], vocabulary, dtype, level[2])
    if kind == "self":
        return target
    if kind == "table":
        return _kept(world, (kind, level[1]), lambda: hf_mlspec.NGram(order=level[1]))
    if kind == "cast":
        return _kept(world, (kind, level[1], wide), lambda: hf_mlspec.direct_cast(target, level[1]))
    if kind == "cross":
        return other_model("llama", vocabulary + level[1], dtype, level[2])
    return kind


def tokenizers_of(world: World, levels: list[list]) -> dict[str, Any]:
    """Arguments for levels that speak another vocabulary."""
    if all(level[0] != "cross" for level in levels):
        return {}
    extra = world.said["shape"]["vocab_size"] - 64
    others = [_kept(world, ("letters", level[1]), lambda more=level[1]: letters(extra + more))
              if level[0] == "cross" else world.tokenizer for level in levels]  # fmt: skip
    return {"tokenizer": world.tokenizer, "assistant_tokenizers": others}


def _kept(world: World, key: tuple, make) -> Any:
    if key not in world.kept:
        world.kept[key] = make()
    return world.kept[key]
