"""What does a model keep of a row, and can a length roll it back?

Keys and values in a lane can be cut to any length. Everything else, such as a recurrent state, a convolution's last
inputs or a window that has moved on, is copied whole.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

STATE_ARGUMENTS = ("past_key_values", "cache_params", "state")  # of a forward, for what it keeps of its row
_ROLLED_BACK = (DynamicLayer, DynamicSlidingWindowLayer)  # in a lane of ours, of which every slot stays
# Classes behind the interface whose attention is given more than it takes: a mask of its own, blocks of keys.
_ADD_TERMS = ("DogeForCausalLM", "MiniMaxM3VLForCausalLM", "MiniMaxM3SparseForConditionalGeneration")
_inside = threading.Lock()
_PLAIN_KINDS = frozenset({"full_attention", "sliding_attention"})


def of_layers(config: PreTrainedConfig, name: str) -> list[Any]:
    """An entry of a config for each layer, None where it says nothing. Some configs differ from layer to layer, and
    refuse to give one number for all (Gemma 4)."""
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    return [getattr(layer, name, None) for layer in layers]


def keeps_state(model: nn.Module) -> bool:
    """Whether a model keeps something of its rows that a length cannot roll back: it says so, or the cache that
    transformers makes for its config has a layer that is not one of keys and values alone, or layers share them."""
    config = model.config.get_text_config()
    if getattr(model, "_is_stateful", False) or getattr(config, "num_kv_shared_layers", 0):
        return True
    kinds = getattr(config, "layer_types", None)
    if not kinds or _PLAIN_KINDS.issuperset(kinds):
        return False
    return not all(type(layer) in _ROLLED_BACK for layer in DynamicCache(config=config).layers)


def row_by_row(model: nn.Module) -> bool:
    """Whether each row of a model takes forward passes of its own: it keeps a state, its attention is its own or sees
    chunks, or its cache alone knows a window."""
    return keeps_state(model) or attends_by_itself(model) or _sees_chunks(model) or only_the_cache_has_windows(model)


def _sees_chunks(model: nn.Module) -> bool:
    """Whether some layers see the tokens of their own chunk alone (Llama 4), which the masks of lanes do not hide."""
    return "chunked_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ())


def attends_by_itself(model: nn.Module) -> bool:
    """Whether rows of different lengths cannot share a forward pass, because its attention is not behind transformers'
    interface or is given more than that has, or its forward takes no position ids (nor one that a hook put there)."""
    own = vars(model).get("forward")
    takes = _arguments(type(model).forward) if own is None else inspect.signature(own).parameters
    more = any(base.__name__ in _ADD_TERMS for base in type(model).__mro__)
    return more or not model._supports_attention_backend or "position_ids" not in takes


@functools.lru_cache(maxsize=64)
def _arguments(function: Callable) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def config_window(config: PreTrainedConfig) -> int | None:
    """Tokens a layer with a sliding window attends to, None where every layer sees the whole row."""
    kinds = getattr(config, "layer_types", None)
    if kinds and "sliding_attention" not in kinds:
        return None
    return getattr(config, "sliding_window", None) or None


def only_the_cache_has_windows(model: nn.Module) -> bool:
    """Whether transformers' cache forgets what is further back than `sliding_window` of the config, while no mask of
    the class hides it. A prompt then sees all of itself, and what is behind it a window."""
    if config_window(model.config.get_text_config()) is None:
        return False
    return not any(isinstance(module, PreTrainedModel) and _masks_windows(type(module)) for module in model.modules())


@functools.lru_cache(maxsize=64)
def _masks_windows(kind: type) -> bool:
    """Whether the file of a class, or of one that it is derived from, has a function for masks of windows."""
    own = kind.__mro__[: kind.__mro__.index(PreTrainedModel)]
    return any("sliding_window" in name for base in own for name in vars(sys.modules[base.__module__]))


def why_not_row_by_row(model: nn.Module) -> str | None:
    """Why a model that needs a forward pass for each row cannot have it; None where it can, or needs none."""
    if keeps_state(model):
        takes = ", ".join(STATE_ARGUMENTS)
        return None if state_argument(model) is not None else (
            f"keeps a state that can be neither copied nor put back: its forward takes none of {takes}; transformers' "
            "own generate, without assistant_models, runs it"
        )
    if not attends_by_itself(model):
        return None
    try:
        new_states(model)
    except Exception as error:  # whatever its config lacks
        said = f"{type(error).__name__}: {error}"
        return f"gets no cache from transformers, whose generate does not run it: {said}"
    return None


def states_inside(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Modules and the names of attributes, neither parameters nor buffers, in which they keep what belongs to a row
    (RecurrentGemma)."""
    return [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if name.split("_")[-1] in ("state", "states") and (value is None or isinstance(value, Tensor))
    ]


