"""Which past_key_values can a call continue, and what does it return in them?"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..engines.modules.states import STATE_ARGUMENTS, Kept, keeps_state, of_layers
from ..speculation.checker import Verdict
from ..speculation.draft import Rows
from ..speculation.loop import Emit, Loop
from ..speculation.stats import SpeculationStats
from .levels.wiring import Chain
from .processing import Prompts, Stopping


def check_given(model: PreTrainedModel, given: DynamicCache | None, prompts: Prompts) -> None:
    """Raise ValueError for a user's filled cache that cannot be of the first tokens of these prompts.

    Whether its keys and values are of those very tokens cannot be seen.
    """
    length, width = _length(given), prompts.input_ids.shape[1]
    if not length:
        return
    if prompts.has_holes:
        hidden = width - min(prompts.lengths)
        raise ValueError(
            f"past_key_values holds {length} tokens, and the attention_mask hides {hidden} of the prompt: it is "
            "unknown whether they are in the cache; leave out past_key_values, or the masked tokens"
        )
    if not all(type(layer) is DynamicLayer for layer in given.layers):
        raise ValueError(
            f"a filled {type(given).__name__} cannot be continued with assistant_models where a layer of it is no "
            "DynamicLayer: pass a DynamicCache without sliding layers, or the whole prompt"
        )
    if length >= width:
        raise ValueError(
            f"past_key_values holds {length} tokens and the prompt has {width}: what is continued must be of the "
            f"prompt's first tokens, {width - 1} at most; crop the cache, or pass the text it belongs to"
        )
    _check_layers(model, given, prompts)


def check_no_states(model: PreTrainedModel, model_kwargs: dict, own: bool) -> None:
    """Raise ValueError for a user's cache of a model that runs row by row; own: whether it is one, filled or not."""
    what = "keeps a state" if keeps_state(model) else "runs row by row, over caches"
    for name in STATE_ARGUMENTS:
        if model_kwargs.get(name) is not None and (own or Kept.of(model_kwargs[name], 0).whole_bytes):
            raise ValueError(
                f"{name} was given, and {type(model).__name__} {what} that this loop neither takes over nor "
                f"returns: leave out {name} and pass the whole prompt"
            )


def _check_layers(model: PreTrainedModel, given: DynamicCache, prompts: Prompts) -> None:
    config, ids = model.config.get_text_config(), prompts.input_ids
    if len(given.layers) != config.num_hidden_layers:
        raise ValueError(
            f"past_key_values has {len(given.layers)} layers and {type(model).__name__} {config.num_hidden_layers}: "
            "it is another model's; leave it out"
        )
    latent = hasattr(config, "kv_lora_rank")  # its head_dim is of a part of the keys only
    sizes = [of_layers(config, name) for name in ("num_key_value_heads", "head_dim")]
    for index, (layer, heads, dim) in enumerate(zip(given.layers, *sizes, strict=True)):
        size = layer.keys.shape[-1] if latent else dim or layer.keys.shape[-1]
        own = latent or hasattr(config, "v_head_dim")
        expected = [len(ids), (not latent and heads) or layer.keys.shape[1], given.get_seq_length(), size]
        _check_states(model, layer.keys, expected, ids, f"the keys of layer {index}")
        expected = [*expected[:3], layer.values.shape[-1] if own else size]
        _check_states(model, layer.values, expected, ids, f"the values of layer {index}")


def _check_states(model: PreTrainedModel, states: Tensor, expected: list[int], ids: Tensor, what: str) -> None:
    if list(states.shape) != expected:
        raise ValueError(
            f"{what} of past_key_values have shape {list(states.shape)}, and {expected} is what "
            f"{type(model).__name__} would make of the first tokens of {len(ids)} rows; leave it out"
        )
    if states.device != ids.device or (
        states.dtype != model.dtype and not torch.is_autocast_enabled(ids.device.type)
    ):
        raise ValueError(
            f"{what} of past_key_values are {states.dtype} on {states.device}, and "
            f"{type(model).__name__} computes in {model.dtype} on {ids.device}; leave it out"
        )


def tokens_in(given: DynamicCache | None, prompts: Prompts) -> int:
    """How many first tokens of every row are in a cache that `check_given` let through."""
    length = _length(given)
    return min(sum(column < length for column in prompts.columns(number)) for number in range(len(prompts.rows)))


