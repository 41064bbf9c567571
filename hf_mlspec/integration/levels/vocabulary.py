"""Do token ids mean the same to a level and to the one that checks it, and is a tokenizer the target's?"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sized
from functools import lru_cache

# Models of one family round their vocabulary up differently (Qwen2.5: 151936 and 152064 rows for 151665 tokens).
_MOST_PADDING_ROWS = 1024
_MOST_PADDING_SHARE = 0.02


def require_target_tokenizer(tokenizer, size: int) -> None:
    """Raise ValueError for a tokenizer that cannot be the target's; warn about one that probably is not.

    size: rows of the target's embedding. A tokenizer with more tokens than rows has ids that cannot be embedded: an
    error, unless they are added tokens (transformers adds some to whole families of tokenizers): then a prompt that
    holds one is refused. Fewer tokens are normal, since rows are rounded up to a multiple of 64 or more; fewer than
    half of the rows give a warning. A tokenizer that is None or has no length passes. Tokenizers of levels are not
    tested: drafts are checked, and ids beyond a level's rows are read as padding. Without levels the target's
    tokenizer only serves stop strings, as in stock generate, and is not tested either.
    """
    if not isinstance(tokenizer, Sized):
        return
    tokens = len(tokenizer)
    if tokens > size and not all(index in _added(tokenizer) for index in range(size, tokens)):
        extra = getattr(tokenizer, "convert_ids_to_tokens", lambda ids: [])(list(range(size, min(tokens, size + 3))))
        such_as = f" ({', '.join(map(repr, extra))})" if extra else ""
        raise ValueError(
            f"the tokenizer has {tokens} tokens and the target's embedding {size} rows, so that ids from {size} on"
            f"{such_as} cannot be embedded: pass the target's own tokenizer, or make room for them with "
            f"model.resize_token_embeddings({tokens}) and save the model again"
        )
    if 2 * tokens < size:
        warnings.warn(
            f"the tokenizer has {tokens} tokens and the target's embedding {size} rows, more than twice as many: it "
            "may be another model's; pass the target's own tokenizer",
            stacklevel=2,
        )


def same_vocabulary(name: str, size: int, tokenizer, checker_size: int, checker_tokenizer) -> bool:
    """Whether ids mean the same to a level and to the level that checks it.

    size, checker_size: rows of the embeddings. tokenizer, checker_tokenizer: their tokenizers, None where unknown; if
        both are known they decide, else the sizes do, as in transformers: equal, or apart by padding rows only.

    Raises ValueError if the vocabularies differ and a tokenizer is missing.
    """
    if tokenizer is not None and checker_tokenizer is not None:
        sizes = len(tokenizer), len(checker_tokenizer)
        return tokenizer is checker_tokenizer or _equal(tokenizer, checker_tokenizer, *sizes, size, checker_size)
    if padding_apart(size, checker_size):
        return True
    missing = []
    if checker_tokenizer is None:
        missing.append("tokenizer=<the target's tokenizer>")
    if tokenizer is None:
        missing.append(f"the tokenizer of {name} in assistant_tokenizers=[...]")
    raise ValueError(
        f"level {name} has a vocabulary of {size} tokens, the level that checks it {checker_size}: to translate "
        f"between them generate needs {' and '.join(missing)}"
    )


@lru_cache(maxsize=16)
def _equal(tokenizer, other, _tokens: int, _others: int, size: int, other_size: int) -> bool:
    """Kept for the next call: reading 150,000 tokens twice takes longer than drafting a sentence."""
    return _embedded(tokenizer, size) == _embedded(other, other_size)


def _embedded(tokenizer, size: int) -> dict[str, int]:
    """The vocabulary without added tokens for which a model of so many rows has none."""
    vocabulary = tokenizer.get_vocab()
    if len(vocabulary) <= size:
        return vocabulary
    added = _added(tokenizer)
    return {token: index for token, index in vocabulary.items() if index < size or index not in added}


def _added(tokenizer) -> Mapping[int, object]:
    return getattr(tokenizer, "added_tokens_decoder", {})


def padding_apart(size: int, other: int) -> bool:
    """Whether two vocabulary sizes can belong to one tokenizer, rounded up differently."""
    gap = abs(size - other)
    return gap <= min(_MOST_PADDING_ROWS, _MOST_PADDING_SHARE * max(size, other))
