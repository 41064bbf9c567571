"""Which machine, which code, and how fast is its memory? What every line of a result carries."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_mlspec


def card(device: str = "cpu") -> dict[str, Any]:
    """Processor or GPU, cores, versions and the commit of the working tree ("+" where it has changes)."""
    return {
        "processor": torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_mlspec": hf_mlspec.__version__,
        "commit": _commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def read_bandwidth(device: str = "cpu", mebibytes: int = 512, repeats: int = 7) -> float:
    """Bytes a second of a plain sum over float32 memory larger than the caches; the median of `repeats`."""
    memory = torch.ones(mebibytes * 2**18, device=device)
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        memory.sum().item()
        seconds.append(time.perf_counter() - begin)
    return memory.nbytes / statistics.median(seconds[1:])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The short hash of HEAD, None outside a checkout."""
    folder = Path(__file__).parent
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
    if head.returncode:
        return None
    changes = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=folder, capture_output=True, text=True)
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
