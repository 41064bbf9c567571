"""Which readers are fuzzed? All that read what others wrote: files, lines, bodies of requests and words."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from eval.plans.systems import Prompts, System
from eval.plans.tables import read_table, read_tables, read_toml
from eval.records.writer import ResultsError, read_results
from eval.report import lines as report_lines
from hf_mlspec.batch.lines import BadLine, read_line
from hf_mlspec.batch.source import Source
from hf_mlspec.calibration.finished import FinishedBlocks
from hf_mlspec.calibration.matrices import read_rotations
from hf_mlspec.checkpoints.atom import read_orders, sort_state
from hf_mlspec.checkpoints.gguf import KEY, GgufReader, dense, stored_layer
from hf_mlspec.checkpoints.gguf_file import open_gguf
from hf_mlspec.checkpoints.gguf_names import config_of, parameters
from hf_mlspec.checkpoints.layer import HeldTensor, StoredLayer
from hf_mlspec.checkpoints.pickles import held_tensors, pickled_tensors, read_pickle
from hf_mlspec.checkpoints.readers import is_readable, method_of, reader_for
from hf_mlspec.checkpoints.safetensors_file import checksums, mapped, read_header, require_checksums
from hf_mlspec.engines.memory import bytes_in
from hf_mlspec.evaluation.certificate import Certificate
from hf_mlspec.evaluation.journal import Journal
from hf_mlspec.evaluation.prompts import read_prompts
from hf_mlspec.evaluation.sandbox_process import ConfinedProcess
from hf_mlspec.evaluation.tasks.files import records, whole_record
from hf_mlspec.formats import FORMATS
from hf_mlspec.integration.costs import file as profile
from hf_mlspec.integration.costs import known_file
from hf_mlspec.integration.costs.learned import Learned
from hf_mlspec.integration.dtype import dtype_named
from hf_mlspec.integration.json_object import read_object
from hf_mlspec.integration.levels.head_folder import read_head_folder, read_tensors, targets_of
from hf_mlspec.integration.levels.words import is_head_folder, parse_level
from hf_mlspec.integration.quantizer import calibration_text
from hf_mlspec.integration.quantizer.checkpoint import Checkpoint, require_own_shards
from hf_mlspec.integration.quantizer.config import MLSpecConfig
from hf_mlspec.integration.quantizer.folder import require_wide
from hf_mlspec.integration.quantizer.research import require_no_research
from hf_mlspec.integration.quantizer.source_config import _require_quantization
from hf_mlspec.routing.router import Router
from hf_mlspec.serving.asked import read_asked
from hf_mlspec.serving.chat import Chat
from hf_mlspec.serving.completions import Completions
from hf_mlspec.serving.errors import ApiError
from hf_mlspec.serving.limits import Limits
from hf_mlspec.serving.server import read_keys
from hf_mlspec.speculation.drafters.ngram import NGram, NGramFileError
from hf_mlspec.speculation.traces.file import read_trace

from . import bodies, gguf_seeds, layers, operands, own_weights, research, seeds
from .harness import Target, Wrong
from .mutate import changed_header, changed_toml, changed_zip, parsed
from .own_weights import weights


def _safetensors(path: Path) -> None:
    for tensor in read_header(path)[0]:
        if tensor.dtype is not None and tensor.end > tensor.begin:
            tensor.load()


def _gguf(path: Path) -> None:
    """A file whose header is good: its matrices, packed and dense, and the model that it says it holds."""
    file = open_gguf(path)
    reader = GgufReader(file=file)
    for tensor in file.tensors.values():
        if len(tensor.values_shape) == 2 and reader.holds(layer := stored_layer("up_proj", tensor)):
            plan = reader.plan(layer)
            found, expected = plan.read({KEY: tensor.load()}).weight, dense(tensor)
            found = found if isinstance(found, torch.Tensor) else found.dequantize(torch.float32)
            if not torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)):
                raise Wrong(f"{tensor.ggml_type} packed has other values than its blocks")
        elif tensor.dtype is not None:
            dense(tensor, torch.float32)
        with mapped(path) as contents:
            tensor.read(contents, slice(0, 1))
    config_of(file)
    parameters(file)
    reader_for({"quant_method": "gguf", "file": str(path)})


def _pickle(path: Path) -> None:
    held_tensors(read_pickle(path), path)
    for tensor in pickled_tensors(path):
        if (held := tensor.load()).shape != tensor.shape or held.dtype != tensor.dtype or tensor.end != held.nbytes:
            raise Wrong(f"{tensor.place} is another tensor than it says")


def _journal(path: Path) -> None:
    with Journal(path, seeds.JOURNAL) as journal:
        for key in journal.items:
            journal[key]


def _prompts(path: Path) -> None:
    list(read_prompts(path))
    if path.suffix == ".json":
        list(read_prompts(_folder(path, "prompts", "1.json")))


def _batch_line(data: bytes) -> None:
    read_line(1, data, 0)


def _batch_file(path: Path) -> None:
    if path.stat().st_size % 32 == 0:
        path.unlink()  # one that went
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
    Router.load(path, seeds.routed()[1], (2, 3, 4, 6, 8) if path.stat().st_size % 2 else None)


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


def _quantization_config(data: bytes) -> None:
    told = parsed(data)
    if told is None or not isinstance(found := told[0], dict):
        return
    if is_readable(found) or found.get("quant_method") == "another":
        if method_of(found) != "gguf":  # which names a file of its own
            reader_for(found).holds(_EMPTY)
    else:
        MLSpecConfig(**{name: value for name, value in found.items() if name not in _OF_THIS_MACHINE})


_EMPTY = StoredLayer("up_proj", 1, 1, {})
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
    for record in records(path) if path.suffix == ".jsonl" else [whole_record(path)]:
        record.check(prompt=str)


def _saved_weight(path: Path) -> None:
    """A weight in a file with checksums: what is taken is what was saved, unless nothing says what that was."""
    found = Checkpoint.read([path])
    if found.tensors and path.stat().st_size % 8 == 0:
        Checkpoint.read([path, _folder(path, "again", "again.safetensors") / "again.safetensors"])
    sums = found.checksums[path]
    if str(path) not in found.place:
        raise Wrong("another place than its file's")
    require_checksums(path, found.of(path), sums)
    for word, weight in weights().items():
        names = [f"{word}.weight_{name}" for name in FORMATS[word].parts]
        whole = [name for name, part in zip(names, weight.parts, strict=True) if part is not None]
        if not all(name in found.tensors and found.tensors[name].dtype is not None for name in whole):
            continue
        parts = [found.tensors[name].load() if name in whole else None for name in names]
        made = FORMATS[word].weight(*parts, name=word).validate(8, 256)
        if all(sums.get(name) == _SUMS[word].get(name) for name in whole):
            for own, other in zip(parts, weight.parts, strict=True):
                if own is not None and not torch.equal(own.view(torch.uint8), other.contiguous().view(torch.uint8)):
                    raise Wrong(f"another {word} weight than was saved")
        made.dequantize()


_SUMS = {word: checksums({f"{word}.weight_{name}": part
                          for name, part in zip(FORMATS[word].parts, weight.parts, strict=True) if part is not None})
         for word, weight in weights().items()}  # fmt: skip


def _model_config(path: Path) -> None:
    """What is looked at in a config.json before transformers reads it."""
    found = read_object(path)
    _require_quantization(found.get("quantization_config"), str(path))
    for word in ("dtype", "torch_dtype"):
        dtype_named(found.get(word), f"{path}: {word}")
    method_of(found.get("quantization_config"))
    folder = _folder(path, "model", "config.json")
    require_no_research(folder)
    require_wide(str(folder))


def _folder(path: Path, name: str, file: str) -> Path:
    """A folder with the input as one of its files."""
    folder = path.parent / name
    folder.mkdir(exist_ok=True)
    (folder / file).write_bytes(path.read_bytes())
    return folder


def _head_tensors(path: Path) -> None:
    folder = str(_folder(path, "tensors", "model.safetensors"))
    targets_of(folder, read_tensors(folder), 4, 12)


def _known_chain(path: Path) -> None:
    """What `read_description` does with a file of this machine; what it catches there, a damaged file may raise."""
    try:
        found = read_object(path)
        if found["mlspec_known"] == 1 and not profile.differences(found["machine"], seeds.MACHINE):
            known_file._says_all(found["chain"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass


def _report(data: bytes) -> None:
    """No process passes that does not say its token."""
    process = ConfinedProcess.__new__(ConfinedProcess)
    process.token, process.said, process.process = b"RT", data, SimpleNamespace(returncode=1)
    kind, detail = process._verdict()
    if not isinstance(kind, str) or not isinstance(detail, str) or (kind == "passed") != (data == b"RT"):
        raise Wrong(f"a verdict of {kind!r}")


def _orders(path: Path) -> None:
    """Atom's orders, and the linears of a state dict in them, of which a third has one fewer."""
    orders = read_orders(path, seeds.ATOM_CONFIG)
    names = ["model.norm.weight", *(f"model.layers.0.{name}.weight" for name in seeds.ATOM_LINEARS)]
    names = names[: len(names) - (path.stat().st_size % 3 == 0)]
    sort_state({name: HeldTensor(name, torch.ones(1)) for name in names}, orders, seeds.ATOM_CONFIG)


