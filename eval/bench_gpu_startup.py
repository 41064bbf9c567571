"""How long before the first token: building the extension, capturing a round, the first call beside the second?"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from eval.bench_gpu_findings import Bench, Finding
from eval.bench_gpu_models import real_model, without_end
from eval.bench_gpu_prompts import folders, padded, texts, tokenizer_of
from eval.bench_gpu_timing import wall_seconds

ROOT = Path(__file__).resolve().parents[1]
BUILD_SECONDS, CAPTURE_SECONDS = 180.0, 2.0


class BuildFailed(Exception):
    """The extension did not build; its text holds the last lines that were said."""


def startup(bench: Bench) -> Iterator[Finding]:
    """Seconds until one token was written, in a first and in a second call of each chain; their difference is what
    capturing, building levels and first use cost together."""
    folder, draft_folder = folders(bench)
    model, draft = (without_end(real_model(path, bench.device)) for path in (folder, draft_folder))
    row = tokenizer_of(folder)(next(iter(texts(bench).values()))[0]).input_ids
    inputs = padded([row], bench.device)
    chains = {"alone": [], "[draft]": [draft], '["mxfp4"]': ["mxfp4"], '["mxfp4", draft]': ["mxfp4", draft]}
    for name, levels in chains.items():
        seconds = [wall_seconds(lambda levels=levels: model.generate(
            **inputs, max_new_tokens=2, do_sample=False, pad_token_id=0, assistant_models=levels), bench.device)
            for _ in range(3)]
        delay = seconds[0] - min(seconds[1:])
        yield Finding("startup", name, "seconds more in the first call", delay, "s",
                      None if bench.quick else CAPTURE_SECONDS, more={"calls": seconds})
        yield Finding("startup", name, "second call, 2 tokens", seconds[1], "s")
    if bench.build:
        yield Finding("startup", "building the extension", "seconds", build_seconds(), "s", BUILD_SECONDS)


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
