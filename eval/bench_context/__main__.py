"""How long does a prompt take, and each token behind it, as contexts grow, beside stock transformers?

    python -m eval.bench_context --shape llama-0.5b --contexts 512 2048 8192 --threads 2
    python -m eval.bench_context --shape llama-1.1b --device cuda
    python -m eval.bench_context --shape llama-1.1b --contexts 2048 8192 --threads 1 --kv-cache int8
    python -m eval.bench_context --shape llama-0.5b --contexts 2048 8192 --threads 1 --attention
    python -m eval.bench_context --quick

A model of random BF16 weights reads a prompt of random ids and writes greedily, by stock `generate` and by ours
without levels, in turns; medians over repeats. The prompt's time ends with the first new token. A step is the time
between the first tokens that come and the last, over the tokens between. It reads every weight but the rows of the
input embedding, and keys and values of the whole context: these bytes a second are given as a share of what a sum
over memory reads in the same minute. Stock runs its default attention (SDPA). With --kv-cache ours runs a second time
in every turn, its keys and values in that format; the last column is the median over turns of its step to that of ours
beside it. On a GPU, where changing the format captures rounds anew, contenders then run one after another. With
--attention nothing is timed but attention of one token on the CPU, over the caches of all layers, one after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel
from transformers.generation import BaseStreamer

import hf_mlspec
from eval.bench_context import attention
from eval.records import machine
from eval.targets import SHAPES, random_model, why_not_prepared

CONTENDERS: dict[str, dict[str, Any]] = {"stock": {}, "ours": {"assistant_models": []}}


class Arrivals(BaseStreamer):
    """When did new tokens come, and how many? The prompt, which comes first, is left out."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt:
            self.seconds.append(time.perf_counter())
            self.tokens.append(value.numel())
        self._prompt = False

    def end(self) -> None:
        pass

    def step_seconds(self) -> float:
        return (self.seconds[-1] - self.seconds[0]) / sum(self.tokens[1:])


def contenders(args: argparse.Namespace) -> dict[str, str | None]:
    """Those of a turn, in order, and the format of keys and values of each."""
    named = {name: None for name in CONTENDERS}
    return named | ({f"ours, {args.kv_cache}": args.kv_cache} if args.kv_cache else {})


@contextmanager
def kept_in(model: PreTrainedModel, word: str | None) -> Iterator[None]:
    """Inside, the model keeps keys and values in the format of the word."""
    if word is None:
        yield
        return
    model.config.quantization_config = hf_mlspec.MLSpecConfig(format=None, kv_cache=word)
    try:
        yield
    finally:
        del model.config.quantization_config


def measure(model: PreTrainedModel, ids: torch.Tensor, tokens: int, how: dict[str, Any]) -> tuple[float, float]:
    """Seconds until the first new token, and of a step; `ids` int64 `[1, context]`."""
    arrivals, begin = Arrivals(), time.perf_counter()
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
                   pad_token_id=0, streamer=arrivals, **how)
    step = arrivals.step_seconds()
    return arrivals.seconds[0] - begin - (arrivals.tokens[0] - 1) * step, step


def step_bytes(model: PreTrainedModel, context: int, share: float = 1.0) -> int:
    """Bytes that a step reads: weights, and keys and values of the context, in a share of the bytes of the dtype."""
    config, table, head = model.config, model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = sum(weight.nbytes for weight in model.parameters()) - (0 if table is head else table.nbytes)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * size * context * table.element_size()
    return weights + int(share * cached)


def turns(names: list[str], args: argparse.Namespace) -> list[tuple[int, str]]:
    """Contenders by turns, the first of which warms up. On a GPU one after another where a model changes its format of
    keys and values: it then captures its rounds anew, which is no part of a prompt's time."""
    repeats = range(args.repeats + 1)
    if args.kv_cache and args.device != "cpu":
        return [(turn, name) for name in names for turn in repeats]
    return [(turn, name) for turn in repeats for name in names]


