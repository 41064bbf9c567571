"""Which mutants of the compiled kernels are there? In tails, corrections, rows and slots; each built into one object.

A header is compiled into many: the object named is the one that this repository's tests use on a CPU with AVX-512.
"""

from __future__ import annotations

from typing import NamedTuple

from .mutant import Mutant

_CPU = "kernels_ext/cpu"
ROUNDS = f"{_CPU}/decoder/decoder_rounds.cpp"
DECODER = f"{_CPU}/decoder/decoder.cpp"
ATTENTION = f"{_CPU}/decoder/decoder_attention.cpp"
LINEARS = f"{_CPU}/decoder/decoder_linears.cpp"
TAP = f"{_CPU}/decoder/decoder_tap.cpp"
ROWS = f"{_CPU}/rows/row_ops_loops.h"
ROWS_OBJECT = f"{_CPU}/rows/row_ops_avx512vnni.cpp"

_SAME_ROUNDS = tuple(
    f"engines/test_cpu_engine.py::test_compiled_rounds_are_the_plain_ones[{which}]"
    for which in ("cast over small-0.0", "small over float32-0.5", "one model-0.0")
)
_GROUPING = ("engines/test_cpu_decoder.py::test_bits_do_not_depend_on_the_grouping[llama-torch.float32]",)
_NEAR = ("engines/test_cpu_decoder.py::test_within_twice_the_error_of_the_modules[llama-torch.float32]",)
_CODES = "engines/test_coded_cache.py::test_the_first_layer_holds_the_codes_of_what_a_plain_cache_holds"


class KernelMutant(NamedTuple):
    """mutant: of a C++ file. source: what is compiled anew; the file itself, or one that includes it."""

    mutant: Mutant
    source: str


def _mutant(
    name: str, file: str, old: str, new: str, tests: tuple[str, ...], source: str | None = None
) -> KernelMutant:  # fmt: skip
    return KernelMutant(Mutant(name, file, old, new, tests), source or file)


MUTANTS = [
    _mutant(
        "a compiled check keeps one guess too few", ROUNDS,
        "while (accepted < drafted && guesses", "while (accepted + 1 < drafted && guesses", _SAME_ROUNDS,
    ),
    _mutant(
        "a compiled check keeps a wrong guess", ROUNDS,
        "&& guesses[r][accepted] == best[accepted] && best", "&& best", _SAME_ROUNDS,
    ),
    _mutant(
        "a compiled check drops its correction", ROUNDS,
        "for (int64_t j = 0; j <= accepted; ++j) {", "for (int64_t j = 0; j < std::max<int64_t>(accepted, 1); ++j) {",
        _SAME_ROUNDS,
    ),
    _mutant(
        "a draft is one token too long", ROUNDS,
        "static_cast<int64_t>(drafted[r].size()) < limits[r];",
        "static_cast<int64_t>(drafted[r].size()) <= limits[r];",
        _SAME_ROUNDS,
    ),
    _mutant(
        "every row drafts the first row's token", ROUNDS,
        "const int64_t token = scored.best[scored.offsets[r]];", "const int64_t token = scored.best[0];", _SAME_ROUNDS,
    ),
    _mutant(
        "a block holds one token too many", ROUNDS,
        "last->count < kAttentionTokens &&", "last->count <= kAttentionTokens &&",
        ("engines/test_cpu_decoder.py::test_prompts_longer_than_one_pass", *_GROUPING),
    ),
    _mutant(
        "confidence is asked of the token before", ROUNDS,
        "scored.confidence[scored.offsets[r] + j] >= options", "scored.confidence[scored.offsets[r]] >= options",
        _SAME_ROUNDS,
    ),
    _mutant(
        "logits beyond the first piece are those of the first", DECODER,
        "pass.kept[first + i] * shape.hidden", "pass.kept[i] * shape.hidden",
        ("engines/test_cpu_decoder.py::test_prompts_longer_than_one_pass", *_GROUPING),
    ),
    _mutant(
        "the last piece of logits lacks a row", DECODER,
        "std::min(kScoredTogether, kept - first), logits);",
        "std::min(kScoredTogether, kept - first - (first > 0)), logits);",
        ("engines/test_cpu_decoder.py::test_prompts_longer_than_one_pass", *_GROUPING),
    ),
    _mutant(
        "keys lie one slot early", ATTENTION,
        "head) + pass.slots[token] * pass.kv.row_bytes);",
        "head) + (pass.slots[token] - (pass.slots[token] > 0)) * pass.kv.row_bytes);",
        _NEAR,
    ),
    _mutant(
        "every row reads the keys of the first", ATTENTION,
        "{lane(pass.kv, layer, 0, block.row, head),", "{lane(pass.kv, layer, 0, 0, head),", _GROUPING,
    ),
    _mutant(
        "a token sees a slot behind its own", ATTENTION,
        "block.count, group, block.start, lane", "block.count, group, block.start + 1, lane",
        _NEAR,
    ),
    _mutant(
        "the last tile of a part is left out", LINEARS,
        "const int64_t tiles = (part.out_features + kTileOutputs - 1) / kTileOutputs;\n    first[i + 1]",
        "const int64_t tiles = std::max<int64_t>(part.out_features / kTileOutputs, 1);\n    first[i + 1]",
        _NEAR,
    ),
    _mutant(
        "the tap writes every row's states to the first", TAP,
        "((pass.rows[n] * tap.slots + pass.slots[n])", "((0 * tap.slots + pass.slots[n])",
        ("engines/test_tap.py::test_the_tap_holds_what_every_layer_reads[llama-cpu]",),
    ),
    _mutant(
        "the largest logit is not looked for in the tail's last place", ROWS,
        "for (; i < n; ++i) visit(Vec::all(x[i]), most[0]);",
        "for (; i + 1 < n; ++i) visit(Vec::all(x[i]), most[0]);",
        ("ops/test_step_ops.py::test_the_largest_logit_is_found_in_every_place",), ROWS_OBJECT,
    ),
    _mutant(
        "the sum of a softmax lacks the tail's last place", ROWS,
        "select(Vec::lanes_between(0, lanes), v,", "select(Vec::lanes_between(0, lanes - 1), v,",
        ("ops/test_step_ops.py::test_choose_rows_greedily",), ROWS_OBJECT,
    ),
    _mutant(
        "the last element of a bfloat16 row is not written", ROWS,
        "std::memcpy(y + i, padded, 2 * (n - i));", "std::memcpy(y + i, padded, 2 * (n - i - 1));",
        ("ops/test_rows.py::test_against_the_reference",), ROWS_OBJECT,
    ),
    _mutant(
        "the last code of an int8 row is not written", ROWS,
        "std::memcpy(codes + i, padded, n - i);", "std::memcpy(codes + i, padded, n - i - 1);",
        (_CODES,), ROWS_OBJECT,
    ),
    _mutant(
        "codes of a nibble's neighbours are swapped", ROWS,
        "codes[2 * j] | codes[2 * j + 1] << 4", "codes[2 * j + 1] | codes[2 * j] << 4",
        (_CODES,), ROWS_OBJECT,
    ),
    _mutant(
        "the last pair of a head is not rotated", ROWS,
        "const int64_t half = rotary_dim / 2;\n  for_each_vec(half,",
        "const int64_t half = rotary_dim / 2;\n  for_each_vec(half - 1,",
        ("ops/test_rows.py::test_against_the_reference", *_NEAR), ROWS_OBJECT,
    ),
]  # fmt: skip
