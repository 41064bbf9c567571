"""How do prompts of different lengths become one batch, and what did each of its rows write?"""

from __future__ import annotations

from collections.abc import Collection

import torch
from transformers import PreTrainedModel


def padded(rows: list[list[int]], device: torch.device | str = "cpu", pad: int = 0) -> dict[str, torch.Tensor]:
    """Rows of ids as input_ids and attention_mask int64 `[batch, longest]`, padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return {"input_ids": ids, "attention_mask": mask}


def ends_of(model: PreTrainedModel) -> frozenset[int]:
    """The ids that end a row."""
    ends = model.generation_config.eos_token_id
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


def new_ids(sequences: torch.Tensor, width: int, ends: Collection[int]) -> list[list[int]]:
    """What stands behind the first `width` ids of every row, up to and with the id that ends it."""
    return [_until_end(row, ends) for row in sequences[:, width:].tolist()]


def _until_end(row: list[int], ends: Collection[int]) -> list[int]:
    end = next((at for at, token in enumerate(row) if token in ends), len(row) - 1)
    return row[: end + 1]
