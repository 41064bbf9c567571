"""Would 4-bit keys lose less if queries and keys were rotated first? Perplexity of a text, simulated.

    python -m eval.cache_rotation FOLDER/code-76m --text FOLDER/wikitext2/test.txt

The model in bfloat16, run by transformers. Behind the rotary embedding, in front of attention, keys and values become
the values of their int4 codes (formats/cache/int4.py, between the lowest and the highest element of a token and key
head); rotated: queries and keys are multiplied by a Hadamard matrix of the head size first, which leaves their
products. Windows of --window tokens that do not overlap.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_mlspec.formats.cache import int4
from hf_mlspec.formats.hadamard import Hadamard, fitting_hadamard

CACHES = ("as computed", "int4", "int4, keys rotated", "int4 keys", "int4 keys, rotated")
Attention = Callable[..., tuple]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.cache_rotation", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of a model and its tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="file of plain text")
    parser.add_argument("--window", type=int, default=512, help="tokens (%(default)s)")
    parser.add_argument("--windows", type=int, default=24, help="how many (%(default)s)")
    return parser.parse_args(argv)


def attention(word: str) -> Attention:
    """transformers' own behind keys and values as a cache would give them back. word: of CACHES."""

    def forward(module, query: Tensor, key: Tensor, value: Tensor, mask, **options) -> tuple:
        if "rotated" in word:
            query, key = (rotated(x, fitting_hadamard(x.shape[-1])) for x in (query, key))
        if word != CACHES[0]:
            key = int4.dequantize(int4.quantize(key), key.dtype)
        if word.startswith("int4") and "int4 keys" not in word:
            value = int4.dequantize(int4.quantize(value), value.dtype)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    return forward


def rotated(x: Tensor, matrix: Hadamard) -> Tensor:
    """``[..., head_dim]``, by the orthogonal matrix, in float32."""
    return matrix.rotate(x.float()).to(x.dtype)


@torch.no_grad()
def perplexity(model, rows: list[Tensor]) -> float:
    total = 0.0
    for row in rows:
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        total += float(F.cross_entropy(logits.float(), row[1:], reduction="sum"))
    return math.exp(total / sum(len(row) - 1 for row in rows))


def main(argv: list[str] | None = None) -> None:
    """Print a line of JSON a cache."""
    args = parse(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokenizer(args.text.read_text(encoding="utf-8"), add_special_tokens=False, return_tensors="pt")["input_ids"]
    rows = [row for row in ids[0].split(args.window)[: args.windows] if len(row) == args.window]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    for index, word in enumerate(CACHES):
        AttentionInterface.register(f"cached{index}", attention(word))
        model.config._attn_implementation = f"cached{index}"
        print(json.dumps({"cache": word, "perplexity": perplexity(model, rows), "rows": len(rows)}), flush=True)


if __name__ == "__main__":
    main()
