"""How does a model step whose rows read as many planes as their prompts were given? Here module by module.

The pass that reads a row's prompt chooses its widths on the way, block by block; every later pass of the row reads
those, or chooses for each of its tokens. A row whose widths are not known yet reads its prompt, also where a cache
already holds it. Which engine a routed model gets is decided here, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..engines.choose import decoder_of, required_decoder, word_of
from ..engines.engine import Guess, Rows
from ..engines.modules.engine import ModuleEngine, bare_forward
from ..nn.state import say_once
from ..nn.switch import precision_switch
from . import compiled_engine, cpu_engine
from .blocks import blocks_of
from .compiled_engine import RoutedCudaEngine
from .cpu_engine import RoutedCpuEngine
from .passes import Routed, Steps
from .router import STEP, Router
from .row_widths import Query, RowWidths

WHY_BY_MODULE = "no compiled decoder was asked for"
NO_DECODER = "no compiled decoder serves it"


_COMPILED = {
    "cuda": (RoutedCudaEngine, compiled_engine.why_not_compiled), "cpu": (RoutedCpuEngine, cpu_engine.why_not_compiled)
}  # fmt: skip


class RoutedEngine(RowWidths, ModuleEngine):
    """A model's modules over a ragged cache, a width per block and row. See `Engine`; chosen: as of `RowWidths`."""

    can = replace(ModuleEngine.can, trees=False)

    def __init__(self, model: nn.Module, router: Router, **options: Any):
        super().__init__(model, **options)
        self.router, self.blocks, self.planes = router, blocks_of(model), precision_switch(model)
        self.chosen, self.queries = [], []

    def feed(self, rows: Rows, guess: Guess | None = None, alive: list[bool] | None = None) -> Tensor:
        """As `Engine.feed`; rows without widths are read from their first token on."""
        on = alive or [True] * len(rows)
        self.lengths = [
            0 if known is None and now else have
            for have, known, now in zip(self.lengths, self.chosen, on, strict=True)
        ]
        return super().feed(rows, guess, alive)

    def step(self, tokens: Tensor, counts: list[int], first: list[int], kept: int) -> Tensor:
        """As `Engine.step`. The query of a row that begins here is what stands before its guess."""
        fresh = [known is None and count > 0 for known, count in zip(self.chosen, counts, strict=True)]
        lengths = [place + 1 if begins else 0 for place, begins in zip(first, fresh, strict=True)]
        widest = [self.router.widths[-1]] * len(self.blocks)  # of inactive rows, whose logits are meaningless
        known = [list(line) for line in zip(*[own or widest for own in self.chosen], strict=True)]
        steps = self._steps(lengths, counts) if self.router.every == STEP else None
        with Routed(self.router, self.blocks, lengths, known, steps).over(self.model, self.planes) as routed:
            logits = super().step(tokens, counts, first, kept)
        for place, row in enumerate(routed.fresh):
            self.chosen[row] = [line[row] for line in routed.widths]
            if steps is not None:
                self.queries[row] = Query(lengths[row], [own[place] for own in routed.features.values()])
        return logits

    def _steps(self, lengths: list[int], counts: list[int]) -> Steps:
        """Tokens behind the queries, of rows whose query is here (lengths) and of all others."""
        spans = [
            (length or max(0, query.tokens - have), count) if count else (0, 0)
            for length, query, have, count in zip(lengths, self.queries, self.lengths, counts, strict=True)
        ]
        return Steps(spans, [None if length or query is None else query.means
                             for length, query in zip(lengths, self.queries, strict=True)])  # fmt: skip


def routed_engine(
    model: nn.Module, router: Router, *, name: str | None, prepare: bool, capacity: int, num_positions: int | None
) -> RoutedEngine | RoutedCudaEngine | RoutedCpuEngine:
    """An engine over the model, not yet started: of a compiled decoder, else its modules.

    ValueError where ``name`` asks for what cannot run it; else the model is told once why it runs module by module.
    """
    options = {"capacity": capacity, "num_positions": num_positions}
    reason, word = WHY_BY_MODULE, word_of(model, name=name, prepare=prepare)
    if word in _COMPILED:
        kind, why_not = _COMPILED[word]
        decoder = required_decoder(model, word) if name == word else decoder_of(model, word)
        reason = NO_DECODER if decoder is None else why_not(model, decoder)
        if not reason:
            return kind(model, decoder, router, **options)
    if name not in (None, "modules"):
        raise ValueError(
            f"engine {name!r} cannot run this {type(model).__name__}: {reason}; leave out engine= or the router"
        )
    say_once(model, f"{type(model).__name__} runs module by module where it is routed: {reason}", kind="routed")
    embedded = model.get_input_embeddings().num_embeddings
    return RoutedEngine(model, router, forward=bare_forward(model), num_embeddings=embedded, **options)
