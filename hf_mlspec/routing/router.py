"""How many bits does a block read for a query? A small MLP per block scores the candidate widths.

    features (mean of the block's input) -> standardized -> linear, SiLU, linear -> scores -> softmax(scores / t)

The widest score wins where tokens are generated; the softmax weighs prefixes of the planes while a router is trained
(training.py). QAQ leaves sizes and temperature open: 32 hidden units and a temperature that is saved with the router.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..checkpoints.whole_file import written_whole
from .blocks import Block, identity_of, shapes_of
from .foresight import LEAD, Foresight

WIDTHS = (2, 3, 4, 6, 8)
HIDDEN = 32
STEP_SHARE = 0.25  # how far a step's features are moved from those of the query to the token's own
PROMPT, STEP = EVERY = ("prompt", "step")  # how often a router chooses
KIND, VERSION = "mlspec_router", 2  # 1: without `every` and `step_share`, and at first without guesses of what comes
_READ = (1, VERSION)


class BlockRouter(nn.Module):
    """The MLP of one block: float32 ``[rows, features]`` -> scores ``[rows, widths]``."""

    def __init__(self, features: int, hidden: int, widths: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("spread", torch.ones(features))
        self.inner = nn.Linear(features, hidden)
        self.outer = nn.Linear(hidden, widths)
        nn.init.zeros_(self.outer.weight)  # every query alike at first
        nn.init.zeros_(self.outer.bias)

    def forward(self, features: Tensor) -> Tensor:
        standard = (features - self.mean) / self.spread
        return self.outer(F.silu(self.inner(standard)))

    @torch.no_grad()
    def folded(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the first layer over features that are not standardized."""
        inner = self.inner.weight / self.spread
        return inner, self.inner.bias - inner @ self.mean


