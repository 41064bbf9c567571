"""How do rows of different lengths attend in one call?

A plan says where the tokens of the running forward pass sit; the attention of every model of a chain reads it, in
place of the masks that transformers would build.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from ..trees import END, Parents, depths
from .states import row_by_row

ATTENTION = "mlspec_ragged"
_running = threading.local()
_switching = threading.Lock()
_switched: dict[int, tuple[int, object]] = {}  # id of a config -> (threads inside, attention it came with)
# What some architectures hand to their attention and this one does not compute.
_UNKNOWN_TERMS = ("position_bias", "indices", "block_indices", "sinks")
_UNSAID = -1


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

    @property
    def slots(self) -> Tensor:
        """int64 `[batch, width]`: where keys and values go."""
        return self.positions

    def last(self, counts: list[int]) -> int:
        """The last position of a token that is no padding; counts[r] are not, of row r."""
        lines = zip(self.starts, counts, strict=True)
        return max((start + count - 1 for start, count in lines if count), default=0)

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


class TreePlan(Plan):
    """A plan whose last tokens are trees: they lie side by side in the cache, at positions and behind parents of their
    own. A token sees what a row that ends with it would have.

    first: per row which of its tokens is node 0. parents: of every row's nodes.
    """

    def __init__(self, starts: list[int], width: int, device: torch.device, first: list[int], parents: list[Parents]):
        super().__init__(starts, width, device)
        self._slots, self.positions = self.positions, self.positions.cpu().clone()
        self._hidden = torch.ones(len(starts), width, self.end, dtype=torch.bool)
        self._at = torch.arange(self.end).repeat(len(starts), 1)  # of every slot of a row its position
        for r, (start, place, own) in enumerate(zip(starts, first, parents, strict=True)):
            self._hidden[r] = torch.arange(self.end) > start + torch.arange(width)[:, None]
            self._put(r, start + place, place, own)
        self.positions = self.positions.to(device)
        self.uniform = False
        lines = zip(starts, first, parents, strict=True)
        self._lasts = [start + place - 1 + max(depths(own), default=0) for start, place, own in lines]

    @property
    def slots(self) -> Tensor:
        return self._slots

    def last(self, counts: list[int]) -> int:
        return max((last for last, count in zip(self._lasts, counts, strict=True) if count), default=0)

    def _put(self, r: int, slot: int, place: int, parents: Parents) -> None:
        """The nodes of row r are its tokens from `place` on, in slots from `slot` on."""
        for node, (parent, depth) in enumerate(zip(parents, depths(parents), strict=True)):
            self.positions[r, place + node] = self._at[r, slot + node] = slot - 1 + depth
            seen = self._hidden[r, place + node, slot:]
            seen[:] = True if parent == END else self._hidden[r, place + parent, slot:]
            seen[node] = False

    def mask(self, window: int | None, groups: int, like: Tensor) -> Tensor:
        """Additive mask `[batch, 1, groups * width, end]`."""
        key = (window, groups, like.dtype, like.device)
        if key not in self._masks:
            hidden = self._hidden
            if window is not None:
                hidden = hidden | (self._at[:, None] <= self.positions.cpu()[:, :, None] - window)
            mask = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
            self._masks[key] = mask.to(like.device).repeat(1, groups, 1)[:, None]
        return self._masks[key]


def running_plan() -> Plan | None:
    """The plan of the forward pass this thread is in."""
    return getattr(_running, "plan", None)


@contextmanager
def planned(plan: Plan):
    """The forward pass inside writes and attends by `plan`."""
    before = running_plan()
    _running.plan = plan
    try:
        yield plan
    finally:
        _running.plan = before


@contextmanager
def ragged_attention_on(models: list):
    """Inside, the attention of these models reads the plan; whatever happens, they leave as they came.

    Several threads may be inside with one model; the last one out restores it. A model that runs one row at a time
    does so with the attention it came with.
    """
    models = [model for model in models if not row_by_row(model)]
    places: list = list({id(c): c for c in (model.config.get_text_config() for model in models)}.values())
    if any(model.device.type == "cuda" for model in models):
        places.append(_CudnnAttention)
    with _switching:
        for place in places:
            users, before = _switched.get(id(place), (0, place._attn_implementation_internal))
            _switched[id(place)] = users + 1, before
            place._attn_implementation_internal = ATTENTION
    try:
        yield
    finally:
        with _switching:
            for place in places:
                users, before = _switched.pop(id(place))
                if users > 1:
                    _switched[id(place)] = users - 1, before
                else:
                    place._attn_implementation_internal = before


class _CudnnSwitch:
    """torch's flag for cuDNN attention, in the form of a config: off while ragged attention is on.

    cuDNN builds a plan for every new shape, and here the number of keys grows with every round.
    """

    @property
    def _attn_implementation_internal(self) -> bool:
        return torch.backends.cuda.cudnn_sdp_enabled()

    @_attn_implementation_internal.setter
    def _attn_implementation_internal(self, value: bool | str) -> None:
        torch.backends.cuda.enable_cudnn_sdp(value is True)


_CudnnAttention = _CudnnSwitch()


def attend(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask=None,
    scaling: float | None = None,
    sliding_window: int | None = _UNSAID,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
):
    """Causal grouped-query attention over rows of different lengths, in transformers' attention interface.

    query `[batch, heads, width, dim]`, key and value `[batch, kv_heads, end, dim]` -> `[batch, width, heads, dim]`,
    None. Queries that share a key head are laid side by side, so keys and values are never repeated.
    """
    plan = running_plan()
    if plan is None or attention_mask is not None or not kwargs.keys().isdisjoint(_UNKNOWN_TERMS):
        _refuse(module, plan, attention_mask, kwargs)
    if sliding_window == _UNSAID:
        sliding_window = _window(module)
    batch, heads, width, dim = query.shape
    kv_heads, end = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    from_start = plan.uniform and plan.starts[0] == 0 and width > 1 and (sliding_window or end) >= end
    if from_start and softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
        return out.transpose(1, 2).contiguous(), None
    mask = plan.mask(sliding_window, groups, query)
    query = query.reshape(batch, kv_heads, groups * width, dim)
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    else:
        sinks = None if s_aux is None else s_aux.view(1, kv_heads, groups, 1).expand(batch, -1, -1, width)
        out = _attend_by_hand(query, key, value, mask, scaling, softcap, sinks)
    return out.reshape(batch, heads, width, -1).transpose(1, 2).contiguous(), None  # some classes take views of it


def _window(module) -> int | None:
    """The sliding window of a layer whose architecture leaves it to the mask, which there is none of here."""
    config = module.config
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[module.layer_idx] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None) or None


def _refuse(module, plan: Plan | None, attention_mask, kwargs: dict) -> None:
    kind = type(module).__name__
    if plan is None:
        raise RuntimeError(
            f"{kind} ran outside the loop while the same model generates with assistant_models, from another thread "
            "or from a processor, criterion or streamer of that call: wait for it, or use a model of its own there"
        )
    term = "a mask of its own" if attention_mask is not None else next(t for t in _UNKNOWN_TERMS if t in kwargs)
    raise ValueError(
        f"{kind} adds {term} to its attention, which speculation over rows of different lengths does not compute: "
        "generate without assistant_models"
    )


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