def take_over(chain: Chain, given: DynamicCache, count: int, prompts: Prompts) -> None:
    """Copy keys and values of the first `count` tokens of every row into the target's cache, without padding."""
    columns = [prompts.columns(number)[:count] for number in range(len(prompts.rows))]
    index = torch.tensor(columns, device=prompts.input_ids.device)[:, None, :, None]

    def without_padding(states: Tensor) -> Tensor:
        return states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))

    layers = (map(without_padding, (layer.keys, layer.values)) for layer in given.layers)  # one at a time
    chain.target.runner.cache.load(layers, count)


class ReturnedCache:
    """Keys and values of every row, copied as it ends, for the cache that comes back.

    An `Emit` in front of another one, if there is one.
    """

    def __init__(
        self, chain: Chain, prompts: Prompts, stop: Stopping, budget: int, given: DynamicCache, emit: Emit | None
    ):
        self.chain, self.prompts, self.stop, self.budget = chain, prompts, stop, budget
        self.given, self.emit, self.begin = given, emit, _length(given)
        self._loop: Loop | None = None
        self._taken: dict[int, list[tuple[Tensor, ...]]] = {}

    def __call__(self, numbers: list[int], kept: Rows, verdict: Verdict) -> None:
        # Rows that went on step by step, after captured rounds, lie in their order.
        places = range(len(numbers)) if self._loop is None else self._loop.rounds.places
        for number, place in zip(numbers, places, strict=True):
            row = self.prompts.grown[number]
            full = len(row) - self.prompts.lengths[number] >= self.budget
            if number not in self._taken and (full or self.stop.ended(number)):
                cache = self.chain.target.runner.cache
                self._taken[number] = cache.row(place, self._skipped(number), len(row) - 1)
        if self.emit is not None:
            self.emit(numbers, kept, verdict)

    def decode(self, loop: Loop, rows: Rows, budgets: list[int], cached: int) -> SpeculationStats:
        """`loop.decode`, by a loop that emits to this object."""
        self._loop = loop
        try:
            return loop.decode(rows, budgets, cached)
        finally:
            self._loop = None  # it holds the caches

    def fill(self) -> DynamicCache:
        """The given cache, with the columns of `sequences` added for which every row has keys and values.

        The last token of a row was never fed, so these are all columns before the one where the first row ended.
        Columns of padding hold zeros.
        """
        prompts = self.prompts
        new = min(len(row) - length for row, length in zip(prompts.grown, prompts.lengths, strict=True))
        count = prompts.input_ids.shape[1] + new - 1 - self.begin
        try:
            for layer in range(len(self._taken[0])):
                self.given.update(self._columns(layer, 0, count), self._columns(layer, 1, count), layer)
                for layers in self._taken.values():
                    layers[layer] = ()  # they are in the cache now: what was copied of rows is not there twice
        except BaseException:  # no memory, an interrupt: the caller's cache is as it was
            for layer in self.given.layers:
                if self.begin:
                    layer.keys, layer.values = layer.keys[:, :, : self.begin], layer.values[:, :, : self.begin]
                else:
                    layer.keys = layer.values = None
                    layer.is_initialized = False
            raise
        return self.given

    def _columns(self, layer: int, which: int, count: int) -> Tensor:
        """Keys (0) or values (1) `[batch, kv_heads, count, head_dim]` of a layer."""
        first = self._taken[0][layer][which]
        shape = len(self._taken), first.shape[0], count, first.shape[2]
        own = self.chain.target.runner.model.dtype  # float16 is computed in float32
        out = torch.zeros(shape, dtype=own if own == torch.float16 else first.dtype, device=first.device)
        for number, layers in self._taken.items():
            states = layers[layer][which]
            columns = self.prompts.columns(number, states.shape[1] + self._skipped(number))[self._skipped(number) :]
            places = [column - self.begin for column in columns if column - self.begin < count]
            # Almost always side by side: a copy, where an index would call torch's own threads (see `rows.new_kv`).
            together = bool(places) and places[-1] - places[0] == len(places) - 1
            out[number, :, slice(places[0], places[-1] + 1) if together else places] = states[:, : len(places)]
        return out

    def _skipped(self, number: int) -> int:
        """Tokens of a row that the given cache holds."""
        return sum(column < self.begin for column in self.prompts.columns(number))


def _length(given: DynamicCache | None) -> int:
    return 0 if given is None else given.get_seq_length()
