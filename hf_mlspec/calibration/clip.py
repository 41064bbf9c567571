"""At which clip of 4-bit activations does a packed model say most nearly what it says with 16-bit ones?

Of its first calibration samples, the mean over tokens of the Kullback-Leibler divergence of its next-token chances
behind 4-bit activations from those behind 16-bit ones: what accepted drafts hang on, too. One clip serves the model.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..nn.packed import PackedModule
from ..nn.switch import PrecisionSwitch, precision_switch
from ..precision import Bits

CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)
SAMPLES = 8  # that the search reads, at most
_TOKENS = 128  # whose chances are in float32 at a time


@torch.no_grad()
def clip_divergences(model: nn.Module, samples: list[Tensor], clips: Iterable[float] = CLIPS) -> dict[float, float]:
    """Of each clip the divergence, in nats a token. samples: int64 ``[1, tokens]`` each, of which the first `SAMPLES`
    are read. Whatever happens, the model's layers get their own switch back. ValueError for a model that holds no
    packed layer, and for chances that are NaN."""
    own, read = precision_switch(model), samples[:SAMPLES]
    count = sum(ids.numel() for ids in read)
    sums = dict.fromkeys(clips, 0.0)
    try:
        for ids in read:  # logits of one sample at a time
            wanted = _logits(model, ids, 16)
            for clip in sums:
                sums[clip] += _divergence(wanted, _logits(at_clip(model, clip), ids, 4))
    finally:
        _put_under(model, own)
    if bad := [clip for clip, total in sums.items() if not total < torch.inf]:
        raise ValueError(f"chances of the next token behind 4-bit activations clipped at {bad[0]:g} are not finite")
    return {clip: total / count for clip, total in sums.items()}


def best_clip(divergences: dict[float, float]) -> float:
    """The one of the least divergence; of equals the first."""
    return min(divergences, key=divergences.__getitem__)


def at_clip(model: nn.Module, clip: float) -> nn.Module:
    """The model, its packed layers under a new switch that clips 4-bit activations at ``clip``. What was compiled of
    it keeps the clip that it was compiled with: clear or prepare it anew. ValueError as of `PrecisionSwitch`."""
    old = precision_switch(model)
    new = PrecisionSwitch(
        old.weights, multiply=old.multiply, num_planes=old.num_planes, least_planes=old.least_planes,
        activation_clip=clip,
    )  # fmt: skip
    new.bits = old.default_bits
    _put_under(model, new)
    return model


def _put_under(model: nn.Module, switch: PrecisionSwitch) -> None:
    for module in model.modules():
        if isinstance(module, PackedModule):
            module.switch = switch


def _logits(model: nn.Module, ids: Tensor, activation_bits: int) -> Tensor:
    with precision_switch(model).at(Bits(activation=activation_bits)):
        return model(input_ids=ids, use_cache=False).logits[0]


def _divergence(wanted: Tensor, found: Tensor) -> float:
    """Summed over tokens; both ``[tokens, vocabulary]``."""
    total = 0.0
    for ours, theirs in zip(wanted.split(_TOKENS), found.split(_TOKENS), strict=True):
        ours, theirs = ours.float().log_softmax(-1), theirs.float().log_softmax(-1)
        total += float((ours.exp() * (ours - theirs)).sum(dtype=torch.float64))
    return total
