"""Do GPUs that share a model write the same, whatever they write it with, and does one that is left alone end?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import require_parts

from hf_mlspec import demo_pair

PROGRAM = Path(__file__).resolve().parents[1] / "ranks.py"
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")


def started(word: str, port: int) -> list[subprocess.Popen]:
    """Two processes that nobody looks after: one that is left alone has to end by itself."""
    there = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
             "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}  # fmt: skip
    return [subprocess.Popen([sys.executable, str(PROGRAM), *map(str, demo_pair()), word], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True,
                             env={**there, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(2)]  # fmt: skip


def ended(word: str, port: int) -> tuple[dict, str]:
    """What rank 0 printed, and what it said on standard error, when it has ended by itself."""
    processes = started(word, port)
    try:
        out, errors = processes[0].communicate(timeout=120)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert lines, errors[-2000:]
    return json.loads(lines[0]), errors


@needs_two
def test_gpus_that_share_a_model_write_what_it_writes_alone():
    found, _ = ended("gpus", 29613)
    assert (found["engine"], found["by"]) == ("cuda", "BoxedRanks")
    alone = found["alone"]
    assert alone[0] == alone[1]
    assert found["batches"] == alone
    assert all(chain == alone for chain in found["chains"])


@needs_two
def test_gpus_share_experts_and_nested_weights():
    require_parts(ended("gpus-parts", 29615)[0], "cuda")


@needs_two
def test_a_gpu_that_is_left_alone_ends_within_half_a_minute():
    found, errors = ended("gpus-die", 29614)
    assert time.time() - found["left alone"] < 30
    assert "CUDA error" in errors