def bench(model: PreTrainedModel, context: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each contender."""
    ids = torch.randint(0, model.config.vocab_size, (1, context), device=args.device)
    asked = contenders(args)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in asked}
    reads, held = [], {}
    for turn, name in turns(list(asked), args):
        reads += [machine.read_bandwidth(args.device, args.probe_mebibytes, 3)] if name == "stock" else []
        with kept_in(model, asked[name]):
            seconds = measure(model, ids, args.tokens, CONTENDERS.get(name, CONTENDERS["ours"]))
        found[name] += [seconds] if turn else []
        held[name] = hf_mlspec.last_stats(model).target_cache_bytes if name != "stock" else 0
    probe = statistics.median(reads)
    lines = []
    for name, pairs in found.items():
        nbytes = step_bytes(model, context + args.tokens // 2, held[name] / held["ours"] if asked[name] else 1.0)
        prompt, step = (statistics.median(column) for column in zip(*pairs, strict=True))
        lines.append({"contender": name, "shape": args.shape, "context": context, "device": args.device,
                      "prompt_seconds": prompt, "step_seconds": step, "step_bytes": nbytes,
                      "probe_bytes_per_second": probe, "bandwidth_share": nbytes / step / probe, "pairs": pairs})
    for line in lines:
        line["prompt_of_stock"] = line["prompt_seconds"] / lines[0]["prompt_seconds"]
        line["step_of_stock"] = line["step_seconds"] / lines[0]["step_seconds"]
        beside = zip(line["pairs"], lines[1]["pairs"], strict=True)
        line["step_of_ours"] = statistics.median(step / ours for (_, step), (_, ours) in beside)
    return lines


def table(lines: list[dict[str, Any]]) -> Table:
    out = Table("context", "contender", "prompt s", "x stock", "step ms", "x stock", "share of bandwidth", "x ours")
    for line in lines:
        out.add_row(str(line["context"]), line["contender"], f"{line['prompt_seconds']:.3f}",
                    f"{line['prompt_of_stock']:.2f}", f"{1e3 * line['step_seconds']:.2f}",
                    f"{line['step_of_stock']:.2f}", f"{line['bandwidth_share']:.2f}", f"{line['step_of_ours']:.3f}")
    return out


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_context", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-0.5b")
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 512, 2048, 8192], help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=17, help="new tokens of a call (17)")
    parser.add_argument("--repeats", type=int, default=3, help="calls of each contender that count (3)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="threads of the CPU (torch's own choice)")
    parser.add_argument("--kv-cache", metavar="WORD", help="also ours with keys and values in this format: int8, int4")
    parser.add_argument("--attention", action="store_true", help="time attention of one token alone, on the CPU")
    parser.add_argument("--json", type=Path, help="write a line of JSON for each row of the table")
    parser.add_argument("--quick", action="store_true", help="shape tiny, contexts 16 and 64, once")
    args = parser.parse_args(argv)
    args.probe_mebibytes = 16 if args.quick else 128 if args.attention else 512
    if args.quick:
        args.shape, args.contexts, args.repeats = "tiny", [16, 64], 1
    if args.kv_cache is not None:
        try:
            hf_mlspec.MLSpecConfig(format=None, kv_cache=args.kv_cache)
        except ValueError as error:
            parser.error(str(error).removeprefix("MLSpecConfig: "))
    if min(args.contexts) < 1 or args.tokens < 2 or args.repeats < 1:
        parser.error("--contexts and --repeats are at least 1, --tokens at least 2: a step lies between two tokens")
    if args.attention and args.device != "cpu":
        parser.error(f"--attention is timed on the CPU, not on {args.device}: eval.bench_gpu --only attention")
    return args


def bench_attention(args: argparse.Namespace) -> int:
    lines = [attention.bench(args.shape, slots, 5 * args.repeats, args.kv_cache, args.probe_mebibytes << 20)
             for slots in args.contexts]
    print(*map(attention.line, lines), sep="\n")
    if args.json:
        card = machine.card(args.device)
        args.json.write_text("".join(json.dumps(line | {"machine": card}) + "\n" for line in lines), encoding="utf-8")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.attention:
        return bench_attention(args)
    room = {"max_position_embeddings": max(args.contexts) + args.tokens}
    model = random_model(args.shape, args.device, **room)
    if reason := why_not_prepared(model):
        print(f"bench_context: no compiled steps: {reason}", file=sys.stderr)
    lines = []
    for context in args.contexts:
        lines += bench(model, context, args)
        print(f"bench_context: {context} tokens done", file=sys.stderr)
    Console().print(table(lines))
    if args.json:
        card = machine.card(args.device)
        args.json.write_text("".join(json.dumps(line | {"machine": card}) + "\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
