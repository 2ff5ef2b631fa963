"""Roofline latency: TTFT and TPOT of a request on a replica if it were added now, from the
replica's profile.

The baseline every learned latency model must beat, and where it falls back to. The step time is
that of `domain.fleet.Profile`; per-replica scales for prefill and decode correct it on line, and
one latent load quantile u per (request, replica) spreads TTFT and TPOT together (DESIGN section 5).
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numba import njit

from domain.columns import (
    LOAD_GRID,
    EstimateColumns,
    FleetColumns,
    Floats,
    Mask,
    RequestColumns,
    Routes,
)

_Z = np.array([NormalDist().inv_cdf(float(u)) for u in LOAD_GRID])

PREFILL, FIXED, SLOPE, SPREAD_TTFT, SPREAD_TPOT = range(5)
"""Rows of `OnlineScales`."""

PRIOR_VARIANCE = 1.0
"""Of the logs of the factors on a step before anything was learned."""

STEP_NOISE = 0.3
"""Standard deviation of the log of one stream's pace."""

DRIFT = 0.001
"""Variance that the logs of the factors gain between two outcomes: what was learned goes stale."""

RATE = 0.1
"""Weight of a new outcome in the running scales."""

CLIP = 1.5
"""Largest step of one outcome, in log units: one outlier does not turn a scale over."""


class Loads(NamedTuple):
    """The columns of a fleet that the roofline reads, (m,): a call costs by the arrays it is
    handed.
    """

    overhead: Floats
    weights: Floats
    per_sequence: Floats
    per_context: Floats
    per_token: Floats
    per_attention: Floats
    experts: Floats
    expert_tokens: Floats
    chunk: Floats
    running: Floats
    context: Floats
    backlog_tokens: Floats
    foreign_running: Floats
    foreign_context: Floats
    foreign_backlog: Floats


def loads_of(fleet: FleetColumns) -> Loads:
    """Those columns; the same arrays."""
    return Loads(*(getattr(fleet, name) for name in Loads._fields))


@njit(cache=True, error_model="numpy")
def step_time(
    fleet: FleetColumns | Loads, r: int, batch: float, context: float, prefill: float, cached: float
) -> float:
    """Seconds of one engine step of replica r; `prefill` new tokens after `cached` ones."""
    tokens = batch + prefill
    memory = fleet.weights[r] + fleet.per_context[r] * context
    compute = fleet.per_token[r] * tokens
    compute += fleet.per_attention[r] * prefill * (cached + prefill / 2.0)
    fixed = fleet.overhead[r] + fleet.per_sequence[r] * batch
    fixed += fleet.experts[r] * tokens / (tokens + fleet.expert_tokens[r])
    step: float = fixed + max(memory, compute)
    return step


@njit(cache=True, error_model="numpy")
def prefill_time(fleet: FleetColumns | Loads, r: int, tokens: float, cached: float) -> float:
    """Seconds until `tokens` prompt tokens are through replica r's chunked prefill beside its
    running batch.
    """
    if tokens <= 0.0:
        return 0.0
    batch = fleet.running[r] + fleet.foreign_running[r]
    context = fleet.context[r] + fleet.foreign_context[r]
    steps = math.ceil(tokens / fleet.chunk[r])
    total: float = steps * step_time(fleet, r, batch, context, tokens / steps, cached)
    return total


@njit(cache=True, error_model="numpy")
def roofline_into(
    requests: RequestColumns,
    fleet: FleetColumns | Loads,
    routes: Routes,
    mask: Mask,
    scales: Floats,
    now: float,
    out: EstimateColumns,
) -> None:
    """TTFT and TPOT quantiles (n, c, U) in seconds, the wait, and the raw joint P(SLO) on the (u,
    L) grid.

    `scales` (5, m) are the rows of `OnlineScales`. P = mean over u and length quantiles of
    1[TTFT, TPOT and E2E = waited + TTFT + (L - 1) TPOT within their limits].
    """
    us = out.ttft.shape[2]
    qs = requests.length_q.shape[1]
    # replicas of one spread have the same factors: exp is half of the time here
    factors = np.empty((2, us))
    spread_ttft, spread_tpot = np.nan, np.nan
    for i in range(mask.shape[0]):
        waited = now - requests.arrived[i]
        bounded = requests.e2e[i] < np.inf
        for c in range(mask.shape[1]):
            if not mask[i, c]:
                continue
            d, p = routes.decode[c], routes.prefill[c]
            new = max(requests.prompt[i] - out.cached[i, c], 1.0)
            queued = max(fleet.backlog_tokens[p] + fleet.foreign_backlog[p], 0.0)
            wait = scales[PREFILL, p] * prefill_time(fleet, p, queued, 0.0)
            total = scales[PREFILL, p] * prefill_time(fleet, p, queued + new, out.cached[i, c])
            batch = fleet.running[d] + fleet.foreign_running[d] + 1.0
            context = fleet.context[d] + fleet.foreign_context[d]
            context += requests.prompt[i] + requests.expected[i] / 2.0
            alone = step_time(fleet, d, 1.0, context, 0.0, 0.0)
            shared = step_time(fleet, d, batch, context, 0.0, 0.0) - alone
            pace = scales[FIXED, d] * alone + scales[SLOPE, d] * shared
            out.wait[i, c] = wait
            if scales[SPREAD_TTFT, d] != spread_ttft or scales[SPREAD_TPOT, d] != spread_tpot:
                spread_ttft, spread_tpot = scales[SPREAD_TTFT, d], scales[SPREAD_TPOT, d]
                for u in range(us):
                    factors[0, u] = math.exp(spread_ttft * _Z[u])
                    factors[1, u] = math.exp(spread_tpot * _Z[u])
            met = 0
            for u in range(us):
                ttft = total * factors[0, u]
                tpot = pace * factors[1, u]
                out.ttft[i, c, u] = ttft
                out.tpot[i, c, u] = tpot
                if waited + ttft > requests.ttft[i] or tpot > requests.tpot[i]:
                    continue
                if not bounded:
                    met += qs
                    continue
                for k in range(qs):
                    length = max(requests.length_q[i, k] - 1.0, 0.0)
                    if waited + ttft + length * tpot <= requests.e2e[i]:
                        met += 1
            out.p_raw[i, c] = met / (us * qs)


