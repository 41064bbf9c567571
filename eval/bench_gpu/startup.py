"""How long before the first token: building the extension, capturing a round, the first call beside the second?"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import hf_mlspec
from eval.bench_gpu.findings import Bench, Finding
from eval.bench_gpu.models import random_model, real_model, without_end
from eval.bench_gpu.prompts import folders, texts, tokenizer_of
from eval.gpu_timing import wall_seconds
from eval.rows import padded

ROOT = Path(__file__).resolve().parents[2]
BUILD_SECONDS, CAPTURE_SECONDS = 180.0, 2.0


class BuildFailed(Exception):
    """The extension did not build; its text holds the last lines that were said."""


def startup(bench: Bench) -> Iterator[Finding]:
    """Seconds until two tokens were written, in a first and in later calls of each chain, on the real pair and on the
    8B shape, and the seconds of the first that went into capturing; the rest of the difference is what building
    decoders and levels and the first use of kernels cost."""
    folder, draft_folder = folders(bench)
    model, draft = (without_end(real_model(path, bench.device)) for path in (folder, draft_folder))
    row = tokenizer_of(folder)(next(iter(texts(bench).values()))[0]).input_ids
    chains = {"alone": [], "[draft]": [draft], '["mxfp4"]': ["mxfp4"], '["mxfp4", draft]': ["mxfp4", draft]}
    yield from _of_model(bench, folder.name, model, row, chains)
    del model, draft, chains
    bench.free()
    shape = "tiny" if bench.quick else "llama-3-8b"
    yield from _of_model(bench, f"{shape}, random", random_model(shape, bench.device), list(range(1, 65)),
                         {"alone": [], '["mxfp4"]': ["mxfp4"]})
    if bench.build:
        yield Finding("startup", "building the extension", "seconds", build_seconds(), "s", BUILD_SECONDS)


def _of_model(
    bench: Bench, name: str, model: PreTrainedModel, row: list[int], chains: dict[str, list[Any]]
) -> Iterator[Finding]:
    inputs = padded([row], bench.device)
    for chain, levels in chains.items():
        def call(levels: list[Any] = levels) -> None:
            model.generate(**inputs, max_new_tokens=2, do_sample=False, pad_token_id=0, assistant_models=levels)

        first, what = wall_seconds(call, bench.device), f"{name}: {chain}"
        captured = hf_mlspec.last_stats(model).capture_seconds
        later = [wall_seconds(call, bench.device) for _ in range(2)]
        yield Finding("startup", what, "capturing", captured, "s", None if bench.quick else CAPTURE_SECONDS)
        yield Finding("startup", what, "first call", first, "s", more={"later": later})
        yield Finding("startup", what, "later call", min(later), "s")


def build_seconds() -> float:
    """Of `setup.py build_ext` into an empty folder; BuildFailed with what it said last."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--build-lib", folder, "--build-temp", f"{folder}/objects"],
            cwd=ROOT, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - begin
    if done.returncode:
        raise BuildFailed(" / ".join((done.stdout + done.stderr).splitlines()[-4:]))
    return seconds
