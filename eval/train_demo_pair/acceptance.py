"""How often do two models choose the same next token, along the target's own greedy text and along human text?

Float32 arithmetic, teacher-forced: every draft reads the very same ids as the target.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.train_demo_pair.corpus import Document

PROMPT_TOKENS, NEW_TOKENS, HUMAN_TOKENS = 64, 128, 512


@dataclass(frozen=True)
class Agreement:
    """Shares of positions in [0, 1]; ``bits_per_byte`` is the target's own on the human text."""

    kind: str
    prompts: int
    greedy: dict[str, float]  # draft name -> same argmax as the target, along the target's greedy continuation
    human: dict[str, float]  # the same along human-written text
    right: dict[str, float]  # model name -> argmax is the human's next token
    repeated: float  # share of 8-grams of the continuations that stood before in the same continuation
    bits_per_byte: float


@torch.no_grad()
def choices(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """ids int64 ``[batch, length]`` -> the argmax token after every position, ``[batch, length]``."""
    return torch.cat([model(input_ids=part, use_cache=False).logits.argmax(-1) for part in ids.split(8)])


def measure(
    target: PreTrainedModel, drafts: dict[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase,
    kind: str, documents: list[Document],
) -> Agreement:
    """The table's row for these documents; each must hold at least `HUMAN_TOKENS` tokens, which ValueError names."""
    ids = torch.tensor([first_tokens(tokenizer, document) for document in documents], device=target.device)
    prompts = ids[:, :PROMPT_TOKENS]
    written = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW_TOKENS,
                              do_sample=False)
    ended = (written == tokenizer.eos_token_id).long()
    # Position p predicts p + 1: from the last of the prompt to the one before the end; behind an EOS nothing counts.
    counted = (ended.cumsum(-1) - ended == 0)[:, PROMPT_TOKENS:]
    models = {"target": target, **drafts}
    along = {name: choices(model, written)[:, PROMPT_TOKENS - 1 : -1][counted] for name, model in models.items()}
    human = {name: choices(model, ids)[:, :-1] for name, model in models.items()}
    return Agreement(
        kind=kind, prompts=len(documents),
        greedy={name: share(along[name] == written[:, PROMPT_TOKENS:][counted]) for name in drafts},
        human={name: share(human[name] == human["target"]) for name in drafts},
        right={name: share(human[name] == ids[:, 1:]) for name in models},
        repeated=repeated_share(written[:, PROMPT_TOKENS:].tolist()),
        bits_per_byte=bits_per_byte(target, tokenizer, ids),
    )


def first_tokens(tokenizer: PreTrainedTokenizerBase, document: Document) -> list[int]:
    ids = tokenizer(document.text[: 16 * HUMAN_TOKENS])["input_ids"]
    if len(ids) < HUMAN_TOKENS:
        raise ValueError(f"{document.name} has {len(ids)} tokens, the measurement reads the first {HUMAN_TOKENS}")
    return ids[:HUMAN_TOKENS]


def share(hits: torch.Tensor) -> float:
    return hits.double().mean().item()


def repeated_share(rows: list[list[int]], n: int = 8) -> float:
    """Share of n-grams that stood before in their own row: 0 for fresh text, near 1 for a loop."""
    seen = total = 0
    for row in rows:
        grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
        seen += len(grams) - len(set(grams))
        total += len(grams)
    return seen / total


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor) -> float:
    nats = sum(
        torch.nn.functional.cross_entropy(
            model(input_ids=part, use_cache=False).logits[:, :-1].flatten(0, 1).double(), part[:, 1:].flatten(),
            reduction="sum",
        ).item()
        for part in ids.split(8)
    )
    size = sum(len(tokenizer.decode(row[1:]).encode()) for row in ids)
    return nats / torch.log(torch.tensor(2.0)).item() / size


def table(rows: list[Agreement]) -> str:
    """A Markdown table and the same numbers as JSON lines."""
    lines = ["| text | prompts | draft | along greedy text | along human text | draft right | target right | "
             "repeated 8-grams | target bits a byte |", "|---|---|---|---|---|---|---|---|---|"]
    lines += [
        f"| {r.kind} | {r.prompts} | {name} | {r.greedy[name]:.3f} | {r.human[name]:.3f} | {r.right[name]:.3f} | "
        f"{r.right['target']:.3f} | {r.repeated:.2f} | {r.bits_per_byte:.3f} |"
        for r in rows for name in r.greedy
    ]
    return "\n".join([*lines, "", *(json.dumps(asdict(r)) for r in rows)])
