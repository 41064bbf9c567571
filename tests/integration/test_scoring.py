"""Are token log-probabilities those of the model, whatever is scored beside them?"""

from __future__ import annotations

import copy

import models
import pytest
import torch

import hf_mlspec
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.evaluation import score_rows, token_logprobs
from hf_mlspec.integration import scoring
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

needs_kernels = pytest.mark.skipif(not has_compiled_decoder(), reason="no compiled decoder is built")


def rows_of(lengths: list[tuple[int, int]], seed: int = 5) -> list[list[int]]:
    """Rows of (common, own) tokens: what they have in common is the beginning of one random row."""
    generator = torch.Generator().manual_seed(seed)
    beginning = torch.randint(3, models.VOCAB, (200,), generator=generator).tolist()
    return [
        beginning[:common] + torch.randint(3, models.VOCAB, (own,), generator=generator).tolist()
        for common, own in lengths
    ]


ROWS = rows_of([(90, 4), (90, 1), (90, 9), (40, 30), (0, 2), (3, 120), (90, 4), (150, 50), (0, 60)])
SCORED = [4, 1, 9, 30, 1, 119, 6, 100, 59]


def plain(model, row: list[int], count: int) -> tuple[torch.Tensor, list[bool]]:
    """Log-probabilities by one forward pass of transformers, and what is the argmax."""
    with torch.no_grad():
        logprobs = model(torch.tensor([row])).logits[0, -count - 1 : -1].double().log_softmax(-1)
    said = torch.tensor(row[-count:])
    return logprobs[torch.arange(count), said], (logprobs.argmax(-1) == said).tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gemma3", "gpt2"])
@pytest.mark.parametrize("prepare", [True, False])
def test_float32_scores_are_those_of_transformers(kind, prepare):
    model = models.tiny(kind, dtype=torch.float32)
    for scores, row, count in zip(
        token_logprobs(model, ROWS, num_scored=SCORED, batch_size=3, prepare=prepare), ROWS, SCORED, strict=True
    ):
        expected, greedy = plain(model, row, count)
        assert scores.logprobs.dtype == torch.float32
        torch.testing.assert_close(scores.logprobs.double(), expected, rtol=1e-4, atol=2e-4)
        assert scores.greedy.tolist() == greedy
        assert scores.total == pytest.approx(float(expected.sum()), rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("prepare", [True, False])
def test_bfloat16_scores_are_near(prepare):
    target = models.tiny(dtype=torch.bfloat16)
    exact = copy.deepcopy(target).float()
    for scores, row, count in zip(
        token_logprobs(target, ROWS, num_scored=SCORED, prepare=prepare), ROWS, SCORED, strict=True
    ):
        assert (scores.logprobs.double() - plain(exact, row, count)[0]).abs().mean() < 0.15


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, "int4"])
def test_a_compiled_score_is_a_function_of_the_row_alone(dtype, monkeypatch):
    model = models.packed(models.tiny(dtype=torch.bfloat16)) if dtype == "int4" else models.tiny(dtype=dtype)
    pairs = zip(ROWS, SCORED, strict=True)
    alone = [token_logprobs(model, [row], num_scored=[n], batch_size=1)[0] for row, n in pairs]
    before = torch.get_num_threads()
    for batch_size, fed, threads in [(1, 1024, 1), (3, 1024, 1), (9, 24, 1), (4, 1024, 2), (2, 7, 2)]:
        monkeypatch.setattr(scoring, "_FED", fed)
        torch.set_num_threads(threads)
        try:
            found = token_logprobs(model, ROWS, num_scored=SCORED, batch_size=batch_size)
        finally:
            torch.set_num_threads(before)
        for one, other in zip(alone, found, strict=True):
            assert torch.equal(one.logprobs, other.logprobs)
            assert torch.equal(one.greedy, other.greedy)


@needs_kernels
def test_what_rows_begin_with_is_fed_once(monkeypatch):
    model, fed = models.tiny(dtype=torch.float32), []
    true_score = CpuEngine.score

    def score(self, rows, guesses, **options):
        before = list(self.lengths)
        found = true_score(self, rows, guesses, **options)
        fed.append(sum(map(len, rows)) + sum(map(len, guesses)) - sum(before))
        return found

    monkeypatch.setattr(CpuEngine, "score", score)
    rows = rows_of([(150, 2)] * 20)
    token_logprobs(model, rows, num_scored=[2] * 20, batch_size=2)
    assert sum(fed) <= 2 * 150 + 20 * 3  # the beginning once per slot, then the ends


def test_a_large_vocabularys_logarithms_do_not_depend_on_the_rows_beside_them():
    logits, tokens = torch.randn(6, 70_001, generator=torch.Generator().manual_seed(1)), [5, 70_000, 0, 8, 9, 1]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        together = scoring._scores(logits, torch.zeros(6), tokens, torch.float32).logprobs
        for row in range(6):
            own = scoring._scores(logits[row : row + 1], torch.zeros(1), tokens[row : row + 1], torch.float32).logprobs
            assert torch.equal(own, together[row : row + 1])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(together, logits.double().log_softmax(-1)[range(6), tokens].float())


