"""Is this call of generate supported by this target and these levels? If not, an error comes before it starts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel

from ..engines.architecture.rotary import known_positions
from ..engines.built import walk_of
from ..engines.modules.states import config_window, of_layers, why_not_row_by_row
from ..nn.hooks import without_memory
from ..routing.router import Router
from . import images
from .processing import Prompts, check_mask
from .seen import may_be_read

# What stock generate hands to every decoding method and our loop makes for itself.
_OURS = {
    "attention_mask", "position_ids", "past_key_values", "cache_params", "state", "use_cache", "logits_to_keep",
    "cache_position",
}  # fmt: skip
# Drafting of transformers' own that a user may have asked for.
_STOCK_DRAFTS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


# Settings that ask for another way of decoding.
OTHER_DECODING = ("penalty_alpha", "dola_layers", "constraints", "force_words_ids")
_OTHER_SEQUENCE = re.compile("cross|encoder_attn")  # places of attention to another sequence
# Arguments of a plain generate call that our loop serves as stock generate would; a prepared model takes it then.
_SERVED = {
    "inputs", "input_ids", "attention_mask", "generation_config", "logits_processor", "stopping_criteria", "streamer",
    "tokenizer", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "do_sample", "temperature", "top_k",
    "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "eos_token_id",
    "pad_token_id", "bos_token_id", "stop_strings", "num_return_sequences", "return_dict_in_generate",
    "output_scores", "output_logits", "use_cache", "num_beams", "suppress_tokens", "sequence_bias", "past_key_values",
}  # fmt: skip
_UNSERVED_SETTINGS = (
    *_STOCK_DRAFTS, *OTHER_DECODING, "cache_implementation", "output_attentions", "output_hidden_states",
)  # fmt: skip


def unserved(model, args: tuple, kwargs: dict) -> str | None:
    """Why a plain call of generate on a prepared model cannot decode through its compiled steps; None where it can."""
    given = [name for name in set(kwargs) - _SERVED if kwargs[name] is not None]
    asked = sorted(name for name in given
                   if not (images.is_of_text_alone(name, kwargs[name]) or may_be_read(model, name)))  # fmt: skip
    others = [name for name in _UNSERVED_SETTINGS if name not in asked]
    asked += [name for name in others if option(model, kwargs, name) not in (None, False, "dynamic")]
    if len(args) > 1 or asked:
        return f"{', '.join(asked) or 'a second positional argument'} was given"
    beams, copies = (option(model, kwargs, name) or 1 for name in ("num_beams", "num_return_sequences"))
    if beams > 1:
        return f"num_beams is {beams}"
    if copies > 1 and not option(model, kwargs, "do_sample"):
        return f"num_return_sequences is {copies} without sampling"
    if option(model, kwargs, "use_cache") is False:
        return "use_cache is False"
    rows = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
    if not isinstance(rows, Tensor):
        return "there are no input_ids"
    if len(rows) * copies > 1 and kwargs.get("streamer") is not None:
        return f"a streamer was given for {len(rows) * copies} rows"
    return None


def option(model, kwargs: dict, name: str):
    """A generation option where stock generate would find it: keyword, generation_config, model."""
    for value in (
        kwargs.get(name),
        getattr(kwargs.get("generation_config"), name, None),
        getattr(model.generation_config, name, None),
    ):
        if value is not None:
            return value
    return None


def check_target(model, num_beams: int | None) -> None:
    """Raise TypeError or ValueError for a target or a search that levels cannot draft for."""
    check_model(model, "the target")
    if num_beams and num_beams > 1:
        raise ValueError(
            f"num_beams={num_beams} with assistant_models: beam search is not supported; pass num_beams=1, or "
            "leave assistant_models out"
        )


def check_decoding(settings: dict) -> None:
    """Raise ValueError for a way of decoding that levels cannot draft for. settings: those of `OTHER_DECODING`."""
    for name, value in settings.items():
        if value is not None:
            raise ValueError(
                f"{name} with assistant_models: it is a way of decoding of its own, which levels cannot draft for; "
                "leave one of the two out"
            )


def check_request(
    input_ids: Tensor | None, settings: GenerationConfig, model_kwargs: dict, known: Iterable[str] = ()
) -> None:
    """Raise ValueError for an option or an input that cannot go with assistant_models; the target is checked.

    input_ids: None where no prompt is known yet. known: model inputs that are read before.
    """
    if input_ids is not None and input_ids.numel() == 0:
        raise ValueError(
            "assistant_models needs input_ids with at least one token per row (inputs_embeds is not supported)"
        )
    for asked in ("output_attentions", "output_hidden_states"):
        if getattr(settings, asked, None):
            raise ValueError(
                f"{asked}=True is not available with assistant_models: the checked positions of a round are "
                "not those of single steps; leave one of the two out"
            )
    check_decoding({name: getattr(settings, name, None) for name in OTHER_DECODING})
    for draft in _STOCK_DRAFTS:
        if getattr(settings, draft, None) not in (None, False):
            raise ValueError(
                f"{draft} and assistant_models were both given: leave {draft} out, levels like 'prompt_lookup', "
                "'early_exit:4' and 'mtp' do the same"
            )
    if input_ids is not None and (input_ids.is_floating_point() or input_ids.dtype == torch.bool):
        raise TypeError(f"input_ids are {input_ids.dtype}: pass token ids as integers")
    if input_ids is not None:
        _check_mask(input_ids, settings, model_kwargs)
    _check_cache(settings, model_kwargs)
    given = sorted(name for name, value in model_kwargs.items() if name not in _OURS and value is not None)
    extra = [name for name in given if name not in known and not images.is_of_text_alone(name, model_kwargs[name])]
    if extra:
        raise ValueError(
            f"model inputs {images.told(extra, model_kwargs)} are not supported with assistant_models: only input_ids "
            "and attention_mask are"
        )


def _check_mask(input_ids: Tensor, settings: GenerationConfig, model_kwargs: dict) -> None:
    """transformers drops a mask of ones, since 5.23, and keeps its width, and the positions that it made of it."""
    mask, width = model_kwargs.get("attention_mask"), getattr(settings, "_mask_length", None)
    if mask is not None:
        check_mask(list(mask.shape), input_ids)
    elif width is not None:
        check_mask([len(input_ids), width], input_ids)
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.ndim == 2 and len(positions) not in (1, len(input_ids)):
        raise ValueError(
            f"attention_mask or position_ids have shape {list(positions.shape)} and input_ids "
            f"{list(input_ids.shape)}: one row for each prompt is needed"
        )


def _check_cache(settings: GenerationConfig, model_kwargs: dict) -> None:
    if model_kwargs.get("use_cache") is False:
        raise ValueError(
            "use_cache=False with assistant_models: speculation needs the cache; leave use_cache out, or "
            "pass use_cache=True where it is the model's own setting"
        )
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
            "streamed with assistant_models; for many use hf_mlspec.generate_stream, with a streamer for each request"
        )


def check_prompts(model, prompts: Prompts, max_length: int, model_kwargs: dict) -> None:
    """Raise ValueError for a token that the model cannot embed, and for prompts whose positions or window differ
    between stock generate and our rows."""
    _check_ids(model, prompts)
    window = config_window(model.config.get_text_config()) if prompts.has_holes else None
    if window is not None and max_length > window:
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
        if min(row) >= 0 and max(row) < size:
            continue
        wrong = next(token for token in row if not 0 <= token < size)
        raise ValueError(
            f"prompt {number} holds token {wrong}, and {type(model).__name__} embeds 0 to {size - 1}: encode the "
            "prompt with the target's own tokenizer"
        )


def check_model(model: nn.Module, name: str) -> None:
    """Raise TypeError or ValueError unless `model` is a causal language model over an attention cache."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{name} is a {type(model).__name__}, not a transformers model, a path or a level word")
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} ({kind}) is an encoder-decoder model; levels and targets are decoder-only models")
    if not isinstance(model, GenerationMixin) or not model.can_generate() or model.get_output_embeddings() is None:
        raise TypeError(f"{name} ({kind}) is no causal language model: load it with AutoModelForCausalLM")
    walk = walk_of(model)
    if _sees_later_tokens(model, walk.modules):
        raise TypeError(
            f"{name} ({kind}) is an encoder: each of its tokens sees those after it; load a causal language "
            "model, or one that can be both with is_decoder=True"
        )
    if (reason := why_not_row_by_row(model)) is not None:
        raise ValueError(f"{name} ({kind}) {reason}")
    if any([parameter.is_meta for parameter in walk.parameters]) and (
        without_memory(model) or next(iter(walk.parameters)).is_meta
    ):
        raise ValueError(
            f"{name} ({kind}) has weights on the meta device (not loaded, or its embedding is offloaded): load it "
            "onto a device that holds it whole, or give a device_map whose first layers are on a device"
        )


