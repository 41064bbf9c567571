"""Whose codes are best with 8- and 4-bit activations: zipper's, smoothed, rotated, or those of its rivals?

    python -m eval.zipper.calibrated --model FOLDER --text FILE --humaneval FILE --calibration FILE --json FILE

One row a way (--rows; all by default): perplexity of the text's first windows and of HumanEval's solutions behind
their prompts, with activations of 16, 8 and 4 bits. int4 weights, with groups of 128 but for the rows that say 64, by
round to nearest, GPTQ, AWQ, SmoothQuant and QuaRot; Atom's int4 and int8; and 6-bit zipper weights, plain, smoothed,
rotated, and both, of which the low part alone meets integers, with the part of weights whose high part is 0. Rows that
begin with "split" are other splits of one smoothed weight (two_parts.py). --choices: also the accuracy in PIQA and
WinoGrande without examples (zero_shot.py), and how far each row is from bfloat16's on the same questions, with the
standard error of the difference. Everything is calibrated here, on the first
texts of --calibration. --outliers: first, a hundredth of the channels of every norm's outputs is multiplied by so much
(outliers.py). Each row is added to --json as a line at once, and printed.

Zipper rows are computed densely, as two_parts.py says, with --packed by the packed layers where the split is that of a
format; the others by the packed layers.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_mlspec
from eval.scored import Rows, perplexity, solutions_of, tasks_of, windows_of
from hf_mlspec.nn.zipper import ZipperLinear

from .outliers import give_outliers
from .two_parts import SPLITS, TwoParts, take_apart
from .zero_shot import TASKS, Question, answers, paired, questions_of

BITS = (16, 8, 4)


class Way(NamedTuple):
    """method, format and options of `hf_mlspec.quantize`; split: of zipper weights (two_parts.py)."""

    method: str
    format: str = "int4"
    options: Mapping[str, Any] = MappingProxyType({})
    split: str = ""


def _zipper(method: str, split: str = "halved", bits: int = 6) -> Way:
    mode = {"halved": "paper", "clamped": "clamp"}.get(split, "exact")
    options: dict[str, Any] = {"mode": mode, "bits": bits}
    if "smoothquant" in method:
        options["search_bits"] = 4
    return Way(method, "zipper", options, split)


WAYS = {
    "bfloat16": None,
    "rtn": Way("rtn"),
    "smoothquant": Way("smoothquant", options={"search_bits": 4}),
    "gptq": Way("gptq"),
    "awq": Way("awq"),
    "quarot": Way("quarot"),
    "quarot+gptq": Way("quarot+gptq"),
    "atom": Way("atom+gptq", "int4-int8"),
    "rtn, 64": Way("rtn", options={"group_size": 64}),
    "quarot+gptq, 64": Way("quarot+gptq", options={"group_size": 64}),
    "zipper": _zipper("rtn"),
    "zipper, gptq": _zipper("gptq"),
    "zipper, smoothed": _zipper("smoothquant"),
    "zipper, smoothed, gptq": _zipper("smoothquant+gptq"),
    "zipper, rotated": _zipper("quarot"),
    "zipper, rotated, gptq": _zipper("quarot+gptq"),
    "zipper, rotated and smoothed": _zipper("quarot+smoothquant"),
    "zipper, rotated and smoothed, gptq": _zipper("quarot+smoothquant+gptq"),
    "exact, smoothed, gptq": _zipper("smoothquant+gptq", "signed"),
    "exact, rotated and smoothed, gptq": _zipper("quarot+smoothquant+gptq", "signed"),
    **{f"split {word}": _zipper("smoothquant", word) for word in SPLITS},
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.zipper.calibrated", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a model and its tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="file of plain text that is scored")
    parser.add_argument("--humaneval", type=Path, required=True, help="HumanEval.jsonl, whose solutions are scored")
    parser.add_argument("--calibration", type=Path, nargs="+", required=True, help="text files to calibrate on, alike "
                        "many samples of each; of a file of lines of JSON, the lines' code or text")
    parser.add_argument("--rows", nargs="+", default=list(WAYS), choices=WAYS, metavar="ROW")
    parser.add_argument("--windows", type=int, default=8, help="of 512 tokens of the text (%(default)s)")
    parser.add_argument("--solutions", type=int, default=40, help="of HumanEval that are scored (%(default)s)")
    parser.add_argument("--samples", type=int, default=32, help="of the calibration (%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of a sample (%(default)s)")
    parser.add_argument("--choices", help="folder of piqa/ and winogrande/, whose questions are asked, too")
    parser.add_argument("--questions", type=int, default=400, help="of each (%(default)s)")
    parser.add_argument("--packed", action="store_true", help="zipper rows by the packed layers' own products")
    parser.add_argument("--outliers", type=int, default=1, help="factor of some channels (%(default)s: none)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="of models, calibration and scores (%(default)s)")
    parser.add_argument("--json", type=Path, help="file to which each row is added as a line")
    return parser.parse_args(argv)


def calibration_rows(files: list[Path], tokenizer: Any, samples: int, tokens: int) -> list[list[int]]:
    """Rows of token ids, alike many of each file."""
    rows = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".jsonl":
            lines = [json.loads(line) for line in text.splitlines() if line]
            text = "\n\n".join(str(line.get("code") or line.get("text")) for line in lines)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        count = samples // len(files)
        rows += [ids[first : first + tokens] for first in range(0, count * tokens, tokens)]
    return [row for row in rows if len(row) > 1]


@torch.inference_mode()
def dense_perplexity(model: nn.Module, rows: Rows) -> float:
    """As `perplexity`, of a model that its own modules compute."""
    total = 0.0
    for ids, count in zip(*rows, strict=True):
        row = torch.tensor([ids], device=model.device)
        logits = model(row).logits[0, -count - 1 : -1].float()
        chances = logits.log_softmax(-1).gather(1, row[0, -count:, None])
        total -= float(chances.sum(dtype=torch.float64))
    return math.exp(total / sum(rows[1]))


Asked = dict[str, list[Question]]


def scores(
    model: PreTrainedModel, way: Way | None, texts: dict[str, Rows], asked: Asked, packed: bool = False
) -> dict[str, Any]:
    """Perplexities and accuracies by activation bits, and what the high parts are like. packed: by the layers' own
    products wherever a format has the split."""
    found: dict[str, Any]
    if way is None:
        found = {f"{name}, 16": dense_perplexity(model, rows) for name, rows in texts.items()}
        return found | _right(model, asked, 16)
    if way.format != "zipper":
        return _by_layers(model, {bits: f"w4a{bits}" for bits in BITS}, texts, asked)
    found = sparsity(model, way)
    if packed and found:
        words = {bits: "zipper" if bits == 16 else f"zippera{bits}" for bits in BITS}
        return found | _by_layers(model, words, texts, asked)
    layers = take_apart(model, way.split)
    for bits in BITS:
        for layer in layers:
            layer.bits = bits
        found |= {f"{name}, {bits}": dense_perplexity(model, rows) for name, rows in texts.items()}
        found |= _right(model, asked, bits)
    return found | _shares(layers)


def _by_layers(
    model: PreTrainedModel, words: dict[int, str], texts: dict[str, Rows], asked: Asked
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for bits, word in words.items():
        found |= {f"{name}, {bits}": perplexity(model, rows, word, 4) for name, rows in texts.items()}
        with hf_mlspec.precision_switch(model).at(word):
            found |= _right(model, asked, bits)
    return found


def _right(model: PreTrainedModel, asked: Asked, bits: int) -> dict[str, Any]:
    """Accuracies, and of each question 1 where it was answered right."""
    found: dict[str, Any] = {}
    for name, questions in asked.items():
        own = answers(model, questions)
        found |= {f"{name}, {bits}": sum(own) / len(own), f"answers, {name}, {bits}": "".join(map(str, map(int, own)))}
    return found


def sparsity(model: nn.Module, way: Way) -> dict[str, Any]:
    """The part of the weights whose high part is 0, by kind of layer: the mean and the least of all blocks."""
    if way.split not in ("signed", "halved", "clamped"):
        return {}
    kinds: dict[str, list[float]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, ZipperLinear):
            kinds.setdefault(name.rpartition(".")[2], []).append(layer.packed_weight().high_zeros())
    return {"by layer": {kind: (sum(own) / len(own), min(own)) for kind, own in kinds.items()}}


def _shares(layers: list[TwoParts]) -> dict[str, float]:
    count = sum(layer.high.numel() for layer in layers)
    return {"zeros": sum(int((layer.high == 0).sum()) for layer in layers) / count}


def measured(
    args: argparse.Namespace, word: str, tokenizer: Any, texts: dict[str, Rows], asked: Asked
) -> dict[str, Any]:
    """One row."""
    begin, way = time.perf_counter(), WAYS[word]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    if args.outliers > 1:
        give_outliers(model, args.outliers)
    model = model.to(args.device)
    if way is not None:
        rows = calibration_rows(args.calibration, tokenizer, args.samples, args.tokens)
        hf_mlspec.quantize(model, way.method, way.format, calibration=rows, **way.options)
    line = {"model": args.model.name, "row": word, "outliers": args.outliers}
    return line | scores(model, way, texts, asked, args.packed) | {"seconds": round(time.perf_counter() - begin, 1)}


def main(argv: list[str] | None = None) -> int:
    """Measure and print; -> the exit status."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = {"text": windows_of(args.text, tokenizer, args.windows),
             "solutions": solutions_of(tasks_of(args.humaneval)[: args.solutions], tokenizer)}  # fmt: skip
    asked = {name: questions_of(name, args.choices, tokenizer, args.questions) for name in TASKS if args.choices}
    results = []
    for word in args.rows:
        results.append(measured(args, word, tokenizer, texts, asked))
        print(results[-1], file=sys.stderr, flush=True)
        if args.json:
            with args.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(results[-1]) + "\n")
    show(results)
    return 0


