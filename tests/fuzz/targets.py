"""Which readers are fuzzed? All that read what others wrote: files, lines, bodies of requests and words."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eval.plans.systems import Prompts, System
from eval.plans.tables import read_table, read_tables, read_toml
from hf_mlspec.batch.lines import BadLine, read_line
from hf_mlspec.batch.source import Source
from hf_mlspec.calibration.finished import FinishedBlocks
from hf_mlspec.calibration.matrices import read_rotations
from hf_mlspec.checkpoints.gguf_file import open_gguf
from hf_mlspec.checkpoints.gguf_names import config_of, parameters, row_orders
from hf_mlspec.checkpoints.pickles import held_tensors, read_pickle
from hf_mlspec.checkpoints.readers import READERS, method_of, reader_for
from hf_mlspec.checkpoints.safetensors_file import read_header
from hf_mlspec.engines.memory import bytes_in
from hf_mlspec.evaluation.certificate import Certificate
from hf_mlspec.evaluation.journal import Journal
from hf_mlspec.evaluation.prompts import read_prompts
from hf_mlspec.evaluation.tasks.files import records, whole_record
from hf_mlspec.integration.costs import file as profile
from hf_mlspec.integration.costs.learned import Learned
from hf_mlspec.integration.json_object import read_object
from hf_mlspec.integration.levels.head_folder import read_head_folder
from hf_mlspec.integration.levels.words import is_head_folder, parse_level
from hf_mlspec.integration.quantizer.checkpoint import require_own_shards
from hf_mlspec.integration.quantizer.config import MLSpecConfig
from hf_mlspec.routing.router import Router
from hf_mlspec.serving.asked import read_asked
from hf_mlspec.serving.chat import Chat
from hf_mlspec.serving.completions import Completions
from hf_mlspec.serving.errors import ApiError
from hf_mlspec.serving.limits import Limits
from hf_mlspec.speculation.drafters.ngram import NGram, NGramFileError
from hf_mlspec.speculation.traces.file import read_trace

from . import seeds
from .harness import Target

_SMALL = 1 << 16  # entries of a tensor that is read


def _safetensors(path: Path) -> None:
    for tensor in read_header(path)[0]:
        if tensor.dtype is not None and tensor.end > tensor.begin:
            tensor.load()


def _gguf(path: Path) -> None:
    file = open_gguf(path)
    config_of(file)
    parameters(file)
    row_orders(file)


def _pickle(path: Path) -> None:
    held_tensors(read_pickle(path), path)


def _journal(path: Path) -> None:
    with Journal(path, seeds.JOURNAL) as journal:
        for key in journal.items:
            journal[key]


def _prompts(path: Path) -> None:
    list(read_prompts(path))


def _batch_line(path: Path) -> None:
    read_line(1, path.read_bytes(), 0)


def _batch_file(path: Path) -> None:
    for piece in Source(str(path)).pieces(2):
        for number, line in piece.lines:
            read_line(number, line, 0)


def _plan(path: Path) -> None:
    plan = read_toml(path)
    read_tables(System, plan, "system", path)
    read_tables(System, plan, "systems", path)
    for number, one in enumerate(plan.get("data", ()) if isinstance(plan.get("data"), list) else ()):
        read_table(Prompts, one, f"{path}: [[data]] {number}")


def _router(path: Path) -> None:
    Router.load(path, seeds.routed()[1])


def _block(path: Path) -> None:
    kept = FinishedBlocks.__new__(FinishedBlocks)
    kept.folder = path.parent
    kept._file = lambda index: path
    kept.read(0)


def _identity(path: Path) -> None:
    folder = path.parent / "work"
    folder.mkdir(exist_ok=True)
    (folder / "calibration.json").write_bytes(path.read_bytes())
    FinishedBlocks(folder, seeds.IDENTITY)


def _quantization_config(path: Path) -> None:
    found = read_object(path)
    if method_of(found) in READERS:
        if method_of(found) != "gguf":  # which names a file of its own
            reader_for(found)
    else:
        MLSpecConfig(**{name: value for name, value in found.items() if name not in _OF_THIS_MACHINE})


_OF_THIS_MACHINE = ("router", "plane_folder", "plane_budget", "calibration", "tokenizer", "method", "self")


def _index(path: Path) -> None:
    folder = path.parent / "shards"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_bytes(path.read_bytes())
    require_own_shards(folder)


def _head(path: Path) -> None:
    folder = path.parent / "head"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(path.read_bytes())
    if is_head_folder(str(folder)):
        read_head_folder(str(folder))


def _learned(path: Path) -> None:
    Learned(path, seeds.MACHINE, 1).read()


def _records(path: Path) -> None:
    records(path) if path.suffix == ".jsonl" else whole_record(path)


class _Tokenizer:
    """Knows bytes, and refuses what is no text as a fast tokenizer does."""

    chat_template = "x"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, messages: list, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": list(json.dumps(messages).encode())}


_FACTS = SimpleNamespace(vocab_size=256, model_type="llama")


def _request(path: Path) -> None:
    """What the server does with a body before it asks the model."""
    body = read_object(path)
    chat = "messages" in body
    endpoint = (Chat if chat else Completions)(_FACTS, _Tokenizer(), _Tokenizer())
    read_asked(body, Limits(), set(endpoint.fields), samples=True)
    endpoint.prompts(body)


def _word(path: Path) -> None:
    text = path.read_bytes().decode(errors="replace").replace("\0", "")
    bytes_in(text)
    parse_level(text)


TARGETS: tuple[Target, ...] = (
    Target("safetensors", seeds.safetensors(), _safetensors, suffixes=(".safetensors",)),
    Target("gguf", seeds.gguf(), _gguf, suffixes=(".gguf",)),
    Target("pickle", seeds.pickles(), _pickle, suffixes=(".bin",)),
    Target("rotations", seeds.rotations(), read_rotations),
    Target("trace", seeds.traces(), read_trace),
    Target("certificate", seeds.certificates(), Certificate.load, mend=seeds.mended_certificate),
    Target("profile", seeds.profiles(), lambda path: profile.read(path, seeds.MACHINE), (profile.NotAProfile,)),
    Target("learned", seeds.learned(), _learned),
    Target("journal", seeds.journals(), _journal),
    Target("batch line", seeds.batch_lines(), _batch_line, (BadLine,)),
    Target("batch file", seeds.batch_lines(), _batch_file, (BadLine, ValueError)),
    Target("request", seeds.requests(), _request, (ApiError, ValueError)),
    Target("prompts", seeds.prompts(), _prompts, suffixes=(".json", ".jsonl", ".txt", ".json.gz")),
    Target("plan", seeds.plans(), _plan),
    Target("router", seeds.routers(), _router),
    Target("n-gram table", seeds.ngrams(), NGram.load, (NGramFileError,)),
    Target("finished block", seeds.blocks(), _block),
    Target("calibration", seeds.identities(), _identity),
    Target("quantization config", seeds.quantization_configs(), _quantization_config, (ValueError, TypeError)),
    Target("shard index", seeds.indexes(), _index),
    Target("head config", seeds.heads(), _head),
    Target("task records", seeds.prompts(), _records, suffixes=(".jsonl", ".json")),
    Target("word", seeds.words(), _word),
)
