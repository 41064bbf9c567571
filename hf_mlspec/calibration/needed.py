"""Is there memory and disk for a calibration? Asked before the first block."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn

from ..engines.memory import available
from ..formats import format_named
from ..nn.castable import has_dense_weight
from .blocks import blocks_of
from .pipeline import Plan
from .statistics import KEPT_ROWS
from .turned_weights import ROWS

_WIDE = 5  # float64 copies of rows of a weight while they are rotated: products, butterflies, what was and comes
_LOGITS = 4  # float32 copies of the logits: themselves, their chances, and the gradients of both
_TRIALS = 4  # float32 copies of the largest weight: targets, a trial, its values, their difference


def bytes_of_states(model: nn.Module, tokens: int) -> int:
    """Of the hidden states of so many tokens."""
    return tokens * model.config.get_text_config(decoder=True).hidden_size * model.dtype.itemsize


def memory_needed(model: nn.Module, samples: list[Tensor], with_hessians: bool, filed: bool = False) -> int:
    """Bytes beside the model, at most: hidden states (filed: but for those of a sample they are in a file), statistics
    of one block, trial weights of one layer."""
    longest = max(ids.numel() for ids in samples)
    states = bytes_of_states(model, longest if filed else sum(ids.numel() for ids in samples))
    most = 0
    for _, block in blocks_of(model):
        linears = [module for module in block.modules() if has_dense_weight(module)]
        statistics = sum(
            (4 * linear.in_features**2 if with_hessians else 0) + KEPT_ROWS * linear.in_features * model.dtype.itemsize
            for linear in linears
        )
        widest = max((linear.in_features for linear in linears), default=0)
        factors = 2 * 4 * widest**2 if with_hessians else 0
        trial = _TRIALS * 4 * max((linear.weight.numel() for linear in linears), default=0)
        most = max(most, statistics + factors + trial + 4 * 4 * longest * widest)
    return states + most


def memory_to_rotate(model: nn.Module) -> int:
    """Bytes beside the model that `rotate` takes, at most: a weight of a block in float32, or an embedding that is
    written anew, float64 copies of some rows or columns, and a head of its own."""
    ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    weights = [weight for _, block in blocks_of(model) for weight in block.parameters()]
    one = max(4 * max(weight.numel() for weight in weights), *(end.nbytes for end in ends))
    widest = ROWS * max(max(weight.shape) for weight in (*weights, *ends))
    return one + _WIDE * 8 * widest + ends[1].nbytes


def memory_to_learn(model: nn.Module, samples: list[Tensor]) -> int:
    """Bytes beside the model, at most: a float32 copy, with room for another while it is rotated, and what the
    gradient of the longest sample needs of every block and of the logits."""
    config = model.config.get_text_config(decoder=True)
    tokens = max(ids.numel() for ids in samples)
    weights = sum(parameter.numel() for parameter in model.parameters())
    wide = 12 * config.hidden_size + 8 * config.intermediate_size + 2 * config.num_attention_heads * tokens
    logits = _LOGITS * tokens * model.get_output_embeddings().weight.shape[0]
    return 4 * (2 * weights + len(blocks_of(model)) * tokens * wide + logits)


def require_memory(
    needed: int, device: torch.device, remedy: str = "give fewer samples or tokens, use method rtn"
) -> None:
    """MemoryError with both numbers where less is free. Where the system does not say what is free, nothing is
    checked."""
    free = available(device)
    if free is not None and free < needed:
        raise MemoryError(
            f"calibration needs {needed / 2**20:.0f} MiB beside the model, {free / 2**20:.0f} are free on {device}: "
            f"{remedy}, or free some"
        )


def require_disk(
    model: nn.Module, folder: str | os.PathLike, plan: Plan, states: int = 0, saved: bool = False
) -> None:  # fmt: skip
    """OSError with both numbers where the disk of a work folder does not hold the finished blocks, linears counted as
    the plan's format has them, and ``states`` bytes of hidden states. Blocks that are there already need no more.
    saved: the model is saved beside them, with a head of its own if it is rotated."""
    blocks = _bytes_of_blocks(model, plan)
    needed = states + max(0, blocks - sum(file.stat().st_size for file in Path(folder).glob("block_*")))
    if saved:
        inside = {id(tensor) for _, block in blocks_of(model) for tensor in block.parameters()}
        needed += blocks + sum(tensor.nbytes for tensor in model.parameters() if id(tensor) not in inside)
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        needed += head.weight.nbytes if plan.method.rotates and head.weight is embedding.weight else 0
    place = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        parts = ["finished blocks", *(["the model"] if saved else []), *(["hidden states"] if states else [])]
        what = ", ".join(parts[:-1]) + (" and " if parts[1:] else "") + parts[-1]
        raise OSError(errno.ENOSPC, f"{what} need {needed} bytes, {free} are free: use another disk", str(folder))


def _bytes_of_blocks(model: nn.Module, plan: Plan) -> int:
    """Of their tensors, once they are packed."""
    zeros, found = format_named(plan.format).zeros, 0
    shaping = {"group_size": plan.group_size, "symmetric": plan.symmetric, **plan.options}
    for where, block in blocks_of(model):
        for name, module in block.named_modules():
            wide = dict(module.named_parameters(recurse=False))
            if has_dense_weight(module) and f"{where}.{name}" not in plan.kept:
                del wide["weight"]
                parts = zeros(module.weight.shape, torch.device("meta"), **shaping)
                own = plan.transform.tensors(module.in_features, torch.device("meta"))
                found += sum(part.nbytes for part in (*parts, *own.values()) if part is not None)
            found += sum(tensor.nbytes for tensor in wide.values())
    return found
