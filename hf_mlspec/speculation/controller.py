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

import numpy as np

from .costs import PassCosts
from .estimates import MOST, RowEstimates, odds_ratio, reach
from .forecast import TARGET, Expectations, Forecast, LevelCosts, Memory
from .plans import LENGTHS, Drafting, Plan, Situation, choices, off, plan_of

_HORIZON = 64.0  # tokens that a row is expected to gain still, and as many as it has gained: it may end any time
_TRIAL_SHARE = 0.01  # of all seconds may go to finding out whether another plan is better,
_AHEAD = 256  # and where nothing is remembered as much in advance, of so many tokens that a row may still gain
_LEAST_TRIAL = 0.05  # of a round that a trial takes at least
_CHOOSING_SHARE = 0.01  # of the time until the next choice, for choosing,
_FIRST_CHOICES, _FIRST_SHARE = 6, 0.15  # and of the first ones, while rounds tell much
_LONGEST_STAY = 32  # rounds until a plan is questioned again; without a clock they double,
_FIRST_OFF, _LONGEST_OFF = 4, 64  # and always those of "off", which tell nothing of the levels
_SLACK, _SURPRISE = 0.1, 2.0  # of a round's expected seconds: that it may take longer, and in sum until that is news
_KNOWN = 6.0  # observations of a position that say something
_DIFFER = 1.3  # chances of the best row over those of the worst, from where on some rows alone may draft
_GROUPS = 3
_MARGIN = 0.02  # what a plan must gain over "off"
_ROWS_OF_A_TRIAL = 8  # one row in so many takes part
_JUMP = 100.0  # times the expected seconds of a round: no trial takes longer
_OFF_TRIAL = 4  # rounds of a trial of "off", which is about its seconds


