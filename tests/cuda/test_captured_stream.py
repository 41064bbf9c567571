"""Do the requests of a stream on a GPU write what each would alone, in captured rounds?"""

from __future__ import annotations

import random

import pytest
import torch
from models import near, tiny

import hf_mlspec
from hf_mlspec import Request
from hf_mlspec.engines.rows import new_kv
from hf_mlspec.nn.state import state_of
from hf_mlspec.speculation.rounds.captured import CapturedRounds
from hf_mlspec.speculation.rounds.graphs import RoundGraphs
from hf_mlspec.speculation.rounds.host import HostRounds
from hf_mlspec.speculation.rounds.prompts import PromptGraphs, read
from hf_mlspec.speculation.sampling import drawn_seed

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "dtype": torch.bfloat16, "seed": 2}


@pytest.fixture(scope="module")
def target():
    return tiny(**SHAPE).cuda()


@pytest.mark.parametrize("chain", ["", "draft", "mxfp4 draft", "prompt_lookup"])
def test_requests_that_come_and_go(target, chain, monkeypatch):
    rng, captured, run = random.Random(3), [], CapturedRounds.run
    monkeypatch.setattr(CapturedRounds, "run", lambda self, *args: captured.append(self.bucket) or run(self, *args))
    draft = near(tiny(**SHAPE), 0.02).cuda()
    levels = [draft if word == "draft" else word for word in chain.split()]
    asked = [([rng.randrange(3, 64) for _ in range(rng.choice([1, 5, 9, 30, 130]))], rng.randrange(1, 60))
             for _ in range(60)]  # fmt: skip
    options = {"do_sample": False, "eos_token_id": None}

    def source():
        for number, (ids, limit) in enumerate(asked):
            while rng.random() < 0.2:
                yield None
            one = Request(ids, id=number, max_new_tokens=limit)
            yield one
            if rng.random() < 0.1:
                one.cancel()

    done = list(hf_mlspec.generate_stream(target, source(), assistant_models=levels, max_batch=8, **options))
    assert sorted(one.id for one in done) == list(range(60))
    assert captured
    for one in done:
        ids, limit = asked[one.id]
        alone = target.generate(input_ids=torch.tensor([ids], device="cuda"), max_new_tokens=limit, **options,
                                assistant_models=[])[0, len(ids) :].tolist()  # fmt: skip
        assert one.error is None
        assert one.new_tokens == (alone if one.finish_reason == "length" else alone[: len(one.new_tokens)])


@pytest.mark.parametrize("temperatures", [(1.0,), (1.0, 0.7, 1.3)])
@pytest.mark.parametrize("chain", ["", "draft", "mxfp4 draft", "prompt_lookup"])
def test_requests_that_sample_and_greedy_ones_share_captured_rounds(target, chain, temperatures, monkeypatch):
    """Each answer is that of generate alone with its seed, whoever is beside it, and no round is one of the host."""
    rng, captured, run = random.Random(7), [], CapturedRounds.run
    monkeypatch.setattr(CapturedRounds, "run", lambda self, *args: captured.append(self.bucket) or run(self, *args))
    monkeypatch.setattr(HostRounds, "run", lambda *_: pytest.fail("a round of the host"))
    draft = near(tiny(**SHAPE), 0.02).cuda()
    levels = [draft if word == "draft" else word for word in chain.split()]
    asked = [([rng.randrange(3, 64) for _ in range(rng.choice([1, 5, 9, 30]))], rng.randrange(1, 50),
              rng.choice([None, *temperatures])) for _ in range(60)]  # fmt: skip

    def options(temperature: float | None) -> dict:
        own = {"do_sample": False} if temperature is None else {
            "do_sample": True, "temperature": temperature, "top_k": 0}  # fmt: skip
        return {**own, "eos_token_id": None}

    def source():
        for number, (ids, limit, temperature) in enumerate(asked):
            while rng.random() < 0.2:
                yield None
            seed = None if temperature is None else drawn_seed(torch.Generator().manual_seed(number))
            yield Request(ids, id=number, seed=seed, max_new_tokens=limit, **options(temperature))

    done = {one.id: one for one in hf_mlspec.generate_stream(target, source(), assistant_models=levels, max_batch=8)}
    assert len(captured) > 1
    for number, (ids, limit, temperature) in enumerate(asked):
        torch.manual_seed(number)
        alone = target.generate(input_ids=torch.tensor([ids], device="cuda"), max_new_tokens=limit,
                                **options(temperature), assistant_models=[])[0, len(ids) :].tolist()  # fmt: skip
        assert done[number].error is None
        assert done[number].new_tokens == alone, (number, temperature)


@pytest.mark.parametrize("good", [0, 3])
def test_a_level_that_fails_leaves_the_target_alone_in_captured_rounds(target, monkeypatch, good):
    draft, left, launch, captured = near(tiny(**SHAPE), 0.02).cuda(), [good], RoundGraphs.launch, []
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 30}
    asked = [[5, 6 + n, 7] for n in range(9)]
    expected = [target.generate(torch.tensor([ids], device="cuda"), **options, assistant_models=[])[0].tolist()
                for ids in asked]  # fmt: skip

    def failing(self, program, *words):
        captured.append(bool(program.levels[1:]))
        if program.levels[1:]:
            left[0] -= 1
            if left[0] < 0:
                raise ArithmeticError("this level is broken")
        return launch(self, program, *words)

    monkeypatch.setattr(RoundGraphs, "launch", failing)
    requests = [Request(ids, id=n) for n, ids in enumerate(asked)]
    done = {one.id: one for one in hf_mlspec.generate_stream(target, requests, assistant_models=[draft], max_batch=4,
                                                             speculation_config={"num_draft_tokens": 3}, **options)}
    assert [done[n].sequence for n in range(len(asked))] == expected
    assert left[0] == -1
    assert not any(captured[good + 1 :])
    assert "this level is broken" in hf_mlspec.last_stats(target).levels_error


@pytest.mark.parametrize("lengths", [[9], [31, 30], [60, 4, 33, 64], [128]])
def test_a_prompt_that_is_replayed_has_the_bits_of_one_that_is_read(target, lengths):
    rng, options = random.Random(11), {"do_sample": False, "eos_token_id": None}
    rows = [[rng.randrange(3, 64) for _ in range(n)] for n in lengths]
    list(hf_mlspec.generate_stream(target, [Request(rows[0], max_new_tokens=2)], max_batch=8, **options))
    level = state_of(target).chains[-1].levels[0]
    graphs, places = PromptGraphs(level), list(range(1, 2 * len(rows), 2))
    kept = level.kv
    with torch.inference_mode():
        shape = graphs.shape(rows, 0)
        assert graphs.took(shape, 2.0, 1.0, 0.5) > 0
        try:
            for line in ([row[::-1] for row in rows], rows):  # the second is not what the graph was made with
                found, expected = (new_kv(level.decoder, 8, 256) for _ in range(2))
                assert graphs.replayed(shape, found, places, line)
                level.kv = expected
                read(level, places, line, [0] * len(line))
                assert expected.any()
                assert torch.equal(found, expected)
        finally:
            level.kv = kept
