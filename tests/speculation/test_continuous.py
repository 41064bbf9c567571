"""Do rows that join, leave and take each other's places in a running chain write what each would alone?"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import letters, near, tiny

from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.modules.attention import ragged_attention_on
from hf_mlspec.engines.modules.engine import ModuleEngine
from hf_mlspec.nn.replace import direct_cast
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.checker import Checker
from hf_mlspec.speculation.draft import Drafter
from hf_mlspec.speculation.drafters.checked import CheckedDrafter
from hf_mlspec.speculation.drafters.cross_tokenizer import CrossTokenizerDrafter
from hf_mlspec.speculation.drafters.model import ModelDrafter
from hf_mlspec.speculation.drafters.ngram import NGram
from hf_mlspec.speculation.drafters.prompt_lookup import PromptLookup
from hf_mlspec.speculation.loop import Loop
from hf_mlspec.speculation.rounds.host import HostRounds
from hf_mlspec.speculation.row_sampling import RowRule, RowSampler

CPU, VOCAB = torch.device("cpu"), 64
TARGET = tiny(seed=2, dtype=torch.float32)
MODELS = {"target": TARGET, "cast": direct_cast(TARGET), "small": near(TARGET, 0.05)}
PATHS = [
    "modules",
    pytest.param(
        "compiled", marks=pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
    ),
]
_decoders: dict[str, CpuDecoder] = {}


def runner(path: str, name: str, follow=None) -> ModuleEngine | CpuEngine:
    if path == "modules":
        return ModuleEngine(MODELS[name], follow=follow)
    if name not in _decoders:
        _decoders[name] = CpuDecoder(MODELS[name])
    return CpuEngine(MODELS[name], _decoders[name], follow=follow)


def model(path: str, name: str, rules: list, follow=None, **options) -> ModelDrafter:
    return ModelDrafter(runner(path, name, follow), RowSampler(VOCAB, rules), name, **options)


def checked(path: str, rules: list, follow, inner: Drafter) -> CheckedDrafter:
    checker = Checker(runner(path, "cast", follow), RowSampler(VOCAB, rules), "cast", keep_logits=False)
    return CheckedDrafter(checker, inner, num_draft_tokens=3, threshold=0.1)


# (path, rules, the target's runner) -> what drafts
CHAINS: dict[str, Callable] = {
    "nothing": lambda path, rules, top: None,
    "cast": lambda path, rules, top: model(path, "cast", rules, top),
    "cast in a cache of its own": lambda path, rules, top: model(path, "cast", rules, threshold=0.2),
    "window": lambda path, rules, top: model(path, "small", rules, max_positions=16),
    "cast, small": lambda path, rules, top: checked(path, rules, top, model(path, "small", rules)),
    "own cast, small": lambda path, rules, top: checked(path, rules, None, model(path, "small", rules)),
    "cast, lookup": lambda path, rules, top: checked(path, rules, top, PromptLookup()),
    "lookup": lambda path, rules, top: PromptLookup(),
    "ngram": lambda path, rules, top: NGram(order=3, threshold=0.0),
}


class Serving:
    """A chain whose rows come and go at random; every row's text is known from a run of its own."""

    def __init__(self, path: str, name: str, seed: int, share_sampled: float):
        self.rng, self.path, self.share_sampled = random.Random(seed), path, share_sampled
        self.rules: list[RowRule] = []
        target = Checker(runner(path, "target"), RowSampler(VOCAB, self.rules), "target", keep_logits=False)
        drafter = CHAINS[name](path, self.rules, target.runner)
        target.start(0, CPU)
        self.loop = self.decoding(target, drafter)
        self.asked: dict[int, tuple[list[int], int, int | None]] = {}
        self.written: dict[int, list[int]] = {}
        self.going: list[int] = []

    def decoding(self, target: Checker, drafter: Drafter | None) -> Loop:
        def stop(number: int, row: list[int], tokens: list[int]) -> tuple[int, bool]:
            return len(tokens), False

        rounds = HostRounds(target, drafter, num_draft_tokens=4, device=CPU)
        loop = Loop(rounds, stop=stop, emit=self.emit)
        loop.start([], [])
        return loop

    def emit(self, numbers, kept, verdict) -> None:
        for number, tokens in zip(numbers, kept, strict=True):
            self.written.setdefault(number, []).extend(tokens)

    def new(self) -> tuple[list[int], int, int, RowRule]:
        rng, number = self.rng, len(self.asked)
        row = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 24))]
        budget, seed = rng.randrange(1, 20), rng.randrange(1000) if rng.random() < self.share_sampled else None
        self.asked[number] = (list(row), budget, seed)
        return row, budget, number, RowRule(VOCAB, prompt_length=len(row), seed=seed)

    def change(self) -> None:
        """Some rows that go on are dropped as well; slots of those that ended are taken, or not."""
        rng, loop = self.rng, self.loop
        going = [r for r in self.going if rng.random() > 0.1]
        for r in range(len(loop.rows)):
            if r not in going and rng.random() < 0.6:
                row, budget, number, rule = self.new()
                loop.replace([r], [row], [budget], [number])
                self.rules[r] = rule
                going.append(r)
        keep = sorted(going) if rng.random() < 0.7 else rng.sample(going, len(going))
        loop.select(keep)
        self.rules[:] = [self.rules[r] for r in keep]
        joining = [self.new() for _ in range(rng.choice([0, 0, 1, 2]) if len(keep) < 5 else 0)]
        if joining:
            self.rules += [rule for *_, rule in joining]
            rows, budgets, numbers, _ = map(list, zip(*joining, strict=True))
            loop.admit(rows, budgets, numbers)

    def round(self) -> None:
        self.going = self.loop.round() if self.loop.rows else []
        rows = self.loop.rows
        # A row's last token is fed with the next round; behind the end of a row nothing was kept.
        assert all(len(row) - 1 <= have for row, have in zip(rows, self.lengths(), strict=True))
        for r in self.going:
            assert self.lengths()[r] == len(rows[r]) - 1
        for level in self.levels():
            assert len(level.lengths) == len(rows)
            assert all(have < len(rows[r]) for r, have in enumerate(level.lengths) if r in self.going)
            if level.follow is None and isinstance(level, CpuEngine):
                assert level.cache.rows == len(rows)

    def lengths(self) -> list[int]:
        return self.loop.rounds.target.runner.lengths

    def levels(self) -> list[ModuleEngine | CpuEngine]:
        found, level = [], self.loop.rounds.drafter
        while isinstance(level, CheckedDrafter):
            found.append(level.checker.runner)
            level = level.inner
        return [*found, level.runner] if isinstance(level, ModelDrafter) else found

    def alone(self, number: int) -> list[int]:
        """What the target writes for one row, nothing beside it and nothing below."""
        prompt, budget, seed = self.asked[number]
        rule = RowRule(VOCAB, prompt_length=len(prompt), seed=seed)
        target = Checker(runner(self.path, "target"), RowSampler(VOCAB, [rule]), "target", keep_logits=False)
        target.start(0, CPU)
        row = list(prompt)
        loop = Loop(HostRounds(target, None, num_draft_tokens=0, device=CPU),
                    stop=lambda n, row, tokens: (len(tokens), False), emit=lambda *_: None)
        loop.start([], [])
        loop.admit([row], [budget], [0])
        while loop.round():
            pass
        return row[len(prompt):]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("share_sampled", [0.0, 0.5])
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_rows_come_and_go(path, name, share_sampled, seed):
    serving = Serving(path, name, seed, share_sampled)
    with torch.inference_mode(), ragged_attention_on(list(MODELS.values()) if path == "modules" else []):
        for _ in range(12):
            serving.change()
            serving.round()
        for number, tokens in serving.written.items():
            assert tokens == serving.alone(number)[: len(tokens)], f"row {number} of {serving.asked[number]}"
    assert serving.written


