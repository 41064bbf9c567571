"""How does a router learn what a bit is worth? By distillation, with a price on bits that aims at an average.

    loss = KL(teacher || student) a token + bit_cost (expected bits - target)^2

The student reads mixtures of plane prefixes (mixing.py), the teacher full precision. The temperature falls, so that
mixtures come near to the choices that they become; the last steps may read those themselves. At the end one price for
a bit is put on all scores, so that the hard choices meet the target on the training queries. The model itself is
frozen. QAQ leaves loss, temperature and schedule open; these are ours.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.whole_file import written_whole
from .blocks import Block, average_bits, blocks_of
from .foresight import LEAD, indices
from .likely import RECENT
from .mixing import Mixture, Prefixes
from .passes import Routed, Steps, recorded
from .router import HIDDEN, PROMPT, STEP, WIDTHS, Router, require_every, require_widths

_PRICED_ROWS = 64  # training queries on which the price is found
_PRICE_PASSES = 3
_FORESEEN_ROWS = 256  # training queries by which choices are foreseen
_LEAST_SPREAD = 1e-3


@dataclass(frozen=True)
class RouterRecipe:
    """How a router is trained.

    target_bits: of a weight, on average over weights and queries. widths, hidden: of the router. steps, batch,
    learning_rate: of Adam. temperatures: of the softmax at the first and the last step. bit_cost: of the squared
    distance to the target. query_tokens: the first tokens of a row, its query. seed: of weights and batches. every:
    "prompt": tokens behind the query read what the query chooses; "step": each chooses for itself, and steps will.
    hard_share: of the steps, the last ones, whose student reads what the router chooses in place of mixtures.
    """

    target_bits: float
    widths: tuple[int, ...] = WIDTHS
    hidden: int = HIDDEN
    steps: int = 200
    batch: int = 8
    learning_rate: float = 0.02
    temperatures: tuple[float, float] = (1.0, 0.1)
    bit_cost: float = 0.3
    query_tokens: int = 64
    seed: int = 0
    every: str = PROMPT
    hard_share: float = 0.0

    def require(self, planes: int, samples: Tensor) -> None:
        """ValueError for a recipe that cannot be followed with so many planes and these samples ``[rows, tokens]``."""
        widths = require_widths(self.widths, planes)
        require_every(self.every)
        if not widths[0] <= self.target_bits <= widths[-1]:
            raise ValueError(
                f"target_bits is {self.target_bits}, the candidates are {list(widths)}: choose {widths[0]} to "
                f"{widths[-1]}, or other widths"
            )
        if samples.dim() != 2 or samples.shape[1] < 2 or not len(samples):
            tokens = samples.shape[-1] if samples.numel() else 0
            raise ValueError(
                f"the training text has samples of {tokens} tokens: a next token takes at least 2, give a longer text"
            )
        for name in ("steps", "batch", "query_tokens", "hidden"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}, it must be a positive number")
        if not 0 <= self.hard_share <= 1:
            raise ValueError(f"hard_share is {self.hard_share}, a share of the steps: give 0 to 1")
        if not self.temperatures[0] >= self.temperatures[1] > 0:
            raise ValueError(f"temperatures are {self.temperatures}: give two above 0, the second no larger")

    def temperature(self, step: int) -> float:
        """Of the softmax at a step: it falls by a factor. What is chosen depends on none: such steps have the first,
        whose gradient reaches every width."""
        first, last = self.temperatures
        return first if self.is_hard(step) else first * (last / first) ** (step / max(self.steps - 1, 1))

    def is_hard(self, step: int) -> bool:
        """Whether the student of a step reads what the router chooses."""
        return step >= self.steps - round(self.hard_share * self.steps)


@dataclass(frozen=True)
class Step:
    """What one step of training saw: the loss, its distillation part a token in nats, expected bits of a weight."""

    step: int
    loss: float
    distillation: float
    bits: float


@dataclass
class Trained:
    """A trained router, what every step saw, the average bits of its hard choices on training queries."""

    router: Router
    steps: list[Step] = field(default_factory=list)
    bits: float = 0.0


def train_router(
    model: nn.Module,
    teacher: nn.Module,
    samples: Tensor,
    recipe: RouterRecipe,
    *,
    checkpoint: str | os.PathLike | None = None,
    every: int = 25,
    progress: Callable[[Step], None] | None = None,
) -> Trained:
    """A router for ``model``, whose linears are bit-planes.

    teacher: the same model in full precision. samples: int64 ``[rows, tokens]``, a query each. checkpoint: a file in
    which steps are kept, ``every`` so many, and from which a killed run goes on; it is removed at the end. progress:
    called behind every step. ValueError for a recipe or a checkpoint that does not fit; FloatingPointError where
    logits or features are NaN.
    """
    blocks = blocks_of(model)
    recipe.require(min(one.num_planes for b in blocks for one in b.linears.values()), samples)
    torch.manual_seed(recipe.seed)
    router = Router(blocks, recipe.widths, recipe.hidden).to(samples.device).choosing(recipe.every)
    with frozen(model), frozen(teacher):
        learner = _Learner(model, teacher, blocks, router, samples, recipe)
        done = learner.resume(checkpoint)
        if not done:
            learner.standardize()
        found = Trained(router, done)
        for step in range(len(done), recipe.steps):
            found.steps.append(learner.step(step))
            if progress is not None:
                progress(found.steps[-1])
            if checkpoint is not None and (step + 1) % every == 0 and step + 1 < recipe.steps:
                learner.keep(checkpoint, found.steps)
        router.temperature = recipe.temperature(recipe.steps - 1)
        found.bits = router.average = learner.meet_target()
        learner.look_ahead()
    router.cpu().eval().requires_grad_(False)
    if checkpoint is not None:
        Path(checkpoint).unlink(missing_ok=True)
    return found


class _Learner:
    """What the steps of one training share."""

    def __init__(self, model: nn.Module, teacher: nn.Module, blocks: list[Block], router: Router, samples: Tensor,
                 recipe: RouterRecipe):  # fmt: skip
        self.model, self.teacher, self.blocks, self.router = model, teacher, blocks, router
        self.samples, self.recipe = samples, recipe
        self.mixture = Mixture(router, blocks, Prefixes(blocks, recipe.widths))
        self.optimizer = torch.optim.Adam(router.parameters(), lr=recipe.learning_rate)

    def batch(self, step: int) -> Tensor:
        """``[batch, tokens]``: every sample once before any comes again, in an order of the seed's."""
        count, size = len(self.samples), min(self.recipe.batch, len(self.samples))
        first = step * size
        wanted = range(first, first + size)
        orders = {epoch: self._order(epoch) for epoch in {place // count for place in wanted}}
        return self.samples[torch.tensor([orders[place // count][place % count] for place in wanted])]

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.recipe.seed + epoch)
        return torch.randperm(len(self.samples), generator=generator).tolist()

    def lengths(self, rows: Tensor) -> list[int]:
        return [min(self.recipe.query_tokens, rows.shape[1])] * len(rows)

    @torch.no_grad()
    def standardize(self) -> None:
        """Let features of every block have mean 0 and spread 1 over training queries."""
        rows = self.samples[self._order(0)[:_PRICED_ROWS]]
        found: list[list[Tensor]] = [[] for _ in self.blocks]
        for part in rows.split(self.recipe.batch):
            with recorded(self.model, self.blocks, self.lengths(part), self.mixture.features) as features:
                self.model(input_ids=part, use_cache=False)
            for place, own in enumerate(found):
                own.append(features[place].flatten(0, -2))
        for own, of in zip(found, self.router.of, strict=True):
            features = torch.cat(own)
            of.mean.copy_(features.mean(0))
            of.spread.copy_(features.std(0, correction=0).clamp_min(_LEAST_SPREAD))

    def step(self, step: int) -> Step:
        """One step of Adam."""
        rows = self.batch(step)
        self.router.temperature, self.mixture.hard = self.recipe.temperature(step), self.recipe.is_hard(step)
        with torch.no_grad():
            wanted = F.log_softmax(self.teacher(input_ids=rows, use_cache=False).logits.float(), -1)
        with self.mixture.over(self.model, self.lengths(rows)):
            logits = self.model(input_ids=rows, use_cache=False).logits.float()
        distance = F.kl_div(F.log_softmax(logits, -1), wanted, log_target=True, reduction="sum") / rows.numel()
        bits = self.mixture.bits().mean()
        loss = distance + self.recipe.bit_cost * (bits - self.recipe.target_bits) ** 2
        if not bool(torch.isfinite(loss)):
            raise FloatingPointError(f"the loss is {loss.item()} at step {step}: the teacher's or the model's weights "
                                     "hold NaN, or the learning rate is too large")  # fmt: skip
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return Step(step, loss.item(), distance.item(), bits.item())

    @torch.no_grad()
    def meet_target(self) -> float:
        """Put one price for a bit on all scores, so that hard choices have the target on average; that average."""
        rows = self.samples[self._order(0)[:_PRICED_ROWS]]
        for _ in range(_PRICE_PASSES):  # choices change what later blocks see
            _, scores = self._routed(rows)
            self.router.charge(price_for(scores, self.blocks, self.router.widths, self.recipe.target_bits))
        return self._routed(rows)[0]

    @torch.no_grad()
    def look_ahead(self) -> None:
        """Fit guesses of what blocks to come choose to what they choose for training queries; keep what is usual."""
        self.router.look_ahead()
        features: list[list[Tensor]] = [[] for _ in self.blocks]
        chosen: list[list[int]] = [[] for _ in self.blocks]
        for part in self.samples[self._order(0)[:_FORESEEN_ROWS]].split(self.recipe.batch):
            with Routed(self.router, self.blocks, self.lengths(part)).over(self.model) as routed:
                self.model(input_ids=part, use_cache=False)
            for place in range(len(self.blocks)):
                features[place].append(routed.features[place])
                chosen[place] += routed.widths[place]
        self.router.usual = [max(own[:RECENT]) for own in chosen]
        for place, own in enumerate(self.router.ahead):
            wanted = indices(chosen[place + LEAD], self.router.widths, self.samples.device)
            own.fit(torch.cat(features[place]), wanted)

    def _routed(self, rows: Tensor) -> tuple[float, list[Tensor]]:
        """Average bits of hard choices, and the scores of every block ``[rows, widths]`` behind them."""
        bits, found = [], [[] for _ in self.blocks]
        for part in rows.split(self.recipe.batch):
            lengths, steps = self.lengths(part), None
            if self.recipe.every == STEP:
                steps = Steps([(length, part.shape[1]) for length in lengths], [None] * len(part))
            with Routed(self.router, self.blocks, lengths, steps=steps).over(self.model) as routed:
                self.model(input_ids=part, use_cache=False)
            of_tokens = list(routed.of_tokens.values()) or [[[own] for own in widths] for widths in routed.widths]
            for row in range(len(part)):
                each = zip(*(own[row] for own in of_tokens), strict=True)
                bits += [average_bits(list(widths), self.blocks) for widths in each]
            for place, (own, of) in enumerate(zip(found, self.router.of, strict=True)):
                features = routed.features[place]
                if place in routed.step_features:
                    features = torch.cat([features.repeat_interleave(lengths[0], 0), *routed.step_features[place]])
                own.append(of(features))
        return sum(bits) / len(bits), [torch.cat(own) for own in found]

    def keep(self, checkpoint: str | os.PathLike, steps: list[Step]) -> None:
        """What `resume` goes on from, written beside and renamed."""
        state = {"told": self._told(), "router": self.router.state_dict(), "optimizer": self.optimizer.state_dict(),
                 "steps": [dataclasses.astuple(one) for one in steps]}  # fmt: skip
        with written_whole(checkpoint) as beside:
            torch.save(state, beside)

    def resume(self, checkpoint: str | os.PathLike | None) -> list[Step]:
        """The steps that a killed run took, with router and optimizer as they were behind them; none without a file.
        ValueError for a file of another training."""
        if checkpoint is None or not Path(checkpoint).exists():
            return []
        remedy = f"delete {checkpoint} to begin anew, or train as before"
        try:
            state = torch.load(checkpoint, weights_only=True, map_location=self.samples.device)
            told = state["told"]
        except Exception as error:  # torch.load raises whatever its unpickler met
            raise ValueError(f"{checkpoint} is no checkpoint of a router's training ({error}): {remedy}") from error
        own = self._told()
        for name in own:
            if told.get(name) != own[name]:
                raise ValueError(f"{checkpoint} was trained with {name} {told.get(name)}, now {own[name]}: {remedy}")
        self.router.load_state_dict(state["router"])
        self.optimizer.load_state_dict(state["optimizer"])
        return [Step(*one) for one in state["steps"]]

    def _told(self) -> dict[str, str]:
        recipe = {name: repr(value) for name, value in dataclasses.asdict(self.recipe).items()}
        text = f"{list(self.samples.shape)}, sum {int(self.samples.sum())}"
        return recipe | {"model": self.router.identity, "text": text}


@torch.no_grad()
def price_for(scores: Sequence[Tensor], blocks: Sequence[Block], widths: Sequence[int], target: float) -> float:
    """The price for a bit at which the widths of highest ``scores - price x width`` come nearest to ``target`` bits a
    weight on average; scores: of every block ``[rows, widths]``."""
    bits = torch.tensor(widths, dtype=torch.float32, device=scores[0].device)
    total = sum(block.weights for block in blocks)

    def average(price: float) -> float:
        chosen = [bits[(own - price * bits).argmax(-1)].mean() for own in scores]
        return sum(float(c) * block.weights for c, block in zip(chosen, blocks, strict=True)) / total

    reach = max(float(own.max() - own.min()) for own in scores) + 1.0
    low, high = -reach, reach  # low: all the widest
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if average(middle) > target else (low, middle)
    return min((low, high), key=lambda price: abs(average(price) - target))


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter of the model takes a gradient inside, and none is dropped out."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = model.training
    model.eval()
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
        model.train(training)
