"""How does a stream of tokens train a model, and what is its loss at each distance from a text's beginning?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from eval.progress import Progress
from eval.training.tokens import batches

WARM_UP = 0.03  # of the training: AdamW's averages are of no worth before
LEAST_RATE = 0.02  # of the highest, at the end
DECAY = 0.1
BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Recipe:
    """``rows`` windows of ``positions`` tokens a step; ``steps``, or as many as ``minutes`` allow."""

    positions: int
    rows: int
    rate: float
    minutes: float
    steps: int | None = None
    seed: int = 0


def rounded_products(device: str) -> AbstractContextManager:
    """Products in bfloat16 on a GPU; a CPU, where only tests train, computes in float32."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.startswith("cuda") else nullcontext()


def token_losses(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """ids int64 ``[rows, tokens + 1]`` -> ``[rows, tokens]``: float32 losses, and whether the likeliest is right."""
    with rounded_products(str(model.device)):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    wanted = ids[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="none").view_as(wanted)
    return losses, logits.detach().argmax(-1) == wanted


def rate_at(share: float, highest: float) -> float:
    """The learning rate: up in a straight line, down along a cosine."""
    fall = LEAST_RATE + (1 - LEAST_RATE) * (1 + np.cos(np.pi * share)) / 2
    return float(highest * min(share / WARM_UP + 0.01, fall))


def mean_loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Of what `token_losses` gives."""
    return token_losses(model, ids)[0].mean()


def train(model: PreTrainedModel, stream: np.ndarray, recipe: Recipe,
          loss_of: Callable[[PreTrainedModel, Tensor], Tensor] = mean_loss) -> dict:
    """Trains in place; -> steps, seconds, tokens and losses on the way. loss_of: of the model and a batch of ids."""
    matrices = [p for n, p in model.named_parameters() if p.ndim >= 2 and "embed" not in n]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    cuda = model.device.type == "cuda"
    stepper = torch.optim.AdamW([{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
                                lr=recipe.rate, betas=BETAS, fused=cuda)
    device_stream = torch.from_numpy(stream.astype(np.int32)).to(model.device)
    source = batches(device_stream, recipe.positions, recipe.rows, recipe.seed)
    model.train()
    progress, losses, said = Progress(recipe.steps, 60 * recipe.minutes), [], -10.0
    for share in progress:
        for group in stepper.param_groups:
            group["lr"] = rate_at(share, recipe.rate)
        loss = loss_of(model, next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
        stepper.zero_grad()
        if progress.done % 20 == 0:  # reading a loss waits for the device
            losses.append(round(loss.item(), 4))
            if progress.elapsed() >= said + 5:
                said = progress.elapsed()
                speed = (progress.done + 1) * recipe.rows * recipe.positions / max(said, 1e-9)
                print(f"step {progress.done}, {share:.0%}, {said:.0f} s, loss {losses[-1]:.3f}, "
                      f"{speed:,.0f} tokens/s", flush=True)
    model.eval()
    return {"steps": progress.done, "seconds": round(progress.elapsed(), 1),
            "tokens": progress.done * recipe.rows * recipe.positions, "losses": losses}


@torch.no_grad()
def by_position(model: PreTrainedModel, stream: np.ndarray, ends: list[int], count: int) -> list[dict]:
    """Mean loss and share of right tokens by distance from a window's beginning, of ``count`` windows at most.

    stream ``[tokens]``; ``ends``: where each range of positions ends; the last is the window's length. ValueError for
    a stream that is shorter than one window.
    """
    length, model = ends[-1], model.eval()
    count = min(count, (len(stream) - 1) // length)
    if count < 1:
        raise ValueError(f"a held-out text has {len(stream):,} tokens, a window needs {length + 1:,}")
    losses, right = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)
    for at in range(count):
        ids = torch.from_numpy(stream[at * length : (at + 1) * length + 1].astype(np.int64)).to(model.device)
        lost, hit = token_losses(model, ids[None])
        losses += lost[0].double().cpu()
        right += hit[0].double().cpu()
    return [{"from": low, "to": high, "windows": count, "loss": float(losses[low:high].mean() / count),
             "right": float(right[low:high].mean() / count)} for low, high in zip([0, *ends], ends, strict=False)]
