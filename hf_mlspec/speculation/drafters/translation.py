"""What text is a token, and which tokens spell a text that goes on?"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Texts a continuation is put behind when the tokenizer marks the beginning of every text with a space: characters that
# merge with nothing in most vocabularies (byte fallback, then plain ones). The first whose own tokens survive is used.
_ANCHORS = ("\x01", "\n", "~", "|", "0")


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (Radford et al. 2019): printable bytes are themselves, others U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_ALPHABET = byte_level_alphabet()


class TokenText:
    """One tokenizer as a two-way map between tokens and the bytes they add to a text.

    tokenizer:  called as `tokenizer(text, add_special_tokens=...)["input_ids"]`, with get_vocab, decode,
                all_special_ids and the ids of its special tokens, as transformers' tokenizers have.
    vocab_size: rows of the model's embedding; ids from there on are never produced.

    special: token id -> its string; special tokens have no text.
    prefix:  the special tokens the tokenizer puts before a text (`<s>`); `adds_space`: whether it also puts a space.
    first_token: what a row without any text begins with.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.strings = {i: string for string, i in tokenizer.get_vocab().items() if i < vocab_size}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        ids = {*tokenizer.all_special_ids, *(i for i, token in added.items() if getattr(token, "special", False))}
        self.special = {i: self.strings[i] for i in ids if i in self.strings}
        self.eos, self.bos, self.unknown = map(self._named, ("eos_token_id", "bos_token_id", "unk_token_id"))
        self.first_token = next((i for i in (self.bos, self.eos) if i is not None), min(self.strings))
        self._pieces: dict[int, bytes | None] = {}
        self._growing: frozenset[bytes] | None = None
        sample = self._ids(" a")
        spelled = "".join(self.strings[i] for i in sample)
        self._style = "bytes" if "Ġ" in spelled else "metaspace" if "▁" in spelled else "decode"
        plain = self._ids("a")
        self._lead = plain[:1]
        self.adds_space = self.spelling(plain) == b" a"
        self.prefix = self._special_prefix(plain)
        self._anchors = self._working_anchors() if self.adds_space else []

    def piece(self, token: int) -> bytes | None:
        """The bytes `token` adds to a text it does not begin; None for special tokens and ids without a token."""
        if token not in self._pieces:
            self._pieces[token] = self._spell(token)
        return self._pieces[token]

    def spelling(self, tokens: list[int]) -> bytes:
        """The bytes of several tokens, special ones left out."""
        return b"".join(self.piece(token) or b"" for token in tokens)

    def encode(self, text: str, begins: bool) -> list[int]:
        """Tokens of `text`, which begins a text or continues one (then without the space some tokenizers add)."""
        if not text:
            return []
        if not begins:
            for anchor, ids in self._anchors:
                whole = self._ids(anchor + text)
                if whole[:len(ids)] == ids:
                    return whole[len(ids):]
        return self._ids(text)

    def spelled_ends(self, tokens: list[int], text: bytes, begins: bool) -> list[int]:
        """For the leading tokens that spell `text`, and no further one, the end of each in `text`."""
        ends: list[int] = []
        end = 0
        for token in tokens:
            piece = self.piece(token)
            if not ends and begins and self.adds_space and piece:
                piece = piece.removeprefix(b" ")
            if piece is None or text[end:end + len(piece)] != piece:
                break
            end += len(piece)
            ends.append(end)
        return ends

    def may_grow(self, token: int) -> bool:
        """Does a longer token begin with the text of this one?"""
        if self._growing is None:
            pieces = sorted({piece for piece in map(self.piece, self.strings) if piece})
            self._growing = frozenset(a for a, b in pairwise(pieces) if b.startswith(a))
        return self.piece(token) in self._growing

    def _named(self, name: str) -> int | None:
        token = getattr(self.tokenizer, name, None)
        return token if token in self.strings else None

    def _ids(self, text: str) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [i for i in ids if i in self.strings and (i not in self.special or i == self.unknown)]

    def _spell(self, token: int) -> bytes | None:
        string = self.strings.get(token)
        if string is None or token in self.special:
            return None
        if self._style == "bytes":
            known = all(character in _ALPHABET for character in string)
            return bytes(map(_ALPHABET.__getitem__, string)) if known else string.encode()
        if self._style == "metaspace":
            byte = _BYTE_TOKEN.fullmatch(string)
            return bytes([int(byte[1], 16)]) if byte else string.replace("▁", " ").encode()
        return self._decode([*self._lead, token]).removeprefix(self._decode(self._lead)).encode()

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _special_prefix(self, plain: list[int]) -> list[int]:
        full = list(self.tokenizer("a", add_special_tokens=True)["input_ids"])
        count = next((i for i in range(len(full)) if plain and full[i:i + len(plain)] == plain), 0)
        return [i for i in full[:count] if i in self.strings]

    def _working_anchors(self) -> list[tuple[str, list[int]]]:
        spelled = [(anchor, self._ids(anchor)) for anchor in _ANCHORS]
        return [(anchor, ids) for anchor, ids in spelled if self.spelling(ids) == f" {anchor}".encode()]


