"""What is an EAGLE-3 head while it trains, and what does it lose on a text? In plain torch, with gradients.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840), section 3: at step 0 pair i is token i + 1 beside the target's hidden
states of token i, and predicts token i + 2. At step s the pair is token i + 1 + s beside what step s - 1 gave at i,
and predicts token i + 2 + s: so the head learns to go on from its own states ("training-time test"). It then sees the
pairs of step 0 up to i, and those of steps 1 .. s at i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb


@dataclass
class Losses:
    """loss: of all steps. right: per step, how many first choices were the target's where all before were; asked:
    out of how many."""

    loss: Tensor
    right: list[int]
    asked: list[int]


class Attention(nn.Module):
    """Of the head's layer, over pairs of all steps so far."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config, width, dim = config, config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * width, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * width, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * width, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, width, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], before: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x `[batch, pairs, 2 hidden]`; keys and values of this step are appended to `before`."""
        config, heads = self.config, (*x.shape[:2], -1, self.config.head_dim)
        q, k, v = (part(x).view(heads).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        groups = config.num_attention_heads // config.num_key_value_heads
        before.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        scale = config.head_dim**-0.5
        first = q @ before[0][0].transpose(2, 3) * scale
        later = torch.ones(first.shape[2:], dtype=torch.bool, device=x.device).triu(1)
        scores = [first.masked_fill(later, float("-inf"))]
        scores += [(q * keys).sum(-1, keepdim=True) * scale for keys, _ in before[1:]]
        weights = torch.cat(scores, -1).float().softmax(-1).to(x.dtype)
        own, weights = weights[..., first.shape[3] :], weights[..., : first.shape[3]]
        out = weights @ before[0][1]
        for place, (_, values) in enumerate(before[1:]):
            out = out + own[..., place : place + 1] * values
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Head(nn.Module):
    """An EAGLE-3 head of one layer. table: the target's embedding, which is not trained.

    taps: entries of the target's ``hidden_states`` that it reads. targets: int64 `[draft_vocab]`, the target's tokens
    that it drafts.
    """

    def __init__(self, config: LlamaConfig, taps: list[int], target_hidden: int, targets: Tensor, table: Tensor):
        super().__init__()
        self.config, self.taps = config, taps
        width = config.hidden_size
        self.fc = nn.Linear(len(taps) * target_hidden, width, bias=False)
        self.input_layernorm, self.hidden_norm = (LlamaRMSNorm(width, config.rms_norm_eps) for _ in range(2))
        self.post_attention_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.self_attn, self.mlp = Attention(config), LlamaMLP(config)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, len(targets), bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("targets", targets, persistent=False)
        self.register_buffer("table", table, persistent=False)

    def forward(self, ids: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        """ids int64 `[batch, length]`, states `[batch, length, taps * target_hidden]` -> logits of every step
        `[batch, length - 1, draft_vocab]`; those of step s at i are of token i + 2 + s."""
        hidden, before, found = self.fc(states[:, :-1]), [], []
        pairs = hidden.shape[1]
        for step in range(steps):
            tokens = F.pad(ids[:, 1 + step :], (0, step))
            embedded = F.embedding(tokens, self.table).to(hidden.dtype)
            positions = torch.arange(1 + step, 1 + step + pairs, device=ids.device)[None]
            both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
            hidden = hidden + self.self_attn(both, self.rotary(hidden, positions), before)
            hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
            found.append(self.lm_head(self.norm(hidden)))
        return found

    def losses(self, ids: Tensor, written: Tensor, states: Tensor, logits: Tensor, steps: int, decay: float) -> Losses:
        """Against the target's logits `[batch, length, vocab]`, where it wrote the token that is predicted.

        The loss of a step is KL(target || head) over the head's tokens plus half the cross-entropy of the target's
        first choice where the head knows it; that of step s counts decay ** s.
        """
        wanted = logits[..., self.targets].float()
        best, reverse = logits.argmax(-1), torch.full((logits.shape[-1],), -1, device=ids.device)
        reverse[self.targets] = torch.arange(len(self.targets), device=ids.device)
        total, right, asked = logits.new_zeros((), dtype=torch.float32), [], []
        alive = None
        for step, own in enumerate(self(ids, states, steps)):
            count = ids.shape[1] - 2 - step  # pairs whose token is there
            own = own[:, :count].float()
            aim, chosen = wanted[:, 1 + step : 1 + step + count], best[:, 1 + step : 1 + step + count]
            mask = written[:, 2 + step : 2 + step + count]
            logs, known = own.log_softmax(-1), reverse[chosen]
            divergence = (aim.softmax(-1) * (aim.log_softmax(-1) - logs)).sum(-1)
            entropy = F.nll_loss(logs.flatten(0, 1), known.flatten().clamp(min=0), reduction="none").view_as(known)
            each = divergence + 0.5 * torch.where(known >= 0, entropy, 0.0)
            total = total + decay**step * (each * mask).sum() / mask.sum().clamp(min=1)
            with torch.no_grad():
                alive = mask if alive is None else alive[:, :count] & mask
                hit = own.argmax(-1) == known
                asked.append(int(alive.sum()))
                alive = alive & hit
                right.append(int(alive.sum()))
        return Losses(total, right, asked)