@contextmanager
def with_states_inside(places: list[tuple[nn.Module, str]], values: list[Tensor | None]) -> Iterator[None]:
    """Inside, modules hold the states of a row; afterwards `values` are what has become of them, and the modules are
    as they were. One thread at a time is inside, where there are such places."""
    if not places:
        yield
        return
    with _inside:
        before = [getattr(module, name) for module, name in places]
        try:
            for (module, name), value in zip(places, values, strict=True):
                setattr(module, name, value)
            yield
            values[:] = [getattr(module, name) for module, name in places]
        finally:
            for (module, name), value in zip(places, before, strict=True):
                setattr(module, name, value)


def state_argument(model: nn.Module) -> str | None:
    """The argument of a model's forward that holds what it keeps of its rows."""
    takes = inspect.signature(model.forward).parameters
    return next((name for name in STATE_ARGUMENTS if name in takes), None)


def new_states(model: nn.Module) -> DynamicCache | None:
    """What transformers would start a row with; None where the model makes it by itself."""
    if not model._supports_default_dynamic_cache():
        return None
    made = DynamicCache(config=model.config.get_text_config(decoder=True))
    if made.layers and not any(isinstance(layer, CacheLayerMixin) for layer in made.layers):
        # An early exit in front of the first attention: masks, which nobody reads there, ask for a layer's length.
        made.layers.append(DynamicLayer())
    return made


@dataclass
class Kept:
    """A copy of what a model keeps of a row of `length` tokens. states: the copy; of a layer of keys and values that
    only grows, nothing but how many there were. nbytes: of the copy. whole_bytes: with those keys and values."""

    states: Any
    length: int
    nbytes: int
    whole_bytes: int

    @classmethod
    def of(cls, states: Any, length: int) -> Kept:
        """A copy of these states."""
        cut, grown = [0], [0]
        return cls(_copied(states, cut, grown), length, cut[0], cut[0] + grown[0])

    @staticmethod
    def whole(states: Any) -> Any:
        """The states for another owner: keys and values are shared, which only grow by new tensors."""
        return restored(Kept.of(states, 0), states)


@dataclass
class _Lengths:
    """How many keys and values a layer held."""

    layer: DynamicLayer
    count: int


def restored(kept: Kept, now: Any) -> Any:
    """States as they were copied. now: what has become of them; keys and values come from there."""
    return _restored(kept.states, now)


def _restored(states: Any, now: Any) -> Any:
    if isinstance(states, dict) and any(isinstance(one, Cache) for one in states.values()):
        return {name: _restored(one, now[name]) for name, one in states.items()}
    if isinstance(states, tuple):
        return tuple(_restored(one, other) for one, other in zip(states, now, strict=True))
    if not isinstance(states, Cache):
        return _copied(states, [0], [0])
    made = copy.copy(states)
    made.layers = [_layer(old, now.layers[index]) for index, old in enumerate(states.layers)]
    return made


def _layer(old: Any, now: Any) -> Any:
    if not isinstance(old, _Lengths):
        return _copied(old, [0], [0])
    made = copy.copy(old.layer)
    if old.count:
        made.keys, made.values = now.keys[:, :, : old.count], now.values[:, :, : old.count]
    return made


def _copied(value: Any, nbytes: list[int], grown: list[int]) -> Any:
    if isinstance(value, Tensor):
        nbytes[0] += value.nbytes if value.ndim else 0  # a number is no state
        return value.clone()
    if type(value) is DynamicLayer:
        return _length_of(value, grown)
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update({key: _copied(one, nbytes, grown) for key, one in value.items()})
        return made
    if type(value) in (list, tuple):
        return type(value)(_copied(one, nbytes, grown) for one in value)
    if not hasattr(value, "__dict__") or isinstance(value, (type, nn.Module, PreTrainedConfig)) or callable(value):
        return value
    made = copy.copy(value)
    vars(made).update({key: _copied(one, nbytes, grown) for key, one in vars(value).items()})
    return made


def _length_of(layer: DynamicLayer, grown: list[int]) -> _Lengths:
    made, count = copy.copy(layer), 0
    if layer.is_initialized and isinstance(layer.keys, torch.Tensor) and layer.keys.ndim == 4:
        count = layer.keys.shape[2]
        grown[0] += layer.keys.nbytes + layer.values.nbytes
        made.keys = made.values = None
    return _Lengths(made, count)
