"""What is a small mixture in gpt-oss's form, how is it trained fast, and does its router choose?"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter

from eval.training.steps import rounded_products, token_losses

EXPERTS, CHOSEN, INNER = 8, 2, 224
BALANCE = 0.01  # of the loss that spreads tokens over experts
SHAPE = {"hidden_size": 320, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2,
         "head_dim": 64}  # fmt: skip
SMOKE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
         "head_dim": 32}  # fmt: skip
WINDOW, ORIGINAL, FACTOR = 128, 512, 4.0  # of every other layer; of YaRN


def config_of(shape: dict, vocab: int, pad: int, eos: int, experts: int = EXPERTS, inner: int = INNER) -> GptOssConfig:
    """Windows on every other layer, YaRN without truncation, biases, sinks; one expert: a dense model."""
    return GptOssConfig(
        **shape, vocab_size=vocab, intermediate_size=inner, num_local_experts=experts,
        num_experts_per_tok=min(CHOSEN, experts), sliding_window=WINDOW,
        max_position_embeddings=int(ORIGINAL * FACTOR),
        rope_parameters={"rope_type": "yarn", "rope_theta": 10_000.0, "factor": FACTOR, "beta_fast": 32.0,
                         "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": ORIGINAL},
        tie_word_embeddings=True, router_aux_loss_coef=BALANCE, pad_token_id=pad, bos_token_id=eos, eos_token_id=eos)


def dense_of(shape: dict, vocab: int, pad: int, eos: int) -> GptOssConfig:
    """A model of as many active weights whose layers have one expert, to which all tokens go."""
    return config_of(shape, vocab, pad, eos, experts=1, inner=CHOSEN * INNER)


def new_model(config: GptOssConfig, device: str) -> GptOssForCausalLM:
    """Float32 weights, and experts that are trained as `all_experts` multiplies them."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(device)
    for module in model.modules():
        if type(module) is GptOssExperts:
            module.forward = partial(all_experts, module)
    return model


def all_experts(experts: GptOssExperts, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What the module computes. Every expert multiplies every token, which takes less time on a GPU than sorting
    tokens by a few small experts. hidden ``[tokens, hidden]``, chosen and weights ``[tokens, chosen]``."""
    everyone = hidden.expand(experts.num_experts, -1, -1)
    gate_up = torch.bmm(everyone, experts.gate_up_proj) + experts.gate_up_proj_bias[:, None]
    out = torch.bmm(experts._apply_gate(gate_up), experts.down_proj) + experts.down_proj_bias[:, None]
    shares = weights.new_zeros(len(hidden), experts.num_experts).scatter(1, chosen, weights)
    return torch.einsum("te,eth->th", shares.to(out.dtype), out).to(hidden.dtype)


def balanced_loss(model: GptOssForCausalLM, ids: Tensor) -> Tensor:
    """Cross-entropy of ids int64 ``[rows, tokens + 1]`` and, of several experts, the loss that balances them."""
    with rounded_products(model.device.type):
        out = model(input_ids=ids[:, :-1], use_cache=False, output_router_logits=model.config.num_local_experts > 1)
    loss = F.cross_entropy(out.logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    return loss if out.aux_loss is None else loss + BALANCE * out.aux_loss


@torch.no_grad()
def held_out(model: GptOssForCausalLM, stream: np.ndarray, length: int, windows: int) -> tuple[float, float]:
    """Mean loss in nats and share of right tokens of ``windows`` windows of a stream ``[tokens]``, at most as many as
    it has. ValueError for a stream that is shorter than one."""
    windows = min(windows, (len(stream) - 1) // length)
    if windows < 1:
        raise ValueError(f"a held-out text has {len(stream):,} tokens, a window needs {length + 1:,}")
    found = [token_losses(model, _window(stream, at, length).to(model.device)) for at in range(windows)]
    losses, right = (torch.cat(part).double().mean().item() for part in zip(*found, strict=True))
    return losses, right


@torch.no_grad()
def routing(model: GptOssForCausalLM, stream: np.ndarray, length: int, windows: int) -> list[dict[str, float]]:
    """Of every layer, in bits: the entropy of how often experts are chosen, log2 of their number where all are alike,
    and the mean entropy of a token's weights over all experts, which is less where tokens differ in what they choose.
    least, most: the smallest and largest share of choices that an expert has."""
    probabilities: dict[nn.Module, list[Tensor]] = {m: [] for m in model.modules() if type(m) is GptOssTopKRouter}
    hooks = [router.register_forward_hook(lambda module, _, out: probabilities[module].append(out[0].float()))
             for router in probabilities]
    for at in range(min(windows, (len(stream) - 1) // length)):
        token_losses(model, _window(stream, at, length).to(model.device))
    for hook in hooks:
        hook.remove()
    return [_spread(torch.cat(logits), router.top_k) for router, logits in probabilities.items()]


def _spread(logits: Tensor, chosen: int) -> dict[str, float]:
    """Of router logits ``[tokens, experts]``."""
    counts = torch.bincount(logits.topk(chosen).indices.flatten(), minlength=logits.shape[1]).double()
    shares = counts / counts.sum()
    return {"chosen_bits": _bits(shares).item(), "token_bits": _bits(logits.double().softmax(-1)).mean().item(),
            "least": shares.min().item(), "most": shares.max().item()}


def _bits(shares: Tensor) -> Tensor:
    """The entropy along the last axis."""
    return -(shares * shares.clamp(min=1e-300).log2()).sum(-1)


def _window(stream: np.ndarray, at: int, length: int) -> Tensor:
    """int64 ``[1, length + 1]``."""
    return torch.from_numpy(stream[at * length : (at + 1) * length + 1].astype(np.int64))[None]
