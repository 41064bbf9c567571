"""Is a step of every compiled class as fast as Llama's, at the same bytes?

    python -m eval.bench_architectures --threads 1
    python -m eval.bench_architectures --shape 8b --device cuda
    python -m eval.bench_architectures --classes Gemma2ForCausalLM --batch 8

Each dense class that is described gets layers of one shape with random BF16 weights, and so does a Llama with MLPs of
such a width that it reads as many bytes: what a layer takes beside its bytes is then the same part of both. Tokens are
decoded by both in turn, without levels; the time of a prompt and the first tokens is taken off. A row: milliseconds of
a step, the bytes of weights that it reads, and the time a byte over Llama's in the same turn, the median of all turns.
On the CPU it is processor time, so that other programs count less.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_mlspec
from hf_mlspec.engines.architecture import KNOWN

LLAMA, FIRST, STEPS = "LlamaForCausalLM", 8, 16
_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
SHAPES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64, **_HEADS},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128, **_HEADS},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
}
_IDS = {"vocab_size": 8192, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512}
_WIDTHS = "ffn_dim", "ffn_hidden_size", "n_inner", "word_embed_proj_dim"  # words for widths that some configs have
_STEP = 64  # widths of MLPs are multiples
_FALCON = "FalconForCausalLM"  # whose old form has one key head


def dense_classes() -> dict[str, str]:
    """Model type of every dense class that has a description, and whose layers are alike."""
    alike = {name: entry for name, entry in KNOWN.items() if entry.heads == "alike"}
    dense = {name for name, entry in alike.items() if entry.experts is None and entry.delta is None}
    found: dict[str, str] = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name in dense:
            found.setdefault(name, kind)
    return dict(sorted(found.items()))


def made(name: str, kind: str, shape: str, layers: int, device: str, **sizes: int) -> PreTrainedModel:
    """A prepared model of a class, of random BF16 weights and of these sizes where any are given."""
    config = CONFIG_MAPPING[kind]
    said = {**SHAPES[shape], **_IDS, "num_hidden_layers": layers, **sizes}
    said |= {"new_decoder_architecture": True, "num_kv_heads": said["num_key_value_heads"]} if name == _FALCON else {}
    known = {word for base in config.__mro__ for word in vars(base).get("__annotations__", {})}
    inner, hidden = said["intermediate_size"], said["hidden_size"]
    said |= {word: hidden if word == "word_embed_proj_dim" else inner for word in _WIDTHS if word in known}
    said = {word: value for word, value in said.items() if not isinstance(getattr(config, word, None), property)}
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config(**said)).eval()
    finally:
        torch.set_default_dtype(before)
    return hf_mlspec.prepare(model)


def step_bytes(model: PreTrainedModel) -> int:
    """Of the weights that a step reads: all but a table of which it takes a row."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    apart = 0 if table is head else table.nbytes
    return sum(parameter.nbytes for parameter in model.parameters()) - apart


def inner_for(more: int, shape: str, layers: int) -> int:
    """By how much wider a Llama's MLPs are for so many bytes more, in steps that every kernel takes."""
    return round(more / (layers * 3 * SHAPES[shape]["hidden_size"] * 2) / _STEP) * _STEP


def step_seconds(model: PreTrainedModel, rows: int) -> float:
    """Of one token a row, behind a prompt and some tokens."""
    ids = torch.randint(3, 1000, (rows, 8), generator=torch.Generator().manual_seed(1)).to(model.device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
    clock = time.process_time if model.device.type == "cpu" else time.perf_counter

    def call(tokens: int) -> float:
        begin = clock()
        out = model.generate(ids, max_new_tokens=tokens, assistant_models=[], **options)
        out[0, -1].item()  # waits for the device
        return clock() - begin

    return (call(FIRST + STEPS) - call(FIRST)) / STEPS


def compared(model: PreTrainedModel, llama: PreTrainedModel, rows: int, repeats: int) -> dict[str, float]:
    """Medians of a step of both, in turn, and of the time a byte over Llama's; the first turn is left out."""
    turns = [(step_seconds(llama, rows), step_seconds(model, rows)) for _ in range(repeats + 1)][1:]
    more = step_bytes(model) / step_bytes(llama)
    return {
        "rows": rows,
        "ms": round(statistics.median(own for _, own in turns) * 1e3, 3),
        "llama_ms": round(statistics.median(their for their, _ in turns) * 1e3, 3),
        "ratio": round(statistics.median(own / their for their, own in turns) / more, 3),
    }


def measured(args: argparse.Namespace) -> Iterator[dict]:
    kinds, begun = dense_classes(), time.monotonic()
    whole = made(LLAMA, kinds[LLAMA], args.shape, args.layers, args.device)
    inner = SHAPES[args.shape]["intermediate_size"]
    llamas = {inner: whole}
    for name in args.classes or kinds:
        if args.seconds and time.monotonic() - begun > args.seconds:
            return
        model = made(name, kinds[name], args.shape, args.layers, args.device)
        width = max(_STEP, inner + inner_for(step_bytes(model) - step_bytes(whole), args.shape, args.layers))
        if width not in llamas:
            llamas = {inner: whole, width: made(LLAMA, kinds[LLAMA], args.shape, args.layers, args.device,
                                                intermediate_size=width)}  # fmt: skip
        for rows in args.batch:
            found = compared(model, llamas[width], rows, args.repeats)
            yield {"class": name, "mb": round(step_bytes(model) / 1e6, 1), **found}
        del model
        gc.collect()


def table(rows: list[dict], batch: list[int]) -> str:
    """A line a class."""
    lines = ["| class | " + " | ".join(f"{n} rows" for n in batch) + " |", "|---|" + "--:|" * len(batch)]
    for name in dict.fromkeys(row["class"] for row in rows):
        own = {row["rows"]: row["ratio"] for row in rows if row["class"] == name}
        lines.append(f"| `{name}` | " + " | ".join(str(own.get(n, "")) for n in batch) + " |")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench_architectures", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b", help="of a layer (%(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--classes", nargs="+", metavar="CLASS", help="of the dense ones that are described (all)")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], help="rows (1 8)")
    parser.add_argument("--repeats", type=int, default=5, help="turns (%(default)s)")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=0, help="begin no class behind so many; 0: all")
    args = parser.parse_args(argv)
    unknown = [name for name in args.classes or [] if name not in dense_classes()]
    if unknown:
        parser.error(f"{unknown[0]} is no dense class that is described: {', '.join(dense_classes())}")
    if min(args.layers, args.repeats, *args.batch) < 1:
        parser.error("--layers, --repeats and --batch are 1 or more")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    rows = []
    for row in measured(args):
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(table(rows, args.batch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
