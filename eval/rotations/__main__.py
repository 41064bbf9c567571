"""What does a rotation, or an order with outliers, change: perplexity with int4 weights and activations, accepted
drafts, and time of a step?

    python -m eval.rotations --model FOLDER --text FILE --humaneval FILE --calibration FILE

Of a model as it is and of the same model rotated (QuaRot's rotations), both with int4 weights in groups, rounded to
the nearest and, with a text to calibrate on, by GPTQ, or of one by each of the methods that are named, its head left
as it is: perplexity of the text's first windows and of HumanEval's solutions behind their prompts, at w4a16 and w4a4;
how many tokens of "w4a4" drafts of three the model at w4a16 accepts; and seconds a step of each at w4a16 and w4a4,
greedy, measured in turns on one thread, of which the least counts. Steps of "atom" over those of "rtn" are what
outliers cost: --methods rtn atom --windows 1 --solutions 1 --prompts 1.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mlspec
from eval.peers.llmcompressor_gptq import llmcompressor_gptq, require_llmcompressor
from eval.rotations.texts import drawn_rows, prompts_by_source
from eval.scored import GREEDY, WINDOW, continued, perplexity, solutions_of, tasks_of, windows_of
from hf_mlspec.calibration.clip import at_clip
from hf_mlspec.calibration.rotation import rotate

PEER = "gptq of llm-compressor"
PRECISIONS = ("w4a16", "w4a4")
DRAFT = 3  # tokens


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.rotations", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a model and its tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="file of plain text")
    parser.add_argument("--humaneval", type=Path, required=True, help="HumanEval.jsonl")
    parser.add_argument("--windows", type=int, default=64, help=f"of {WINDOW} tokens of the text (%(default)s)")
    parser.add_argument("--solutions", type=int, default=164, help="of HumanEval that are scored (%(default)s)")
    parser.add_argument("--prompts", type=int, default=32, help="of HumanEval that are continued (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each continuation (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of the times, 0: none (%(default)s)")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0, help="of the rotation's signs, and of the samples")
    parser.add_argument("--calibration", type=Path, nargs="+", metavar="FILE",
                        help="texts for GPTQ, alike many samples of each; of lines of JSON their questions and "
                        "answers (default: rounding to nearest only)")
    parser.add_argument("--samples", type=int, default=32, help=f"of {WINDOW} tokens of these texts (%(default)s)")
    parser.add_argument("--learned", type=Path, metavar="R.bin",
                        help="file of a residual rotation, for one more line; where there is none, it is learned")
    parser.add_argument("--peer", action="store_true", help="one more line: llm-compressor's GPTQ on the same samples")
    parser.add_argument("--methods", nargs="+", help="of quantize (default: rtn, quarot, and with a text their gptq)")
    parser.add_argument("--packed", nargs="+", type=Path, default=[], metavar="FOLDER",
                        help="of mlspec quantize, a line each, beside the methods that are named")
    parser.add_argument("--kv-caches", nargs="+", default=["none"], choices=["none", "int8", "int4"], metavar="WORD",
                        help="formats of keys and values, a line of every model with it each (default: none)")
    parser.add_argument("--dampings", nargs="+", type=float, metavar="X",
                        help="of GPTQ, a line of every method with it each (default: one, quantize's own)")
    parser.add_argument("--clips", nargs="+", metavar="CLIP",
                        help='of 4-bit activations, a line each, "auto" among them (default: one, the method\'s own)')
    parser.add_argument("--gsm8k", type=Path, help="GSM8K's test.jsonl: as many prompts of it are continued, too")
    parser.add_argument("--threads", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--device", default="cpu", help="of models, calibration and measurements (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, help="of the prompts that are continued (%(default)s)")
    parser.add_argument("--json", type=Path, help="file for the results, too")
    args = parser.parse_args(argv)
    if args.packed and "auto" in (args.clips or ()):
        parser.error('--clips auto is searched on the samples of methods, --packed has none: name a number')
    return args


def learn(args: argparse.Namespace, tokenizer) -> None:
    """Write the file of a rotation, unless it is there."""
    if args.learned.exists():
        return
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    began = time.perf_counter()
    hf_mlspec.learn_rotation(model, args.learned, calibration=drawn_rows(args, tokenizer), tokenizer=tokenizer,
                             samples=args.samples, tokens=WINDOW, seed=args.seed, group_size=args.group_size)
    print(f"learned a rotation in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


def peer_model(args: argparse.Namespace, rows: list[list[int]]) -> nn.Module:
    """What llm-compressor wrote, read by us."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        llmcompressor_gptq(args.model, rows, args.group_size, Path(folder))
        print(f"{PEER}: {time.perf_counter() - began:.0f} s, loaded and saved, too", file=sys.stderr, flush=True)
        return hf_mlspec.prepare(hf_mlspec.load(folder, dtype=torch.bfloat16).eval())


def int4_model(args: argparse.Namespace, name: str, calibration: object, tokenizer) -> nn.Module:
    """Loaded, its linears but the head packed. name: of a method, with ", learned" behind it where its rotation is,
    ", damping X", or ", down alone": rotated, at run time in front of down_proj alone, before the rest of the word."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(args.device).eval()
    method, _, given = name.partition(", ")
    options = {"samples": args.samples, "tokens": WINDOW, "seed": args.seed, "group_size": args.group_size}
    if given.startswith("damping "):
        options["damping"] = float(given.removeprefix("damping "))
    if given == "down alone":
        rotate(model, seed=args.seed, online="down")
        method = method.removeprefix("quarot").removeprefix("+") or "rtn"
    found = hf_mlspec.quantize(model, method, calibration=calibration, tokenizer=tokenizer, **options,
                               rotations=args.learned if given == "learned" else None,
                               activation_clip="auto" if "auto" in (args.clips or ()) else None)  # fmt: skip
    print(f"{name}: {found.seconds:.0f} s, {(found.peak_bytes or 0) / 2**20:.0f} MiB at the peak so far",
          file=sys.stderr, flush=True)  # fmt: skip
    return model


def saved_model(args: argparse.Namespace, folder: Path) -> nn.Module:
    """What mlspec quantize wrote."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(args.device).eval()