def _sees_later_tokens(model: PreTrainedModel, modules: list[nn.Module]) -> bool:
    """Whether an attention of a text model is not causal: its config says that it is no decoder, or an attention says
    it that is neither to another sequence nor of another model inside."""
    config = model.config
    if config.get_text_config() is not config or getattr(config, "is_decoder", False):
        return False
    own = list(map(vars, modules))
    if getattr(config, "is_decoder", None) is False and any([one.get("is_decoder") is False for one in own]):
        return True
    if not any([one.get("is_causal") is False for one in own]):
        return False
    return any(
        getattr(module, "is_causal", None) is False
        and not _OTHER_SEQUENCE.search(path)
        and getattr(module, "config", config) is config
        for path, module in model.named_modules()
    )


def check_device(model: nn.Module, name: str, device: torch.device) -> None:
    """Raise ValueError unless a level's first weights lie where the target's do."""
    here = next(model.parameters()).device
    if here != device:
        raise ValueError(f"{name} is on {here}, the target on {device}: move it with .to({str(device)!r})")


def router_of(model: nn.Module) -> Router | None:
    """The router that picks the planes of this model in generate (routed.py); None without one."""
    return getattr(getattr(model, "hf_quantizer", None), "router", None)


def vocab_size(model: nn.Module) -> int:
    """Entries of a model's logits."""
    return getattr(model.config.get_text_config(), "vocab_size", 0)


