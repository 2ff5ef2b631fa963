"""What Prometheus sees, named and bucketed after OpenTelemetry's `gen_ai.*` conventions.

With several workers, whoever is scraped asks the others for a `Snapshot` and tells the sum.
Counting is a bisection and an addition on plain lists; the Prometheus library only writes the text
when somebody scrapes. Gauges are not kept at all: they are read from the live objects at scrape
time, so none can be left over. Labels are bounded: model, class and reason by the config, tenants
by `MAX_TENANTS` (the rest counts as `other`).

Bucket boundaries: OpenTelemetry semantic conventions for generative AI metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.utils import floatToGoString

from domain.outcome import Cause, Outcome, UsageSource

DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
"""Bounds of durations, s."""
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""Bounds of times to first token, s."""
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
"""Bounds of times per output token, s."""
TOKENS = tuple(float(4**k) for k in range(14))
"""Bounds of token counts."""
DECISION = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
"""Bounds of decision times, s."""
RATIO = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 4)
"""Bounds of actual over predicted."""

MAX_TENANTS = 100
OTHER = "other"

Labels = tuple[str, ...]


class Counts:
    """Counters of one name, by label values."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: dict[Labels, float] = {}

    def add(self, labels: Labels, amount: float = 1.0) -> None:
        """Count `amount` more."""
        self.values[labels] = self.values.get(labels, 0.0) + amount


class Histograms:
    """Histograms of one name, by label values. `bounds` ascend; values above the last count too."""

    __slots__ = ("bounds", "buckets", "sums")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.buckets: dict[Labels, list[int]] = {}
        self.sums: dict[Labels, float] = {}

    def observe(self, labels: Labels, value: float) -> None:
        """Count one value."""
        buckets = self.buckets.get(labels)
        if buckets is None:
            buckets = self.buckets[labels] = [0] * (len(self.bounds) + 1)
            self.sums[labels] = 0.0
        buckets[bisect_left(self.bounds, value)] += 1
        self.sums[labels] += value

    def rows(self) -> list[tuple[Labels, list[int], float]]:
        """Label values, counts by bucket and the sum of the values."""
        return [(labels, buckets, self.sums[labels]) for labels, buckets in self.buckets.items()]

    def add(self, rows: Iterable[tuple[Labels, list[int], float]]) -> None:
        """Count what another has counted in the same buckets."""
        for labels, buckets, total in rows:
            own = self.buckets.get(labels, [0] * len(buckets))
            self.buckets[labels] = [a + b for a, b in zip(own, buckets, strict=True)]
            self.sums[labels] = self.sums.get(labels, 0.0) + total


@dataclass(frozen=True, slots=True)
class Gauge:
    """One gauge: its name, help and label names, how its values are read at scrape time, and what
    the values of several workers make together.
    """

    name: str
    help: str
    labels: Labels
    read: Callable[[], Iterable[tuple[Labels, float]]] = field(repr=False)
    together: Callable[[list[float]], float] = sum


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that one worker has counted, by metric name; rows of label values."""

    counters: dict[str, list[tuple[Labels, float]]]
    histograms: dict[str, list[tuple[Labels, list[int], float]]]
    gauges: dict[str, list[tuple[Labels, float]]]


