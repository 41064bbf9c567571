"""How does a model get activations with outliers, and stay what it is?

A few channels of what every norm in front of linears writes are multiplied by a power of two, and the columns that
read them divided: outputs stay, bit for bit where no weight leaves its dtype's range.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hf_mlspec.calibration.blocks import blocks_of
from hf_mlspec.calibration.families import feeds_of
from hf_mlspec.calibration.fold import fold

SHARE = 0.01  # of the channels


def give_outliers(model: PreTrainedModel, factor: int, seed: int = 0) -> list[int]:
    """Multiply a share of the channels by ``factor``, in place; -> which, the same in every block."""
    config = model.config
    count = max(1, round(SHARE * config.hidden_size))
    drawn = torch.randperm(config.hidden_size, generator=torch.Generator().manual_seed(seed))[:count]
    scales = torch.ones(config.hidden_size)
    scales[drawn] = 1 / factor  # what `fold` divides the norms by
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    for _, block in blocks_of(model):
        for feed in feeds_of(type(model).__name__, "smoothquant"):
            fold(block, feed, scales, heads, keys)
    return drawn.tolist()
