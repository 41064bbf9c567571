"""Which mutants keep the books of a captured round wrongly?"""

from __future__ import annotations

from ..mutant import Mutant

ROUND = "hf_mlspec/ops/round.py"

MUTANTS = [
    Mutant(
        "a captured draft leaves no room for its check", ROUND,
        "torch.minimum(base + count, ends - 1)",
        "torch.minimum(base + count, ends)",
        ("speculation/test_acceptance.py::test_the_ops_of_a_captured_round",),
    ),
    Mutant(
        "a window begins one token late", ROUND,
        "starts = (base - lead).clamp(min=0)",
        "starts = (base - lead + 1).clamp(min=0)",
        ("ops/test_round_ops.py::test_books_are_those_of_plain_python",),
    ),
    Mutant(
        "logits of the token behind are picked", ROUND,
        "column = (base - 1 - starts).clamp",
        "column = (base - starts).clamp",
        ("ops/test_round_ops.py::test_books_are_those_of_plain_python",),
    ),
    Mutant(
        "positions of a window are one late", ROUND,
        "(base[:, None] + asked).flatten()",
        "(base[:, None] + asked + 1).flatten()",
        ("ops/test_round_ops.py::test_books_are_those_of_plain_python",),
    ),
    Mutant(
        "a captured draft goes on at its end", ROUND,
        "~(confidence < threshold) & (lengths < ends))",
        "~(confidence < threshold) & (lengths <= ends))",
        ("speculation/test_acceptance.py::test_the_ops_of_a_captured_round",),
    ),
    Mutant(
        "a captured draft goes on where it is unsure", ROUND,
        "(chosen >= 0) & ~(confidence < threshold) &",
        "(chosen >= 0) &",
        ("speculation/test_acceptance.py::test_the_ops_of_a_captured_round",),
    ),
    Mutant(
        "a captured check keeps a token behind the draft", ROUND,
        "(column < drafted[:, None])).int()",
        "(column <= drafted[:, None])).int()",
        ("speculation/test_acceptance.py::test_the_ops_of_a_captured_round",),
    ),
    Mutant(
        "a captured check counts tokens of rows at rest", ROUND,
        "base += (accepted + 1) * on",
        "base += accepted + 1",
        ("speculation/test_acceptance.py::test_the_ops_of_a_captured_round",),
    ),
    Mutant(
        "a captured check forgets its correction", ROUND,
        "counted = column <= accepted[:, None]",
        "counted = column < accepted[:, None]",
        ("speculation/test_acceptance.py::test_the_ops_of_a_captured_round",),
    ),
    Mutant(
        "a captured row goes on at its end", ROUND,
        "~unsure & (base < ends))",
        "~unsure & (base <= ends))",
        ("speculation/test_acceptance.py::test_the_ops_of_a_captured_round",),
    ),
    Mutant(
        "a captured correction is written one place late", ROUND,
        "_write(tokens, base + accepted, mine, on)",
        "_write(tokens, base + accepted + 1, mine, on)",
        ("speculation/test_acceptance.py::test_the_ops_of_a_captured_round",),
    ),
    Mutant(
        "a captured row at rest fails", ROUND,
        "failed.masked_fill_(on & (mine < 0), level)",
        "failed.masked_fill_(mine < 0, level)",
        ("speculation/test_acceptance.py::test_the_ops_of_a_captured_round",),
    ),
    Mutant(
        "a captured lookup copies from beyond the row", ROUND,
        "torch.minimum(ends.clamp(max=slots) - lengths, lengths - from_)",
        "(ends.clamp(max=slots) - lengths)",
        ("ops/test_round_ops.py::test_books_are_those_of_plain_python",),
    ),
    Mutant(
        "a captured lookup takes shorter matches", ROUND,
        "masked_fill(matched < min_ngram, -1)",
        "masked_fill(matched < 1, -1)",
        ("ops/test_round_ops.py::test_books_are_those_of_plain_python",),
    ),
    Mutant(
        "a script goes on with its last round", ROUND,
        ".masked_fill((cursor > last)[:, None], 0)",
        "",
        ("ops/test_round_ops.py::test_books_are_those_of_plain_python",),
    ),
]  # fmt: skip
