"""How does a model decode whose layers keep a state that no length can roll back?

Recurrent and convolution states hold all tokens before them in one tensor: what a rejected token wrote cannot be cut
off. Here every row has a cache of its own, of the kind that transformers gives the model, and a state goes back by
being restored: from a copy made before the first token that may be rejected, and by running the tokens after it that
were accepted. That is slow and needs to know nothing of the layers.

The bits of a token are those of this row alone (invariant 3): a prompt but for its last token is one forward pass of
one row, every other token is a forward pass of its own, whether it is decoded, checked, drafted or run again. Nothing
of another row, and no padding, enters a state.

Models without a state whose rows cannot share a forward pass run the same way, with two differences: a prompt is one
pass with its last token, and each pass is prepared as transformers' generate prepares it.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..engine import Capabilities, Guess, Rows
from .engine import ModuleEngine
from .states import (
    Kept,
    keeps_state,
    new_states,
    restored,
    state_argument,
    states_inside,
    with_states_inside,
)
from .tapping import tapping_row

_MOST_COPIES = 4  # of one row's state; a level in the middle of a chain is taken back by several rounds


@dataclass
class _Row:
    """What is kept of a row.

    states: the model's cache after `fed`, None before the first token. fed: the tokens in it. prefilled: how many of
    them the first forward pass had. committed: tokens of the row before the first that may be rejected. copies: from
    earlier lengths, ascending. sound: whether `states` is what `fed` says; False while a forward pass runs.
    """

    states: Any = None
    fed: list[int] = field(default_factory=list)
    prefilled: int = 0
    committed: int = 0
    copies: list[Kept] = field(default_factory=list)
    sound: bool = True


class _RowStates:
    """The states of all rows, where other engines have a cache."""

    def __init__(self, batch: int):
        self.rows = [_Row() for _ in range(batch)]

    @property
    def nbytes(self) -> int:
        """Bytes of states and of their copies."""
        return sum(Kept.of(row.states, 0).whole_bytes + sum(copy.nbytes for copy in row.copies) for row in self.rows)


class StatefulEngine(ModuleEngine):
    """A model's modules, one row and one token at a time, over states that are copied and run again. See `Engine`.

    A follower has states of its own: in every round they begin as a copy of its leader's.
    """

    can = Capabilities(by_module=True, stateful=True)

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        if "linear_attention" in (getattr(self.model.config.get_text_config(), "layer_types", None) or ()):
            self.can = replace(StatefulEngine.can, tapped=True)  # their layers read and give [row, tokens, hidden]

    def start(self, batch: int, device: torch.device) -> None:
        """No token of `batch` rows is known yet."""
        self.device, self.lengths, self.cache = device, [0] * batch, _RowStates(batch)
        self._splits_prompts = self.keeps_state
        self._forward = state_forward(self.model) if self._splits_prompts else prepared_forward(self.model)

    @property
    def keeps_state(self) -> bool:
        """Whether the model keeps one, or its rows alone take passes of their own."""
        return keeps_state(self.model)

    @property
    def bytes_per_token(self) -> int:
        """Not known: a state does not grow with its row."""
        return 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of the states this engine holds, a follower's too."""
        return 0 if self.cache is None else self.cache.nbytes

    def keep_in(self, kept) -> None:
        """ValueError: a state has no format but its model's."""
        raise ValueError(f"{type(self.model).__name__} keeps a state, which is kept as it is computed: leave it out")

    def select(self, keep: list[int]) -> None:
        """Go on with these rows only."""
        self.lengths = [self.lengths[r] for r in keep]
        self.cache.rows = [self.cache.rows[r] for r in keep]

    def admit(self, count: int) -> None:
        """Append `count` rows that hold nothing yet."""
        self.lengths = self.lengths + [0] * count
        self.cache.rows += [_Row() for _ in range(count)]

    def forget(self, row: int) -> None:
        """Give the place of `row` to a new sequence."""
        self.lengths[row], self.cache.rows[row] = 0, _Row()

    def shrink(self, slots: int) -> None:
        """Nothing: a row has no slots that it does not use."""

    def feed(self, rows: Rows, guess: Guess | None = None, alive: list[bool] | None = None) -> Tensor:
        """Score rows and guesses as `Engine.feed` does: logits `[batch, k + 1, vocab]`; zeros where meaningless."""
        for r, row in enumerate(rows):
            if alive is None or alive[r]:
                self.cache.rows[r].committed = len(row)
                if self.follow is not None:
                    self._fork(r, len(row) - 1)
        return super().feed(rows, guess, alive)

    def step(self, tokens: Tensor, counts: list[int], first: list[int], kept: int) -> Tensor:
        """Run tokens `[batch, q]`, counts[r] of them valid, token by token; logits of `kept` from first[r] on."""
        begin = time.perf_counter()
        if self.num_embeddings is not None:
            tokens = tokens.clamp(max=self.num_embeddings - 1)
        logits: Tensor | None = None
        with self._at_bits():
            for r, (line, count) in enumerate(zip(tokens.tolist(), counts, strict=True)):
                for place, scored in self._run(r, line[:count], first[r]):
                    if logits is None:
                        logits = scored.new_zeros(len(counts), kept, scored.shape[-1])
                    if 0 <= place - first[r] < kept:
                        logits[r, place - first[r]] = scored
        if logits is None:
            logits = torch.zeros(len(counts), kept, self.vocab_size, dtype=self.dtype, device=self.device)
        self.lengths = [have + count for have, count in zip(self.lengths, counts, strict=True)]
        self.forwards += 1
        self.seconds += time.perf_counter() - begin
        return logits

    def settle(self, r: int) -> _Row:
        """Row r with a state after exactly `lengths[r]` tokens, restored and run again where it has to be."""
        row, length = self.cache.rows[r], self.lengths[r]
        if length > len(row.fed):
            raise RuntimeError(f"row {r} is to go on behind {length} tokens, and its state is of {len(row.fed)}")
        row.copies = [copy for copy in row.copies if copy.length <= length]
        if row.sound and len(row.fed) == length:
            return row
        fed, have = row.fed[:length], 0
        if row.copies:
            row.states, have = restored(row.copies[-1], row.states), row.copies[-1].length
        else:
            row.states = None
        row.fed, row.sound = fed[:have], True
        with self._at_bits():
            if have == 0 and length >= row.prefilled > 0:
                self._pass(r, fed[: row.prefilled])
            for token in fed[len(row.fed) :]:
                self._pass(r, [token])
        return row

    def _run(self, r: int, tokens: list[int], first: int):
        """Feed tokens to row r: (place, logits `[vocab]`) of each that ran alone."""
        if not tokens:
            return
        row, done = self.settle(r), 0
        if not row.fed:
            row.prefilled = done = first if self._splits_prompts else min(first + 1, len(tokens))
            scored = self._pass(r, tokens[:done]) if done else None
            if done > first:
                yield first, scored
        for place in range(done, len(tokens)):
            length = len(row.fed)
            if length == row.committed and not (row.copies and row.copies[-1].length == length):
                row.copies = [*row.copies, Kept.of(row.states, length)][-_MOST_COPIES:]
            yield place, self._pass(r, [tokens[place]])

    def _pass(self, r: int, tokens: list[int]) -> Tensor:
        """One forward pass of the tokens behind row r: logits `[vocab]` of the last."""
        row = self.cache.rows[r]
        row.sound, begin, whole = False, len(row.fed), row.fed + tokens
        shown = tokens if self._splits_prompts else whole
        with nullcontext() if self.tap is None else tapping_row(self.model, self.tap, r, begin, len(tokens)):
            logits, row.states = self._forward(torch.tensor([shown], device=self.device), begin, row.states)
        row.fed, row.sound = whole, True
        return logits

    def _fork(self, r: int, most: int) -> None:
        """Let row r begin with a copy of its leader's state, where that is of more tokens than its own or as many."""
        leader = self.follow
        if min(leader.lengths[r], most) != leader.lengths[r]:
            leader.lengths[r] = most  # what the leader would do at its next check
        if leader.follow is not None:
            leader._fork(r, leader.lengths[r])  # which it says it has: what its own leader checked is not here yet
        source = leader.settle(r)
        if not source.fed or len(source.fed) < self.lengths[r]:
            return
        own = self.cache.rows[r]
        own.states, own.fed = Kept.whole(source.states), list(source.fed)
        own.prefilled, own.sound = source.prefilled, True
        own.copies, self.lengths[r] = [], len(source.fed)


