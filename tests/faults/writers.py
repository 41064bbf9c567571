"""What does this project write, how is it read back, and which version of it is there?

Every writer writes version 0, 1, 2 ... of its file into a folder; its reader says which one it finds, None for none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_mlspec.batch.folder import OutputFolder
from hf_mlspec.calibration.finished import FinishedBlocks
from hf_mlspec.calibration.matrices import read_rotations, write_rotations
from hf_mlspec.checkpoints.safetensors_file import read_header
from hf_mlspec.evaluation.certificate import Certificate
from hf_mlspec.evaluation.journal import Journal
from hf_mlspec.integration.costs import file as profile
from hf_mlspec.integration.quantizer.saving import bytes_needed, staging
from hf_mlspec.routing.router import Router
from hf_mlspec.speculation.costs import PassCosts
from hf_mlspec.speculation.drafters.ngram import NGram
from hf_mlspec.speculation.traces.file import read_trace, write_trace
from tests.fuzz import seeds


class Writer(NamedTuple):
    """grows: a version is added to what is there, and `read` says the last one; else it takes the place of it."""

    write: Callable[[Path, int], None]
    read: Callable[[Path], int | None]
    grows: bool = False


@cache
def _trace():
    path = sorted((seeds.ROOT / "eval" / "traces").glob("*.json"))[0]
    trace = read_trace(path)
    return replace(trace, rows=trace.rows[:2])


def _write_trace(folder: Path, version: int) -> None:
    write_trace(replace(_trace(), data=f"version {version}"), folder / "trace.json")


def _read_trace(folder: Path) -> int | None:
    path = folder / "trace.json"
    return int(read_trace(path).data.split()[1]) if path.exists() else None


def _write_profile(folder: Path, version: int) -> None:
    costs = PassCosts((1, 4), (0.1 + version, 0.2 + version), (0.0, 0.0), 0.0)
    profile.write(folder / "profile.json", seeds.MACHINE, {"0": ("tiny", costs)})


def _read_profile(folder: Path) -> int | None:
    try:
        return int(profile.read(folder / "profile.json", seeds.MACHINE)["0"].seconds[0])
    except FileNotFoundError:
        return None


def _write_ngram(folder: Path, version: int) -> None:
    ngram = NGram(order=3)
    ngram.learn([version, 1, 2, 3, version])
    ngram.save(folder / "table")


def _read_ngram(folder: Path) -> int | None:
    path = folder / "table"
    if not path.exists():
        return None
    return next(version for version in range(4, 1 << 20) if NGram.load(path).table.best((3,))[0] == version)


def _write_rotations(folder: Path, version: int) -> None:
    write_rotations(folder / "R.bin", torch.full((2, 2), float(version)))


def _read_rotations(folder: Path) -> int | None:
    path = folder / "R.bin"
    return int(read_rotations(path)[0][0, 0]) if path.exists() else None


def _write_router(folder: Path, version: int) -> None:
    router, _ = seeds.routed()
    router.average = float(version)
    router.save(folder / "router.safetensors")


def _read_router(folder: Path) -> int | None:
    path = folder / "router.safetensors"
    return int(Router.load(path, seeds.routed()[1]).average) if path.exists() else None


def _write_certificate(folder: Path, version: int) -> None:
    document = json.loads(seeds.certificates()[0])
    del document["sha256"]
    Certificate(document | {"created": str(version)}).save(folder / "certificate.json")


def _read_certificate(folder: Path) -> int | None:
    path = folder / "certificate.json"
    return int(Certificate.load(path).to_dict()["created"]) if path.exists() else None


def _write_block(folder: Path, version: int) -> None:
    kept = FinishedBlocks(folder / "work", seeds.IDENTITY)
    kept.write(version, {"q.weight": torch.full((4, 4), version, dtype=torch.uint8)}, [{"layer": "q"}])


def _read_blocks(folder: Path) -> int | None:
    kept = FinishedBlocks(folder / "work", seeds.IDENTITY)
    found = [index for index in range(256) if index in kept]
    for index in found:
        tensors, report = kept.read(index)
        assert report == [{"layer": "q"}]
        assert tensors["q.weight"].unique().tolist() == [index]
    return found[-1] if found else None


def _write_journal(folder: Path, version: int) -> None:
    with Journal(folder / "journal.jsonl", seeds.JOURNAL) as journal:
        if str(version) not in journal:
            journal.add(str(version), "x" * 300)


def _read_journal(folder: Path) -> int | None:
    with Journal(folder / "journal.jsonl", seeds.JOURNAL) as journal:
        assert all(value == "x" * 300 for value in journal.items.values())
        return max(map(int, journal.items), default=None)


def _write_answers(folder: Path, version: int) -> None:
    with OutputFolder(str(folder / "out"), {"input": "lines"}) as out:
        if out.finished(version) is None:
            out.write(version, [{"line": version, "text": "y" * 300}], {"failed": 0, "new_tokens": 1})


def _read_answers(folder: Path) -> int | None:
    with OutputFolder(str(folder / "out"), {"input": "lines"}) as out:
        found = [index for index in range(1 << 12) if out.finished(index) is not None]
        for index in found:
            assert json.loads(out.file(index).read_text()) == {"line": index, "text": "y" * 300}
        return found[-1] if found else None


def _write_model(folder: Path, version: int) -> None:
    """What a save does with the files that transformers writes into the folder that it is given."""
    tensors = {"a.weight": torch.full((64,), float(version)), "b.weight": torch.full((8,), float(version))}
    with staging(folder / "model", bytes_needed(tensors.values())) as staged:
        save_file(tensors, staged / "model.safetensors", metadata={"version": str(version)})
        (staged / "config.json").write_text(json.dumps({"model_type": "tiny"}))


def _read_model(folder: Path) -> int | None:
    path = folder / "model" / "model.safetensors"
    if not path.exists():
        return None
    read_header(path)
    assert json.loads((folder / "model" / "config.json").read_text()) == {"model_type": "tiny"}
    with safe_open(path, "pt") as file:
        version = float(file.metadata()["version"])
        assert {value for name in file.keys() for value in file.get_tensor(name).tolist()} == {version}  # noqa: SIM118
    return int(version)


WRITERS = {
    "trace": Writer(_write_trace, _read_trace), "profile": Writer(_write_profile, _read_profile),
    "n-gram table": Writer(_write_ngram, _read_ngram), "rotations": Writer(_write_rotations, _read_rotations),
    "router": Writer(_write_router, _read_router), "certificate": Writer(_write_certificate, _read_certificate),
    "finished blocks": Writer(_write_block, _read_blocks, grows=True),
    "journal": Writer(_write_journal, _read_journal, grows=True),
    "answers of a batch": Writer(_write_answers, _read_answers, grows=True),
    "model": Writer(_write_model, _read_model),
}  # fmt: skip
FIRST = 4  # n-gram tables know smaller versions as tokens of their own
