"""What do a model's own modules compute in float32, layer by layer, of random ids? Two passes, as a probe needs them.

While a pass runs, embedding, layers, last norm and head of a model in fewer bits compute as float32 copies of
themselves, one at a time: a model of any size needs the memory of one layer more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .description import Description
from .parts import UnknownArchitecture
from .plain import product
from .rotary import known_positions, text_config

# Of a row; in the pass near the first position; of the far row before its cache is read.
TOKENS, ROWS, FIRST = 24, 2, 16
_FARTHEST = 1 << 16
# Of each pass: ids and positions int64 [rows, tokens], what each layer reads and hands on, logits.
Passes = list[tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]], Tensor]]


def at(whole: nn.Module, place: str) -> nn.Module:
    """The module at a place of a description, "a | b" the first that is there; AttributeError where none is."""
    for choice in place.split(" | "):
        try:
            return whole.get_submodule(choice)
        except AttributeError:
            continue
    raise AttributeError(place)


def recorded(model: nn.Module, entry: Description) -> Passes:
    """Both passes of a model whose embedding, layers, last norm and head are where the entry says.
    UnknownArchitecture where it does not run so."""
    device = next(model.parameters()).device
    most = at(model, entry.embedding).num_embeddings
    draw = torch.Generator().manual_seed(0)
    near = torch.randint(0, most, (ROWS, TOKENS), generator=draw)
    far = torch.randint(0, most, (1, TOKENS), generator=draw)
    padding = getattr(text_config(model), "pad_token_id", None)
    near, far = (torch.where(ids == padding, (ids + 1) % most, ids).to(device) for ids in (near, far))
    begin = _farthest(model, entry)
    positions = torch.arange(begin, begin + TOKENS, device=device)[None]
    read: list[list[Tensor]] = []
    try:
        with _in_float32(model, entry, read):
            logits = model(input_ids=near, attention_mask=torch.ones_like(near), use_cache=False).logits.float()
            found: Passes = [(near, torch.arange(TOKENS, device=device).expand(ROWS, -1), _layers(read), logits)]
            read.clear()
            mask = torch.ones_like(far)
            first = model(input_ids=far[:, :FIRST], attention_mask=mask[:, :FIRST], position_ids=positions[:, :FIRST],
                          use_cache=True)  # fmt: skip
            second = model(input_ids=far[:, FIRST:], attention_mask=mask, position_ids=positions[:, FIRST:],
                           past_key_values=first.past_key_values, use_cache=True)  # fmt: skip
            logits = torch.cat([first.logits, second.logits], dim=1).float()
            halves = len(read) // 2
            joined = [[torch.cat(pair, dim=1) for pair in zip(one, two, strict=True)]
                      for one, two in zip(read[:halves], read[halves:], strict=True)]
            return [*found, (far, positions, _layers(joined), logits)]
    except Exception as error:  # of a class of whatever kind
        told = next(iter(str(error).splitlines()), "")
        raise UnknownArchitecture(f"a probe of it ends in {type(error).__name__}: {told}") from error


def _layers(read: list[list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """What each layer reads and hands on. UnknownArchitecture where the last norm does not read what the last layer
    hands on."""
    *layers, last = [tuple(one) for one in read]
    if not layers or not torch.equal(layers[-1][1], last[0]):
        raise UnknownArchitecture("something is computed behind its layers")
    return layers


@contextmanager
def _in_float32(model: nn.Module, entry: Description, read: list[list[Tensor]]) -> Iterator[None]:
    """Inside, what stands at the entry's places computes in float32; read gains what each layer reads and hands on,
    then the same of the last norm."""
    layers = list(at(model, entry.layers))
    changed = {at(model, entry.embedding): _embedding, at(model, entry.head): _head}
    if entry.position_embedding is not None:
        changed[at(model, entry.position_embedding)] = _embedding
    for module in (*layers, at(model, entry.final_norm)):
        changed[module] = lambda own: _told(own, read)
    for module, kind in changed.items():
        module.forward = kind(module)
    try:
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)


def _embedding(module: nn.Module) -> Callable[..., Tensor]:
    return lambda *words, **named: type(module).forward(module, *words, **named).float()


def _head(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: product(module, x.float())


def _told(module: nn.Module, read: list[list[Tensor]]) -> Callable[..., Any]:
    """The forward of a float32 copy, which is made for each call and gone behind it."""

    def forward(*words: Any, **named: Any) -> Any:
        words, named = _floats(words), _floats(named)
        x = words[0] if words else named["hidden_states"]
        whole = all(p.dtype == torch.float32 for p in module.parameters())
        own = module if whole else _float_copy(module)
        found = type(own).forward(own, *words, **named)
        handed_on = found if isinstance(found, Tensor) else found[0]
        read.append([x, handed_on])
        return found

    return forward


def _float_copy(module: nn.Module) -> nn.Module:
    kept = vars(module).pop("forward")
    try:
        return copy.deepcopy(module).float()
    finally:
        module.forward = kept


def _floats(given: Any) -> Any:
    """Floats as float32, in whatever tuple, list or dict they are."""
    if isinstance(given, Tensor):
        return given.float() if given.is_floating_point() else given
    if isinstance(given, tuple | list):
        return type(given)(map(_floats, given))
    return {name: _floats(one) for name, one in given.items()} if isinstance(given, dict) else given


def _farthest(model: nn.Module, entry: Description) -> int:
    """The first position of a row whose last one is the last that the model has, or a far one."""
    if entry.position_embedding is not None:
        most = at(model, entry.position_embedding).weight.shape[0] - entry.position_offset
    else:
        most = min(known_positions(text_config(model)) or _FARTHEST, _FARTHEST)
    return max(0, most - TOKENS)
