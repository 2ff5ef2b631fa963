"""Marginal goodput: how many more requests meet all their limits if this one goes there.

    value = worth of the request x P(all its limits are met here)
          - what the requests already running there are expected to lose if it joins
          - price of the work it brings

Own streams are known one by one (the gateway counts their tokens), foreign ones only as a number.
The unit is `value`, so requests compare: with several waiting, the pair worth most goes first.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import numpy as np
from numba import njit

from domain.columns import (
    Draws,
    EstimateColumns,
    FleetColumns,
    Mask,
    Params,
    RequestColumns,
    Routes,
    Scores,
)
from policies.kernels import step_time
from policies.scorers.kernel_scorer import KernelScorer
from policies.traits import work_cost

OUTPUT_WEIGHT = 5.0
"""Work of an output token in prompt tokens (DESIGN section 11)."""

SIZE_UNIT = 1000.0
"""Work, in prompt tokens, of a request that counts as one when `size` is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginalParams:
    """The scorer's parameters, in the order of its flat vector.

    `loss`: weight of limits lost by others, 1 if they count as much as the request itself. `price`:
    value that one unit of price (route price x seconds of engine time) costs. `sharpness`: how
    steeply a stream's chance falls as its predicted pace crosses its limit; the logistic of
    `sharpness` x (predicted / limit - 1). `least_left`: tokens that a stream past its expected
    length is still expected to run. `foreign_tpot`: limit assumed for other gateways' streams,
    seconds per token; 0 assumes the request's own. `size`: requests, and the streams they harm, are
    worth (work / 1000 prompt tokens) ** `size`: 0 counts heads, 1 counts work. `hold_above`: a
    request is held back while joining even its best route costs others more than this share of its
    own worth. `hold_until`: share of its TTFT limit by which that ends; 0 never holds.
    """

    loss: float = 1.0
    price: float = 0.05
    sharpness: float = 12.0
    least_left: float = 8.0
    foreign_tpot: float = 0.0
    size: float = 0.0
    hold_above: float = 0.4
    hold_until: float = 0.0


@njit(cache=True, error_model="numpy")
def _kept(ratio: float, sharpness: float) -> float:
    """P(a limit is met) when the prediction is `ratio` times the limit."""
    return 1.0 / (1.0 + math.exp(min(sharpness * (ratio - 1.0), 500.0)))


@njit(cache=True, error_model="numpy")
def stream_chance(
    fleet: FleetColumns,
    r: int,
    k: int,
    left: float,
    step: float,
    pause: float,
    sharpness: float,
    now: float,
) -> float:
    """P(stream k of replica r meets TPOT and E2E) if its `left` tokens take `step` seconds each and
    `pause` once.
    """
    tokens = fleet.tokens[r, k]
    rest = left * step + pause
    chance = 1.0
    limit = fleet.tpot_limit[r, k]
    if limit < np.inf:
        spent = now - fleet.first_at[r, k] if tokens > 0.0 else 0.0
        pace = (spent + rest) / max(tokens + left - 1.0, 1.0)
        chance *= _kept(pace / limit, sharpness)
    deadline = fleet.e2e_deadline[r, k]
    if deadline < np.inf:
        chance *= _kept(rest / max(deadline - now, 1e-9), sharpness)
    return chance


@njit(cache=True, error_model="numpy")
def losses_if_joined(
    params: Params,
    fleet: FleetColumns,
    r: int,
    expected: float,
    before: float,
    after: float,
    pause: float,
    now: float,
) -> float:
    """Expected limits lost among own streams of replica r if a request of `expected` output tokens
    joins.

    `before` and `after` are seconds per step without and with it, `pause` what its prefill adds
    once. The joiner slows a stream for as many steps as both run. Streams that can lose nothing any
    more (first token late or missed) count 0.
    """
    lost = 0.0
    for k in range(fleet.n_streams[r]):
        if fleet.tpot_limit[r, k] == np.inf and fleet.e2e_deadline[r, k] == np.inf:
            continue
        tokens = fleet.tokens[r, k]
        began = fleet.first_at[r, k] if tokens > 0.0 else now
        if began > fleet.ttft_deadline[r, k]:
            continue
        left = max(fleet.expected[r, k] - tokens, params[3])
        alone = stream_chance(fleet, r, k, left, before, 0.0, params[2], now)
        extra = min(left, expected) * (after - before) + pause
        joined = stream_chance(fleet, r, k, left, before, extra, params[2], now)
        worth = 1.0
        if params[5] != 0.0:
            worth = size(fleet.prompt[r, k], tokens + left, params[5])
        lost += worth * (alone - joined)
    return lost


@njit(cache=True, error_model="numpy")
def size(prompt: float, output: float, power: float) -> float:
    """Worth of a request by its work, (prompt + 5 x output) / 1000 to the `power`."""
    worth: float = ((prompt + OUTPUT_WEIGHT * output) / SIZE_UNIT) ** power
    return worth


