"""The learned set scorer: marginal goodput plus a bounded residual, and when rather to wait.

    score = marginal + worth x bounded(sum over traits k and contexts j of W[k, j] x_k z_j)

The same weights for every candidate, no replica's identity, and what all of them show pooled into
the context: any fleet size. With all weights zero it *is* the marginal rule, bit for bit; however
wrong the weights are, no score moves by more than `reach` requests.

Holding back is the rule's: while joining even its best route costs others more than a share of its
own worth a request waits, as long as the rule lets it. The share here is `hold_above` plus what its
contexts add: how tight and how long it is, what the fleet runs, how much of its TTFT limit is gone,
and P(SLO) on that route. `training.train_es` fits the 48 weights, the 5 of holding, and the rule's
constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple

import numpy as np
from numba import njit

from domain.columns import (
    Draws,
    EstimateColumns,
    FleetColumns,
    Floats,
    Mask,
    Params,
    RequestColumns,
    Routes,
    Scores,
)
from policies.encoding import soft, used
from policies.names import ACTOR_CONTEXTS, ACTOR_TRAITS, HOLD_CONTEXTS
from policies.scorers.kernel_scorer import KernelScorer
from policies.scorers.marginal import MarginalParams, hold_back, idle, route_value, worth_of

RULE = len(astuple(MarginalParams()))
"""Numbers of the marginal rule; then come `reach`, the hold weights, and W row by row."""
J, K = len(ACTOR_CONTEXTS), len(ACTOR_TRAITS)
HOLD_AT = RULE + 1
WEIGHTS_AT = HOLD_AT + len(HOLD_CONTEXTS)


@njit(cache=True, error_model="numpy")
def contexts_into(z: Floats, requests: RequestColumns, i: int, pressure: float) -> None:
    """The contexts of request i into z (J,): one, how tight its pace is, how long its answer,
    `pressure` (what the whole fleet runs).
    """
    z[0] = 1.0
    z[1] = 1.0 - soft(requests.tpot[i], 0.05)
    z[2] = soft(requests.expected[i], 200.0)
    z[3] = pressure


@njit(cache=True, error_model="numpy")
def traits_of_route(
    x: Floats,
    requests: RequestColumns,
    fleet: FleetColumns,
    estimates: EstimateColumns,
    i: int,
    c: int,
    d: int,
    p: int,
    lost: float,
    cost: float,
    now: float,
) -> None:
    """The traits of request i on route c (decode replica d, prefill replica p) into x (K,), each in
    [0, 1]. `lost` limits that others are expected to lose; `cost` price x seconds of work.
    """
    middle = estimates.ttft.shape[2] // 2
    waited = now - requests.arrived[i]
    ttft, tpot = estimates.ttft[i, c, middle], estimates.tpot[i, c, middle]
    e2e = ttft + max(requests.expected[i] - 1.0, 0.0) * tpot
    limit = requests.tpot[i]
    tighter = 0
    for k in range(fleet.n_streams[d]):
        if fleet.tpot_limit[d, k] < limit:
            tighter += 1
    batch = fleet.running[d] + fleet.foreign_running[d]
    x[0] = 1.0
    x[1] = estimates.p_slo[i, c]
    x[2] = soft(lost, 1.0)
    x[3] = soft(cost, 1.0)
    x[4] = used(ttft, requests.ttft[i] - waited)
    x[5] = used(tpot, limit)
    x[6] = used(e2e, requests.e2e[i] - waited)
    x[7] = soft(batch, 16.0)
    x[8] = soft((fleet.backlog_tokens[p] + fleet.foreign_backlog[p]) * fleet.per_token[p], 0.05)
    x[9] = soft(fleet.overhead[d] + fleet.weights[d], 0.02)
    x[10] = tighter / max(fleet.n_streams[d], 1)
    x[11] = soft(fleet.foreign_running[d], 16.0)


@njit(cache=True, error_model="numpy")
def bounded(r: float, reach: float) -> float:
    """About r near zero, never beyond +-reach."""
    y: float = r / (1.0 + abs(r) / reach)
    return y


@njit(cache=True, error_model="numpy")
def actor_kernel(
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
    """The marginal rule's scores plus the residual, and who is held back.

    params: `MarginalParams`, reach, hold (H,), W (K x J).
    """
    rule = params[:RULE]
    reach, count = params[RULE], routes.decode.shape[0]
    pressure = 0.0
    for c in range(count):
        d = routes.decode[c]
        pressure += soft(fleet.running[d] + fleet.foreign_running[d], 16.0)
    pressure /= max(count, 1)
    x, z, w = np.empty(K), np.empty(J), np.empty(K)
    for i in range(mask.shape[0]):
        contexts_into(z, requests, i, pressure)
        for k in range(K):
            w[k] = 0.0
            for j in range(J):
                w[k] += params[WEIGHTS_AT + k * J + j] * z[j]
        worth = worth_of(rule, requests, i)
        best, harm, chance, free = -np.inf, 0.0, 0.0, False
        for c in range(mask.shape[1]):
            if not mask[i, c]:
                continue
            d, p = routes.decode[c], routes.prefill[c]
            free |= idle(fleet, d)
            value, lost, cost = route_value(
                rule, requests, fleet, routes, estimates, i, c, worth, now
            )
            traits_of_route(x, requests, fleet, estimates, i, c, d, p, lost, cost, now)
            r = 0.0
            for k in range(K):
                r += w[k] * x[k]
            value += worth * bounded(r, reach)
            out.route[i, c] = value
            if value > best:
                best, harm, chance = value, rule[0] * lost, estimates.p_slo[i, c]
        if rule[7] > 0.0 and not free and best > -np.inf:
            above = rule[6] + params[HOLD_AT + 4] * chance
            for j in range(1, J):
                above += params[HOLD_AT + j - 1] * z[j]
            if requests.ttft[i] < np.inf:
                waited = max(now - requests.arrived[i], 0.0)
                above += params[HOLD_AT + 3] * waited / max(requests.ttft[i], 1e-9)
            if harm > max(above, 0.0) * worth:
                hold_back(requests.arrived[i] + rule[7] * requests.ttft[i], mask, i, now, out)


def actor(
    weights: Mapping[str, Mapping[str, float]],
    hold: Mapping[str, float] | None = None,
    rule: MarginalParams | None = None,
    reach: float = 1.0,
    envelope: Floats | None = None,
) -> KernelScorer:
    """The scorer with these weights by trait and context, hold weights by context (those not named
    are 0) on this marginal rule. `envelope` (2, D): the ranges of `policies.names.TRAITS` that it
    was trained on.
    """
    held = hold or {}
    matrix = [weights.get(x, {}).get(z, 0.0) for x in ACTOR_TRAITS for z in ACTOR_CONTEXTS]
    first = astuple(rule if rule is not None else MarginalParams())
    return KernelScorer(
        name="actor",
        kernel=actor_kernel,
        unit="value",
        needs_estimates=True,
        params=np.array([*first, reach, *(held.get(z, 0.0) for z in HOLD_CONTEXTS), *matrix]),
        envelope=envelope,
    )
