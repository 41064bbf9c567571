"""Do the rivals of the sparse high part multiply the same matrix, and say what they do not take?"""

from __future__ import annotations

import time

import pytest
import torch

from eval.bench_kernels.samples import Series, sample
from eval.peers.high_rows import DenseTables, SignedRows, load
from eval.peers.missing import MissingPeer


@pytest.fixture
def high() -> tuple[torch.Tensor, torch.Tensor]:
    try:
        load()
    except MissingPeer as reason:
        pytest.skip(str(reason))
    draw = torch.Generator().manual_seed(0)
    values = (torch.rand(128, 96, generator=draw) < 0.2).to(torch.int8)
    signs = torch.randint(0, 2, (128, 96), generator=draw, dtype=torch.int8) * 2 - 1
    return values * signs, torch.rand(128, 1, generator=draw) + 0.5


@pytest.mark.parametrize("rival", [DenseTables, SignedRows])
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_rivals_multiply_the_matrix(high, rival, rows):
    values, step = high
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(1))
    made = rival(values, step, 2)
    call = made.bind(x)
    for copy in (0, 1):
        torch.testing.assert_close(call(copy), x @ (values * step).T, rtol=1e-5, atol=1e-4)
    assert made.nbytes > 0
    made.close()


@pytest.mark.parametrize("rival", [DenseTables, SignedRows])
def test_what_rivals_do_not_take_is_told(high, rival):
    values, step = high
    with pytest.raises(MissingPeer, match="1 row or a multiple of 8, not 3"):
        rival(values, step, 1).bind(torch.zeros(3, 96))
    with pytest.raises(MissingPeer, match="values of -1, 0 and 1"):
        rival(values * 2, step, 1)
    with pytest.raises(MissingPeer, match="outputs in multiples of 64"):
        rival(values[:100], step[:100], 1)


def test_processor_time_counts_every_call_and_no_sleep():
    series = Series("sleeps", lambda: time.sleep(0.05), 1)
    sample(series, 1, own_time=True)
    assert len(series.seconds) == 1
    assert series.seconds[0] < 0.04
