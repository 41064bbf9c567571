"""Does a cache on a GPU that has no room for it twice still grow, by way of the host?"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_mlspec.engines.rows import DecoderCache

DECODER = SimpleNamespace(num_layers=16, sizes=SimpleNamespace(kv_heads=8, head_dim=64), dtype=torch.bfloat16,
                          device=torch.device("cuda", 0))  # fmt: skip


@pytest.fixture
def cache():
    """256 MiB of values of which few are alike."""
    torch.cuda.empty_cache()
    made = DecoderCache.new(DECODER, 2, 4096)
    made.kv.normal_(generator=torch.Generator("cuda").manual_seed(1))
    yield made
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def leave(count: int) -> None:
    """Let so many bytes be free for torch, and one more MiB: shares of a device are rounded down."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + count + 2**20) / total)


def test_through_the_host(cache):
    before, size = cache.kv.cpu(), cache.nbytes
    leave(size * 3 // 4)  # half as much again fits, one and a half times as much beside it does not
    cache.reserve(4097)
    torch.cuda.set_per_process_memory_fraction(1.0)  # what is compared is put in one piece first
    assert cache.kv.shape[4] == 6144
    assert torch.equal(cache.kv[:, :, :, :, :4096].cpu(), before)
    assert not cache.kv[:, :, :, :, 4096:].any()


def test_without_room_for_what_there_must_be_it_stays(cache):
    before = cache.kv.cpu()
    leave(0)
    with pytest.raises(torch.OutOfMemoryError, match="no memory for 4352 tokens in each of 2 rows"):
        cache.reserve(4097)
    assert cache.kv.shape[4] == 4096
    assert torch.equal(cache.kv.cpu(), before)
