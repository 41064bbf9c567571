"""Do processes that share a model answer a batch as one does, and what becomes of it where one of them is gone?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hf_mlspec
from hf_mlspec.batch.group import worker_of
from hf_mlspec.batch.worker import Settings, Worker, asked_of
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
TARGET = str(hf_mlspec.demo_pair()[0])


def asked(place: Path, lines: int, new_tokens: int) -> str:
    sampled = {"temperature": 0.8, "top_k": 40, "seed": 5}
    found = [{"prompt": f"def f{number}(x):\n    ", "max_tokens": new_tokens + number, "return_token_ids": True,
              **(sampled if number % 3 == 2 else {})} for number in range(lines)]  # fmt: skip
    place.write_text("".join(f"{json.dumps(line)}\n" for line in found))
    return str(place)


def command(file: str, out: Path, *words: object) -> subprocess.Popen:
    said = ["batch", file, str(out), "--model", TARGET, "--level", "mxfp4", "--num-draft-tokens", "4", "--device",
            "cpu", "--lines-per-file", "2", "--slots", "2", *map(str, words)]  # fmt: skip
    return subprocess.Popen([sys.executable, "-m", "mlspec_cli", *said], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def files(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(out.glob("part-*.jsonl"))}


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow
def test_two_processes_write_the_files_of_one_and_a_lost_one_ends_the_job(tmp_path):
    """In float32, in which sums of another order leave no other ids here. The job goes on behind the loss."""
    file = asked(tmp_path / "in.jsonl", 12, 24)
    alone = command(file, tmp_path / "alone")
    shared = command(file, tmp_path / "shared", "--tensor-parallel", 2)
    followers: list[int] = []
    while len(files(tmp_path / "shared")) < 2 and shared.poll() is None:
        followers = children(shared.pid) or followers
        time.sleep(0.05)
    assert len(followers) == 1
    os.kill(followers[0], signal.SIGKILL)
    _, said = shared.communicate(timeout=120)
    assert shared.returncode == 2, said
    assert "what is finished stays" in said
    assert len(files(tmp_path / "shared")) < 6
    again = command(file, tmp_path / "shared", "--tensor-parallel", 2, "--json")
    while not (found := children(again.pid)) and again.poll() is None:
        time.sleep(0.05)
    told, said = again.communicate(timeout=600)
    assert again.returncode == 0, said
    assert json.loads(told)["before"] > 0
    assert gone(found[0], 20)
    _, said = alone.communicate(timeout=600)
    assert alone.returncode == 0, said
    assert files(tmp_path / "shared") == files(tmp_path / "alone")


@pytest.mark.slow
def test_a_number_of_processes_that_does_not_divide_the_heads(tmp_path):
    done = command(asked(tmp_path / "in.jsonl", 1, 4), tmp_path / "out", "--tensor-parallel", 3)
    _, said = done.communicate(timeout=600)
    assert done.returncode != 0
    assert "3" in said


def test_a_device_for_all_processes():
    shared = worker_of(Settings(TARGET, "float32", "cuda:0", [], "m", processes=2))
    with pytest.raises(ValueError, match="--tensor-parallel 2 and --device cuda:0: each process has a device of its"):
        shared.load()


def test_a_job_says_how_many_processes_share_its_model():
    """Only where there are several: what was begun before goes on."""
    one = Settings(TARGET, "float32", "cpu", [], "m")
    assert "processes" not in asked_of(one, "sha", 2)
    two = Settings(TARGET, "float32", "cpu", [], "m", processes=2)
    assert asked_of(two, "sha", 2)["processes"] == 2
    assert isinstance(Worker(one), Worker)
