"""How much memory is free for caches, and how does a cache move to a larger one without being there twice?"""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

WORTH_ASKING = 2**26  # bytes; for less nobody asks how much is free
_LEAST_GIVEN_BACK = 2**20  # bytes of a layer, below which its pages stay until all have moved
WRITTEN_ALONE = 1 << 22  # elements on the CPU, at most, that the calling thread writes without torch's others
PIECE = 1 << 14  # elements, half of what torch gives to more than one thread
_GIB = 2**30
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": _GIB}


def bytes_in(text: str) -> int | None:
    """Bytes that a text says as accelerate's words do: "6GiB", "500 MB", "1024"; None where it says none."""
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([KMG]I?B)?\s*", text.upper())
    return None if found is None else int(float(found[1]) * _UNITS[found[2] or ""])


def moved(kv: Tensor, rows: int, batch: int, slots: int, *, spend: bool) -> Tensor:
    """A cache `[layers, 2, batch, kv_heads, slots, head_dim]` that begins with `rows` rows of `kv`, as many of their
    slots as it has; zeros elsewhere.

    spend: nobody reads `kv` afterwards. On the CPU (Linux) its layers give their pages back one by one, so that one
    layer is there twice and not all of them. On a GPU without memory for both it goes by way of host memory. An error
    for want of memory leaves `kv` as it was, unless someone else took the memory that it had meanwhile.
    """
    try:
        return _copied(kv, rows, batch, slots, spend)
    except RuntimeError as error:
        if not (spend and kv.is_cuda and out_of_memory(error)):
            raise
    return _through_host(kv, rows, batch, slots)


def grown(kv: Tensor, rows: int, sizes: list[tuple[int, int]], *, spend: bool) -> Tensor:
    """`moved` to the first of these sizes, (batch, slots), for which there is memory; torch.OutOfMemoryError names
    the last one where there is none."""
    problem = ""
    for batch, slots in sizes:
        try:
            return moved(kv, rows, batch, slots, spend=spend)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            problem = str(error).splitlines()[0]
    batch, slots = sizes[-1]
    raise torch.OutOfMemoryError(
        f"no memory for {slots} tokens in each of {batch} rows beside a cache of {kv.nbytes / _GIB:.2f} GiB, "
        f"{kv.shape[4]} so far in each of {kv.shape[2]}: ask for fewer new tokens or rows, or free what else is on "
        f"the device ({problem})"
    )


