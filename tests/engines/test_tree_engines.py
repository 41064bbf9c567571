"""Does every node of a tree get what a row that ends with it would get, and does the cache keep the right path?"""

from __future__ import annotations

import pytest
import torch
from models import tiny

from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.engine import Guess
from hf_mlspec.engines.modules.attention import ragged_attention_on
from hf_mlspec.engines.modules.engine import ModuleEngine, bare_forward
from hf_mlspec.engines.trees import MOST_NODES, children, depth_first, depths, path, require_tree
from hf_mlspec.formats import cache_format
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.precision import OWN_BITS
from hf_mlspec.speculation.draft import Draft

CPU = torch.device("cpu")
compiled = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
# Of two rows: a tree of two branches that branch again, and a row.
ROWS = [[5, 9, 3, 14, 15, 9, 2, 6], [7, 30, 12]]
TOKENS = [[11, 21, 12, 13, 22, 14, 11, 15], [40, 41]]
PARENTS = [[-1, -1, 0, 0, 1, 2, 3, 5], [-1, 0]]
KINDS = ["llama", "mistral", "gemma2", "gpt2", "phi3", "mixtral"]  # windows, soft caps, learned positions, experts


def guess(tokens: list[list[int]] = TOKENS, parents: list[list[int]] = PARENTS) -> Guess:
    return Draft.trees(tokens, parents).guess()


def kept(engine, r: int, tokens: int) -> list[torch.Tensor]:
    """Keys and values of a row's first tokens in the cache."""
    return [states for pair in engine.cache.row(r, 0, tokens) for states in pair]


def node_rows() -> list[tuple[int, int, list[int]]]:
    """(row, position, the row that ends with it) of every position of the check."""
    return [
        (r, node + 1, [*row, *(TOKENS[r][n] for n in path(PARENTS[r], node))])
        for r, row in enumerate(ROWS)
        for node in range(-1, len(TOKENS[r]))
    ]


def test_a_tree_is_in_an_order_in_which_branches_stay_together():
    parents = PARENTS[0]
    assert depths(parents) == [1, 1, 2, 2, 2, 3, 3, 4]
    assert path(parents, 7) == [0, 2, 5, 7]
    assert children(parents)[-1] == [0, 1]
    order = depth_first(parents)
    assert order == [1, 4, 0, 3, 6, 2, 5, 7]
    assert depth_first([-1, 0, 1]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("parents", "nodes", "words"),
    [([-1, 1], 2, "token 1 of a tree is behind token 1"), ([-1], 2, "2 parents, got 1"), ([-2], 1, "behind token -2"),
     ([-1] * (MOST_NODES + 1), MOST_NODES + 1, "at most 256 are checked together")],
)  # fmt: skip
def test_what_is_no_tree_is_refused(parents, nodes, words):
    with pytest.raises(ValueError, match=words):
        require_tree(parents, nodes)
    with pytest.raises(ValueError, match=words):
        Draft(torch.zeros(1, nodes, dtype=torch.long), [nodes], parents=[parents])


def test_a_draft_knows_whether_it_branches():
    assert not Draft.trees([[1, 2], []], [[-1, 0], []]).branches
    assert Draft.trees([[1, 2]], [[-1, 0]]).guess().parents is None
    draft = Draft.trees([[1, 2, 3], [4]], [[-1, -1, 1], [-1]])
    assert draft.branches
    assert draft.deepest == [2, 1]


@compiled
@pytest.mark.parametrize(
    ("kind", "word"), [*((kind, None) for kind in KINDS), ("mistral", "int8"), ("mistral", "int4")]
)
def test_compiled_nodes_have_the_bits_of_a_row_of_their_own(kind, word):
    model = tiny(kind, dtype=torch.bfloat16)
    decoder = CpuDecoder(model)
    engine, alone = CpuEngine(model, decoder), CpuEngine(model, decoder)
    for one in (engine, alone):
        if word is not None:
            one.keep_in(cache_format(word, "draft_cache"))
        one.start(2, CPU)
    logits = engine.feed(ROWS, guess())
    alone.start(1, CPU)
    for r, position, row in node_rows():
        alone.forget(0)
        assert torch.equal(logits[r, position], alone.feed([row])[0, 0]), (r, position)


@compiled
def test_scores_of_trees_are_in_the_order_of_the_tree():
    model = tiny(dtype=torch.bfloat16)
    engine = CpuEngine(model, CpuDecoder(model))
    engine.start(2, CPU)
    scores = engine.score(ROWS, TOKENS, want_confidence=True, want_logits=True, parents=PARENTS)
    logits = scores.logits.split([len(tokens) + 1 for tokens in TOKENS])
    for best, sure, own in zip(scores.best, scores.confidence, logits, strict=True):
        assert best == own.argmax(-1).tolist()
        torch.testing.assert_close(torch.tensor(sure), own.softmax(-1).amax(-1), rtol=1e-3, atol=1e-6)


def engines(kind: str):
    """Two engines over one model: compiled in bfloat16, or its modules in float64."""
    if kind == "compiled":
        model = tiny(dtype=torch.bfloat16)
        decoder = CpuDecoder(model)
        return CpuEngine(model, decoder), CpuEngine(model, decoder)
    model = tiny(kind)
    return ModuleEngine(model, forward=bare_forward(model)), ModuleEngine(model, forward=bare_forward(model))


