"""How do texts become one stream of tokens, travel as a small file, and become training windows?"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from eval.sources import read_texts

# Tokens of 16 bits: their high bytes lie two apart, and the bits of a literal depend on no earlier byte.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 1, "pb": 1}]


@dataclass
class Texts:
    """Token ids, uint16 or uint32 ``[tokens]`` each: what trains, and by name what is held out."""

    trained: np.ndarray
    held_out: dict[str, np.ndarray] = field(default_factory=dict)

    def joined(self, other: Texts) -> Texts:
        return Texts(np.concatenate([self.trained, other.trained]), {**self.held_out, **other.held_out})


def encode(tokenizer: PreTrainedTokenizerBase, paths: Collection[Path], without: Collection[str]) -> np.ndarray:
    """``[tokens]``: the texts of the paths in their order, an EOS behind each."""
    kind = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    texts = [text for path in paths for text in read_texts(path, without)]
    parts = [np.empty(0, kind)]
    for first in range(0, len(texts), 256):
        batch = tokenizer.backend_tokenizer.encode_batch(texts[first : first + 256], add_special_tokens=False)
        parts += [np.array([*text.ids, tokenizer.eos_token_id], dtype=kind) for text in batch]
    return np.concatenate(parts)


def read(tokenizer: PreTrainedTokenizerBase, trained: Collection[Path], held_out: Collection[Path],
         without: Collection[str]) -> Texts:
    """The texts of files and folders; the name of a held-out text is its file's or folder's."""
    return Texts(encode(tokenizer, trained, without),
                 {path.resolve().name: encode(tokenizer, [path], without) for path in held_out})


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the vocabulary: equal ids mean equal tokens where it is equal."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def pack(texts: Texts, vocabulary: str, file: Path) -> None:
    """Writes the texts, with the fingerprint of their vocabulary: LZMA takes about 0.7 bytes a token of code."""
    arrays = {"vocabulary": np.array(vocabulary), "kind": np.array(texts.trained.dtype.str)}
    for name, ids in {"trained": texts.trained, **{f"held_out/{n}": ids for n, ids in texts.held_out.items()}}.items():
        arrays[name] = np.frombuffer(lzma.compress(ids.tobytes(), lzma.FORMAT_XZ, filters=FILTERS), np.uint8)
    beside = file.with_name(file.name + ".part")
    with beside.open("wb") as out:
        np.savez(out, **arrays)
    os.replace(beside, file)


def unpack(file: Path, vocabulary: str) -> Texts:
    """The texts of a file that `pack` wrote; ValueError for another file, and for tokens of another vocabulary."""
    if not zipfile.is_zipfile(file):
        raise ValueError(f"--tokens {file} is no file that --prepare wrote, or a part of one: prepare it again")
    with np.load(file) as arrays:
        if missing := {"vocabulary", "kind", "trained"} - set(arrays.files):
            raise ValueError(f"--tokens {file} was not written by --prepare: it has no {', '.join(sorted(missing))}")
        if str(arrays["vocabulary"]) != vocabulary:
            raise ValueError(f"--tokens {file} has tokens of another vocabulary: prepare them with this model")
        kind = np.dtype(str(arrays["kind"]))
        streams = {name: np.frombuffer(lzma.decompress(arrays[name].tobytes()), kind)
                   for name in arrays.files if name not in ("vocabulary", "kind")}
    return Texts(streams.pop("trained"), {name.removeprefix("held_out/"): ids for name, ids in streams.items()})


def batches(stream: torch.Tensor, length: int, rows: int, seed: int) -> Iterator[torch.Tensor]:
    """int64 ``[rows, length + 1]`` without end. An epoch cuts the stream at another offset and reads each piece once.

    stream: int32 ``[tokens]`` on the training device, longer than ``length``.
    """
    draws = torch.Generator().manual_seed(seed)
    inside, waiting = torch.arange(length + 1, device=stream.device), torch.empty(0, dtype=torch.int64)
    while True:
        while len(waiting) < rows:
            first = int(torch.randint(min(length, len(stream) - length), (1,), generator=draws))
            pieces = (len(stream) - 1 - first) // length
            waiting = torch.cat([waiting, first + length * torch.randperm(pieces, generator=draws)])
        starts, waiting = waiting[:rows].to(stream.device), waiting[rows:]
        yield stream[starts[:, None] + inside].long()
