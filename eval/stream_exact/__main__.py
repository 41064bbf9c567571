"""Does every request of a stream have the tokens that it has alone, whoever comes, goes and shares its beginning?

    python -m eval.stream_exact --streams 1000              # random small models and the demo pair
    python -m eval.stream_exact --streams 100 --device cuda --model FOLDER --draft DRAFT

Every stream has a random model, chain, number of slots, chunk and budget of prefixes; requests arrive at random, with
prompts of 1 to 900 tokens of which some begin alike, limits of 1 to 40 tokens, greedy or sampled with a seed, and some
are cancelled on the way. Every answer is compared with that of the request alone: greedy with `generate`, sampled with
a stream of its own without levels. Cancelled ones must have its first tokens. Exit status 1 for a mismatch.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hf_mlspec

_MODELS = 6  # random ones, beside the demo pair
_SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 2048}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.stream_exact", description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--model", help="folder of a target, the only one; with --draft")
    parser.add_argument("--draft", help="folder of its draft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--seconds", type=float, help="stop after so many")
    args = parser.parse_args(argv)
    if bool(args.model) != bool(args.draft):
        parser.error("--model and --draft go together: a target and its draft")
    return args


def pair(folder: str, draft: str, device: str) -> tuple[PreTrainedModel, list[Any]]:
    """The target of a folder, with its draft."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().to(device), [draft]


def models(device: str) -> list[tuple[PreTrainedModel, list[Any]]]:
    """Targets, each with a draft of its vocabulary."""
    made = []
    for number in range(_MODELS):
        torch.manual_seed(number)
        kind, config = [(LlamaForCausalLM, LlamaConfig), (Qwen3ForCausalLM, Qwen3Config)][number % 2]
        target, draft = (kind(config(**_SIZES)).to(device, torch.bfloat16).eval() for _ in range(2))
        draft.load_state_dict(target.state_dict())
        with torch.no_grad():
            for weight in draft.parameters():
                weight += 0.02 * weight.std() * torch.randn_like(weight)
        made.append((target, [draft]))
    return [*made, pair(*map(str, hf_mlspec.demo_pair()), device)]


def requests_of(rng: random.Random, vocabulary: int) -> list[dict[str, Any]]:
    """Arguments of one stream's requests."""
    shared = [[rng.randrange(3, vocabulary) for _ in range(rng.choice([70, 200, 600]))] for _ in range(2)]
    made = []
    for number in range(rng.randrange(3, 11)):
        prompt = [rng.randrange(3, vocabulary) for _ in range(rng.choice([1, 5, 30, 120, 300]))]
        if rng.random() < 0.7:
            beginning = rng.choice(shared)
            prompt = beginning[: rng.choice([len(beginning), len(beginning) // 2])] + prompt
        options: dict[str, Any] = {"do_sample": False}
        if rng.random() < 0.3:
            options = {"do_sample": True, "temperature": rng.choice([0.7, 1.0]), "seed": rng.randrange(1000)}
        made.append({"id": number, "input_ids": prompt, "max_new_tokens": rng.choice([1, 4, 12, 40]),
                     "pad_token_id": 0, **options,
                     "eos_token_id": [] if rng.random() < 0.5 else [rng.randrange(3, vocabulary)]})
    return made


def alone(target: PreTrainedModel, request: dict[str, Any]) -> list[int]:
    """What the request has without others, levels, chunks and prefixes."""
    prompt, own = request["input_ids"], {k: v for k, v in request.items() if k not in ("id", "input_ids")}
    if own["do_sample"]:
        (done,) = hf_mlspec.generate_stream(target, [request], max_batch=1, prefill_chunk=None)
        return done.new_tokens
    ids = torch.tensor([prompt], device=target.device)
    out = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_models=[], **own)
    return out[0, len(prompt) :].tolist()


def streamed(rng: random.Random, target: PreTrainedModel, draft: list[Any],
             asked: list[dict[str, Any]]) -> list[hf_mlspec.Completion]:
    """One stream of these requests, with everything else at random."""
    made = [hf_mlspec.Request(**one) for one in asked]
    leaving = [one for one in made if rng.random() < 0.15]

    def source() -> Iterator[Any]:
        for one in made:
            while rng.random() < 0.4:
                yield None
                if leaving and rng.random() < 0.2:
                    leaving.pop().cancel()
            yield one

    config = rng.choice([None, {"num_draft_tokens": 3}])
    options = {"max_batch": rng.choice([1, 2, 3, 6]), "prefill_chunk": rng.choice([16, 64, 512, None]),
               "prefix_cache": rng.choice([None, 40_000, "64MiB"]), "speculation_config": config,
               "assistant_models": rng.choice([[], draft, ["mxfp4", *draft], ["prompt_lookup"]])}
    return list(hf_mlspec.generate_stream(target, source(), **options))


def wrong(done: hf_mlspec.Completion, expected: list[int]) -> str:
    """What is wrong with an answer; "" for nothing."""
    if done.error is not None:
        return f"failed: {done.error!r}"
    new = done.new_tokens
    if new != (expected[: len(new)] if done.finish_reason == "cancelled" else expected):
        return f"{done.finish_reason}: {new} instead of {expected}"
    return ""


def run(streams: int, seed: int = 0, device: str = "cpu", seconds: float | None = None,
        pairs: list[tuple[PreTrainedModel, list[Any]]] | None = None) -> Counter:
    """Counts of streams, answers by their end, prefix tokens and mismatches, which are printed. pairs: targets with
    their levels; None: `models`."""
    counts, pairs, begin = Counter(mismatches=0), pairs or models(device), time.perf_counter()
    for number in range(streams):
        if seconds is not None and time.perf_counter() - begin > seconds:
            break
        rng = random.Random(f"{seed} {number}")
        target, draft = rng.choice(pairs)
        asked = requests_of(rng, target.config.vocab_size)
        expected = [alone(target, one) for one in asked]
        done = streamed(rng, target, draft, asked)
        counts["streams"] += 1
        counts["lost"] += len(asked) - len({one.id for one in done})
        counts["prefix tokens"] += hf_mlspec.last_stats(target).prefix_tokens
        for one in done:
            counts[one.finish_reason] += 1
            if problem := wrong(one, expected[one.id]):
                counts["mismatches"] += 1
                print(f"stream {number}, request {one.id}: {problem}", flush=True)
    counts["mismatches"] += counts["lost"]
    return counts


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.set_num_threads(1)
    begin = time.perf_counter()
    pairs = [pair(args.model, args.draft, args.device)] if args.model else None
    counts = run(args.streams, args.seed, args.device, args.seconds, pairs)
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())), end="")
    print(f" ({time.perf_counter() - begin:.0f} s on {args.device}, {Path(sys.executable).name})")
    return int(counts["mismatches"] > 0)


if __name__ == "__main__":
    sys.exit(main())
