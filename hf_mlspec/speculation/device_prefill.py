"""How does a prompt get into the cache of a decoder on a device? In bounded chunks, several rows together."""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn.device_decoder import DeviceDecoder
from ..precision import OWN_BITS, Bits
from .draft import Rows

CHUNK = 512  # tokens of a step: where a GPU's linear layers stop getting cheaper per token, and memory stays small


def prefill(decoder: DeviceDecoder, kv: Tensor, rows: Rows, starts: list[int], bits: Bits = OWN_BITS) -> int:
    """Write keys and values of tokens starts[r] .. of every row into `kv`, whose first rows are these; -> steps run.

    Rows in order of falling length need the fewest steps: a step covers the rows between the first and the last that
    still lack tokens. The caller has reserved slots and positions. Only enqueues.
    """
    done, steps = list(starts), 0
    while busy := [r for r, row in enumerate(rows) if done[r] < len(row)]:
        first, end = busy[0], busy[-1] + 1
        missing = [len(row) - n for row, n in zip(rows[first:end], done[first:end], strict=True)]
        width = min(max(1, CHUNK // (end - first)), max(missing))
        counts = [min(max(n, 0), width) for n in missing]
        ids = [row[n : n + width] for row, n in zip(rows[first:end], done[first:end], strict=True)]
        begins = [n if count else 0 for n, count in zip(done[first:end], counts, strict=True)]
        # One position is asked for: nobody reads its logits, but a step has an output.
        pick = torch.zeros(1, dtype=torch.int64, device=decoder.device)
        operands = int32(padded(ids, width), decoder), int32(begins, decoder), int32(counts, decoder)
        decoder.forward(*operands, kv[:, :, first:end], pick=pick, bits=bits)
        done[first:end] = [n + count for n, count in zip(done[first:end], counts, strict=True)]
        steps += 1
    return steps


def int32(values: list, decoder: DeviceDecoder) -> Tensor:
    """A list, or a list of lists, on the decoder's device."""
    return torch.tensor(values, dtype=torch.int32).to(decoder.device, non_blocking=True)


def padded(rows: Rows, width: int) -> Rows:
    """Rows of one width, zeros behind their tokens."""
    return [row + [0] * (width - len(row)) for row in rows]