def head_size(model: nn.Module) -> int | None:
    """Elements of an attention head, where they differ from layer to layer what divides all; None where the config
    does not tell."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    told = of_layers(config, "head_dim") if hasattr(config, "num_hidden_layers") else [None]
    if told and all(told):
        return math.gcd(*told)
    return config.hidden_size // heads if heads else None


def max_positions(model: nn.Module) -> int | None:
    """Number of positions of the model, None if its config has no limit."""
    config = model.config.get_text_config()
    scaled = (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "yarn"
    most = known_positions(config) if scaled else getattr(config, "max_position_embeddings", None)
    return most if most is None or most > 0 else None  # XLNet says -1


def check_length(model: nn.Module, prompt_tokens: int, new_tokens: int) -> None:
    """Raise ValueError if a prompt and its continuation do not fit the target's positions."""
    most = max_positions(model)
    if most and prompt_tokens + new_tokens > most:
        room = most - prompt_tokens
        remedy = f"pass max_new_tokens={room} or less" if room > 0 else "shorten the prompt"
        raise ValueError(
            f"{prompt_tokens} prompt tokens and up to {new_tokens} new ones exceed the {most} positions of the "
            f"target ({_source_of(model, most)}): {remedy}"
        )
    _check_rotation(model, prompt_tokens + new_tokens)


def _source_of(model: nn.Module, positions: int) -> str:
    """What of the config says how many positions there are."""
    if positions == model.config.get_text_config().max_position_embeddings:
        return "max_position_embeddings"
    return "original_max_position_embeddings times the factor of its rope_parameters"


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
    """Raise ValueError if a row may cross the length at which its rotary frequencies change."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        border = one.get("original_max_position_embeddings") or max_positions(model)
        if one.get("rope_type") in ("dynamic", "longrope") and border and tokens > border:
            raise ValueError(
                f"rope_type {one['rope_type']!r} changes its frequencies past {border} tokens, so a block of tokens "
                f"would not be scored as single tokens are: keep prompt and new tokens ({tokens} now) within {border}"
            )
