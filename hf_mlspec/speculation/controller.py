"""Which plan writes most tokens a second: which levels, how many tokens each, or none?

Costs (costs.py) and chances (estimates.py) give the expected tokens and seconds of a round of every plan. With B rows,
S slots that a token attends to, T(n) the seconds of a pass of the target over n tokens and t(n) those of a level:

    tokens of a round     B (1 + sum over i <= k of p_i)             p_i: the first i drafted tokens are all kept
    check                 T(B (1 + D)) + attention                   D = sum over i <= k of u_i, u_i: i are drafted
    draft of a level      t(1.5 B) + sum over i < k of t(B u_i)      steps; a row that ended its draft costs nothing
    draft, checked        D / e rounds of the level below and t(B (1 + d))     e: tokens that such a round commits,
                                                                     d: tokens drafted in it
    speed                 tokens / (check + draft)                   "off" is B / T(B)

With one level, B = 1, T constant, p_i = a^i and u_i = 1 this is (1 - a^(k+1)) / ((1 - a)(k c + 1)), c = t / T:
Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.8. With a level that is itself sped up, c is the cost of its own
rounds over the tokens they commit: ML-SpecQD (arXiv 2503.13565), section 3. T may grow with the tokens of a pass;
that is what makes speculation lose in a large batch. A level that starts late first reads what it missed, which
counts against the tokens that may still be written.

A plan changes time, never a token (invariant 8).
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from .costs import DISTURBED, PassCosts
from .estimates import odds_ratio
from .forecast import JUMP, ROUND_SECONDS, Expectations, Forecast
from .memory import LevelCosts, Memory
from .plans import TARGET, Cells, Choices, Drafting, Plan, Situation, cells_of, off
from .search import Choice, Search
from .steady import Steady
from .trials import Trials
from .untold import TRIAL_SHARE

_FIRST_CHOICES = 6  # may take more of the time: rounds tell much yet,
_FIRST_REMEMBERED = 0  # and none where earlier calls told
_LONGEST_STAY = 64  # rounds until a plan is questioned again; without a clock they double, and always those of "off"
_MARGIN = 0.02  # what a plan must gain over "off"
_CALMEST = 4  # times as much is lost, at most, until rounds that bring less than expected ask for a choice again
_WHOLE = 0.9  # of the tokens that a plan asks for, in a round whose time says something of the plan


class Controller(Trials):
    """Chooses the plan of every round from what rounds so far have shown.

    target: the target's costs; levels: from the one below it down. by_clock: measured seconds of rounds correct the
    predicted ones; False where another plan would change bits (engines that are not bit-exact), so that plans follow
    counts alone and a call repeats itself. memory: of an earlier call of this chain. seen: slots that a draft window
    leaves in view, and levels has each of them twice (`plans.Choices`); 0: there is none.

    choice: for the coming rounds. to_build: seconds before any level can draft; measuring: in which costs were found.
    """

    CHOOSING, FIRST_CHOOSING = 0.003, 0.15  # of the time until the next choice, for choosing; of the first choices
    FIRST_OFF, LONGEST_OFF = 4, 64  # rounds of "off", which tell nothing of the levels, until it is questioned
    PAID = 1.0  # of what a choice takes: rounds wait for it
    LONGEST_PAID = 512  # rounds until the next one, where a choice takes as long as some of them

    def __init__(
        self, target: PassCosts, levels: Sequence[LevelCosts], *, by_clock: bool = True, memory: Memory | None = None,
        seen: int = 0,
    ):  # fmt: skip
        super().__init__(memory or Memory(), levels, memory is not None)
        self.target, self.by_clock, self.seen = target, by_clock, seen
        self.memory.rest_on(target, self.levels)
        self.choice = Choice(off(len(self.levels)), [], Forecast(1.0, 1.0, 1.0))
        self._choices = Choices(self.levels, seen)
        uncertain = max(costs.uncertainty for costs in (target, *(one.costs for one in self.levels)) if costs)
        self._margin = min(_MARGIN + uncertain / 4, 0.25)
        self._stay = self._left = self._lasts = 0
        self.measuring = self._lost = 0.0  # seconds that rounds took beyond those expected
        self._steady, self._was_surprised = Steady(), False

    def start(self, rows: int) -> None:
        """Forget the rows; so many follow."""
        self.rows.start(rows)
        self._joined = rows
        self._question()

    def select(self, keep: list[int]) -> None:
        """Go on with these rows. Where they are not like those that leave, what is known is known of them."""
        for (_, checker), pair in self.memory.pairs.items():
            if checker == TARGET:
                pair.shift(self.rows.share_of(keep, pair.mean))
        self.rows.select(keep)
        self._question()

    def admit(self, count: int) -> None:
        """So many rows join."""
        self.rows.admit(count)
        self._joined += count
        self._question()

    def replace(self, row: int) -> None:
        """Another row takes the place of one that ended."""
        self.rows.replace(row)
        self._joined += 1
        self._question()

    @property
    def plan(self) -> Plan:
        """Of the choice."""
        return self.choice.plan

    @property
    def limits(self) -> list[int]:
        """Of the choice."""
        return self.choice.limits

    @property
    def forecast(self) -> Forecast:
        """Of the choice."""
        return self.choice.forecast

    @property
    def off_speed(self) -> float:
        """Of the choice."""
        return self.choice.off_speed

    @property
    def disproves_costs(self) -> bool:
        """Whether rounds say that something else ran when costs were measured."""
        return self.by_clock and self.memory.disproves(self.target, ROUND_SECONDS)

    def choose(self, situation: Situation) -> Plan:
        """The plan of the coming round, which `limits` divides among the rows."""
        begin, before = perf_counter(), self.plan.active
        self._steady.forget()
        search, self._lost = self._search(situation, may_try=True), 0.0
        self._grant(situation, search.off_speed)
        best, drafting = search.best(self._margin)
        self._stay_with(best, trial := self._worth_a_trial(search, best, drafting, self._margin))
        self.choice = self._decided(search, best, drafting, trial)
        self._spend(search, best, drafting, trial)
        if self._was_surprised:
            self.memory.calm = min(2 * self.memory.calm, _CALMEST) if best.active == before else 1
            self._was_surprised = False
        self._chosen += 1
        self._took = self.PAID * (perf_counter() - begin) if self.by_clock else 0.0
        if not any(situation.rooms):
            self._left = 0  # nothing could be drafted: that says nothing of the next round
        elif self.by_clock and trial is None:
            self._left = self._lasts = max(self._left, self._rounds_for(perf_counter() - begin, best))
            self._steady.mark(self.memory, self.forecast.seconds)
        return self.plan

    def best_of(self, situation: Situation) -> Choice:
        """What would be chosen for these rows with what is known now; nothing changes."""
        search = self._search(situation)
        best, drafting = search.best(self._margin)
        return self._decided(search, best, drafting, None)

    def outlook(self, situation: Situation) -> tuple[float, float]:
        """Tokens that these rows are expected to gain, and the seconds of the best plan until then, reading included.
        """
        search = self._search(situation)
        return sum(search.left()), search.time(*search.best(self._margin))

    def stay(self, rows: int) -> bool:
        """Whether the plan of the last round, of as many rows, is that of the coming one."""
        if self._left <= 0 and self._steady.holds(self.memory):
            self._left = self._lasts
        stays = self._left > 0 and len(self.limits) == rows
        self._left -= stays
        return stays

    def observe(self, limits: list[int], drafted: list[int], accepted: list[int], seconds: float, usual: bool = True,
                choice: Choice | None = None) -> None:
        """What a round did, row by row: asked for, drafted, accepted. seconds: its wall time; usual: False where it
        did what other rounds do not, such as reading a prompt. choice: whose round it was, None for the last one's.

        A clock that jumps counts as a factor of two."""
        choice = choice or self.choice
        expected, committed = choice.forecast, len(accepted) + sum(accepted)
        whole = sum(limits) >= _WHOLE * sum(choice.limits)  # else rows end, and drafts are shorter than the plan's
        timed = usual and whole and self.by_clock and not choice.switched
        took = min(max(seconds, 0.5 * expected.seconds), 2.0 * expected.seconds) if timed else expected.seconds
        if choice.of_costs and timed and 0.0 < seconds < DISTURBED * expected.by_costs:  # what else runs only adds
            self.on_disproved()
        choice.switched = False
        self._lost = expected.lost(self._lost, committed, took)
        if choice is not self._untold.choice:
            self.settle()
            self._untold.choice = choice
        self._untold.rounds.append((limits, drafted, accepted, took, timed))
        if self._untold.is_full:
            self.settle()
        if choice.plan.active and expected.surprises(self._lost, self._memory.calm * self._took):
            self._surprised()  # slow rounds of "off" are those of a busy machine
        if choice.trial:
            reads = self.by_clock and choice.plan.active  # else it is the target that reads a prompt
            spent = min(seconds, JUMP * took) if reads else took + choice.reading
            self.memory.spare -= max(spent - committed / choice.best_speed, 0.0)

    def observe_off(self, rounds: int, seconds: float) -> None:
        """So many usual rounds of "off", which is the choice, since the last one that `observe` was told of, and their
        seconds: as that many calls of it, but for less of the time."""
        batch, off = len(self.limits), self.forecast
        self.rows.gain([rounds - 1] * batch)
        for pair in self.memory.pairs.values():
            pair.idle += rounds * batch
        seconds = seconds if self.by_clock else rounds * off.seconds
        if self.by_clock and self.memory.corrects(self.choice.costs):
            self.memory.correct(self.plan, batch, seconds / (rounds * off.by_costs), rounds)
        self.memory.spare += TRIAL_SHARE * seconds

    def observe_inner(
        self, checker: int, limit: int, drafted: int, accepted: int, choice: Choice | None = None
    ) -> None:
        """One row of a check inside a round, by level `checker` of what the next active level drafted."""
        self._untold.inner.append(((choice or self.choice).plan.active, checker, limit, drafted, accepted))

    def _spend(self, search: Search, best: Plan, drafting: Drafting, trial: Plan | None) -> None:
        """Account for what it takes until rounds of the chosen plan can run: on the host, nothing."""

    def _stay_with(self, best: Plan, trial: Plan | None) -> None:
        """How many rounds until the next choice."""
        same = best == self.plan and trial is None
        first = 1 if best.active else self.FIRST_OFF
        self._stay = min(2 * self._stay, self._longest(best)) if same and self._stay else first
        doubles = trial is None and not (best.active and self.by_clock)
        self._left = self._stay - 1 if doubles else 0
        if trial is not None:
            self._left = self._rounds_of(trial) - 1

    def _rounds_for(self, seconds: float, plan: Plan) -> int:
        """Rounds beside which a choice that took so long is little."""
        first = _FIRST_REMEMBERED if self._remembers else _FIRST_CHOICES
        share = self.CHOOSING if self._chosen > first else self.FIRST_CHOOSING
        return min(int(seconds / (share * self.forecast.seconds)), max(self._longest(plan), self.LONGEST_PAID))

    def _longest(self, plan: Plan) -> int:
        return _LONGEST_STAY if plan.active else self.LONGEST_OFF

    def _decided(self, search: Search, best: Plan, drafting: Drafting, trial: Plan | None) -> Choice:
        """The best plan, or the trial of another, with what is expected of it."""
        batch, slots, known = search.batch, search.situation.slots, search.known
        plan, reading = best if trial is None else trial, 0.0
        limits = self._shared(search, best, drafting) if trial is None else []
        if trial is not None:
            limits = [trial.most if r in self._trying.rows else 0 for r in range(batch)]
            reading = search.to_read(trial.active, self._trying)
        odds = self._odds(plan, batch) if plan.active and batch > 1 else [1.0] * batch
        forecast, drafted = known.of_limits(plan, limits, odds, slots), 0.0
        if plan.active:
            drafted = forecast.tokens - batch
            forecast = forecast.bringing(batch + self.memory.gain(plan, batch) * drafted)
        return Choice(
            plan,
            limits,
            forecast,
            off_speed=search.off_speed,
            best_speed=search.usual(best, drafting).speed,
            trial=trial is not None, of_costs=trial is not None and self._of_costs, reading=reading,
            switched=plan.active != self.plan.active,
            by_chances=drafted,
            over_usual=search.over_usual(best, drafting),
            costs=self.memory.costs,
        )

    def _question(self) -> None:
        """Rows, or what is kept of their drafts, have changed: choose anew."""
        self._steady.forget()
        self._left, self._stay = 0, min(self._stay, 2)

    def _surprised(self) -> None:
        """Rounds bring less than expected."""
        self._was_surprised = True
        self._question()

    def _search(self, situation: Situation, may_try: bool = False) -> Search:
        """Plans as they are expected to do. may_try: trials will be asked for, too."""
        return Search(situation, Expectations(*self._known, **self._how(may_try)), self.rows, self._cells(situation))

    def _cells(self, situation: Situation) -> Cells:
        return cells_of(self._choices.at(situation.slots), len(self.levels))

    def _shared(self, search: Search, plan: Plan, drafting: Drafting) -> list[int]:
        """How much each row drafts: no token that is kept so rarely that its seconds would write more elsewhere."""
        if not plan.active or search.batch == 1:
            return [plan.most] * search.batch
        limits = search.shared(plan, drafting, self._odds(plan, search.batch))
        for r, limit in enumerate(limits):
            if not limit:  # not observed any more: let it come back
                self.rows.rows[r].fade(0.9)
        return limits

    def _odds(self, plan: Plan, batch: int) -> list[float]:
        """The odds that a token is kept, of every row over those of all."""
        mean = self.memory.pair(self.levels, plan.active[0], TARGET).mean
        return [odds_ratio(self.rows.mean(r, mean), mean) for r in range(batch)]
