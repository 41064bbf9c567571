"""Where do the keys and values of a batch live when every row has its own length?

Every row's tokens sit at slots 0, 1, 2 ... of its own lane; there is no padding between them. How many slots of a row
are true is known to the runner that wrote them, so rolling back moves a number and copies nothing, and a draft of the
target's own shape can write into the target's cache and be overwritten by it (QSpec, section 3.2: "KV cache
overwriting").
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

ATTENTION = "mlspec_ragged"
_GROWTH = 256  # slots; a lane grows by half, to a multiple of this
_running = threading.local()


class Plan:
    """Where the next `width` tokens of every row go: row r writes slots starts[r] .. starts[r] + width - 1.

    `positions`: int64 `[batch, width]`, also the position ids. `end`: slots any row may look at.
    """

    def __init__(self, starts: list[int], width: int, device: torch.device):
        self.starts, self.width = starts, width
        self.uniform = len(set(starts)) == 1
        self.end = max(starts) + width
        steps = torch.arange(width, device=device)
        if self.uniform:
            self.positions = (steps + starts[0])[None].expand(len(starts), -1)
        else:
            self.positions = torch.tensor(starts, device=device)[:, None] + steps
        self._masks: dict = {}

    def mask(self, window: int | None, groups: int, like: Tensor) -> Tensor | None:
        """Additive mask `[batch or 1, 1, groups * width, end]`, or None where every query sees every slot."""
        if window is not None and window >= self.end:
            window = None
        if self.width == 1 and self.uniform and window is None:
            return None
        key = (window, groups, like.dtype, like.device)
        if key not in self._masks:
            positions = self.positions[:1] if self.uniform else self.positions
            query, slot = positions.to(like.device)[:, :, None], torch.arange(self.end, device=like.device)
            hidden = slot > query if window is None else (slot > query) | (slot <= query - window)
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
            self._masks[key] = mask.repeat(1, groups, 1)[:, None]
        return self._masks[key]


class _Lane(CacheLayerMixin):
    """Keys and values of one decoder layer: `[batch, kv_heads, capacity, head_dim]` each."""

    is_compileable = False
    is_sliding = False
    is_croppable = False

    def __init__(self, owner: RaggedCache):
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        # Zeros, not garbage: a masked slot gets weight 0, and 0 x NaN would still be NaN.
        self.keys = self._zeros(key_states)
        self.values = self._zeros(value_states)
        self.is_initialized = True

    def _zeros(self, states: Tensor) -> Tensor:
        batch, heads, _, dim = states.shape
        return states.new_zeros(batch, heads, self.owner.capacity, dim)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        plan = _running.plan
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.resize(plan.end)
        self.keys = _write(self.keys, key_states, plan)
        self.values = _write(self.values, value_states, plan)
        return self.keys[:, :, : plan.end], self.values[:, :, : plan.end]

    def resize(self, slots: int) -> None:
        """Make room for `slots` slots a row."""
        have = self.keys.shape[2]
        if slots > have:
            more = max(slots - have, have // 2)
            more += -(have + more) % _GROWTH
            self.keys, self.values = (F.pad(t, (0, 0, 0, more)) for t in (self.keys, self.values))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return _running.plan.end, 0

    def get_seq_length(self) -> int:
        return 0 if not self.is_initialized else self.keys.shape[2]

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


def _write(lane: Tensor, states: Tensor, plan: Plan) -> Tensor:
    if plan.uniform:
        lane[:, :, plan.starts[0] : plan.end] = states
    else:
        index = plan.positions.to(states.device)[:, None, :, None].expand(states.shape)
        lane.scatter_(2, index, states)
    return lane


class RaggedCache(Cache):
    """KV storage for a batch of rows of different lengths; see the module's docstring.

    num_layers: decoder layers of the model. capacity: slots a row has at first; lanes grow as needed.
    """

    def __init__(self, num_layers: int, capacity: int = _GROWTH):
        self.capacity = capacity + -capacity % _GROWTH
        super().__init__(layers=[_Lane(self) for _ in range(num_layers)])

    def select(self, keep: list[int]) -> None:
        """Keep the rows of these indices only, in this order."""
        for lane in self.layers:
            if lane.is_initialized:
                index = torch.tensor(keep, device=lane.keys.device)
                lane.keys, lane.values = lane.keys[index], lane.values[index]

    def load(self, other: Cache, length: int) -> None:
        """Copy the first `length` slots of every layer of a plain transformers cache (batch 1, no padding)."""
        with planned(Plan([0], length, other.layers[0].keys.device)):
            for layer, lane in zip(other.layers, self.layers, strict=True):
                lane.update(layer.keys[:, :, :length], layer.values[:, :, :length])

    def extend(self, other: Cache, start: int, end: int) -> None:
        """Append slots `start` .. `end` of every layer to a plain transformers cache (batch 1)."""
        for index, lane in enumerate(self.layers):
            other.update(lane.keys[:, :, start:end].clone(), lane.values[:, :, start:end].clone(), index)

    @property
    def nbytes(self) -> int:
        """Bytes held by the lanes."""
        tensors = [t for lane in self.layers if lane.is_initialized for t in (lane.keys, lane.values)]
        return sum(t.nbytes for t in tensors)


@contextmanager
def planned(plan: Plan):
    """The forward pass inside writes and attends by `plan`."""
    before = getattr(_running, "plan", None)
    _running.plan = plan
    try:
        yield plan
    finally:
        _running.plan = before


@contextmanager
def ragged_attention_on(models: list):
    """Inside, the attention of these models reads the plan; whatever happens, they leave as they came."""
    configs = {id(c): c for c in (model.config.get_text_config() for model in models)}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation_internal = ATTENTION
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


def attend(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask=None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
):
    """Causal grouped-query attention over rows of different lengths, in transformers' attention interface.

    query `[batch, heads, width, dim]`, key and value `[batch, kv_heads, end, dim]` -> `[batch, width, heads, dim]`,
    None. Queries that share a key head are laid side by side, so keys and values are never repeated.
    """
    plan = _running.plan
    batch, heads, width, dim = query.shape
    kv_heads, end = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    from_start = plan.uniform and plan.starts[0] == 0 and width > 1 and (sliding_window or end) >= end
    if from_start and softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
        return out.transpose(1, 2), None
    mask = plan.mask(sliding_window, groups, query)
    query = query.reshape(batch, kv_heads, groups * width, dim)
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    else:
        sinks = None if s_aux is None else s_aux.view(1, kv_heads, groups, 1).expand(batch, -1, -1, width)
        out = _attend_by_hand(query, key, value, mask, scaling, softcap, sinks)
    return out.reshape(batch, heads, width, -1).transpose(1, 2), None


def _attend_by_hand(query, key, value, mask, scaling, softcap, sinks):
    """Attention with a soft cap on the scores (Gemma 2) or a sink per head (gpt-oss), which SDPA does not have."""
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value
    scores = torch.cat([scores, sinks.reshape(*scores.shape[:3], 1).to(scores.dtype)], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., :-1] @ value


AttentionInterface.register(ATTENTION, attend)