@pytest.mark.parametrize("kept_nodes", [[], [0], [0, 2, 5, 7], [0, 3, 6], [1, 4]])
@pytest.mark.parametrize("kind", [pytest.param("compiled", marks=compiled), "llama", "mistral", "gpt2"])
def test_the_cache_keeps_a_path(kind, kept_nodes):
    engine, alone = engines(kind)
    with ragged_attention_on([engine.model] if engine.can.by_module else []):
        for one in (engine, alone):
            one.start(2, CPU)
        engine.feed(ROWS, guess())
        engine.keep([kept_nodes, [0, 1]])
        ends = [len(ROWS[0]) + len(kept_nodes), len(ROWS[1]) + 2]
        engine.lengths = [min(have, end) for have, end in zip(engine.lengths, ends, strict=True)]
        rows = [[*ROWS[0], *(TOKENS[0][n] for n in kept_nodes)], ROWS[1] + TOKENS[1]]
        assert engine.lengths == ends
        alone.feed(rows)
        exact = engine.can.bit_exact
        for r, end in enumerate(ends):
            for found, wanted in zip(kept(engine, r, end), kept(alone, r, end), strict=True):
                torch.testing.assert_close(found, wanted, rtol=0 if exact else 1e-9, atol=0 if exact else 1e-9)
        more = [[*row, 17] for row in rows]
        found, wanted = engine.feed(more), alone.feed(more)
        torch.testing.assert_close(found, wanted, rtol=0 if exact else 1e-9, atol=0 if exact else 1e-9)


@pytest.mark.parametrize("kind", [*KINDS, "qwen3", "gpt_oss"])
def test_nodes_of_modules_see_their_own_branch_at_their_own_positions(kind):
    model = tiny(kind, dtype=torch.float64)
    engine, alone = (ModuleEngine(model, forward=bare_forward(model)) for _ in range(2))
    with ragged_attention_on([model]), torch.no_grad():
        engine.start(2, CPU)
        alone.start(1, CPU)
        logits = engine.feed(ROWS, guess())
        for r, position, row in node_rows():
            alone.forget(0)
            torch.testing.assert_close(logits[r, position], alone.feed([row])[0, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [pytest.param("compiled", marks=compiled), "llama"])
def test_inactive_rows_keep_what_they_have(kind):
    engine, _ = engines(kind)
    with ragged_attention_on([engine.model] if engine.can.by_module else []):
        engine.start(2, CPU)
        engine.feed(ROWS)
        before = kept(engine, 1, 3)
        engine.lengths[1] = 2
        engine.feed(ROWS, guess([TOKENS[0], []], [PARENTS[0], []]), [True, False])
        engine.keep([[1, 4], []])
        assert engine.lengths[1] == 2
        for found, wanted in zip(kept(engine, 1, 2), before, strict=True):
            assert torch.equal(found, wanted[:, :2])


@compiled
def test_a_tree_may_lie_in_two_passes():
    """A prompt that leaves the last pass of 512 tokens a part of the tree."""
    model = tiny(dtype=torch.bfloat16, max_position_embeddings=1024)
    decoder = CpuDecoder(model)
    engine, alone = CpuEngine(model, decoder), CpuEngine(model, decoder)
    engine.start(1, CPU)
    alone.start(1, CPU)
    row = [(7 * i) % 60 for i in range(508)]
    logits = engine.feed([row], guess(TOKENS[:1], PARENTS[:1]))
    for node in range(-1, len(TOKENS[0])):
        own = [*row, *(TOKENS[0][n] for n in path(PARENTS[0], node))]
        alone.lengths[0] = min(alone.lengths[0], len(row) - 1)
        assert torch.equal(logits[0, node + 1], alone.feed([own])[0, 0]), node


@compiled
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([3], [2], [1]), ValueError, "trees come depth first"),
        (([3, 4], [1, 3], [2]), ValueError, "trees come depth first"),
        (([3, -4], [1, 1], [2]), ValueError, "trees come depth first"),
        (([3, 4], [1, 1], [3]), ValueError, "2 are left"),
        (([3, 4], [1, 1], [1]), ValueError, "2 nodes for 1 places"),
        (([3, 4], [1], [2]), ValueError, "2 nodes and 1 depths"),
        (([3] * 300, [1] * 300, [300]), IndexError, "a tree of 300 nodes, 1 deep, behind 2 tokens"),
    ],
)
def test_compiled_code_refuses_what_is_no_tree(arguments, error, words):
    model = tiny(dtype=torch.bfloat16)
    decoder = CpuDecoder(model)
    engine = CpuEngine(model, decoder)
    engine.start(1, CPU)
    with pytest.raises(error, match=words):
        decoder.handle.score_tree(engine.cache.kv, [1, 2], [2], [0], *arguments, False, False, *OWN_BITS, 0)


@compiled
def test_hidden_states_of_a_tree_need_room_for_every_node():
    model = tiny(dtype=torch.bfloat16)
    decoder = CpuDecoder(model)
    engine = CpuEngine(model, decoder)
    engine.start(1, CPU)
    call = engine.cache.kv, [1, 2], [2], [0], [3, 4], [1, 1], [2], False, False, *OWN_BITS, 0, [0]
    with pytest.raises(IndexError, match="row 0 reaches 5 tokens, tap_states has 4 slots"):
        decoder.handle.score_tree_tapped(*call, torch.zeros(1, 4, 1, 32, dtype=torch.bfloat16))
    states = torch.zeros(1, 5, 1, 32, dtype=torch.bfloat16)
    decoder.handle.score_tree_tapped(*call, states)
    rows = model.get_input_embeddings().weight[[1, 2, 3, 4]]
    assert torch.equal(states[0, [0, 1, 3, 4], 0], rows)  # of the nodes behind the branch's own place
