"""Which heads do the tests draft with? Random EAGLE-3 heads for a tiny target, in either layout, on disk."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

HEADS, KV_HEADS, INTERMEDIATE = 4, 2, 64


def tensors_of(
    target: PreTrainedModel, *, width: int, draft_vocab: int, taps: int, seed: int = 0, scale: float = 0.3
) -> dict[str, Tensor]:
    """Those of a head of this width, by the names of the `speculators` layout."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    hidden, vocab, dim = target.config.hidden_size, target.config.vocab_size, width // HEADS
    outputs = {"q": HEADS * dim, "k": KV_HEADS * dim, "v": KV_HEADS * dim}
    found = {f"layers.0.self_attn.{name}_proj.weight": random(rows, 2 * width) for name, rows in outputs.items()}
    found |= {
        "fc.weight": random(width, taps * hidden),
        "layers.0.self_attn.o_proj.weight": random(width, HEADS * dim),
        "layers.0.mlp.gate_proj.weight": random(INTERMEDIATE, width),
        "layers.0.mlp.up_proj.weight": random(INTERMEDIATE, width),
        "layers.0.mlp.down_proj.weight": random(width, INTERMEDIATE),
        "lm_head.weight": random(draft_vocab, width),
        "norm.weight": 1 + random(width),
    }
    names = "hidden_norm", "input_layernorm", "post_attention_layernorm"
    found |= {f"layers.0.{name}.weight": 1 + random(width) for name in names}
    if width != hidden:
        found["embed_tokens.weight"] = random(vocab, width)
    if draft_vocab < vocab:
        ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        found["d2t"] = ids - torch.arange(draft_vocab)
        found["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return found


def layer_config(target: PreTrainedModel, width: int) -> dict:
    """Of the head's layer, as both layouts spell it."""
    sizes = {"hidden_size": width, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    return sizes | {
        "model_type": "llama", "head_dim": width // HEADS, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 1,
        "vocab_size": target.config.vocab_size, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
    }  # fmt: skip


def write_head(
    folder: Path, target: PreTrainedModel, *, layout: str = "speculators", width: int | None = None,
    draft_vocab: int | None = None, taps: tuple[int, ...] = (0, 1, 2), seed: int = 0, tensors: dict | None = None,
    **said,
) -> Path:  # fmt: skip
    """A folder with a head; `said` overrides its config, `tensors` some of its tensors (None: leaves it out)."""
    width, vocab = width or target.config.hidden_size, target.config.vocab_size
    found = tensors_of(target, width=width, draft_vocab=draft_vocab or vocab, taps=len(taps), seed=seed)
    found = {name: tensor for name, tensor in {**found, **(tensors or {})}.items() if tensor is not None}
    layer = layer_config(target, width)
    own = {"draft_vocab_size": draft_vocab or vocab, "target_hidden_size": target.config.hidden_size}
    if layout == "speculators":
        own |= {
            "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
            "eagle_aux_hidden_state_layer_ids": list(taps), "transformer_layer_config": layer,
            "speculators_config": {"verifier": {"name_or_path": "a/target", "architectures": ["LlamaForCausalLM"]}},
        }  # fmt: skip
    else:
        found = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in found.items()}
        told = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]}
        own |= layer | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": told}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(own | said))
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, str(folder / "model.safetensors"))
    return folder