def _report_lines(path: Path) -> None:
    report_lines.read([path])


def _request(data: bytes) -> None:
    """What the server does with a body before it asks the model."""
    if (found := parsed(data)) is None or not isinstance(found[0], dict):
        return
    body = found[0]
    chat = "messages" in body
    tokenizer = _Tokenizer() if len(data) % 16 else object()  # one without a chat template
    endpoint = (Chat if chat else Completions)(_FACTS, tokenizer if chat else _Tokenizer(), _Tokenizer())
    read_asked(body, Limits(), set(endpoint.fields), samples=True)
    endpoint.prompts(body)


class _Tokenizer:
    """Knows bytes, and refuses what is no text as a fast tokenizer does."""

    chat_template = "x"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, messages: list, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": list(json.dumps(messages).encode())}


_FACTS = SimpleNamespace(vocab_size=256, model_type="llama")


def _word(data: bytes) -> None:
    text = data.decode(errors="replace").replace("\0", "")
    bytes_in(text)
    parse_level(text)


TARGETS: tuple[Target, ...] = (
    Target("safetensors", seeds.safetensors(), _safetensors, suffixes=(".safetensors",), change=changed_header),
    Target("saved weight", seeds.saved_weights(), _saved_weight, layers.ERRORS, (".safetensors",), changed_header),
    Target("gguf", gguf_seeds.gguf(), _gguf, suffixes=(".gguf",), change=gguf_seeds.changed_gguf),
    Target("pickle", seeds.pickles(), _pickle, change=changed_zip),
    Target("atom orders", seeds.orders(), _orders, change=changed_zip),
    Target("rotations", seeds.rotations(), read_rotations, change=changed_zip),
    Target("trace", seeds.traces(), read_trace),
    Target("certificate", seeds.certificates(), Certificate.load, mend=seeds.mended_certificate),
    Target("profile", seeds.profiles(), lambda path: profile.read(path, seeds.MACHINE), (profile.NotAProfile,)),
    Target("learned", seeds.learned(), _learned),
    Target("known chain", seeds.known_chains(), _known_chain),
    Target("journal", seeds.journals(), _journal),
    Target("results", seeds.results(), read_results, (ResultsError,)),
    Target("report lines", seeds.results(), _report_lines, (report_lines.ReportError,)),
    Target("batch line", seeds.batch_lines(), _batch_line, (BadLine,), suffixes=()),
    Target("batch file", seeds.batch_lines(), _batch_file, (BadLine, ValueError)),
    Target("batch table", seeds.tables(), lambda path: Source(str(path)), suffixes=(".parquet",)),
    Target("request", seeds.requests(), _request, (ApiError, ValueError), suffixes=()),
    Target("http body", seeds.requests(), bodies.post, suffixes=()),
    Target("prompts", seeds.prompts(), _prompts, suffixes=(".json", ".jsonl", ".txt", ".json.gz")),
    Target("calibration text", seeds.texts(), lambda path: calibration_text._read(path, "text")),
    Target("server keys", seeds.texts(), lambda path: read_keys(str(path))),
    Target("plan", seeds.plans(), _plan, change=changed_toml),
    Target("router", seeds.routers(), _router, change=changed_header),
    Target("n-gram table", seeds.ngrams(), NGram.load, (NGramFileError,), change=changed_header),
    Target("finished block", seeds.blocks(), _block, change=changed_header),
    Target("calibration", seeds.identities(), _identity),
    Target("quantization config", seeds.quantization_configs(), _quantization_config, layers.ERRORS, suffixes=()),
    Target("model config", seeds.model_configs(), _model_config),
    Target("shard index", seeds.indexes(), _index),
    Target("head config", seeds.heads(), _head),
    Target("head tensors", seeds.head_tensors(), _head_tensors, change=changed_header),
    Target("task records", seeds.task_records(), _records, suffixes=(".jsonl", ".json")),
    Target("program report", seeds.reports(), _report, suffixes=()),
    Target("word", seeds.words(), _word, suffixes=()),
    *layers.targets(),
    *research.targets(),
    own_weights.TARGET,
    *operands.targets(),
)
