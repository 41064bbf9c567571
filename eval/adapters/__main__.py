"""Does a target with a LoRA adapter write the same in a chain as alone, and what does the adapter cost a step?

    python -m eval.adapters --model FOLDER --text TRAIN.jsonl --prompts HumanEval.jsonl
    python -m eval.adapters --shape llama-0.5b        # random weights and adapters: the step's cost alone
    python -m eval.adapters --shape llama-3-8b --device cuda

An adapter of every linear is trained for --steps steps on the text. Then every prompt is decoded by each chain and by
the target alone, in batches, and the ids are compared: `mxfp4` drafts with a cast of the plain base, `nested` with the
4 bits inside the target's own weights. The step is timed beside the base's, both in turn, one token a row. Needs peft.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_mlspec
from eval.adapters.step import step_ratio
from eval.targets import SHAPES, random_model
from hf_mlspec.evaluation import read_prompts

CHAINS = (["mxfp4"], ["mxfp4", "prompt_lookup"], ["nested"])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.adapters", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of the base")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="a base of random weights, whose step is timed")
    parser.add_argument("--text", type=Path, help="what the adapter is trained on, .jsonl of GSM8K or text")
    parser.add_argument("--prompts", type=Path, help="prompts, .jsonl of HumanEval, GSM8K ... or text")
    parser.add_argument("--count", type=int, default=164, help="prompts (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="of training (%(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15, help="of the timed step (%(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    args = parser.parse_args(argv)
    if bool(args.model) == bool(args.shape) or (args.model and not (args.text and args.prompts)):
        parser.error("give --model, --text and --prompts, or --shape")
    return args


def adapted(model: PreTrainedModel, rank: int, trained: bool) -> peft.PeftModel:
    """An adapter beside every linear; one that is not to be trained is random."""
    config = peft.LoraConfig(
        r=rank, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=trained
    )
    return peft.get_peft_model(model, config)


def train(model: peft.PeftModel, tokenizer, text: Path, steps: int) -> list[float]:
    """AdamW on windows of 128 tokens. -> the losses."""
    ids = torch.cat([torch.tensor(tokenizer(one).input_ids) for one in read_prompts(text)[:800]])
    windows = ids[: len(ids) // 128 * 128].view(-1, 128)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    torch.manual_seed(0)
    losses = []
    model.train()
    for _ in range(steps):
        batch = windows[torch.randint(len(windows), (4,))].to(model.device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(args.threads)

    def load() -> PreTrainedModel:
        if args.shape:
            return random_model(args.shape, args.device)
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval().to(args.device)

    model, different = adapted(load(), args.rank, trained=bool(args.model)), 0
    model.eval()
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        losses = train(model, tokenizer, args.text, args.steps)
        print(json.dumps({"loss_first": losses[0], "loss_last": losses[-1]}), flush=True)
        prompts = read_prompts(args.prompts, args.count)
        for levels in CHAINS:
            if levels == ["nested"]:
                hf_mlspec.nest(model)
            found = hf_mlspec.compare(
                model, tokenizer, prompts, levels, max_new_tokens=args.max_new_tokens, batch_size=args.batch_size
            )
            wrong = sum(item.difference is not None for item in found.items)
            different += wrong
            stats = found.speculation
            said = {"levels": levels, "prompts": len(found.items), "different": wrong,
                    "accepted": round(stats.levels[0].accepted / max(stats.levels[0].drafted, 1), 3)}
            print(json.dumps(said), flush=True)
        hf_mlspec.unnest(model)
    base = hf_mlspec.prepare(load())
    hf_mlspec.prepare(model)
    print(json.dumps({"device": torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"}), flush=True)
    for batch in (1, 8):
        print(json.dumps(step_ratio(base, model, batch, args.repeats)), flush=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
