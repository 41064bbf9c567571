"""Does the decoder of devices run gated delta nets as the modules do, behind states that lag and are never copied?"""

from __future__ import annotations

import pytest
import torch
from decoders import HYBRIDS, PACKED_SHAPE, Lanes, random_model
from models import prompts
from rows_with_states import LENGTH, ids, logits_behind, read_again

import hf_mlspec
from hf_mlspec.engines.cuda import engine as cuda_engine
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.cuda.engine import CudaEngine
from hf_mlspec.engines.cuda.states import WINDOW, DeltaStates
from hf_mlspec.engines.engine import Guess

CPU = torch.device("cpu")


def engine_over(model, rows: int = 1, follow: CudaEngine | None = None) -> CudaEngine:
    made = CudaEngine(model, CudaDecoder(model), follow=follow, capacity=LENGTH + 1)
    made.start(rows, CPU)
    return made


def alone(model, row: list[int]) -> torch.Tensor:
    return logits_behind(model, engine_over, row)


def check(engine: CudaEngine, rows: list[list[int]], guesses: list[list[int]]) -> torch.Tensor:
    width = max(map(len, guesses))
    tokens = torch.tensor([guess + [0] * (width - len(guess)) for guess in guesses])
    return engine.feed(rows, Guess(tokens, [len(guess) for guess in guesses]))


