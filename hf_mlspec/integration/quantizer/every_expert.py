"""Does a checkpoint with a tensor for every expert have one for each expert of config.json?"""

from __future__ import annotations

import re

from transformers import PreTrainedModel

from .checkpoint import Checkpoint

_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def require_every_expert(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """ValueError naming the first tensor that is missing, and the number of its expert. Of checkpoints that keep all
    experts of a layer in one tensor nothing is asked: its shape is looked at elsewhere."""
    config = model.config.get_text_config(decoder=True)
    count = next((own for name in _COUNTS if type(own := getattr(config, name, None)) is int), 0)
    seen: dict[tuple[str, str], set[int]] = {}
    for name in checkpoint.tensors:
        if found := _OF_EXPERT.fullmatch(name):
            seen.setdefault((found[1], found[3]), set()).add(int(found[2]))
    for (experts, part), numbers in seen.items():
        missing = sorted(set(range(count)) - numbers)
        if missing:
            raise ValueError(
                f"{experts}.{missing[0]}.{part} is missing from {checkpoint.place}: config.json has {count} experts a "
                f"layer, this one lacks {len(missing)} of its {part}; download or write the checkpoint again"
            )
