"""What do a model's linear layers multiply on calibration text? Their Hessians, a few layers at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

MEMORY = 1 << 28  # bytes of Hessians at once; a single larger one is collected alone


class _Done(Exception):
    """Every layer asked for has seen its inputs: the rest of the model need not run."""


def read_samples(calibration: Iterable, vocab_size: int, device: torch.device) -> list[Tensor]:
    """Each sample as int64 ``[1, tokens]`` on ``device``.

    calibration: tensors ``[tokens]`` or ``[rows, tokens]``, or lists of token ids. TypeError for something else,
    ValueError for nothing at all, an empty sample or a token the model does not have; each names the sample.
    """
    if not isinstance(calibration, Iterable):
        raise TypeError(f"calibration is a {type(calibration).__name__}: give a list of input_ids, or None")
    samples: list[Tensor] = []
    for index, given in enumerate(calibration):
        ids = given if isinstance(given, Tensor) else _as_ids(given, index)
        if ids.dtype not in (torch.int64, torch.int32) or ids.ndim not in (1, 2):
            raise TypeError(
                f"calibration[{index}] is {ids.dtype} {list(ids.shape)}: give token ids, int64 [tokens] or [rows, "
                "tokens]"
            )
        if not ids.numel():
            raise ValueError(f"calibration[{index}] has no tokens: leave it out")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(
                f"calibration[{index}] holds token {wrong}, the model has {vocab_size}: encode it with its tokenizer"
            )
        samples += ids.long().to(device).reshape(-1, ids.shape[-1]).split(1)
    if not samples:
        raise ValueError("calibration is empty: give token ids of some text, or None")
    return samples


def _as_ids(given: object, index: int) -> Tensor:
    whole = isinstance(given, (list, tuple)) and all(isinstance(token, int) for token in given)
    if not whole:
        raise TypeError(
            f"calibration[{index}] is a {type(given).__name__}: give input_ids, a tensor or a list of token ids"
        )
    return torch.tensor(given, dtype=torch.int64)


def by_memory(linears: Sequence[tuple[str, nn.Module]], most: int = MEMORY) -> Iterator[list[tuple[str, nn.Module]]]:
    """Neighbours whose Hessians together take at most ``most`` bytes, from the last to the first."""
    group, used = [], 0
    for name, linear in reversed(linears):
        size = 4 * linear.in_features**2
        if group and used + size > most:
            yield group
            group, used = [], 0
        group.append((name, linear))
        used += size
    if group:
        yield group


@torch.no_grad()
def hessians(model: nn.Module, linears: Sequence[tuple[str, nn.Module]], samples: list[Tensor]) -> dict[str, Tensor]:
    """Per name the float32 ``[in, in]`` sum of ``x^T x`` over all tokens x that reach the layer; a layer that nothing
    reached (an expert without tokens) is left out. The model runs in eval mode and no further than the last layer."""
    found: dict[str, Tensor] = {}
    seen: set[str] = set()

    def collect(name: str, x: Tensor) -> None:
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        found[name] = torch.addmm(found[name], rows.T, rows) if name in found else rows.T @ rows
        seen.add(name)
        if len(seen) == len(linears):
            raise _Done

    hooks = [linear.register_forward_pre_hook(lambda _, args, name=name: collect(name, args[0]))
             for name, linear in linears]
    try:
        with _evaluating(model):
            for ids in samples:
                seen.clear()
                try:
                    model(input_ids=ids, use_cache=False)
                except _Done:
                    continue
    finally:
        for hook in hooks:
            hook.remove()
    return found


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
