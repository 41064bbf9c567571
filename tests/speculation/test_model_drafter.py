"""Does a drafter that was taken back draft what a fresh one would?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import near, tiny

from hf_mlspec.engines.modules.attention import ragged_attention_on
from hf_mlspec.engines.modules.engine import ModuleEngine, bare_forward
from hf_mlspec.nn.replace import early_exit
from hf_mlspec.speculation.checker import Checker
from hf_mlspec.speculation.draft import Drafter
from hf_mlspec.speculation.drafters.checked import CheckedDrafter
from hf_mlspec.speculation.drafters.model import ModelDrafter
from hf_mlspec.speculation.sampling import Sampler

CPU = torch.device("cpu")
MODEL = tiny()
OTHER = near(MODEL, 0.1)
VIEW = early_exit(OTHER, 1)


def runner(model, follow=None) -> ModuleEngine:
    return ModuleEngine(model, follow=follow, forward=bare_forward(model))


def one_model() -> Drafter:
    return ModelDrafter(runner(MODEL), Sampler(64), "one", threshold=0.3)


def checked() -> Drafter:
    inner = ModelDrafter(runner(OTHER), Sampler(64), "inner")
    return CheckedDrafter(Checker(runner(MODEL), Sampler(64), "outer"), inner, num_draft_tokens=3, threshold=0.2)


def checked_with_a_follower() -> Drafter:
    outer = runner(OTHER)
    inner = ModelDrafter(runner(VIEW, outer), Sampler(64), "inner")
    return CheckedDrafter(Checker(outer, Sampler(64), "outer"), inner, num_draft_tokens=3, threshold=0.0)


# A round: per row (how many may be drafted, how many of the drafted are kept).
rounds = st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=3), min_size=2,
                  max_size=5)  # fmt: skip


@pytest.mark.parametrize("make", [one_model, checked, checked_with_a_follower])
@settings(max_examples=10, deadline=None, derandomize=True)
@given(rounds=rounds, lengths=st.lists(st.integers(1, 9), min_size=3, max_size=3), leave=st.integers(0, 4))
def test_drafts_do_not_depend_on_what_was_rejected(make, rounds, lengths, leave):
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [torch.randint(3, 64, (n,), generator=generator).tolist() for n in lengths]
    drafter = make()
    drafter.start(len(rows), CPU)
    with ragged_attention_on([MODEL, OTHER, VIEW]), torch.no_grad():
        for number, shape in enumerate(rounds):
            if number == leave:
                rows, shape = [rows[2], rows[0]], [shape[2], shape[0]]
                drafter.select([2, 0])
            elif number > leave:
                shape = shape[:2]
            limits = [limit for limit, _ in shape]
            draft = drafter.propose(rows, limits)
            fresh = make()
            fresh.start(len(rows), CPU)
            expected = fresh.propose(rows, limits)
            assert draft.lengths == expected.lengths
            drafted = [line[:n] for line, n in zip(draft.tokens.tolist(), draft.lengths, strict=True)]
            assert drafted == [line[:n] for line, n in zip(expected.tokens.tolist(), expected.lengths, strict=True)]
            kept = [min(n, len(line)) for (_, n), line in zip(shape, drafted, strict=True)]
            drafter.rollback([len(row) + n for row, n in zip(rows, kept, strict=True)])
            # More than one token may follow: a level is not asked in every round.
            more = torch.randint(3, 64, (1 + number % 3,), generator=generator).tolist()
            rows = [[*row, *line[:n], *more] for row, line, n in zip(rows, drafted, kept, strict=True)]


@settings(max_examples=10, deadline=None, derandomize=True)
@given(rounds=rounds, positions=st.integers(2, 12))
def test_a_window_never_holds_more_than_the_positions(rounds, positions):
    inner = ModelDrafter(runner(OTHER), Sampler(64), "inner", max_positions=positions)
    drafter = CheckedDrafter(Checker(runner(MODEL), Sampler(64), "outer"), inner, num_draft_tokens=4, threshold=0.0)
    rows = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16]]
    drafter.start(3, CPU)
    with ragged_attention_on([MODEL, OTHER]), torch.no_grad():
        for shape in rounds:
            draft = drafter.propose(rows, [limit for limit, _ in shape])
            assert max(inner.runner.lengths) <= positions
            kept = [min(n, length) for (_, n), length in zip(shape, draft.lengths, strict=True)]
            drafter.rollback([len(row) + n for row, n in zip(rows, kept, strict=True)])
            tokens = draft.tokens.tolist()
            rows = [[*row, *line[:n], 20] for row, line, n in zip(rows, tokens, kept, strict=True)]
