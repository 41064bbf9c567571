"""How are widths chosen on the way of a step of the CUDA decoder without the host? By one kernel a block.

Of a prompt the host learns what was chosen once, behind all blocks. Where planes are streamed, those that are likely
are asked for beforehand (likely.py), and the host sees whether they were enough. Of steps that choose it never learns:
all that they need lies on the device, at addresses that stay, so that a graph holds such a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count as counted

import torch
from torch import Tensor

from .. import ops
from ..engines.cuda.decoder import CudaDecoder
from ..engines.cuda.row_bits import Chosen, Groups, grouped
from ..engines.cuda.streamed import StreamedPlanesLinear
from ..ops.planes.choosing import MOST_CANDIDATES, MOST_HIDDEN, ChooserWeights
from ..precision import Bits
from .blocks import Block
from .features import require_finite
from .router import Router

_ARRIVALS = 1 << 16  # tokens of a step, and more than there are parts of a block's features
_NEVER = 2**31 - 1  # tokens of a query that is not known: nothing stands behind it
_numbers = counted()


def chooses_on_device(decoder: CudaDecoder, router: Router) -> bool:
    """Whether products of this decoder read widths that the host does not know: there are kernels for it."""
    fits = router.hidden <= MOST_HIDDEN and len(router.widths) <= MOST_CANDIDATES
    return fits and ops.chooses_on_device(decoder.device)


def streamed_top(decoder: CudaDecoder) -> int:
    """Planes of every layer that are always there, where some others are not; 0: all are there."""
    linears = [linear for first, last, _ in decoder.blocks() for linear in (first, last)]
    return min((own.resident for own in linears if isinstance(own, StreamedPlanesLinear)), default=0)


def weights_on_device(router: Router, device: torch.device) -> list[ChooserWeights]:
    """Of every block. ValueError for a router of more hidden units than the kernels take."""
    if router.hidden > MOST_HIDDEN:
        raise ValueError(
            f"the router has {router.hidden} hidden units: a choice for every step is made by kernels that take up to "
            f"{MOST_HIDDEN}; train another, or choose every 'prompt'"
        )
    candidates = torch.tensor(router.widths, dtype=torch.int32, device=device)
    failed, arrived = (torch.zeros(n, dtype=torch.int32, device=device) for n in (1, _ARRIVALS))
    found = []
    for one in router.of:
        parts = *one.folded(), one.outer.weight, one.outer.bias
        own = [part.detach().to(device, torch.float32).contiguous() for part in parts]
        found.append(ChooserWeights(*own, candidates, failed, arrived))
    return found


class ChosenOnDevice:
    """Bits of every block of a step over one prompt, chosen from what the block reads. means: of all blocks, of what
    they read, float32 ``[features]``. likely: planes of each block that are to be there, of streamed ones; None: all
    are."""

    waits = False

    def __init__(
        self, weights: Sequence[ChooserWeights], blocks: Sequence[Block], likely: Sequence[int] | None = None
    ):
        self.weights, self.blocks, self._likely = weights, blocks, likely
        self.widest, self.key = Bits(max(own.num_planes for own in blocks[0].linears.values()), 16), ()
        device = weights[0].inner.device
        self.means = [torch.empty(own.inner.shape[1], device=device) for own in weights]
        self._widths: list[Tensor] = []
        weights[0].failed.zero_()  # a step may have set it, of which nobody asks

    def at(self, block: int, x: Tensor, starts: Tensor) -> Chosen:
        """As `BlockBits.at`; only enqueues."""
        self._widths.append(ops.choose_of_prompt(x, self.means[block], self.weights[block]))
        return Chosen(self._widths[-1], self._likely[block] if self._likely else 0)

    def told(self) -> list[int]:
        """The widths of all blocks; waits for the device. FloatingPointError where a score was NaN or infinite."""
        *widths, fails = torch.cat([*self._widths, self.weights[0].failed]).tolist()
        if fails:
            for mean, block in zip(self.means, self.blocks, strict=True):
                require_finite(mean[None], block.name)  # raises where its input is the reason
            raise FloatingPointError("the router scores a block NaN or infinite: train another")
        return widths

    def sufficed(self, widths: Sequence[int]) -> bool:
        """Whether every block had the planes that it chose; else the pass has no meaning from the first on that had
        not."""
        return self._likely is None or all(own <= had for own, had in zip(widths, self._likely, strict=True))


class StepState:
    """What steps of rows choose by. means: float32 ``[blocks, rows, features]``. known: int32 ``[blocks, rows]``,
    widths of the queries. lengths: int32 ``[rows]``, tokens of the queries. number: of these tensors, for graphs."""

    def __init__(self, means: Tensor, known: Tensor, lengths: Tensor):
        self.means, self.known, self.lengths, self.number = means, known, lengths, next(_numbers)

    @classmethod
    def new(cls, blocks: Sequence[Block], router: Router, batch: int, device: torch.device) -> StepState:
        """Of rows of which nothing is known."""
        means = torch.zeros(len(blocks), batch, blocks[0].features, device=device)
        known = torch.full((len(blocks), batch), router.widths[-1], dtype=torch.int32, device=device)
        return cls(means, known, torch.full((batch,), _NEVER, dtype=torch.int32, device=device))

    def know(self, row: int, tokens: int, widths: Sequence[int], means: Sequence[Tensor]) -> None:
        """A row's query was read."""
        self.means[:, row].copy_(torch.stack(list(means)))
        self.known[:, row].copy_(torch.tensor(widths, dtype=torch.int32))
        self.lengths[row] = tokens

    def forget(self, row: int) -> None:
        """A row begins anew."""
        self.lengths[row] = _NEVER

    def picked(self, rows: Sequence[int]) -> StepState:
        """Of these rows."""
        at = torch.tensor(list(rows), device=self.lengths.device)
        return StepState(self.means[:, at].contiguous(), self.known[:, at].contiguous(), self.lengths[at])

    def grown(self, count: int) -> StepState:
        """With rows more of which nothing is known."""
        means = torch.cat([self.means, self.means.new_zeros(len(self.means), count, self.means.shape[2])], 1)
        known = torch.cat([self.known, self.known.new_ones(len(self.known), count)], 1)
        return StepState(means, known, torch.cat([self.lengths, self.lengths.new_full((count,), _NEVER)]))

    def of(self, row: int) -> StepState:
        """Of one row, in the same memory."""
        which = slice(row, row + 1)
        return StepState(self.means[:, which], self.known[:, which], self.lengths[which])


class StepBits:
    """Bits of every block for every token of a step: of a query's tokens those of the query, of the others what each
    chooses. waits: the host has to know them."""

    def __init__(self, state: StepState, weights: Sequence[ChooserWeights], router: Router, *, waits: bool):
        self.state, self.weights, self.share, self.waits = state, weights, router.step_share, waits
        self.key, self.widest = ("step", state.number), Bits(router.widths[-1], 16)

    def at(self, block: int, x: Tensor, starts: Tensor) -> Chosen | Groups:
        """As `BlockBits.at`; only enqueues, unless the host has to know."""
        own = self.state
        how = own.lengths, own.known[block], own.means[block], self.weights[block], self.share
        found = ops.choose_of_steps(x, starts, *how)
        return grouped(found.tolist(), x.device) if self.waits else Chosen(found)
