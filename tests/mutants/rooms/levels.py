"""Which mutants draft beyond their limits, or know what was rejected?"""

from __future__ import annotations

from ..mutant import Mutant

CHECKED = "hf_mlspec/speculation/drafters/checked.py"
MODEL = "hf_mlspec/speculation/drafters/model.py"

MUTANTS = [
    Mutant(
        "a level leaves no room for its check", CHECKED,
        "left = [limit - len(done) - 1 if a",
        "left = [limit - len(done) if a",
        ("speculation/test_chain.py", "speculation/test_decode.py",),
    ),
    Mutant(
        "a level drafts beyond its limit", CHECKED,
        "a and ok and len(done) < limit\n",
        "a and ok and len(done) <= limit\n",
        ("speculation/test_chain.py", "speculation/test_decode.py",),
    ),
    Mutant(
        "inner levels are not told what was rejected", CHECKED,
        "        roll_back(self.checker.runner, lengths)\n"
        "        self.inner.rollback(lengths)",
        "        roll_back(self.checker.runner, lengths)",
        ("speculation/test_chain.py", "speculation/test_decode.py",),
    ),
    Mutant(
        "a checked level keeps what was rejected", CHECKED,
        "        roll_back(self.checker.runner, lengths)\n"
        "        self.inner.rollback(lengths)",
        "        self.inner.rollback(lengths)",
        ("speculation/test_chain.py", "speculation/test_decode.py",),
    ),
    Mutant(
        "after a round the inner level keeps one token too many", CHECKED,
        "self.inner.rollback([len(row) + a for",
        "self.inner.rollback([len(row) + a + 1 for",
        ("speculation/test_chain.py", "speculation/test_decode.py",),
    ),
    Mutant(
        "inner levels are not told who left", CHECKED,
        "        self.checker.select(keep)\n"
        "        self.inner.select(keep)",
        "        self.checker.select(keep)",
        ("speculation/test_chain.py", "speculation/test_decode.py",),
    ),
    Mutant(
        "inner levels are not told who came", CHECKED,
        "        self.checker.admit(count)\n"
        "        self.inner.admit(count)",
        "        self.checker.admit(count)",
        (
            "speculation/test_chain.py",
            "speculation/test_decode.py",
            "speculation/test_continuous.py",
        ),
    ),
    Mutant(
        "inner levels are not told who was replaced", CHECKED,
        "        self.checker.replace(row)\n"
        "        self.inner.replace(row)",
        "        self.checker.replace(row)",
        (
            "speculation/test_chain.py",
            "speculation/test_decode.py",
            "speculation/test_continuous.py",
        ),
    ),
    Mutant(
        "checks inside an engine end rows one late", CHECKED,
        "left = [count - a - 1 if on else 0 for count, a, on in zip(left, accepted, alive, strict=True)]",
        "left = [count - a if on else 0 for count, a, on in zip(left, accepted, alive, strict=True)]",
        ("speculation/test_chain.py", "speculation/test_decode.py",),
    ),
    Mutant(
        "a level drafts beyond its positions", CHECKED,
        "fits = [len(row) + limit <= self.max_positions",
        "fits = [len(row) <= self.max_positions",
        ("speculation/test_chain.py", "speculation/test_decode.py",),
    ),
    Mutant(
        "tokens are put into the rows of the call", CHECKED,
        "seen = [list(row) for row in rows]",
        "seen = rows",
        ("speculation/test_chain.py", "speculation/test_decode.py",),
    ),
    Mutant(
        "a row at rest gains tokens", CHECKED,
        "                if alive[r]:\n"
        "                    settled[r] += tokens\n"
        "                    seen[r] += tokens",
        "                settled[r] += tokens\n"
        "                seen[r] += tokens",
        ("speculation/test_chain.py", "speculation/test_decode.py",),
    ),
    Mutant(
        "a model drafts one token too many", MODEL,
        "a and ok and n < limit for a, ok, n",
        "a and ok and n <= limit for a, ok, n",
        ("speculation/test_model_drafter.py", "speculation/test_chain.py",),
    ),
    Mutant(
        "a roll-back forgets what lies outside the window", MODEL,
        "[max(n - d, 0) for n, d in",
        "[n for n, d in",
        ("speculation/test_model_drafter.py", "speculation/test_chain.py",),
    ),
    Mutant(
        "a new window keeps the old one's slots", MODEL,
        "                self.runner.lengths[r] = 0\n",
        "",
        ("speculation/test_model_drafter.py", "speculation/test_chain.py",),
    ),
    Mutant(
        "a row that replaces another keeps its window", MODEL,
        "        self.dropped[row] = 0\n",
        "",
        (
            "speculation/test_model_drafter.py",
            "speculation/test_chain.py",
            "speculation/test_continuous.py",
        ),
    ),
    Mutant(
        "all drafted tokens have the first one's noise", MODEL,
        "[len(row) + step for row in rows]",
        "[len(row) for row in rows]",
        ("speculation/test_model_drafter.py", "speculation/test_chain.py",),
    ),
    Mutant(
        "a model keeps what was rejected", MODEL,
        "roll_back(self.runner, [max(n - d, 0)",
        "roll_back(self.runner, [1 << 30 or max(n - d, 0)",
        ("speculation/test_model_drafter.py", "speculation/test_chain.py",),
    ),
]  # fmt: skip