class OnlineScales:
    """Per-replica factors on the roofline, and the spread of what is left; one column a replica.

    `rows` (5, m): factor on prefill times, on the part of a step that a stream alone would take, on
    what the batch adds to it, and the standard deviations of log(actual / predicted) of TTFT and
    TPOT. Updated once per outcome, never per look. The logs of the two factors of a step are
    tracked by an extended Kalman filter of a random walk: d log(pace) / d log(factor) is the
    factor's share of the pace.
    """

    def __init__(self, uncertainty: Floats) -> None:
        m = len(uncertainty)
        self.rows = np.ones((5, m))
        self.rows[SPREAD_TTFT] = uncertainty
        self.rows[SPREAD_TPOT] = uncertainty
        self._seen = [0.0] * m
        self._covariance = [(PRIOR_VARIANCE, 0.0, PRIOR_VARIANCE)] * m

    def copy_from(self, other: OnlineScales, theirs: int, ours: int) -> None:
        """Take over what another set of scales learned about one replica."""
        self.rows[:, ours] = other.rows[:, theirs]
        self._seen[ours] = other._seen[theirs]
        self._covariance[ours] = other._covariance[theirs]

    def learn_ttft(self, replica: int, predicted: float, actual: float) -> None:
        """One first token: predicted median and actual, both in seconds from the decision."""
        if predicted <= 0 or actual <= 0:
            return
        error = _clipped(actual / predicted)
        rate = max(RATE, 1.0 / (2.0 + self._seen[replica]))
        self.rows[PREFILL, replica] = self.rows.item(PREFILL, replica) * math.exp(rate * error)
        self._seen[replica] += 1.0
        self._learn_spread(SPREAD_TTFT, replica, error)

    def learn_tpot(
        self, replica: int, alone: float, shared: float, predicted: float, actual: float
    ) -> None:
        """One finished stream: seconds per token that the profile gives a stream alone, what the
        batch adds to it, the median that was predicted, and the actual.
        """
        if predicted <= 0 or actual <= 0 or alone <= 0:
            return
        self._learn_spread(SPREAD_TPOT, replica, _clipped(actual / predicted))
        fixed, slope = self.rows.item(FIXED, replica), self.rows.item(SLOPE, replica)
        pace = fixed * alone + slope * shared
        x0 = fixed * alone / pace
        x1 = 1.0 - x0
        p00, p01, p11 = self._covariance[replica]
        g0, g1 = p00 * x0 + p01 * x1, p01 * x0 + p11 * x1
        total = STEP_NOISE**2 + x0 * g0 + x1 * g1
        error = _clipped(actual / pace)
        self.rows[FIXED, replica] = fixed * math.exp(g0 / total * error)
        self.rows[SLOPE, replica] = slope * math.exp(g1 / total * error)
        self._covariance[replica] = (
            min(p00 - g0 * g0 / total + DRIFT, PRIOR_VARIANCE),
            p01 - g0 * g1 / total,
            min(p11 - g1 * g1 / total + DRIFT, PRIOR_VARIANCE),
        )

    def _learn_spread(self, row: int, replica: int, error: float) -> None:
        spread = self.rows.item(row, replica)
        variance = spread * spread + 0.05 * (error * error - spread * spread)
        self.rows[row, replica] = min(max(math.sqrt(variance), 0.05), 1.5)


def _clipped(ratio: float) -> float:
    return min(max(math.log(ratio), -CLIP), CLIP)
