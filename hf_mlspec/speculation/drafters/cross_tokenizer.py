"""How does a level with another tokenizer draft for this one?

By text: "universal assisted generation" (re-encode the text both ways). By common vocabulary: the tokens that both
vocabularies share ("universal speculative decoding", Timor et al. 2025); they have the checker's noise. Here every
row keeps a frozen prefix, so a round costs what is new, and the inner level's cache stays valid as far as its tokens
stayed the same.
"""

from __future__ import annotations

from typing import Any

import torch

from ..draft import Draft, Drafter, Rows
from ..stats import LevelStats
from .agreement import agreed_length, common_prefix
from .model import OuterNoise
from .row_translation import RowTranslation
from .translation import common_vocabulary, special_token_map, token_text


class CrossTokenizerDrafter:
    """Presents `inner`, a level (or a whole chain of levels) of another vocabulary, in the checker's vocabulary.

    tokenizer, inner_tokenizer:   the checker's and the inner level's; see TokenText for what is asked of them.
    vocab_size, inner_vocab_size: rows of the two models' embeddings.
    by_text: True: the inner level's text is re-encoded. False: `inner` is restricted to the common vocabulary through
             its attribute `allowed` (bool [inner_vocab_size]), and its tokens are mapped one to one; if it has an
             attribute `outer`, that is the OuterNoise to draw with.

    `stats` is the inner level's, under this level's name: its forwards and seconds, verdicts in the checker's tokens.
    Raises TypeError where by_text=False and `inner` has no `allowed`.
    """

    def __init__(self, inner: Drafter, tokenizer: Any, inner_tokenizer: Any, *, by_text: bool = True,
                 inner_vocab_size: int, vocab_size: int, name: str | None = None) -> None:
        self.inner, self.by_text = inner, by_text
        self.name = inner.stats.name = name or inner.name
        if by_text:
            self.common = None
            outer_text, inner_text = token_text(tokenizer, vocab_size), token_text(inner_tokenizer, inner_vocab_size)
        else:
            if not hasattr(inner, "allowed"):
                raise TypeError(f"level {inner.name!r} ({type(inner).__name__}) cannot be restricted to a common "
                                "vocabulary: it has no attribute `allowed`. Use by_text=True or a model level")
            self.common = common_vocabulary(tokenizer, inner_tokenizer, vocab_size, inner_vocab_size)
            outer_text, inner_text = self.common.outer_text, self.common.inner_text
        self._texts = outer_text, inner_text
        self._direct = special_token_map(outer_text, inner_text)
        if self.common is not None:
            self._to_outer = self.common.to_outer.tolist()
            self._direct |= {token: to for token, to in enumerate(self.common.to_inner.tolist()) if to >= 0}
        self._views: list[RowTranslation] = []

    @property
    def stats(self) -> LevelStats:
        """The inner level's own counts."""
        return self.inner.stats

    def start(self, batch: int, device: torch.device) -> None:
        """Forget every earlier row; `batch` rows follow, drafts go to `device`."""
        self._device = device
        self._views = [RowTranslation(*self._texts, self._direct) for _ in range(batch)]
        # What the inner level holds of each row: its row of the last round and its proposal.
        self._held = [[] for _ in range(batch)]
        self._proposed: Rows = [[] for _ in range(batch)]
        self.inner.start(batch, device)
        if self.common is not None:
            self.inner.allowed = self.common.inner_allowed.to(device)
            if hasattr(self.inner, "outer"):
                columns = (self.common.to_inner >= 0).nonzero().flatten()
                self.inner.outer = OuterNoise(
                    self.common.to_inner[columns].to(device), columns.to(device), len(self.common.to_inner), [])

    def propose(self, rows: Rows, limits: list[int]) -> Draft:
        """Translate what is new in the rows, let `inner` propose, translate back."""
        lengths = [agreed_length(view.outer, row) for view, row in zip(self._views, rows, strict=True)]
        self._follow(lengths, [row[n:] for row, n in zip(rows, lengths, strict=True)], unseen=1)
        if not any(limits):
            return self._handed_up([[] for _ in rows])
        by_text = self.common is None
        asked = [view.asked(limit) if by_text else limit for view, limit in zip(self._views, limits, strict=True)]
        if not by_text and hasattr(self.inner, "outer"):
            self.inner.outer.lengths = [len(row) for row in rows]
        draft = self.inner.propose([view.inner for view in self._views], asked)
        proposals = [tokens[:n] for tokens, n in zip(draft.tokens.tolist(), draft.lengths, strict=True)]
        for held, view, proposal in zip(self._held, self._views, proposals, strict=True):
            held.extend(view.inner[len(held):])
            held.extend(proposal)
        if not by_text:
            return self._handed_up([self._common_tokens(tokens) for tokens in proposals])
        return self._handed_up([view.to_outer(proposal, limit)
                                for view, proposal, limit in zip(self._views, proposals, limits, strict=True)])

    def rollback(self, lengths: list[int]) -> None:
        """The inner level keeps the tokens that spell the first `lengths[r]` tokens of row r and its proposal."""
        added = [proposal[:max(0, length - len(view.outer))]
                 for view, proposal, length in zip(self._views, self._proposed, lengths, strict=True)]
        self._follow(lengths, added, unseen=0)
        self._proposed = [[] for _ in lengths]

    def select(self, keep: list[int]) -> None:
        """Go on with the rows of these indices only, in this order."""
        self._views, self._held, self._proposed = ([part[r] for r in keep]
                                                   for part in (self._views, self._held, self._proposed))
        self.inner.select(keep)

    def admit(self, count: int) -> None:
        """`count` rows join behind the others."""
        self._views += [RowTranslation(*self._texts, self._direct) for _ in range(count)]
        self._held += [[] for _ in range(count)]
        self._proposed = self._proposed + [[] for _ in range(count)]
        self.inner.admit(count)

    def replace(self, row: int) -> None:
        """Another row takes the place of row `row`."""
        self._views[row] = RowTranslation(*self._texts, self._direct)
        self._held[row], self._proposed[row] = [], []
        self.inner.replace(row)

    def _follow(self, lengths: list[int], added: Rows, unseen: int) -> None:
        """Bring every row to its first `lengths[r]` tokens and `added[r]`; the inner level forgets what that changed.

        unseen: tokens at a row's end that the inner level may not hold (1 before it proposes: it starts there).
        """
        keep = []
        for view, held, length, tokens in zip(self._views, self._held, lengths, added, strict=True):
            same = min(view.update(length, tokens), len(held))
            same += common_prefix(held[same:], view.inner[same:])
            keep.append(min(same, len(view.inner) - unseen))
        if any(length < len(held) for length, held in zip(keep, self._held, strict=True)):
            self.inner.rollback(keep)
            for held, length in zip(self._held, keep, strict=True):
                del held[length:]

    def _common_tokens(self, proposal: list[int]) -> list[int]:
        tokens = [self._to_outer[token] for token in proposal]
        if -1 in tokens:
            raise ValueError(f"level {self.inner.name!r} proposed token {proposal[tokens.index(-1)]}, outside the "
                             f"{len(self.common)} tokens of the common vocabulary its `allowed` restricts it to")
        return tokens

    def _handed_up(self, proposals: Rows) -> Draft:
        self._proposed = proposals
        return Draft.from_lists(proposals, self._device)
