"""Which slots of a cache are valid, row by row, and where do the rows of a decoder live?

What engines share without computing: `CachedRows` of all three, `DecoderCache` and `DecoderRows` of the two decoders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..formats import CacheFormat, cache_format
from ..nn.settings import QUANT_METHOD
from ..ops.compiled_decoder import Sizes
from ..precision import OWN_BITS, Bits
from .lanes import KeptState, Lane
from .memory import PIECE, WORTH_ASKING, WRITTEN_ALONE, copy_pieces, copy_quietly, grown, moved, require_free

GROWTH = 256  # slots; a cache grows by half, to a multiple of this


class Decoder(Protocol):
    """What rows need of a whole decoder; see `CpuDecoder` and `CudaDecoder`."""

    dtype: torch.dtype
    vocab_size: int
    max_positions: int | None
    positions: int  # for how many there are rotary tables
    num_layers: int
    sizes: Sizes
    device: torch.device

    def reserve_positions(self, count: int) -> None:
        """Rotary tables for at least `count` positions."""


class CachedRows:
    """The rows of an engine's cache.

    lengths: per row, how many slots of the cache are valid; who rejects what was written lowers them. follow: the
    engine whose cache this one writes into, or None for a cache of its own (invariant 4). capacity: tokens a row is
    expected to hold. max_positions: tokens of a row that it can attend to, None where nothing bounds them.
    bytes_per_token: of keys and values, 0 where that is not known. bytes_per_row: of states, at first.
    draft_window: as `Engine.draft_window`.
    cache_format: of a cache of its own, None for keys and values as the model computes them; set before it starts.
    """

    lengths: list[int]
    follow: CachedRows | None
    cache: Any
    capacity: int
    max_positions: int | None
    bytes_per_token: int
    cache_format: CacheFormat | None
    draft_window: int = 0
    bytes_per_row: int = 0
    tap: Any = None  # engines/tap.py

    @property
    def kept_in(self) -> CacheFormat | None:
        """The format of the cache that it reads and writes, its own or its leader's."""
        return self.follow.kept_in if self.follow else self.cache_format

    def keep_in(self, kept: CacheFormat) -> None:
        """Have a cache of its own in this format, before it starts."""
        self.cache_format = kept

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values this engine holds itself."""
        return 0 if self.follow or self.cache is None else self.cache.nbytes

    def select(self, keep: list[int]) -> None:
        """Go on with these rows only. A follower's cache is its leader's business."""
        moved = [self.lengths[r] for place, r in enumerate(keep) if place != r]
        self.lengths = [self.lengths[r] for r in keep]
        if not self.follow:
            self.cache.select(keep, up_to_growth(max(moved, default=0) + 1))

    def admit(self, count: int) -> None:
        """Append `count` rows that hold nothing yet. A follower is told after its leader, who grew the cache."""
        self.lengths = self.lengths + [0] * count
        if not self.follow:
            self.cache.extend_rows(count)

    def shrink(self, slots: int) -> None:
        """Give memory back where rows of `slots` slots, at least what each holds, need a quarter of what there is."""
        if not self.follow:
            self.cache.shrink(slots)

    def forget(self, row: int) -> None:
        """Give the slots of `row` to a new sequence."""
        self.lengths[row] = 0


class DecoderCache:
    """Keys and values of a batch in one tensor `[layers, 2, batch, kv_heads, slots, head_dim]`, rows of any length.

    The first `rows` of its batch are in use; what lies beyond waits for `extend_rows`. owned: nobody else reads `kv`.
    cache_format: of `kv` where it holds codes `[..., width]`, of keys and values of `dtype`. cuts: a decoder's.
    """

    def __init__(
        self,
        kv: Tensor,
        rows: int,
        *,
        owned: bool = False,
        cache_format: CacheFormat | None = None,
        dtype: torch.dtype | None = None,
        cuts: Sequence[tuple[int, int]] = (),
    ):
        self.kv, self.rows, self.owned, self.cuts = kv, rows, owned, cuts
        self.format, self.dtype = cache_format, dtype or kv.dtype

    @classmethod
    def new(
        cls, decoder: Decoder, batch: int, capacity: int, cache_format: CacheFormat | None = None
    ) -> DecoderCache:
        """An empty cache for `batch` rows of `capacity` slots or a few more."""
        kv = new_kv(decoder, batch, up_to_growth(capacity), cache_format)
        how, cuts = {"cache_format": cache_format, "dtype": decoder.dtype}, getattr(decoder, "cache_sizes", ())
        return cls(kv, batch, owned=True, **how, cuts=cuts)

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots a row, and for half as many again as there were where there is memory for those.

        torch.OutOfMemoryError names rows and slots where there is none.
        """
        have = self.kv.shape[4]
        if slots > have:
            sizes = [(self.rows, up_to_growth(wanted)) for wanted in (max(slots, have + have // 2), slots)]
            self._become(grown(self.kv, self.rows, sizes, spend=self.owned))

    def _become(self, kv: Tensor) -> None:
        self.kv, self.owned = kv, True

    def select(self, keep: list[int], slots: int) -> None:
        """Keep the rows of these indices only, in this order. Only rows that change their place are copied, and of
        them the first `slots` slots; the memory of the others stays for `extend_rows`."""
        moves = [(place, row) for place, row in enumerate(keep) if place != row]
        kv = self.kv[:, :, :, :, :slots]
        if {row for _, row in moves}.isdisjoint(range(len(keep))) or all(row > place for place, row in moves):
            for place, row in moves:  # none is overwritten before it is read
                copy_quietly(kv[:, :, place], kv[:, :, row])
        else:
            for layer in kv:  # the rows that are gathered are there twice
                layer[:, : len(keep)] = layer[:, keep]
        self.rows = len(keep)

    def extend_rows(self, count: int) -> None:
        """Append `count` rows, and room for half as many again as there were where there is memory for those. What
        their slots hold is nobody's: a query sees the slots of its own row only, and of them those that were written
        before it."""
        wanted, (_, _, batch, _, slots, _) = self.rows + count, self.kv.shape
        if wanted > batch:
            sizes = [(rows, slots) for rows in (max(wanted, batch + batch // 2), wanted)]
            self._become(grown(self.kv, self.rows, sizes, spend=self.owned))
        self.rows += count

    def shrink(self, slots: int) -> None:
        """Copy the rows to memory for `slots` slots of each, where that takes a quarter of it or less: rows that leave
        are followed by others."""
        slots = min(up_to_growth(slots), self.kv.shape[4])
        if 4 * self.rows * slots <= self.kv.shape[2] * self.kv.shape[4]:
            self._become(moved(self.kv, self.rows, self.rows, slots, spend=self.owned))

    def load(self, layers: Iterable[Iterable[Tensor]], length: int) -> None:
        """Copy `length` slots of every layer: keys and values `[rows, kv_heads, length, head_dim]`, no padding."""
        self.reserve(length)
        for own, layer in zip(self.kv, layers, strict=False):
            for into, states in zip(own, layer, strict=True):
                kept = states if self.format is None else self.format.quantize(states)
                into[: self.rows, : kept.shape[1], :length, : kept.shape[-1]] = kept

    def row(self, index: int, start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of slots `start` .. `end` of a row: of every layer keys and values `[kv_heads, slots, head_dim]`."""
        kept = zip(self.kv[:, :, index, :, start:end], self.cuts or [(None, None)] * len(self.kv), strict=True)
        return [tuple(self._states(own[:heads], dim) for own in layer) for layer, (heads, dim) in kept]

    def _states(self, kept: Tensor, dim: int | None) -> Tensor:
        own = kept[..., : dim if self.format is None or dim is None else self.format.width(dim)]
        return own.clone() if self.format is None else self.format.dequantize(own, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.kv.nbytes


class DecoderRows(CachedRows):
    """Rows of a decoder in a cache of its own, or in its leader's (`follow`, invariant 4).

    bits: what every call reads of the weights, and multiplies them by,
    one of `decoder.bit_choices`; OWN_BITS: what the model says. A follower of the same decoder at fewer bits is the
    target drafting for itself (speculation/drafters/self_precision.py). num_positions: positions the model knows, None
    for no bound.
    """

    def __init__(
        self,
        model: nn.Module,
        decoder: Decoder,
        *,
        follow: DecoderRows | None = None,
        capacity: int = 0,
        bits: Bits = OWN_BITS,
        num_positions: int | None = None,
    ):
        self.model, self.decoder, self.follow, self.bits = model, decoder, follow, bits
        # Of the decoder, and of the model's positions only the ones before its rotation changes.
        self.dtype, self.vocab_size = decoder.dtype, decoder.vocab_size
        bounds = num_positions, decoder.max_positions
        self.max_positions = min((bound for bound in bounds if bound is not None), default=None)
        self.capacity, self.cache_format = first_capacity(capacity, self.max_positions), cache_format_of(model)
        self.cache: DecoderCache | None = None
        self.lengths: list[int] = []
        self.forwards, self.seconds = 0, 0.0

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values."""
        row = row_bytes(self.decoder.sizes.head_dim, self.decoder.dtype, self.cache_format)
        return self.decoder.num_layers * 2 * self.decoder.sizes.kv_heads * row

    def start(self, batch: int, device: torch.device) -> None:
        """An empty cache for `batch` rows; a follower takes its leader's, which must have started."""
        self.lengths = [0] * batch
        self.forwards, self.seconds = 0, 0.0
        capacity = max(self.capacity, GROWTH)
        self.cache = self.follow.cache if self.follow else None
        if not self.follow:
            self.cache = DecoderCache.new(self.decoder, batch, capacity, self.cache_format)

    def hold(self, row: int, pieces: Iterable[Tensor], count: int, state: KeptState | None = None) -> None:
        """Copy keys and values of a row's first `count` tokens into its slots: pieces `[layers, 2, kv_heads, tokens,
        head_dim]`, one behind the other, as this engine wrote them. state: behind these tokens, where layers keep one.
        `lengths` are the caller's business."""
        self._reserve(count + 1)
        copy_pieces(self.cache.kv[:, :, row, :, :count], list(pieces))
        if state is not None:
            self.states.put(row, state, count)

    def lane(self, tokens: int) -> Lane:
        """Memory for a row that is no row of the cache yet, for `read` of an engine."""
        return Lane(new_kv(self.decoder, 1, up_to_growth(tokens), self.cache_format), self._lane_states())

    def _lane_states(self) -> Any:
        """Of one row without tokens, None where no layer keeps a state."""
        return None

    def _reserve(self, slots: int) -> None:
        self.cache.reserve(slots)
        if slots > self.decoder.positions:
            self.decoder.reserve_positions(slots)


def cache_format_of(model: nn.Module) -> CacheFormat | None:
    """In which format a model keeps keys and values, as its quantization_config says; None: as it computes them.

    ValueError or TypeError for a word that is no format's.
    """
    found = getattr(getattr(model, "config", None), "quantization_config", None)
    said = found if isinstance(found, Mapping) else getattr(found, "__dict__", {})
    word = said.get("kv_cache")
    if word is None or said.get("quant_method") != QUANT_METHOD:
        return None
    return cache_format(word, "kv_cache of the model's quantization_config")


def new_kv(decoder: Decoder, batch: int, slots: int, cache_format: CacheFormat | None = None) -> Tensor:
    """Keys and values `[layers, 2, batch, kv_heads, slots, head_dim]` for a decoder, or codes of them, zeros."""
    dim, dtype = decoder.sizes.head_dim, decoder.dtype
    if cache_format is not None:
        dim, dtype = cache_format.width(dim), cache_format.dtype
    shape = (decoder.num_layers, 2, batch, decoder.sizes.kv_heads, slots, dim)
    with torch.inference_mode(False):
        return _zeros(shape, dtype, decoder.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.zeros`; a small tensor on the CPU is written by the calling thread alone: threads that help torch spin on
    for milliseconds, on the cores that the first passes need."""
    if device.type != "cpu" or math.prod(shape) > WRITTEN_ALONE:
        return torch.zeros(shape, dtype=dtype, device=device)
    made = torch.empty(shape, dtype=dtype)
    for piece in made.view(-1).split(PIECE):
        piece.zero_()
    return made


def row_bytes(head_dim: int, dtype: torch.dtype, cache_format: CacheFormat | None) -> int:
    """Bytes of a token's key, or value, of one head."""
    if cache_format is None:
        return head_dim * dtype.itemsize
    return cache_format.width(head_dim) * cache_format.dtype.itemsize


def first_capacity(tokens: int, num_positions: int | None) -> int:
    """Slots of a row at first that is expected to have so many tokens: a model of few positions is fed no more."""
    return tokens if num_positions is None else min(tokens, num_positions)


def up_to_growth(slots: int) -> int:
    """`slots`, or the next multiple of what caches grow by."""
    return slots - slots % -GROWTH


def held_bytes(engines: Iterable[Any]) -> list[int]:
    """Bytes of the keys and values that each engine holds itself; 0 for None, a level without one."""
    return [engine.cache_bytes if engine else 0 for engine in engines]


def require_memory(
    engines: Iterable[CachedRows | None], rows: int, device: torch.device, *,
    longest: int = 0, end: int = 0, beside: int = 0, kept: Callable[[], int] = int,
) -> str:
    """Ask whether there is memory for the caches that so many rows start with, before anything of them is allocated.

    engines: those of all levels, None of those without one; what they hold counts as theirs. longest: tokens of the
    longest row, where it may have more than the engines expect. end: tokens that it may reach. beside: bytes that are
    to be allocated beside the caches. kept: how many bytes are held that can be freed, asked only where it matters.
    Returns "", or what there is to say of caches that have room for the rows but not for all that these may gain.
    torch.OutOfMemoryError names rows, tokens and bytes where there is no room at all.
    """
    levels = [engine for engine in engines if engine is not None]
    own = [engine for engine in levels if not engine.follow]
    slots = max([GROWTH, longest + 1, *(engine.capacity for engine in own)])
    held = sum(engine.cache_bytes for engine in levels)

    def missing(slots: int) -> int:
        each = (up_to_growth(first_capacity(slots, engine.max_positions)) * engine.bytes_per_token for engine in own)
        states = sum(engine.bytes_per_row for engine in levels)
        return (sum(each) + states) * rows - held + beside

    needed, most = missing(slots), missing(max(slots, end))
    if most < WORTH_ASKING:
        return ""
    free = require_free(needed, most, device, kept(), f"a cache of {slots} tokens for each of {rows} rows")
    if free is None:
        return ""
    gib = most / 2**30
    return (
        f"rows of up to {max(slots, end)} tokens, {rows} at a time, may need {gib:.2f} GiB more for keys and values, "
        f"and {free / 2**30:.2f} GiB are free on {device}: the call ends with an error if they get that far; ask for "
        "fewer new tokens or rows"
    )
