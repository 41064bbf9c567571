"""What does a Prometheus server see of this one? prometheus-client keeps the numbers, in a registry of this server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..integration.call import last_stats

TARGET = "the target"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


class Watch:
    """Counts what the backend tells. Names begin with mlspec_, units are the last word of a name.

    tokens, row_passes: of all answers: tokens by the level that drafted them, and passes of the target, one for each
    answer that was part of it; their quotient is the tokens per pass.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = {"registry": self.registry}
        self.answers = Counter("mlspec_answers", "Answers by the way they ended", ["finish_reason"], **own)
        self.prompt_tokens = Counter("mlspec_prompt_tokens", "Tokens of prompts that got a slot", **own)
        self.tokens = Counter("mlspec_tokens", "New tokens by the level that drafted them", ["level"], **own)
        self.row_passes = Counter("mlspec_row_passes", "Passes of the target, counted once for each answer", **own)
        self.first = Histogram("mlspec_time_to_first_token_seconds", "From a request to its first tokens", **own,
                               buckets=_SECONDS)
        self.whole = Histogram("mlspec_answer_seconds", "From a request to its last token", **own, buckets=_SECONDS)
        self.rate = Histogram("mlspec_answer_tokens_per_second", "Of one answer, behind its first tokens", **own,
                              buckets=_RATES)
        self.level_failures = Counter("mlspec_level_failures", "Times that the levels failed and were left out", **own)

    def look_at(self, backend: Any) -> None:
        """Read a backend's queue and the counts of its chain whenever the numbers are asked for."""
        running = Gauge("mlspec_answers_running", "Answers that have a slot", registry=self.registry)
        running.set_function(lambda: backend.running)
        waiting = Gauge("mlspec_answers_waiting", "Answers that wait for a slot", registry=self.registry)
        waiting.set_function(lambda: backend.waiting)
        slots = Gauge("mlspec_slots", "Answers decoded at a time", registry=self.registry)
        slots.set(backend.slots)
        self.registry.register(_Levels(backend.model))

    def began(self, ticket: Any) -> None:
        """The first tokens of a ticket came."""
        self.first.observe(ticket.began - ticket.arrived)
        self.prompt_tokens.inc(len(ticket.input_ids))

    def wrote(self, levels: Mapping[str | None, int], passes: int) -> None:
        """So many tokens were drafted by these levels, None: by the target, in so many passes."""
        self.row_passes.inc(passes)
        for level, count in levels.items():
            self.tokens.labels(level or TARGET).inc(count)

    def ended(self, ticket: Any, now: float) -> None:
        """A ticket has its completion."""
        self.answers.labels(ticket.news.end.finish_reason).inc()
        self.whole.observe(now - ticket.arrived)
        behind = ticket.tokens - ticket.first_tokens
        if behind > 0:
            self.rate.observe(behind / max(now - ticket.began, 1e-9))

    def text(self) -> bytes:
        """All numbers, in Prometheus' text format."""
        return generate_latest(self.registry)


class Requests:
    """Counts what HTTP answered, in the process that speaks it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.answered = Counter("mlspec_requests", "Requests by path and status of HTTP", ["path", "status"],
                                registry=self.registry)

    def text(self) -> bytes:
        """As of `Watch`."""
        return generate_latest(self.registry)


class _Levels:
    """The counts of the levels in the stream that runs; they begin anew with a new stream."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def describe(self) -> list[Any]:
        """Nothing is known before the stream runs."""
        return []

    def collect(self) -> Iterator[Any]:
        """Drafted, accepted and tested tokens of every level, and the bytes of all caches."""
        stats = last_stats(self.model)
        levels = stats.levels if stats else []
        for name, what in (("drafted", "Tokens proposed to the level above"),
                           ("accepted", "Drafted tokens that the level above accepted"),
                           ("tested", "Drafted tokens whose verdict is known; accepted / tested is the acceptance")):
            family = CounterMetricFamily(f"mlspec_{name}_tokens", what, labels=["level"])
            for level in levels:
                family.add_metric([level.name], getattr(level, name))
            yield family
        held = GaugeMetricFamily("mlspec_cache_bytes", "Keys and values that are held", labels=["level"])
        for level, count in [(TARGET, stats.target_cache_bytes if stats else 0),
                             *((level.name, level.cache_bytes) for level in levels)]:
            held.add_metric([level], count)
        yield held
        kept = GaugeMetricFamily("mlspec_prefix_cache_bytes", "Keys and values that are kept of prompts")
        kept.add_metric([], stats.prefix_bytes if stats else 0)
        yield kept
        for name, what in (("prompt", "Tokens of prompts that the stream took"),
                           ("prefix", "Those of them whose keys and values were kept of other prompts")):
            family = CounterMetricFamily(f"mlspec_stream_{name}_tokens", what)
            family.add_metric([], getattr(stats, f"{name}_tokens") if stats else 0)
            yield family