@pytest.mark.parametrize("path", PATHS)
def test_a_row_joins_in_the_pass_that_checks_the_others(path):
    serving = Serving(path, "cast, small", 0, 0.0)
    with torch.inference_mode(), ragged_attention_on(list(MODELS.values()) if path == "modules" else []):
        serving.rules.append(RowRule(VOCAB, prompt_length=3))
        serving.loop.admit([[5, 6, 7]], [40], [0])
        serving.loop.round()
        serving.loop.round()
        passes = serving.loop.rounds.target.runner.forwards
        serving.rules.append(RowRule(VOCAB, prompt_length=9))
        serving.loop.admit([[8] * 9], [40], [1])
        serving.loop.round()
        assert serving.loop.rounds.target.runner.forwards == passes + 1
        assert serving.loop.drafted[0] > 0
        assert serving.loop.drafted[1] == 0  # the cast writes into the target's cache, where the prompt was not yet
        assert len(serving.loop.rows[1]) == 10
        serving.rules[0] = RowRule(VOCAB, prompt_length=7)
        serving.loop.replace([0], [[9] * 7], [40], [2])
        serving.loop.round()
    assert serving.loop.drafted[0] == 0
    assert serving.loop.drafted[1] > 0
    assert len(serving.loop.rows[0]) == 8


