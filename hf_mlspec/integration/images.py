"""Which inputs of vision-language models come with a prompt, and does a prompt of text alone say nothing in them?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# What a processor returns for every prompt: the kind of each token, 0 for text.
KINDS_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
ENCODED = "mm_encoder_outputs"  # since transformers 5.23 generate encodes images before it decodes
TOKENS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")


INPUTS = {
    "pixel_values", "image_sizes", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts",
    ENCODED, *KINDS_OF_TOKENS,
}  # fmt: skip


def given(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Model inputs that are of images; {} where a prompt has none."""
    found = {name: inputs[name] for name in INPUTS & inputs.keys() if inputs[name] is not None}
    seen = {name for name, value in found.items() if not is_of_text_alone(name, value)}
    return found if seen - set(KINDS_OF_TOKENS) else {}


def is_of_text_alone(name: str, value: Any) -> bool:
    """Whether a model input is one that a prompt without images has, too, and says nothing there."""
    if name == ENCODED:
        return not value
    return name in KINDS_OF_TOKENS and isinstance(value, Tensor) and not bool(value.any())


def told(names: Iterable[str], inputs: Mapping[str, Any]) -> str:
    """Names of model inputs for a message; encoded images as what they are of."""
    return ", ".join(f"{ENCODED} ({', '.join(inputs[name])})" if name == ENCODED else name for name in names)


def check_tokens(model: nn.Module, input_ids: Tensor) -> None:
    """ValueError for a prompt that holds a token that stands for an image, where none is given."""
    config = model.config
    if config.get_text_config(decoder=True) is config:
        return
    for name in TOKENS:
        token = getattr(config, name, None)
        rows = [] if token is None else torch.nonzero((input_ids == token).any(dim=-1)).flatten().tolist()
        if rows:
            raise ValueError(
                f"row {rows[0]} of input_ids holds token {token}, the {name} of {type(model).__name__}, and no image "
                "comes with it: leave such tokens out of prompts of text alone"
            )
