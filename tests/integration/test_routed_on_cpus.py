"""Does the compiled decoder of CPUs choose what modules choose, and read each row's planes with the row's own bits?"""

from __future__ import annotations

import pytest
import torch
from models import tiny
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec.engines.choose import built_decoder
from hf_mlspec.engines.engine import Guess
from hf_mlspec.engines.modules.attention import ragged_attention_on
from hf_mlspec.integration.request import router_of
from hf_mlspec.ops.library import why_not_compiled as why_no_kernels
from hf_mlspec.routing.blocks import blocks_of
from hf_mlspec.routing.cpu_engine import OTHER_BLOCKS, RoutedCpuEngine, why_not_compiled
from hf_mlspec.routing.engine import RoutedEngine
from hf_mlspec.routing.passes import recorded
from hf_mlspec.routing.router import Router

pytestmark = pytest.mark.skipif(why_no_kernels() is not None, reason="no compiled kernels")
CPU = torch.device("cpu")
ROWS = [[3, 5, 9, 7, 2, 30, 41], [11, 4, 4], [50, 51, 8, 9, 13]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """In bit-planes, with a router whose choices differ between prompts."""
    folder = tmp_path_factory.mktemp("routed")
    tiny("llama", dtype=torch.float32, max_position_embeddings=1024).save_pretrained(folder)
    planes = hf_mlspec.MLSpecConfig(format="planes", group_size=32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=planes)
    torch.manual_seed(5)
    router = Router(blocks_of(model))
    with torch.no_grad(), recorded(model, blocks_of(model), [12] * 16) as found:
        model(input_ids=torch.randint(3, 61, (16, 12)), use_cache=False)
    for place, own in enumerate(router.of):
        own.mean.copy_(found[place].mean(0))
        own.spread.copy_(found[place].std(0))
        torch.nn.init.normal_(own.outer.weight)
    return hf_mlspec.route(model, router)


def engine_of(model, batch: int) -> RoutedCpuEngine:
    engine = RoutedCpuEngine(model, built_decoder(model, "cpu"), router_of(model))
    engine.start(batch, CPU)
    return engine


def test_rows_choose_what_modules_choose(model):
    compiled, modules = engine_of(model, 3), RoutedEngine(model, router_of(model))
    modules.start(3, CPU)
    with torch.inference_mode(), ragged_attention_on([model]):
        found, wanted = compiled.feed(ROWS), modules.feed(ROWS)
    assert compiled.chosen == modules.chosen
    assert len({tuple(own) for own in compiled.chosen}) > 1
    torch.testing.assert_close(found, wanted.float(), atol=2e-3, rtol=2e-3)
    compiled.select([2, 0])
    compiled.admit(1)
    with torch.inference_mode():
        again = compiled.feed([ROWS[2] + [5], ROWS[0] + [7], ROWS[1]])
    assert compiled.chosen == [modules.chosen[place] for place in (2, 0, 1)]
    assert again[2].equal(found[1])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_bits_of_itself_alone_whatever_its_neighbours_read(model, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        guess = Guess(torch.tensor([[7, 8, 9], [6, 5, 0], [1, 2, 3]]), [3, 2, 0])
        together = engine_of(model, 3)
        found = together.feed(ROWS, guess)
        for r, row in enumerate(ROWS):
            alone = engine_of(model, 1)
            own = alone.feed([row], Guess(guess.tokens[r : r + 1], guess.lengths[r : r + 1]))
            count = guess.lengths[r] + 1
            assert found[r, :count].equal(own[0, :count])
            assert not found[r, count:].any()
            assert alone.chosen == [together.chosen[r]]
    finally:
        torch.set_num_threads(before)


def test_a_row_that_rests_chooses_nothing(model):
    engine = engine_of(model, 3)
    found = engine.feed(ROWS, alive=[True, False, True])
    assert engine.chosen[1] is None
    assert not found[1].any()
    assert found[2].any()
    assert not engine.feed(ROWS, alive=[False] * 3).any()
    assert engine.chosen[1] is None
    assert engine.feed(ROWS)[0].equal(found[0])


def test_a_prompt_of_more_tokens_than_a_pass_takes_is_chosen_for_as_a_whole(model):
    """A pass of compiled code has 512 tokens, but for one that chooses."""
    row = torch.randint(3, 61, (700,), generator=torch.Generator().manual_seed(0)).tolist()
    compiled, modules = engine_of(model, 1), RoutedEngine(model, router_of(model))
    modules.start(1, CPU)
    with torch.inference_mode(), ragged_attention_on([model]):
        found, wanted = compiled.feed([row]), modules.feed([row])
    assert compiled.chosen == modules.chosen
    torch.testing.assert_close(found, wanted.float(), atol=2e-3, rtol=2e-3)


def test_what_a_choice_fails_with_is_raised_and_the_next_call_chooses(model, monkeypatch):
    engine = engine_of(model, 2)
    monkeypatch.setattr(engine.router, "choose", lambda place, features: [][0])
    with pytest.raises(IndexError):
        engine.feed(ROWS[:2])
    assert engine.chosen == [None, None]
    for width in (0, 9):
        monkeypatch.setattr(engine.router, "choose", lambda place, features, width=width: [width])
        with pytest.raises(ValueError, match=f"{width} planes were picked for block 0: its weights have 1 to 8"):
            engine.feed(ROWS[:2])
    monkeypatch.undo()
    assert engine.feed(ROWS[:2]).equal(engine_of(model, 2).feed(ROWS[:2]))


@pytest.mark.parametrize(
    ("widths", "said"),
    [([2], "there are widths of 1 blocks, the decoder has"), ([2, 9, 2, 2, 2, 2, 2, 2], "weight_bits is 9")],
)
def test_widths_that_no_weight_has_are_refused(model, widths, said):
    engine = engine_of(model, 1)
    engine.feed(ROWS[:1])
    blocks = len(engine.blocks)
    widths = widths if len(widths) == 1 else widths[:blocks] + [2] * (blocks - len(widths))
    with pytest.raises(ValueError, match=said):
        engine.decoder.call(
            "score_routed", engine.cache.kv, [3], [1], [7], [1], False, True, 0, widths
        )


def test_a_decoder_whose_blocks_are_others_is_refused_with_the_reason(model, monkeypatch):
    decoder = built_decoder(model, "cpu")
    assert why_not_compiled(model, decoder) == ""
    monkeypatch.setattr(decoder, "blocks", [0, *decoder.blocks[1:]])
    assert why_not_compiled(model, decoder) == OTHER_BLOCKS
