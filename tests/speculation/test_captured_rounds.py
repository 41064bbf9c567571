"""Do rows that join, leave and take each other's places in captured rounds write what each would alone?

On the CPU a round runs as it would be captured; what differs on a GPU is tests/cuda's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import near, tiny

from hf_mlspec.engines.choose import required_decoder
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.cuda.engine import CudaEngine
from hf_mlspec.nn.replace import direct_cast
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.chain import CheckedDrafter
from hf_mlspec.speculation.checker import Checker, Verdict
from hf_mlspec.speculation.draft import Drafter
from hf_mlspec.speculation.drafters.model import ModelDrafter
from hf_mlspec.speculation.loop import Loop
from hf_mlspec.speculation.rounds import captured
from hf_mlspec.speculation.rounds.caches import adopt
from hf_mlspec.speculation.rounds.captured import CapturedRounds
from hf_mlspec.speculation.rounds.chain import CapturedChain
from hf_mlspec.speculation.rounds.host import HostRounds
from hf_mlspec.speculation.rounds.plan import round_levels
from hf_mlspec.speculation.rounds.rounds import NoRoom
from hf_mlspec.speculation.sampling import Sampler

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
CPU, VOCAB, SEED = torch.device("cpu"), 64, 11
TARGET = tiny(seed=2, dtype=torch.bfloat16)
MODELS = {"target": TARGET, "cast": direct_cast(TARGET), "small": near(TARGET, 0.05)}


@cache
def decoder(name: str) -> CudaDecoder:
    return required_decoder(MODELS[name], "cuda")


def checker(name: str, sampled: bool, follow: CudaEngine | None = None) -> Checker:
    runner = CudaEngine(MODELS[name], decoder(name), follow=follow)
    return Checker(runner, Sampler(VOCAB, do_sample=sampled), name, keep_logits=False)


def model(name: str, sampled: bool, follow: CudaEngine | None = None, **options) -> ModelDrafter:
    runner = CudaEngine(MODELS[name], decoder(name), follow=follow)
    return ModelDrafter(runner, Sampler(VOCAB, do_sample=sampled), name, **options)


def checked(sampled: bool, follow: CudaEngine | None, inner: Drafter) -> CheckedDrafter:
    return CheckedDrafter(checker("cast", sampled, follow), inner, num_draft_tokens=2, threshold=0.1)


# (whether rows sample, the target's runner) -> what drafts
CHAINS: dict[str, Callable] = {
    "nothing": lambda sampled, top: None,
    "small": lambda sampled, top: model("small", sampled),
    "cast": lambda sampled, top: model("cast", sampled, top, threshold=0.2),
    "cast, small": lambda sampled, top: checked(sampled, top, model("small", sampled)),
    "own cast, small": lambda sampled, top: checked(sampled, None, model("small", sampled, threshold=0.1)),
}


def everything(number: int, row: list[int], tokens: list[int]) -> tuple[int, bool]:
    return len(tokens), False


def captured_loop(name: str, *, sampled: bool = False, emit=lambda *_: None, batch: int = 1, slots: int = 16) -> Loop:
    """A loop without rows, over a chain with room for few."""
    target = checker("target", sampled)
    drafter = CHAINS[name](sampled, target.runner)
    levels = round_levels(target, drafter, num_draft_tokens=4, batch=batch, longest=64)
    chain = CapturedChain(levels, (), batch, slots, sampled=sampled)
    adopt(chain, target, drafter, 0)
    loop = Loop(CapturedRounds(chain, target, drafter, seed=SEED), stop=everything, emit=emit)
    loop.start([], [])
    return loop


def alone(prompt: list[int], budget: int, number: int, sampled: bool) -> list[int]:
    """What the target writes for one row: greedily step by step on the host, sampled with the noise of its number."""
    row = list(prompt)
    if sampled:
        loop = captured_loop("nothing", sampled=True, slots=256)
    else:
        target = checker("target", False)
        target.start(0, CPU)
        loop = Loop(HostRounds(target, None, num_draft_tokens=0, device=CPU), stop=everything, emit=lambda *_: None)
        loop.start([], [])
    loop.admit([row], [budget], [number])
    while loop.round():
        pass
    return row[len(prompt) :]


class Serving:
    """A chain whose rows come and go at random."""

    def __init__(self, name: str, sampled: bool, seed: int):
        self.rng, self.going = random.Random(seed), []
        self.asked: dict[int, tuple[list[int], int]] = {}
        self.written: dict[int, list[int]] = {}
        self.loop = captured_loop(name, sampled=sampled, emit=self.emit)

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
        for r in range(len(loop.rows)):
            if r not in going and rng.random() < 0.5:
                loop.replace(r, *self.new())
                going.append(r)
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


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CHAINS)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_rows_come_and_go(name, sampled, seed):
    serving = Serving(name, sampled, seed)
    with torch.inference_mode():
        for _ in range(9):
            serving.change()
            serving.round()
        for number, tokens in serving.written.items():
            prompt, budget = serving.asked[number]
            assert tokens == alone(prompt, budget, number, sampled)[: len(tokens)], f"row {number}"
    stats = serving.loop.stats
    assert stats.new_tokens == sum(map(len, serving.written.values()))


@pytest.mark.parametrize("name", CHAINS)
def test_rows_join_behind_a_round_under_way(name):
    """The round that runs already is not theirs: they gain nothing in it, and all they should afterwards."""
    serving = Serving(name, False, 0)
    with torch.inference_mode():
        rows, loop = [[5, 6, 7], [8] * 9, [9, 3]], serving.loop
        loop.admit([list(rows[0])], [60], [0])
        assert loop.round() == [0]
        assert loop.rounds.chain.graphs.batch == 1  # launched while nobody had asked for it
        loop.admit([list(row) for row in rows[1:]], [60, 60], [1, 2])
        before = [len(row) for row in loop.rows]
        assert loop.round() == [0, 1, 2]
        gained = [len(row) - n for row, n in zip(loop.rows, before, strict=True)]
        assert gained[0] > 0
        assert gained[1:] == [0, 0]
        loop.select([2, 0, 1])
        while going := loop.round():
            loop.select(going)
        for number, row in enumerate(rows):
            assert serving.written[number] == alone(row, 60, number, False)


def test_a_row_in_the_place_of_another_keeps_what_they_have_in_common(monkeypatch):
    fed, prefill = [], captured.prefill

    def counted(decoder, kv, rows, starts, bits):
        fed.append((len(rows[0]) - starts[0], kv.shape[2]))
        return prefill(decoder, kv, rows, starts, bits)

    monkeypatch.setattr(captured, "prefill", counted)
    with torch.inference_mode():
        serving = Serving("small", False, 0)
        loop, shots = serving.loop, [7] * 30
        loop.admit([[*shots, 4], [3, 4]], [4, 30], [0, 1])
        while len(loop.round()) == 2:
            pass
        del fed[:]
        row = [*shots, 9, 9]
        loop.replace(0, list(row), 20, 2)
        assert fed == [(31 - 29, 1), (31, 1)]  # of the target, whose cache knows the examples, and of the draft
        while going := loop.round():
            loop.select(going)
        assert serving.written[2] == alone(row, 20, 2, False)
        assert serving.written[1] == alone([3, 4], 30, 1, False)


def test_a_row_that_a_level_cannot_draft_for_is_refused_before_anything_changes():
    with torch.inference_mode():
        loop = captured_loop("small")
        loop.rounds.drafters[0].max_positions = 40
        loop.admit([[5, 6]], [30], [0])
        for join in (lambda: loop.admit([[5], [5] * 20], [20, 21], [1, 2]), lambda: loop.replace(0, [5] * 20, 21, 1)):
            with pytest.raises(ValueError, match=r"may reach 41 .* level small sees 40 tokens, rows may have 41"):
                join()
        assert (loop.rows, loop.numbers, loop.ends) == ([[5, 6]], [0], [32])
        assert loop.round() == [0]


@pytest.mark.parametrize("joins", ["admit", "replace"])
def test_without_memory_for_a_row_that_joins_all_rows_are_left_to_go_on(monkeypatch, joins):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB")

    with torch.inference_mode():
        loop = captured_loop("small", batch=2)
        loop.admit([[5, 6], [7]], [3, 8], [0, 1])
        loop.round()
        rows = [list(row) for row in loop.rows]
        monkeypatch.setattr(CapturedChain, "grow", full)
        join = {"admit": lambda: loop.admit([[9, 9]], [5], [2]), "replace": lambda: loop.replace(0, [9] * 16, 5, 2)}
        with pytest.raises(NoRoom, match=r"no memory for \d+ tokens in each of \d rows \(CUDA out of memory") as error:
            join[joins]()
    left = error.value.left
    assert left.rows == ([*rows, [9, 9]] if joins == "admit" else [[9] * 16, rows[1]])
    assert left.numbers == ([0, 1, 2] if joins == "admit" else [2, 1])
    assert left.budgets[-1] == (5 if joins == "admit" else 9 - len(rows[1]))
    assert left.stats is loop.stats


def test_rows_leave_and_join_until_the_places_shrink_and_grow_again():
    with torch.inference_mode():
        serving = Serving("cast, small", False, 0)
        loop, buckets = serving.loop, []
        prompts = {number: [3 + number, 9, 5] for number in range(7)}
        loop.admit([list(prompts[n]) for n in range(5)], [40] * 5, list(range(5)))
        for keep in ([0, 1, 2, 3, 4], [4, 1], [], None):
            if keep is None:
                loop.admit([list(prompts[5]), list(prompts[6])], [40] * 2, [5, 6])
            else:
                loop.select(keep)
            buckets.append(loop.rounds.bucket)
            if loop.rows:
                loop.round()
        assert buckets == [8, 2, 2, 2]
        while going := loop.round():
            loop.select(going)
        for number, tokens in serving.written.items():
            expected = alone(prompts[number], 40, number, False)
            assert tokens == (expected if number > 4 else expected[: len(tokens)])
        assert len(serving.written[6]) == 40
