"""Which MTP layers do the tests draft with? Random ones in the published layouts, beside tiny targets, on disk."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from models import BOS, EOS, PAD, VOCAB
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

_SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "vocab_size": VOCAB,
    "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "tie_word_embeddings": False,
}  # fmt: skip
_MIXTURE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}  # fmt: skip
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32}  # fmt: skip
# Class -> class of its config, settings, layout of its checkpoints.
TARGETS = {
    "Glm4MoeForCausalLM": ("Glm4MoeConfig", {**_MIXTURE, "use_qk_norm": True}, "behind"),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3Config",
        {**_MIXTURE, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
         "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 4},
        "behind",
    ),
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", _DELTA, "own"),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", {**_DELTA, **_EXPERTS}, "own"),
    "Qwen3ForCausalLM": ("Qwen3Config", {}, "speculators"),
}  # fmt: skip
_NAMES = {
    "behind": {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm", "block": ""},
    "own": {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm",
            "block": "layers.0"},
    "speculators": {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
                    "post_norm": "final_layernorm", "block": ""},
}  # fmt: skip


def target_of(name: str, dtype: torch.dtype = torch.float32, seed: int = 2) -> PreTrainedModel:
    """A random target of this class; skips where this version of transformers lacks it."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    kind, own, _ = TARGETS[name]
    torch.manual_seed(seed)
    model = getattr(transformers, name)(getattr(transformers, kind)(**{**_SHAPE, **own})).eval()
    with torch.no_grad():  # flat logits would leave rounding to decide which token is best
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:  # and layers that change little let an MTP layer guess what they do
                parameter.copy_(torch.randn_like(parameter) * (0.06 if ".layers." in name else 0.3))
    return model.to(dtype)


class Layer(nn.Module):
    """An MTP layer as its papers write it, over a decoder layer of its target, for whole rows."""

    def __init__(self, target: PreTrainedModel):
        super().__init__()
        layers = target.model.layers
        config = copy.deepcopy(target.config)
        for name in ("layer_types", "mlp_layer_types"):
            if getattr(config, name, None) is not None:
                setattr(config, name, getattr(config, name)[-1:])
        if hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = 0
        config._attn_implementation = "eager"
        self.block = type(layers[-1])(config, 0)
        for name in ("enorm", "hnorm", "post_norm"):
            setattr(self, name, type(self.block.input_layernorm)(config.hidden_size, eps=config.rms_norm_eps))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, target: PreTrainedModel, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Pairs `[1, n]` of tokens and hidden states -> what predicts the tokens behind them."""
        embedded = target.get_input_embeddings()(tokens)
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        n = tokens.shape[1]
        places = torch.arange(1, n + 1)[None]
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        rotary = target.model.rotary_emb
        rotary = rotary(joined, places[None].expand(3, -1, -1) if hasattr(rotary, "mrope_section") else places)
        found = self.block(joined, attention_mask=mask, position_embeddings=rotary, position_ids=places)
        return self.post_norm(found[0] if isinstance(found, tuple) else found)


def layer_of(target: PreTrainedModel, seed: int = 0) -> Layer:
    """Random, float32; it goes by the embedding of its token for the most part, as the target does."""
    torch.manual_seed(seed)
    made = Layer(target).eval()
    around = type(made.enorm)(1).weight.item()  # what a norm's weight is about
    with torch.no_grad():  # modules of experts begin with what the memory held
        for parameter in made.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape) + (around if parameter.ndim == 1 else 0))
        made.eh_proj.weight[:, : len(made.eh_proj.weight)] += torch.eye(len(made.eh_proj.weight))
        made.post_norm.weight.copy_(target.model.norm.weight)
        for name, buffer in made.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape) * 0.1)
    return made


def published(layer: Layer, layout: str, layers: int) -> dict[str, Tensor]:
    """The tensors of an MTP layer by the names of a layout; experts one by one."""
    begins = {"behind": f"model.layers.{layers}.", "own": "mtp.", "speculators": "mtp_layers.0."}[layout]
    found = {}
    for name, tensor in layer.state_dict().items():
        part, _, rest = name.partition(".")
        word = _NAMES[layout][part]
        found[f"{begins}{word}.{rest}" if word else f"{begins}{rest}"] = tensor.clone()
    return _split_experts(found)


def _split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        place = re.match(r"(.*\.experts)\.(gate_up_proj|down_proj)$", name)
        for number, one in enumerate(tensor if place else ()):
            parts = one.chunk(2) if place[2] == "gate_up_proj" else [one]
            words = ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",)
            found |= {f"{place[1]}.{number}.{word}.weight": part for word, part in zip(words, parts, strict=True)}
        if not place:
            found[name] = tensor
    return {name: tensor.clone().contiguous() for name, tensor in found.items()}


def write_mtp(
    folder: Path, target: PreTrainedModel, layer: Layer, *, tensors: dict | None = None, **said
) -> Path:  # fmt: skip
    """The checkpoint of a target with an MTP layer in the layout of its class, from which the target then says to be
    loaded; a folder of the `speculators` package for one whose class has no layer. `tensors` overrides some (None:
    leaves it out), `said` entries of that folder's config."""
    layout = TARGETS[type(target).__name__][2]
    found = published(layer, layout, target.config.num_hidden_layers)
    found = {name: tensor for name, tensor in {**found, **(tensors or {})}.items() if tensor is not None}
    folder.mkdir(parents=True, exist_ok=True)
    if layout == "speculators":
        own = {
            "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "num_nextn_predict_layers": 1,
            "transformer_layer_config": target.config.to_dict(),
            "speculators_config": {"algorithm": "mtp", "verifier": {"name_or_path": "a/target"}},
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(own | said))
    else:
        target.save_pretrained(folder)
        target.config._name_or_path = str(folder)
    save_file(found, str(folder / "of_mtp.safetensors"))
    return folder
