"""Do rows that join, leave and take each other's places in captured rounds write what each would alone?

On the CPU a round runs as it would be captured; tests/cuda/test_joining_rows.py is the same on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import CHAINS, Levels, Serving, alone, captured_loop

from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.rounds import reading
from hf_mlspec.speculation.rounds.chain import CapturedChain
from hf_mlspec.speculation.rounds.program import RoundLevel, RoundProgram
from hf_mlspec.speculation.rounds.rounds import NoRoom

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CHAINS)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_rows_come_and_go(name, sampled, seed):
    with torch.inference_mode():
        Serving(name, Levels(sampled=sampled), seed).play(9)


@pytest.mark.parametrize("name", CHAINS)
def test_rows_join_behind_a_round_under_way(name):
    """The round that runs already is not theirs: they gain nothing in it, and all they should afterwards."""
    serving = Serving(name)
    with torch.inference_mode():
        rows, loop = [[5, 6, 7], [8] * 17, [9, 3]], serving.loop
        loop.admit([list(rows[0])], [60], [0])
        assert loop.round() == [0]
        assert loop.rounds.chain.graphs.batch == 1  # launched while nobody had asked for it
        loop.admit([list(row) for row in rows[1:]], [60, 60], [1, 2])
        before = [len(row) for row in loop.rows]
        assert loop.round() == [0, 1, 2]
        gained = [len(row) - n for row, n in zip(loop.rows, before, strict=True)]
        assert gained[0] > 0
        assert gained[1:] == [0, 0]
        assert loop.rounds.chain.graphs.batch == 4
        rows.append([4, 4, 9])
        loop.replace([1], [list(rows[3])], [60], [3])
        loop.select([2, 0, 1])
        assert loop.round() == [0, 1, 2]
        assert len(loop.rows[0]) > len(rows[2])
        assert loop.rows[2] == rows[3]
        while going := loop.round():
            loop.select(going)
        for number in (0, 2, 3):
            assert serving.written[number] == alone(rows[number], 60, number)


def test_a_row_in_the_place_of_another_keeps_what_they_have_in_common(monkeypatch):
    fed, prefill = [], reading.prefill

    def counted(decoder, kv, rows, starts, *view):
        fed.append((len(rows[0]) - starts[0], kv.shape[2]))
        return prefill(decoder, kv, rows, starts, *view)

    monkeypatch.setattr(reading, "prefill", counted)
    with torch.inference_mode():
        serving = Serving("small")
        loop, shots = serving.loop, [7] * 30
        loop.admit([[*shots, 4], [3, 4]], [4, 30], [0, 1])
        while len(loop.round()) == 2:
            pass
        del fed[:]
        row = [*shots, 9, 9]
        loop.replace([0], [list(row)], [20], [2])
        assert not fed  # until its first round begins
        loop.round()
        assert fed == [(31 - 29, 1), (31, 1)]  # of the target, whose cache knows the examples, and of the draft
        while going := loop.round():
            loop.select(going)
        assert serving.written[2] == alone(row, 20, 2)
        assert serving.written[1] == alone([3, 4], 30, 1)


def test_a_row_that_a_level_cannot_draft_for_is_refused_before_anything_changes():
    with torch.inference_mode():
        loop = captured_loop("small")
        loop.rounds.drafters[0].max_positions = 40
        loop.admit([[5, 6]], [30], [0])
        for join in (lambda: loop.admit([[5], [5] * 20], [20, 21], [1, 2]),
                     lambda: loop.replace([0], [[5] * 20], [21], [1])):
            with pytest.raises(ValueError, match=r"may reach 41 .* level small sees 40 tokens, rows may have 41"):
                join()
        assert (loop.rows, loop.numbers, loop.lengths) == ([[5, 6]], [0], [32])
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
        join = {"admit": lambda: loop.admit([[9, 9]], [5], [2]),
                "replace": lambda: loop.replace([0], [[9] * 16], [5], [2])}  # fmt: skip
        with pytest.raises(NoRoom, match=r"no memory for \d+ tokens in each of \d rows \(CUDA out of memory") as error:
            join[joins]()
    left = error.value.left
    assert left.rows == ([*rows, [9, 9]] if joins == "admit" else [[9] * 16, rows[1]])
    assert left.numbers == ([0, 1, 2] if joins == "admit" else [2, 1])
    assert left.budgets[-1] == (5 if joins == "admit" else 9 - len(rows[1]))
    assert left.stats is loop.stats


def test_rows_leave_and_join_until_the_places_shrink_and_grow_again():
    with torch.inference_mode():
        serving = Serving("cast, small")
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
            expected = alone(prompts[number], 40, number)
            assert tokens == (expected if number > 4 else expected[: len(tokens)])
        assert len(serving.written[6]) == 40


def test_layers_that_keep_a_state_are_captured_like_others():
    """Else a plan of recurrent levels would seem to be captured in no time."""
    target, draft = (SimpleNamespace(num_layers=attention, num_recurrent=recurrent)
                     for attention, recurrent in ((2, 6), (0, 3)))  # fmt: skip
    levels = [RoundLevel(name, decoder, True, None, 16, most=4) for name, decoder in (("t", target), ("d", draft))]
    assert RoundProgram(levels[:1], active=(), steps=1).layers == 8
    assert RoundProgram(levels).layers == 8 + 4 * 3
