"""How fast is a model that several processes share, and do all of them write the same? For torchrun, or one process.

    torchrun --nproc-per-node 2 -m eval.bench_ranks --sums                                # what they add up, by itself
    torchrun --nproc-per-node 2 -m eval.bench_ranks --model FOLDER --level mxfp4 --level DRAFT --prompts FILE
    torchrun --nproc-per-node 2 -m eval.bench_ranks --shape llama-3-8b --trace FILE --level mxfp4 --level tiny-2x512
    python -m eval.bench_ranks --shape llama-3-8b --trace FILE                              # one process, to compare
    python -m eval.bench_ranks --shape llama-3-8b --trace FILE --part 2 --steps 1x1,8x4     # what each of two holds

--model: every chain of the levels (each alone, all together) writes the prompts, and so does the target alone, in
batches of 1 and of --batch. Compared are ids of all processes, of chains and the target alone, of batches. --shape:
random weights; the target alone, a token a pass, and the chain replay a trace in captured rounds of --captured tokens;
--split: once more with nothing added up, which shows what that takes; --part N: in one process, what each of N would
hold; --steps: single steps of the target and of its MXFP4 cast, too. One JSON object a line, from the first process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_mlspec
from eval.gpu_timing import capture, time_each
from eval.plans.options import counts
from eval.rows import padded
from eval.targets import OF_CHAINS, kind_and_config, random_model
from hf_mlspec.engines.choose import built_decoder, engine_of
from hf_mlspec.engines.cuda.ranks import exchange_of
from hf_mlspec.engines.ranks import Ranks
from hf_mlspec.evaluation import read_prompts, read_trace, replay_captured, reschedule

_WIDTHS = 4096  # of what is added up alone, as in the 8B shape
_LAYERS = 32
_CACHED = 256  # tokens behind which single steps are timed


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--sums", action="store_true", help="time what is added up, by boxes and by NCCL")
    parser.add_argument("--model", help="a folder: do all write the same?")
    parser.add_argument("--shape", choices=sorted(OF_CHAINS), help="random BF16 weights: how fast?")
    parser.add_argument("--layers", type=int, help="of the shape, fewer or more than it has")
    parser.add_argument("--part", type=int, default=1, help="of the shape, what each of so many processes holds")
    parser.add_argument("--steps", type=steps, default=[], help="of the shape: rows x tokens of each, 1x1,8x4")
    parser.add_argument("--trace", type=Path, help="what chains of a shape replay")
    parser.add_argument("--level", action="append", default=[], help="a word, a folder or a shape")
    parser.add_argument("--prompts", type=Path, help="of --model")
    parser.add_argument("--count", type=int, help="prompts, or rows of the trace (all)")
    parser.add_argument("--new-tokens", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--captured", type=counts, default=[12, 3], help="tokens that levels draft (12,3)")
    parser.add_argument("--split", action="store_true", help="of a shape, once more with nothing added up")
    parser.add_argument("--batch", type=counts, default=[1, 8], help="(1,8)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if not (args.sums or args.model or args.shape):
        parser.error("nothing to do: --sums, --model or --shape")
    if (args.model and not args.prompts) or (args.shape and not args.trace):
        parser.error("--model takes --prompts, --shape takes --trace")
    if args.part < 1 or (args.part > 1 and "RANK" in os.environ):
        parser.error("--part is 1 or more, and for one process: leave torchrun out")
    return args


def steps(text: str) -> list[tuple[int, int]]:
    """An argparse type: `1x1,8x4` -> rows and tokens of each."""
    found = [tuple(counts(part.replace("x", ","))) for part in text.split(",")]
    if any(len(one) != 2 for one in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of rows and tokens such as 1x1,8x4")
    return found


def begin(args: argparse.Namespace) -> tuple[int, int]:
    """This process's number and how many there are; each on a device of its own."""
    if "RANK" not in os.environ:
        return 0, 1
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    else:
        dist.init_process_group("gloo")
    return rank, size


def say(**line: Any) -> None:
    """One line of results, of the first process."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(line), flush=True)


def shared() -> dict[str, Any]:
    """What from_pretrained is told where there are several processes."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())}


