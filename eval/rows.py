"""How do prompts of different lengths become one batch?"""

from __future__ import annotations

import torch


def padded(rows: list[list[int]], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Rows of ids as input_ids and attention_mask int64 `[batch, longest]`, padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return {"input_ids": ids, "attention_mask": mask}
