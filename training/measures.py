"""What a run is measured by, exactly as DESIGN section 11 says; a run is columns, one row a
request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.scenario import Case
from training.traces import Floats, Ints

Bools = NDArray[np.bool_]

MISSED, MET, OUT, ABSENT = 0, 1, 2, 3
"""Verdicts: a miss, all limits met, left the denominator, never arrived (its session had ended)."""
OUTPUT_WEIGHT = 5.0
"""Work of an output token in prompt tokens."""
SLICE_MIN = 300
"""Arrivals below which a slice is too small to be judged."""
SLICE_SLACK = 0.05
"""How far a slice may fall below the target."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """n requests as they went. Times in seconds, nan where the event never came; `replica` counts
    only where `sent` is a number.
    """

    arrival: Floats
    sent: Floats
    first: Floats
    last: Floats
    replica: Ints
    cached: Ints
    verdict: NDArray[np.int8]
    busy: Floats
    """(m,) seconds each replica worked."""
    preemptions: int = 0
    seconds: float = 0.0
    """CPU seconds the run took."""
    decision_seconds: float = 0.0
    """Of them, inside the decision core."""

    @property
    def ttft(self) -> Floats:
        """Seconds from arrival to the first token."""
        return self.first - self.arrival

    def tpot(self, output: Ints) -> Floats:
        """Seconds per token after the first, nan for a single one."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(output > 1, (self.last - self.first) / (output - 1), np.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run in numbers. Rates per second, times in seconds, shares in [0, 1]."""

    scenario: str
    policy: str
    rate: float
    seed: int
    arrivals: int
    attainment: float
    by_work: Mapping[str, float]
    """Work-weighted attainment for w = 1, 5, 10."""
    goodput: float
    size_fair_goodput: float
    slices: Mapping[str, float]
    """Attainment of every quartile, class and tenant with enough arrivals."""
    worst_slice: float
    ttft: Mapping[str, float]
    tpot: Mapping[str, float]
    shed: float
    lost: float
    largest_share: float
    jain: float
    cost_per_good: float
    joules_per_good: float
    preemptions: int
    cached_share: float
    requests_per_cpu_second: float
    microseconds_per_decision: float
    extra: Mapping[str, Any] = field(default_factory=dict)

    def fair_at(self, target: float) -> bool:
        """Whether this rate counts for size-fair goodput at `target`: attainment by work reaches it
        and no slice is more than 5 points below.
        """
        return self.by_work["5"] >= target and self.worst_slice >= target - SLICE_SLACK


def fair(report: Report) -> float:
    """Work-weighted attainment, or the worst slice's plus its slack if that is less: at least X
    exactly where the rate counts for size-fair goodput@X (DESIGN section 11).
    """
    return min(report.by_work["5"], report.worst_slice + SLICE_SLACK)


def weighted(met: Bools, work: Floats) -> float:
    """Share of the work whose limits were met."""
    total = float(work.sum())
    return float(work[met].sum()) / total if total > 0 else 1.0


def slices(case: Case, counted: Bools, met: Bools) -> dict[str, float]:
    """Attainment of prompt quartiles, classes and tenants with `SLICE_MIN` arrivals or more."""
    trace, found = case.trace, {}
    prompt = trace.prompt[counted]
    if len(prompt) == 0:
        return {}
    edges = np.quantile(prompt, [0.25, 0.5, 0.75])
    quartile = np.searchsorted(edges, trace.prompt, side="right")
    groups = [(f"prompt q{k + 1}", quartile == k) for k in range(4)]
    groups += [(f"class {c}", trace.class_id == k) for k, c in enumerate(trace.classes)]
    groups += [(f"tenant {t}", trace.tenant_id == k) for k, t in enumerate(trace.tenants)]
    for name, members in groups:
        mine = members & counted
        if mine.sum() >= SLICE_MIN:
            found[name] = float(met[mine].mean())
    return found


def settled(case: Case) -> Bools:
    """(n,) requests after the scenario's `warmup`, or after a quarter of a short trace."""
    n = len(case.trace)
    return np.arange(n) >= min(case.scenario.warmup, n // 4)


def work_of(case: Case, w: float) -> Floats:
    """(n,) prompt + w x output tokens."""
    return case.trace.prompt + w * case.trace.output.astype(np.float64)


def measure(case: Case, run: Run, policy: str) -> Report:
    """The report of a run; the scenario's first `warmup` requests are left out."""
    trace = case.trace
    late = settled(case)
    counted = late & ((run.verdict == MET) | (run.verdict == MISSED))
    met = run.verdict == MET
    served = counted & np.isfinite(run.last)
    span = max(float(run.arrival[late].max() - run.arrival[late].min()), 1e-9)
    n = int(counted.sum())
    work = {w: work_of(case, w) for w in (1.0, 5.0, 10.0)}
    good = counted & met
    by_slice = slices(case, counted, met)
    share = np.bincount(run.replica[np.isfinite(run.sent)], minlength=len(case.fleet.replicas))
    per_tenant = np.array(
        [met[counted & (trace.tenant_id == k)].mean() for k in range(len(trace.tenants))
         if (counted & (trace.tenant_id == k)).any()]
    )  # fmt: skip
    whole = max(float((met & (run.verdict == MET)).sum()), 1.0)
    price = np.array([r.profile.price for r in case.fleet.replicas])
    power = np.array([r.profile.power for r in case.fleet.replicas])
    attainment = float(met[counted].mean()) if n else 1.0
    fair = weighted(met[counted], work[5.0][counted])
    sent = np.isfinite(run.sent)
    return Report(
        scenario=case.scenario.name,
        policy=policy,
        rate=case.rate,
        seed=case.seed,
        arrivals=n,
        attainment=attainment,
        by_work={f"{w:g}": weighted(met[counted], work[w][counted]) for w in work},
        goodput=float(good.sum()) / span,
        size_fair_goodput=fair * n / span,
        slices=by_slice,
        worst_slice=min(by_slice.values(), default=attainment),
        ttft=_quantiles(run.ttft[served]),
        tpot=_quantiles(run.tpot(trace.output)[served]),
        shed=float((counted & ~np.isfinite(run.sent)).sum()) / max(n, 1),
        lost=float((counted & sent & ~np.isfinite(run.last)).sum()) / max(n, 1),
        largest_share=float(share.max()) / max(float(share.sum()), 1.0),
        jain=float(per_tenant.sum() ** 2 / max(len(per_tenant) * (per_tenant**2).sum(), 1e-12))
        if len(per_tenant)
        else 1.0,
        cost_per_good=float((run.busy * price).sum()) / whole,
        joules_per_good=float((run.busy * power).sum()) / whole,
        preemptions=run.preemptions,
        cached_share=float(run.cached[sent].sum()) / max(float(trace.prompt[sent].sum()), 1.0),
        requests_per_cpu_second=len(trace) / run.seconds if run.seconds > 0 else 0.0,
        microseconds_per_decision=1e6 * run.decision_seconds / max(len(trace), 1),
    )


def _quantiles(values: Floats) -> dict[str, float]:
    """Mean, P50, P90 and P99; nan where there is nothing."""
    known = values[np.isfinite(values)]
    if len(known) == 0:
        return dict.fromkeys(("mean", "p50", "p90", "p99"), float("nan"))
    p50, p90, p99 = np.quantile(known, [0.5, 0.9, 0.99]).tolist()
    return {"mean": float(known.mean()), "p50": p50, "p90": p90, "p99": p99}
