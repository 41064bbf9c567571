"""What do quantizing while loading, saving and reloading cost in seconds and memory, and do the bits come back?

    python -m eval.bench_quantize                          # a random-weight model of 1 GB in BF16, shards of 200 MB
    python -m eval.bench_quantize --model FOLDER --repeats 5 --json results.jsonl

Every measurement is a process of its own, imports not counted; seconds are the smallest of the repeats. Peak memory is
what the process held at most beyond what it held before, pages of mapped files included. It is to stay below the
largest shard and the packed model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_mlspec
from eval.records import machine

SHAPE = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 10, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 8192,
}  # fmt: skip
FORMATS = {
    "int4 g128": {"format": "int4"},
    "int4 g128 asymmetric": {"format": "int4", "symmetric": False},
    "mxfp4": {"format": "mxfp4"},
}


def write_model(folder: Path, shard: str) -> None:
    """A Llama of random BF16 weights, 0.99 GB."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder, max_shard_size=shard)
    finally:
        torch.set_default_dtype(before)


def import_model(folder: str) -> None:
    """transformers imports a model's code when it first meets its config."""
    MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.from_pretrained(folder))]


def quantize(source: str, target: str, name: str) -> dict[str, Any]:
    """Seconds and bytes of one quantization while loading, and of the save."""
    import_model(source)
    config = hf_mlspec.MLSpecConfig(**FORMATS[name])
    with machine.PeakMemory() as memory:
        begin = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
        seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    model.save_pretrained(target)
    saved = time.perf_counter() - begin
    torch.save(model.state_dict(), f"{target}.pt")
    peak = None if memory.peak is None else memory.peak - memory.before
    packed = hf_mlspec.resident_bytes(model)
    return {"quantize_seconds": seconds, "save_seconds": saved, "peak": peak, "packed": packed}


def reload(target: str) -> dict[str, Any]:
    """Seconds and bytes of loading the packed model, and whether every tensor is the one that was saved."""
    import_model(target)
    with machine.PeakMemory() as memory:
        begin = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(target)
        seconds = time.perf_counter() - begin
    kept, found = torch.load(f"{target}.pt"), model.state_dict()
    same = kept.keys() == found.keys() and all(torch.equal(kept[name], found[name]) for name in kept)
    peak = None if memory.peak is None else memory.peak - memory.before
    return {"reload_seconds": seconds, "reload_peak": peak, "identical": same}


def in_fresh_process(*step: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "eval.bench_quantize", "--step", *step]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def measure(source: str, name: str, folder: Path, repeats: int) -> dict[str, Any]:
    """Quantize, save and reload ``repeats`` times; the smallest seconds and the largest peaks."""
    target = str(folder / name.replace(" ", "-"))
    takes = [in_fresh_process("quantize", source, target, name) | in_fresh_process("reload", target)
             for _ in range(repeats)]  # fmt: skip
    best = {key: min(take[key] for take in takes) for key in takes[0] if key.endswith("seconds")}
    peaks = {key: max(take[key] or 0 for take in takes) or None for key in ("peak", "reload_peak")}
    shard = max(file.stat().st_size for file in Path(source).glob("*.safetensors"))
    packed = takes[0]["packed"]
    return {"format": name, **best, **peaks, "packed": packed, "bound": shard + packed,
            "identical": all(take["identical"] for take in takes)}  # fmt: skip


def table(found: list[dict[str, Any]]) -> Table:
    out = Table("format", "quantize s", "save s", "reload s", "packed MB", "peak MB", "shard + packed MB",
                "reload peak MB", "bit-identical")  # fmt: skip
    for one in found:
        seconds = [f"{one[f'{name}_seconds']:.2f}" for name in ("quantize", "save", "reload")]
        sizes = ["-" if one[name] is None else f"{one[name] / 1e6:.0f}"
                 for name in ("packed", "peak", "bound", "reload_peak")]  # fmt: skip
        out.add_row(one["format"], *seconds, *sizes, str(one["identical"]))
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_quantize", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder; without it a random model is written")
    parser.add_argument("--format", action="append", choices=sorted(FORMATS), help="default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shard", default="200MB", help="of the random model (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one line per format")
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)  # one measurement in this process
    args = parser.parse_args(argv)
    torch.set_num_threads(2)
    transformers.utils.logging.disable_progress_bar()
    if args.step:
        print(json.dumps({"quantize": quantize, "reload": reload}[args.step[0]](*args.step[1:])))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        source = args.model or f"{scratch}/model"
        if not args.model:
            write_model(Path(source), args.shard)
        found = [measure(source, name, Path(scratch), args.repeats) for name in args.format or FORMATS]
    if args.json:
        lines = (json.dumps({"benchmark": "quantize", **machine.card(), "model": args.model, **one}) for one in found)
        with args.json.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
    Console().print(table(found))
    return 0 if all(one["identical"] for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
