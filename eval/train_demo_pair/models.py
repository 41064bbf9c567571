"""How are the demo target and its draft trained, given the tokens?

The target is trained on windows of code and prose. In the last third every second step reads MXFP4-rounded weights
(straight-through: the gradient is applied to the unrounded ones), so that its direct cast chooses the same tokens more
often. The draft is distilled from the target's probabilities, half on the same text, half on text the target wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eval.progress import Progress
from eval.train_demo_pair.tokens import Streams, windows

NOISE_FROM = 0.65  # of the target's training; from here on every second step reads rounded weights
TARGET_PART, WRITING_PART, DRAFT_PART = 0.62, 0.10, 0.28  # of the minutes
WRITTEN_LENGTH = 320  # tokens a written text has, its prompt of 32, 64 or 128 included


@dataclass(frozen=True)
class Recipe:
    """Sizes in tokens; a number of steps that is None means: as many as its part of the minutes allows."""

    target: dict = field(default_factory=lambda: {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 896,
                                                  "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64})
    draft: dict = field(default_factory=lambda: {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 384,
                                                 "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64})
    vocab_size: int = 4096
    window: int = 1024
    rows: int = 64
    written_rows: int = 4096
    target_rate: float = 4e-3
    draft_rate: float = 6e-3
    minutes: float = 4.5
    target_steps: int | None = None
    written_batches: int | None = None
    draft_steps: int | None = None
    tokenizer_bytes: int = 60_000_000
    max_bytes: int | None = None  # of the corpus
    prompts: int = 32  # of each kind, for the measurement
    seed: int = 0


def smoke_recipe() -> Recipe:
    """Every step in seconds on a CPU; the models are useless."""
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 1,
             "num_key_value_heads": 1, "head_dim": 32}
    return Recipe(target=shape | {"hidden_size": 64, "num_hidden_layers": 2}, draft=shape, vocab_size=600, window=1024,
                  rows=2, written_rows=4, max_bytes=8_000_000, target_steps=20, written_batches=1, draft_steps=10,
                  prompts=2)


def new_model(shape: dict, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, device: str) -> LlamaForCausalLM:
    eos = tokenizer.eos_token_id
    return LlamaForCausalLM(LlamaConfig(
        **shape, vocab_size=recipe.vocab_size, max_position_embeddings=recipe.window, tie_word_embeddings=True,
        rms_norm_eps=1e-6, pad_token_id=tokenizer.pad_token_id, bos_token_id=eos, eos_token_id=eos)).to(device)


def mxfp4_rounded(weight: torch.Tensor) -> torch.Tensor:
    """float32 ``[..., in]`` -> the values its MXFP4 direct cast holds (OCP MX v1.0, rule "ocp_floor")."""
    blocks = weight.unflatten(-1, (-1, 32))
    # frexp's mantissa is in [0.5, 1), so floor(log2) is one less; the largest exponent of E2M1 is 2.
    exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True)).exponent - 3
    scaled = torch.ldexp(blocks, -exponent)
    step = torch.where(scaled.abs() < 2, 0.5, torch.where(scaled.abs() < 4, 1.0, 2.0))
    return torch.ldexp((torch.round(scaled / step) * step).clamp(-6, 6), exponent).flatten(-2)


@contextmanager
def rounded(matrices: list[torch.nn.Parameter]) -> Iterator[None]:
    """Inside, the matrices hold their MXFP4 values, afterwards their own; forward and backward both belong inside."""
    own = torch.cat([m.detach().flatten() for m in matrices])
    cast = mxfp4_rounded(own.view(-1, 32)).flatten()
    sizes = [m.numel() for m in matrices]
    try:
        for matrix, values in zip(matrices, cast.split(sizes), strict=True):
            matrix.data.copy_(values.view_as(matrix))
        yield
    finally:
        for matrix, values in zip(matrices, own.split(sizes), strict=True):
            matrix.data.copy_(values.view_as(matrix))


def layer_matrices(model: LlamaForCausalLM) -> list[torch.nn.Parameter]:
    return [p for p in model.model.layers.parameters() if p.ndim == 2]


def train(
    model: LlamaForCausalLM, loss_of: Callable[[bool], torch.Tensor], rate: float, steps: int | None, seconds: float,
    noise_from: float = 1.0,
) -> dict:
    """Runs the training; ``loss_of(noisy)`` draws a batch and gives its loss. -> steps, seconds and last losses.

    Muon for the layers' matrices, AdamW for embedding and norms; the rate rises over 2 % and falls in a straight line.
    """
    matrices = layer_matrices(model)
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    steppers = [torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
                torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)]
    loss_of(False).backward()  # compiles before the clock starts
    model.zero_grad()
    progress, losses = Progress(steps, seconds), []
    for share in progress:
        noisy = share >= noise_from and progress.done % 2 == 1
        for group in [g for stepper in steppers for g in stepper.param_groups]:
            group["lr"] = rate * min(share / 0.02 + 0.01, (1 - share) / 0.98, 1.0)
        with rounded(matrices) if noisy else nullcontext():
            loss = loss_of(noisy)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
        model.zero_grad()
        if progress.done % 100 == 0:  # reading a loss waits for the device
            losses.append(round(loss.item(), 4))
            print(f"step {progress.done}, {progress.elapsed():.0f} s, loss {losses[-1]}", flush=True)
    return {"steps": progress.done, "seconds": round(progress.elapsed(), 1), "losses": losses}


def compiled(model: LlamaForCausalLM, compile_layers: bool) -> LlamaForCausalLM:
    if compile_layers:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    return model


def logits_of(model: LlamaForCausalLM, ids: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return F.linear(model.model(input_ids=ids, use_cache=False).last_hidden_state, head)


def train_target(model: LlamaForCausalLM, streams: Streams, recipe: Recipe, compile_layers: bool) -> dict:
    device, embedding = model.device.type, model.get_input_embeddings().weight
    entropy = torch.compile(F.cross_entropy) if compile_layers else F.cross_entropy
    compiled(model, compile_layers)

    def loss_of(noisy: bool) -> torch.Tensor:
        ids = streams.windows(recipe.rows, recipe.window)
        # The cast rounds the head, not the embedding it is tied to.
        head = embedding + (mxfp4_rounded(embedding.detach()) - embedding.detach()) if noisy else embedding
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = logits_of(model, ids, head)
            return entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    seconds = 60 * recipe.minutes * TARGET_PART
    return train(model, loss_of, recipe.target_rate, recipe.target_steps, seconds, NOISE_FROM)


@torch.no_grad()
def write(target: LlamaForCausalLM, streams: Streams, recipe: Recipe) -> tuple[torch.Tensor, int]:
    """What the target writes greedily behind random windows, int16 ``[tokens]``, and the number of batches.

    It writes on behind an EOS, as the streams do.
    """
    target.generation_config.eos_token_id = None
    progress = Progress(recipe.written_batches, 60 * recipe.minutes * WRITING_PART)
    parts = []
    for _ in progress:
        prompts = streams.windows(recipe.written_rows, (32, 64, 128)[progress.done % 3])
        texts = target.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
                                max_new_tokens=WRITTEN_LENGTH - prompts.shape[1])
        parts.append(texts.to(torch.int16).flatten())
    return torch.cat(parts), progress.done


def distil(draft: LlamaForCausalLM, target: LlamaForCausalLM, streams: Streams, written: torch.Tensor, recipe: Recipe,
           compile_layers: bool) -> dict:
    """Trains the draft on KL(target || draft) plus half the cross-entropy of the target's first choice."""
    device = draft.device.type
    distance = torch.compile(distillation_loss) if compile_layers else distillation_loss
    for model in (draft, target):
        compiled(model, compile_layers)

    def loss_of(_noisy: bool) -> torch.Tensor:
        half = max(1, recipe.rows // 2)
        ids = torch.cat([streams.windows(recipe.rows - half, recipe.window), windows(written, half, recipe.window)])
        with torch.autocast(device, dtype=torch.bfloat16):
            with torch.no_grad():
                wanted = logits_of(target, ids, target.get_input_embeddings().weight)
            return distance(logits_of(draft, ids, draft.get_input_embeddings().weight), wanted)

    return train(draft, loss_of, recipe.draft_rate, recipe.draft_steps, 60 * recipe.minutes * DRAFT_PART)


def distillation_loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Both ``[batch, length, vocab]``."""
    logs = logits.float().log_softmax(-1).flatten(0, 1)
    wanted = wanted.float().flatten(0, 1)
    probabilities = wanted.softmax(-1)
    divergence = (probabilities * (wanted.log_softmax(-1) - logs)).sum(-1).mean()
    return divergence + 0.5 * F.nll_loss(logs, wanted.argmax(-1))
