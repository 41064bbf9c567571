"""How much of a cache is true, row by row, and whose cache is it? What every runner does without computing."""

from __future__ import annotations

from typing import Any


class CachedRows:
    """The rows of a runner's cache.

    lengths: per row, how many tokens of it the cache holds truly. follow: the runner whose cache this one writes
    into, or None for a cache of its own (law 4).
    """

    lengths: list[int]
    follow: CachedRows | None
    cache: Any

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values this runner holds itself."""
        return 0 if self.follow or self.cache is None else self.cache.nbytes

    def sync(self) -> None:
        """A follower's lengths are its leader's: what the leader checked, it also wrote."""
        if self.follow:
            self.lengths = list(self.follow.lengths)

    def rollback(self, lengths: list[int]) -> None:
        """No more than `lengths[r]` tokens of row r are true."""
        self.lengths = [min(have, true) for have, true in zip(self.lengths, lengths, strict=True)]

    def select(self, keep: list[int]) -> None:
        """Go on with these rows only. A follower's cache is its leader's business."""
        self.lengths = [self.lengths[r] for r in keep]
        if not self.follow:
            self.cache.select(keep)

    def admit(self, count: int) -> None:
        """Append `count` rows that hold nothing yet. A follower is told after its leader, who grew the cache."""
        self.lengths = self.lengths + [0] * count
        if not self.follow:
            self.cache.extend_rows(count)

    def shrink(self, slots: int) -> None:
        """Give memory back where rows of `slots` slots, at least what each holds, need half of what there is."""
        if not self.follow:
            self.cache.shrink(slots)

    def forget(self, row: int) -> None:
        """Give the slots of `row` to a new sequence."""
        self.lengths[row] = 0
