"""How is a small draft model brought nearer to a target, and how often does it choose what the target chooses?

    python -m eval.align_draft --draft FOLDER --target FOLDER --out ALIGNED --minutes 3      # one GPU
    python -m eval.align_draft --draft FOLDER --written FILE.jsonl.gz --out ALIGNED          # texts written elsewhere
    python -m eval.align_draft --draft FOLDER --target FOLDER --out ALIGNED --round mxfp4    # for "ALIGNED@mxfp4"
    python -m eval.align_draft --draft FOLDER --target FOLDER --out ALIGNED --smoke          # every step, tiny: a CPU

The draft is trained on texts that the target wrote greedily (`eval.train_head --keep` writes such files, too): on the
target's probabilities where the target is there, else on its choices (Kim and Rush 2016, arXiv 1606.07947:
sequence-level distillation). A share of it goes to keep what the draft knew: KL to its own earlier probabilities.
With --round the draft reads its weights as a cast rounds them while it learns, and gradients pass the rounding as if
it were not there (straight-through: Bengio et al. 2013, arXiv 1308.3432). Activations are not rounded.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_mlspec
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
    parser.add_argument("--round", choices=["mxfp4", "int3", "int2", "ternary"], help="learn with such weights")
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


class Rounded:
    """A draft that reads its weights as a cast to `word` rounds them; gradients reach the weights as they are."""

    def __init__(self, draft: PreTrainedModel, word: str):
        self.draft, self.word = draft, word

    def weights(self) -> dict[str, torch.Tensor]:
        """Those that a cast rounds, by name."""
        with torch.no_grad():
            cast = hf_mlspec.direct_cast(self.draft, self.word)
            parts = {name: part for name, part in cast.named_modules() if hasattr(part, "dequantized")}
            dtype = self.draft.dtype
            found = {f"{name}.weight": part.dequantized(dtype) for name, part in parts.items()}
        own = {name: self.draft.get_parameter(name) for name in found}
        return {name: own[name] + (rounded - own[name]).detach() for name, rounded in found.items()}

    def __call__(self, **inputs):
        return functional_call(self.draft, self.weights(), (), inputs, tie_weights=False)


def divergence(wanted: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
    """KL of logits to log-probabilities, position by position."""
    wanted = wanted.float()
    return (wanted.softmax(-1) * (wanted.log_softmax(-1) - logs)).sum(-1)


def loss_of(
    draft: PreTrainedModel | Rounded, target: PreTrainedModel | None, before: PreTrainedModel, batch, stay: float
) -> torch.Tensor:
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
    student = draft if given.round is None else Rounded(draft, given.round)
    for share in progress:
        stepper.param_groups[0]["lr"] = given.rate * min(share / 0.02 + 0.01, (1 - share) / 0.98, 1.0)
        batch = [part.to(given.device) for part in next(batches)]
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda"):
            loss = loss_of(student, target, before, batch, given.stay)
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


def agreements(draft: PreTrainedModel, texts: list[written.Written], given: argparse.Namespace) -> dict[str, float]:
    """That of the draft, and of its cast where it learns for one."""
    found = {"agreement": round(agreement(draft, texts, given), 4)}
    if given.round is not None:
        found["agreement_rounded"] = round(agreement(Rounded(draft, given.round), texts, given), 4)
    return found


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
    had = agreements(draft, unseen, given)
    told = train(draft, target, before, written.batches(kept, given.rows, given.width, given.seed), given)
    draft = draft.to(torch.bfloat16)
    draft.save_pretrained(given.out)
    AutoTokenizer.from_pretrained(given.draft).save_pretrained(given.out)
    card = {
        "draft": given.draft.resolve().name, "target": None if given.target is None else given.target.resolve().name,
        "texts": len(kept), "tokens": sum(len(text.new) for text in kept), "held_out": held, "seed": given.seed,
        "rows": given.rows, "width": given.width, "rate": given.rate, "stay": given.stay,
        "round": given.round, **{f"{name}_before": share for name, share in had.items()},
        **agreements(draft, unseen, given), **told,
    }  # fmt: skip
    (given.out / "training.json").write_text(json.dumps(card, indent=2) + "\n")
    print(json.dumps(card))


if __name__ == "__main__":
    main()
