"""Are checkpoints of other libraries read exactly, loaded fast, and as fast to decode as our own int4?

    python -m eval.bench_checkpoints --model FOLDER --prompts HumanEval.jsonl
    python -m eval.bench_checkpoints --model FOLDER --prompts HumanEval.jsonl --count 8 --kind gptq --json out.jsonl

The BF16 model of FOLDER is rounded to 4 bits in groups of 128 and written as each kind has it. Then, a line each:

- values: weights that differ from what was written, of all (required: 0);
- ids: tokens that differ between the target alone and `["w4a8"]`, over all prompts, batch 1 and 8 (required: 0);
- error: of the logits of one prompt, beside a float64 forward on the same weights, over that of stock BF16 modules;
- load: seconds, the least of the repeats, and bytes of the file a second; over the seconds of our own format;
- step: seconds of the target alone, over those of our own int4 in turn: the median of the repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

import hf_mlspec
from eval.bench_checkpoints.written import KINDS, Values, write
from eval.records import machine, markdown
from eval.rows import padded
from hf_mlspec.evaluation import read_prompts

LEVELS = ["w4a8"]
LENGTHS = hf_mlspec.SpeculationConfig(num_draft_tokens=3)  # given: calls that choose might not draft at all
NEW_TOKENS, LONGEST = 64, 256


def decoded(model: PreTrainedModel, rows: list[list[int]], levels: list[str], batch: int) -> list[list[int]]:
    """The new ids of every prompt; no end of sequence ends a row."""
    found = []
    for first in range(0, len(rows), batch):
        inputs = padded(rows[first : first + batch], model.device)
        out = model.generate(**inputs, assistant_models=levels, max_new_tokens=NEW_TOKENS, do_sample=False,
                             speculation_config=LENGTHS)  # fmt: skip
        found += out[:, inputs["input_ids"].shape[1] :].tolist()
    return found


def load(folder: Path, device: str) -> PreTrainedModel:
    """Ready to decode."""
    model = hf_mlspec.load(folder, dtype=torch.bfloat16).to(device)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def differing_values(model: PreTrainedModel, values: Values) -> int:
    """Weights that are not what was written."""
    different = 0
    for name, expected in values.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        read = layer.dequantized_plain(torch.float32) if hasattr(layer, "dequantized_plain") else layer.weight
        different += int((read.float().cpu() != expected).sum())
    return different


def logit_error(model: PreTrainedModel, source: Path, values: Values, row: list[int]) -> float:
    """Of this model over that of stock BF16 modules with the same weights, both beside float64."""
    wide = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    wide.load_state_dict({**wide.state_dict(), **{name: value.double() for name, value in values.items()}})
    stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    stock.load_state_dict({**stock.state_dict(), **{name: value.bfloat16() for name, value in values.items()}})
    ids = torch.tensor([row])
    with torch.inference_mode():
        expected = wide(ids).logits
        errors = [(other(ids.to(other.device)).logits.cpu().double() - expected).norm() for other in (model, stock)]
    return float(errors[0] / errors[1])


def steps(model: PreTrainedModel, ours: PreTrainedModel, row: list[int], repeats: int) -> float:
    """Seconds of the target alone over those of ``ours``, in turn: the median."""
    ratios = []
    for place in range(repeats + 1):
        taken = {}
        for one in (model, ours) if place % 2 else (ours, model):
            begin = time.perf_counter()
            decoded(one, [row], [], 1)
            taken[id(one)] = time.perf_counter() - begin
        ratios.append(taken[id(model)] / taken[id(ours)])
    return statistics.median(ratios[1:])


def load_seconds(folder: Path, repeats: int) -> float:
    """The least of the repeats, files in memory."""
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        hf_mlspec.load(folder, dtype=torch.bfloat16)
        taken.append(time.perf_counter() - begin)
    return min(taken)


def measure(kind: str, args: argparse.Namespace, folder: Path, rows: list[list[int]], ours: Path) -> dict[str, Any]:
    """One line."""
    values = write(Path(args.model), folder, kind)
    model = load(folder, args.device)
    differing, total = 0, 0
    for batch in (1, 8):
        alone, chain = (decoded(model, rows, levels, batch) for levels in ([], LEVELS))
        total += sum(map(len, alone))
        differing += sum(a != b for one, two in zip(alone, chain, strict=True) for a, b in zip(one, two, strict=True))
    size = (folder / "model.safetensors").stat().st_size
    seconds = load_seconds(folder, args.repeats)
    return {
        "kind": kind, "values_differing": differing_values(model, values),
        "values": sum(value.numel() for value in values.values()), "ids_differing": differing, "ids": total,
        "logit_error": logit_error(model, Path(args.model), values, rows[0]), "load_seconds": seconds,
        "load_bytes_a_second": size / seconds, "load_over_ours": seconds / load_seconds(ours, args.repeats),
        "step_over_ours": steps(model, load(ours, args.device), rows[0], args.repeats),
        "machine": machine.card(args.device),
    }  # fmt: skip


def show(lines: list[dict[str, Any]]) -> str:
    """Markdown."""
    head = ["kind", "values that differ", "ids that differ", "logit error / stock", "load, GB/s", "load / ours",
            "step / ours"]  # fmt: skip
    return markdown.table(head, [
        [line["kind"], f"{line['values_differing']} of {line['values']:,}",
         f"{line['ids_differing']} of {line['ids']:,}",
         f"{line['logit_error']:.2f}", f"{line['load_bytes_a_second'] / 1e9:.2f}", f"{line['load_over_ours']:.2f}",
         f"{line['step_over_ours']:.3f}"] for line in lines])  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_checkpoints", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a BF16 model")
    parser.add_argument("--prompts", required=True, help="file of prompts")
    parser.add_argument("--count", type=int, help="only the first prompts")
    parser.add_argument("--kind", action="append", choices=KINDS, help="repeat it for more (default: all)")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cpu", help="where models decode (%(default)s); files are read on the CPU")
    parser.add_argument("--json", metavar="FILE", help="append the lines")
    args = parser.parse_args(argv)
    logging.disable_progress_bar()
    warnings.simplefilter("ignore", UserWarning)
    tokenizer, lines = AutoTokenizer.from_pretrained(args.model), []
    rows = [tokenizer(text)["input_ids"][-LONGEST:] for text in read_prompts(args.prompts, args.count)]
    with tempfile.TemporaryDirectory() as place:
        ours = Path(place) / "ours"
        write(Path(args.model), ours, "ours")
        for kind in args.kind or KINDS:
            lines.append(measure(kind, args, Path(place) / f"as {kind}", rows, ours))
            print(json.dumps({key: value for key, value in lines[-1].items() if key != "machine"}), file=sys.stderr)
    if args.json:
        with open(args.json, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    print(show(lines))
    return int(any(line["values_differing"] or line["ids_differing"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
