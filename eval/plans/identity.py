"""Of which weights, texts and versions are a plan's results? What keeps others from being taken for them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_mlspec
from eval.plans.places import Places
from eval.plans.systems import System

# Beside config.json and the weights: what decides the ids that a model reads, and when it stops writing.
_TEXT_FILES = ("generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
               "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt")
_PROBES, _PROBE_BYTES = 64, 1 << 14  # read of every file of weights: 1 MiB, evenly spread


def digest(value: Any) -> str:
    """A hash of something JSON can write."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def fingerprint(folder: Path) -> str | None:
    """A hash of a model's configs and tokenizer files and of samples of its weights, so that another model in its
    folder is noticed.

    No certificate: of each file of weights it reads its size and 1 MiB. None for a hub name and for a level's word.
    """
    if not (folder / "config.json").is_file():
        return None
    state = hashlib.sha256((folder / "config.json").read_bytes())
    for file in (folder / name for name in _TEXT_FILES):
        if file.is_file():
            state.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = file.stat().st_size
        state.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as weights:
            for number in range(_PROBES):
                weights.seek(number * size // _PROBES)
                state.update(weights.read(_PROBE_BYTES))
    return state.hexdigest()[:16]


def level_weights(system: System, places: Places) -> dict[str, str]:
    """The fingerprint of every level of a system that is a folder, by the plan's word for it."""
    folders = {level: Path(places.fill(level).removesuffix("@mxfp4")) for level in system.levels}
    return {level: mark for level, folder in folders.items() if (mark := fingerprint(folder)) is not None}


def arithmetic(device: str) -> dict[str, str]:
    """What decides the bits beside the weights: items of two of these would meet in one number."""
    return {"device": torch.device(device).type, "hf_mlspec": hf_mlspec.__version__, "torch": torch.__version__,
            "transformers": transformers.__version__}
