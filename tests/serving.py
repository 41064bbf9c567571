"""Who are the rows that come and go in captured rounds, on any device, and what would each of them write alone?"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from models import near, tiny
from transformers import PreTrainedModel

from hf_mlspec.engines.choose import required_decoder
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.cuda.engine import CudaEngine
from hf_mlspec.nn.replace import direct_cast
from hf_mlspec.speculation.checker import Checker, Verdict
from hf_mlspec.speculation.draft import Drafter
from hf_mlspec.speculation.drafters.checked import CheckedDrafter
from hf_mlspec.speculation.drafters.model import ModelDrafter
from hf_mlspec.speculation.loop import Loop
from hf_mlspec.speculation.rounds.caches import adopt
from hf_mlspec.speculation.rounds.captured import CapturedRounds
from hf_mlspec.speculation.rounds.chain import CapturedChain
from hf_mlspec.speculation.rounds.host import HostRounds
from hf_mlspec.speculation.rounds.plan import round_levels
from hf_mlspec.speculation.sampling import Sampler

VOCAB, SEED = 64, 11
SHAPES = {"cpu": {}, "cuda": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}}


@cache
def models(device: str) -> dict[str, PreTrainedModel]:
    plain = tiny(seed=2, dtype=torch.bfloat16, **SHAPES[device])
    small = near(plain, 0.05 if device == "cpu" else 0.02)
    target = plain.to(device)
    return {"target": target, "cast": direct_cast(target), "small": small.to(device)}


@cache
def decoder(device: str, name: str) -> CudaDecoder:
    return required_decoder(models(device)[name], "cuda")


class Levels(NamedTuple):
    """Makes the levels of a chain. sampled: whether rows sample."""

    device: str = "cpu"
    sampled: bool = False

    def runner(self, name: str, follow: CudaEngine | None = None) -> CudaEngine:
        return CudaEngine(models(self.device)[name], decoder(self.device, name), follow=follow)

    def sampler(self) -> Sampler:
        return Sampler(VOCAB, seed=SEED if self.sampled else None)

    def checker(self, name: str, follow: CudaEngine | None = None) -> Checker:
        return Checker(self.runner(name, follow), self.sampler(), name, keep_logits=False)

    def model(self, name: str, follow: CudaEngine | None = None, **options) -> ModelDrafter:
        return ModelDrafter(self.runner(name, follow), self.sampler(), name, **options)

    def checked(self, follow: CudaEngine | None, inner: Drafter) -> CheckedDrafter:
        return CheckedDrafter(self.checker("cast", follow), inner, num_draft_tokens=2, threshold=0.1)


GREEDY = Levels()
# (levels, the target's runner) -> what drafts
CHAINS: dict[str, Callable] = {
    "nothing": lambda levels, top: None,
    "small": lambda levels, top: levels.model("small"),
    "cast": lambda levels, top: levels.model("cast", top, threshold=0.2),
    "cast, small": lambda levels, top: levels.checked(top, levels.model("small")),
    "own cast, small": lambda levels, top: levels.checked(None, levels.model("small", threshold=0.1)),
}


def captured_loop(
    name: str, levels: Levels = GREEDY, emit=None, *, batch: int = 1, slots: int = 16, streams: bool = False
) -> Loop:
    """A loop without rows, over a chain with room for few. streams: as of `CapturedChain`, whose rows get their first
    tokens soon."""
    target = levels.checker("target")
    drafter = CHAINS[name](levels, target.runner)
    found = round_levels(target, drafter, num_draft_tokens=4, batch=batch, longest=64)
    chain = CapturedChain(found, (), batch, slots, sampled=levels.sampled, streams=streams)
    adopt(chain, target, drafter, 0)
    loop = Loop(CapturedRounds(chain, target, drafter), emit=emit)
    loop.rounds.steps.soon = streams
    loop.start([], [])
    return loop


def alone(prompt: list[int], budget: int, number: int, levels: Levels = GREEDY) -> list[int]:
    """What the target writes for one row: greedily step by step on the host, sampled with the noise of its number."""
    row = list(prompt)
    if levels.sampled:
        loop = captured_loop("nothing", levels, slots=256)
    else:
        target, device = levels.checker("target"), torch.device(levels.device)
        target.start(0, device)
        rounds = HostRounds(target, None, num_draft_tokens=0, device=device)
        loop = Loop(rounds)
        loop.start([], [])
    loop.admit([row], [budget], [number])
    while loop.round():
        pass
    return row[len(prompt) :]


class Serving:
    """A chain whose rows come and go at random."""

    def __init__(self, name: str, levels: Levels = GREEDY, seed: int = 0, streams: bool = False):
        self.rng, self.levels, self.going = random.Random(seed), levels, []
        self.asked: dict[int, tuple[list[int], int]] = {}
        self.written: dict[int, list[int]] = {}
        self.loop = captured_loop(name, levels, self.emit, streams=streams)

    def emit(self, numbers: list[int], kept: list[list[int]], verdict: Verdict) -> None:
        for number, tokens in zip(numbers, kept, strict=True):
            self.written.setdefault(number, []).extend(tokens)

    def new(self) -> tuple[list[int], int, int]:
        row = [self.rng.randrange(3, VOCAB) for _ in range(self.rng.choice([1, 2, 5, 9, 14, 15, 16, 30]))]
        self.asked[len(self.asked)] = (list(row), budget := self.rng.randrange(1, 24))
        return row, budget, len(self.asked) - 1

    def change(self) -> None:
        """Some rows that go on are dropped as well; places of those that ended are taken, or not."""
        rng, loop = self.rng, self.loop
        going = [r for r in self.going if rng.random() > 0.05]
        places = [r for r in range(len(loop.rows)) if r not in going and rng.random() < 0.5]
        if places:
            loop.replace(places, *map(list, zip(*[self.new() for _ in places], strict=True)))
        going += places
        keep = sorted(going) if rng.random() < 0.7 else rng.sample(going, len(going))
        loop.select(keep)
        joining = [self.new() for _ in range(rng.choice([0, 0, 0, 1, 2, 3]) if len(keep) < 7 else 0)]
        if joining:
            loop.admit(*map(list, zip(*joining, strict=True)))

    def round(self) -> None:
        self.going = self.loop.round() if self.loop.rows else []
        rounds = self.loop.rounds
        assert len(set(rounds.places)) == len(self.loop.rows)
        assert all(place < rounds.bucket <= rounds.chain.batch for place in rounds.places)

    def play(self, turns: int) -> None:
        """So many turns, and assert that every row has written what it would alone."""
        for _ in range(turns):
            self.change()
            self.round()
        for number, tokens in self.written.items():
            prompt, budget = self.asked[number]
            assert tokens == alone(prompt, budget, number, self.levels)[: len(tokens)], f"row {number}"
        assert self.loop.stats.new_tokens == sum(map(len, self.written.values()))