def test_chunks_bound_what_one_call_scores(monkeypatch):
    model, widths = models.tiny(dtype=torch.float32), []
    monkeypatch.setattr(scoring, "_LOGITS", 64 * 10)
    monkeypatch.setattr(scoring, "_LEAST_SCORED", 1)
    true_scores = scoring._scores
    monkeypatch.setattr(scoring, "_scores", lambda some, *rest: widths.append(len(some)) or true_scores(some, *rest))
    row = ROWS[5]
    chunked = token_logprobs(model, [row])[0]
    assert max(widths) == 10
    torch.testing.assert_close(chunked.logprobs.double(), plain(model, row, len(row) - 1)[0], rtol=1e-4, atol=2e-4)


def test_rows_are_yielded_as_they_are_finished():
    model = models.tiny(dtype=torch.float32)
    scores = score_rows(model, ROWS, num_scored=SCORED, batch_size=2)
    first, one = next(scores)
    assert len(one.logprobs) == SCORED[first]
    assert sorted([first, *(index for index, _ in scores)]) == list(range(len(ROWS)))
    assert token_logprobs(model, []) == []


@pytest.mark.parametrize("prepare", [True, False])
def test_precision_is_the_switchs(prepare):
    model = models.packed(models.tiny(dtype=torch.bfloat16))
    found = {}
    for word, bits in (("w4a16", 16), ("w4a8", 8), ("w4a4", 4)):
        found[word] = token_logprobs(model, ROWS, precision=word, prepare=prepare)[3].logprobs
        assert hf_mlspec.precision_switch(model).activation_bits == 16
        with hf_mlspec.precision_switch(model).at(bits):
            assert torch.equal(token_logprobs(model, ROWS, prepare=prepare)[3].logprobs, found[word])
    assert torch.equal(found["w4a16"], token_logprobs(model, ROWS, prepare=prepare)[3].logprobs)
    near, far = ((found["w4a16"] - found[word]).abs().mean() for word in ("w4a8", "w4a4"))
    assert 0 < near < far


@pytest.mark.parametrize(("rows", "options", "words"), [
    ([[5]], {}, "row 0 of 1: 0 of its 1 tokens"),
    ([[5, 6], []], {}, "row 1 of 2: -1 of its 0 tokens"),
    ([[5, 6, 7]], {"num_scored": [3]}, "3 of its 3 tokens are to be scored"),
    ([[5, 6, 7]], {"num_scored": [1, 1]}, "num_scored has 2 entries for 1 rows"),
    ([[5, 64]], {}, "token 64 is no integer from 0 to 63"),
    ([[5, 6.0]], {}, "token 6.0 is no integer"),
    ([[5] * 514], {}, "exceed the 512 positions"),
    ([[5, 6]], {"batch_size": 0}, "batch_size is 0"),
    ([[5, 6]], {"precision": "w4a4"}, "holds no packed layer"),
])
def test_what_cannot_be_scored_is_refused_at_once(rows, options, words):
    with pytest.raises(ValueError, match=words):
        score_rows(models.tiny(dtype=torch.float32), rows, **options)


def test_a_row_as_long_as_the_positions_and_one_more_is_scored():
    model = models.tiny(dtype=torch.float32, max_position_embeddings=64)
    row = rows_of([(65, 0)])[0]
    assert len(token_logprobs(model, [row])[0].logprobs) == 64


@pytest.mark.parametrize("prepare", [True, False])
def test_nan_is_an_error(prepare):
    model = models.tiny(dtype=torch.float32)
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="are NaN"):
        token_logprobs(model, ROWS, prepare=prepare)


@needs_kernels
@pytest.mark.parametrize("levels", [[], ["mxfp4"]])
def test_a_stream_keeps_what_requests_begin_with(levels, monkeypatch):
    model, fed = models.tiny(dtype=torch.bfloat16), []
    rows = rows_of([(120, 3 + n % 4) for n in range(8)])
    expected = [
        model.generate(torch.tensor([row]), max_new_tokens=9, do_sample=False, assistant_models=[])[0].tolist()
        for row in rows
    ]
    true_score = CpuEngine.score

    def score(self, rows, guesses, **options):
        fed.append(sum(len(row) - min(n, len(row) - 1) for row, n in zip(rows, self.lengths, strict=True)))
        return true_score(self, rows, guesses, **options)

    monkeypatch.setattr(CpuEngine, "score", score)
    done = hf_mlspec.generate_stream(model, [hf_mlspec.Request(row, id=n) for n, row in enumerate(rows)], max_batch=2,
                                     max_new_tokens=9, do_sample=False, assistant_models=levels)
    assert {one.id: one.sequence for one in done} == dict(enumerate(expected))
    assert max(fed[2:]) < 40  # after the first pass no row is fed as a whole again
