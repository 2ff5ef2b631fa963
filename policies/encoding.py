"""What a learned policy sees: one encoder for serving and simulation (DESIGN section 2).

A request is a row of `REQUEST_FEATURES`, every route a row of `ROUTE_FEATURES`; no name or index of
a replica, so that a policy trained on one fleet reads another of any size. Own streams are looked
at one by one and summed up, other gateways' appear as the aggregates that late readings show.

Everything lies in [0, 1]: a quantity without a natural bound goes through x / (x + unit), so that
an absent limit (inf) is exactly 1. The loops are the core's: counts, sums and two divisions a
stream, no transcendental function.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
from numba import njit
from numpy.typing import NDArray

from domain.columns import Bools, EstimateColumns, FleetColumns, RequestColumns, Routes
from domain.length import QUANTILE_GRID
from policies.kernels import step_time

REQUEST_FEATURES = (
    "prompt", "expected", "ttft", "ttft_left", "tpot", "e2e", "e2e_left", "quality", "weight",
    "waited", "waiting", "routes", "open", *(f"length_q{k}" for k in range(len(QUANTILE_GRID))),
)  # fmt: skip
"""Tokens, limits as promised and what is left of them, floor, worth, how long it has waited, how
many wait, how many routes there are and which share of them has room, quantiles of its length."""

ROUTE_FEATURES = (
    "present", "allowed", "room", "own_running", "foreign_running", "kv", "resident", "backlog",
    "foreign_backlog", "age", "fixed", "per_sequence", "per_context", "per_token", "chunk", "price",
    "decoding", "late_alone", "late_joined", "tightest", "left", "quality", "cached", "sticky",
    "wait", "ttft", "tpot", "e2e", "pace", "p_slo",
)  # fmt: skip
"""Load (own and foreign), the profile, own streams (share that decodes; of those with a pace limit
the shares that miss it without and with the joiner, and the largest pace over its limit; tokens
left), and, where there is room, the predictions of this request there, TTFT, TPOT and E2E over what
is left of their limits."""

R, C = len(REQUEST_FEATURES), len(ROUTE_FEATURES)

SCHEMA = f"{zlib.crc32(' '.join((*REQUEST_FEATURES, '|', *ROUTE_FEATURES)).encode()):08x}"
"""Hash of the features in their order; artifacts of learned policies carry it."""

LEAST_LEFT = 8.0
"""Tokens that a stream past its expected length is still expected to run, as the marginal scorer
has it."""

Row = NDArray[np.float32]


@njit(cache=True, error_model="numpy")
def soft(x: float, unit: float) -> float:
    """The share x / (x + unit) for x >= 0: 0 at 0, one half at the unit, 1 at infinity."""
    if x == np.inf:
        return 1.0
    y: float = x / (x + unit)
    return y


@njit(cache=True, error_model="numpy")
def used(predicted: float, limit: float) -> float:
    """What a prediction uses of a limit: 0 without one, one half where they are equal, 1 where
    nothing is left.
    """
    if limit == np.inf:
        return 0.0
    if limit <= 0.0:
        return 1.0
    return soft(predicted / limit, 1.0)


@njit(cache=True, error_model="numpy")
def encode_request(
    requests: RequestColumns, i: int, room: Bools, waiting: float, now: float, out: Row
) -> None:
    """Request i into out (R,). `room` (c,): routes that have some; `waiting`: requests held."""
    waited = now - requests.arrived[i]
    out[0] = soft(requests.prompt[i], 1000.0)
    out[1] = soft(requests.expected[i], 200.0)
    out[2] = soft(requests.ttft[i], 0.5)
    out[3] = soft(max(requests.ttft[i] - waited, 0.0), 0.5)
    out[4] = soft(requests.tpot[i], 0.05)
    out[5] = soft(requests.e2e[i], 10.0)
    out[6] = soft(max(requests.e2e[i] - waited, 0.0), 10.0)
    out[7] = requests.quality[i]
    out[8] = soft(requests.weight[i], 1.0)
    out[9] = soft(waited, 1.0)
    out[10] = soft(waiting, 8.0)
    c = room.shape[0]
    free = 0
    for k in range(c):
        if room[k]:
            free += 1
    out[11] = soft(float(c), 8.0)
    out[12] = free / max(c, 1)
    for k in range(requests.length_q.shape[1]):
        out[13 + k] = soft(requests.length_q[i, k], 200.0)


@njit(cache=True, error_model="numpy")
def encode_route(
    requests: RequestColumns,
    fleet: FleetColumns,
    routes: Routes,
    estimates: EstimateColumns,
    i: int,
    c: int,
    allowed: bool,
    room: bool,
    now: float,
    out: Row,
) -> None:
    """Request i on route c into out (C,); predictions stand there only with `room`, else 0.

    Reads estimates of (i, c): cached, sticky, wait, p_slo, quality, ttft and tpot at the middle of
    the load grid.
    """
    d, p = routes.decode[c], routes.prefill[c]
    out[0] = 1.0
    out[1] = 1.0 if allowed else 0.0
    out[2] = 1.0 if room else 0.0
    out[3] = soft(fleet.running[d], 16.0)
    out[4] = soft(fleet.foreign_running[d], 16.0)
    out[5] = min((fleet.kv_used[d] + fleet.foreign_context[d]) / fleet.kv_capacity[d], 1.0)
    out[6] = min((fleet.context[d] + fleet.foreign_context[d]) / fleet.kv_capacity[d], 1.0)
    out[7] = soft(fleet.backlog_tokens[p] * fleet.per_token[p], 0.05)
    out[8] = soft(fleet.foreign_backlog[p] * fleet.per_token[p], 0.05)
    out[9] = soft(fleet.age[d], 0.5)
    fixed = fleet.overhead[d] + fleet.weights[d] + fleet.experts[d] / (1.0 + fleet.expert_tokens[d])
    out[10] = soft(fixed, 0.02)
    out[11] = soft(fleet.per_sequence[d], 5e-5)
    out[12] = soft(fleet.per_context[d], 1e-7)
    out[13] = soft(fleet.per_token[p], 1e-4)
    out[14] = soft(fleet.chunk[p], 1024.0)
    out[15] = soft(routes.price[c], 2.0)
    for k in range(16, C):
        out[k] = 0.0
    prompt, expected = requests.prompt[i], requests.expected[i]
    batch = fleet.running[d] + fleet.foreign_running[d]
    context = fleet.context[d] + fleet.foreign_context[d]
    alone = step_time(fleet, d, batch, context, 0.0, 0.0)
    joined = step_time(fleet, d, batch + 1.0, context + prompt + expected / 2.0, 0.0, 0.0)
    cached = estimates.cached[i, c]
    new = max(prompt - cached, 1.0)
    pause = 0.0
    if p == d:
        steps = math.ceil(new / fleet.chunk[d])
        pause = steps * (step_time(fleet, d, batch, context, new / steps, cached) - alone)
    n, decoding, limited, late, later = fleet.n_streams[d], 0, 0, 0, 0
    tightest, remaining = 0.0, 0.0
    for k in range(n):
        tokens = fleet.tokens[d, k]
        left = max(fleet.expected[d, k] - tokens, LEAST_LEFT)
        remaining += left
        spent = 0.0
        if tokens > 0.0:
            decoding += 1
            spent = now - fleet.first_at[d, k]
        limit = fleet.tpot_limit[d, k]
        if limit == np.inf:
            continue
        limited += 1
        budget = limit * max(tokens + left - 1.0, 1.0)
        need = spent + left * alone
        after = need + min(left, expected) * (joined - alone) + pause
        if need > budget:
            late += 1
        if after > budget:
            later += 1
        elif after > tightest * budget:
            tightest = after / budget
    if n > 0:
        out[16] = decoding / n
        out[20] = soft(remaining / n, 200.0)
    if limited > 0:
        out[17] = late / limited
        out[18] = later / limited
        out[19] = tightest
    if not room:
        return
    middle = estimates.ttft.shape[2] // 2
    waited = now - requests.arrived[i]
    ttft, tpot = estimates.ttft[i, c, middle], estimates.tpot[i, c, middle]
    out[21] = estimates.quality[i, c]
    out[22] = min(cached / max(prompt, 1.0), 1.0)
    out[23] = estimates.sticky[i, c]
    out[24] = soft(estimates.wait[i, c], 0.05)
    out[25] = used(ttft, requests.ttft[i] - waited)
    out[26] = used(tpot, requests.tpot[i])
    out[27] = used(ttft + max(expected - 1.0, 0.0) * tpot, requests.e2e[i] - waited)
    out[28] = soft(tpot, 0.05)
    out[29] = estimates.p_slo[i, c]