def draft(engine: CudaEngine, rows: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens behind rows, as a drafter gets them."""
    engine.lengths = list(engine.follow.lengths) if engine.follow else engine.lengths
    drafted = [engine.feed(rows)[:, 0].argmax(-1)]
    while len(drafted) < count:
        drafted.append(engine.step(drafted[-1][:, None], [1] * len(rows), [0] * len(rows), 1)[:, 0].argmax(-1))
    return torch.stack(drafted, dim=1).tolist()


@pytest.fixture(scope="module")
def model():
    return random_model("qwen3.5", torch.float32)


@pytest.mark.parametrize("name", HYBRIDS)
def test_one_forward_is_that_of_the_modules(name):
    model, row = random_model(name, torch.float32), ids()[0]
    with torch.no_grad():
        stock = model(torch.tensor([row])).logits[0]
    found = Lanes(CudaDecoder(model), 1).feed([row])[0]
    assert float((found - stock).norm() / stock.norm()) < 1e-4
    half = CudaDecoder(random_model(name, torch.bfloat16))
    together, single = Lanes(half, 2).feed([row, row[:9]], padding=3), Lanes(half, 1)
    assert torch.equal(torch.cat([single.feed([[token]])[0] for token in row]), together[0])
    best = stock.gather(1, together[0].argmax(-1, keepdim=True))[:, 0]
    assert float(((stock.max(-1).values - best) / stock.std(-1)).median()) <= 0.05


@pytest.mark.parametrize("name", ["qwen3.5-taps", "qwen3-next"])
@pytest.mark.parametrize("accepted", range(6))
def test_a_check_leaves_what_was_accepted(name, accepted):
    model, (row, other) = random_model(name, torch.bfloat16), ids(2)
    engine = engine_over(model)
    check(engine, [row[:20]], [row[20 : 20 + accepted] + [token % 190 + 5 for token in other[: 5 - accepted]]])
    engine.lengths = [20 + accepted]
    before = engine.forwards
    assert torch.equal(engine.feed([row[: 21 + accepted]])[0, 0], alone(model, row[: 21 + accepted]))
    assert engine.forwards == before + 1  # nothing was read again


def test_nothing_accepted_for_many_rounds(model):
    row, engine = ids()[0], engine_over(model)
    for round in range(12):
        check(engine, [row[:20]], [ids(seed=round)[0][:7]])
        engine.lengths = [19 + round % 2]
    assert torch.equal(engine.feed([row[:20]])[0, 0], alone(model, row[:20]))


@pytest.mark.parametrize("back", [30, 3, 0])
def test_a_row_without_its_state_is_read_again(model, back):
    read_again(model, engine_over, back)


@pytest.mark.parametrize("count", [WINDOW // 2, 3 * WINDOW])
def test_long_checks_and_drafts(model, count):
    row, leader = ids(length=4 * WINDOW)[0], engine_over(model)
    follower = engine_over(model, follow=leader)
    leader.feed([row[:20]])
    leader.lengths = [19]
    drafted = draft(follower, [row[:20]], count)[0]
    check(leader, [row[:20]], [drafted])
    leader.lengths = [20 + count - 5]
    longer = (row[:20] + drafted)[: 20 + count - 4]
    assert torch.equal(leader.feed([longer])[0, 0], alone(model, longer))
    own = engine_over(model)
    assert draft(own, [row[:20]], count)[0] == drafted
    own.lengths = [25]
    assert torch.equal(own.feed([row[:20] + drafted[:8]])[0, 0], alone(model, row[:20] + drafted[:8]))


def test_a_prompt_without_memory_is_read_again_and_its_neighbours_states_stay(model, monkeypatch):
    rows = ids(3, length=2 * WINDOW)
    engine = engine_over(model, 3)
    engine.feed([rows[0][:5], rows[1][: 2 * WINDOW - 1], rows[2][:6]])
    monkeypatch.setattr(cuda_engine, "CHUNK", 64)
    monkeypatch.setattr(cuda_engine, "LEAST_CHUNK", 8)
    feed_forward, calls = engine.decoder._feed_forward, []

    def short_of_memory(*operands):
        calls.append(1)
        if len(calls) == 3:  # behind layers that have left their states
            raise torch.OutOfMemoryError("none left")
        return feed_forward(*operands)

    monkeypatch.setattr(engine.decoder, "_feed_forward", short_of_memory)
    lines = [rows[0][:30], rows[1][: 2 * WINDOW - 1], rows[2][:30]]
    found = engine.feed(lines, alive=[True, False, True])[:, 0]
    lines[1] = rows[1]
    assert len(calls) > 6
    assert engine.lengths[1] == 2 * WINDOW - 1
    for r in (0, 2):
        assert torch.equal(found[r], alone(model, lines[r]))
    found = engine.feed(lines)[:, 0]
    for r in range(3):
        assert torch.equal(found[r], alone(model, lines[r]))


@pytest.mark.parametrize("fed", [31, 60])
def test_what_was_interrupted_between_two_layers_is_read_again(model, monkeypatch, fed):
    """A check of few tokens, and a prompt."""
    row, engine = ids(length=2 * WINDOW)[0], engine_over(model)
    check(engine, [row[:30]], [row[30:35]])
    engine.lengths = [30]
    feed_forward, calls = engine.decoder._feed_forward, []

    def interrupted(*operands):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return feed_forward(*operands)

    monkeypatch.setattr(engine.decoder, "_feed_forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.feed([row[:fed]])
    for end in (fed, fed + 1):
        assert torch.equal(engine.feed([row[:end]])[0, 0], alone(model, row[:end]))


def test_what_a_follower_reads_is_read_again_by_its_leader(model):
    other = random_model("qwen3.5", torch.float32)
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(1.5)
    rows, leader = ids(2), engine_over(model, 2)
    follower = engine_over(other, 2, follow=leader)
    leader.feed([rows[0][:20], rows[1][:9]])
    leader.lengths = [19, 8]
    longer = [rows[0][:26], rows[1][:9]]
    draft(follower, longer, 5)
    found = leader.feed(longer)[:, 0]
    assert torch.equal(found, torch.stack([alone(model, row) for row in longer]))


def test_states_of_another_window_are_other_addresses(model):
    sizes = CudaDecoder(model).sizes.delta
    held, more = (DeltaStates.new(sizes, 1, 2, torch.float32, CPU, window) for window in (8, 16))
    assert held.addresses != held._replace(inputs=held.inputs[:, :, :4]).addresses
    assert held.part(0, 1).addresses != held.addresses != more.addresses


def test_rows_are_moved_joined_and_forgotten(model):
    rows = ids(4)
    engine = engine_over(model, 3)
    check(engine, [rows[0][:9], rows[1][:30], rows[2][:17]], [[5, 6, 7], [5, 6, 7], [8, 1, 2]])
    engine.lengths = [9, 31, 17]
    engine.select([2, 1])
    engine.admit(2)
    engine.forget(0)
    fed = [rows[3][:11], [*rows[1][:30], 5, 9], rows[0][:3], rows[2][:6]]
    found = engine.feed(fed, alive=[True, True, False, True])[:, 0]
    for r in (0, 1, 3):
        assert torch.equal(found[r], alone(model, fed[r]))


def test_a_follower_drafts_behind_the_states_of_its_leader(model):
    leader = engine_over(model, 2)
    follower = engine_over(model, 2, follow=leader)
    rows = [row[:n] for row, n in zip(ids(2), (20, 9), strict=True)]
    leader.feed(rows)
    leader.lengths = [19, 8]
    for _ in range(3):
        drafted = draft(follower, rows, 4)
        best = check(leader, rows, drafted).argmax(-1).tolist()
        assert drafted == [line[:4] for line in best]  # all of it: the same model behind the same states
        rows = [row + line[:3] for row, line in zip(rows, best, strict=True)]
        leader.lengths = [len(row) - 1 for row in rows]
    assert leader.feed(rows)[:, 0].equal(torch.stack([alone(model, row) for row in rows]))
    assert follower.cache_bytes == follower.bytes_per_row == 0


@pytest.mark.parametrize("levels", [["mxfp4"], ["prompt_lookup"], ["mxfp4", "llama"], ["llama"], ["qwen3.5"],
                                    ["mxfp4", "qwen3.5"]], ids=str)  # fmt: skip
def test_chains_write_what_the_target_alone_writes(levels):
    model = hf_mlspec.prepare(random_model("qwen3.5", torch.bfloat16, **PACKED_SHAPE), engine="cuda")
    sizes = {"llama": {}, "qwen3.5": PACKED_SHAPE}
    drafts = [random_model(word, torch.bfloat16, **sizes[word]) if word in sizes else word for word in levels]
    options = {**prompts([5, 9, 40, 1]), "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    for sampled in (False, True):
        torch.manual_seed(3)
        wanted = model.generate(**options, do_sample=sampled, assistant_models=[])
        torch.manual_seed(3)
        how = {"assistant_models": drafts, "speculation_config": {"num_draft_tokens": 3}}
        assert torch.equal(model.generate(**options, do_sample=sampled, **how), wanted)
        found = hf_mlspec.last_stats(model).levels[0]
        assert found.drafted > 0
        if levels == ["qwen3.5"]:  # a copy of the target
            assert found.acceptance > 0.9
