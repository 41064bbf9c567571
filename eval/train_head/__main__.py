"""How is an EAGLE-3 head made for a target, from the target's own outputs, and how often is it right?

    python -m eval.train_head --target FOLDER --out HEAD --minutes 3               # one GPU; on a CPU the same, slower
    python -m eval.train_head --target FOLDER --out HEAD --smoke                   # every step, tiny: a CPU, a minute
    python -m eval.train_head --target FOLDER --written FILE.jsonl.gz --out HEAD   # texts that were written before

The target writes greedily behind the beginnings of texts (--text, default: the standard library of Python; prompts of
evaluations do not belong there), or did so before (--written; --keep FILE keeps what it writes). The head learns from
its hidden states and logits on these texts, and is saved in the layout of the `speculators` package, with a card.
With --cast a line more says how often it is right below a cast of the target, by whose hidden states it reads; with
--head that is all, of a head that is there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import hf_mlspec
from eval import written
from eval.progress import Progress
from eval.train_head.folder import load_head, save_head
from eval.train_head.head import Head

DECAY = 0.8  # of what a step counts, by the one before it (EAGLE-3's own training)
HELD_OUT = 0.05  # of the texts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.train_head", description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--out", type=Path, help="folder that gets the head")
    written.add_arguments(parser)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=3.0, help="of training")
    parser.add_argument("--steps", type=int, help="of training, instead of minutes")
    parser.add_argument("--rows", type=int, default=32, help="texts in a step")
    parser.add_argument("--width", type=int, default=320, help="tokens of a text, at most")
    parser.add_argument("--test-steps", type=int, default=5, help="tokens the head drafts on while it trains")
    parser.add_argument("--draft-vocab", type=int, default=0, help="most frequent tokens that it drafts, 0: all")
    parser.add_argument("--intermediate", type=int, help="of its MLP; default: the target's")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--cast", help="such as mxfp4: measure it below this cast of the target, too")
    parser.add_argument("--head", type=Path, help="measure this head, which this program made, and train none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few texts and steps")
    given = parser.parse_args()
    if (given.head is None) == (given.out is None) or (given.head is not None and given.cast is None):
        parser.error("name a folder that gets the head (--out), or a head and the cast that it is measured below")
    if given.smoke:
        given.prompts, given.new_tokens, given.rows, given.width, given.steps = 16, 24, 4, 64, given.steps or 8
    return given


def new_head(given: argparse.Namespace, target: PreTrainedModel, texts: list[written.Written]) -> Head:
    """A head of the target's width; its norm and output begin as the target's."""
    config = target.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layer = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_hidden_layers=1, head_dim=dim,
        intermediate_size=given.intermediate or config.intermediate_size,
        num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads,
        max_position_embeddings=config.max_position_embeddings, rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=False, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    counts = Counter(token for text in texts for token in text.new)
    order = sorted(range(config.vocab_size), key=lambda token: (-counts[token], token))
    targets = torch.tensor(sorted(order[: given.draft_vocab or config.vocab_size]))
    count = config.num_hidden_layers
    taps = sorted({min(2, count), count // 2, max(count - 1, 0)})
    table = target.get_input_embeddings().weight.detach().float()
    head = Head(layer, taps, config.hidden_size, targets, table)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[targets])
        head.norm.weight.copy_(target.model.norm.weight)
    return head.to(target.device)


class Lessons:
    """Batches with what the target says of them. judge: whose choices the head is to guess, None: the target's."""

    def __init__(
        self, target: PreTrainedModel, texts: list[written.Written], given: argparse.Namespace, seed: int,
        judge: PreTrainedModel | None = None,
    ):  # fmt: skip
        self.target, self.steps, self.judge = target, given.test_steps, judge
        self.batches = written.batches(texts, given.rows, given.width, seed)

    def losses(self, head: Head):
        """Of one batch."""
        ids, wrote = (part.to(self.target.device) for part in next(self.batches))
        with torch.no_grad():
            said = self.target(input_ids=ids, output_hidden_states=True, use_cache=False)
            states = torch.cat([said.hidden_states[tap] for tap in head.taps], -1)
            logits = said.logits if self.judge is None else self.judge(input_ids=ids, use_cache=False).logits
        with torch.autocast(self.target.device.type, dtype=torch.bfloat16):
            return head.losses(ids, wrote, states, logits, self.steps, DECAY)


