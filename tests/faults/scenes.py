"""What is done with a model while something fails, what is to be written there, and is the model what it was?

Every scene has a small random model of its own, which it uses again and again, whatever happened before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

import hf_mlspec
from hf_mlspec import SpeculationConfig
from hf_mlspec.nn.castable import holds_draft
from tests.models import near, prompts, tiny

PAIR = prompts([8, 5])
NEW = 10
CONFIG = SpeculationConfig(num_draft_tokens=3, confidence_threshold=0.0)  # no controller: the same rounds every time


class Written(NamedTuple):
    """What a row gained; error: with what it ended early, None if it did not."""

    tokens: list[int]
    error: Exception | None = None


class Scene:
    """act: does it all, and gives what every row gained. models: the target first. alone: the target's tokens without
    levels, as `act` has to write them; None where `act` asks for them itself. mend: what a user does before trying
    again, such as `restore`."""

    def __init__(
        self, models: list[PreTrainedModel], act: Callable[[], list[Written]],
        alone: Callable[[], list[Written]] | None = None, mend: Callable[[], object] = lambda: None,
    ):  # fmt: skip
        self.models, self.act, self.alone, self.mend = models, act, alone, mend
        self._attention = [model.config._attn_implementation for model in models]
        self._weights = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
        self.reference = act()
        if any(one.error for one in self.reference) or (alone is not None and alone() != self.reference):
            raise ValueError(f"without a fault this writes {self.reference}, the target alone {alone and alone()}")

    def wrong(self, found: list[Written]) -> str | None:
        """What is wrong with what was written: a row that ended has its tokens, one with an error the first ones."""
        if len(found) != len(self.reference):
            return f"{len(found)} rows of {len(self.reference)}"
        for own, right in zip(found, self.reference, strict=True):
            if own.tokens != (right.tokens[: len(own.tokens)] if own.error else right.tokens):
                return f"wrote {own.tokens} where {right.tokens} is right"
        return None

    def spoiled(self) -> str | None:
        """What is not as it was, tried out: None where the model is usable and writes what it wrote."""
        self.mend()
        for _ in range(2 if self.alone is None else 1):
            if again := self.wrong(found := self.act()):
                return f"afterwards it {again}"
            if any(one.error for one in found):
                return f"afterwards {found}"
        if self.alone is not None and (again := self.wrong(self.alone())):
            return f"afterwards the target alone {again}"
        for model, weights, attention in zip(self.models, self._weights, self._attention, strict=True):
            if model.config._attn_implementation != attention:
                return f"attention is {model.config._attn_implementation}, it was {attention}"
            now = model.state_dict()
            if now.keys() != weights.keys() or not all(torch.equal(now[name], weights[name]) for name in weights):
                return "weights are others"
        return None


def generated(model: PreTrainedModel, levels: list, inputs: dict = PAIR, **options: Any) -> list[Written]:
    """What the rows of one call gained."""
    torch.manual_seed(5)
    options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, **options}
    if levels:
        options |= {"assistant_models": levels, "speculation_config": CONFIG}
    out = model.generate(**inputs, **options)
    return [Written(row) for row in out[:, inputs["input_ids"].shape[1] :].tolist()]


def streamed(model: PreTrainedModel, levels: list, rows: list[list[int]], **options: Any) -> list[Written]:
    """What the requests of one stream gained."""
    requests = [hf_mlspec.Request(row, id=number) for number, row in enumerate(rows)]
    how = {"max_batch": 2, "max_new_tokens": NEW, "eos_token_id": None, **options}
    if levels:
        how |= {"assistant_models": levels, "speculation_config": CONFIG}
    done = {one.id: one for one in hf_mlspec.generate_stream(model, requests, **how)}
    return [Written(done[number].new_tokens, done[number].error) for number in sorted(done)]


def _row(length: int, seed: int) -> list[int]:
    return prompts([length], seed)["input_ids"][0].tolist()


def _by_modules() -> Scene:
    target = tiny(seed=2)
    level = near(target, 0.02)
    return Scene([target, level], lambda: generated(target, [level, "early_exit:1"]), lambda: generated(target, []))


def _prepared(**options: Any) -> PreTrainedModel:
    return hf_mlspec.prepare(tiny(seed=2, dtype=torch.float32, **options))


def _compiled() -> Scene:
    target = _prepared()
    level = near(target, 0.02)
    return Scene([target, level], lambda: generated(target, ["mxfp4", level]), lambda: generated(target, []))


def _sampled() -> Scene:
    target = _prepared()
    how = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    return Scene([target], lambda: generated(target, ["mxfp4"], **how), lambda: generated(target, [], **how))


def _built() -> Scene:
    """Levels and decoders are made in every call."""
    target = _prepared()

    def act() -> list[Written]:
        hf_mlspec.clear(target)
        return generated(target, ["mxfp4", "prompt_lookup"])

    return Scene([target], act, lambda: generated(target, []))


def _stream() -> Scene:
    """Rows come and go, prompts are read in chunks and kept."""
    target = _prepared()
    level = near(target, 0.02)
    rows = [_row(40, 1), _row(5, 2), _row(40, 1)[:34] + _row(4, 3), _row(9, 4)]

    def act(*levels: Any) -> list[Written]:
        return streamed(target, list(levels), rows, prefill_chunk=16, prefix_cache="1MiB")

    return Scene([target, level], lambda: act(level), act)


def _stream_by_modules() -> Scene:
    target = tiny(seed=2)
    level = near(target, 0.02)
    rows = [_row(8, 1), _row(5, 2), _row(7, 3)]
    return Scene([target, level], lambda: streamed(target, [level], rows), lambda: streamed(target, [], rows))


def _growth() -> Scene:
    """A second row needs more slots than the cache has."""
    target = _prepared(max_position_embeddings=1024)
    rows = [_row(8, 1), _row(9, 2), _row(600, 3)]
    return Scene([target], lambda: streamed(target, ["mxfp4"], rows), lambda: streamed(target, [], rows))


def _prepare() -> Scene:
    target = tiny("qwen3", seed=2, dtype=torch.float32)

    def act(levels: tuple = ("mxfp4",)) -> list[Written]:
        hf_mlspec.prepare(target)
        found = generated(target, list(levels))
        hf_mlspec.restore(target)
        return found

    def mend() -> None:
        hf_mlspec.restore(target)
        hf_mlspec.clear(target)

    return Scene([target], act, lambda: act(()), mend)


def _nest() -> Scene:
    """Weights are overwritten in their own memory, and come back."""
    target = tiny(seed=2, dtype=torch.bfloat16, hidden_size=64, head_dim=16, intermediate_size=128)

    def act() -> list[Written]:
        hf_mlspec.nest(target)
        found = generated(target, ["nested"])
        hf_mlspec.unnest(target)
        return found

    def mend() -> None:
        if any(map(holds_draft, target.modules())):
            hf_mlspec.unnest(target)

    return Scene([target], act, None, mend)


SCENES: dict[str, Callable[[], Scene]] = {
    "chain of modules": _by_modules,
    "compiled chain": _compiled,
    "sampled chain": _sampled,
    "levels are built": _built,
    "stream": _stream,
    "stream of modules": _stream_by_modules,
    "cache grows": _growth,
    "prepare, restore": _prepare,
    "nest, unnest": _nest,
}
