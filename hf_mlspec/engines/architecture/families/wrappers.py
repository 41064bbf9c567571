"""Which models that also see images hold the text model of a described class?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..description import Description

TEXT = "model.language_model"
_ANY = "Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi3", "Granite", "Olmo2", "SmolLM3"
_AUTO = {f"{name}Model": f"{name}ForCausalLM" for name in _ANY}  # what AutoModel makes of a text config
# By the wrapper's class: of the class of its text model, the described class whose layers these are.
WRAPPERS: Mapping[str, Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": {"Gemma3TextModel": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"Gemma4TextModel": "Gemma4ForCausalLM"},
    "Qwen2VLForConditionalGeneration": {"Qwen2VLTextModel": "Qwen2ForCausalLM"},
    "Qwen2_5_VLForConditionalGeneration": {"Qwen2_5_VLTextModel": "Qwen2ForCausalLM"},
    "Qwen3VLForConditionalGeneration": {"Qwen3VLTextModel": "Qwen3ForCausalLM"},
    "Mistral3ForConditionalGeneration": _AUTO,
    "LlavaForConditionalGeneration": _AUTO,
}
_CAPS_LOGITS = ("Gemma4ForConditionalGeneration",)
_OF_LOGITS = ("logit_softcap", "logit_scale", "logit_divisor")
_PLACES = ("embedding", "layers", "final_norm", "rotary_embedding")


def inside(entry: Description, class_name: str) -> Description:
    """The description of a text model, at its place in a wrapper, whose head neither scales logits nor, but in a few,
    caps them."""
    places = {name: getattr(entry, name).replace("model.", f"{TEXT}.", 1) for name in _PLACES}
    caps = entry.logit_softcap is None or class_name in _CAPS_LOGITS
    uncapped = () if caps else (entry.logit_softcap,)
    plain: dict[str, Any] = dict.fromkeys(("logit_scale", "logit_divisor") if caps else _OF_LOGITS)
    if entry.layer_inputs is not None:
        plain["layer_inputs"] = replace(entry.layer_inputs, within=TEXT)
    return replace(entry, class_name=class_name, text=TEXT, unset=(*entry.unset, *uncapped), **plain, **places)
