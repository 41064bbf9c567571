"""What does a model write that nobody has touched, at the weights that another one has come to by any way?

Weights are named by how a fresh model comes to them: kind, edits, form. Models and answers are kept for the next run.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from decoders import in_float64
from models import letters, tiny
from torch import nn

import hf_mlspec
from hf_mlspec.speculation.sampling import drawn_seed

from .asks import options_of, padded, prompts_of
from .reference import judge
from .worlds import World

# Of models: class, dtype, whether the head is tied to the embedding.
KINDS = (
    ("llama", "bfloat16", False), ("llama", "bfloat16", True), ("qwen3", "bfloat16", False),
    ("gemma2", "bfloat16", True), ("mistral", "float32", False), ("mixtral", "bfloat16", False),
)  # fmt: skip
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 64}
EDITS = 3
CALIBRATION = [[3 + (5 * i + j) % 60 for i in range(24)] for j in range(3)]
_ONE = {"lengths": [9], "seed": 1, "repeats": False, "new": 9}
_THREE = {"lengths": [3, 12, 1], "seed": 2, "repeats": True, "new": 8}
ASKS: tuple[dict[str, Any], ...] = (
    _ONE, _THREE, {**_THREE, "sample": 5, "temperature": 0.9, "top_k": 0}, {**_ONE, "eos": list(range(8, 20))},
    {**_THREE, "repetition_penalty": 1.3}, {**_ONE, "lengths": [20], "repeats": True, "new": 3},
)  # fmt: skip


class Weights(NamedTuple):
    """kind: number in KINDS. edits: numbers of those made, in order. form: () for plain ones, or what was done."""

    kind: int
    edits: tuple[int, ...] = ()
    form: tuple[str, ...] = ()


def plain(kind: int) -> nn.Module:
    """A fresh model."""
    name, dtype, tied = KINDS[kind]
    model = tiny(name, seed=2 + kind, dtype=getattr(torch, dtype), tie_word_embeddings=tied, **SHAPE)
    model.generation_config.eos_token_id = None
    return model


def edit(model: nn.Module, number: int) -> None:
    """Change weights in place, as training does."""
    first = model.model.layers[0]
    with torch.no_grad():
        if number == 0:
            first.self_attn.q_proj.weight.mul_(-1.5)
        elif number == 1:
            model.model.norm.weight.add_(torch.linspace(-0.5, 0.5, SHAPE["hidden_size"]).to(model.dtype))
        else:
            model.get_output_embeddings().weight[5:9].mul_(2.0)


def formed(model: nn.Module, form: tuple[str, ...]) -> nn.Module:
    """The model, in place, in another form."""
    if form and form[0] == "nested":
        return hf_mlspec.nest(model, form[1])
    if form:
        hf_mlspec.quantize(model, form[1], form[0], calibration=CALIBRATION, group_size=32)
    return model


@lru_cache(maxsize=40)
def twin(weights: Weights) -> nn.Module:
    """A model at these weights, unprepared."""
    model = plain(weights.kind)
    for number in weights.edits:
        edit(model, number)
    return formed(model, weights.form)


@lru_cache(maxsize=40)
def state_dict(weights: Weights) -> dict[str, torch.Tensor]:
    """That of a model at these weights; a copy."""
    return {name: tensor.clone() for name, tensor in twin(weights).state_dict().items()}


def same(model: nn.Module, weights: Weights) -> bool:
    """Whether a model has these weights, bit for bit."""
    own, other = model.state_dict(), state_dict(weights)
    return own.keys() == other.keys() and all(
        own[name].dtype == other[name].dtype and torch.equal(_bits(own[name]), _bits(other[name])) for name in own
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor


@lru_cache(maxsize=4000)
def answer(weights: Weights, ask: int, engine: str | None) -> list[list[int]]:
    """New ids, row by row, padded. engine: None for transformers' own loop. Those of compiled engines are judged in
    float64, and nested weights write what the plain ones do."""
    exact = engine in ("cpu", "cuda")
    if exact and weights.form[:1] == ("nested",):
        weights = weights._replace(form=())
    model = twin(weights)
    words = {} if engine is None else {"assistant_models": [], "speculation_config": {"engine": engine}}
    written = call(model, ask, **words)
    if exact:
        _judged(weights, ask, written)
    return written


def call(model: nn.Module, ask: int, **words: Any) -> list[list[int]]:
    """New ids of generate, row by row, padded."""
    if "sample" in ASKS[ask]:
        torch.manual_seed(ASKS[ask]["sample"])
    batch = padded(prompts_of(ASKS[ask], SHAPE["vocab_size"]))
    out = model.generate(**batch, **options_of(ASKS[ask], None), **words)
    return out[:, batch["input_ids"].shape[1] :].tolist()


@lru_cache(maxsize=40)
def _world(weights: Weights) -> World:
    name, dtype, _ = KINDS[weights.kind]
    wide = in_float64(twin(weights))
    if name == "mixtral":
        wide.set_experts_implementation("eager")
    return World({"name": name, "dtype": dtype, "shape": SHAPE, "weights": ""}, twin(weights), wide, letters())


def _judged(weights: Weights, ask: int, written: list[list[int]]) -> None:
    said = ASKS[ask]
    rows = prompts_of(said, SHAPE["vocab_size"])
    width = max(map(len, rows))
    seed = drawn_seed(torch.Generator().manual_seed(said["sample"])) if "sample" in said else None
    for number, (row, new) in enumerate(zip(rows, written, strict=True)):
        ends = [place for place, token in enumerate(new) if token in said.get("eos", ())]
        new = new[: ends[0] + 1] if ends else new
        verdict = judge(_world(weights), said, row, new, seed=seed, stream=number,
                        shown=[0] * (width - len(row)) + row, exact=False)  # fmt: skip
        assert not verdict.wrong, (weights, ask, number, verdict.wrong)
