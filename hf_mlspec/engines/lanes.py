"""What is there of a row that is in no cache yet: keys and values, and what recurrent layers keep of it?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


class KeptState(NamedTuple):
    """What recurrent layers keep of a row behind so many of its tokens, apart from any cache.

    states: float32 ``[layers, value_heads, key_dim, value_dim]``; inputs: of the last tokens, as many as the next one
    reads, ``[layers, tokens, kept_width]``.
    """

    states: Tensor
    inputs: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.states.nbytes + self.inputs.nbytes


@dataclass(frozen=True)
class Lane:
    """A row that is no row of a cache yet. kv: as `new_kv` of one row; states: what recurrent layers keep of it, as
    its engine has it, None where there are none."""

    kv: Tensor
    states: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.kv.nbytes + (0 if self.states is None else self.states.nbytes)

    def behind(self, count: int) -> KeptState | None:
        """What recurrent layers keep behind the `count` tokens that were read into it; None where there are none."""
        return None if self.states is None else self.states.taken(0, count)
