"""Which mutants draft from tokens that are no longer in the row?"""

from __future__ import annotations

from ..mutant import Mutant

AGREEMENT = "hf_mlspec/speculation/drafters/agreement.py"
PROMPT_LOOKUP = "hf_mlspec/speculation/drafters/prompt_lookup.py"
NGRAM = "hf_mlspec/speculation/drafters/ngram.py"
CROSS_TOKENIZER = "hf_mlspec/speculation/drafters/cross_tokenizer.py"
ROW_TRANSLATION = "hf_mlspec/speculation/drafters/row_translation.py"

MUTANTS = [
    Mutant(
        "only the last token is compared", AGREEMENT,
        "LOOK_BACK = 32",
        "LOOK_BACK = 1",
        ("speculation/test_prompt_lookup.py", "speculation/test_ngram.py",),
    ),
    Mutant(
        "rows of one length have everything in common", AGREEMENT,
        "    if left[:shorter] == right[:shorter]:\n"
        "        return shorter",
        "    if len(left) >= shorter:\n"
        "        return shorter",
        (
            "speculation/test_prompt_lookup.py",
            "speculation/test_ngram.py",
            "speculation/test_captured_rounds.py",
        ),
    ),
    Mutant(
        "one forgotten token stays", PROMPT_LOOKUP,
        "while len(self.tokens) > length:",
        "while len(self.tokens) > length + 1:",
        ("speculation/test_prompt_lookup.py", "speculation/test_ngram.py",),
    ),
    Mutant(
        "forgotten places are not put back", PROMPT_LOOKUP,
        "                if position:\n"
        "                    self.last[gram] = position\n",
        "                if position:\n"
        "                    pass\n",
        ("speculation/test_prompt_lookup.py", "speculation/test_ngram.py",),
    ),
    Mutant(
        "a copy begins one token late", PROMPT_LOOKUP,
        "self.tokens[position:position + limit]",
        "self.tokens[position + 1:position + limit]",
        ("speculation/test_prompt_lookup.py", "speculation/test_ngram.py",),
    ),
    Mutant(
        "a lookup hands up more than it may", PROMPT_LOOKUP,
        "self.tokens[position:position + limit]",
        "self.tokens[position:position + limit + 1]",
        ("speculation/test_prompt_lookup.py", "speculation/test_ngram.py",),
    ),
    Mutant(
        "rows of a lookup are swapped", PROMPT_LOOKUP,
        "[self._indices[r] for r in keep]",
        "[self._indices[r] for r in sorted(keep)]",
        ("speculation/test_prompt_lookup.py", "speculation/test_ngram.py",),
    ),
    Mutant(
        "rejected tokens stay counted", NGRAM,
        "self.table.remove(context, known[-1])",
        "pass",
        ("speculation/test_prompt_lookup.py", "speculation/test_ngram.py",),
    ),
    Mutant(
        "an n-gram drafts below its threshold", NGRAM,
        "found[1] < self.threshold",
        "found[1] < 0",
        ("speculation/test_prompt_lookup.py", "speculation/test_ngram.py",),
    ),
    Mutant(
        "what the inner level holds is not cut", CROSS_TOKENIZER,
        "                del held[length:]",
        "                pass",
        ("speculation/test_cross_tokenizer.py",),
    ),
    Mutant(
        "more tokens are handed up than were asked for", ROW_TRANSLATION,
        "return tokens[:limit]",
        "return tokens",
        ("speculation/test_cross_tokenizer.py",),
    ),
    Mutant(
        "an incomplete character is handed up", ROW_TRANSLATION,
        "return said[:whole], special",
        "return said, special",
        ("speculation/test_cross_tokenizer.py",),
    ),
]  # fmt: skip
