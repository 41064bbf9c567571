"""How is a target of a known shape made without a checkpoint, and a draft that is right as often as one asks?

The next token of a made model is a known function of the last token alone, whatever stands before it: every forward
pass costs what the shape costs, and what it predicts is known. Embeddings are random rows of unit variance. The head's
row of the token that follows t is the embedding of t, scaled, so that the right logit is near 32, while the largest of
the others stays near 32 * 5 / sqrt(hidden size): rounding to BF16, a cast to MXFP4, and the noise of temperature 1
change no choice. What attention and MLP add to the residual stream is too faint to count, but not zero: products with
zeros take less power, so they can run at higher clocks.

The target's tokens follow one another in a single cycle through the whole vocabulary, in a drawn order: no text
repeats itself before it has as many tokens. A draft agrees with it after a drawn share of the tokens and is as sure of
itself after the others. So the verdict on a drafted token depends on the token before it, and on no plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.plans.models import Loaded
from eval.plans.tables import PlanError
from eval.targets import OF_CHAINS, random_model

SHAPE = "shape:"  # before the name of a shape of eval/targets.py
_ACCEPTANCE = "acceptance="
_RIGHT = 32.0  # the right logit: e^32 is 6e8 times a vocabulary of 128,256, so temperature 1 draws nothing else
_FAINT = 2.0**-10  # what the output projections of attention and MLP are scaled by; exact in every dtype
_CHUNK = 8192  # rows of the head written at once: 64 MiB of temporaries for 8 billion weights in BF16
_LEAD = 8.0  # of the right logit over the next one, the least that is let through
_SAMPLE = 1024  # tokens whose successors are checked when a model is made


@dataclass(frozen=True)
class Shape:
    """What a plan's word says: "shape:NAME" is a target, "shape:NAME?acceptance=0.8" a draft of such a target.

    acceptance: the share of tokens, 0 to 1, after which the draft predicts what the target does; None of a target.
    """

    name: str
    acceptance: float | None = None

    def __str__(self) -> str:
        return self.name if self.acceptance is None else f"{self.name}?{_ACCEPTANCE}{self.acceptance:g}"


def target_shape(word: str, where: str) -> Shape:
    """The shape of a target; PlanError, beginning with `where`, for an unknown one and for one with an acceptance."""
    name, asks, _ = word.removeprefix(SHAPE).partition("?")
    if asks:
        raise PlanError(f"{where}: {word!r} is a target, which has no acceptance: write \"{SHAPE}{name}\"")
    return Shape(_known(name, word, where))


def draft_shape(word: str, where: str) -> Shape:
    """The shape of a draft; PlanError, beginning with `where`, for an unknown one and without a share from 0 to 1."""
    name, _, setting = word.removeprefix(SHAPE).partition("?")
    _known(name, word, where)
    try:
        share = float(setting.removeprefix(_ACCEPTANCE)) if setting.startswith(_ACCEPTANCE) else None
    except ValueError:
        share = None
    if share is None or not 0 <= share <= 1:  # false of NaN, too
        raise PlanError(f"{where}: {word!r} must say how often it is right, from 0 to 1, as in "
                        f"\"{SHAPE}{name}?{_ACCEPTANCE}0.8\"")
    return Shape(name, share)


def _known(name: str, word: str, where: str) -> str:
    if name not in OF_CHAINS:
        raise PlanError(f"{where}: {word!r} names no shape, choose one of {', '.join(OF_CHAINS)}")
    return name


class ShapeTarget(Loaded):
    """A target without a tokenizer: its prompts are ids written as numbers."""

    def encode(self, text: str) -> list[int]:
        """The ids that stand in a prompt of `random_prompts`, or in several joined."""
        return [int(word) for word in text.split()]


def random_prompts(shape: Shape, count: int, tokens: int, seed: int) -> list[str]:
    """`count` prompts of so many random ids, written as numbers: always the same ones of a seed."""
    size = (count, tokens)
    rows = torch.randint(OF_CHAINS[shape.name]["vocab_size"], size, generator=torch.Generator().manual_seed(seed))
    return [" ".join(map(str, row)) for row in rows.tolist()]


def make_target(shape: Shape, device: str, dtype: torch.dtype, seed: int) -> ShapeTarget:
    """A model of this shape, `dtype`, on the device, whose tokens follow one another as `successors` says."""
    following = successors(OF_CHAINS[shape.name]["vocab_size"], seed)
    return ShapeTarget(_made(shape, following, device, dtype, seed), None, [])


def make_draft(shape: Shape, target: PreTrainedModel, seed: int) -> PreTrainedModel:
    """A model of this shape with the vocabulary, positions, dtype and device of a target made with the same seed.

    PlanError for a shape too narrow to tell so many tokens apart.
    """
    sizes = {name: getattr(target.config, name) for name in ("vocab_size", "max_position_embeddings")}
    following = guesses(successors(sizes["vocab_size"], seed), shape.acceptance, seed + 1)
    return _made(shape, following, str(target.device), target.dtype, seed + 1, **sizes)


def successors(vocabulary: int, seed: int) -> Tensor:
    """int64 `[vocabulary]`: the token that follows each, in one cycle through all of them in a drawn order."""
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed))
    following = torch.empty_like(order)
    following[order] = order.roll(-1)
    return following


def guesses(following: Tensor, acceptance: float, seed: int) -> Tensor:
    """int64 `[vocabulary]`: `following` for a drawn share of the tokens, and another token for each of the others.

    The others change successors among themselves, so that no token follows two; a single one would find nobody to
    change with, so there are none of them or at least two. With the same seed a larger share holds a smaller one.
    """
    wrong = round((1 - acceptance) * len(following))
    drawn = torch.randperm(len(following), generator=torch.Generator().manual_seed(seed))
    others = drawn[: 2 if wrong == 1 else wrong]
    guessed = following.clone()
    guessed[others] = following[others.roll(-1)]
    return guessed


@torch.no_grad()
def _made(shape: Shape, following: Tensor, device: str, dtype: torch.dtype, seed: int, **sizes: int
          ) -> PreTrainedModel:
    """following: int64 `[vocabulary]`. Weights are drawn in BF16 on the device."""
    model = random_model(shape.name, device, seed, **sizes)
    embedding, head = (part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings()))
    following = following.to(embedding.device)
    embedding.normal_()
    for first in range(0, len(following), _CHUNK):
        head[following[first : first + _CHUNK]] = embedding[first : first + _CHUNK] * (_RIGHT / embedding.shape[1])
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
            weight.mul_(_FAINT)
    model.config.name_or_path = str(shape)  # what chains call it
    _check(model, following, shape)
    return model.to(dtype)


def _check(model: PreTrainedModel, following: Tensor, shape: Shape) -> None:
    """PlanError where the successors of some tokens do not lead by enough."""
    vocabulary = len(following)
    tokens = torch.arange(0, vocabulary, max(vocabulary // _SAMPLE, 1), device=following.device)
    embedded = model.get_input_embeddings()(tokens)
    best = model.get_output_embeddings()(model.base_model.norm(embedded)).topk(2)
    led = best.values[:, 0] - best.values[:, 1] >= _LEAD
    wrong = int((~led | (best.indices[:, 0] != following[tokens])).sum())
    if wrong:
        raise PlanError(f"shape {shape.name} is {embedded.shape[1]} wide, too narrow to tell {vocabulary} tokens "
                        f"apart ({wrong} of {len(tokens)} are too near to others): choose a wider one")
