"""What is a row in another vocabulary, and what does a proposal made there say in this one?"""

from __future__ import annotations

import codecs
import math
from dataclasses import dataclass

from .translation import TokenText

# Bytes of text that are encoded anew each round. When more have gathered, the tokens that end KEEP bytes before the
# end are frozen: tokenizers decide within a few words. What is frozen depends on the row alone, not on the calls.
WINDOW = 192
KEEP = 64
# Settled tokens put before a proposal's text when it is encoded, so that it is cut as it would be in the running text.
LOOK_BACK = 4


@dataclass(frozen=True)
class Mark:
    """A place translation can go on from: tokens on both sides, and the text after the last frozen inner token."""

    outer_length: int
    inner_length: int
    open: bytes
    begins: bool  # the open text begins a text: nothing but special tokens before it


class RowTranslation:
    """One row of the checker's tokens, `outer`, and the same row in the inner level's tokens, `inner`.

    direct: outer token -> inner token for those that go over one to one (special tokens; the common vocabulary); all
    others are joined to text and encoded. Special tokens outside `direct` only separate texts. `inner` is a function
    of `outer` alone and, once updated, never empty: the inner level needs a token to start from.
    """

    def __init__(self, outer_text: TokenText, inner_text: TokenText, direct: dict[int, int]) -> None:
        self.outer_text, self.inner_text, self.direct = outer_text, inner_text, direct
        # Special tokens a proposal may end with: chat markers and the end of text, not its begin or an unknown token.
        drafted = inner_text.special.keys() - {inner_text.bos, inner_text.unknown}
        self._back = {inner: outer for outer, inner in direct.items() if inner in drafted}
        if outer_text.eos is not None and inner_text.eos is not None:
            self._back[inner_text.eos] = outer_text.eos
        self.outer: list[int] = []
        self.inner: list[int] = list(inner_text.prefix)
        self._marks = [Mark(0, len(self.inner), b"", True)]
        self._restore(self._marks[0])

    def update(self, length: int, tokens: list[int]) -> int:
        """Keep the first `length` outer tokens, append `tokens`; number of leading inner tokens that surely stayed."""
        if length < len(self.outer):
            self._rewind(length)
        elif self.inner and not tokens:
            return len(self.inner)
        same = self._frozen
        for token in tokens:
            self._feed(token)
        self._encode_open()
        if not self.inner:
            self.inner.append(self.inner_text.first_token)
        return same

    def asked(self, limit: int) -> int:
        """Inner tokens that make `limit` outer ones at the row's own ratio, and one to show where the last ends."""
        if not limit:
            return 0
        ratio = len(self.inner) / len(self.outer) if self.outer else 1.0
        return math.ceil(limit * ratio) + 1

    def to_outer(self, proposal: list[int], limit: int) -> list[int]:
        """At most `limit` outer tokens that spell a prefix of what the inner tokens `proposal` spell after `inner`.

        Dropped are: what follows a special token, an incomplete or invalid UTF-8 sequence, and of several tokens a
        last one that more text could have made longer. An inner special token becomes its outer counterpart.
        """
        said, special = self._said(proposal)
        if not said.startswith(self._pending):
            return []
        said = said[len(self._pending):]
        tokens, ends = self._continuation(said)
        complete = not said or (bool(ends) and ends[-1] == len(said))
        if complete and special in self._back:
            tokens = [*tokens, self._back[special]]
        elif len(tokens) > 1 and self.outer_text.may_grow(tokens[-1]):
            tokens = tokens[:-1]
        return tokens[:limit]

    def _said(self, proposal: list[int]) -> tuple[bytes, int | None]:
        """The complete characters a proposal spells, and the special token that ended it."""
        pieces: list[bytes] = []
        special = None
        for token in proposal:
            piece = self.inner_text.piece(token)
            if piece is None:
                special = token
                break
            pieces.append(piece)
        said = b"".join(pieces)
        if self._begins and self._open == self._pending and self.inner_text.adds_space:
            said = said.removeprefix(b" ")
        try:
            whole = codecs.utf_8_decode(said, "strict", False)[1]
        except UnicodeDecodeError as error:
            whole = error.start
        return said[:whole], special if whole == len(said) else None

    def _continuation(self, said: bytes) -> tuple[list[int], list[int]]:
        """Outer tokens that spell `said` after the settled ones, and their ends in it."""
        first, tail, begins = self._tail()
        settled = self.outer[first:]
        ids = self.outer_text.encode((tail + said).decode(errors="replace"), begins)
        if ids[:len(settled)] == settled:
            ids = ids[len(settled):]
        elif self._pending:
            return [], []  # the settled tokens end inside a character, which text alone cannot continue
        else:
            ids = self.outer_text.encode(said.decode(), begins and not settled)
        ends = self.outer_text.spelled_ends(ids, said, begins and not settled)
        return ids[:len(ends)], ends

    def _tail(self) -> tuple[int, bytes, bool]:
        """The last LOOK_BACK outer tokens, or more to begin with a whole character: (first, bytes, begins a text)."""
        first, tail = len(self.outer), b""
        for n in range(min(first, LOOK_BACK + 3)):  # a character has at most 3 bytes after its first
            piece = self.outer_text.piece(self.outer[first - 1])
            if piece is None or (n >= LOOK_BACK and not _splits_character(tail, 0)):
                break
            first, tail = first - 1, piece + tail
        begins = first == 0 or self.outer_text.piece(self.outer[first - 1]) is None
        if begins and self.outer_text.adds_space:
            tail = tail.removeprefix(b" ")
        return first, tail, begins

    def _feed(self, token: int) -> None:
        piece = self.outer_text.piece(token)
        self.outer.append(token)
        if piece is not None and token not in self.direct:
            added_space = self._bare and self.outer_text.adds_space
            self._open += piece.removeprefix(b" ") if added_space else piece
            self._bare = False
            if len(self._open) >= WINDOW:
                self._freeze()
            return
        self._encode_open()
        # The tokenizer's own prefix already says what a leading special token (begin of text) says.
        if token in self.direct and not (len(self.outer) == 1 and piece is None and self.inner_text.prefix):
            self.inner.append(self.direct[token])
        self._settle(b"", piece is None)

    def _freeze(self) -> None:
        """Settle the tokens of the open text that end at least KEEP bytes before its end."""
        self._encode_open()
        ends = self.inner_text.spelled_ends(self.inner[self._frozen:], self._open, self._begins)
        most = len(self._open) - KEEP
        whole = [n for n, end in enumerate(ends, 1) if end <= most and not _splits_character(self._open, end)]
        # Before a space, if one is near: there a tokenizer starts anew, so what follows is cut as in the whole text.
        count = max(whole, default=0, key=lambda n: (2 * ends[n - 1] >= most and self._open[ends[n - 1]] == 0x20, n))
        if count:
            del self.inner[self._frozen + count:]
            self._settle(self._open[ends[count - 1]:], False)
            return
        # A tokenizer that changes the text (lower case, normal forms): cut the text instead of the tokens.
        cut = next((at for at in range(most, most - 4, -1) if not _splits_character(self._open, at)), most)
        self._open, rest = self._open[:cut], self._open[cut:]
        self._encode_open()
        self._settle(rest, False)

    def _settle(self, rest: bytes, begins: bool) -> None:
        """Freeze `inner` as it is; `rest` is the open text from here on."""
        self._marks.append(Mark(len(self.outer), len(self.inner), rest, begins))
        self._restore(self._marks[-1])

    def _restore(self, mark: Mark) -> None:
        self._frozen, self._open, self._begins = mark.inner_length, mark.open, mark.begins
        self._bare, self._pending = mark.begins, b""

    def _rewind(self, length: int) -> None:
        while self._marks[-1].outer_length > length:
            self._marks.pop()
        mark = self._marks[-1]
        again = self.outer[mark.outer_length:length]
        del self.outer[mark.outer_length:], self.inner[mark.inner_length:]
        self._restore(mark)
        for token in again:
            self._feed(token)

    def _encode_open(self) -> None:
        """Put the tokens of the open text's whole characters after the frozen ones; an incomplete one is pending."""
        text, complete = codecs.utf_8_decode(self._open, "replace", False)
        self._pending = self._open[complete:]
        del self.inner[self._frozen:]
        self.inner.extend(self.inner_text.encode(text, self._begins))


def _splits_character(text: bytes, at: int) -> bool:
    """Would a cut before byte `at` leave the rest of a UTF-8 character?"""
    return at < len(text) and text[at] & 0xC0 == 0x80
