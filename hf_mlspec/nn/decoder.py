"""How does a decoder run without the wrapper around it?

The model classes of transformers spend a quarter of a millisecond a call on masks, output objects and argument merging
that a decoding loop does not need. For the architectures below the same modules are called in the same order, so the
result has the same bits; every other architecture goes through its own forward.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

# Embedding -> rotary -> layers -> norm -> head, nothing else in between, in transformers 5.17 to 5.23.
PLAIN = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)

Forward = Callable[[Tensor, Tensor, object, "slice | Tensor"], Tensor]


def bare_forward(model: nn.Module) -> Forward | None:
    """A function (tokens, positions, cache, kept) -> logits `[batch, kept, vocab]`, or None for other architectures.

    Only exact classes qualify, and only while nobody hooked or replaced their forward: hooks (accelerate's offloading,
    a user's own) must keep firing.
    """
    if type(model) not in PLAIN or _is_altered(model) or _is_altered(model.model):
        return None
    base, head = model.model, model.lm_head
    layers = list(base.layers[: base.config.num_hidden_layers])

    def forward(tokens: Tensor, positions: Tensor, cache, kept) -> Tensor:
        hidden = base.embed_tokens(tokens)
        rotary = base.rotary_emb(hidden, position_ids=positions)
        for layer in layers:
            hidden = layer(
                hidden,
                attention_mask=None,
                position_embeddings=rotary,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
        return head(base.norm(hidden)[:, kept])

    return forward


def _is_altered(module: nn.Module) -> bool:
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return bool(hooked) or module.training
