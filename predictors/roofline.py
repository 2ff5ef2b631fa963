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

TPOT_SPREAD = 0.6
"""How much of the load spread reaches TPOT: it averages over many steps, TTFT over few."""

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
    memory = fleet.weights[r] + fleet.per_context[r] * context
    compute = fleet.per_token[r] * (batch + prefill)
    compute += fleet.per_attention[r] * prefill * (cached + prefill / 2.0)
    step: float = fleet.overhead[r] + fleet.per_sequence[r] * batch + max(memory, compute)
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
    prefill_scale: Floats,
    decode_scale: Floats,
    spread: Floats,
    now: float,
    out: EstimateColumns,
) -> None:
    """TTFT and TPOT quantiles (n, c, U) in seconds, the wait, and the raw joint P(SLO) on the (u,
    L) grid.

    `prefill_scale`, `decode_scale` and `spread` (sd of the log) are (m,). P = mean over u and
    length quantiles of 1[TTFT, TPOT and E2E = waited + TTFT + (L - 1) TPOT within their limits].
    """
    us = out.ttft.shape[2]
    qs = requests.length_q.shape[1]
    for i in range(mask.shape[0]):
        waited = now - requests.arrived[i]
        for c in range(mask.shape[1]):
            if not mask[i, c]:
                continue
            d, p = routes.decode[c], routes.prefill[c]
            new = max(requests.prompt[i] - out.cached[i, c], 1.0)
            queued = max(fleet.backlog_tokens[p] + fleet.foreign_backlog[p], 0.0)
            wait = prefill_scale[p] * prefill_time(fleet, p, queued, 0.0)
            total = prefill_scale[p] * prefill_time(fleet, p, queued + new, out.cached[i, c])
            batch = fleet.running[d] + fleet.foreign_running[d] + 1.0
            context = fleet.context[d] + fleet.foreign_context[d]
            context += requests.prompt[i] + requests.expected[i] / 2.0
            pace = decode_scale[d] * step_time(fleet, d, batch, context, 0.0, 0.0)
            out.wait[i, c] = wait
            met = 0
            for u in range(us):
                ttft = total * math.exp(spread[d] * _Z[u])
                tpot = pace * math.exp(TPOT_SPREAD * spread[d] * _Z[u])
                out.ttft[i, c, u] = ttft
                out.tpot[i, c, u] = tpot
                if waited + ttft > requests.ttft[i] or tpot > requests.tpot[i]:
                    continue
                for k in range(qs):
                    length = max(requests.length_q[i, k] - 1.0, 0.0)
                    if waited + ttft + length * tpot <= requests.e2e[i]:
                        met += 1
            out.p_raw[i, c] = met / (us * qs)


class OnlineScales:
    """Per-replica factors on the roofline's prefill and decode times, and the spread of what is
    left.

    Shapes: every array is (m,). Updated once per outcome (never per look), in log space.
    """

    def __init__(self, uncertainty: Floats) -> None:
        m = len(uncertainty)
        self.prefill = np.ones(m)
        self.decode = np.ones(m)
        self.spread = uncertainty.copy()
        self._seen = [0.0] * m

    def copy_from(self, other: OnlineScales, theirs: int, ours: int) -> None:
        """Take over what another set of scales learned about one replica."""
        self.prefill[ours] = other.prefill[theirs]
        self.decode[ours] = other.decode[theirs]
        self.spread[ours] = other.spread[theirs]
        self._seen[ours] = other._seen[theirs]

    def learn_ttft(self, replica: int, predicted: float, actual: float) -> None:
        """One first token: predicted median and actual, both in seconds from the decision."""
        if predicted <= 0 or actual <= 0:
            return
        error = math.log(actual / predicted)
        rate = max(RATE, 1.0 / (2.0 + self._seen[replica]))
        step = math.exp(rate * min(max(error, -CLIP), CLIP))
        self.prefill[replica] = self.prefill.item(replica) * step
        self._seen[replica] += 1.0
        variance = self.spread.item(replica) ** 2
        variance += 0.05 * (min(error * error, CLIP * CLIP) - variance)
        self.spread[replica] = min(max(math.sqrt(variance), 0.05), 1.5)

    def learn_tpot(self, replica: int, predicted: float, actual: float) -> None:
        """One finished stream: predicted median and actual seconds per token."""
        if predicted <= 0 or actual <= 0:
            return
        error = math.log(actual / predicted)
        step = math.exp(RATE * min(max(error, -CLIP), CLIP))
        self.decode[replica] = self.decode.item(replica) * step