def train(head: Head, lessons: Lessons, given: argparse.Namespace) -> dict[str, Any]:
    stepper = torch.optim.AdamW(head.parameters(), lr=given.rate, betas=(0.9, 0.95), weight_decay=0.01)
    progress, losses = Progress(given.steps, 60 * given.minutes), []
    for share in progress:
        stepper.param_groups[0]["lr"] = given.rate * min(share / 0.02 + 0.01, (1 - share) / 0.98, 1.0)
        loss = lessons.losses(head).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        stepper.step()
        stepper.zero_grad()
        if progress.done % 100 == 0:
            losses.append(round(loss.item(), 4))
            print(f"step {progress.done}, {progress.elapsed():.0f} s, loss {losses[-1]}", flush=True)
    return {"steps": progress.done, "seconds": round(progress.elapsed(), 1), "loss": round(loss.item(), 4)}


@torch.no_grad()
def measured(head: Head, lessons: Lessons, batches: int) -> list[float]:
    """The share of first choices that are the target's, by their place in a draft, where all before were."""
    found = [lessons.losses(head) for _ in range(batches)]
    right, asked = (torch.tensor([getattr(one, name) for one in found]).sum(0) for name in ("right", "asked"))
    return [round(float(a / b.clamp(min=1)), 4) for a, b in zip(right, asked, strict=True)]


def by_states(head: Head, target: PreTrainedModel, texts: list[written.Written], given) -> dict[str, list[float]]:
    """What `measured` finds on the same texts, by whose states the head reads, and whose choices it guesses."""
    cast = hf_mlspec.direct_cast(target, given.cast)
    models, found = {"target": target, given.cast: cast}, {}
    for reads, model in models.items():
        for guesses, judge in models.items():
            lessons = Lessons(model, texts, given, given.seed + 1, judge)
            found[f"states of {reads}, choices of {guesses}"] = measured(head, lessons, 2 if given.smoke else 20)
    return found


def main() -> None:
    given = arguments()
    torch.manual_seed(given.seed)
    dtype = torch.bfloat16
    target = (
        AutoModelForCausalLM.from_pretrained(given.target, dtype=dtype).to(given.device).eval().requires_grad_(False)
    )
    begin = time.monotonic()
    texts = written.texts_of(given, target)
    print(
        f"{len(texts)} texts, {sum(len(text.new) for text in texts)} tokens, {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    held = max(int(HELD_OUT * len(texts)), 1)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(given.seed)).tolist()
    kept, unseen = [texts[i] for i in order[held:]], [texts[i] for i in order[:held]]
    if given.head is not None:
        print(json.dumps(by_states(load_head(given.head, target), target, unseen, given)))
        return
    head = new_head(given, target, kept)
    told = train(head, Lessons(target, kept, given, given.seed), given)
    places = measured(head, Lessons(target, unseen, given, given.seed + 1), 2 if given.smoke else 20)
    card = {
        "target": given.target.resolve().name,
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "a CPU",
        "sources": [str(path.name) for path in given.text] or ["Python's standard library"],
        "texts": len(kept), "tokens": sum(len(text.new) for text in kept), "held_out": held, "seed": given.seed,
        "rows": given.rows, "width": given.width, "rate": given.rate, "test_steps": given.test_steps,
        "draft_vocab": len(head.targets), "accepted_by_position": places, **told,
    }  # fmt: skip
    if given.cast is not None:
        card["by_states"] = by_states(head, target, unseen, given)
    save_head(head, target, given.out, card)
    print(json.dumps(card))


if __name__ == "__main__":
    main()
