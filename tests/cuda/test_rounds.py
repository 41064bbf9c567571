"""Do the kernels of a captured round keep the books that plain Python keeps, also inside a graph?"""

from __future__ import annotations

import pytest
import round_cases
import torch
from acceptance_cases import CASES, play_ops
from round_cases import ints

from hf_mlspec import ops

CUDA = "cuda"


@pytest.mark.parametrize("batch", [1, 2, 5, 33, 130])
@pytest.mark.parametrize("judged", [1, 2, 5, 9])
def test_every_op_keeps_the_books(batch, judged):
    for seed in range(4):
        for check in (round_cases.check_open, round_cases.check_window, round_cases.check_push,
                      round_cases.check_lookup, round_cases.check_settle):  # fmt: skip
            check(seed, batch, judged, CUDA)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_check_keeps_what_the_table_says(case):
    play_ops(case, CUDA)


def test_a_chain_of_ops_in_a_graph_is_what_it_is_outside():
    """Kernels that start while the one in front ends wait for what it writes."""

    def fresh():
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(1, 9, (8, 64), dtype=torch.int32, generator=generator).to(CUDA)
        vectors = [torch.zeros(8, dtype=torch.int32, device=CUDA) for _ in range(4)]
        return tokens, torch.full((8,), 3, dtype=torch.int32, device=CUDA), vectors, ints([[0, 0]] * 8, CUDA)

    def play(tokens, base, vectors, record):
        lengths, drafting, room, failed = vectors
        on, ends = torch.ones_like(base), torch.full_like(base, 60)
        ops.round_open(base, on, ends, 3, None, None, lengths, drafting, room)
        ids = ops.round_window(tokens, lengths, lengths, drafting, 2, 1)[0]
        for _ in range(3):
            # Each token is a function of what was fed before it: a kernel too early would read another.
            chosen = (ids[:, -1] * 5 + 1) % 9
            ids, _, _ = ops.round_push(tokens, lengths, drafting, room, chosen, on.float(), 0.0, failed, 2)
        ids, _, counts, _, positions = ops.round_window(tokens, base, lengths, on, 1, 4)
        chosen = ((ids * 5 + 1 + (positions.view(8, 4) > 5)) % 9).flatten().contiguous()
        ops.round_settle(tokens, base, lengths, on, ends, chosen, torch.ones(32, device=CUDA), 0.0, None, None, record,
                         failed, 1)  # fmt: skip
        return counts

    expected, again = fresh(), fresh()
    for _ in range(5):
        play(*expected)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    rehearsal = fresh()
    with torch.cuda.stream(stream):
        play(*rehearsal)
        with torch.cuda.graph(graph, stream=stream):
            play(*again)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(expected, again, strict=True):
        assert torch.equal(torch.stack(one), torch.stack(other)) if isinstance(one, list) else torch.equal(one, other)
    assert int(expected[1].min()) > 8


def test_operands_that_do_not_fit_are_refused():
    ones = ints([1, 1], CUDA)
    with pytest.raises(ValueError, match=r"active has shape \[1\], expected \[2\]"):
        ops.round_window(ints([[1, 2], [3, 4]], CUDA), ones, ones, ints([1], CUDA), 1, 1)
    with pytest.raises(ValueError, match="lengths is on cpu"):
        ops.round_window(ints([[1, 2], [3, 4]], CUDA), ones, ints([1, 1]), ones, 1, 1)
    with pytest.raises(TypeError, match="tokens is"):
        ops.round_window(torch.ones(2, 2, dtype=torch.int64, device=CUDA), ones, ones, ones, 1, 1)
