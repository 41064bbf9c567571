"""Which model is trained on at longer texts: with more positions, and with attention that holds no mask?"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

POSITIONS, ROWS, RATE, MINUTES = 8192, 8, 6e-4, 4.0
THETA = 100_000.0  # the wavelengths of rotary embedding, about eight times longer than with 10,000


def attend(_module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: None, scaling: float,
           **_: object) -> tuple[Tensor, None]:
    """Causal attention without a mask in memory, as transformers calls it.

    query ``[rows, heads, tokens, head_dim]`` -> ``[rows, tokens, heads, head_dim]``.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling).transpose(1, 2).contiguous(), None


def load(folder: str, device: str) -> PreTrainedModel:
    """The model with float32 weights."""
    ALL_ATTENTION_FUNCTIONS.register("extend_context", attend)
    config = AutoConfig.from_pretrained(folder)
    if config.rope_parameters.get("rope_type", "default") != "default" or "rope_theta" not in config.rope_parameters:
        raise ValueError(f"--model {folder} has rope_parameters {config.rope_parameters}, not one base of type "
                         "'default' for all layers: it needs no other base, or another recipe")
    return AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="extend_context").to(device)


def extend(model: PreTrainedModel, positions: int, theta: float) -> None:
    """Gives the model its new positions and rotary base, in its config and in its rotary embedding."""
    config = model.config
    config.max_position_embeddings = positions
    config.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
    old = model.base_model.rotary_emb
    model.base_model.rotary_emb = type(old)(config=config).to(model.device)
