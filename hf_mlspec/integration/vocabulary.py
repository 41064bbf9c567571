"""Do two levels speak the same vocabulary?"""

from __future__ import annotations

from functools import lru_cache

# Models of one family round their vocabulary up differently (Qwen2.5: 151936 and 152064 rows for 151665 tokens).
_MOST_PADDING_ROWS = 1024
_MOST_PADDING_SHARE = 0.02


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