class Router(nn.Module):
    """Of one model: a BlockRouter for each of its blocks.

    widths: the candidates, rising. temperature: of the softmax over them. names: of the blocks. identity, shapes: of
    the model (blocks.py). average: bits of a weight on its training queries. every: "prompt", one choice for a prompt
    and what follows, or "step", one more for every token behind it. step_share: of the token in what such a choice
    sees (features.py). usual: of every block the widest choice for some training queries; None: nobody knows.
    """

    def __init__(
        self, blocks: Sequence[Block], widths: Sequence[int] = WIDTHS, hidden: int = HIDDEN, temperature: float = 1.0
    ):
        """ValueError for widths that do not rise or that the planes do not have."""
        super().__init__()
        blocks = list(blocks)
        self.widths = require_widths(widths, min(one.num_planes for b in blocks for one in b.linears.values()))
        self.temperature, self.hidden = float(temperature), hidden
        self.every, self.step_share = PROMPT, STEP_SHARE
        self.names = [block.name for block in blocks]
        self.identity, self.shapes = identity_of(blocks), shapes_of(blocks)
        self.average = sum(self.widths) / len(self.widths)
        self.usual: list[int] | None = None
        self.of = nn.ModuleList([BlockRouter(block.features, hidden, len(self.widths)) for block in blocks])
        self.ahead = nn.ModuleList()  # of every block from number LEAD on, once they are fitted
        self._features = [block.features for block in blocks]

    def probabilities(self, place: int, features: Tensor) -> Tensor:
        """Of block ``place``: float32 ``[rows, features]`` -> ``[rows, widths]``, which sum to 1."""
        return torch.softmax(self.of[place](features) / self.temperature, dim=-1)

    @torch.no_grad()
    def choose(self, place: int, features: Tensor) -> list[int]:
        """The width of the highest score for every row, the narrower of equal ones. Each row is scored on its own: its
        width does not depend on its neighbours (invariant 3)."""
        one = self.of[place]
        features = features.float().to(one.mean.device)
        if len(features) == 1:  # a prompt alone: the same sums, and fewer calls around them
            return [self.widths[int(one(features).argmax())]]
        scores = [one(row[None])[0] for row in features]
        return [self.widths[at] for at in torch.stack(scores).argmax(-1).tolist()] if scores else []

    @torch.no_grad()
    def foresee(self, place: int, features: Tensor) -> int | None:
        """The widest that block ``place`` + LEAD is likely to choose for these rows, by the features of block
        ``place``; None where nothing says."""
        if not place < len(self.ahead):
            return None
        scores = self.ahead[place](features.float().to(self.ahead[place].bias.device))
        return max(self.widths[int(own.argmax())] for own in scores)

    def choosing(self, every: str | None) -> Router:
        """Itself, or the same tensors choosing as often as ``every`` says; None: as it does. ValueError for another
        word."""
        if every is None or require_every(every) == self.every:
            return self
        other = copy.copy(self)
        other.every = every
        return other

    def look_ahead(self) -> None:
        """Have a `Foresight` for every block that has one LEAD before it, as yet without a guess."""
        device = next(self.of.parameters()).device
        earlier = self._features[:-LEAD] if len(self._features) > LEAD else []
        self.ahead = nn.ModuleList([Foresight(own, len(self.widths)) for own in earlier]).to(device)

    @torch.no_grad()
    def charge(self, price: float) -> None:
        """Lower every score by ``price`` times its width: dearer bits, narrower choices."""
        for one in self.of:
            one.outer.bias -= price * torch.tensor(self.widths, dtype=torch.float32, device=one.outer.bias.device)

    def save(self, path: str | os.PathLike) -> None:
        """A safetensors file, written beside and renamed; what it belongs to is in its header."""
        told = {
            "version": VERSION, "widths": self.widths, "hidden": self.hidden, "temperature": self.temperature,
            "average": self.average, "model": self.identity, "shapes": self.shapes, "blocks": self.names,
            "ahead": len(self.ahead), "every": self.every, "step_share": self.step_share,
            "usual": self.usual,
        }  # fmt: skip
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        with written_whole(path) as beside:
            save_file(tensors, beside, {KIND: json.dumps(told)})  # one entry: several have no fixed order

    @classmethod
    def load(
        cls, path: str | os.PathLike, blocks: Sequence[Block], widths: Sequence[int] | None = None
    ) -> Router:
        """The router of a file, for the model of ``blocks``.

        Checked before a tensor is read: that it is a router, for these shapes and weights, and, where ``widths`` are
        given, for those. ValueError names the file, what differs and the remedy; FileNotFoundError without one.
        """
        blocks = list(blocks)
        told = require_file(path, blocks)
        require_weights(str(path), told["model"], identity_of(blocks))
        saved = tuple(told["widths"])
        if widths is not None and tuple(widths) != saved:
            asked = list(widths)
            raise ValueError(f"{path} chooses among {list(saved)} planes, {asked} were asked for: train another")
        router = cls(blocks, saved, told["hidden"], told["temperature"])
        router.average, router.usual = told["average"], told.get("usual")
        router.every, router.step_share = told.get("every", PROMPT), told.get("step_share", STEP_SHARE)
        if told.get("ahead"):  # files of before have none
            router.look_ahead()
        router._fill(str(path), load_file(path))
        return router.eval().requires_grad_(False)

    def require(self, blocks: Sequence[Block]) -> Router:
        """Itself; ValueError where it belongs to another model than that of ``blocks``."""
        blocks = list(blocks)
        require_shapes("this router", self.shapes, blocks)
        require_weights("this router", self.identity, identity_of(blocks))
        return self

    def _fill(self, path: str, tensors: dict[str, Tensor]) -> None:
        own = self.state_dict()
        for name in sorted(own.keys() | tensors.keys()):
            have, want = tensors.get(name), own.get(name)
            if have is None or want is None or have.shape != want.shape or have.dtype != want.dtype:
                said = "is missing" if have is None else f"is {have.dtype} {list(have.shape)}"
                raise ValueError(f"{path}: {name} {said}: the router is damaged; train it again")
            if not bool(torch.isfinite(have).all()):
                raise ValueError(f"{path}: {name} holds NaN or Inf: the router is damaged; train it again")
        self.load_state_dict(tensors)


def require_every(every: str, name: str = "every") -> str:
    """``every``; ValueError for another word than those of EVERY."""
    if every not in EVERY:
        raise ValueError(f"{name} is {every!r}: a router chooses every {' or every '.join(map(repr, EVERY))}")
    return every


