"""Which bytes stood behind a run? Hashes of weights, of configurations and of the compiled kernels.

Nothing here names a place on the machine: files go by their names inside the model's folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.shards import local
from ..ops import kernel_table

CONFIG_FILES = ("config.json", "generation_config.json")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
_VOLATILE = ("_name_or_path", "transformers_version")  # of a config: where it was read and by whom
_CHUNK = 1 << 22  # bytes read at a time

FileEntry = dict[str, Any]  # {"name", "bytes", "sha256"}


def hash_folder(folder: str | Path) -> tuple[list[FileEntry], list[FileEntry]]:
    """The files of a model folder that decide what it computes: (configurations, weights), each sorted by name.

    Raises ValueError for what is no folder, or one without weights.
    """
    place = Path(folder)
    if not place.is_dir():
        raise ValueError(f"model folder {str(folder)!r} does not exist; give a folder written by save_pretrained")
    weights = sorted({path for pattern in WEIGHT_FILES for path in place.glob(pattern) if path.is_file()})
    if not weights:
        raise ValueError(f"model folder {str(folder)!r} holds no weights ({', '.join(WEIGHT_FILES)})")
    configs = [place / name for name in CONFIG_FILES if (place / name).is_file()]
    return [_entry(path) for path in configs], [_entry(path) for path in weights]


def combined(files: Iterable[FileEntry]) -> str:
    """One SHA-256 for several files: of the lines ``sha256sum`` prints for them, so that a shell can recompute it."""
    lines = "".join(f"{entry['sha256']}  {entry['name']}\n" for entry in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def hash_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, as hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def hash_parameters(model: nn.Module) -> str:
    """SHA-256 of a live model's ``state_dict``: per tensor, by name, one line ``name dtype shape`` and its bytes.

    Packed weights count as they are on disk, so a model that was prepared, or ran, has the hash it was loaded with.
    Of a model that processes share: of what this one holds.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        tensor = local(tensor)
        shape = "x".join(map(str, tensor.shape))
        digest.update(f"{name} {_name_of(tensor.dtype)} {shape}\n".encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def hash_configuration(model: Any) -> str:
    """SHA-256 of config and generation config of a live model, as canonical JSON, without paths and versions."""
    parts = [json.loads(part.to_json_string(use_diff=False)) for part in (model.config, model.generation_config)]
    for part in parts:
        for name in _VOLATILE:
            part.pop(name, None)
    return hash_json(parts)


def hash_json(value: Any) -> str:
    """SHA-256 of a value as canonical JSON: sorted keys, no spaces, ASCII only; no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def hash_ids(tokenizer: Any, prompts: Iterable[str]) -> str:
    """SHA-256 of the prompts' token ids, a list of lists as canonical JSON, which stands for the tokenizer."""
    return hash_json([list(tokenizer(prompt).input_ids) for prompt in prompts])


def kernels(device: str) -> dict[str, Any]:
    """The compiled library by name and hash ("reference" and None without one), and which kernel serves each op."""
    ops = {op: kernel for op, where, kernel in kernel_table() if where == device}
    library = _library()
    return {
        "library": library.name if library else "reference",
        "sha256": hash_file(library) if library else None,
        "instruction_set": next((kernel for kernel in ops.values() if kernel != "reference"), "reference"),
        "ops": ops,
    }


def _library() -> Path | None:
    package = Path(__file__).resolve().parents[1]
    loaded = sorted(Path(path) for path in torch.ops.loaded_libraries)
    return next((path for path in loaded if path.parent == package and path.name.startswith("_C")), None)


def _entry(path: Path) -> FileEntry:
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": hash_file(path)}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes_of(tensor: Tensor) -> memoryview:
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(whole.view(torch.uint8).numpy())