def copy_quietly(into: Tensor, values: Tensor) -> None:
    """Copy keys and values `[layers, 2, kv_heads, slots, head_dim]` of a row; few on the CPU by the calling thread
    alone: threads that help torch spin on for milliseconds, on the cores that the next pass needs."""
    if into.device.type != "cpu" or into.numel() > WRITTEN_ALONE:
        into.copy_(values)
        return
    slots = max(PIECE // (into.shape[2] * into.shape[4]), 1)
    for layer, of_layer in zip(into, values, strict=True):
        for own, other in zip(layer, of_layer, strict=True):
            for piece, source in zip(own.split(slots, dim=1), other.split(slots, dim=1), strict=True):
                piece.copy_(source)


def copy_pieces(into: Tensor, pieces: list[Tensor]) -> None:
    """Copy keys and values of a row that stand in pieces, one behind the other along its slots, as many as fit."""
    first, last = sum(piece.shape[3] for piece in pieces[:-1]), pieces[-1]
    pieces = [*pieces[:-1], last[:, :, :, : into.shape[3] - first]]
    lanes = into.split([piece.shape[3] for piece in pieces], dim=3)
    if into.is_cuda:
        torch._foreach_copy_(lanes, pieces)  # one call of Python for dozens of pieces
        return
    for lane, piece in zip(lanes, pieces, strict=True):
        copy_quietly(lane, piece)


def require_free(needed: int, most: int, device: torch.device, kept: int, what: str) -> int | None:
    """torch.OutOfMemoryError where less than `needed` bytes more are free for `what`; how many are free, where that is
    less than `most`, else None.

    kept: bytes that can be freed as soon as they are asked for. Where nobody knows what is free, all is well.
    """
    free = available(device)
    if free is None or free + kept >= most:
        return None
    free += kept
    if free < needed:
        gc.collect()  # what nobody refers to any more may hold the rest
        free = available(device) + kept
    if free < needed:
        raise torch.OutOfMemoryError(
            f"{what} needs {needed / _GIB:.2f} GiB more for keys and values before its first token, and "
            f"{free / _GIB:.2f} GiB are free on {device}: shorten the prompts, pass fewer rows at a time, leave out "
            "levels with caches of their own, or free what else is there"
        )
    return free if free < most else None


def available(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device at most, None where that is not known: what captured graphs of a GPU
    hold for themselves counts as free."""
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        share = int(whole * torch.cuda.get_per_process_memory_fraction(device.index))  # that torch lets a process take
        taken = torch.cuda.memory_allocated(device)
        return max(min(free + torch.cuda.memory_reserved(device), share) - taken, 0)
    return _free_on_host() if device.type == "cpu" else None


def out_of_memory(error: BaseException | None) -> bool:
    """Whether a device had no memory left: torch reports it in several ways while a graph is being captured, also as
    a capture that failed for an error before, and in other words on the CPU."""
    words = "out of memory", "can't allocate memory", "not enough memory"
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(one in str(error) for one in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def _copied(kv: Tensor, rows: int, batch: int, slots: int, spend: bool) -> Tensor:
    """See `moved`. Layer by layer."""
    if kv.device.type == "cpu":
        layers, both, _, heads, _, dim = kv.shape
        spent = kv.nbytes - kv.nbytes // max(layers, 1) if spend and _madvise() else 0  # no layers: Mamba-2 alone
        _require_host(layers * both * batch * heads * slots * dim * kv.element_size() - spent)
    out = _empty(kv, batch, slots)
    for new, old in zip(out, kv, strict=True):
        _fill(new, old[:, :rows, :, :slots])
        if spend:
            _give_back(old)
    return out


def _through_host(kv: Tensor, rows: int, batch: int, slots: int) -> Tensor:
    """See `moved`: `kv` is freed before the larger cache is allocated, and filled again if that fails."""
    whole = kv[:, :, :rows]
    _require_host(whole.nbytes)
    host = torch.empty(whole.shape, dtype=kv.dtype)
    _copy(host, whole)
    storage = kv.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    try:
        out = _empty(kv, batch, slots)
        for new, old in zip(out, host, strict=True):
            _fill(new, old[:, :, :, :slots])
    except BaseException:
        out = new = None  # frees it
        storage.resize_(size)
        _copy(whole, host)
        raise
    return out


def _require_host(size: int) -> None:
    """torch.OutOfMemoryError where so many bytes more are not free: a process that takes them is killed, not told."""
    free = _free_on_host() if size >= WORTH_ASKING else None
    if free is not None and free < size:
        raise torch.OutOfMemoryError(
            f"{size / _GIB:.2f} GiB of host memory are needed, and {free / _GIB:.2f} GiB are free"
        )


def _empty(kv: Tensor, batch: int, slots: int) -> Tensor:
    """Memory for a cache like `kv`, of other rows and slots."""
    layers, both, _, heads, _, dim = kv.shape
    with torch.inference_mode(False):
        return torch.empty(layers, both, batch, heads, slots, dim, dtype=kv.dtype, device=kv.device)


def _fill(new: Tensor, old: Tensor) -> None:
    """What there is of a layer's keys and values, zeros behind it; both `[2, batch, kv_heads, slots, head_dim]`."""
    rows, slots = old.shape[1], old.shape[3]
    for into, values in zip(new, old, strict=True):
        into[:rows, :, :slots] = values
    new[:, :rows, :, slots:] = 0
    new[:, rows:] = 0


def _copy(into: Tensor, values: Tensor) -> None:
    """Between devices, in pieces that lie in one piece: others would be gathered on the device first."""
    for layer, of_layer in zip(into, values, strict=True):
        for piece, of_piece in zip(layer, of_layer, strict=True):
            piece.copy_(of_piece)


def _give_back(tensor: Tensor) -> None:
    """Let the system have the memory of a contiguous tensor on the CPU, whose values are lost; its addresses stay."""
    madvise = _madvise()
    if madvise is None or tensor.device.type != "cpu" or tensor.nbytes < _LEAST_GIVEN_BACK:
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages only
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


@cache
def _madvise():
    """The system's call, None where it would not free pages."""
    return getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def _free_on_host() -> int | None:
    """Memory and swap that the system says are free, and what the process's control groups and its limit of addresses
    (`ulimit -v`) leave of them."""
    found = _numbers("/proc/meminfo")
    if "MemAvailable:" not in found:
        return None
    files = "active_file", "inactive_file"
    memory = [1024 * found["MemAvailable:"], *_left("memory.max", "memory.current", "", *files)]
    old = "memory", *(f"total_{name}" for name in files)  # version 1, where swap counts in a limit of both
    memory += _left("memory.limit_in_bytes", "memory.usage_in_bytes", *old)
    both = _left("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes", *old)
    swap = min([1024 * found.get("SwapFree:", 0), *_left("memory.swap.max", "memory.swap.current", "")])
    return min([min(memory) + swap, *both, *_addresses_left()])


def _addresses_left() -> list[int]:
    """Bytes that the process may still map, where that has a limit."""
    with suppress(ImportError, OSError, ValueError, KeyError):  # not on Windows
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        if most != resource.RLIM_INFINITY:
            return [max(most - 1024 * _numbers("/proc/self/status")["VmSize:"], 0)]
    return []


def _left(limit: str, used: str, controller: str, *dropped: str) -> list[int]:
    """Bytes below the limit of every control group of this process that has one, with what of the group can be
    dropped. controller: "" for version 2."""
    left = []
    for folder in _groups(controller):
        most, now = (_number(folder / file) for file in (limit, used))
        if most is not None and now is not None:
            held = _numbers(folder / "memory.stat") if dropped else {}
            left.append(max(most - now + sum(held.get(name, 0) for name in dropped), 0))
    return left


def _groups(name: str) -> list[Path]:
    """Folders of the control groups of this process, those above included; name: of the controller, "": version 2."""
    root, own = Path("/sys/fs/cgroup") / name, "/"
    for line in _lines("/proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        own = path if name in names.split(",") else own
    inner = root / own.strip("/")
    return [inner, *(folder for folder in inner.parents if folder == root or root in folder.parents)]


def _numbers(file: str | Path) -> dict[str, int]:
    """The first two words of every line."""
    words = (line.split() for line in _lines(file))
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _number(file: Path) -> int | None:
    words = " ".join(_lines(file))
    return int(words) if words.isdigit() else None


def _lines(file: str | Path) -> list[str]:
    try:
        return Path(file).read_text().splitlines()
    except OSError:
        return []
