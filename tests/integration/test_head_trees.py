"""Do nodes of a head's tree have the bits of rows, does it read what a check leaves, and does it change no token?"""

from __future__ import annotations

import pytest
import torch
from heads import tensors_of, write_head
from models import EOS, alone, prompts, tiny, together

import hf_mlspec
from hf_mlspec import generate_stream
from hf_mlspec.engines.choose import engine_of
from hf_mlspec.engines.engine import Guess
from hf_mlspec.engines.head import HeadEngine
from hf_mlspec.engines.modules.attention import ragged_attention_on
from hf_mlspec.engines.tap import Tap
from hf_mlspec.engines.trees import depths, path
from hf_mlspec.formats import cache_format
from hf_mlspec.integration.levels.heads import load_head
from hf_mlspec.integration.levels.trees import require_tree_level
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.chain import Part
from hf_mlspec.speculation.draft import Draft

CPU = torch.device("cpu")
ROWS = [[5, 9, 13, 7, 21, 30, 11, 4], [8, 17, 40], [3, 3, 5, 19, 22]]
TOKENS = [[11, 21, 12, 13, 22, 14, 11, 15], [40, 41], []]
PARENTS = [[-1, -1, 0, 0, 1, 2, 3, 5], [-1, 0], []]
ENGINES = [
    "modules",
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
    ),
]
TARGETS = {"modules": tiny(seed=2, dtype=torch.float32), "cpu": tiny(seed=2, dtype=torch.bfloat16)}


def two_layers(target) -> dict:
    """Tensors of a second layer, which reads the stream alone."""
    found = tensors_of(target, width=32, draft_vocab=64, taps=3, seed=5)
    second = {name.replace("layers.0", "layers.1"): one for name, one in found.items() if name.startswith("layers.0")}
    del second["layers.1.hidden_norm.weight"]
    return {name: one[:, :32] if one.shape[-1] == 64 and "_proj" in name and "attn" in name else one
            for name, one in second.items()}  # fmt: skip


def drafting(target, folder, name: str, rows: list[list[int]], word: str | None = None) -> tuple:
    """An engine of the target that has read the rows, and one of the head that has, too."""
    head = load_head(target, str(folder), None)
    above = engine_of(target, name=name)
    above.tap = Tap(head.shape.taps, 32, target.dtype)
    made = HeadEngine(head, above.tap)
    if word is not None:
        made.keep_in(cache_format(word, "draft_cache"))
    above.start(len(rows), CPU)
    made.start(len(rows), CPU)
    with running(target, name):
        above.feed(rows)
        made.feed(rows)
    return above, made


class running:
    """Passes of a target, by its modules or compiled."""

    def __init__(self, target, name: str):
        self.parts = torch.inference_mode(), ragged_attention_on([target] if name == "modules" else [])

    def __enter__(self):
        for part in self.parts:
            part.__enter__()

    def __exit__(self, *failed):
        for part in reversed(self.parts):
            part.__exit__(*failed)


def grown(engine: HeadEngine, tokens=TOKENS, parents=PARENTS) -> dict[tuple[int, int], torch.Tensor]:
    """Logits behind every node, read depth by depth."""
    found = {}
    for depth in range(1, 5):
        asked = [[node for node, at in enumerate(depths(own)) if at == depth] for own in parents]
        ends = [max(own, default=-1) + 1 for own in asked]
        so_far = [line[:end] for line, end in zip(tokens, ends, strict=True)]
        logits = engine.grow(so_far, [own[:end] for own, end in zip(parents, ends, strict=True)], asked)
        found |= dict(zip([(r, node) for r, own in enumerate(asked) for node in own], logits, strict=True))
    return found


@pytest.mark.parametrize("case", ["plain", "reduced vocabulary", "two layers", "int8 cache", "int4 cache"])
def test_a_node_has_the_bits_of_a_row_of_its_own(case, tmp_path):
    target, word = TARGETS["modules"], case.split()[0] if "cache" in case else None
    vocabulary, tensors = (24, None) if "reduced" in case else (None, two_layers(target) if "two" in case else None)
    folder = write_head(tmp_path, target, draft_vocab=vocabulary, tensors=tensors)
    if tensors:
        config = (folder / "config.json").read_text()
        (folder / "config.json").write_text(config.replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))
    _, made = drafting(target, folder, "modules", ROWS, word)
    with torch.inference_mode():
        found = grown(made)
        again = grown(made) if made.feed(ROWS) is not None else None
        assert len(found) == 10
        for (r, node), logits in found.items():
            assert torch.equal(logits, again[r, node])
            row = made.feed(ROWS)[r, 0]
            for one in path(PARENTS[r], node):
                counts = [int(r == other) for other in range(3)]
                row = made.step(torch.tensor([[TOKENS[r][one]]] * 3), counts, [0] * 3, 1)[r, 0]
            assert torch.equal(logits, row), (r, node)