def require_widths(widths: Sequence[int], planes: int) -> tuple[int, ...]:
    """``widths``; ValueError where they do not rise, or are none that ``planes`` planes have."""
    fit = all(type(width) is int and 1 <= width <= planes for width in widths)
    if not fit or len(widths) < 2 or list(widths) != sorted(set(widths)):
        raise ValueError(
            f"widths are {list(widths)}: give two or more rising numbers of planes, the weights have {planes}"
        )
    return tuple(widths)


def require_file(path: str | os.PathLike, blocks: Sequence[Block]) -> dict[str, Any]:
    """A router file's header, before a tensor is read; ValueError where it is no router's, or has other shapes."""
    try:
        with safe_open(path, "pt") as file:
            told = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is no router: {error}; train one with `mlspec route train`") from error
    if KIND not in told:
        raise ValueError(f"{path} is no router: train one with `mlspec route train`")
    told = _said(path, told[KIND])
    if told.get("version") not in _READ:
        known = " and ".join(map(str, _READ))
        raise ValueError(f"{path}: version {told.get('version')} of a router, this hf_mlspec reads {known}: upgrade")
    missing = [name for name, kind in _TOLD.items()
               if name not in told or not isinstance(told[name], kind) or isinstance(told[name], bool)]  # fmt: skip
    if missing:
        raise ValueError(f"{path}: its header says no {', '.join(missing)}: the router is damaged; train it again")
    if not 1 <= told["hidden"] <= os.stat(path).st_size or not 0 < told["temperature"] <= sys.float_info.max:
        raise ValueError(f"{path}: its header says {told['hidden']} hidden units and a temperature of "
                         f"{told['temperature']!r:.60}: the router is damaged; train it again")
    every, share = told.get("every", PROMPT), told.get("step_share", STEP_SHARE)
    if every not in EVERY or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ValueError(f"{path}: its header says a choice every {every!r}, with a share of {share!r} of the token: "
                         "the router is damaged; train it again")  # fmt: skip
    require_shapes(str(path), told["shapes"], list(blocks))
    _require_usual(path, told.get("usual"), told["widths"], len(blocks))
    return told


def _require_usual(path: str | os.PathLike, usual: Any, widths: list[Any], blocks: int) -> None:
    """ValueError for what a file says to be usual, where it is none of its widths for every block; older files say
    nothing."""
    fits = isinstance(usual, list) and len(usual) == blocks and all(type(n) is int and n in widths for n in usual)
    if usual is not None and not fits:
        raise ValueError(f"{path}: its header says that {usual!r:.60} planes are usual, of {blocks} blocks and widths "
                         f"{widths!r:.60}: the router is damaged; train it again")  # fmt: skip


_TOLD = {"widths": list, "hidden": int, "temperature": (int, float), "average": (int, float, type(None)),
         "model": str, "shapes": dict}  # fmt: skip


def _said(path: str | os.PathLike, text: str) -> dict[str, Any]:
    """What a router's header says; ValueError where that cannot be read."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: its header cannot be read ({error}): the router is damaged; train it again"
        ) from error
    if not isinstance(told, dict):
        raise ValueError(f"{path}: its header is a {type(told).__name__}: the router is damaged; train it again")
    return told


def require_shapes(name: str, shapes: dict[str, list[int]], blocks: list[Block]) -> None:
    """ValueError where a router's shapes are not those of the blocks."""
    own = shapes_of(blocks)
    for layer in [*own, *shapes]:
        if shapes.get(layer) != own.get(layer):
            raise ValueError(
                f"{name} is the router of another model: for {layer} it has (planes, outputs, inputs, group) "
                f"{shapes.get(layer)}, the model {own.get(layer)}; train one for this model with `mlspec route train`"
            )


def require_weights(name: str, told: str, own: str) -> None:
    """ValueError where a router's hash is not that of the weights."""
    if told != own:
        raise ValueError(
            f"{name} is the router of a model with the same shapes and other weights (hash {told[:12]}, this one's "
            f"{own[:12]}); train one for this model with `mlspec route train`"
        )
