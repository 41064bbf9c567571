"""How does a model score tokens on a device whose kernels are only enqueued, and how does a prompt get into its cache?

Step by step, wherever whole rounds cannot be captured. Prompts go in bounded chunks, several rows together, and pay
for their own tokens only.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ...formats import CacheFormat
from ...ops.delta import AT_END, KEEP
from ...ops.integers import integers
from ...precision import OWN_BITS, Bits
from ..capturing import free_cached
from ..engine import Capabilities, Guess, Rows
from ..lanes import Lane
from ..memory import out_of_memory
from .decoder import CudaDecoder, Packing
from .row_bits import BlockBits
from .rows import CudaRows
from .served import require_read
from .states import DeltaStates
from .steps import CudaSteps

CHUNK = 4096  # tokens of a step: linear layers of a GPU get no cheaper per token beyond, and memory stays small
LEAST_CHUNK = 256  # where there is no memory for more
_LEAD = 4  # tokens a row may lack and still be fed in one step with its draft; more of them are a prefill


class CudaEngine(CudaRows):
    """A CUDA decoder over its rows; over a model on the CPU its ops run there. See `Engine`.

    seconds: until the forward passes were launched; the device may still be at them.
    """

    name = "cuda"
    can = Capabilities(capturable=True, bit_exact=True, draft_window=True)
    decoder: CudaDecoder

    def __init__(self, model: nn.Module, decoder: CudaDecoder, **options: Any):
        """options: those of `DecoderRows`."""
        super().__init__(model, decoder, **options)
        if decoder.num_recurrent:
            self.can = replace(self.can, stateful=True)
        self.device = decoder.device
        if not decoder.captures(self.bits):
            self.can = replace(self.can, capturable=False)
        self._steps = CudaSteps(model, decoder)

    def keep_in(self, kept: CacheFormat) -> None:
        """As `Engine.keep_in`; UnknownArchitecture, a ValueError, for codes that the device's kernels do not read."""
        require_read(kept, self.device)
        super().keep_in(kept)

    def feed(self, rows: Rows, guess: Guess | None = None, alive: list[bool] | None = None) -> Tensor:
        """Score rows and guesses as `Engine.feed` does: float32 logits `[batch, k + 1, vocab]`.

        A row that lacks a token or two is fed them with its guess, and its neighbours are fed as many, which their
        cache may hold already: it writes the same bits again (invariant 3).
        """
        alive, lengths = alive or [True] * len(rows), guess.lengths if guess else [0] * len(rows)
        width = guess.tokens.shape[1] if guess else 0
        reach = max(len(row) + n for row, n, on in zip(rows, lengths, alive, strict=True) if on)
        self._reserve(reach)
        self._lower(rows)
        lead = self._fill(rows, alive)
        starts = [len(row) - lead if on else 0 for row, on in zip(rows, alive, strict=True)]
        last = [row[-lead:] if on else [] for row, on in zip(rows, alive, strict=True)]
        ids = int32(padded(last, lead), self.decoder)
        if width:
            ids = torch.cat([ids, guess.tokens.to(ids)], dim=1)
        counts = [lead + n if on else 0 for n, on in zip(lengths, alive, strict=True)]
        logits = self._forward(ids, starts, counts, [lead - 1] * len(rows), width + 1)
        self.lengths = [
            start + count if on else have
            for start, count, have, on in zip(starts, counts, self.lengths, alive, strict=True)
        ]
        return logits

    def step(self, tokens: Tensor, counts: list[int], first: list[int], kept: int) -> Tensor:
        """One forward pass behind what the cache holds, as `Engine.step`; a row whose count is 0 is inactive."""
        self._reserve(max(have + count for have, count in zip(self.lengths, counts, strict=True)))
        starts = [have if count else 0 for have, count in zip(self.lengths, counts, strict=True)]
        logits = self._forward(tokens.to(self.device, torch.int32), starts, counts, first, kept, drafts=True)
        self.lengths = [have + count for have, count in zip(self.lengths, counts, strict=True)]
        return logits

    def read(self, lane: Lane, row: list[int], start: int) -> None:
        """`Engine.read`; only enqueues."""
        if len(row) > self.decoder.positions:
            self.decoder.reserve_positions(len(row))
        begin = time.perf_counter()
        self.forwards += prefill(self.decoder, lane.kv, [row], [start], self.bits, self.draft_window, lane.states)
        self.seconds += time.perf_counter() - begin

    def _fill(self, rows: Rows, alive: list[bool]) -> int:
        """Bring the cache of every row that is alive to all but its last tokens; how many are left of each."""
        going = [row for row, on in zip(rows, alive, strict=True) if on]
        missing = [len(row) - min(have, len(row) - 1) for row, have in zip(rows, self.lengths, strict=True)]
        most = max(n for n, on in zip(missing, alive, strict=True) if on)
        # A follower must not write again what its leader wrote.
        few = most <= min(_LEAD, *map(len, going)) and (most == 1 or self.follow is None)
        if few and self._reaches([len(row) - most if on else have
                                  for row, on, have in zip(rows, alive, self.lengths, strict=True)]):  # fmt: skip
            return most
        begin = time.perf_counter()
        self._prefill([row[:-1] if on else [] for row, on in zip(rows, alive, strict=True)])
        self.seconds += time.perf_counter() - begin
        return 1

    def _prefill(self, lines: Rows) -> None:
        """Bring the cache of every row to these tokens; of rows that are not alive there are none."""
        view = self.bits, self.draft_window, self._owner.states
        with self._settling():
            self.forwards += prefill(self.decoder, self._kv(len(lines)), lines, self.lengths, *view)
        read = [max(len(line) - have, 0) for line, have in zip(lines, self.lengths, strict=True)]
        self._settled([len(line) for line in lines], read)
        if self.follow is not None:  # whose states are those of a draft now
            owner = self._owner
            owner.settled = [None if n else have for n, have in zip(read, owner.settled, strict=True)]

    def _bits_of_rows(self) -> Bits | BlockBits:
        """What a step of all rows reads."""
        return self.bits

    def _forward(
        self, ids: Tensor, starts: list[int], counts: list[int], first: list[int], kept: int, drafts: bool = False
    ) -> Tensor:
        """Float32 logits `[batch, kept, vocab]` of the positions from first[r] on, soft cap applied. drafts: as of
        `_states`."""
        states, settles = self._states(starts, counts, drafts)
        begin = time.perf_counter()
        batch, width = ids.shape
        pick = None
        if kept < width:
            rows = torch.arange(batch)[:, None] * width
            wanted = torch.tensor(first)[:, None] + torch.arange(kept)
            pick = (rows + wanted.clamp(max=width - 1)).flatten().to(self.device, non_blocking=True)
        operands = ids.contiguous(), int32(starts, self.decoder), int32(counts, self.decoder)
        view = {"bits": self._bits_of_rows(), "draft_window": self.draft_window, "states": states, "settles": settles}
        with self._settling():
            logits = self._steps.forward(*operands, self._kv(batch), pick=pick, **view)
        if settles != KEEP:
            self._settled(starts, counts)
        self.forwards += 1
        self.seconds += time.perf_counter() - begin
        return soft_capped(logits.float(), self.decoder.logit_softcap).view(batch, kept, -1)

    def _kv(self, batch: int) -> Tensor:
        """The cache's first rows, and as many of its layers as the decoder has: an early exit has fewer."""
        return self.cache.kv[: self.decoder.num_layers, :, :batch]


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), float32, or the logits where cap is 0."""
    return torch.tanh(logits / cap) * cap if cap else logits


def prefill(
    decoder: CudaDecoder, kv: Tensor, rows: Rows, starts: list[int], bits: Bits | BlockBits = OWN_BITS,
    draft_window: int = 0, states: DeltaStates | None = None,
) -> int:  # fmt: skip
    """Write keys and values of tokens starts[r] .. of every row into `kv`, whose first rows are these; -> steps run.

    Only the rows' own tokens are computed. Rows in order of falling length need the fewest steps. The caller has
    reserved slots and positions. draft_window: what is written is what levels with one write. states: of the rows,
    which become those behind their tokens. Only enqueues.
    """
    done, steps, most = list(starts), 0, CHUNK
    while busy := [r for r, row in enumerate(rows) if done[r] < len(row)]:
        first = busy[0]
        counts = _share([len(row) - n for row, n in zip(rows[first:], done[first:], strict=True)], most)
        end, width = first + len(counts), max(counts)
        ids = [row[n : n + count] for row, n, count in zip(rows[first:end], done[first:end], counts, strict=True)]
        begins = [n if count else 0 for n, count in zip(done[first:end], counts, strict=True)]
        # One position is asked for: nobody reads its logits, but a step has an output.
        pick = torch.zeros(1, dtype=torch.int64, device=decoder.device)
        operands = int32(padded(ids, width), decoder), int32(begins, decoder), int32(counts, decoder)
        packing = None if min(counts) == width else _packing(counts, width, decoder.device)
        try:
            how = {"pick": pick, "bits": bits, "packing": packing, "draft_window": draft_window, "settles": AT_END}
            how["states"] = None if states is None else states.part(first, end)
            decoder.forward(*operands, kv[:, :, first:end], **how)
        except RuntimeError as error:
            if decoder.ranks is not None or most <= LEAST_CHUNK or not out_of_memory(error):
                raise  # of processes that share a model all make the same calls
        else:
            done[first:end] = [n + count for n, count in zip(done[first:end], counts, strict=True)]
            steps += 1
            continue
        most //= 2  # what was written is written again, with the same bits
        if states is not None:  # some layers' are of more tokens than others', of rows that had some in this step
            begun = [r for r, count in enumerate(counts, start=first) if count]
            states.forget(begun)
            done = [0 if r in begun else have for r, have in enumerate(done)]
        free_cached()  # behind the error, whose frames hold what the step had computed
    return steps


def _share(missing: list[int], most: int) -> list[int]:
    """How many of the tokens that rows lack they get in a step of `most`, from the first row on; rows behind get none.
    With padding, which takes room between two layers and in attention, a step has up to twice as many."""
    counts: list[int] = []
    left, width, end = most, 0, 0
    for n in missing:
        count = min(max(n, 0), left)
        width = max(width, count)
        if not left or (counts and width * (len(counts) + 1) > 2 * most):
            break
        counts.append(count)
        left -= count
        end = len(counts) if count else end
    return counts[:end]


def _packing(counts: list[int], width: int, device: torch.device) -> Packing:
    """Of rows with so many tokens each, padded to one width."""
    real = (torch.arange(width) < torch.tensor(counts)[:, None]).flatten()
    place = (real.cumsum(0) - 1).clamp_(min=0)
    return Packing(*(one.to(device, non_blocking=True) for one in (real.nonzero().flatten(), place)))


def int32(values: list, decoder: CudaDecoder) -> Tensor:
    """A list, or a list of lists of one length, on the decoder's device."""
    nested = bool(values) and isinstance(values[0], list)
    found = integers(list(chain.from_iterable(values)) if nested else values, torch.int32)
    return (found.view(len(values), len(values[0])) if nested else found).to(decoder.device, non_blocking=True)


def padded(rows: Rows, width: int) -> Rows:
    """Rows of one width, zeros behind their tokens."""
    return [row + [0] * (width - len(row)) for row in rows]
