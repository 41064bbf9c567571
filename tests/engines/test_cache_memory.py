"""Does a cache that grows keep every value, and stay about as small as the larger of both? Is what is free known?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from instruction_sets import PACKAGE
from torch.utils._python_dispatch import TorchDispatchMode

from hf_mlspec.engines import memory
from hf_mlspec.engines.rows import DecoderCache, new_kv

ROOT = Path(__file__).resolve().parents[2]
LAYERS, HEADS, DIM = 3, 2, 4
DECODER = SimpleNamespace(num_layers=LAYERS, sizes=SimpleNamespace(kv_heads=HEADS, head_dim=DIM),
                          dtype=torch.bfloat16, device=torch.device("cpu"))  # fmt: skip
# What is done to 4096 slots of 2 rows: the rows and slots that are kept, MiB then, and what the peak stays below.
CHANGES = {
    "cache.reserve(4097)": (2, 4096, 384, 450), "cache.extend_rows(1)": (2, 4096, 384, 450),
    "cache.select([1], 4096); cache.shrink(1000)": (1, 1024, 32, 320),
}  # fmt: skip
# Without what the package itself imports, which takes seconds; every change in a child, whose peak is its own.
PEAK = """
import os
from hf_mlspec.engines.rows import DecoderCache

def mib(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1024

sizes = types.SimpleNamespace(kv_heads=8, head_dim=64)
decoder = types.SimpleNamespace(num_layers=16, sizes=sizes, dtype=torch.bfloat16, device=torch.device("cpu"))
for change, (rows, slots, *_) in CHANGES.items():
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, change
        continue
    before = mib("VmRSS")
    cache = DecoderCache.new(decoder, 2, 4096)
    cache.kv.fill_(3)
    exec(change)
    print(cache.nbytes // 2**20, mib("VmHWM") - before, flush=True)
    os._exit(not (cache.kv[:, :, :rows, :, :slots] == 3).all())
"""


def cache_of(batch: int, slots: int) -> DecoderCache:
    """A cache of whose values no two are alike."""
    kv = new_kv(DECODER, batch, slots).float()
    kv.copy_(torch.arange(1, kv.numel() + 1).view(kv.shape))
    return DecoderCache(kv, batch, owned=True)


def host_way(kv, rows, batch, slots, *, spend):
    return memory._through_host(kv, rows, batch, slots)


@pytest.mark.parametrize("spend", [False, True])
@pytest.mark.parametrize("way", [memory.moved, host_way], ids=["beside", "through the host"])
@pytest.mark.parametrize(("rows", "batch", "slots"), [(2, 2, 9), (2, 5, 6), (1, 1, 6), (3, 3, 4), (2, 4, 2)])
def test_what_a_cache_held_is_in_the_one_it_moved_to(way, spend, rows, batch, slots, monkeypatch):
    old = cache_of(3, 6).kv
    before, kept = old.clone(), min(slots, 6)
    monkeypatch.setattr(memory, "_LEAST_GIVEN_BACK", 0)
    new = way(old, rows, batch, slots, spend=spend)
    assert new.shape == (LAYERS, 2, batch, HEADS, slots, DIM)
    assert new.is_contiguous()
    assert not new.is_inference()
    assert torch.equal(new[:, :, :rows, :, :kept], before[:, :, :rows, :, :kept])
    assert not new[:, :, rows:].any()
    assert not new[:, :, :, :, kept:].any()
    if not spend and way is memory.moved:
        assert torch.equal(old, before)


def test_a_cache_without_layers_grows():
    """Of Mamba-2 alone: nothing keeps keys and values."""
    empty = new_kv(DECODER, 2, 6)[:0]
    assert memory.moved(empty, 2, 3, 9, spend=True).shape == (0, 2, 3, HEADS, 9, DIM)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")
def test_at_most_one_layer_is_there_twice():
    """256 MiB become 384, where both at once would be 640, or 32."""
    program = f"{PACKAGE}CHANGES = {CHANGES!r}\n{PEAK}"
    command = [sys.executable, "-c", program, str(ROOT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line, (change, (_, _, expected, most)) in zip(lines, CHANGES.items(), strict=True):
        size, peak = map(float, line.split())
        assert size == expected, change
        assert max(256, size) <= peak < most, change


def test_what_another_holds_too_is_not_spent():
    cache = cache_of(2, 256)
    cache.owned = False
    kv, before = cache.kv, cache.kv.clone()
    cache.reserve(300)
    assert torch.equal(kv, before)
    assert cache.owned


def test_without_memory_beside_it_a_cache_is_as_it_was(monkeypatch):
    old = cache_of(2, 6).kv
    before = old.clone()

    def none(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory, "_empty", none)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        memory._through_host(old, 2, 2, 9)
    assert torch.equal(old, before)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux only")
def test_a_cache_on_the_cpu_grows_as_far_as_memory_is_free(monkeypatch):
    monkeypatch.setattr(memory, "WORTH_ASKING", 0)
    cache = cache_of(2, 512)
    kv = cache.kv
    enough = kv.nbytes // 2 + kv.nbytes // LAYERS  # half as much again, and one layer twice
    monkeypatch.setattr(memory, "_free_on_host", lambda: enough - 1)
    words = r"no memory for 768 tokens in each of 2 rows beside a cache of .* 512 so far in each of 2: .*new tokens"
    with pytest.raises(torch.OutOfMemoryError, match=words):
        cache.reserve(513)
    with pytest.raises(torch.OutOfMemoryError, match="no memory for 512 tokens in each of 12 rows"):
        cache.extend_rows(10)
    assert cache.kv is kv
    assert cache.rows == 2
    monkeypatch.setattr(memory, "_free_on_host", lambda: enough)
    cache.reserve(513)
    assert cache.kv.shape[4] == 768


def test_first_rows_are_asked_for_like_those_behind_them(monkeypatch):
    monkeypatch.setattr(memory, "WORTH_ASKING", 0)
    cache = DecoderCache.new(DECODER, 0, 256)
    needed = LAYERS * 2 * 5 * HEADS * 256 * DIM * 2
    monkeypatch.setattr(memory, "_free_on_host", lambda: needed - 1)
    with pytest.raises(torch.OutOfMemoryError, match="no memory for 256 tokens in each of 5 rows"):
        cache.extend_rows(5)
    monkeypatch.setattr(memory, "_free_on_host", lambda: needed)
    cache.extend_rows(5)
    assert cache.nbytes == needed


def test_the_way_through_the_host_needs_memory_there(monkeypatch):
    monkeypatch.setattr(memory, "WORTH_ASKING", 0)
    old = cache_of(3, 6).kv
    before, needed = old.clone(), old.nbytes // 3 * 2
    monkeypatch.setattr(memory, "_free_on_host", lambda: needed - 1)
    with pytest.raises(torch.OutOfMemoryError, match="GiB of host memory are needed"):
        memory._through_host(old, 2, 2, 9)
    assert torch.equal(old, before)
    monkeypatch.setattr(memory, "_free_on_host", lambda: needed)
    assert torch.equal(memory._through_host(old, 2, 2, 9)[:, :, :, :, :6], before[:, :, :2])


def test_other_errors_are_passed_on(monkeypatch):
    def broken(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(memory, "_empty", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        cache_of(1, 256).reserve(300)


def test_memory_that_torch_cannot_allocate_on_the_cpu_is_none():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert memory.out_of_memory(caught.value)


GIB = 2**30
MEMINFO = "MemTotal: 9000000 kB\nMemAvailable: 4194304 kB\nSwapFree: 1048576 kB"
V2, V1 = "/sys/fs/cgroup", "/sys/fs/cgroup/memory"
SYSTEMS = {
    "no groups": ({"/proc/meminfo": MEMINFO}, 5 * GIB),
    "not known": ({}, None),
    "no limit": (
        {"/proc/meminfo": MEMINFO, "/proc/self/cgroup": "0::/", f"{V2}/memory.max": "max",
         f"{V2}/memory.current": "1"}, 5 * GIB,
    ),
    "a container": (
        {"/proc/meminfo": MEMINFO, "/proc/self/cgroup": "0::/", f"{V2}/memory.max": str(3 * GIB),
         f"{V2}/memory.current": str(2 * GIB), f"{V2}/memory.stat": f"anon 7\nfile {GIB}\nshmem {GIB // 4}\n"
         f"active_file {GIB // 2}\ninactive_file {GIB // 4}"}, 2 * GIB + 3 * GIB // 4,
    ),
    "a container without swap": (
        {"/proc/meminfo": MEMINFO, "/proc/self/cgroup": "0::/", f"{V2}/memory.max": str(3 * GIB),
         f"{V2}/memory.current": str(2 * GIB), f"{V2}/memory.swap.max": "0", f"{V2}/memory.swap.current": "0"}, GIB,
    ),
    "a group above": (
        {"/proc/meminfo": MEMINFO, "/proc/self/cgroup": "0::/a/b", f"{V2}/a/memory.max": str(2 * GIB),
         f"{V2}/a/memory.current": str(GIB), f"{V2}/a/b/memory.max": "max"}, 2 * GIB,
    ),
    "version 1": (
        {"/proc/meminfo": MEMINFO, "/proc/self/cgroup": "5:cpu:/x\n7:hugetlb,memory:/job\n0::/",
         f"{V1}/job/memory.limit_in_bytes": str(GIB), f"{V1}/job/memory.usage_in_bytes": str(2 * GIB)}, GIB,
    ),
    "version 1, no swap": (
        {"/proc/meminfo": MEMINFO, "/proc/self/cgroup": "7:memory:/", f"{V1}/memory.limit_in_bytes": str(2 * GIB),
         f"{V1}/memory.usage_in_bytes": str(GIB), f"{V1}/memory.memsw.limit_in_bytes": str(2 * GIB),
         f"{V1}/memory.memsw.usage_in_bytes": str(GIB)}, GIB,
    ),
}  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
def test_free_memory_is_what_the_system_and_its_control_groups_leave(system, monkeypatch):
    files, free = SYSTEMS[system]
    monkeypatch.setattr(memory, "_lines", lambda file: files.get(str(file), "").splitlines())
    assert memory.available(torch.device("cpu")) == free
    assert memory.available(torch.device("meta")) is None


def test_files_that_are_not_there_are_empty(tmp_path):
    assert memory._lines(tmp_path / "none") == []


def test_what_nobody_refers_to_any_more_is_free(monkeypatch):
    """Garbage may hold what is missing: it is collected before a call is refused."""
    said = iter([3, 5, 3, 9, 3, 4])
    monkeypatch.setattr(memory, "available", lambda _: next(said))
    device = torch.device("cpu")
    assert memory.require_free(5, 9, device, 0, "a cache") == 5
    assert memory.require_free(5, 9, device, 0, "a cache") is None
    with pytest.raises(torch.OutOfMemoryError, match=r"a cache needs .* before its first token"):
        memory.require_free(5, 9, device, 0, "a cache")


class CopiedAtOnce(TorchDispatchMode):
    """How many elements each copy has."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].numel())
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("slots", [1, 5000])
def test_a_row_that_moves_wakes_no_threads(slots):
    """torch gives 2**15 elements and more to its threads, which spin behind them on the cores of the next pass."""
    cache = cache_of(3, 5000)
    before = cache.kv.clone()
    with CopiedAtOnce() as copies:
        cache.select([0, 2], slots)
    assert torch.equal(cache.kv[:, :, 1, :, :slots], before[:, :, 2, :, :slots])
    assert torch.equal(cache.kv[:, :, 1, :, slots:], before[:, :, 1, :, slots:])
    assert torch.equal(cache.kv[:, :, [0, 2]], before[:, :, [0, 2]])
    assert 0 < max(copies.sizes) < 2**15
    assert sum(copies.sizes) == LAYERS * 2 * HEADS * slots * DIM


@pytest.mark.skipif(sys.platform != "linux", reason="what a process may map is counted there")
def test_a_limit_of_addresses_is_a_limit_of_memory():
    import resource

    limits = resource.getrlimit(resource.RLIMIT_AS)
    taken = 1024 * memory._numbers("/proc/self/status")["VmSize:"]
    resource.setrlimit(resource.RLIMIT_AS, (taken + 2**26, limits[1]))
    try:
        free = memory.available(torch.device("cpu"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert 2**25 < free <= 2**26
    assert memory.available(torch.device("cpu")) > free


def test_the_share_of_a_gpu_that_torch_leaves_a_process_is_what_is_free(monkeypatch):
    numbers = {"mem_get_info": (60, 80), "get_per_process_memory_fraction": 0.5, "memory_allocated": 10,
               "memory_reserved": 15}  # fmt: skip
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert memory.available(torch.device("cuda", 0)) == 30  # half of 80, less 10
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    assert memory.available(torch.device("cuda", 0)) == 65
