"""Do rows that come, go and take over each other's slots see what each would alone, in both kinds of cache?"""

from __future__ import annotations

import random

import pytest
import torch
from models import tiny

from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.engine import Guess
from hf_mlspec.engines.modules.attention import ragged_attention_on
from hf_mlspec.engines.modules.engine import ModuleEngine
from hf_mlspec.engines.rows import GROWTH
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.checker import catch_up

CPU = torch.device("cpu")
MODELS = {"modules": tiny(max_position_embeddings=1024), "compiled": tiny(dtype=torch.bfloat16)}
KINDS = [
    "modules",
    pytest.param(
        "compiled",
        marks=pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built"),
    ),
]


def runner(kind: str, follow=None):
    model = MODELS[kind]
    if kind == "compiled":
        return CpuEngine(model, CpuDecoder(model), follow=follow)
    return ModuleEngine(model, follow=follow)


class Players:
    """A leader and a follower over its cache, and rows that change as continuous batching changes them."""

    def __init__(self, kind: str, seed: int):
        self.kind, self.rng = kind, random.Random(seed)
        self.leader = runner(kind)
        self.follower = runner(kind, self.leader)
        self.rows = [self.prompt() for _ in range(2)]
        for one in (self.leader, self.follower):
            one.start(2, CPU)
        self.alone = runner(kind)

    def prompt(self) -> list[int]:
        return [self.rng.randrange(3, 64) for _ in range(self.rng.randrange(1, 20))]

    def change(self) -> None:
        both, rng = (self.leader, self.follower), self.rng
        what = rng.choice(["admit", "forget", "select", "nothing"])
        if what == "admit" and len(self.rows) < 6:
            count = rng.randrange(1, 3)
            self.rows += [self.prompt() for _ in range(count)]
            for one in both:
                one.admit(count)
        elif what == "forget":
            row = rng.randrange(len(self.rows))
            self.rows[row] = self.prompt()
            for one in both:
                one.forget(row)
        elif what == "select" and len(self.rows) > 1:
            keep = rng.sample(range(len(self.rows)), rng.randrange(1, len(self.rows)))
            keep = sorted(keep) if rng.random() < 0.5 else keep
            self.rows = [self.rows[r] for r in keep]
            for one in both:
                one.select(keep)

    def round(self) -> None:
        """The follower writes tokens that are then overwritten; the leader's logits are those of each row alone."""
        catch_up(self.follower)
        assert self.follower.lengths == self.leader.lengths
        self.follower.feed(self.rows, Guess(torch.full((len(self.rows), 2), 5), [2] * len(self.rows)))
        logits = self.leader.feed(self.rows)
        for row, line in zip(self.rows, logits, strict=True):
            self.alone.start(1, CPU)
            self.same(line[0], self.alone.feed([row])[0, 0])
            row.append(self.rng.randrange(3, 64))

    def same(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        if self.kind == "compiled":
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_and_go_without_a_trace(kind, seed):
    players = Players(kind, seed)
    seen = set()
    with ragged_attention_on([MODELS[kind]]), torch.no_grad():
        for _ in range(25):
            players.change()
            players.round()
            seen.add(len(players.rows))
    assert len(seen) > 2


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
def test_slots_of_rows_that_left_are_taken_again():
    one = runner("compiled")
    one.start(3, CPU)
    one.feed([[5, 6], [7], [8, 9, 10]])
    kv = one.cache.kv
    one.select([0, 2])
    one.select([0])
    one.admit(2)
    assert one.cache.kv is kv
    assert one.lengths == [2, 0, 0]
    one.admit(1)
    assert one.cache.kv.shape[2] == one.cache.rows == 4
    assert torch.equal(one.cache.kv[:, :, 0], kv[:, :, 0])
    one.select([3, 1])
    one.cache.reserve(GROWTH + 1)
    assert one.cache.kv.shape[2] == 2  # more slots are a new tensor anyway: rows that wait are not carried along


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_move_with_their_rows(kind):
    """Also those of rows that were not fed to their end: who has the length of another reads slots it never wrote."""
    one = runner(kind)
    one.start(3, CPU)
    with ragged_attention_on([MODELS[kind]]), torch.no_grad():
        one.feed([[5, 6], [7], [8, 9, 10]])
    one.select([2, 0])
    assert one.lengths == [3, 2]
    one.admit(1)
    one.select([2, 0])
    assert one.lengths == [0, 3]