class Metrics:
    """Counters of one gateway, and its `/metrics` text.

    `models` bounds the model label. `gauges` are read when somebody scrapes.
    """

    def __init__(self, *, models: Iterable[str]) -> None:
        self._models = frozenset(models)
        self._tenants: set[str] = set()
        self.gauges: list[Gauge] = []
        self.requests = Counts()
        self.met = Counts()
        self.misses = Counts()
        self.shed = Counts()
        self.sent = Counts()
        self.attempts = Counts()
        self.refusals = Counts()
        self.feedback = Counts()
        self.tokens = Histograms(TOKENS)
        self.duration = Histograms(DURATION)
        self.ttft = Histograms(FIRST_TOKEN)
        self.tpot = Histograms(PER_TOKEN)
        self.decision = Histograms(DECISION)
        self.ratio = Histograms(RATIO)
        self._counters = (
            ("sluice_requests", "Settled requests.", ("tenant", "class", "cause"), self.requests),
            ("sluice_slo_met", "Requests that met every limit.", ("class",), self.met),
            (
                "sluice_slo_missed",
                "Requests that missed a limit.",
                ("class", "reason"),
                self.misses,
            ),
            ("sluice_shed", "Requests refused.", ("class", "reason"), self.shed),
            ("sluice_sent", "Attempts sent.", ("replica",), self.sent),
            ("sluice_attempts", "Attempts ended.", ("replica", "cause"), self.attempts),
            ("sluice_refused", "Requests refused unread.", ("error",), self.refusals),
            ("sluice_feedback", "Answers judged by clients.", ("variant",), self.feedback),
        )
        model = "gen_ai_request_model"
        self._histograms = (
            (
                "gen_ai_server_request_duration_seconds",
                "Arrival to end.",
                ("gen_ai_operation_name", model, "error_type"),
                self.duration,
            ),
            (
                "gen_ai_server_time_to_first_token_seconds",
                "Arrival to first content byte.",
                (model,),
                self.ttft,
            ),
            (
                "gen_ai_server_time_per_output_token_seconds",
                "Mean time of a token after the first.",
                (model,),
                self.tpot,
            ),
            (
                "gen_ai_client_token_usage",
                "Tokens of a request.",
                (model, "gen_ai_token_type"),
                self.tokens,
            ),
            ("sluice_decision_seconds", "One event through the core.", ("event",), self.decision),
            (
                "sluice_ttft_actual_over_predicted",
                "Time from send to first token over its predicted median.",
                ("replica",),
                self.ratio,
            ),
        )

    def refused(self, error: str) -> None:
        """Count a request that was refused before the core saw it."""
        self.refusals.add((error,))

    def settled(self, outcome: Outcome, replica: str | None) -> None:
        """Count one settled request; `replica` is the name of the one that served it."""
        request = outcome.request
        model = request.model if request.model in self._models else OTHER
        cause = outcome.cause.value
        error = "" if outcome.cause is Cause.FINISHED else cause
        self.requests.add((self._tenant(request.tenant), request.class_name, cause))
        self.duration.observe(("chat", model, error), outcome.e2e)
        if outcome.met is not None:
            if outcome.met:
                self.met.add((request.class_name,))
            else:
                self.misses.add((request.class_name, outcome.miss.value))
        if outcome.cause is Cause.SHED:
            self.shed.add((request.class_name, outcome.reason))
        ttft, tpot, usage = outcome.ttft, outcome.tpot, outcome.usage
        if ttft is not None and request.stream:
            self.ttft.observe((model,), ttft)
            if replica is not None and outcome.sent is not None and outcome.prediction is not None:
                quantiles = outcome.prediction.ttft
                predicted = quantiles[len(quantiles) // 2] if quantiles else 0.0
                if predicted > 0:
                    actual = ttft - (outcome.sent - outcome.arrived)
                    self.ratio.observe((replica,), actual / predicted)
        if tpot is not None:
            self.tpot.observe((model,), tpot)
        if usage.source is not UsageSource.NONE:
            self.tokens.observe((model, "input"), usage.prompt)
            self.tokens.observe((model, "output"), usage.completion)

    def snapshot(self, *, counters_only: bool = False) -> Snapshot:
        """What this worker has counted, for another to add to its own."""
        gauges = () if counters_only else self.gauges
        return Snapshot(
            counters={name: list(c.values.items()) for name, _, _, c in self._counters},
            histograms={name: h.rows() for name, _, _, h in self._histograms},
            gauges={g.name: [(labels, float(v)) for labels, v in g.read()] for g in gauges},
        )

    def text(self, others: Sequence[Snapshot] = ()) -> bytes:
        """The Prometheus exposition text of this worker and the others together."""
        registry = CollectorRegistry()
        registry.register(_Families(list(self._families((self.snapshot(), *others)))))
        return generate_latest(registry)

    def _families(self, shots: Sequence[Snapshot]) -> Iterable[Metric]:
        """Everything, in the Prometheus library's terms."""
        for name, text, names, _ in self._counters:
            counts = Counts()
            for shot in shots:
                for labels, value in shot.counters.get(name, ()):
                    counts.add(labels, value)
            yield _counter(name, text, names, counts)
        for name, text, names, own in self._histograms:
            merged = Histograms(own.bounds)
            for shot in shots:
                merged.add(shot.histograms.get(name, ()))
            yield _histogram(name, text, names, merged)
        for gauge in self.gauges:
            values: dict[Labels, list[float]] = {}
            for shot in shots:
                for labels, value in shot.gauges.get(gauge.name, ()):
                    values.setdefault(labels, []).append(value)
            family = GaugeMetricFamily(gauge.name, gauge.help, labels=gauge.labels)
            for labels, several in values.items():
                family.add_metric(labels, gauge.together(several))
            yield family

    def _tenant(self, name: str) -> str:
        if name not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                return OTHER
            self._tenants.add(name)
        return name


class _Families:
    """Families that are ready, as a collector."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._ready = families

    def collect(self) -> Iterable[Metric]:
        """The families."""
        return self._ready


def _counter(name: str, text: str, names: Labels, counts: Counts) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=names)
    for labels, value in counts.values.items():
        family.add_metric(labels, value)
    return family


def _histogram(name: str, text: str, names: Labels, values: Histograms) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=names)
    for labels, buckets in values.buckets.items():
        total = 0
        rows = []
        for bound, count in zip((*values.bounds, float("inf")), buckets, strict=True):
            total += count
            rows.append((str(floatToGoString(bound)), float(total)))  # type: ignore[no-untyped-call]
        family.add_metric(labels, rows, values.sums[labels])
    return family
