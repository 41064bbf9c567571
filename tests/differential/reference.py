"""Are these the tokens that the model alone takes, by its own modules in float64? Or a tie, and is that proven?

One pass over a row and what was written behind it scores every position. A token is right where it is the one that the
float64 scores (and the noise of a row that samples) give. Another token is a proven tie where an error of the logits
that the model's own modules make themselves, computing in the model's dtype, is enough to have it chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from decoders import HYBRIDS, MIXTURES, firm_logits
from torch import Tensor

from hf_mlspec.speculation.sampling import drawn

from .asks import ends_at, processors_of
from .worlds import World

_TIMES = 4.0  # the error of the modules at this position, in its largest logit
_LEAST = {"bfloat16": 2.0**-7, "float32": 2.0**-18, "float64": 2.0**-18}  # of the largest logit
_DRAWS = 96  # of logits within that error
_LEAST_WITH_STATES = 2.0**-12  # of models whose modules compute states in float32, whatever they are in


@dataclass
class Verdict:
    """wrong: what is not right, in words, "" for nothing. tokens: looked at. ties: proven ones among them."""

    wrong: str = ""
    tokens: int = 0
    ties: int = 0


def judge(
    world: World, ask: dict[str, Any], prompt: list[int], new: list[int], *, seed: int | None, stream: int,
    shown: list[int], exact: bool, cut: bool = False,
) -> Verdict:  # fmt: skip
    """new: what was written behind a prompt. seed, stream: of the noise. shown: the prompt as processors see it, with
    its padding. exact: it was written in float64, where there are no ties. cut: the row may
    end anywhere."""
    verdict = Verdict(tokens=len(new))
    if not new and cut:
        return verdict
    if not 0 < len(new) <= ask["new"]:
        return Verdict(f"{len(new)} new tokens of {ask['new']}")
    ended = ends_at(ask, world.tokenizer, shown, new)
    if ended != len(new) or (not cut and len(new) < ask["new"] and not _ends(ask, world, shown, new)):
        return Verdict(f"{len(new)} new tokens, and the row ends behind {ended}")
    with torch.no_grad():
        ids = torch.tensor([prompt + new])
        logits, firm = _wide(world, ids)
        first = len(prompt) - 1
        logits, firm = logits[0, first:-1], firm[0, first:-1]
        error = None
        for place, token in enumerate(new):
            rest = shown + new[:place], len(shown) - len(prompt), seed, stream, len(prompt) + place
            best = chosen(ask, logits[place], *rest)
            if best == token:
                continue
            if error is None:
                error = _error(world, ids, logits, first, exact)
            if not bool(firm[place]) and not exact:
                verdict.ties += 1  # a rounding error sends a token to other experts
            elif may_be_chosen(ask, logits[place], float(error[place]), token, best, rest):
                verdict.ties += 1
            else:
                gap = float(logits[place, best] - logits[place, token])
                said = f"{gap:.3g} above it, where {error[place]:.3g} is a tie"
                verdict.wrong = f"token {place} is {token}, float64 takes {best}, {said}"
                break
    return verdict


def _ends(ask: dict[str, Any], world: World, shown: list[int], new: list[int]) -> bool:
    """Whether the last of these tokens ends the row."""
    return new[-1] in (ask.get("eos") or ()) or ends_at(ask, world.tokenizer, shown, [*new, 0]) == len(new)


def _wide(world: World, ids: Tensor) -> tuple[Tensor, Tensor]:
    if world.said["name"] in MIXTURES or hasattr(world.target.config, "num_experts"):
        return firm_logits(world.wide, ids)
    logits = world.wide(ids).logits
    return logits, torch.ones(ids.shape, dtype=torch.bool)


def chosen(
    ask: dict[str, Any], logits: Tensor, prefix: list[int], padding: int, seed: int | None, stream: int, place: int
) -> int:
    """The token that these logits `[vocab]` give behind a prefix, `padding` tokens of which are padding."""
    scores = processors_of(ask, padding)(torch.tensor([prefix]), logits[None].float())
    if seed is None:
        return int(scores.argmax())
    return int(drawn(scores[None], seed, [stream], [place])[0])


def _error(world: World, ids: Tensor, logits: Tensor, first: int, exact: bool) -> Tensor:
    """How far logits may be from those in float64, at each position."""
    dtype = "float64" if exact else world.said["dtype"]
    own = _LEAST_WITH_STATES if world.said["name"] in HYBRIDS else 0.0
    least = max(_LEAST[dtype], own) * logits.abs().amax(dim=-1)
    if exact:
        return least
    own = world.target(ids).logits[0, first:-1].double()
    return torch.maximum(_TIMES * (own - logits).abs().amax(dim=-1), least)


def may_be_chosen(ask: dict, logits: Tensor, error: float, token: int, best: int, rest: tuple) -> bool:
    """Whether logits that are no further than `error` from these give `token`: those that favour it, and, as what
    filters leave in may turn on any of them (typical_p), some that are drawn."""
    nearer = logits.clone()
    nearer[token] += error
    nearer[best] -= error
    lower = logits - error
    lower[token] = logits[token] + error
    if any(chosen(ask, near, *rest) == token for near in (nearer, lower)):
        return True
    draw = torch.Generator().manual_seed(token)
    signs = torch.randint(-1, 2, (_DRAWS, len(logits)), generator=draw, dtype=logits.dtype)
    return any(chosen(ask, logits + error * own, *rest) == token for own in signs)
