"""Does a model on a GPU write right tokens, or end in one clear error, where a request for its memory is refused?

python -m tests.faults.devices                     every request of every scene, one after the other
python -m tests.faults.devices --scene stream      scenes with this text in their name

Before each run all is given back to the driver, so that levels, caches, growth and captured graphs ask it anew. Behind
each the model has to write what it wrote. Exit status 1 for a finding.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TRIES = 3  # torch asks once more when it has given back what it kept


def library(folder: Path) -> Path:
    """The library that refuses, to be preloaded."""
    made = folder / "device_memory.so"
    source = HERE / "device_memory.cpp"
    subprocess.run(["c++", "-std=c++20", "-O1", "-shared", "-fPIC", "-o", str(made), str(source), "-ldl"], check=True)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.devices", description=__doc__.splitlines()[0])
    parser.add_argument("--scene", metavar="TEXT", default="", help="scenes with this text in their name")
    parser.add_argument("--most", type=int, default=400, help="requests of a scene, spread over all (%(default)s)")
    parser.add_argument("--worker", metavar="LIBRARY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return _work(options, ctypes.CDLL(options.worker))
    with tempfile.TemporaryDirectory() as folder:
        refusing = str(library(Path(folder)))
        environment = {**os.environ, "LD_PRELOAD": refusing, "MLSPEC_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "tests.faults.devices", "--worker", refusing, "--scene", options.scene,
                   "--most", str(options.most)]  # fmt: skip
        return subprocess.run(command, env=environment).returncode


def _work(options: argparse.Namespace, refusing: ctypes.CDLL) -> int:
    from tests.faults.kinds import Finding

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    refusing.refuse_device.argtypes = [ctypes.c_long, ctypes.c_long]
    refusing.device_requests.restype = ctypes.c_long
    total, found = Counter(), 0
    for name, make in _scenes().items():
        if options.scene not in name:
            continue
        scene, words = make(), Counter()
        refusing.refuse_device(-1, 0)
        scene.act()
        count = refusing.device_requests()
        step = max(count / options.most, 1.0)
        for at in sorted({int(number * step) for number in range(min(count, options.most))}):
            try:
                words[_refuse(scene, refusing, at)] += 1
            except Finding as error:
                found += 1
                print(f"FINDING: {name}, request {at} of {count}: {error}", flush=True)
        print(f"{name}: {count} requests; {dict(words)}", flush=True)
        total.update(words)
    print(f"{sum(total.values())} refused requests: {dict(total)}; {found} findings")
    return int(found > 0)


def _refuse(scene: Any, refusing: ctypes.CDLL, at: int) -> str:
    from tests.faults.kinds import Finding, _judged, _tried

    refusing.refuse_device(at, TRIES)
    try:
        written, error = _tried(scene.act)
        came = refusing.device_requests() > at
    finally:
        refusing.refuse_device(-1, 0)
    word = _judged(scene, written, error, lambda one: "out of memory" in str(one).lower())
    if spoiled := scene.spoiled():
        raise Finding(f"{word}; {spoiled}")
    return word if came else "never"


def _scenes() -> dict[str, Callable[[], Any]]:
    import torch

    import hf_mlspec
    from tests.faults.scenes import PAIR, Scene, generated, streamed
    from tests.models import near, prompts, tiny

    shape = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "dtype": torch.bfloat16, "seed": 2}
    pair = {name: tensor.cuda() for name, tensor in PAIR.items()}

    def row(length: int, seed: int) -> list[int]:
        return prompts([length], seed)["input_ids"][0].tolist()

    short = [row(40, 1), row(5, 2), row(40, 1)[:34] + row(4, 3), row(9, 4)]
    growing = [row(8, 1), row(9, 2), row(600, 3)]

    def made(kind: str, levels: Callable[[Any], list], write: Callable[..., list], **options: Any) -> Scene:
        target = tiny(kind, **shape, max_position_embeddings=2048).cuda()
        below = levels(target)

        def act() -> list:
            for model in (target, *(one for one in below if not isinstance(one, str))):
                hf_mlspec.clear(model)
                hf_mlspec.restore(model)
            gc.collect()
            torch.cuda.empty_cache()
            return write(target, below, **options)

        def alone() -> list:  # by the same steps: those of stock modules part from them near ties
            hf_mlspec.prepare(target)
            return write(target, [], **options)

        return Scene([target], act, alone)

    def two(target: Any) -> list:
        return ["mxfp4", near(tiny(**shape, max_position_embeddings=2048), 0.02).cuda()]

    def cast(_: Any) -> list:
        return ["mxfp4"]

    call = partial(generated, inputs=pair)
    sampled = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    return {
        "captured chain": lambda: made("llama", two, call, max_new_tokens=40),
        "sampled chain": lambda: made("llama", cast, call, max_new_tokens=30, **sampled),
        "lookups": lambda: made("qwen3", lambda _: ["mxfp4", "prompt_lookup"], call, max_new_tokens=30),
        "mixture": lambda: made("mixtral", cast, call, max_new_tokens=20),
        "stream": lambda: made("llama", two, partial(streamed, rows=short), prefill_chunk=16, prefix_cache="1MiB"),
        "cache grows": lambda: made("llama", cast, partial(streamed, rows=growing)),
    }


if __name__ == "__main__":
    sys.exit(main())
