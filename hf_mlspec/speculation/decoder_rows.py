"""What do the runners of whole decoders share? Where their rows live, and that there is room for them."""

from __future__ import annotations

import torch
from torch import nn

from ..nn.device_decoder import DeviceDecoder
from ..nn.fused import FusedDecoder
from ..precision import OWN_BITS, Bits
from .cached_rows import CachedRows
from .fused_cache import GROWTH, FusedCache


class DecoderRows(CachedRows):
    """Rows of a decoder in a cache of its own, or in its leader's (`follow`, law 4).

    capacity: tokens a row is expected to hold. bits: what every call reads of the weights, and multiplies them by,
    one of `decoder.bit_choices`; OWN_BITS: what the model says. A follower of the same decoder at fewer bits is the
    target drafting for itself (drafters/self_precision.py).
    """

    def __init__(
        self,
        model: nn.Module,
        decoder: FusedDecoder | DeviceDecoder,
        *,
        follow: DecoderRows | None = None,
        capacity: int = 0,
        bits: Bits = OWN_BITS,
    ):
        self.model, self.decoder, self.follow, self.capacity = model, decoder, follow, capacity
        self.bits = bits
        self.cache: FusedCache | None = None
        self.lengths: list[int] = []
        self.forwards, self.seconds = 0, 0.0

    def start(self, batch: int, device: torch.device) -> None:
        """An empty cache for `batch` rows; a follower takes its leader's, which must have started."""
        self.lengths = [0] * batch
        self.forwards, self.seconds = 0, 0.0
        capacity = max(self.capacity, GROWTH)
        self.cache = self.follow.cache if self.follow else FusedCache.new(self.decoder, batch, capacity)

    def _reserve(self, slots: int) -> None:
        self.cache.reserve(slots)
        self.decoder.reserve_positions(slots)
