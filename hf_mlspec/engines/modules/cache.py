"""Where do the keys and values of a batch live when every row has its own length?

Every row's tokens sit at slots 0, 1, 2 ... of its own lane; there is no padding between them. How many slots of a row
are valid is known to the engine that wrote them, so rolling back moves a number and copies nothing, and a draft of the
target's own shape can write into the target's cache and be overwritten by it (QSpec, section 3.2: "KV cache
overwriting").
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from ...formats import CacheFormat
from .attention import ATTENTION, Plan, attend, planned, running_plan

_GROWTH = 256  # slots; a lane grows by half, to a multiple of this


class _Lane(CacheLayerMixin):
    """Keys and values of one decoder layer: `[batch, kv_heads, capacity, head_dim]` each, or codes of them."""

    is_compileable = False
    is_sliding = False
    is_croppable = False

    def __init__(self, capacity: int, cache_format: CacheFormat | None = None):
        super().__init__()
        self.format = cache_format
        self.capacity = capacity  # a number and not the cache: a cycle would keep its memory until the next gc

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        # Zeros, not garbage: a masked slot gets weight 0, and 0 x NaN would still be NaN.
        self.keys = self._zeros(key_states)
        self.values = self._zeros(value_states)
        self.is_initialized = True

    def _zeros(self, states: Tensor) -> Tensor:
        batch, heads, _, dim = states.shape
        if self.format is not None:
            rows = batch, heads, self.capacity, self.format.width(dim)
            return states.new_zeros(rows, dtype=self.format.dtype)
        return states.new_zeros(batch, heads, self.capacity, dim)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        plan = running_plan()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.resize(plan.end)
        self.keys = _write(self.keys, self._kept(key_states), plan)
        self.values = _write(self.values, self._kept(value_states), plan)
        lanes = self.keys[:, :, : plan.end], self.values[:, :, : plan.end]
        return lanes if self.format is None else tuple(self.states(lane, key_states.dtype) for lane in lanes)

    def _kept(self, states: Tensor) -> Tensor:
        return states if self.format is None else self.format.quantize(states)

    def states(self, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys or values, of a dtype where they are kept as codes."""
        return kept if self.format is None else self.format.dequantize(kept, dtype)

    def resize(self, slots: int) -> None:
        """Make room for `slots` slots a row."""
        have = self.keys.shape[2]
        if slots > have:
            more = max(slots - have, have // 2)
            more += -(have + more) % _GROWTH
            self.keys, self.values = (F.pad(t, (0, 0, 0, more)) for t in (self.keys, self.values))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return running_plan().end, 0

    def get_seq_length(self) -> int:
        return 0 if not self.is_initialized else self.keys.shape[2]

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


def _write(lane: Tensor, states: Tensor, plan: Plan) -> Tensor:
    if plan.uniform:
        lane[:, :, plan.starts[0] : plan.end] = states
    else:
        index = plan.slots.to(states.device)[:, None, :, None].expand(states.shape)
        lane.scatter_(2, index, states.to(lane.dtype))  # under autocast prefill and steps may differ in dtype
    return lane


class RaggedCache(Cache):
    """KV storage for a batch of rows of different lengths; see the module's docstring.

    num_layers: decoder layers of the model. capacity: slots a row has at first; lanes grow as needed. cache_format:
    None for keys and values as they come; codes become keys and values of a layer again in every call.
    """

    def __init__(self, num_layers: int, capacity: int = _GROWTH, cache_format: CacheFormat | None = None):
        capacity += -capacity % _GROWTH
        super().__init__(layers=[_Lane(capacity, cache_format) for _ in range(num_layers)])

    def select(self, keep: list[int], slots: int) -> None:
        """Keep the rows of these indices only, in this order. slots: that hold something of rows which move; all of
        them are gathered."""
        for lane in self._written():
            if keep != list(range(len(lane.keys))):
                index = torch.tensor(keep, dtype=torch.long, device=lane.keys.device)
                lane.keys, lane.values = lane.keys[index], lane.values[index]

    def extend_rows(self, count: int) -> None:
        """Append `count` rows of zeros."""
        for lane in self._written() if count else ():
            lane.keys, lane.values = (F.pad(t, (0, 0, 0, 0, 0, 0, 0, count)) for t in (lane.keys, lane.values))

    def shrink(self, slots: int) -> None:
        """Copy the rows to memory for `slots` slots of each, where that halves it or better."""
        slots += -slots % _GROWTH
        for lane in self._written():
            if 2 * slots <= lane.keys.shape[2]:
                lane.keys, lane.values = (
                    t[:, :, :slots].clone(memory_format=torch.contiguous_format) for t in (lane.keys, lane.values)
                )

    def load(self, layers: Iterable[Iterable[Tensor]], length: int) -> None:
        """Copy `length` slots of every layer: keys and values `[rows, kv_heads, length, head_dim]`, no padding."""
        for lane, layer in zip(self.layers, layers, strict=True):
            keys, values = layer
            with planned(Plan([0] * len(keys), length, keys.device)):
                lane.update(keys, values)

    def move(self, row: int, slots: list[int], first: int) -> None:
        """Keys and values of these slots of a row go to slots `first`, `first` + 1 ..."""
        for lane in self._written():
            for states in (lane.keys, lane.values):
                states[row, :, first : first + len(slots)] = states[row, :, slots]

    def row(self, index: int, start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of slots `start` .. `end` of a row: of every layer keys and values `[kv_heads, slots, head_dim]`."""
        found = []
        for lane in self.layers:
            kept = (states[index, :, start:end].clone() for states in (lane.keys, lane.values))
            found.append(tuple(lane.states(one, lane.dtype) for one in kept))
        return found

    @property
    def nbytes(self) -> int:
        """Bytes held by the lanes."""
        return sum(lane.keys.nbytes + lane.values.nbytes for lane in self._written())

    def _written(self) -> list[_Lane]:
        """Lanes that have memory; the others take their rows from the first keys that come."""
        return [lane for lane in self.layers if lane.is_initialized]


AttentionInterface.register(ATTENTION, attend)
