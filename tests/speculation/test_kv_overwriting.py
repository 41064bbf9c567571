"""QSpec: after every round, is the cache that coarser activations drafted in that of a run at 16 bits, bit for bit?"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import ISAS, output_on
from models import packed, tiny

from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.precision import Bits
from hf_mlspec.speculation.checker import Checker, catch_up, roll_back
from hf_mlspec.speculation.draft import Draft
from hf_mlspec.speculation.sampling import Sampler

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")

CPU = torch.device("cpu")
VOCAB = 64
_decoders: dict[tuple, CpuDecoder] = {}


def decoder_of(*key) -> CpuDecoder:
    """dtype, group, symmetric: 256 features, so that every group divides them."""
    if key not in _decoders:
        dtype, group, symmetric = key
        shape = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "initializer_range": 0.05}
        model = packed(tiny("qwen3", dtype=dtype, **shape), group_size=group, symmetric=symmetric)
        _decoders[key] = CpuDecoder(model)
    return _decoders[key]


class Game:
    """A target at 16 bits, a follower at fewer bits in its cache, and what was settled."""

    def __init__(self, decoder: CpuDecoder, bits: int, batch: int, seed: int, plain_bits: int = 16):
        self.decoder, self.rng, self.plain_bits = decoder, random.Random(seed), plain_bits
        self.target = CpuEngine(None, decoder, bits=Bits(4, 16))
        self.drafter = CpuEngine(None, decoder, follow=self.target, bits=Bits(4, bits))
        self.rows = [[self.rng.randrange(3, VOCAB) for _ in range(self.rng.randrange(1, 14))] for _ in range(batch)]
        self.checker = Checker(self.target, Sampler(VOCAB), "target", keep_logits=False)
        self.checker.start(batch, CPU)
        self.drafter.start(batch, CPU)
        self.drafted = self.accepted = 0

    def draft(self, limits: list[int], threshold: float) -> list[list[int]]:
        """At fewer bits in the target's cache; now and then with a wrong token, or checked by a level between."""
        catch_up(self.drafter)
        kind = self.rng.randrange(3)
        if kind == 0:
            tiny = CpuEngine(None, self.decoder, follow=self.target, bits=Bits(4, 4))
            tiny.start(len(self.rows), CPU)
            catch_up(tiny)
            options = {"num_draft_tokens": 2, "tiny_threshold": threshold, "threshold": threshold}
            return self.drafter.draft_checked(tiny, self.rows, limits, **options)[0]
        drafted = self.drafter.draft(self.rows, limits, threshold)
        if kind == 1:
            for line in filter(None, drafted):
                line[self.rng.randrange(len(line))] = self.rng.randrange(3, VOCAB)
        return drafted

    def round(self) -> None:
        limits = [self.rng.randrange(0, 6) for _ in self.rows]
        limits[0] = max(limits[0], 1)
        drafted = self.draft(limits, self.rng.choice([0.0, 0.3]))
        verdict = self.checker.check(self.rows, Draft.from_lists(drafted))
        self.rows = [row + tokens for row, tokens in zip(self.rows, verdict.tokens, strict=True)]
        self.drafted += sum(map(len, drafted))
        self.accepted += sum(verdict.accepted)
        assert self.target.lengths == [len(row) - 1 for row in self.rows]

    def compare(self) -> None:
        """Every row, alone and fed at once, writes the very bits the shared cache holds."""
        for r, row in enumerate(self.rows):
            alone = CpuEngine(None, self.decoder, bits=Bits(4, self.plain_bits))
            alone.start(1, CPU)
            alone.feed([row])
            true = slice(0, self.target.lengths[r])
            assert torch.equal(self.target.cache.kv[:, :, r, :, true], alone.cache.kv[:, :, 0, :, true])

    def compare_logits(self) -> None:
        """What the target says of a row does not depend on the rows beside it."""
        logits = self.target.feed(self.rows)
        for row, line in zip(self.rows, logits, strict=True):
            alone = CpuEngine(None, self.decoder, bits=Bits(4, self.plain_bits))
            alone.start(1, CPU)
            assert torch.equal(alone.feed([row])[0], line)


