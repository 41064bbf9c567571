"""How does `model.generate(..., assistant_models=[...])` reach our loop? By a detour through stock generate.

    generate (hooked)              the levels, and our other arguments, go into a _Proxy
      |                            that is passed on as assistant_model=
      v
    generate (stock)               prepares the call as always: settings, cache, processors, criteria;
      |                            its checks of an assistant see the target's own config
      v
    _assisted_decoding (hooked)    finds the _Proxy: everything becomes one Call   (another assistant: stock)
      |
      v
    call.run                       our loop decodes; what it returns goes back through stock generate

A prepared model's plain generate takes the same path without levels, and so does that of a model whose cache has a
format of its own; calls that our loop does not support run in stock `_sample`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable

from transformers import GenerationMixin, PreTrainedModel

from ..engines.modules.states import STATE_ARGUMENTS
from ..engines.rows import cache_format_of
from ..nn.state import is_prepared, say_once
from . import images, seen
from .arguments import check_arguments
from .call import Call, check, run
from .config import SpeculationConfig
from .quantizer import gguf_quantizer, saving, source  # noqa: F401 (the first registers itself)
from .request import OTHER_DECODING, check_decoding, check_streamer, check_target, option, router_of, unserved

_hooks: dict[str, Callable] = {}  # method of GenerationMixin -> what stands there, while enabled


class _Proxy:
    """Stands in for the levels while stock generate prepares the call: its checks see the target's own config.

    implied: the user named no levels, the model is ours to decode; transformers' loop decodes what ours does not
        support.
    prepares: only prepare the call; the caller decodes it.
    """

    keep_cache = prepares = False

    def __init__(
        self, target: PreTrainedModel, levels: list, tokenizers: list | None = None, config=None, implied: bool = False
    ):
        self.config, self.generation_config, self.device = target.config, target.generation_config, target.device
        self.levels, self.tokenizers, self.speculation_config = levels, tokenizers, config
        self.implied = implied


def enable() -> None:
    """Let `generate` of transformers take `assistant_models=[...]`, and let `save_pretrained` of packed models replace
    existing files only when all are written. Done by `import hf_mlspec`; calling it again has no effect.
    """
    saving.enable()
    source.enable()
    if _hooks:
        return
    for name, hooked in _HOOKED:
        _hooks[name] = hooked(getattr(GenerationMixin, name))
        setattr(GenerationMixin, name, _hooks[name])


def disable() -> None:
    """Restore transformers' own methods. If another library has wrapped a hook, the hook stays and passes every call
    on.
    """
    saving.disable()
    source.disable()
    for name, hook in _hooks.items():
        if getattr(GenerationMixin, name) is hook:
            setattr(GenerationMixin, name, hook.__wrapped__)
    _hooks.clear()


def enabled() -> bool:
    """Whether the hooks are installed."""
    return bool(_hooks)


def prepare_call(model: PreTrainedModel, options: dict) -> Call:
    """What stock generate makes of these arguments, levels apart: settings, processors and criteria of one call.

    Raises RuntimeError while the hook is disabled; TypeError or ValueError, as generate does, for what is wrong.
    """
    if not _hooks:
        raise RuntimeError("transformers' generate is not hooked: call hf_mlspec.enable() first")
    _check_call(model, options)
    proxy = _Proxy(model, [])
    proxy.prepares = True
    return _hooks["generate"].__wrapped__(model, **options, assistant_model=proxy)


def _hooked_generate(stock):
    names = _positional(stock)

    @functools.wraps(stock)
    def generate(self, *args, assistant_models=None, assistant_tokenizers=None, speculation_config=None, **kwargs):
        given = {
            "assistant_models": assistant_models,
            "assistant_tokenizers": assistant_tokenizers,
            "speculation_config": speculation_config,
        }
        bypassed = _hooks.get("generate") is not generate or kwargs.get("custom_generate") is not None
        implied = assistant_models is None and not bypassed and _is_ours(self) and _serves(self, args, kwargs)
        if implied:
            assistant_models = []
        _require_no_word(kwargs.get("assistant_model"))
        given = {name: value for name, value in given.items() if value is not None}
        if given and assistant_models is None and not bypassed:
            name = next(iter(given))
            raise ValueError(f"{name} was given without assistant_models: pass the levels, assistant_models=[...]")
        if assistant_models is None or bypassed:
            return stock(self, *args, **given, **kwargs)
        positional = dict(zip(names, args, strict=False))
        if len(args) > len(names) or positional.keys() & kwargs.keys():
            return stock(self, *args, **kwargs)  # which says what is wrong with them
        kwargs |= positional
        _check_call(self, kwargs)
        if not implied:
            _check_streamer(self, kwargs)
        config = SpeculationConfig.of(speculation_config)
        proxy = _Proxy(self, assistant_models, assistant_tokenizers, config, implied)
        # A user's own cache comes back filled.
        proxy.keep_cache = any(kwargs.get(name) is not None for name in STATE_ARGUMENTS)
        return stock(self, **{**_expand(self, kwargs), "assistant_model": proxy})

    return generate


def _positional(stock) -> list[str]:
    """What stock generate takes by position behind self; where it is wrapped by a function that names nothing, what
    transformers' own takes."""
    taken = inspect.signature(stock).parameters.values()
    names = [one.name for one in taken if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD][1:]
    return names or ["inputs", "generation_config", "logits_processor", "stopping_criteria"]


