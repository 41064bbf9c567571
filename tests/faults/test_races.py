"""Do threads that share a model, its pool and its decoder write right tokens? Short, so that a sanitizer can watch."""

from __future__ import annotations

import threading

import pytest
import torch

import hf_mlspec
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from tests.faults.scenes import generated, streamed
from tests.models import near, tiny

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")


@pytest.fixture
def threads():
    """Kernels of one call share out their work, however small the model is."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_calls_streams_and_changed_precisions_in_three_threads(threads):
    target = hf_mlspec.prepare(tiny(seed=2, dtype=torch.float32, hidden_size=64, intermediate_size=256, head_dim=16))
    level = near(target, 0.02)
    rows = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    acts = [lambda: generated(target, ["mxfp4", level]), lambda: streamed(target, [level], rows),
            lambda: generated(target, [])]  # fmt: skip
    right, wrong, begin = [act() for act in acts], [], threading.Barrier(len(acts))
    assert right[0] == right[2]

    def work(number: int) -> None:
        begin.wait(30)
        for turn in range(3):
            if acts[number]() != right[number]:
                wrong.append(number)
            if number == 2 and turn:
                hf_mlspec.clear(target)  # the levels of calls that run stay theirs

    running = [threading.Thread(target=work, args=(number,)) for number in range(len(acts))]
    for one in running:
        one.start()
    for one in running:
        one.join(120)
    assert not any(one.is_alive() for one in running)
    assert not wrong
