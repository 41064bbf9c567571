"""What does a model multiply its embeddings, the outputs of its blocks and its logits by, in numbers of a decoder?"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ...ops.compiled_decoder import Sizes
from .description import NORMS, Description
from .parts import Block, UnknownArchitecture, table_dtype


def named(holder, entry: Description, field: str):
    """What the attribute says that a field names, of a config or an attention; None where the field is None."""
    name = getattr(entry, field)
    if name is None:
        return None
    if not hasattr(holder, name):
        owner = type(holder).__name__
        raise UnknownArchitecture(f"its description names {name} as {field}, which its {owner} does not have")
    return getattr(holder, name)


def embedding_scale(entry: Description, config, embed: nn.Module) -> float:
    """Rounded to the weight's dtype where the embedding of a model does it."""
    if entry.embedding_multiplier is not None:
        return float(named(config, entry, "embedding_multiplier"))
    if entry.embedding_scale == "none":
        return 1.0
    scale = getattr(embed, "embed_scale", None)
    return float(torch.as_tensor(config.hidden_size**0.5 if scale is None else scale).to(table_dtype(embed)))


def scale_blocks(entry: Description, config, sizes: Sizes, blocks: list[Block]) -> Sizes:
    """What a block adds is multiplied by residual_scale: the norm behind it is, or else the residual stream is divided
    by it, from the embeddings on. The norms that read the stream take no notice of its scale but for their epsilon."""
    scale = 1.0 if entry.residual_scale is None else float(named(config, entry, "residual_scale"))
    if scale == 1:
        return sizes
    behind = [NORMS.index(name) for name in ("attention_out", "mlp_out")]
    found = {norm is not None for block in blocks for norm in (block.norms[i] for i in behind)}
    if found == {True}:
        for block in blocks:
            for i in behind:
                block.norms[i] = block.norms[i].times(scale)
        return sizes
    heads = any(block.norms[NORMS.index(name)] for block in blocks for name in ("q", "k"))
    if True in found or heads or scale <= 0:
        raise UnknownArchitecture(f"its config says residual_scale {scale} beside norms that it does not reach alike")
    return replace(sizes, embedding_scale=sizes.embedding_scale / scale, norm_eps=sizes.norm_eps / scale**2)


def logit_scale(entry: Description, config, head: nn.Module) -> float:
    """What the head's inputs are multiplied by in place of its outputs."""
    scale = 1.0 if entry.logit_scale is None else float(named(config, entry, "logit_scale"))
    if entry.logit_divisor is not None:
        scale /= float(named(config, entry, "logit_divisor"))
    if scale != 1 and getattr(head, "bias", None) is not None:
        raise UnknownArchitecture("its logits are scaled with the bias of the head")
    return scale
