"""What does a nested BF16 model hold, and how near does its 4-bit draft come to the weights, tensor by tensor?

    python -m eval.nested_quality FOLDER/code-76m FOLDER/code-21m --json out.jsonl
    python -m eval.nested_quality --tensors          # the demo target, a row a tensor

Every linear layer, the output head included, is split, joined again and compared bit for bit. Escapes are weights that
are too small for the 12 bits beside their block's exponent. Bytes are those of the linears, against BF16; at run time
an escape keeps its whole row exact. The error of a draft is sqrt(sum (w - d)^2 / sum w^2), over a tensor or over all
linears; beside it that of the MXFP4 direct cast (rule "ocp_floor"), whose codes have as many bits. Exit status 1 where
a weight came back with other bits and, with --check, where a model misses what code-76m and code-21m are to reach.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import hf_mlspec
from eval.records.writer import Results
from hf_mlspec.formats import mxfp4, nested
from hf_mlspec.formats.nested import codebooks

CODEBOOKS = (*codebooks.CODEBOOKS, codebooks.FITTED)
CAST = "MXFP4 cast"
MOST_ESCAPES, MOST_BYTES, MOST_ERROR = 0.001, 1.02, 0.100  # shares, and the relative error with the default codebook
DEFAULT = "lloyd_max"
OTHER_BITS = "a weight came back with other bits"


@dataclass
class Found:
    """One tensor, or several summed: squared errors by draft, levels of the fitted codebook where it is one tensor."""

    name: str
    weights: int = 0
    escapes: int = 0
    bfloat16_bytes: int = 0
    nested_bytes: int = 0
    run_time_bytes: int = 0
    square: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    identical: bool = True
    fitted: list[int] | None = None

    def add(self, other: Found) -> None:
        """Sum; the fitted codebooks of several tensors are several."""
        for name in ("weights", "escapes", "bfloat16_bytes", "nested_bytes", "run_time_bytes", "square"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for draft, error in other.errors.items():
            self.errors[draft] = self.errors.get(draft, 0.0) + error
        self.identical &= other.identical

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON; errors relative, ratios against BF16."""
        square = self.square or 1.0  # a tensor of zeros has no error
        relative = {draft: (error / square) ** 0.5 for draft, error in self.errors.items()}
        return {"tensor": self.name, "weights": self.weights, "escapes": self.escapes,
                "escape_share": self.escapes / self.weights, "bfloat16_bytes": self.bfloat16_bytes,
                "nested_bytes": self.nested_bytes, "bytes_ratio": self.nested_bytes / self.bfloat16_bytes,
                "run_time_ratio": self.run_time_bytes / self.bfloat16_bytes, "relative_errors": relative,
                "identical": self.identical, **({"fitted": self.fitted} if self.fitted is not None else {})}


def measure(name: str, weight: Tensor) -> Found:
    """bfloat16 ``[out, in]`` under every codebook; ValueError as `nested.split`."""
    exact = weight.double()
    found = Found(name, weight.numel(), bfloat16_bytes=weight.nbytes, square=float(exact.square().sum()))
    for codebook in CODEBOOKS:
        levels = (codebooks.fit(nested.count_fields(weight, name)) if codebook == codebooks.FITTED
                  else codebooks.codebook_of(codebook))
        parts = nested.split(weight, levels, name)
        found.errors[codebook] = _squared(exact, nested.dequantize_draft(parts.packed, parts.scale, levels))
        found.identical &= _same_bits(nested.join(*parts), weight)
    found.fitted = levels.tolist()
    found.errors[CAST] = _squared(exact, mxfp4.dequantize(*mxfp4.quantize(weight)))
    planes = sum(part.nbytes for part in (parts.packed, parts.scale, parts.low, parts.high, levels))
    rows = torch.unique(parts.escape_index // weight.shape[1]).numel()
    found.escapes = parts.escape_index.numel()
    found.nested_bytes = planes + parts.escape_index.nbytes + parts.escape_value.nbytes
    found.run_time_bytes = planes + rows * (weight.shape[1] * weight.itemsize + 8)  # whole rows, and their numbers
    return found


def _squared(exact: Tensor, draft: Tensor) -> float:
    return float((exact - draft.double()).square().sum())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def linears(folder: str) -> Iterator[tuple[str, Tensor]]:
    """Names and BF16 weights of every linear layer that can be nested; ValueError for a folder without a model, or a
    model with none."""
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json: give the folder of a model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found = [(name, module.weight.detach()) for name, module in model.named_modules()
             if isinstance(module, nn.Linear) and module.in_features % nested.BLOCK == 0]
    if not found:
        raise ValueError(f"{folder}: {type(model).__name__} has no linear layer whose inputs are a multiple of "
                         f"{nested.BLOCK}")
    yield from track(found, description=Path(folder).name, console=Console(stderr=True))


def missed(whole: dict[str, Any]) -> list[str]:
    """What a whole model does not reach, each in a sentence."""
    checks = [(OTHER_BITS, whole["identical"]),
              (f"escapes are {whole['escape_share']:.2%}, at most {MOST_ESCAPES:.1%} are required",
               whole["escape_share"] <= MOST_ESCAPES),
              (f"the linears take {whole['run_time_ratio']:.4f} x their BF16 bytes, at most {MOST_BYTES} are required",
               max(whole["bytes_ratio"], whole["run_time_ratio"]) <= MOST_BYTES),
              (f"{DEFAULT}: relative error {whole['relative_errors'][DEFAULT]:.4f}, at most {MOST_ERROR} is required",
               whole["relative_errors"][DEFAULT] <= MOST_ERROR)]
    return [text for text, fine in checks if not fine]


def table(title: str, lines: list[dict[str, Any]]) -> Table:
    drafts = list(lines[0]["relative_errors"])
    out = Table("", "weights", "escapes", "bytes / BF16", "at run time", *drafts, "same bits",
                title=f"{title}: nested BF16; relative error of the draft by codebook")
    for line in lines:
        out.add_row(line["tensor"], f"{line['weights']:,}", f"{line['escapes']:,} ({line['escape_share']:.4%})",
                    f"{line['bytes_ratio']:.4f}", f"{line['run_time_ratio']:.4f}",
                    *(f"{line['relative_errors'][draft]:.4f}" for draft in drafts),
                    "yes" if line["identical"] else "NO")
    return out


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.nested_quality", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="folders of models (the demo target)")
    parser.add_argument("--tensors", action="store_true", help="a row a tensor, too")
    parser.add_argument("--check", action="store_true", help="exit status 1 where a requirement is missed, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line a tensor and one a model")
    args = parser.parse_args(argv)
    args.models = args.models or [str(hf_mlspec.demo_pair()[0])]
    return args


def run(folder: str, args: argparse.Namespace, console: Console) -> list[str]:
    """One model: its lines, its table, what it misses."""
    whole, lines = Found("all linears"), []
    for name, weight in linears(folder):
        found = measure(name, weight)
        lines.append(found.to_dict())
        whole.add(found)
    lines.append(whole.to_dict())
    console.print(table(Path(folder).name, lines if args.tensors else lines[-1:]))
    if args.json:
        with Results(args.json, "nested quality") as results:
            for line in lines:
                results.add("nested", {"model": Path(folder).name, **line})
    return [f"{Path(folder).name}: {text}" for text in missed(lines[-1]) if args.check or text == OTHER_BITS]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    console = Console(width=None if Console().is_terminal else 180)
    try:
        wrong = [text for folder in args.models for text in run(folder, args, console)]
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for text in wrong:
        print(f"error: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
