"""Do two levels speak the same vocabulary, and the target that of its tokenizer?"""

from __future__ import annotations

import warnings
from collections.abc import Sized
from functools import lru_cache

# Models of one family round their vocabulary up differently (Qwen2.5: 151936 and 152064 rows for 151665 tokens).
_MOST_PADDING_ROWS = 1024
_MOST_PADDING_SHARE = 0.02


def require_target_tokenizer(tokenizer, size: int) -> None:
    """ValueError for a tokenizer that cannot be the target's; one warning for one that hardly is.

    size: rows of the target's embedding. A tokenizer with more tokens than rows gives ids that the target cannot
    embed: it is refused. Fewer are the rule, since rows are rounded up, to a multiple of 64 or far beyond; less than
    half of the rows is no rounding, so it is said once, and goes on, for every id can be computed with. None, and what
    has no length, is unknown and passes. Tokenizers of levels are not judged: what a level drafts is checked, and ids
    beyond its rows are read as padding.
    """
    if not isinstance(tokenizer, Sized):
        return
    tokens = len(tokenizer)
    if tokens > size:
        raise ValueError(
            f"the tokenizer has {tokens} tokens and the target's embedding {size} rows, so that ids from {size} on "
            "cannot be embedded: pass the target's own tokenizer, or resize its embedding (resize_token_embeddings)"
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
        return tokenizer is checker_tokenizer or _equal(tokenizer, checker_tokenizer, *sizes)
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
def _equal(tokenizer, other, _tokens: int, _others: int) -> bool:
    """Kept for the next call: reading 150,000 tokens twice takes longer than drafting a sentence."""
    return tokenizer.get_vocab() == other.get_vocab()


def padding_apart(size: int, other: int) -> bool:
    """Whether two vocabulary sizes can belong to one tokenizer, rounded up differently."""
    gap = abs(size - other)
    return gap <= min(_MOST_PADDING_ROWS, _MOST_PADDING_SHARE * max(size, other))