def of_shape(args: argparse.Namespace) -> PreTrainedModel:
    """Random weights of a shape, one tensor for all that have its sizes, so that no process holds the whole."""
    sizes = {} if args.layers is None else {"num_hidden_layers": args.layers}
    sizes |= part_of(args.shape, args.part) if args.part > 1 else {}
    if not shared():
        return random_model(args.shape, args.device, 0, **sizes)
    kind, config = kind_and_config(args.shape, **sizes)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in kind(config).state_dict().items()}
    torch.manual_seed(0)
    made = {shape: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape, device=args.device) * 0.02).bfloat16()
            .cpu() for shape in sorted(set(shapes.values()))}  # fmt: skip
    state = {name: made[shape] for name, shape in shapes.items()}
    return kind.from_pretrained(None, config=config, state_dict=state, dtype=torch.bfloat16, **shared()).eval()


def part_of(shape: str, count: int) -> dict[str, int]:
    """The sizes of what each of `count` processes holds of a dense shape. ValueError where it does not divide them."""
    config = kind_and_config(shape)[1]
    names = "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"
    whole = {name: getattr(config, name) for name in names}
    for name, size in whole.items():
        if size % count:
            raise ValueError(f"{shape} has {name} {size}, which --part {count} does not divide")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {**{name: size // count for name, size in whole.items()}, "head_dim": head_dim}


def sums(args: argparse.Namespace) -> None:
    """Seconds of one sum of so many tokens, by boxes and by NCCL, and whether their bits are the same."""
    device = torch.device("cuda", torch.cuda.current_device())
    plain = Ranks(dist.group.WORLD, device)
    boxed = exchange_of(plain)
    for tokens in (1, 2, 4, 8, 16, 32, 128, 1024, 4096):
        torch.manual_seed(tokens + 100 * plain.index)
        x = torch.randn(tokens, _WIDTHS, device=device, dtype=torch.bfloat16)
        found, expected = boxed.summed(x), plain.summed(x)
        every = plain.parts(found)
        equal = torch.equal(found, expected) and all(torch.equal(part, found) for part in every)
        line = {"kind": "sum", "tokens": tokens, "equal": equal, "by": type(boxed).__name__}
        wide = torch.randn(tokens, 64128, device=device, dtype=torch.bfloat16) if tokens <= 32 else None
        if wide is not None:
            line["gather_equal"] = torch.equal(boxed.side_by_side(wide), plain.side_by_side(wide))
        for name, own in (("boxes", boxed), ("nccl", plain)):
            many = 2 * _LAYERS

            def work(own=own, x=x, many=many) -> None:
                for _ in range(many):
                    own.summed(x)

            line[f"{name}_us"] = round(time_each(capture(work, device), device).microseconds / many, 2)
            if wide is not None:
                gathered = capture(lambda own=own, wide=wide: own.side_by_side(wide), device)
                line[f"{name}_head_us"] = round(time_each(gathered, device).microseconds, 2)
        x32 = x.clone()
        reduced = capture(lambda x32=x32: [dist.all_reduce(x32) for _ in range(16)], device)
        line["nccl_all_reduce_us"] = round(time_each(reduced, device).microseconds / 16, 2)
        say(**line)


@contextmanager
def adding_nothing(model: PreTrainedModel) -> Iterator[None]:
    """Inside, what a step adds up is only its own part: ids are of no use, seconds are those of all else."""
    ranks = engine_of(model).decoder.ranks
    kept = type(ranks).summed
    try:
        type(ranks).summed = lambda _, own: own
        yield
    finally:
        type(ranks).summed = kept


def speeds(args: argparse.Namespace, size: int) -> None:
    """Tokens a second of the target alone and of the chain, and of both with nothing added up."""
    started = time.time()
    model = of_shape(args)
    if args.device == "cpu":
        hf_mlspec.prepare(model, engine="cuda")  # what a GPU replays, there op by op
    say(kind="built", shape=args.shape, layers=model.config.num_hidden_layers, processes=size, part=args.part,
        engine=engine_of(model).name, seconds=round(time.time() - started, 1))
    levels = [random_model(word, args.device, 1 + at) if word in OF_CHAINS else word
              for at, word in enumerate(args.level)]
    whole = read_trace(args.trace)
    trace = whole.of_rows(list(range(min(args.count or len(whole.rows), len(whole.rows)))))
    chained = reschedule(trace, args.captured)
    ways = {"alone": (trace.alone(), []), "chain": (chained, levels)} if levels else {"alone": (trace.alone(), [])}
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    for batch in args.batch:
        rows = list(range(batch))
        for name, (own, below) in ways.items():
            line = {"kind": "speed", "contender": name, "levels": args.level if below else [], "processes": size,
                    "part": args.part, "batch": batch, "device": device}
            line |= _speed(model, own, below, batch, rows)
            if size > 1 and args.split:
                with adding_nothing(model):
                    line["nothing_added_up_ms"] = _speed(model, own, below, batch, rows)["ms_a_pass"]
            say(**line)
    single_steps(args, model, size)


def single_steps(args: argparse.Namespace, model: PreTrainedModel, size: int) -> None:
    """Of the target and of its cast, by rows and tokens of each."""
    models = {"bf16": model, "mxfp4": hf_mlspec.direct_cast(model)} if args.steps else {}
    for rows, tokens in args.steps:
        for word, own in models.items():
            say(kind="step", of=word, part=args.part, processes=size, rows=rows, tokens=tokens,
                ms=step_milliseconds(own, rows, tokens))


def step_milliseconds(model: PreTrainedModel, rows: int, tokens: int) -> float:
    """Of a step of so many rows and tokens of each behind _CACHED others, as one graph."""
    decoder = built_decoder(model, "cuda")
    device, sizes = decoder.device, decoder.sizes
    kv = torch.zeros(decoder.num_layers, 2, rows, sizes.kv_heads, 2 * _CACHED, sizes.head_dim, dtype=decoder.dtype,
                     device=device)  # fmt: skip
    ids = torch.zeros(rows, tokens, dtype=torch.int32, device=device)
    starts, ends = (torch.full((rows,), count, dtype=torch.int32, device=device) for count in (_CACHED, tokens))
    decoder.reserve_positions(2 * _CACHED)
    with torch.inference_mode():
        work = capture(lambda: decoder.forward(ids, starts, ends, kv), device)
        return round(1e3 * time_each(work, device, 10).median, 4)


def _speed(model: PreTrainedModel, trace: Any, levels: list, batch: int, rows: list[int]) -> dict[str, float]:
    replay_captured(model, trace, levels, batch_size=batch, rows=rows, max_new_tokens=16)
    best = min((replay_captured(model, trace, levels, batch_size=batch, rows=rows) for _ in range(2)),
               key=lambda take: take.decode_seconds)
    passes = best.stats.target_passes
    return {"tokens_per_second": round(best.tokens_per_second, 1),
            "ms_a_pass": round(1000 * best.stats.target_seconds / max(passes, 1), 3), "passes": passes}


def alike(args: argparse.Namespace, size: int) -> None:
    """Differences of ids: between processes, between a chain and the target alone, between batches."""
    options = {"dtype": torch.bfloat16, **shared()}
    model = AutoModelForCausalLM.from_pretrained(args.model, **options).eval()
    model = model.to(args.device) if size == 1 else model
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [tokenizer(text).input_ids[-256:] for text in read_prompts(args.prompts, args.count)]
    chains = {"[]": [], **{Path(word).name: [word] for word in args.level}}
    chains |= {"all": args.level} if len(args.level) > 1 else {}
    say(kind="built", model=args.model, processes=size, engine=engine_of(model).name)
    reference = None
    for batch in args.batch:
        for name, levels in chains.items():
            began = time.time()
            found = [row for first in range(0, len(rows), batch)
                     for row in _written(model, rows[first : first + batch], levels, args)]
            every = [found] if size == 1 else Ranks(dist.group.WORLD, model.device).told(found)
            reference = reference or found
            say(kind="alike", chain=name, batch=batch, prompts=len(rows), tokens=sum(map(len, found)),
                ranks_differ=sum(own != every[0] for own in every),
                rows_differ=sum(a != b for a, b in zip(found, reference, strict=True)),
                seconds=round(time.time() - began, 1))


def _written(model: PreTrainedModel, rows: list[list[int]], levels: list, args: argparse.Namespace) -> list[list[int]]:
    inputs = padded(rows, model.device)
    out = model.generate(**inputs, assistant_models=levels, max_new_tokens=args.new_tokens, min_new_tokens=None,
                         do_sample=False, pad_token_id=0, eos_token_id=None)
    return out[:, inputs["input_ids"].shape[1] :].tolist()


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    _, size = begin(args)
    try:
        if args.sums:
            if size == 1 or args.device != "cuda":
                raise ValueError("--sums wants two processes or more, each with a GPU: start it by torchrun")
            sums(args)
        if args.model:
            alike(args, size)
        if args.shape:
            speeds(args, size)
    except (ValueError, OSError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
