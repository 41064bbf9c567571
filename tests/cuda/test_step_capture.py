"""Do the ops of a step give the same bits in a captured graph whose lengths change between replays?"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from hf_mlspec import ops

BATCH, WIDTH, HEADS, KV_HEADS, DIM, SLOTS, VOCAB = 3, 4, 8, 2, 64, 300, 5000
HIDDEN = (HEADS + 2 * KV_HEADS) * DIM


class Step:
    """Embedding, norm, rotary, attention, gate and choice, each reading what the one before wrote; twice over."""

    def __init__(self) -> None:
        random = torch.Generator("cuda").manual_seed(0)
        self.table = torch.randn(VOCAB, HIDDEN, generator=random, device="cuda").bfloat16()
        self.norm = 1 + torch.randn(HIDDEN, generator=random, device="cuda") / 4
        self.head_norm = 1 + torch.randn(DIM, generator=random, device="cuda") / 4
        angle = torch.randn(SLOTS, DIM // 2, generator=random, device="cuda") * 3
        self.cos, self.sin = angle.cos(), angle.sin()
        self.kv = torch.full((2, BATCH, KV_HEADS, SLOTS, DIM), torch.nan, dtype=torch.bfloat16, device="cuda")
        self.ids = torch.randint(VOCAB, (BATCH * WIDTH,), generator=random, device="cuda").int()
        self.starts, self.counts, self.positions = (torch.zeros(n, dtype=torch.int32, device="cuda")
                                                    for n in (BATCH, BATCH, BATCH * WIDTH))  # fmt: skip
        self.seed = torch.tensor([17], device="cuda")

    def __call__(self) -> list[Tensor]:
        seen, ids = [], self.ids
        for _ in range(2):
            hidden = ops.embed_rows(ids, self.table, 1.5)
            normed, total = ops.rms_norm(hidden, self.norm, 1e-5, hidden)
            rotation = self.head_norm, self.head_norm, 1e-6, self.cos, self.sin, self.starts, self.counts
            q = ops.rope_write_rows(normed.view(BATCH, WIDTH, HIDDEN), *rotation, *self.kv, HEADS)
            y = ops.ragged_attention_rows(q, *self.kv, self.starts, self.counts, 0.125, 0, 0.0)
            y = ops.gated(y.view(BATCH * WIDTH, -1), 0).repeat(1, VOCAB * 2 // (HEADS * DIM) + 1)[:, :VOCAB]
            ids, confidence = ops.choose_rows(y, 0.0, self.seed, self.positions, self.positions)
            seen += [total, q, y, ids, confidence]
        return seen


@pytest.fixture
def step() -> Step:
    return Step()


def test_replays_follow_the_lengths(step):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    lanes = step.kv.clone()
    for starts, counts in (([0, 0, 0], [4, 4, 4]), ([4, 4, 4], [4, 1, 0]), ([8, 5, 4], [1, 4, 4])):
        step.starts.copy_(torch.tensor(starts))
        step.counts.copy_(torch.tensor(counts))
        before = step.kv.clone()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        after = step.kv.clone()
        step.kv.copy_(before)
        for ours, eager in zip(captured, step(), strict=True):
            assert torch.equal(ours.nan_to_num(), eager.nan_to_num())
        assert torch.equal(after.nan_to_num(), step.kv.nan_to_num())
    assert not torch.equal(lanes.nan_to_num(), step.kv.nan_to_num())


def bf16(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16, device="cuda")


def int32(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device="cuda")


BAD = [
    (lambda: ops.rms_norm(bf16(2, 8).float(), torch.ones(8, device="cuda"), 1e-5), TypeError,
     "rms_norm: x is Float, the CUDA kernels take bfloat16"),
    (lambda: ops.rms_norm(bf16(2, 8), torch.ones(8), 1e-5), ValueError, "rms_norm: weight is on cpu"),
    (lambda: ops.silu_mul(bf16(2, 8), bf16(2, 9)), ValueError, r"silu_mul: up has shape \[2, 9\]"),
    (lambda: ops.gated(bf16(2, 8).half(), 0), TypeError, "gated: gate_up is Half"),
    (lambda: ops.gated(bf16(2, 8), 9), ValueError, "gated: activation is 9"),
    (lambda: ops.ordered_rows(bf16(2, 8), int32(9)), ValueError, r"order has shape \[9\], expected \[8\]"),
    (lambda: ops.ordered_rows(bf16(2, 8), int32(8).cpu()), ValueError, "ordered_rows: order is on cpu"),
    (lambda: ops.embed_rows(int32(3).long(), bf16(4, 8), 1.0), TypeError, "embed_rows: ids is Long"),
    (lambda: ops.ragged_attention_rows(bf16(1, 1, 2, 40), bf16(1, 1, 9, 40), bf16(1, 1, 9, 40), int32(1), int32(1),
                                       1.0, 0, 0.0), ValueError, "head_dim is 40, .* multiples of 16 up to 256"),
    (lambda: ops.ragged_attention_rows(bf16(2, 1, 2, 64), bf16(2, 1, 9, 64), bf16(2, 1, 9, 64), int32(1), int32(2),
                                       1.0, 0, 0.0), ValueError, r"starts has shape \[1\], expected \[2\]"),
    (lambda: ops.rope_write_rows(bf16(1, 1, 64), None, None, 1e-6, torch.ones(9, 8, device="cuda"),
                                 torch.ones(9, 8, device="cuda"), int32(1), int32(1), bf16(1, 1, 9, 16),
                                 bf16(1, 1, 9, 16), 3), ValueError, r"\[1, width, 80\] for 3 heads"),
    (lambda: ops.choose_rows(bf16(2, 9), 0.0, torch.zeros(1, dtype=torch.int64, device="cuda")), ValueError,
     "choose_rows: seed given alone"),
    (lambda: ops.choose_rows(bf16(2, 9), -1.0), ValueError, "choose_rows: softcap is -1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[bad[2][:30] for bad in BAD])
def test_operands_that_do_not_fit(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_fakes_agree_with_the_kernels(step):
    logits = torch.randn(2, 64, device="cuda").bfloat16()
    lanes = bf16(2, 1, 2, 9, 16)
    places = int32(1), int32(1) + 1
    angle = torch.ones(9, 8, device="cuda")
    calls = {
        "rms_norm": (logits, torch.ones(64, device="cuda"), 1e-5, logits),
        "silu_mul": (logits, logits),
        "gated": (logits, 1),
        "gated_in_order": (logits, 1, torch.arange(32, dtype=torch.int32, device="cuda").flip(0)),
        "gated_pairs": (logits, 1.7, 7.0),
        "gated_hadamard": (logits, 1, None, 32, 1),
        "norm_codes": (logits, torch.ones(64, device="cuda"), 1e-5, logits, None, 32, 4, 0.9, 0),
        "row_codes": (logits, None, None, 64, 1, 64, 8, 1.0, 0),
        "gated_codes": (logits, 1, None, None, 32, 1, 32, 4, 1.0, 0),
        "ordered_rows": (logits, torch.arange(64, dtype=torch.int32, device="cuda").flip(0)),
        "embed_rows": (int32(2), logits, 2.0),
        "rope_write_rows": (bf16(1, 1, 96), None, None, 1e-6, angle, angle, *places, *lanes, 2),
        "ragged_attention_rows": (bf16(1, 1, 4, 16), *lanes, *places, 0.5, 0, 0.0, 3, torch.ones(4, device="cuda")),
        "choose_rows": (logits, 0.0, torch.zeros(1, dtype=torch.int64, device="cuda"), int32(2), int32(2)),
    }
    for name, operands in calls.items():
        op = getattr(torch.ops.mlspec, name).default
        result = torch.library.opcheck(op, operands, test_utils=("test_schema", "test_faketensor"))
        assert set(result.values()) == {"SUCCESS"}, name


FULL = """
import torch
from hf_mlspec.engines.cuda.steps import recorded

device = torch.device("cuda", 0)
kept = torch.zeros(1 << 20, dtype=torch.uint8, device=device)  # of 2 MB that other streams cannot use
torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1])
try:
    recorded(lambda: kept.add_(1), device)
except torch.OutOfMemoryError:
    print("refused")
torch.cuda.set_per_process_memory_fraction(1.0)
recorded(lambda: kept.add_(1), device).replay()
print(int(kept[0]))
"""


def test_a_device_without_memory_for_a_capture_ends_no_process():
    """torch frees a graph that never began to record, and would end the process; in a process of its own for that."""
    run = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout.split()) == (0, ["refused", "1"]), run.stderr[-2000:]