@njit(cache=True, error_model="numpy")
def worth_of(params: Params, requests: RequestColumns, i: int) -> float:
    """What request i is worth: its class's weight, times its size where that counts."""
    worth: float = requests.weight[i]
    if params[5] != 0.0:
        worth *= size(requests.prompt[i], requests.expected[i], params[5])
    return worth


@njit(error_model="numpy", inline="always")
def route_value(
    params: Params,
    requests: RequestColumns,
    fleet: FleetColumns,
    routes: Routes,
    estimates: EstimateColumns,
    i: int,
    c: int,
    worth: float,
    now: float,
) -> tuple[float, float, float]:
    """(value, limits that others are expected to lose, price x seconds of work) of request i, worth
    so much, on route c.
    """
    middle = estimates.ttft.shape[2] // 2
    prompt, expected = requests.prompt[i], requests.expected[i]
    d, p = routes.decode[c], routes.prefill[c]
    batch = fleet.running[d] + fleet.foreign_running[d]
    context = fleet.context[d] + fleet.foreign_context[d]
    cached = estimates.cached[i, c]
    new = max(prompt - cached, 1.0)
    alone = step_time(fleet, d, batch, context, 0.0, 0.0)
    joined = step_time(fleet, d, batch + 1.0, context + prompt + expected / 2.0, 0.0, 0.0)
    after = estimates.tpot[i, c, middle]
    scale = after / joined
    before = scale * alone
    pause = 0.0
    if p == d:
        steps = math.ceil(new / fleet.chunk[d])
        pause = scale * steps * (step_time(fleet, d, batch, context, new / steps, cached) - alone)
    lost = losses_if_joined(params, fleet, d, expected, before, after, pause, now)
    foreign = fleet.foreign_running[d]
    limit = params[4] if params[4] > 0.0 else requests.tpot[i]
    if foreign > 0.0 and limit < np.inf:
        half = max(expected / 2.0, params[3])
        slower = before + (half * (after - before) + pause) / (2.0 * half)
        harm = _kept(before / limit, params[2]) - _kept(slower / limit, params[2])
        if params[5] != 0.0:
            harm *= size(prompt, expected, params[5])
        lost += foreign * harm
    cost = work_cost(fleet, d, p, routes.price[c], new, prompt, expected)
    value = worth * estimates.p_slo[i, c] - params[0] * lost - params[1] * cost
    return value, lost, cost


@njit(cache=True, error_model="numpy")
def idle(fleet: FleetColumns, d: int) -> bool:
    """Whether nothing runs on replica d."""
    none: bool = fleet.running[d] + fleet.foreign_running[d] <= 0.0
    return none


@njit(cache=True, error_model="numpy")
def hold_back(end: float, mask: Mask, i: int, now: float, out: Scores) -> None:
    """Take every route from request i until `end` at the latest, in s; not where there is no end.
    Whatever happens to the fleet until then, it is scored again.
    """
    if now < end < np.inf:
        out.hold[i] = end
        for c in range(mask.shape[1]):
            if mask[i, c]:
                out.route[i, c] = -np.inf


@njit(cache=True, error_model="numpy")
def marginal_kernel(
    params: Params,
    requests: RequestColumns,
    fleet: FleetColumns,
    routes: Routes,
    estimates: EstimateColumns,
    mask: Mask,
    draws: Draws,
    now: float,
    out: Scores,
) -> None:
    """Worth x P(SLO) - params.loss x losses - params.price x route price x seconds of work; and who
    is held back, which nobody is who could have an idle replica.

    params: `MarginalParams`. The step time after joining is the estimated median TPOT, so whatever
    the estimator has learned about the replica scales the losses as well. A foreign stream stands
    half way through an answer like this request's, at the present pace.
    """
    for i in range(mask.shape[0]):
        worth = worth_of(params, requests, i)
        best, harm, free = -np.inf, 0.0, False
        for c in range(mask.shape[1]):
            if not mask[i, c]:
                continue
            free |= idle(fleet, routes.decode[c])
            value, lost, _ = route_value(
                params, requests, fleet, routes, estimates, i, c, worth, now
            )
            out.route[i, c] = value
            if value > best:
                best, harm = value, params[0] * lost
        if params[7] > 0.0 and not free and best > -np.inf and harm > params[6] * worth:
            hold_back(requests.arrived[i] + params[7] * requests.ttft[i], mask, i, now, out)


def marginal(params: MarginalParams | None = None) -> KernelScorer:
    """The scorer with these parameters."""
    return KernelScorer(
        name="marginal",
        kernel=marginal_kernel,
        unit="value",
        needs_estimates=True,
        params=np.array(astuple(params if params is not None else MarginalParams())),
    )
