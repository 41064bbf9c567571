"""Is the high part that the host keeps that of the weight, and does every input reach its values?"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from hf_mlspec import ops
from hf_mlspec.formats import ZipperWeight
from hf_mlspec.nn import zipper_host
from hf_mlspec.nn.zipper_host import HostRows, high_sums, to_host, zipper_host_linear
from hf_mlspec.ops.zipper import words_begin


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sums_of(x: torch.Tensor, rows: list[HostRows]) -> torch.Tensor:
    found = torch.full((len(x), sum(weight.out_features for weight in rows)), float("nan"))
    high_sums(x, rows, found)
    return found


def few_outliers(out: int, size: int, groups: tuple[int, ...]) -> ZipperWeight:
    """A weight whose high part is 0 but in some groups of inputs: the others are small."""
    weight = seeded(out, size).clamp(-0.4, 0.4) if groups else torch.zeros(out, size)
    for group in groups:
        weight[:, 4 * group] = 2.0
    return ZipperWeight.from_dense(weight, mode="clamp", high_part="host")


@pytest.mark.parametrize("groups", [(), (3,), (0, 5, 31)])
def test_only_columns_with_values_are_read(groups):
    split = ops.prepack_zipper(*few_outliers(20, 128, groups).parts).split
    rows = to_host(split, 20, 128)
    assert torch.equal(rows.in_tiles(split.device), split)
    assert rows.is_empty == (not groups)
    assert groups == () or len(rows.columns) == 32  # the least that a product takes
    x = seeded(3, 128, seed=5).bfloat16()
    seen = x if rows.columns is None else x[:, rows.columns]
    expected = ops.zipper_high_linear(x.float(), torch.zeros(3, 20), split)
    assert torch.equal(sums_of(seen, [rows]), expected)


def test_all_columns_and_several_weights():
    splits = [ops.prepack_zipper(*ZipperWeight.from_dense(seeded(out, 64)).parts).split for out in (32, 7)]
    splits.append(ops.prepack_zipper(*few_outliers(9, 64, (2,)).parts).split)
    rows = [to_host(split, out, 64) for split, out in zip(splits, (32, 7, 9), strict=True)]
    assert rows[0].columns is None
    assert rows[2].columns is not None
    x = seeded(5, 64, seed=5).bfloat16()
    apart = [
        ops.zipper_high_linear(x.float(), torch.zeros(5, out), split)
        for split, out in zip(splits, (32, 7, 9), strict=True)
    ]
    assert torch.equal(sums_of(x, rows), torch.cat(apart, -1))
    assert torch.equal(sums_of(x[3:4], rows), torch.cat(apart, -1)[3:4])


def test_a_layer_without_a_high_part_is_empty():
    split = ops.prepack_zipper(*few_outliers(20, 64, ()).parts).split
    assert len(split) == words_begin(20, 64)
    assert to_host(split, 20, 64).is_empty
    assert torch.equal(sums_of(torch.ones(2, 64).bfloat16(), [to_host(split, 20, 64)]), torch.zeros(2, 20))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_call_outside_of_no_grad_gives_the_same_bits(monkeypatch, dtype, has_bias):
    """As `model(ids)` is, over a bias of the dense model and hidden states that have a gradient."""
    low, high, x = seeded(3, 20), seeded(3, 20, seed=1), seeded(3, 64, seed=2).to(dtype)
    bias = torch.nn.Parameter(seeded(20, seed=3)) if has_bias else None
    monkeypatch.setattr(zipper_host, "worker_of", lambda device: SimpleNamespace(finish=lambda pending: high))
    with torch.no_grad():
        expected = zipper_host_linear(x, low, object(), bias)
    found = zipper_host_linear(x, low.requires_grad_(), object(), bias)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


def test_a_pool_that_is_busy_gives_the_same_bits():
    """A worker shares the threads of the process with whoever computes beside it."""
    weight = ZipperWeight.from_dense(seeded(300, 512))
    split = ops.prepack_zipper(*weight.parts).split
    x, wide = seeded(9, 512, seed=1).bfloat16(), seeded(512, 512, seed=2).bfloat16()
    rows, expected, stop = to_host(split, 300, 512), sums_of(x, [to_host(split, 300, 512)]), threading.Event()

    def compute_beside() -> int:
        done = 0
        while not stop.is_set():
            ops.bf16_linear(wide, wide)
            done += 1
        return done

    with ThreadPoolExecutor(2) as pool:
        beside = [pool.submit(compute_beside) for _ in range(2)]
        try:
            found = [sums_of(x, [rows]) for _ in range(20)]
        finally:
            stop.set()
    assert all(torch.equal(sums, expected) for sums in found)
    assert all(one.result() > 0 for one in beside)
