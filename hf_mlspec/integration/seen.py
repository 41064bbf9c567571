"""How does a prompt with images reach compiled steps? The model's own modules read it, all but its last token.

What they keep of it goes into the target's cache, and the loop goes on from there. Positions of a decoder are numbers
of tokens. A model whose images have positions of their own (Qwen2-VL, arXiv 2409.12191, section 2.1) counts on from a
smaller number behind them. Only distances count in a rotation: the kept keys are turned by the difference once.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ..engines.architecture import UnknownArchitecture, described, rope_tables
from . import images
from .config import SpeculationConfig

# Levels that draft in the target's cache, or look tokens up: others would read ids where the target read images.
_LEVELS = re.compile(r"mxfp4(a8)?|nested(4(a8)?)?|zipper-low|int[23]|ternary|planes\d|w\da\d+|"
                     r"early_exit:\d+|experts:\d+|prompt_lookup|ngram|lookups")  # fmt: skip


def may_be_read(model: nn.Module, name: str) -> bool:
    """Whether a model input is of images, and the text model around them one that a decoder goes on from: not where
    layers have inputs of their own (Gemma 4)."""
    if name not in images.INPUTS:
        return False
    try:
        entry = described(model)
        return entry.text is not None and entry.layer_inputs is None
    except UnknownArchitecture:
        return False


def checked(model: nn.Module, call: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a call that are of images; {} where no decoder runs the text model. ValueError for a call whose
    images cannot be read."""
    if not may_be_read(model, min(found)):
        return {}
    mask, what = call.model_kwargs.get("attention_mask"), f"a prompt with images ({images.told(sorted(found), found)})"
    if len(call.input_ids) > 1 or (mask is not None and not bool(mask.all())):
        raise ValueError(f"{what} is decoded alone with levels, without padding: pass one row a call")
    if call.tokens_given:
        raise ValueError(f"{what} beside filled past_key_values is not supported with assistant_models: pass it whole")
    if bool(_of_images(model, call.input_ids)[0, -1]) or call.input_ids.shape[1] < 2:
        raise ValueError(f"{what} has to end in a token of text")
    shared = SpeculationConfig.of(call.config).shared_cache
    odd = [level for level in call.levels if not (isinstance(level, str) and _LEVELS.fullmatch(level))]
    if odd or shared is False:
        told = "shared_cache=False" if not odd else odd[0] if isinstance(odd[0], str) else type(odd[0]).__name__
        raise ValueError(f"{what} and {told}: levels with a cache of their own read no images; leave them out, or "
                         "name levels that draft in the target's cache and lookups")
    return found


def read(model: nn.Module, call: Any, found: dict[str, Any]) -> None:
    """Let the modules read the prompt, all but its last token; the call goes on from what they keep."""
    width, cache, kwargs = call.input_ids.shape[1], DynamicCache(), call.model_kwargs
    inputs = {name: value[:, :-1] if name in images.KINDS_OF_TOKENS else value for name, value in found.items()}
    positions = kwargs.get("position_ids")
    if positions is not None:
        inputs["position_ids"] = positions[..., :-1]
    with torch.no_grad():
        model(input_ids=call.input_ids[:, :-1], attention_mask=call.input_ids.new_ones(1, width - 1),
              past_key_values=cache, use_cache=True, logits_to_keep=1, **inputs)  # fmt: skip
    ahead = _ahead(model, positions, width)
    if ahead:
        _turn(model, cache, ahead)
    kept = {name: value for name, value in kwargs.items() if name not in found and name != "position_ids"}
    call.model_kwargs, call.images = {**kept, "past_key_values": cache}, True


def _of_images(model: nn.Module, ids: Tensor) -> Tensor:
    """Which tokens stand for images."""
    tokens = [token for name in images.TOKENS if (token := getattr(model.config, name, None)) is not None]
    return torch.isin(ids, torch.tensor(tokens, device=ids.device))


def _ahead(model: nn.Module, positions: Tensor | None, width: int) -> int:
    """By how much the last token's number is larger than its position."""
    if positions is not None and positions.ndim == 3:
        return width - 1 - int(positions[-1, 0, -1])
    delta = getattr(model.model, "rope_deltas", None)
    return 0 if delta is None else -int(delta.flatten()[0])


def _turn(model: nn.Module, cache: DynamicCache, by: int) -> None:
    """Turn all keys as if every position were so much larger."""
    rotary = model.get_submodule(described(model).rotary_embedding)
    cos, sin = (table[abs(by)].to(torch.float32) for table in rope_tables(rotary, [None], abs(by) + 1)[0])
    scale = torch.sqrt(cos * cos + sin * sin)  # of scaled rotations, which the keys have had
    cos, sin = cos / scale, sin / scale * (1 if by > 0 else -1)
    half = len(cos)
    for layer in cache.layers:
        keys = layer.keys.float()
        one, other, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
        turned = torch.cat([one * cos - other * sin, other * cos + one * sin, rest], dim=-1)
        layer.keys = turned.to(layer.keys.dtype)
