"""Which models does a soak ask, what is asked of them, and what is the right answer?"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hf_mlspec

PAD = 0
_ASKS, _BATCH = 12, 3  # requests of a model; the most rows of a call
_SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512,
          "initializer_range": 0.3}  # fmt: skip
_TEXTS = ("import math\n\n\nclass Vector:\n    def __init__(self, x, y):\n", "def mean(values):\n    \"\"\"The mean",
          "Compute the mean of an array along the given axis.", "for name in sorted(", "Train a model with gradient")
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Ask:
    """One request; seed: of one that is sampled, None: greedy."""

    prompt: tuple[int, ...]
    new: int
    seed: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of generate and of a request."""
        sampled = {} if self.seed is None else {"temperature": 0.9, "top_k": 0}
        return {"max_new_tokens": self.new, "do_sample": self.seed is not None, "pad_token_id": PAD,
                "eos_token_id": None, **sampled}  # fmt: skip


@dataclass
class Asked:
    """A target. draft: a smaller model of its vocabulary. engines: that run it. words: levels it takes as it is, and
    while it is nested. right: new tokens of each request on each engine, by the target alone."""

    name: str
    model: PreTrainedModel
    draft: PreTrainedModel
    engines: tuple[str, ...]
    asks: tuple[Ask, ...]
    words: tuple[tuple[str, ...], tuple[str, ...]]
    right: dict[tuple[str, Ask], list[int]]
    nested: bool = False

    @property
    def greedy(self) -> list[Ask]:
        """Requests whose answers do not hang on a seed, which calls of generate cannot give for each row."""
        return [ask for ask in self.asks if ask.seed is None]


def alone(model: PreTrainedModel, ask: Ask, engine: str) -> list[int]:
    """What the target writes without levels and others."""
    config = {"engine": engine}
    if ask.seed is None:
        ids = torch.tensor([ask.prompt], device=model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), assistant_models=[], speculation_config=config,
                             **ask.options)  # fmt: skip
        return out[0, len(ask.prompt) :].tolist()
    request = hf_mlspec.Request(list(ask.prompt), seed=ask.seed, **ask.options)
    (done,) = hf_mlspec.generate_stream(model, [request], max_batch=1, speculation_config=config)
    if done.error is not None:
        raise done.error
    return done.new_tokens


def everything(seed: int, device: str) -> list[Asked]:
    """The demo pair and three random models, with the right answers."""
    chance = random.Random(seed)
    target, draft = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) for folder in
                     hf_mlspec.demo_pair())  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(hf_mlspec.demo_pair()[0])
    texts = [tuple(tokenizer(text)["input_ids"]) for text in _TEXTS]
    found = [_asked("demo pair", target, draft, _engines("cpu", "cuda", device=device), chance, device, texts)]
    for number, (name, kind, config, more, engines) in enumerate((
        ("llama", LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}, ("cpu", "cuda")),
        ("qwen3", Qwen3ForCausalLM, Qwen3Config, {}, ("cpu", "cuda")),
        ("mixtral", MixtralForCausalLM, MixtralConfig, _EXPERTS, ("cpu",)),
    )):  # fmt: skip
        torch.manual_seed(number)
        target = kind(config(**_SIZES, **more)).to(torch.bfloat16)
        near = kind(target.config)
        near.load_state_dict(target.state_dict())
        with torch.no_grad():
            for weight in near.parameters():
                weight += 0.02 * weight.std() * torch.randn_like(weight)
        found.append(_asked(name, target, near.to(torch.bfloat16), _engines(*engines, device=device), chance, device))
    return found


def _engines(*engines: str, device: str) -> tuple[str, ...]:
    return engines if device == "cpu" else ("cuda",)


def _asked(name: str, target: PreTrainedModel, draft: PreTrainedModel, engines: tuple[str, ...],
           chance: random.Random, device: str, prompts: list[tuple[int, ...]] = ()) -> Asked:  # fmt: skip
    target, draft = target.eval().to(device), draft.eval().to(device)
    for model in (target, draft):
        model.generation_config.eos_token_id = None
    asks = []
    for number in range(_ASKS):
        prompt = prompts[number % len(prompts)] if prompts else _drawn(chance, target.config.vocab_size)
        seed = chance.randrange(1 << 20) if number % 3 == 2 else None
        asks.append(Ask(prompt, chance.choice([1, 4, 9, 16, 24]), seed))
    found = Asked(name, target, draft, engines, tuple(asks),
                  (("mxfp4", "int3", "early_exit:1"), ("nested", "nested4a8")), {})  # fmt: skip
    found.right = {(engine, ask): alone(target, ask, engine) for engine in engines for ask in asks}
    return found


def _drawn(chance: random.Random, vocabulary: int) -> tuple[int, ...]:
    """A prompt; every other one repeats itself, so that lookups find drafts."""
    row = [chance.randrange(3, vocabulary) for _ in range(chance.choice([1, 3, 12, 40]))]
    return tuple(row if chance.random() < 0.5 else (row[:5] * len(row))[: len(row)])
