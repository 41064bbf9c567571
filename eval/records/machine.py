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

FAST_READ = 55e9  # bytes a second of two threads; memory of virtual machines is seen near 33 or near 60 GB/s
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def card(device: str = "cpu") -> dict[str, Any]:
    """Processor or GPU, cores, versions and the commit of the working tree ("+" where it has changes)."""
    return {
        "processor": torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "l3_bytes": l3_bytes(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_mlspec": hf_mlspec.__version__,
        "commit": _commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


class ReadProbe:
    """How many bytes a second do torch's threads read at this moment? One buffer, read once a call."""

    def __init__(self, mebibytes: int = 256, device: str = "cpu"):
        # int64: a sum of 8 bytes is one addition, so the adding never limits the reading.
        self._memory = torch.ones(mebibytes * 2**17, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes read by one call."""
        return self._memory.nbytes

    def __call__(self) -> int:
        """Reads the buffer; -> its sum."""
        return self._memory.sum().item()


def read_bandwidth(device: str = "cpu", mebibytes: int = 512, repeats: int = 7) -> float:
    """Bytes a second of a plain sum over memory larger than most caches; the median of `repeats`."""
    probe = ReadProbe(mebibytes, device)
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        probe()
        seconds.append(time.perf_counter() - begin)
    return probe.nbytes / statistics.median(seconds[1:])


def regime(bytes_per_second: float) -> str:
    """ "fast" or "slow" memory, by what the probe read."""
    return "fast" if bytes_per_second >= FAST_READ else "slow"


def l3_bytes() -> int | None:
    """Size of the last-level cache, None where Linux does not tell."""
    sizes = [(folder / "size").read_text().strip() for folder in sorted(_CACHES.glob("index*"))]
    return max((int(size.removesuffix("K")) * 1024 for size in sizes if size.endswith("K")), default=None)


def rotation_bytes() -> int:
    """Bytes of weights to go round so that no cache holds them: 4 x L3, 256 MB to 2 GB; 1 GB where L3 is not known."""
    size = l3_bytes()
    return 2**30 if size is None else min(max(4 * size, 256 * 2**20), 2 * 2**30)


class PeakMemory:
    """Resident bytes while a block runs: `before` and `peak`, both None where Linux does not count them."""

    def __enter__(self) -> PeakMemory:
        self.before, self.peak = memory_of_process("VmRSS"), None
        if self.before is not None:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = memory_of_process("VmHWM")


def memory_of_process(name: str) -> int | None:
    """Bytes that Linux says in a line of /proc/self/status, as "VmRSS" or "RssAnon"; None elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


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