def show(results: list[dict[str, Any]]) -> None:
    """A table, perplexities by activation bits."""
    columns = [f"{name}, {bits}" for name in ("text", "solutions", *TASKS) for bits in BITS]
    columns = [column for column in columns if any(column in line for line in results)]
    print("| row | " + " | ".join(columns) + " | zeros |\n|---|" + "--:|" * (len(columns) + 1))
    for line in results:
        cells = [f"{line[name]:.4g}" if name in line else "" for name in (*columns, "zeros")]
        print(f"| {line['row']} | " + " | ".join(cells) + " |")
    plain = next((line for line in results if line["row"] == "bfloat16"), {})
    if any(f"{name}, 16" in plain for name in TASKS):
        _show_paired(results, plain)


def _show_paired(results: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    """Points above bfloat16's accuracy, and the standard error, over the same questions."""
    columns = [f"{name}, {bits}" for name in TASKS for bits in BITS]
    print("| row, less bfloat16 | " + " | ".join(columns) + " |\n|---|" + "--:|" * len(columns))
    for line in results:
        cells = []
        for name in TASKS:
            asked = [(line.get(f"answers, {name}, {bits}"), plain[f"answers, {name}, 16"]) for bits in BITS]
            found = [paired(*both) if both[0] is not None else None for both in asked]
            cells += ["" if one is None else f"{100 * one[0]:+.1f} ({100 * one[1]:.1f})" for one in found]
        print(f"| {line['row']} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    raise SystemExit(main())
