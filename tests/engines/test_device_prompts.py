"""Do prompts get into a device's cache with the same bits however they are cut, for their own tokens alone?"""

from __future__ import annotations

import weakref

import pytest
import torch
from decoders import random_model

from hf_mlspec.engines.cuda import engine
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.cuda.engine import prefill
from hf_mlspec.engines.rows import new_kv

LENGTHS = [70, 41, 41, 9, 1, 0, 3]


def prompts(lengths: list[int]) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(1, 199, (n,), generator=draw).tolist() for n in lengths]


class Counted:
    """A decoder that counts the tokens its layers compute, and the padded ones of its steps."""

    ranks = None

    def __init__(self, decoder: CudaDecoder):
        self.decoder, self.device, self.computed, self.padded = decoder, decoder.device, [], []

    def forward(self, ids, *operands, packing=None, **options):
        self.computed.append(ids.numel() if packing is None else len(packing.take))
        self.padded.append(ids.numel())
        return self.decoder.forward(ids, *operands, packing=packing, **options)


@pytest.fixture(scope="module")
def decoder() -> CudaDecoder:
    decoder = CudaDecoder(random_model("qwen2-windows", torch.bfloat16))
    decoder.reserve_positions(128)
    return decoder


@torch.inference_mode()
def cache_of(decoder, rows, starts=None) -> torch.Tensor:
    kv = new_kv(getattr(decoder, "decoder", decoder), len(rows), 128).zero_()
    prefill(decoder, kv, rows, starts or [0] * len(rows))
    return kv


@pytest.mark.parametrize("chunk", [4096, 64, 33, 7])
def test_a_prompt_has_the_same_bits_alone_and_in_any_batch(decoder, chunk, monkeypatch):
    rows = prompts(LENGTHS)
    alone = [cache_of(decoder, [row]) for row in rows]
    monkeypatch.setattr(engine, "CHUNK", chunk)
    for order in (range(7), reversed(range(7))):
        taken = list(order)
        together = cache_of(decoder, [rows[r] for r in taken])
        for place, r in enumerate(taken):
            assert torch.equal(together[:, :, place], alone[r][:, :, 0]), (r, taken)


@pytest.mark.parametrize("chunk", [4096, 64, 33])
def test_only_the_rows_own_tokens_are_computed(decoder, chunk, monkeypatch):
    monkeypatch.setattr(engine, "CHUNK", chunk)
    counted = Counted(decoder)
    cache_of(counted, prompts(LENGTHS))
    assert sum(counted.computed) == sum(LENGTHS)
    assert max(counted.computed) <= chunk
    assert max(counted.padded) <= 2 * chunk


def test_steps_are_shorter_where_memory_is_short(decoder, monkeypatch):
    class Small(Counted):
        def forward(self, ids, *operands, **options):
            if ids.numel() > 20:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(ids, *operands, **options)

    rows = prompts(LENGTHS)
    whole, small = cache_of(decoder, rows), Small(decoder)
    monkeypatch.setattr(engine, "CHUNK", 64)
    monkeypatch.setattr(engine, "LEAST_CHUNK", 8)
    assert torch.equal(cache_of(small, rows), whole)
    assert max(small.padded) <= 20
    monkeypatch.setattr(engine, "LEAST_CHUNK", 32)
    with pytest.raises(torch.OutOfMemoryError):
        cache_of(Small(decoder), rows)


def test_processes_that_share_a_model_never_make_other_steps(decoder, monkeypatch):
    """The others would add parts of another step."""
    class Shared(Counted):
        ranks, calls = object(), 0

        def forward(self, *operands, **options):
            self.calls += 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine, "LEAST_CHUNK", 8)
    shared = Shared(decoder)
    with pytest.raises(torch.OutOfMemoryError):
        cache_of(shared, prompts(LENGTHS))
    assert shared.calls == 1


def test_what_a_step_without_memory_computed_is_freed_before_the_next(decoder, monkeypatch):
    alive, seen = [], []

    class Full(Counted):
        def forward(self, ids, *operands, **options):
            if not alive:
                computed = torch.zeros(8)
                alive.append(weakref.ref(computed))
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(ids, *operands, **options)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(alive[0]()))
    cache_of(Full(decoder), prompts(LENGTHS))
    assert seen == [None]


def test_rows_that_lack_nothing_take_no_part_behind_the_last_that_does():
    assert engine._share([5, 0, 3, *[0] * 20_000], 64) == [5, 0, 3]
    assert engine._share([1] * 20_000, 64) == [1] * 64
    assert engine._share([40, 40, 40], 64) == [40, 24]
    assert engine._share([60, 1, 1, 1], 64) == [60, 1]


def test_rows_of_one_length_are_not_packed(decoder):
    counted = Counted(decoder)
    cache_of(counted, prompts([20, 20, 20]))
    assert (counted.computed, counted.padded) == ([60], [60])


def test_what_is_in_the_cache_is_not_read_again(decoder):
    rows = prompts([40, 30, 12])
    whole, kept = cache_of(decoder, rows), cache_of(decoder, [row[:11] for row in rows])
    counted = Counted(decoder)
    with torch.inference_mode():
        prefill(counted, kept, rows, [11, 11, 11])
    assert torch.equal(kept, whole)
    assert counted.computed == [29 + 19 + 1]
    with torch.inference_mode():
        assert prefill(counted, kept, rows, [40, 30, 12]) == 0
