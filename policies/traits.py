"""What a learned scorer sees of one (request, route): a dozen numbers, the same in every place.

Kernels compute them from columns, the decision core from an outcome, off-line jobs from a line of
the decision log; all three call `traits_into`. No replica's identity is among them, so what is
learned holds for any fleet size.
"""

from __future__ import annotations

from math import inf, log1p

import numpy as np
from numba import njit

from domain.columns import (
    Bools,
    EstimateColumns,
    FleetColumns,
    Floats,
    RequestColumns,
    Routes,
)
from domain.outcome import Outcome
from policies.names import MOST_SHARE, TRAITS

COUNT = len(TRAITS)


@njit(cache=True, error_model="numpy")
def share_of(value: float, limit: float) -> float:
    """Predicted / limit, at most `MOST_SHARE`; 0 without a limit."""
    if limit == inf:
        return 0.0
    return min(value / limit, MOST_SHARE)


@njit(cache=True, error_model="numpy")
def traits_into(
    x: Floats,
    p_slo: float,
    quality: float,
    ttft: float,
    tpot: float,
    expected: float,
    ttft_limit: float,
    tpot_limit: float,
    e2e_limit: float,
    running: float,
    backlog: float,
    cached: float,
    cost: float,
) -> None:
    """Write the traits into x (D,). `ttft` (s) counts from arrival, `tpot` in s per token,
    `expected` in tokens; limits inf where absent; `cached` a share.
    """
    e2e = ttft + max(expected - 1.0, 0.0) * tpot
    x[0] = 1.0
    x[1] = p_slo
    x[2] = quality
    x[3] = share_of(ttft, ttft_limit)
    x[4] = share_of(tpot, tpot_limit)
    x[5] = share_of(e2e, e2e_limit)
    x[6] = log1p(max(ttft, 0.0))
    x[7] = log1p(max(e2e, 0.0))
    x[8] = log1p(max(running, 0.0))
    x[9] = log1p(max(backlog, 0.0))
    x[10] = cached
    x[11] = log1p(max(cost, 0.0))


@njit(cache=True, error_model="numpy")
def work_cost(
    fleet: FleetColumns, d: int, p: int, price: float, new: float, prompt: float, expected: float
) -> float:
    """Price x seconds of work that `new` prompt tokens and `expected` output tokens bring to decode
    replica d and prefill replica p, as the marginal rule counts it.
    """
    work: float = new * fleet.per_token[p] + expected * (
        fleet.per_sequence[d]
        + fleet.per_token[d]
        + fleet.per_context[d] * (prompt + expected / 2.0)
    )
    return price * work


@njit(cache=True, error_model="numpy")
def seen_into(
    x: Floats,
    requests: RequestColumns,
    fleet: FleetColumns,
    routes: Routes,
    estimates: EstimateColumns,
    i: int,
    c: int,
    now: float,
) -> None:
    """The traits of request i on route c, from the core's columns, into x (D,)."""
    middle = estimates.ttft.shape[2] // 2
    d, p = routes.decode[c], routes.prefill[c]
    prompt, expected = requests.prompt[i], requests.expected[i]
    cached = estimates.cached[i, c]
    traits_into(
        x,
        estimates.p_slo[i, c],
        estimates.quality[i, c],
        now - requests.arrived[i] + estimates.ttft[i, c, middle],
        estimates.tpot[i, c, middle],
        expected,
        requests.ttft[i],
        requests.tpot[i],
        requests.e2e[i],
        fleet.running[d] + fleet.foreign_running[d],
        fleet.backlog_tokens[p] + fleet.foreign_backlog[p],
        cached / max(prompt, 1.0),
        work_cost(fleet, d, p, routes.price[c], max(prompt - cached, 1.0), prompt, expected),
    )


@njit(cache=True, error_model="numpy")
def outside(
    envelope: Floats,
    requests: RequestColumns,
    fleet: FleetColumns,
    routes: Routes,
    estimates: EstimateColumns,
    room: Bools,
    i: int,
    now: float,
) -> bool:
    """Whether any route that request i may take has a trait outside envelope (2, D), low and
    high, or one that is no number.
    """
    x = np.empty(envelope.shape[1])
    for c in range(room.shape[0]):
        if not room[c]:
            continue
        seen_into(x, requests, fleet, routes, estimates, i, c, now)
        for k in range(x.shape[0]):
            if not (envelope[0, k] <= x[k] <= envelope[1, k]):
                return True
    return False


def held(scores: Floats, hold: float) -> bool:
    """Whether a scorer rather lets a request wait: a time to look again, and no route (c,)."""
    return -np.inf < hold < np.inf and bool(np.isneginf(scores).all())


@njit(cache=True, error_model="numpy")
def sound(scores: Floats, room: Bools) -> bool:
    """Whether one request's scores (c,) can be chosen from: numbers wherever there is room, one of
    them finite.
    """
    some = False
    for c in range(room.shape[0]):
        if room[c]:
            if not scores[c] < np.inf:  # +inf or no number
                return False
            some |= scores[c] > -np.inf
    return some


def traits_of(outcome: Outcome, fleet: FleetColumns, routes: Routes) -> Floats | None:
    """The traits that the chosen route had when the request was decided; None if it never was.

    Agrees with what the kernel saw, but for the milliseconds between deciding and sending.
    """
    prediction, request = outcome.prediction, outcome.request
    if prediction is None or outcome.route is None or outcome.sent is None:
        return None
    x = np.empty(COUNT)
    middle = len(prediction.ttft) // 2
    slo, stream = request.slo, request.stream
    prompt = float(np.ceil(request.prompt_tokens))
    d, p = int(routes.decode[outcome.route]), int(routes.prefill[outcome.route])
    expected = prediction.length_mean
    new = max(prompt - prediction.cached, 1.0)
    price = float(routes.price[outcome.route])
    work = new * fleet.per_token.item(p) + expected * (
        fleet.per_sequence.item(d)
        + fleet.per_token.item(d)
        + fleet.per_context.item(d) * (prompt + expected / 2.0)
    )
    traits_into(
        x,
        prediction.p_slo,
        prediction.quality,
        outcome.sent - outcome.arrived + prediction.ttft[middle],
        prediction.tpot[middle],
        expected,
        slo.ttft if slo.ttft is not None and stream else inf,
        slo.tpot if slo.tpot is not None and stream else inf,
        slo.e2e if slo.e2e is not None else inf,
        prediction.running,
        prediction.backlog,
        prediction.cached / max(prompt, 1.0),
        price * work,
    )
    return x
