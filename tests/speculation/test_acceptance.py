"""Does everything that decides what a check keeps decide as the one table of cases says?

The specification in Python, the host's checks over logits and over a compiled decoder, rounds inside one compiled
call, the loop, and the ops of a captured round (on a GPU: tests/cuda/test_rounds.py).
"""

from __future__ import annotations

from functools import cache

import acceptance_cases
import pytest
import torch
from acceptance_cases import CASES, NAN, VOCAB, Case, Row, fails, said
from models import tiny
from tables import CPU, TableRunner
from torch import Tensor

from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.acceptance import accept_greedy, accept_row
from hf_mlspec.speculation.checker import Checker
from hf_mlspec.speculation.draft import Draft, Rows
from hf_mlspec.speculation.drafters.checked import CheckedDrafter
from hf_mlspec.speculation.drafters.model import ModelDrafter
from hf_mlspec.speculation.loop import Loop
from hf_mlspec.speculation.rounds.host import HostRounds
from hf_mlspec.speculation.sampling import Sampler
from hf_mlspec.speculation.stats import LevelStats

compiled = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
RUNNERS = ["logits", pytest.param("compiled", marks=compiled)]
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


class Guesses:
    """Drafts what the rows of a case say, and nothing afterwards."""

    name = "guesses"

    def __init__(self, rows: list[Row]):
        self.left, self.stats = [list(row.draft) for row in rows], LevelStats(self.name)

    def start(self, batch: int, device: torch.device) -> None: ...

    def rollback(self, lengths: list[int]) -> None: ...

    def propose(self, rows: Rows, limits: list[int]) -> Draft:
        draft = Draft.from_lists([line[:limit] for line, limit in zip(self.left, limits, strict=True)])
        self.left = [[] for _ in rows]
        return draft


def table_runner(logits: Tensor) -> TableRunner:
    runner = TableRunner(torch.ones(1, 1))
    runner.logits = logits
    return runner


def compiled_runner(logits: Tensor) -> CpuEngine:
    """A decoder whose logits after a token are a line of the table, whatever stands before it."""
    model = tiny(dtype=torch.float32, vocab_size=VOCAB, hidden_size=VOCAB, num_hidden_layers=1)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.zero_()
        holds_nan = logits.isnan().any(dim=1)
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB).masked_fill(holds_nan[:, None], torch.nan))
        model.lm_head.weight.copy_((logits.nan_to_num() / VOCAB**0.5).T)
    return CpuEngine(model, CpuDecoder(model))


@cache
def _compiled_checker() -> CpuEngine:
    return compiled_runner(acceptance_cases.checkers_logits())


def checker(kind: str) -> Checker:
    runner = _compiled_checker() if kind == "compiled" else table_runner(acceptance_cases.checkers_logits())
    return Checker(runner, Sampler(VOCAB), "checker", keep_logits=False)


def prefixes(case: Case) -> Rows:
    return [[*range(40, 41 + r), row.last] for r, row in enumerate(case.rows)]


@every_case
def test_the_specification(case):
    rows = [row for row in case.rows if row.active and NAN not in row.tokens]
    width = max((len(row.draft) for row in rows), default=0)
    tokens, best = [], []
    for row in rows:
        line = list(row.drafted)
        while len(line) < width:  # behind a draft stands what would have been accepted
            line.append(max(said(line[-1] if line else row.last), 0))
        tokens.append(line)
        best.append([said(token) for token in (row.last, *line)])
    if not rows:
        return
    drafts = torch.tensor(tokens, dtype=torch.long).view(len(rows), width)
    accepted = accept_greedy(drafts, torch.tensor([len(row.drafted) for row in rows]), torch.tensor(best))
    assert accepted.tolist() == [row.accepted for row in rows]
    assert [accept_row(row.drafted, own) for row, own in zip(rows, best, strict=True)] == accepted.tolist()
    assert [(*line[:n], own[n]) for line, own, n in zip(tokens, best, accepted.tolist(), strict=True)] == [
        row.tokens for row in rows
    ]


