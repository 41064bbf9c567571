"""Can this call of generate be served? What cannot is refused before anything is computed."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from .processing import Prompts, check_mask
from .suitability import check_model, sliding_window

# What stock generate hands to every decoding method and our loop makes for itself.
_OURS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
# Drafting of transformers' own that a user may have asked for.
_STOCK_DRAFTS = ("prompt_lookup_num_tokens", "assistant_early_exit")


# Arguments of a plain generate call that our loop serves as stock generate would; a prepared model takes it then.
_SERVED = {
    "inputs", "input_ids", "attention_mask", "generation_config", "logits_processor", "stopping_criteria", "streamer",
    "tokenizer", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "do_sample", "temperature", "top_k",
    "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "eos_token_id",
    "pad_token_id", "bos_token_id", "stop_strings", "num_return_sequences", "return_dict_in_generate",
    "output_scores", "output_logits", "use_cache", "num_beams", "suppress_tokens", "sequence_bias", "past_key_values",
}  # fmt: skip
_UNSERVED_SETTINGS = (
    *_STOCK_DRAFTS, "cache_implementation", "constraints", "force_words_ids", "penalty_alpha", "output_attentions",
    "output_hidden_states",
)  # fmt: skip


def unserved(model, args: tuple, kwargs: dict) -> str | None:
    """Why a plain call of generate on a prepared model cannot decode through its compiled steps; None where it can."""
    settings = kwargs.get("generation_config") or model.generation_config
    values = {name: kwargs.get(name, getattr(settings, name, None)) for name in ("num_beams", "use_cache")}
    asked = sorted(name for name in set(kwargs) - _SERVED if kwargs[name] is not None)
    asked += [name for name in _UNSERVED_SETTINGS if getattr(settings, name, None) not in (None, False, "dynamic")]
    if len(args) > 1 or asked:
        return f"{', '.join(asked) or 'a second positional argument'} was given"
    if (values["num_beams"] or 1) > 1:
        return f"num_beams is {values['num_beams']}"
    if values["use_cache"] is False:
        return "use_cache is False"
    rows = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
    if not isinstance(rows, Tensor):
        return "there are no input_ids"
    if len(rows) > 1 and kwargs.get("streamer") is not None:
        return f"a streamer was given for {len(rows)} rows"
    return None


def check_target(model, num_beams: int | None) -> None:
    """Raise TypeError or ValueError for a target or a search that levels cannot draft for."""
    check_model(model, "the target")
    if num_beams and num_beams > 1:
        raise ValueError(
            f"num_beams={num_beams} with assistant_models: beam search cannot be drafted for; pass num_beams=1, or "
            "leave assistant_models out"
        )


def check_request(input_ids: Tensor, settings: GenerationConfig, model_kwargs: dict) -> None:
    """Raise ValueError for an option or an input that cannot go with assistant_models; the target is checked."""
    if input_ids.numel() == 0:
        raise ValueError(
            "assistant_models needs input_ids with at least one token per row (inputs_embeds is not supported)"
        )
    for option in ("output_attentions", "output_hidden_states"):
        if getattr(settings, option, None):
            raise ValueError(
                f"{option}=True is not available with assistant_models: the checked positions of a round are "
                "not those of single steps; leave one of the two out"
            )
    for option in _STOCK_DRAFTS:
        if getattr(settings, option, None) is not None:
            raise ValueError(
                f"{option} and assistant_models were both given: leave {option} out, levels like 'prompt_lookup' and "
                "'early_exit:4' do the same"
            )
    _check_mask(input_ids, settings, model_kwargs)
    _check_cache(settings, model_kwargs)
    extra = sorted(k for k, v in model_kwargs.items() if k not in _OURS and v is not None)
    if extra:
        raise ValueError(
            f"model inputs {', '.join(extra)} are not supported with assistant_models: only input_ids and "
            "attention_mask are"
        )


def _check_mask(input_ids: Tensor, settings: GenerationConfig, model_kwargs: dict) -> None:
    """transformers drops a mask of ones, since 5.23, and keeps its width."""
    mask, width = model_kwargs.get("attention_mask"), getattr(settings, "_mask_length", None)
    if mask is not None:
        check_mask(list(mask.shape), input_ids)
    elif width is not None:
        check_mask([len(input_ids), width], input_ids)


def _check_cache(settings: GenerationConfig, model_kwargs: dict) -> None:
    if model_kwargs.get("use_cache") is False:
        raise ValueError("use_cache=False with assistant_models: speculation needs the cache; leave use_cache out")
    kind = settings.cache_implementation
    if kind not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation={kind!r} with assistant_models: rows of different lengths need a cache of their "
            "own kind; leave cache_implementation out"
        )
    cache = model_kwargs.get("past_key_values")
    if cache is not None and not isinstance(cache, DynamicCache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}, with assistant_models it must be a DynamicCache: rows of "
            "different lengths need a cache of their own kind"
        )


def check_streamer(streamer, batch: int) -> None:
    """Raise ValueError for a streamer of several rows, which gain different numbers of tokens in a round."""
    if streamer is not None and batch > 1:
        raise ValueError(
            f"a streamer with {batch} rows: rows gain different numbers of tokens in a round, so only one row can be "
            "streamed with assistant_models"
        )


def check_prompts(model, prompts: Prompts, max_length: int, model_kwargs: dict) -> None:
    """Raise ValueError for a token the model cannot embed, and where stock generate would see other positions, or
    another window, than our rows have."""
    _check_ids(model, prompts)
    window = sliding_window(model)
    if prompts.has_holes and window and max_length > window:
        raise ValueError(
            f"attention_mask hides tokens inside a prompt, and {type(model).__name__} attends to a sliding window of "
            f"{window} tokens, less than the {max_length} asked for: transformers counts the hidden ones as part of "
            "the window; remove them from input_ids"
        )
    given = model_kwargs.get("position_ids")
    if given is None:
        return
    width = prompts.input_ids.shape[1]
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(prompts.input_ids) if mask is None else mask
    own = mask.long().cumsum(-1) - 1
    if given.shape[-1] < width or bool(((given[..., :width] != own) & mask.bool()).any()):
        raise ValueError(
            "position_ids other than those the attention_mask implies are not supported with assistant_models: leave "
            "position_ids out"
        )


def _check_ids(model, prompts: Prompts) -> None:
    """Levels read ids beyond their table as padding rows; in the user's own prompt such an id is a mistake."""
    size = model.get_input_embeddings().num_embeddings
    for number, row in enumerate(prompts.rows):
        wrong = next((token for token in row if not 0 <= token < size), None)
        if wrong is not None:
            raise ValueError(
                f"prompt {number} holds token {wrong}, and {type(model).__name__} embeds 0 to {size - 1}: encode the "
                "prompt with the target's own tokenizer"
            )