@pytest.mark.parametrize("kept", [[0, 2, 5, 7], [1, 4], [0, 3, 6], [0], []])
@pytest.mark.parametrize("name", ENGINES)
def test_hidden_states_of_a_kept_path_are_those_of_the_row(name, kept, tmp_path):
    target = TARGETS[name]
    folder = write_head(tmp_path, target)
    above, made = drafting(target, folder, name, ROWS)
    draft = Draft.trees(TOKENS, PARENTS)
    with running(target, name):
        above.feed([[*row, 60] for row in ROWS], Guess(draft.tokens, draft.lengths, draft.parents))
        above.keep([kept, [0, 1], []])
        rows = [[*ROWS[0], 60, *(TOKENS[0][n] for n in kept)], [*ROWS[1], 60, *TOKENS[1]], [*ROWS[2], 60]]
        above.lengths = [min(have, len(row)) for have, row in zip(above.lengths, rows, strict=True)]
        made.lengths = [min(have, len(row)) for have, row in zip(made.lengths, rows, strict=True)]
        rows = [[*row, 33] for row in rows]
        assert all(made.knows(r, len(row)) for r, row in enumerate(rows))
        found = made.feed(rows)
    states = above.tap.states
    fresh, other = drafting(target, folder, name, rows)
    for r, row in enumerate(rows):
        wanted = fresh.tap.states[r, : len(row) - 1]
        torch.testing.assert_close(states[r, : len(row) - 1], wanted, rtol=0 if name == "cpu" else 1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(found, other.feed(rows), rtol=1e-4, atol=1e-4)


CHAINS = {
    "head": lambda folder: [folder],
    "cast, head": lambda folder: ["mxfp4", folder],
    "head in 4 bits": lambda folder: [f"{folder}@mxfp4"],
}


@pytest.mark.parametrize("tree", [[12, 3], [12, 1, 3]], ids=str)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", ENGINES)
def test_every_token_is_the_targets(name, chain, tree, tmp_path):
    target, inputs = TARGETS[name], prompts([5, 14, 1, 9])
    folder = str(write_head(tmp_path, target, draft_vocab=40))
    until = {"max_new_tokens": 18, "eos_token_id": EOS}
    plain = {"speculation_config": {"engine": name}}
    wanted = together(target, inputs, [], **until, **plain) if name == "cpu" else alone(target, inputs, **until)
    for threshold in (0.0, 0.1):
        how = {"tree": tree, "num_draft_tokens": 4, "confidence_threshold": threshold, "engine": name}
        assert together(target, inputs, CHAINS[chain](folder), speculation_config=how, **until) == wanted
        last = hf_mlspec.last_stats(target).levels[-1]
        assert last.accepted > 0 or threshold
        assert last.drafted > 40


@pytest.mark.parametrize("name", ENGINES)
def test_a_tree_of_a_head_accepts_more_than_its_first_branch(name, tmp_path):
    target, passes = TARGETS[name], []
    folder = str(write_head(tmp_path, target))
    for tree in (None, [16, 3, 1]):
        how = {"tree": tree, "num_draft_tokens": 3, "confidence_threshold": 0.0, "engine": name}
        together(target, prompts([8]), [folder], max_new_tokens=48, speculation_config=how)
        passes.append(hf_mlspec.last_stats(target).target_passes)
    assert passes[1] < passes[0]


@pytest.mark.parametrize("name", ENGINES)
def test_samples_are_those_of_rows(name, tmp_path):
    target, inputs = TARGETS[name], prompts([9, 4])
    folder = str(write_head(tmp_path, target, draft_vocab=40))
    how = {"do_sample": True, "temperature": 0.8, "top_k": 12, "repetition_penalty": 1.3, "max_new_tokens": 16}

    def written(levels: list, **config):
        torch.manual_seed(3)
        config = {"engine": name, **config}
        return target.generate(**inputs, assistant_models=levels, speculation_config=config, **how)

    plain = written([])
    for levels in ([folder], ["mxfp4", folder]):
        assert torch.equal(plain, written(levels, tree=[3, 2], num_draft_tokens=3))


@pytest.mark.parametrize("name", ENGINES)
def test_a_stream_with_trees_of_a_head(name, tmp_path):
    """Rows join and leave; of some prompts the hidden states are not known."""
    target = TARGETS[name]
    folder = str(write_head(tmp_path, target))
    row = prompts([40])["input_ids"][0].tolist()
    asked = [{"input_ids": row[: 9 + 4 * n], "max_new_tokens": 6 + n, "eos_token_id": None, "id": n} for n in range(7)]
    lines = []
    for levels, tree in (([], None), ([folder], [3, 2]), (["mxfp4", folder], [2, 2])):
        config = {"engine": name, "num_draft_tokens": 3 if levels else None, "tree": tree}
        for reading in ({}, {"prefill_chunk": 8, "prefix_cache": "1MiB"}):
            how = {"assistant_models": levels, "speculation_config": config, "max_batch": 3, **reading}
            lines.append({one.id: one.sequence for one in generate_stream(target, asked, **how)})
    assert all(line == lines[0] for line in lines)


def test_a_head_on_another_device_drafts_rows(tmp_path):
    target = TARGETS["modules"]
    head = load_head(target, str(write_head(tmp_path, target)), None)
    assert HeadEngine(head, Tap([0, 1, 2], 32, torch.float32)).can.trees
    made = HeadEngine(head.to("meta"), Tap([0, 1, 2], 32, torch.float32))
    assert made.can.trees is False
    words = "tree is .2., and level HEAD runs on engine 'head', which goes through rows alone: leave tree out"
    with pytest.raises(ValueError, match=words):
        require_tree_level(Part("HEAD", made), [2], engine_of(target, name="modules"), "the target")


