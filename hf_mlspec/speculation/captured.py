"""The loop again, where a round is one replay: launch, wait, settle what the device reports."""

from __future__ import annotations

import time

import torch

from ..engines.cuda.engine import prefill
from ..engines.cuda.steps import out_of_memory
from ..engines.rows import up_to_growth
from ..nn.state import say_once
from .captured_caches import NoRoom, Unfinished, adopt, disown, drafters
from .captured_chain import CapturedChain, bucket_of
from .captured_round import CHECK_FIELDS
from .checker import Checker, Verdict, nan_error
from .decode import Decoding, Emit, Stop
from .draft import Drafter, Rows
from .trace_recorder import checkers

_NO_SEED = 0


class CapturedDecoding(Decoding):
    """`Decoding` over a borrowed chain. Rows start together; the host waits once for each round.

    places: of every row its line in the chain's state. seed: of the noise all levels share, drawn from torch's
    generator unless given. script: int32 ``[levels - 1, rows, rounds, 2]``: (drafted, accepted) of every check to
    come, of the target first, given instead of found; the chain was made for as many script_rounds.
    Seconds of levels cannot be told apart inside a graph: target_seconds of the stats is the device's time for whole
    rounds, those of levels are 0.
    """

    def __init__(
        self,
        chain: CapturedChain,
        target: Checker,
        drafter: Drafter | None,
        *,
        num_draft_tokens: int,
        stop: Stop,
        emit: Emit,
        seed: int | None = None,
        script: torch.Tensor | None = None,
    ):
        super().__init__(
            target, drafter, num_draft_tokens=num_draft_tokens, stop=stop, emit=emit, device=chain.device
        )
        self.chain, self.places, self.script = chain, [], script
        self.seed = _NO_SEED if not chain.program.sampled else _drawn_seed() if seed is None else seed
        self.checkers, self.drafters = checkers(target, drafter), drafters(drafter)
        self._first = True

    def start(self, rows: Rows, budgets: list[int], cached: int = 0) -> None:
        """Prefill the caches of all levels with all but the last token of every row; see `decode`."""
        begin = time.perf_counter()
        for number, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
            self._append(row, budget, number)
        # Prompts in order of falling length take the fewest steps to prefill.
        order = sorted(range(len(rows)), key=lambda r: -len(rows[r]))
        self.places = sorted(range(len(rows)), key=lambda r: order[r])
        self._bucket = bucket_of(len(rows))
        self._seconds_before = self.chain.graphs.seconds
        lines = [rows[r] for r in order]
        self.chain.state.load(lines, [self._end(r) for r in order], order, self.seed)
        self._load_script(order)
        for drafter in self.drafters:
            drafter.stats.reset()
        prompts = [row[:-1] for row in lines]
        for index, level in enumerate(self.chain.levels):
            if level.own_cache:
                starts = [cached if index == 0 else 0] * len(rows)
                steps = prefill(level.decoder, level.kv, prompts, starts, level.bits)
                if index:
                    self.drafters[index - 1].stats.forwards += steps
        self.stats.seconds += time.perf_counter() - begin

    def admit(self, rows: Rows, budgets: list[int], numbers: list[int]) -> None:
        raise NotImplementedError("rows of captured rounds start together: streams run step by step")

    def replace(self, r: int, row: list[int], budget: int, number: int) -> None:
        raise NotImplementedError("rows of captured rounds start together: streams run step by step")

    def select(self, keep: list[int]) -> None:
        """Go on with these rows; where half of the places would be idle, rows move to the first ones."""
        if keep == list(range(len(self.rows))):
            return
        lines = self.rows, self.numbers, self.ends, self._ready, self.places
        self.rows, self.numbers, self.ends, self._ready, self.places = ([line[r] for r in keep] for line in lines)
        bucket = bucket_of(len(keep))
        if bucket < self._bucket and self._captured(bucket):
            self._gather(bucket)
        self._let_go_on()

    def round(self) -> list[int]:
        """Replay, wait, settle; the indices of the rows that have not stopped."""
        begin = time.perf_counter()
        if not self.chain.graphs.batch:
            self._make_room()
            self.chain.graphs.launch(self._bucket)
        graphs = self.chain.graphs
        lines = graphs.wait()
        report = [lines[place] for place in self.places]
        self._refuse_nan(report)
        self._had = [len(row) for row in self.rows]
        going = self._settle(self._verdict(report))
        self.stats.seconds += time.perf_counter() - begin
        self.stats.target_seconds = graphs.seconds - self._seconds_before
        self.stats.capture_seconds = graphs.capture_seconds - self.chain.captured_before
        if self._first:
            self.stats.prefilled(self.stats.seconds, self.stats.target_seconds)
            self._first = False
        return going

    def _before_emit(self, going: list[int]) -> None:
        """The device works on while the host streams what it settled."""
        if not self.drafters:
            self._count_steps([len(row) - had for row, had in zip(self.rows, self._had, strict=True)])
        if len(going) == len(self.rows) and not self._lacks_room():
            self.chain.graphs.launch(self._bucket)

    def _end(self, r: int) -> int:
        """The length row r may reach in the chain as it is now."""
        return min(self.ends[r], self.chain.slots)

    def _lacks_room(self) -> bool:
        return any(len(row) >= self._end(r) for r, row in enumerate(self.rows))

    def _make_room(self) -> None:
        """Where a row has filled its slots and may go on, all rows get more; NoRoom where there is no memory."""
        if not self._lacks_room():
            return
        slots = up_to_growth(min(2 * self.chain.slots, max(self.ends)))
        disown(self.target, self.drafter)
        try:
            self.chain.grow(slots)
            self.chain.graphs.capture(self._bucket)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            budgets = [end - len(row) for end, row in zip(self.ends, self.rows, strict=True)]
            left = Unfinished(self.rows, self.numbers, budgets, self.stats)
            raise NoRoom(
                f"no memory for {slots} tokens in each of {self.chain.batch} rows ({str(error).splitlines()[0]})", left
            ) from error
        adopt(self.chain, self.target, self.drafter, len(self.rows))
        self._let_go_on()

    def _let_go_on(self) -> None:
        self.chain.state.let_go_on(self.places, [self._end(r) for r in range(len(self.rows))])

    def _captured(self, bucket: int) -> bool:
        """Whether there is a graph for fewer rows; where there is no memory for one, the larger one goes on."""
        try:
            self.chain.graphs.capture(bucket)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            say_once(
                self.target.runner.model,
                f"rounds of {bucket} rows are not captured, no memory: those of {self._bucket} rows go on",
            )
            return False
        return True

    def _gather(self, bucket: int) -> None:
        places = sorted(self.places)
        self.chain.move(places)
        self.places = [places.index(place) for place in self.places]
        self._bucket = bucket

    def _load_script(self, order: list[int]) -> None:
        if self.script is not None:
            levels, _, rounds, _ = self.script.shape
            table = self.chain.state.script
            table.zero_()
            table[:levels, : len(order), :rounds] = self.script[:, order].to(table)

    def _refuse_nan(self, report: list[list[int]]) -> None:
        level = max((line[0] for line in report), default=0)
        if level:
            found = self.chain.levels[level - 1]
            raise nan_error(found.name, found.decoder.dtype)

    def _verdict(self, report: list[list[int]]) -> Verdict:
        """What the target settled of every row, every check counted and told on the way."""
        program = self.chain.program
        tokens: Rows = [[] for _ in report]
        accepted = [0] * len(report)
        self.drafted = [0] * len(report)
        for check in program.checks:
            column = check.column
            pairs = [line[column : column + CHECK_FIELDS] for line in report]
            alive = [drafted >= 0 for drafted, _ in pairs]
            drafted, kept = ([max(pair[i], 0) for pair in pairs] for i in range(CHECK_FIELDS))
            if check.level == 0:
                self.drafted, accepted = drafted, kept
                for line, own, on, count in zip(tokens, report, alive, kept, strict=True):
                    line += own[column + CHECK_FIELDS : column + CHECK_FIELDS + count + 1] if on else []
            if self.drafters and any(alive):
                self._count(check.level, drafted, kept, alive)
        for index, drafter in enumerate(self.drafters, start=1):
            drafter.stats.rounds += program.drafts(index)
            drafter.stats.forwards += program.forwards(index)
        return Verdict(tokens, accepted, None, None, None)

    def _count(self, level: int, drafted: list[int], accepted: list[int], alive: list[bool]) -> None:
        if level == 0:
            self.stats.count_pass(sum(alive))
        self.drafters[level].stats.settle(drafted, accepted)
        self._tell(level, drafted, accepted, alive)

    def _count_steps(self, gained: list[int]) -> None:
        """Without levels each token took a pass; what ran behind the end of a row is no one's."""
        for step in range(max(gained)):
            alive = [count > step for count in gained]
            self.stats.count_pass(sum(alive))
            self._tell(0, [0] * len(gained), [0] * len(gained), alive)

    def _tell(self, level: int, drafted: list[int], accepted: list[int], alive: list[bool]) -> None:
        checker = self.checkers[level]
        if checker.on_check is not None:
            checker.on_check(drafted, accepted, alive)


def _drawn_seed() -> int:
    """From torch's generator, so that torch.manual_seed repeats a call."""
    return int(torch.randint(1 << 62, (1,)))