@every_case
@pytest.mark.parametrize("kind", RUNNERS)
def test_a_check_on_the_host(kind, case):
    judge, heard = checker(kind), []
    judge.on_check = lambda *what: heard.append(what)
    judge.start(len(case.rows), CPU)
    asked = prefixes(case), Draft.from_lists([list(row.drafted) for row in case.rows])
    alive = [row.active for row in case.rows]
    if fails(case):
        with pytest.raises(FloatingPointError, match="the logits of checker are NaN"):
            judge.check(*asked, alive=alive)
        return
    verdict = judge.check(*asked, alive=alive)
    assert [tuple(line) for line in verdict.tokens] == [row.tokens for row in case.rows]
    assert [n for n, on in zip(verdict.accepted, alive, strict=True) if on] == [
        row.accepted for row in case.rows if row.active
    ]
    assert heard == [([len(row.drafted) for row in case.rows], verdict.accepted, alive)]
    for row, prefix, have in zip(case.rows, prefixes(case), judge.runner.lengths, strict=True):
        assert not row.active or have == len(prefix) + row.accepted


@every_case
@pytest.mark.parametrize("kind", [*RUNNERS, pytest.param("one call", marks=compiled)])
def test_a_level_that_drafts_for_another(kind, case):
    """What it hands up begins with what its first check keeps, and goes on behind it only where the table says so."""
    judge, heard = checker("compiled" if kind == "one call" else kind), []
    judge.on_check = lambda *what: heard.append(what)
    inner, most = Guesses(case.rows), max(1, *(len(row.draft) for row in case.rows))
    if kind == "one call":
        if any(row.limit > 1 and not row.draft for row in case.rows):
            pytest.skip("a model drafts something wherever there is room")
        runner = compiled_runner(acceptance_cases.drafters_logits(case.rows))
        inner = ModelDrafter(runner, Sampler(VOCAB), "guesses", threshold=0.5)
    level = CheckedDrafter(judge, inner, num_draft_tokens=most, threshold=case.threshold)
    level.start(len(case.rows), CPU)
    asked = prefixes(case), [row.limit for row in case.rows]
    if fails(case):
        with pytest.raises(FloatingPointError, match="are NaN"):
            level.propose(*asked)
        return
    draft = level.propose(*asked).rows()
    for row, line in zip(case.rows, draft, strict=True):
        assert tuple(line[: len(row.tokens)]) == row.tokens
        assert (len(line) > len(row.tokens)) == row.goes_on
    drafted, accepted, alive = heard[0]
    assert alive == [row.active for row in case.rows]
    assert drafted == [len(row.drafted) for row in case.rows]
    assert accepted == [row.accepted for row in case.rows]


@every_case
@pytest.mark.parametrize("kind", RUNNERS)
def test_a_round_of_the_loop(kind, case):
    """It ends rows at their limits only: what the target is not sure of is its word all the same."""
    rows = [row for row in case.rows if row.active]
    case, told = case._replace(rows=rows), []
    judge, lines = checker(kind), prefixes(case)
    rounds = HostRounds(judge, Guesses(rows), num_draft_tokens=max(1, *(len(row.draft) for row in rows)), device=CPU)
    loop = Loop(rounds, stop=lambda number, row, tokens: (len(tokens), False), emit=lambda *what: told.append(what))
    judge.start(len(rows), CPU)
    loop.start(lines, [row.limit for row in rows])
    if fails(case):
        with pytest.raises(FloatingPointError, match="are NaN"):
            loop.round()
        return
    assert loop.round() == [r for r, row in enumerate(rows) if len(row.tokens) < row.limit]
    assert loop.rows == [[*line, *row.tokens] for line, row in zip(prefixes(case), rows, strict=True)]
    assert loop.drafted == [len(row.drafted) for row in rows]
    ((numbers, kept, verdict),) = told
    assert (numbers, verdict.accepted) == ([*range(len(rows))], [row.accepted for row in rows])
    assert [tuple(line) for line in kept] == [row.tokens for row in rows]


@every_case
def test_the_ops_of_a_captured_round(case):
    acceptance_cases.play_ops(case)
