"""How is one call of generate checked, decoded, and returned in the form transformers would return it?"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.generation import GenerateDecoderOnlyOutput, LogitsProcessorList, StoppingCriteriaList

from ..speculation.decode import decode
from ..speculation.draft import Rows
from ..speculation.ragged_attention import ragged_attention_on
from ..speculation.stats import SpeculationStats
from .config import SpeculationConfig
from .levels import resolve
from .processing import Prompts, Stopping
from .record import Record
from .request import check_prompts, check_request, check_streamer
from .suitability import check_length
from .wiring import Chain, Wiring

_FIRST_CAPACITY = 512  # slots for new tokens a cache has at first; it grows as rows do
_last: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def last_stats(model: PreTrainedModel) -> SpeculationStats | None:
    """The counts of the last call of generate with levels on this model, or None."""
    return _last.get(model)


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_models: list | None = None,
    assistant_tokenizers: list | None = None,
    speculation_config: SpeculationConfig | dict | None = None,
    target_tokenizer=None,
    **model_kwargs,
) -> GenerateDecoderOnlyOutput | Tensor:
    """The loop for `model.generate(**inputs, custom_generate=hf_mlspec.generate, assistant_models=[...])`.

    input_ids int64 `[batch, width]`, left-padded where attention_mask says so -> int64 `[batch, width + new]` or, with
    return_dict_in_generate, a GenerateDecoderOnlyOutput with `.speculation`. transformers passes neither streamers nor
    tokenizers to a custom_generate callable, so here the target's tokenizer is `target_tokenizer`, and streamer= and
    stop_strings= do not work; `model.generate(..., assistant_models=[...])` has neither limit.

    Raises TypeError or ValueError for levels and options that cannot work, before anything is computed.
    """
    return run(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        levels=assistant_models if assistant_models is not None else [],
        tokenizers=assistant_tokenizers,
        config=speculation_config,
        tokenizer=target_tokenizer,
        model_kwargs=model_kwargs,
    )


def run(
    model: PreTrainedModel,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    settings: GenerationConfig,
    *,
    levels: list,
    tokenizers: list | None,
    config: SpeculationConfig | dict | None,
    tokenizer=None,
    streamer=None,
    keep_cache: bool = False,
    model_kwargs: dict,
) -> GenerateDecoderOnlyOutput | Tensor:
    """Check the request, build the chain, decode, and put the result into the form stock generate returns."""
    config = SpeculationConfig.of(config)
    check_request(model, input_ids, settings, model_kwargs)
    check_streamer(streamer, len(input_ids))
    prompts = Prompts(input_ids, model_kwargs.get("attention_mask"))
    check_prompts(model, prompts, settings.max_length, model_kwargs)
    new_tokens = settings.max_length - input_ids.shape[1]
    check_length(model, max(prompts.lengths), new_tokens)
    found = resolve(model, levels, tokenizers, config)
    stop = Stopping(criteria, getattr(settings, "_eos_token_tensor", None), prompts)
    wiring = Wiring(
        model,
        tokenizer,
        config,
        do_sample=bool(settings.do_sample),
        processors=processors,
        prompts=prompts,
        capacity=max(prompts.lengths) + min(new_tokens, _FIRST_CAPACITY),
        ends=frozenset(stop.eos),
    )
    chain = wiring.build(found)
    record = Record(settings, streamer, len(prompts.rows))
    rows = [list(row) for row in prompts.rows]
    _last[model] = SpeculationStats([level.stats for level in chain.levels])  # a streamer may watch the counts grow
    with ragged_attention_on(chain.models):
        with torch.inference_mode():
            cached = _load_cache(chain, model_kwargs.get("past_key_values"), prompts, input_ids.device)
            stats = decode(
                chain.target,
                chain.drafter,
                rows,
                [new_tokens] * len(rows),
                device=input_ids.device,
                num_draft_tokens=chain.num_draft_tokens,
                emit=record,
                cached=cached,
                stop=stop,
            )
        wanted = keep_cache or settings.return_dict_in_generate or cached
        cache = _return_cache(chain, model_kwargs.get("past_key_values"), cached, rows) if wanted else None
    _last[model] = chain.finish(stats)
    if streamer is not None:
        streamer.end()
    return record.result(prompts, rows, stats, cache)


def _load_cache(chain: Chain, given, prompts: Prompts, device: torch.device) -> int:
    """Start the target's cache; take over what a user's cache already holds of a single prompt."""
    chain.target.start(len(prompts.rows), device)
    length = given.get_seq_length() if given is not None else 0
    if not length:
        return 0
    hidden = prompts.input_ids.shape[1] - prompts.lengths[0]
    if hidden:
        raise ValueError(
            f"past_key_values holds {length} tokens, and the attention_mask hides {hidden} of the prompt: whether "
            "they are in the cache cannot be known; leave out past_key_values, or the masked tokens"
        )
    plain = isinstance(given, DynamicCache) and all(type(layer) is DynamicLayer for layer in given.layers)
    if len(prompts.rows) > 1 or not plain:
        raise ValueError(
            f"a filled {type(given).__name__} for {len(prompts.rows)} rows cannot be continued with "
            "assistant_models: pass a DynamicCache without sliding layers and one row, or the whole prompt"
        )
    length = min(length, prompts.lengths[0] - 1)
    chain.target.runner.cache.load(given, length)
    return length


def _return_cache(chain: Chain, given, cached: int, rows: Rows):
    """The cache stock generate would hand back: for one row, keys and values of all tokens but the last."""
    plain = isinstance(given, DynamicCache) and all(type(layer) is DynamicLayer for layer in given.layers)
    if len(rows) > 1 or not plain:
        return None
    if given.get_seq_length() > cached:
        given.crop(cached - given.get_seq_length())
    chain.target.runner.cache.extend(given, cached, len(rows[0]) - 1)
    return given