def play(decoder: CpuDecoder, bits: int, batch: int, rounds: int, seed: int) -> Game:
    game = Game(decoder, bits, batch, seed)
    for _ in range(rounds):
        game.round()
        game.compare()
    game.compare_logits()
    return game


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(bits=st.sampled_from([4, 8]), batch=st.integers(1, 5), threads=st.integers(1, 2), seed=st.integers(0, 10**6))
def test_a_checked_cache_is_that_of_16_bits(dtype, group, symmetric, bits, batch, threads, seed):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        play(decoder_of(dtype, group, symmetric), bits, batch, 4, seed)
    finally:
        torch.set_num_threads(before)


def test_a_check_that_dequantizes_first_keeps_the_cache_too():
    decoder = decoder_of(torch.bfloat16, 64, False)
    decoder.handle.set_dequantize(True)
    try:
        play(decoder, 8, 3, 5, seed=2)
    finally:
        decoder.handle.set_dequantize(False)


def test_coarser_activations_write_something_else_and_are_often_right():
    """Without this the test above would compare a run with itself, or check nothing but rejected drafts."""
    decoder = decoder_of(torch.bfloat16, 128, True)
    game = play(decoder, 4, 4, 8, seed=1)
    assert 0.2 * game.drafted < game.accepted < game.drafted
    game.plain_bits = 4
    with pytest.raises(AssertionError):
        game.compare()
    catch_up(game.drafter)
    true = game.target.cache.kv.clone()
    game.drafter.lengths = [0] * 4
    game.drafter.draft(game.rows, [3] * 4, 0.0)
    assert not torch.equal(game.target.cache.kv[:, :, 0, :, : game.target.lengths[0]],
                           true[:, :, 0, :, : game.target.lengths[0]])  # fmt: skip


def test_one_decoder_is_both_levels_of_a_round():
    """In one cache and in two, the compiled rounds settle what a check at the upper level alone would say."""
    decoder = decoder_of(torch.bfloat16, 64, True)
    rows, limits = [[5, 9, 12], [7], [20, 21, 22, 23, 24]], [6, 0, 9]
    options = {"num_draft_tokens": 3, "tiny_threshold": 0.0, "threshold": 0.0}
    plain = CpuEngine(None, decoder, bits=Bits(4, 16))
    plain.start(3, CPU)
    expected = plain.draft(rows, limits, 0.0)
    for shared in (True, False):
        upper = CpuEngine(None, decoder, bits=Bits(4, 16))
        lower = CpuEngine(None, decoder, bits=Bits(4, 4), follow=upper if shared else None)
        upper.start(3, CPU)
        lower.start(3, CPU)
        settled, checks, rounds, _ = upper.draft_checked(lower, rows, limits, **options)
        assert settled == expected
        assert 0 < sum(checks[1::2]) <= sum(checks[::2])
        assert rounds > 1
        roll_back(upper, [len(row) + max(len(line) - 1, 0) for row, line in zip(rows, settled, strict=True)])
        for r, (row, line) in enumerate(zip(rows, settled, strict=True)):
            if line:
                own, true = upper.cache.kv[:, :, r], slice(0, len(row) + len(line) - 1)
                assert torch.equal(own[:, :, :, true], plain.cache.kv[:, :, r, :, true])


PLAY = """
import sys, torch
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]
from test_kv_overwriting import decoder_of, play
for dtype, group, symmetric in ((torch.bfloat16, 128, True), (torch.float32, 32, False)):
    for bits in (4, 8):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            play(decoder_of(dtype, group, symmetric), bits, 3, 3, seed=bits)
"""


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
def test_on_every_instruction_set(isa):
    output_on(isa, PLAY, Path(__file__).parent)