def _hooked_decoding(stock):
    @functools.wraps(stock)
    def _assisted_decoding(
        self, input_ids, logits_processor, stopping_criteria, generation_config, assistant_model=None, **kwargs
    ):
        if not isinstance(assistant_model, _Proxy):
            given = (input_ids, logits_processor, stopping_criteria, generation_config)
            return stock(self, *given, assistant_model=assistant_model, **kwargs)
        if kwargs.pop("synced_gpus", False):
            raise ValueError("synced_gpus=True (DeepSpeed ZeRO-3 or FSDP) is not supported with assistant_models")
        for unused in ("inputs_tensor", "assistant_tokenizer"):
            kwargs.pop(unused, None)
        call = Call(
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            tokenizer=kwargs.pop("tokenizer", None),
            streamer=kwargs.pop("streamer", None),
            model_kwargs=kwargs,
            levels=assistant_model.levels,
            tokenizers=assistant_model.tokenizers,
            config=assistant_model.speculation_config,
            keep_cache=assistant_model.keep_cache,
        )
        if assistant_model.prepares:
            return call
        refused = _refusal(self, call) if assistant_model.implied else None
        if refused is not None:
            _say_stock(self, refused)
            return self._sample(
                input_ids, logits_processor, stopping_criteria, generation_config, streamer=call.streamer, **kwargs
            )
        return run(self, call)

    return _assisted_decoding


class _Unrefused:
    """A model whose state our loop puts back, as transformers' check of assisted generation is to see it."""

    _is_stateful = False

    def __init__(self, model: PreTrainedModel):
        self._model = model

    def __getattr__(self, name: str):
        return getattr(self._model, name)


def _hooked_validation(stock):
    @functools.wraps(stock)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        ours = isinstance(generation_mode_kwargs.get("assistant_model"), _Proxy)
        seen = _Unrefused(self) if ours and self._is_stateful else self
        return stock(seen, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


_HOOKED = (
    ("generate", _hooked_generate),
    ("_assisted_decoding", _hooked_decoding),
    ("_validate_generation_mode", _hooked_validation),
)


def _is_ours(model) -> bool:
    """Whether our loop decodes a model's plain calls, too: it is prepared, a router picks its planes, or transformers'
    caches do not have the format of its keys and values."""
    return is_prepared(model) or cache_format_of(model) is not None or router_of(model) is not None


def _serves(model, args: tuple, kwargs: dict) -> bool:
    """Whether a plain call of a model that is ours goes to our loop; if not, one warning gives the reason."""
    reason = unserved(model, args, kwargs)
    if reason is None:
        try:
            _check_call(model, kwargs)
        except (TypeError, ValueError) as error:
            reason = str(error)
    if reason is not None:
        _say_stock(model, reason)
    return reason is None


def _refusal(model, call: Call) -> str | None:
    try:
        found = images.given(call.model_kwargs)
        check(model, call, found and seen.checked(model, call, found))
    except ValueError as error:
        return str(error)
    return None


def _say_stock(model, reason: str) -> None:
    kept = cache_format_of(model)
    what = "is prepared" if kept is None else f"keeps keys and values as {kept.word}"
    how = "module by module" if kept is None else "module by module, with keys and values as they are computed"
    if router_of(model) is not None:
        what = f"{what} and is routed" if is_prepared(model) or kept else "is routed"
        how = f"{how}, and reads all planes"
    said = f"{type(model).__name__} {what}, but transformers' own loop runs this call, {how}: {reason}"
    say_once(model, said, kind=re.sub(r"\d+", "", said))  # whatever the numbers


def _check_call(model, kwargs: dict) -> None:
    """What stock preparation would accept or misreport."""
    if type(model).generate is not GenerationMixin.generate:
        raise ValueError(
            f"{type(model).__name__} overrides generate, which assistant_models does not support; "
            "call its language model's generate, or leave assistant_models out"
        )
    for name in ("assistant_model", "assistant_tokenizer"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"assistant_models and {name} were both given: put every level into assistant_models "
                "and its tokenizer into assistant_tokenizers"
            )
    check_arguments(kwargs, option(model, kwargs, "top_p"))
    check_target(model, option(model, kwargs, "num_beams"))
    check_decoding({name: option(model, kwargs, name) for name in OTHER_DECODING})


def _require_no_word(assistant_model) -> None:
    """TypeError for a level's word where stock takes a model; it would say that a str has no config."""
    if isinstance(assistant_model, str):
        raise TypeError(
            f"assistant_model is {assistant_model!r}, it takes a model: words and folders are levels, "
            "assistant_models=[...] with an s"
        )


def _check_streamer(model, kwargs: dict) -> None:
    """`check_streamer` before stock shows the streamer the prompts."""
    prompts = kwargs.get("input_ids", kwargs.get("inputs"))
    if getattr(prompts, "ndim", 0) == 2:
        check_streamer(kwargs.get("streamer"), len(prompts) * (option(model, kwargs, "num_return_sequences") or 1))


def _expand(model, kwargs: dict) -> dict:
    """num_return_sequences: repeat the rows here, since stock preparation refuses it beside an assistant."""
    copies = option(model, kwargs, "num_return_sequences")
    if copies is None or copies == 1:
        return kwargs
    if copies < 1:
        raise ValueError(f"num_return_sequences={copies}: it must be at least 1")
    if not option(model, kwargs, "do_sample"):
        raise ValueError(
            f"num_return_sequences={copies} without sampling would give {copies} equal rows: pass do_sample=True, or "
            "num_return_sequences=1"
        )
    if kwargs.get("generation_config") is not None:
        kwargs = {**kwargs, "generation_config": copy.deepcopy(kwargs["generation_config"])}
        kwargs["generation_config"].num_return_sequences = 1
    if kwargs.get("generation_config") is None or kwargs.get("num_return_sequences") is not None:
        kwargs = {**kwargs, "num_return_sequences": 1}  # beside a generation_config a keyword is deprecated
    for name in ("inputs", "input_ids", "attention_mask", "position_ids"):
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name].repeat_interleave(copies, dim=0)
    return kwargs