class Controller:
    """Chooses the plan of every round from what rounds so far have shown.

    target: the target's costs; levels: from the one below it down. by_clock: measured seconds of rounds correct the
    predicted ones; False where another plan would change bits (engines that are not bit-exact), so that plans follow
    counts alone and a call repeats itself. memory: of an earlier call of this chain.

    plan, limits, forecast: of the round under way; limits: per row the most that is drafted for the target. off_speed:
    tokens a second that the target alone is expected to write.
    """

    def __init__(
        self, target: PassCosts, levels: Sequence[LevelCosts], *, by_clock: bool = True, memory: Memory | None = None
    ):
        self.target, self.levels, self.by_clock = target, list(levels), by_clock
        self.memory = memory or Memory()
        self.rows = RowEstimates()
        self.plan = self._off = off(len(self.levels))
        self.limits: list[int] = []
        self.forecast, self.off_speed = Forecast(1.0, 1.0, 1.0), 1.0
        self._choices = list(choices([level.joined for level in self.levels]))
        uncertain = max(costs.uncertainty for costs in (target, *(one.costs for one in self.levels)) if costs)
        self._margin = min(_MARGIN + uncertain / 4, 0.25)
        self._stay = self._left = 0
        self._trial = self._switched = False  # whether other levels drafted in the round before: caches are cold then
        self._best_speed = 1.0
        self._remembers, self._granted = memory is not None, False
        self._lost = 0.0  # seconds that rounds of the plan took beyond what was expected for their tokens
        self._joined = self._chosen = 0  # rows since the last choice; choices
        self._drafting = Drafting((0,))  # in the best plan
        self._reading = 0.0  # seconds that the levels of a trial first read

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

    def choose(self, situation: Situation) -> Plan:
        """The plan of the coming round, which `limits` divides among the rows."""
        begin, batch = perf_counter(), len(situation.rooms)
        known, self._lost = self._expectations(0.0), 0.0
        self.off_speed = known.off(batch, situation.slots).speed
        self._grant(situation)
        self._drafting = Drafting.all_of(batch)
        plan = self._best(situation, known)
        trial = self._worth_a_trial(situation, plan, known)
        same = plan == self.plan and trial is None
        first, longest = (1, _LONGEST_STAY) if plan.active else (_FIRST_OFF, _LONGEST_OFF)
        self._stay = min(2 * self._stay, longest) if same and self._stay else first
        chosen = trial or plan
        self._switched = chosen.active != self.plan.active
        self._trial, self.plan = trial is not None, chosen
        doubles = not self._trial and not (plan.active and self.by_clock)
        self._left = self._stay - 1 if doubles else 0
        if self._trial and not chosen.active:
            self._left = _OFF_TRIAL - 1
        if trial is None:
            self._reading, self.limits = 0.0, self._shared(situation, known)
        else:
            few = self._few(batch).rows if trial.active else ()
            self.limits = [trial.most if r in few else 0 for r in range(batch)]
        odds = self._odds(self.plan, batch) if self.plan.active and batch > 1 else [1.0] * batch
        self.forecast = known.of_limits(self.plan, self.limits, odds, situation.slots)
        self._best_speed = self._usual(plan, situation, known).speed
        self._chosen += 1
        if not any(situation.rooms):
            self._left = 0  # nothing could be drafted: that says nothing of the next round
        elif self.by_clock and not self._trial:  # what choosing takes shall be little beside the rounds until the next
            share = _CHOOSING_SHARE if self._chosen > _FIRST_CHOICES else _FIRST_SHARE
            rounds = (perf_counter() - begin) / (share * self.forecast.seconds)
            self._left = max(self._left, min(int(rounds), longest))
        return self.plan

    def stay(self, rows: int) -> bool:
        """Whether the plan of the last round, of as many rows, is that of the coming one."""
        stays = self._left > 0 and len(self.limits) == rows
        self._left -= stays
        return stays

    def observe(
        self, limits: list[int], drafted: list[int], accepted: list[int], seconds: float, usual: bool = True
    ) -> None:
        """What the round of `plan` did, row by row: asked for, drafted, accepted. seconds: its wall time; usual: False
        where it did what other rounds do not, such as reading a prompt."""
        if self.plan.active:
            pair = self.memory.observed(self.levels, self.plan.active[0], TARGET)
            for r, (limit, d, a) in enumerate(zip(limits, drafted, accepted, strict=True)):
                if limit:
                    self.rows.rows[r].add(*pair.observe(limit, d, a))
        committed = len(accepted) + sum(accepted)
        self.rows.gain(accepted)
        for pair in self.memory.pairs.values():
            pair.idle += committed
        took = self._took(seconds if usual and not self._switched else None)
        self._switched = False
        self._lost = max(self._lost + took - _SLACK * self.forecast.seconds - committed / self.forecast.speed, 0.0)
        if self._lost > _SURPRISE * self.forecast.seconds:
            self._question()
        self.memory.spare += _TRIAL_SHARE * took
        if self._trial:
            spent = min(seconds, _JUMP * took) if self.by_clock else took + self._reading
            self.memory.spare -= max(spent - committed / self._best_speed, 0.0)

    def observe_inner(self, checker: int, limit: int, drafted: int, accepted: int) -> None:
        """One row of a check inside a round, by level `checker` of what the next active level drafted."""
        below = next((index for index in self.plan.active if index > checker), None)
        if below is not None and limit > 0:
            self.memory.observed(self.levels, below, checker).observe(limit, drafted, accepted)

    def _grant(self, situation: Situation) -> None:
        """Seconds for trials where rows have joined: in advance, or what earlier calls left, no more than that."""
        if not any(situation.rooms):  # they wait for the prompt to be read
            return
        batch = len(situation.rooms)
        ahead = sum(min(room, _AHEAD) for room in situation.rooms) / batch
        seconds = _TRIAL_SHARE * self._joined * ahead / self.off_speed
        if not self._remembers:
            self.memory.spare += seconds
        elif not self._granted:
            self.memory.spare = min(self.memory.spare, seconds)
        self._joined, self._granted = 0, True

    def _question(self) -> None:
        """Rows, or what is kept of their drafts, have changed: choose anew."""
        self._left, self._stay = 0, min(self._stay, 2)

    def _expectations(self, doubts: float) -> Expectations:
        return Expectations(self.target, self.levels, self.memory, doubts=doubts, corrected=self.by_clock)

    def _took(self, seconds: float | None) -> float:
        """The seconds of a round, those expected where they were not measured; a clock that jumps counts as a factor
        of two."""
        if seconds is None or not self.by_clock:
            return self.forecast.seconds
        seconds = min(max(seconds, 0.5 * self.forecast.seconds), 2.0 * self.forecast.seconds)
        self.memory.correct(self.plan, len(self.limits), seconds / self.forecast.by_costs)
        return seconds

    def _best(self, situation: Situation, known: Expectations) -> Plan:
        """The plan with which the tokens still to be written take least time."""
        if not any(situation.rooms):
            return self._off
        best, least = self._off, self._time(self._off, situation, known) * (1.0 - self._margin)
        batch = len(situation.rooms)
        for active in self._choices:
            for drafting in self._groups(active[0], batch):
                plan, time = self._lengths(active, situation, known, drafting)
                if time < least:
                    best, least, self._drafting = plan, time, drafting
        return best

    def _groups(self, top: int, batch: int) -> list[Drafting]:
        """Which rows may draft: all, and where rows differ also the half of them whose tokens are kept most often, a
        quarter, and so on."""
        found = [Drafting.all_of(batch)]
        if batch > 1:
            mean = self.memory.pair(self.levels, top, TARGET).mean
            means = [self.rows.mean(r, mean) for r in range(batch)]
            order = sorted(range(batch), key=lambda r: -means[r])
            while len(found) < _GROUPS and batch > 1 and means[order[0]] > _DIFFER * means[order[-1]]:
                batch = (batch + 1) // 2
                rows = tuple(order[:batch])
                found.append(Drafting(rows, odds_ratio(sum(means[r] for r in rows) / batch, mean)))
        return found

    def _lengths(
        self,
        active: tuple[int, ...],
        situation: Situation,
        known: Expectations,
        drafting: Drafting | None = None,
    ) -> tuple[Plan, float]:
        """The best lengths for these levels, and the seconds as `_time` gives them."""
        times = self._times(active, situation, known, drafting)
        best = np.unravel_index(times.argmin(), times.shape)
        lengths = dict(zip(active, (LENGTHS[at] for at in best), strict=True))
        return plan_of(tuple(lengths.get(index, 0) for index in range(len(self.levels)))), float(times[best])

    def _times(
        self,
        active: tuple[int, ...],
        situation: Situation,
        known: Expectations,
        drafting: Drafting | None,
    ) -> np.ndarray:
        """`_time` of every plan of these levels."""
        batch = len(situation.rooms)
        drafting = drafting or Drafting.all_of(batch)
        reading = self._to_read(active, situation, known, drafting)
        grid = known.grid(active, batch, len(drafting.rows), situation.slots, drafting.odds)
        return reading + self._to_write(situation) / grid.speed

    def _to_read(
        self, active: tuple[int, ...], situation: Situation, known: Expectations, drafting: Drafting
    ) -> float:
        """Seconds in which these levels read what they lack of the rows that draft."""
        missing = [sum(line[r] for r in drafting.rows) for line in situation.missing]
        return known.reading(active, missing, situation.slots / 2)

    def _time(
        self, plan: Plan, situation: Situation, known: Expectations, drafting: Drafting | None = None
    ) -> float:
        """Seconds for the tokens that the rows are expected to gain, reading what the plan's levels lack included."""
        if not plan.active:
            return self._to_write(situation) / known.off(len(situation.rooms), situation.slots).speed
        times = self._times(plan.active, situation, known, drafting)
        return float(times[tuple(LENGTHS.index(plan.lengths[index]) for index in plan.active)])

    def _to_write(self, situation: Situation) -> float:
        """Tokens that all rows are expected to gain still."""
        lines = zip(situation.rooms, self.rows.gained, strict=True)
        return sum(min(room + 1.0, _HORIZON + gained) for room, gained in lines)

    def _usual(self, plan: Plan, situation: Situation, known: Expectations) -> Forecast:
        """A round of the plan that was found best, with the rows that draft in it."""
        return known.of(
            plan, len(situation.rooms), len(self._drafting.rows), situation.slots, self._drafting.odds
        )

    def _worth_a_trial(self, situation: Situation, best: Plan, known: Expectations) -> Plan | None:
        """Another plan that would be better if its levels were as good as they may well be, where a round of it costs
        no more than may be spent on finding out."""
        if not any(situation.rooms) or self.memory.spare < _LEAST_TRIAL * self._usual(best, situation, known).seconds:
            return None
        hoped = self._expectations(1.0)
        least = self._time(best, situation, known, self._drafting) * (1.0 - self._margin)
        others = [self._lengths(active, situation, hoped) for active in self._choices if active != best.active]
        if best.active:
            others.append((self._off, self._time(self._off, situation, hoped)))
        better = sorted((one for one in others if one[1] < least), key=lambda one: one[1])
        found = [plan for plan, _ in better] or [self._longer(best)]
        return next((plan for plan in found if plan and self._affordable(plan, best, situation, known)), None)

    def _affordable(self, plan: Plan, best: Plan, situation: Situation, known: Expectations) -> bool:
        """Whether a trial of `plan` costs no more than may be spent, what its levels read first included."""
        batch = len(situation.rooms)
        few = self._few(batch)
        self._reading = self._to_read(plan.active, situation, known, few)
        round_ = known.of(plan, batch, len(few.rows), situation.slots)
        usual = self._usual(best, situation, known).speed
        return self._reading + round_.seconds - round_.tokens / usual <= self.memory.spare

    def _longer(self, best: Plan) -> Plan | None:
        """The best plan with a longer draft for the target, where little is known but of its own positions."""
        if not best.active or 2 * best.most > MOST:
            return None
        pair, top = self.memory.pair(self.levels, best.active[0], TARGET), best.active[0]
        longer = next(length for length in LENGTHS if length >= 2 * best.most)
        if pair.kept[best.most - 1].tried < _KNOWN or pair.kept[best.most].tried >= _KNOWN:
            return None
        return plan_of((*best.lengths[:top], longer, *best.lengths[top + 1 :]))

    def _shared(self, situation: Situation, known: Expectations) -> list[int]:
        """How much each row drafts: no token that is kept so rarely that the seconds it costs would write more
        elsewhere."""
        plan, batch = self.plan, len(situation.rooms)
        if not plan.active or batch == 1:
            return [plan.most] * batch
        worth = self._usual(plan, situation, known).speed * known.of_a_token(plan, batch, situation.slots)
        chances, limits = self.memory.pair(self.levels, plan.active[0], TARGET).chances()[: plan.most], []
        for r, odds in enumerate(self._odds(plan, batch)):
            kept = reach(chances, odds) if r in self._drafting.rows else []
            limits.append(sum(chance >= worth for chance in kept))
            if not limits[-1]:  # not observed any more: let it come back
                own = self.rows.rows[r]
                own.tried, own.kept = 0.9 * own.tried, 0.9 * own.kept
        return limits

    def _odds(self, plan: Plan, batch: int) -> list[float]:
        """The odds that a token is kept, of every row over those of all."""
        mean = self.memory.pair(self.levels, plan.active[0], TARGET).mean
        return [odds_ratio(self.rows.mean(r, mean), mean) for r in range(batch)]

    def _few(self, batch: int) -> Drafting:
        """The rows that draft in a trial, others each time."""
        few = -(-batch // _ROWS_OF_A_TRIAL)
        return Drafting(tuple((self._chosen + i) % batch for i in range(few)))