Forward = Callable[[Tensor, int, Any], tuple[Tensor, Any]]


def state_forward(model: nn.Module) -> Forward:
    """The model's own forward as (tokens `[1, q]`, how many the states hold, states) -> logits `[vocab]` of the last,
    states."""
    takes, places = inspect.signature(model.forward).parameters, states_inside(model)
    name = state_argument(model)

    def forward(tokens: Tensor, length: int, states: Any) -> tuple[Tensor, Any]:
        states, inside = (new_states(model), [None] * len(places)) if states is None else states
        options: dict[str, Any] = {name: states}
        if "position_ids" in takes:
            options["position_ids"] = torch.arange(length, length + tokens.shape[1], device=tokens.device)[None]
        if "logits_to_keep" in takes:
            options["logits_to_keep"] = 1
        inside = list(inside)
        with with_states_inside(places, inside):
            out = model(input_ids=tokens, use_cache=True, return_dict=True, **options)
        return out.logits[0, -1], (getattr(out, name, states), inside)

    return forward


def prepared_forward(model: nn.Module) -> Forward:
    """As `state_forward`, of all tokens of the row `[1, n]`, each pass as generate makes it; states are what that
    keeps beside the ids."""
    takes = inspect.signature(model.forward).parameters

    def forward(tokens: Tensor, length: int, states: Any) -> tuple[Tensor, Any]:
        first = states is None
        if first:
            kept = {"past_key_values": new_states(model), "use_cache": True}
            states = {name: value for name, value in kept.items() if value is not None}
            if "position_ids" in takes:
                states["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
            if "logits_to_keep" in takes:
                states["logits_to_keep"] = 1
        new = None if first else tokens.shape[1] - length
        how = {"next_sequence_length": new, "is_first_iteration": first}
        out = model(**model.prepare_inputs_for_generation(tokens, **how, **states), return_dict=True)
        return out.logits[0, -1], model._update_model_kwargs_for_generation(out, states)

    return forward