@lru_cache(maxsize=16)
def _token_text(tokenizer: Any, vocab_size: int, _tokens: int) -> TokenText:
    return TokenText(tokenizer, vocab_size)


def token_text(tokenizer: Any, vocab_size: int) -> TokenText:
    """TokenText, kept for the next call: reading 150,000 tokens takes longer than drafting a sentence."""
    return _token_text(tokenizer, vocab_size, len(tokenizer))


def special_token_map(source: TokenText, target: TokenText) -> dict[int, int]:
    """Special tokens that mean the same: those of equal string, begin to begin of text, end to end (which wins)."""
    by_string = {string: i for i, string in target.special.items()}
    same = {i: by_string[string] for i, string in source.special.items() if string in by_string}
    for a, b in ((source.bos, target.bos), (source.eos, target.eos)):
        if a is not None and b is not None:
            same[a] = b
    return same


class CommonVocabulary:
    """The tokens two vocabularies share: those that add the same bytes to a text, and the end of text.

    Leading-space markers, byte-level alphabets and byte tokens are compared by the bytes they stand for ("universal
    speculative decoding", Timor et al. 2025, section on the token-level intersection).

    to_inner:      int64 [vocab_size], the inner token of each of the checker's tokens, -1 where there is none.
    to_outer:      int64 [inner_vocab_size], the reverse, -1 where the token may not be drafted. One to one: of several
                   tokens of equal bytes only the lowest id that is no byte token is used, so a distribution over inner
                   tokens moves to the checker's without two probabilities meeting.
    inner_allowed: bool [inner_vocab_size], to_outer >= 0.

    Raises ValueError where nothing is shared.
    """

    def __init__(self, tokenizer: Any, inner_tokenizer: Any, vocab_size: int, inner_vocab_size: int) -> None:
        self.outer_text = token_text(tokenizer, vocab_size)
        self.inner_text = token_text(inner_tokenizer, inner_vocab_size)
        outer, inner = _by_piece(self.outer_text), _by_piece(self.inner_text)
        pairs = {outer[piece]: token for piece, token in inner.items() if piece in outer}
        if not pairs:
            raise ValueError(f"the tokenizers of {vocab_size} and {inner_vocab_size} tokens share none: draft by text "
                             "(by_text=True) instead of by common vocabulary")
        if self.outer_text.eos is not None and self.inner_text.eos is not None:
            pairs[self.outer_text.eos] = self.inner_text.eos
        self.to_inner = torch.full((vocab_size,), -1, dtype=torch.long)
        self.to_outer = torch.full((inner_vocab_size,), -1, dtype=torch.long)
        ours, theirs = torch.tensor(list(pairs)), torch.tensor(list(pairs.values()))
        self.to_inner[ours], self.to_outer[theirs] = theirs, ours
        self.inner_allowed: Tensor = self.to_outer >= 0

    def __len__(self) -> int:
        return int(self.inner_allowed.sum())


def _by_piece(text: TokenText) -> dict[bytes, int]:
    """Bytes -> token; byte tokens last, they spell what ordinary tokens of one byte spell too."""
    order = sorted(text.strings, key=lambda i: (_BYTE_TOKEN.fullmatch(text.strings[i]) is not None, i))
    found: dict[bytes, int] = {}
    for token in order:
        piece = text.piece(token)
        if piece:
            found.setdefault(piece, token)
    return found


@lru_cache(maxsize=8)
def _common_vocabulary(outer: TokenText, inner: TokenText) -> CommonVocabulary:
    return CommonVocabulary(outer.tokenizer, inner.tokenizer, outer.vocab_size, inner.vocab_size)


def common_vocabulary(tokenizer: Any, inner_tokenizer: Any, vocab_size: int,
                      inner_vocab_size: int) -> CommonVocabulary:
    """CommonVocabulary, kept for the next call."""
    return _common_vocabulary(token_text(tokenizer, vocab_size), token_text(inner_tokenizer, inner_vocab_size))
