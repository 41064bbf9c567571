"""What feeds a linear layer, so that a scale of its inputs can be folded away? One entry per class of models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Feed:
    """What feeds some layers of a block. Places are names in the block.

    producer: a norm, or a linear whose outputs reach the consumers channel by channel. kind: "norm", "norm plus one"
    (it multiplies by 1 + weight), "values" (the outputs behind queries and keys, through attention) or "up" (the last
    outputs, as many as the consumer has inputs). consumers: all that read it.
    """

    producer: str
    kind: str
    consumers: tuple[str, ...]

    @property
    def is_norm(self) -> bool:
        """Whether it is a norm."""
        return self.kind.startswith("norm")


def _feeds(norm: str, before_mlp: str, fused: bool = False) -> tuple[Feed, ...]:
    inputs = ("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")
    wide = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
    return (
        Feed("input_layernorm", norm, tuple(f"self_attn.{name}" for name in inputs)),
        Feed(f"self_attn.{inputs[-1]}", "values", ("self_attn.o_proj",)),
        Feed(before_mlp, norm, tuple(f"mlp.{name}" for name in wide)),
        Feed(f"mlp.{wide[-1]}", "up", ("mlp.down_proj",)),
    )


_LLAMA = _feeds("norm", "post_attention_layernorm")
_GEMMA = _feeds("norm plus one", "pre_feedforward_layernorm")
FAMILIES: dict[str, tuple[Feed, ...]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Phi3ForCausalLM": _feeds("norm", "post_attention_layernorm", fused=True),
}


def feeds_of(class_name: str, scaling: str, everywhere: bool = False) -> tuple[Feed, ...]:
    """The places where a scaling of this name folds: AWQ all, SmoothQuant norms, or all, too, with ``everywhere``.
    ValueError for a class whose feeds are not known."""
    if class_name not in FAMILIES:
        raise ValueError(
            f"{scaling} folds scales into what feeds a layer, which is not known for {class_name} (it is for "
            f"{', '.join(FAMILIES)}): use gptq or rtn"
        )
    return tuple(feed for feed in FAMILIES[class_name] if scaling == "awq" or everywhere or feed.is_norm)