@pytest.mark.parametrize("path", PATHS)
def test_a_row_of_limit_0_is_not_fed(path):
    level = model(path, "small", [RowRule(VOCAB, prompt_length=1) for _ in range(3)])
    with torch.inference_mode(), ragged_attention_on([MODELS["small"]] if path == "modules" else []):
        level.start(3, CPU)
        for rules in ("greedy", "sampled"):
            if rules == "sampled":
                level.sampler.rules[:] = [
                    RowRule(VOCAB, prompt_length=1, seed=r) for r in range(3)
                ]
            draft = level.propose([[5] * 400, [6, 7], [8, 9]], [0, 3, 1])
            assert draft.lengths == [0, 3, 1]
            assert level.runner.lengths[0] == 0
            assert level.runner.lengths[1] >= 3
            level.rollback([400, 2, 2])
    slots = level.runner.cache.kv.shape[4] if path == "compiled" else level.runner.cache.layers[0].keys.shape[2]
    assert slots < 400  # so its tokens cannot have been in any pass


DRAFTERS: dict[str, Callable] = {
    "lookup": lambda path, rules: PromptLookup(),
    "model": lambda path, rules: model(path, "small", rules),
    "window": lambda path, rules: model(path, "small", rules, max_positions=16),
    "cast, small": lambda path, rules: checked(path, rules, None, model(path, "small", rules)),
    "by text": lambda path, rules: CrossTokenizerDrafter(
        model(path, "small", rules), letters(), letters(4), inner_vocab_size=VOCAB, vocab_size=VOCAB
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("alike", [True, False], ids=["same end", "short"])
def test_a_row_that_joins_is_drafted_for_as_in_a_new_batch(path, name, alike):
    rules = [RowRule(VOCAB, prompt_length=1) for _ in range(3)]
    worn, fresh = (DRAFTERS[name](path, rules) for _ in range(2))
    rng = random.Random(0)
    old = [[rng.randrange(3, 20) for _ in range(40)] for _ in range(2)]
    new = [[rng.randrange(3, 20) for _ in range(12)] for _ in range(2)]
    if alike:  # the tokens a drafter compares are those of the row that was there; what they follow is not
        new[0] = [*range(40, 48), *old[0][8:], *([40, 41] if name == "lookup" else [])]
    with torch.inference_mode(), ragged_attention_on(list(MODELS.values()) if path == "modules" else []):
        worn.start(2, CPU)
        draft = worn.propose(old, [4, 4])
        worn.rollback([len(row) + n for row, n in zip(old, draft.lengths, strict=True)])
        worn.replace(0)
        worn.admit(1)
        kept = old[1] + draft.rows()[1] + [9]
        rows, limits = [new[0], kept, new[1]], [5, 5, 5]
        ours = worn.propose(rows, limits).rows()
        fresh.start(3, CPU)
        assert ours == fresh.propose(rows, limits).rows()
    assert all(ours) or name in ("lookup", "by text")
    assert any(ours)


def test_what_a_row_taught_stays_when_another_takes_its_place():
    table = NGram(order=2, threshold=0.0)
    table.start(1, CPU)
    table.propose([[5, 6, 5, 6]], [1])
    table.replace(0)
    assert table.propose([[9, 5]], [2]).rows() == [[6, 5]]
    table.rollback([1])
    table.admit(1)
    assert table.propose([[9, 5], [6]], [1, 1]).rows() == [[6], [5]]
