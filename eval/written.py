"""What does a target write behind the beginnings of texts, and how is it kept? Training data of heads and drafts."""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from eval.sources import read_texts
from hf_mlspec.evaluation import read_prompts

LONGEST = 192  # tokens of a beginning


@dataclass(frozen=True)
class Written:
    """Token ids of a beginning and of what the target wrote behind it, greedily."""

    prompt: list[int]
    new: list[int]


def standard_library() -> Path:
    """The sources of this Python, which are training text wherever it is installed."""
    return Path(sysconfig.get_paths()["stdlib"])


def beginnings(paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[list[int]]:
    """Token ids of so many beginnings, or of all there are, in an order that the seed decides.

    A .jsonl file gives its prompts; a folder or another file the heads of its functions (signature and docstring) and,
    for each of them, one piece that ends anywhere.
    """
    chance = random.Random(seed)
    texts: list[str] = []
    for path in paths:
        if path.suffix == ".jsonl":
            texts += read_prompts(path)
            continue
        for text in read_texts(path, without=("test", "tests", "idlelib", "lib2to3")):
            heads = list(_heads(text))
            texts += heads + [_piece(text, chance) for _ in heads]
    texts = sorted({text for text in texts if text.strip()})
    chance.shuffle(texts)
    plain = {"split_special_tokens": True}  # a text may spell one that the target does not embed
    return [tokenizer(text, **plain)["input_ids"][-LONGEST:] for text in texts[:count]]


def _heads(text: str) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            cut = [line[node.col_offset :] for line in lines[node.lineno - 1 : node.body[0].end_lineno]]
            yield "\n".join(cut) + "\n"


def _piece(text: str, chance: random.Random) -> str:
    end = chance.randrange(len(text))
    return text[max(end - 600, 0) : end]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the texts of a target come from: a file of earlier ones, or what it writes behind beginnings of others."""
    parser.add_argument("--text", type=Path, action="append", default=[], help="texts whose beginnings are prompts")
    parser.add_argument("--written", type=Path, help="texts that the target wrote before")
    parser.add_argument("--keep", type=Path, help="keep what the target writes here")
    parser.add_argument("--prompts", type=int, default=16384)
    parser.add_argument("--new-tokens", type=int, default=160)


def texts_of(given: argparse.Namespace, target: PreTrainedModel | None) -> list[Written]:
    """What the target wrote, or writes now. given: of `add_arguments`, with target (its folder) and seed."""
    if given.written is not None:
        return load(given.written)
    tokenizer = AutoTokenizer.from_pretrained(given.target)
    prompts = beginnings(given.text or [standard_library()], tokenizer, given.prompts, given.seed)
    batch = 256 if target.device.type == "cuda" else 16
    texts = list(write(target, prompts, given.new_tokens, batch, lambda done: None))
    if given.keep is not None:
        save(texts, given.keep)
    return texts


def write(
    model: PreTrainedModel, prompts: list[list[int]], new_tokens: int, batch: int, told: Callable[[int], None]
) -> Iterator[Written]:
    """What the model writes behind prompts, which are taken in order of length so that batches hold little padding.

    A prompt with a token for which the model has no embedding, as some tokenizers add, is left out.
    """
    model.generation_config.pad_token_id, end = 0, model.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [end])
    known = model.get_input_embeddings().num_embeddings
    prompts = sorted((prompt for prompt in prompts if prompt and max(prompt) < known), key=len)
    for first in range(0, len(prompts), batch):
        rows = prompts[first : first + batch]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
        found = model.generate(
            input_ids=ids, attention_mask=mask, assistant_models=[], max_new_tokens=new_tokens, do_sample=False
        )
        for row, line in zip(rows, found[:, width:].tolist(), strict=True):
            last = next((place for place, token in enumerate(line) if token in ends), len(line) - 1)
            yield Written(row, line[: last + 1])
        told(min(first + batch, len(prompts)))


def save(texts: Sequence[Written], path: Path) -> None:
    """One JSON object a line; compressed where the name ends in .gz."""
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        for text in texts:
            file.write(json.dumps({"prompt": text.prompt, "new": text.new}) + "\n")


def load(path: Path) -> list[Written]:
    """What `save` wrote; ValueError naming the file for anything else."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            lines = [json.loads(line) for line in file]
            return [Written(line["prompt"], line["new"]) for line in lines]
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise ValueError(
            f"{path} holds no texts that a target wrote ({error!r}): write it again with --written"
        ) from error


def batches(texts: list[Written], rows: int, width: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless: token ids int64 `[rows, width]` and which of them the target wrote, bool; ids behind a text are 0."""
    chance = random.Random(seed)
    while True:
        picked = [chance.choice(texts) for _ in range(rows)]
        lines = [(text.prompt + text.new)[:width] for text in picked]
        ids = torch.tensor([line + [0] * (width - len(line)) for line in lines])
        written = torch.tensor(
            [
                [len(text.prompt) <= place < len(line) for place in range(width)]
                for text, line in zip(picked, lines, strict=True)
            ]
        )
        yield ids, written
