"""How is a small draft model brought nearer to a target, and how often does it choose what the target chooses?

    python -m eval.align_draft --draft FOLDER --target FOLDER --out ALIGNED --minutes 3      # one GPU
    python -m eval.align_draft --draft FOLDER --written FILE.jsonl.gz --out ALIGNED          # texts written elsewhere
    python -m eval.align_draft --draft FOLDER --target FOLDER --out ALIGNED --smoke          # every step, tiny: a CPU

The draft is trained on texts that the target wrote greedily (`eval.train_head --keep` writes such files, too): on the
target's probabilities where the target is there, else on its choices (Kim and Rush 2016, arXiv 1606.07947:
sequence-level distillation). A share of it goes to keep what the draft knew: KL to its own earlier probabilities.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from eval import written
from eval.progress import Progress

HELD_OUT = 0.05  # of the texts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.align_draft", description=__doc__.splitlines()[0])
    parser.add_argument("--draft", type=Path, required=True, help="folder of the draft, which stays as it is")
    parser.add_argument("--target", type=Path, help="folder of the target; without it its choices alone are learned")
    parser.add_argument("--out", type=Path, required=True, help="folder that gets the aligned draft")
    written.add_arguments(parser)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=3.0, help="of training")
    parser.add_argument("--steps", type=int, help="of training, instead of minutes")
    parser.add_argument("--rows", type=int, default=64, help="texts in a step")
    parser.add_argument("--width", type=int, default=320, help="tokens of a text, at most")
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--stay", type=float, default=0.1, help="weight of the draft's own earlier probabilities")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few texts and steps")
    given = parser.parse_args()
    if given.target is None and given.written is None:
        parser.error("name the target (--target), or texts that it wrote (--written)")
    if given.smoke:
        given.prompts, given.new_tokens, given.rows, given.width, given.steps = 16, 24, 4, 64, given.steps or 8
    return given


def load(folder: Path, given: argparse.Namespace, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(given.device).eval()


def divergence(wanted: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
    """KL of logits to log-probabilities, position by position."""
    wanted = wanted.float()
    return (wanted.softmax(-1) * (wanted.log_softmax(-1) - logs)).sum(-1)


def loss_of(draft: PreTrainedModel, target: PreTrainedModel | None, before: PreTrainedModel, batch, stay: float):
    """Of positions whose next token the target wrote."""
    ids, wrote = batch
    with torch.no_grad():
        own = before(input_ids=ids, use_cache=False).logits[:, :-1]
        wanted = None if target is None else target(input_ids=ids, use_cache=False).logits[:, :-1]
    logs = draft(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    mask = wrote[:, 1:]
    choice = F.nll_loss(logs.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(mask)
    each = choice if wanted is None else divergence(wanted, logs) + 0.5 * choice
    each = each + stay * divergence(own, logs)
    return (each * mask).sum() / mask.sum().clamp(min=1)


def train(
    draft: PreTrainedModel, target: PreTrainedModel | None, before: PreTrainedModel, batches, given
) -> dict[str, Any]:
    stepper = torch.optim.AdamW(draft.parameters(), lr=given.rate, betas=(0.9, 0.95), weight_decay=0.01)
    progress, kind = Progress(given.steps, 60 * given.minutes), torch.device(given.device).type
    for share in progress:
        stepper.param_groups[0]["lr"] = given.rate * min(share / 0.02 + 0.01, (1 - share) / 0.98, 1.0)
        batch = [part.to(given.device) for part in next(batches)]
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda"):
            loss = loss_of(draft, target, before, batch, given.stay)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        stepper.step()
        stepper.zero_grad()
        if progress.done % 100 == 0:
            print(f"step {progress.done}, {progress.elapsed():.0f} s, loss {loss.item():.4f}", flush=True)
    return {"steps": progress.done, "seconds": round(progress.elapsed(), 1), "loss": round(loss.item(), 4)}


@torch.no_grad()
def agreement(draft: PreTrainedModel, texts: list[written.Written], given: argparse.Namespace) -> float:
    """The share of written tokens that the draft would have chosen itself, behind the same tokens."""
    right = asked = 0
    found = written.batches(texts, given.rows, given.width, given.seed + 1)
    for _ in range(2 if given.smoke else 10):
        ids, wrote = (part.to(given.device) for part in next(found))
        best = draft(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
        right += int(((best == ids[:, 1:]) & wrote[:, 1:]).sum())
        asked += int(wrote[:, 1:].sum())
    return right / max(asked, 1)


def main() -> None:
    given = arguments()
    torch.manual_seed(given.seed)
    target = None if given.target is None else load(given.target, given, torch.bfloat16).requires_grad_(False)
    texts = written.texts_of(given, target)
    held = max(int(HELD_OUT * len(texts)), 1)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(given.seed)).tolist()
    unseen, kept = [texts[i] for i in order[:held]], [texts[i] for i in order[held:]]
    draft = load(given.draft, given, torch.float32)
    before = load(given.draft, given, torch.bfloat16).requires_grad_(False)
    had = agreement(draft, unseen, given)
    told = train(draft, target, before, written.batches(kept, given.rows, given.width, given.seed), given)
    draft = draft.to(torch.bfloat16)
    draft.save_pretrained(given.out)
    AutoTokenizer.from_pretrained(given.draft).save_pretrained(given.out)
    card = {
        "draft": given.draft.resolve().name, "target": None if given.target is None else given.target.resolve().name,
        "texts": len(kept), "tokens": sum(len(text.new) for text in kept), "held_out": held, "seed": given.seed,
        "rows": given.rows, "width": given.width, "rate": given.rate, "stay": given.stay,
        "agreement_before": round(had, 4), "agreement": round(agreement(draft, unseen, given), 4), **told,
    }  # fmt: skip
    (given.out / "training.json").write_text(json.dumps(card, indent=2) + "\n")
    print(json.dumps(card))


if __name__ == "__main__":
    main()
