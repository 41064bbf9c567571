"""How long is a step of a mixture in gpt-oss's form on a CPU, here and in llama.cpp, in turns, of the same shape?

    python -m eval.bench_llama_cpp --llama FOLDER/llama_steps --threads 2 --work /dev/shm
    python -m eval.bench_llama_cpp --quick                                      # a toy, without llama.cpp

Both have random codes: experts in MXFP4, all other matrices in BF16, at 16 activation bits here, and at 8 (llama.cpp
takes 8 for MXFP4, 16 for BF16). --llama is eval/peers/llama_steps.cpp, built against a llama.cpp of your own:

    cmake -S LLAMA -B BUILD -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON && cmake --build BUILD --target llama
    g++ -O2 -std=c++17 -ILLAMA/include -ILLAMA/ggml/include eval/peers/llama_steps.cpp -o llama_steps \\
        -LBUILD/bin -lllama -lggml -lggml-base -Wl,-rpath,BUILD/bin

--work takes the GGUF file (12.9 GB of gpt-oss-20b), which goes when the program ends. Printed are medians of the steps
behind the prompt, what of memory's speed the active bytes reach, and lines of JSON in between.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import hf_mlspec
from eval.bench_llama_cpp.gguf_shape import write
from eval.bench_llama_cpp.ours import active_bytes, made, steps_of
from eval.records.machine import read_bandwidth
from eval.targets import GPT_OSS


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_llama_cpp", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(GPT_OSS), default="gpt-oss-20b", help="(%(default)s)")
    parser.add_argument("--layers", type=int, help="so many of its layers are made (all)")
    parser.add_argument("--llama", type=Path, help="the program llama_steps; without it only ours is measured")
    parser.add_argument("--threads", type=int, nargs="+", default=[2], help="of each measurement (2)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens (%(default)s)")
    parser.add_argument("--steps", type=int, default=24, help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="turns (%(default)s)")
    parser.add_argument("--work", type=Path, help="folder of the GGUF file (the system's temporary one)")
    parser.add_argument("--quick", action="store_true", help="gpt-oss-tiny, a few steps")
    args = parser.parse_args(argv)
    if args.quick:
        args.shape, args.steps, args.repeats = "gpt-oss-tiny", 3, 1
    if min([*args.threads, args.prompt, args.steps, args.repeats, args.layers or 1]) < 1:
        parser.error("--threads, --prompt, --steps, --repeats and --layers are at least 1")
    if args.llama is not None and not args.llama.is_file():
        parser.error(f"--llama {args.llama} is no file: build eval/peers/llama_steps.cpp, as this program's text says")
    if args.work is not None and not args.work.is_dir():
        parser.error(f"--work {args.work} is no folder")
    return args


def run(args: argparse.Namespace) -> int:
    """Print what is found; 0, or 1 where llama.cpp fails."""
    model = made(args.shape, args.layers)
    nbytes = active_bytes(model)
    _say(what="shape", shape=args.shape, layers=model.config.num_hidden_layers, active_bytes=nbytes,
         bytes=hf_mlspec.resident_bytes(model))
    begun = time.perf_counter()
    steps_of(model, 4, 1)  # by all threads: weights move into tiles
    _say(what="tiles", seconds=time.perf_counter() - begun)
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        file = Path(folder) / "shape.gguf"
        if args.llama is not None:
            _say(what="file", bytes=write(model.config, file))
        switch = hf_mlspec.precision_switch(model)
        for threads in args.threads:
            torch.set_num_threads(threads)
            read = read_bandwidth()
            _say(what="memory", threads=threads, bytes_per_second=read)
            for turn in range(args.repeats):
                for bits in (16, 8):
                    switch.bits = switch.bits_of("mxfp4" if bits == 16 else "mxfp4a8")
                    prompt, steps = steps_of(model, args.prompt, args.steps)
                    _found(f"ours, {bits} activation bits", threads, turn, prompt, steps, nbytes, read)
                if args.llama is not None and not _llama(args, file, threads, turn, nbytes, read):
                    return 1
    return 0


def _llama(args: argparse.Namespace, file: Path, threads: int, turn: int, nbytes: int, read: float) -> bool:
    command = [str(args.llama), str(file), str(threads), str(args.prompt), str(args.steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"error: {args.llama}: exit status {done.returncode}: {done.stderr[-500:]}", file=sys.stderr)
        return False
    found = json.loads(done.stdout)
    _found("llama.cpp", threads, turn, found["prompt"], found["steps"], nbytes, read, system=found["system"])
    return True


def _found(name: str, threads: int, turn: int, prompt: float, steps: list[float], nbytes: int, read: float,
           **more: str) -> None:
    step = statistics.median(steps)
    _say(what="step", contender=name, threads=threads, turn=turn, ms=step * 1e3, least_ms=min(steps) * 1e3,
         prompt_ms=prompt * 1e3, share=nbytes / step / read, **more)


def _say(**found: object) -> None:
    print(json.dumps(found), flush=True)


def main(argv: list[str] | None = None) -> int:
    return run(parse(argv))


if __name__ == "__main__":
    sys.exit(main())