def methods_of(args: argparse.Namespace) -> tuple[str, ...]:
    """Those that are named, else all that the text allows, unless folders are named."""
    if args.methods or args.packed:
        return tuple(args.methods or ())
    return ("rtn", "quarot") if args.calibration is None else ("rtn", "gptq", "quarot", "quarot+gptq")


def damped(methods: tuple[str, ...], dampings: list[float] | None) -> tuple[str, ...]:
    """The names of methods, those with GPTQ once for each damping."""
    if not dampings:
        return methods
    each = [[f"{method}, damping {own:g}" for own in dampings] if "gptq" in method else [method] for method in methods]
    return tuple(name for names in each for name in names)


def varied(args: argparse.Namespace, made: list[nn.Module], methods: tuple[str, ...]) -> tuple[list, tuple]:
    """Every model at every clip, over every cache, prepared, and what it is called. With 16 activation bits codes do
    not hang on the clip, and those that were chosen over keys and values as computed are read over each cache."""
    models, names = [], []
    for name, model in zip(methods, made, strict=True):
        for clip, cache in itertools.product(args.clips or (None,), args.kv_caches):
            own = model if (clip, cache) == (None, "none") else copy.deepcopy(model)
            if clip is not None:
                at_clip(own, own_clip(model) if clip == "auto" else float(clip))
            if cache != "none":
                own.config.quantization_config.kv_cache = cache
            models.append(own)
            names.append(name + (f", clip {clip}" if clip else "") + (f", {cache} cache" if cache != "none" else ""))
    return [hf_mlspec.prepare(model) for model in models], tuple(names)


def own_clip(model: nn.Module) -> float:
    """What the search found."""
    found = model.config.quantization_config.calibration["clip_search"]
    print(f"searched: {found}", file=sys.stderr, flush=True)
    return hf_mlspec.precision_switch(model).activation_clip


def acceptance(model: nn.Module, batches: list[dict[str, torch.Tensor]], tokens: int) -> dict[str, float]:
    """Of "w4a4" drafts."""
    _, shares = continued(model, batches, "w4a4", DRAFT, tokens)
    return {"w4a4 accepted / drafted": shares["accepted / drafted"], "accepted / tested": shares["accepted / tested"]}


def step_seconds(
    models: list[nn.Module], inputs: dict[str, torch.Tensor], tokens: int, repeats: int
) -> list[dict[str, float]]:
    """Of each model by precision, in turns, each time the least of all."""
    best = [dict.fromkeys(PRECISIONS, math.inf) for _ in models]
    for _ in range(repeats):
        for precision in PRECISIONS:
            for own, model in zip(best, models, strict=True):
                with hf_mlspec.precision_switch(model).at(precision):
                    began = time.perf_counter()
                    model.generate(**inputs, max_new_tokens=tokens, **GREEDY, assistant_models=[])
                    own[precision] = min(own[precision], (time.perf_counter() - began) / tokens)
    return best


def scored(args: argparse.Namespace, name: str, model: nn.Module, texts: dict, prompts: dict) -> dict:
    """A line of the table, printed as soon as it is there."""
    line = {"method": name}
    for text, rows in texts.items():
        for precision in PRECISIONS:
            line[f"{text} {precision}"] = perplexity(model, rows, precision)
    for source, own in prompts.items():
        shares = acceptance(model, own, args.tokens)
        line |= {f"{share}, {source}": value for share, value in shares.items()}
    print(json.dumps(line), file=sys.stderr, flush=True)
    return line


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table; -> the exit status."""
    args = parse(argv)
    if (args.learned is not None or args.peer) and args.calibration is None:
        raise SystemExit("--learned and --peer go with a text: give one with --calibration")
    if args.peer:
        require_llmcompressor()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tasks = tasks_of(args.humaneval)
    texts = {args.text.name: windows_of(args.text, tokenizer, args.windows),
             "solutions": solutions_of(tasks[: args.solutions], tokenizer)}  # fmt: skip
    prompts = prompts_by_source(args, tasks, tokenizer)
    methods = damped(methods_of(args), args.dampings)
    if args.learned is not None:
        learn(args, tokenizer)
        methods += () if any(", learned" in method for method in methods) else ("quarot+gptq, learned",)
    nothing = [prompts["HumanEval"][0]["input_ids"][0].tolist()]  # rounding to nearest needs none
    calibration = drawn_rows(args, tokenizer) if args.calibration else nothing
    made = [int4_model(args, method, calibration, tokenizer) for method in methods]
    made += [saved_model(args, folder) for folder in args.packed]
    models, methods = varied(args, made, (*methods, *(folder.name for folder in args.packed)))
    if args.peer:
        models, methods = [*models, peer_model(args, calibration)], (*methods, PEER)
    results = [scored(args, *one, texts, prompts) for one in zip(methods, models, strict=True)]
    steps = step_seconds(models, prompts["HumanEval"][0], args.tokens, args.repeats) if args.repeats else ()
    for line, seconds in zip(results, steps, strict=bool(args.repeats)):
        line |= {f"ms a step, {precision}": 1000 * own for precision, own in seconds.items()}
    print("| " + " | ".join(results[0]) + " |\n|" + "---|" * len(results[0]))
    for line in results:
        print("| " + " | ".join(v if isinstance(v, str) else f"{v:.4g}" for v in line.values()) + " |")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
