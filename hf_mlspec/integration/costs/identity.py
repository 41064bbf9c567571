"""On which machine, with which kernels, and of which model are costs? Those of another are no use."""

from __future__ import annotations

import hashlib
import json
import platform
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import transformers

from ... import ops
from ...engines.built import device_of
from ...engines.engine import Engine


def machine_of(engine: Engine) -> dict[str, str]:
    """What decides how long a forward pass of this engine takes, the model apart, in words.

    ops.UnreadableLibrary where nothing tells the loaded kernels from others: then costs are measured and not kept.
    """
    device = device_of(engine.model)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "threads": str(torch.get_num_threads()),
        "kernels": _kernels(device.type),
        "torch": torch.__version__,
        "hf_mlspec": _version(),
    }


def model_of(engine: Engine, replayed: bool = False) -> str:
    """A hash of what the engine computes: the modules of its model with their sizes, dtypes, bits, its name, the
    format of its cache, and the version of transformers where that runs them. replayed: inside captured rounds."""
    modules = str(engine.model)
    attention = getattr(engine.model.config, "_attn_implementation", "")
    code = transformers.__version__ if engine.can.by_module else ""
    said = [engine.name, str(engine.dtype), list(engine.bits), attention, code, modules]
    said += [] if engine.kept_in is None else [f"keys and values in {engine.kept_in.word}"]
    return _hash([*said, "replayed"] if replayed else said)


def key_of(engine: Engine, replayed: bool = False) -> str:
    """A name for the costs of this engine's model on this machine."""
    return key_of_hash(engine, model_of(engine, replayed))


def key_of_hash(engine: Engine, model: str) -> str:
    """`key_of` of a model with this hash on the machine of `engine`."""
    return _hash([machine_of(engine), model])


def chain_of(target: Engine, replayed: bool, said: object) -> str:
    """A name for what is learned of a chain on this machine. said: what tells it from other chains of the target."""
    return _hash([machine_of(target), model_of(target, replayed), replayed, repr(said)])


def _hash(said: object) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]


def _version() -> str:
    """Of this package; a source tree that is not installed has none."""
    try:
        return version("hf-mlspec")
    except PackageNotFoundError:
        return "source tree"


@lru_cache(maxsize=1)
def processor_name() -> str:
    """The processor's own name, as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


@lru_cache(maxsize=2)
def _kernels(device: str) -> str:
    """A hash of the kernels that serve this kind of device: their names, and the library that is loaded."""
    table = sorted(f"{op} {kernel}" for op, where, kernel in ops.kernel_table() if where == device)
    return _hash([*table, ops.library_hash(device)])
