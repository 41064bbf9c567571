"""Does a draft window hide exactly the tokens between the first and the last ones of a row?"""

from __future__ import annotations

import pytest
import torch
from models import ARCHITECTURES, VOCAB, tiny

from hf_mlspec.engines.choose import engine_of
from hf_mlspec.engines.engine import Engine
from hf_mlspec.ops.attention_plain import FIRST_SLOTS
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
LENGTH, WINDOW = 210, 50
CPU = torch.device("cpu")


def engine(kind: str = "llama", window: int = WINDOW, **options) -> Engine:
    made = engine_of(tiny(kind, dtype=torch.float32, **options), name="cpu")
    made.draft_window = window
    made.start(1, CPU)
    return made


def row(seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


def last_logits(made: Engine, ids: list[int]) -> torch.Tensor:
    made.lengths = [0]
    return made.score([ids], [[]], want_logits=True).logits[-1]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma3", "phi3"])
def test_one_layer_sees_the_first_and_the_last_tokens_and_no_others(kind):
    """With one layer what a token says depends on the tokens it sees alone."""
    full = ["full_attention"] if "layer_types" in ARCHITECTURES[kind][1] else None
    made = engine(kind, num_hidden_layers=1, **({"layer_types": full} if full else {}))
    ids = row()
    before = last_logits(made, ids)
    seen = {*range(FIRST_SLOTS), *range(LENGTH - WINDOW, LENGTH)}
    for place in (0, FIRST_SLOTS - 1, FIRST_SLOTS, 100, LENGTH - WINDOW - 1, LENGTH - WINDOW, LENGTH - 1):
        other = [*ids[:place], (ids[place] + 1) % VOCAB, *ids[place + 1 :]]
        assert torch.equal(last_logits(made, other), before) == (place not in seen), place


@pytest.mark.parametrize(("kind", "own"), [("mistral", {"sliding_window": None}), ("gemma2", {})])
def test_a_window_longer_than_the_row_hides_nothing(kind, own):
    ids = row()
    shown = last_logits(engine(kind, LENGTH - FIRST_SLOTS, **own), ids)
    assert torch.equal(shown, last_logits(engine(kind, 0, **own), ids))
    assert not torch.equal(last_logits(engine(kind, LENGTH - FIRST_SLOTS - 1, sliding_window=LENGTH), ids),
                           last_logits(engine(kind, 0, sliding_window=LENGTH), ids))  # fmt: skip


def test_a_layer_with_a_window_of_its_own_sees_no_more():
    """A sliding window of 7 tokens is all there is, first tokens or not."""
    ids = row()
    for window in (7, WINDOW):
        assert torch.equal(last_logits(engine("mistral", window), ids), last_logits(engine("mistral", 0), ids))
    assert not torch.equal(last_logits(engine("mistral", 6), ids), last_logits(engine("mistral", 0), ids))


@pytest.mark.parametrize("widths", [[1] * LENGTH, [64, 64, 64, 18], [9] * 23 + [3]])
def test_the_bits_of_a_token_do_not_depend_on_the_tokens_of_a_call(widths):
    ids, made = row(), engine()
    whole = made.score([ids[:1]], [ids[1:]], want_logits=True).logits
    made.start(1, CPU)
    parts, done = [], 0
    for width in widths:
        step = ids[done : done + width]
        parts.append(made.score([ids[: done + 1]], [step[1:]], want_logits=True).logits)
        done += width
    assert torch.equal(torch.cat(parts), whole)


def test_drafts_and_their_checks_have_the_windows_of_their_levels():
    """Rounds of two levels are the same whether they run in one call or step by step."""
    middle, small = engine(seed=1), engine(seed=2, window=20)
    ids = row()
    options = {"num_draft_tokens": 3, "tiny_threshold": 0.0, "threshold": 0.0}
    drafted, checks, _, _ = middle.draft_checked(small, [ids], [12], **options)
    assert sum(checks[0::2]) > 0
    alone = engine(seed=1)
    assert drafted == alone.draft([ids], [12], 0.0)
    assert drafted != engine(seed=1, window=0).draft([ids], [12], 0.0)
    again = engine(seed=2, window=20)
    assert small.draft([ids], [5], 0.0) == again.draft([ids], [5], 0.0)


def test_a_negative_window_is_refused():
    made = engine(window=-1)
    with pytest.raises(ValueError, match="draft_window is -1"):
        made.score([row()], [[]])


def test_engines_that_have_no_window_say_so():
    model = tiny(dtype=torch.float32)
    can = {name: engine_of(model, name=name).can.draft_window for name in ("cpu", "cuda", "modules")}
    assert can == {"cpu": True, "cuda": True, "modules": False}
