"""Can this model be a target or a level? Each answer that is no says why, and what to do."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_model(model: nn.Module, name: str) -> None:
    """Raise TypeError or ValueError unless `model` is a causal language model over an attention cache."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{name} is a {type(model).__name__}, not a transformers model, a path or a level word")
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} ({kind}) is an encoder-decoder model; levels and targets are decoder-only models")
    if not isinstance(model, GenerationMixin) or not model.can_generate() or model.get_output_embeddings() is None:
        raise TypeError(f"{name} ({kind}) is no causal language model: load it with AutoModelForCausalLM")
    config = model.config.get_text_config()
    if config is model.config and any(vars(module).get("is_causal") is False for module in model.modules()):
        raise TypeError(
            f"{name} ({kind}) is an encoder: each of its tokens sees those after it; load a causal language model"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if model._is_stateful or not kinds <= LAYER_TYPES or getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(
            f"{name} ({kind}) keeps a state that cannot be rolled back (layers of type "
            f"{', '.join(sorted(kinds - LAYER_TYPES)) or 'recurrent or shared'}): it can neither draft nor check"
        )
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if not model._supports_attention_backend or not takes_positions:
        raise ValueError(
            f"{name} ({kind}) has an attention of its own, without transformers' attention interface and "
            "position ids, so rows of different lengths cannot share a batch"
        )
    if any(p.device.type == "meta" for p in model.parameters()):
        raise ValueError(
            f"{name} ({kind}) has weights on the meta device (offloaded or not loaded): load it onto "
            "a device that holds it whole"
        )


def check_device(model: nn.Module, name: str, device: torch.device) -> None:
    """Raise ValueError unless a level's first weights lie where the target's do."""
    here = next(model.parameters()).device
    if here != device:
        raise ValueError(f"{name} is on {here}, the target on {device}: move it with .to({str(device)!r})")


def vocab_size(model: nn.Module) -> int:
    """Entries of a model's logits."""
    return getattr(model.config.get_text_config(), "vocab_size", 0)


def max_positions(model: nn.Module) -> int | None:
    """Tokens the model's positions reach, None where its config names no bound."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def sliding_window(model: nn.Module) -> int | None:
    """Tokens a layer with a sliding window attends to, None where every layer sees the whole row."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds and "sliding_attention" not in kinds:
        return None
    return getattr(config, "sliding_window", None) or None


def check_length(model: nn.Module, prompt_tokens: int, new_tokens: int) -> None:
    """Raise ValueError if a prompt and its continuation do not fit the target's positions."""
    most = max_positions(model)
    if most and prompt_tokens + new_tokens > most:
        room = most - prompt_tokens
        remedy = f"pass max_new_tokens={room} or less" if room > 0 else "shorten the prompt"
        raise ValueError(
            f"{prompt_tokens} prompt tokens and up to {new_tokens} new ones exceed the {most} positions of the "
            f"target (max_position_embeddings): {remedy}"
        )
    _check_rotation(model, prompt_tokens + new_tokens)


def check_prompt_rows(model: nn.Module, rows: list[list[int]], max_new_tokens: int) -> None:
    """Raise ValueError, naming the prompt, for one without tokens or too long to be continued by so many."""
    for index, row in enumerate(rows):
        place = f"prompt {index} of {len(rows)}"
        if not row:
            raise ValueError(f"{place} has no tokens; remove it or write something in it")
        try:
            check_length(model, len(row), max_new_tokens)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error


def _check_rotation(model: nn.Module, tokens: int) -> None:
    """Raise ValueError if a row may cross the length at which its rotary frequencies change under its feet."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        border = one.get("original_max_position_embeddings") or max_positions(model)
        if one.get("rope_type") in ("dynamic", "longrope") and border and tokens > border:
            raise ValueError(
                f"rope_type {one['rope_type']!r} changes its frequencies past {border} tokens, so a block of tokens "
                f"would not be scored as single tokens are: keep prompt and new tokens ({tokens} now) within {border}"
            )
