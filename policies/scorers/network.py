"""The set scorer that PPO trains: marginal goodput plus a bounded residual of a small network.

    h_c   = s(W1 x_c + b1)                what is seen of candidate c, the same weights for all
    g_c   = s(W2 [h_c, mean of h] + b2)   beside what the whole set looks like
    score = marginal + worth x bounded(route . g_c)

with s(x) = x / (1 + |x|). No replica has a name and the order of candidates means nothing: any
fleet size. Two more heads read the mean of g. One moves the share of its own worth above which a
request that would harm others waits (the rule's `hold_above`); the other is the P(SLO) below which
it is refused. With the three heads at zero it *is* the marginal rule, bit for bit; whatever the
weights are, no score moves by more than `reach` requests. `training.train_ppo` fits them;
`training.set_network` is the same in torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

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
from policies.encoding import soft
from policies.names import NETWORK_INPUTS
from policies.scorers.kernel_scorer import KernelScorer
from policies.scorers.marginal import MarginalParams, hold_back, marginal_kernel, size
from policies.traits import COUNT, seen_into, work_cost

RULE = len(astuple(MarginalParams()))
"""Numbers of the marginal rule, which holds nobody back itself here; then come the share of the
TTFT limit by which holding ends, `reach`, the width H, W1 (H x K), b1 (H), W2 (H x 2H), b2 (H), the
heads for routes, holding and refusing (3 x H), and the biases of the last two.
"""
K = len(NETWORK_INPUTS)
HEAD_AT = RULE + 3
UNITS = np.array([1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 1.0, 0.3, 0.25, 0.125, 1.0, 1.0])
"""What brings the traits of `policies.names.TRAITS` to about [0, 1]."""


@njit(cache=True, error_model="numpy")
def squash(x: float) -> float:
    """Between -1 and 1, the slope at zero is 1."""
    y: float = x / (1.0 + abs(x))
    return y


@njit(cache=True, error_model="numpy")
def bounded(r: float, reach: float) -> float:
    """About r near zero, never beyond +-reach."""
    y: float = r / (1.0 + abs(r) / reach)
    return y


@njit(cache=True, error_model="numpy")
def observe_into(
    x: Floats,
    value: Floats,
    harm: Floats,
    rule: Params,
    requests: RequestColumns,
    fleet: FleetColumns,
    routes: Routes,
    estimates: EstimateColumns,
    mask: Mask,
    i: int,
    now: float,
) -> tuple[float, bool]:
    """What is seen of request i on every route of its mask, from the rule's `value` (c,) of each:
    inputs x (c, K), and what others lose by it (c,) in requests, which is what the value lacks
    beside its own chance and its price. Gives the request's worth, and whether it could have an
    idle replica. Serving and training both call it.
    """
    prompt, expected = requests.prompt[i], requests.expected[i]
    worth = requests.weight[i]
    if rule[5] != 0.0:
        worth *= size(prompt, expected, rule[5])
    best, free = -np.inf, False
    for c in range(mask.shape[1]):
        if mask[i, c]:
            d, p = routes.decode[c], routes.prefill[c]
            free |= fleet.running[d] + fleet.foreign_running[d] <= 0.0
            new = max(prompt - estimates.cached[i, c], 1.0)
            cost = work_cost(fleet, d, p, routes.price[c], new, prompt, expected)
            harm[c] = worth * estimates.p_slo[i, c] - rule[1] * cost - value[c]
            best = max(best, value[c])
    tight = 1.0 - soft(requests.tpot[i], 0.05)
    long, heavy = soft(expected, 200.0), soft(prompt, 1000.0)
    waited = 0.0
    if requests.ttft[i] < np.inf:
        gone = max(now - requests.arrived[i], 0.0)
        waited = min(gone / max(requests.ttft[i], 1e-9), 1.0)
    first = 1.0 if requests.class_id[i] == 0 else 0.0
    for c in range(mask.shape[1]):
        if not mask[i, c]:
            continue
        seen_into(x[c], requests, fleet, routes, estimates, i, c, now)
        for k in range(COUNT):
            x[c, k] *= UNITS[k]
        d = routes.decode[c]
        x[c, COUNT] = soft((best - value[c]) / worth, 0.2)
        x[c, COUNT + 1] = soft(max(harm[c], 0.0) / worth, 0.5)
        x[c, COUNT + 2] = tight
        x[c, COUNT + 3] = long
        x[c, COUNT + 4] = heavy
        x[c, COUNT + 5] = waited
        x[c, COUNT + 6] = first
        x[c, COUNT + 7] = soft(fleet.overhead[d] + fleet.weights[d], 0.02)
        x[c, COUNT + 8] = soft(fleet.foreign_running[d], 16.0)
    return worth, free


@njit(cache=True, error_model="numpy")
def forward_into(
    residual: Floats, params: Params, x: Floats, mask: Mask, i: int
) -> tuple[float, float]:
    """The network on inputs x (c, K): the routes' residuals (c,), unbounded; gives those of holding
    and of refusing.
    """
    width, routes = int(params[RULE + 2]), mask.shape[1]
    b1 = HEAD_AT + width * K
    w2 = b1 + width
    b2 = w2 + 2 * width * width
    heads = b2 + width
    h, pooled, g = np.empty((routes, width)), np.zeros(width), np.empty(width)
    count = 0
    for c in range(routes):
        if not mask[i, c]:
            continue
        count += 1
        for u in range(width):
            a = params[b1 + u]
            for k in range(K):
                a += params[HEAD_AT + u * K + k] * x[c, k]
            h[c, u] = squash(a)
            pooled[u] += h[c, u]
    share = 1.0 / max(count, 1)
    shared = np.empty(width)
    for u in range(width):
        shared[u] = params[b2 + u]
        for v in range(width):
            shared[u] += params[w2 + 2 * width * u + width + v] * pooled[v] * share
    hold, shed = params[heads + 3 * width], params[heads + 3 * width + 1]
    for c in range(routes):
        if not mask[i, c]:
            continue
        r = 0.0
        for u in range(width):
            a = shared[u]
            for v in range(width):
                a += params[w2 + 2 * width * u + v] * h[c, v]
            g[u] = squash(a)
            r += params[heads + u] * g[u]
        residual[c] = r
        for u in range(width):
            hold += params[heads + width + u] * g[u] * share
            shed += params[heads + 2 * width + u] * g[u] * share
    return hold, shed


@njit(cache=True, error_model="numpy")
def network_kernel(
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
    """The marginal rule's scores plus the residuals; who is held back, and from which score on a
    request is refused.
    """
    rule, until, reach, count = params[:RULE], params[RULE], params[RULE + 1], mask.shape[1]
    marginal_kernel(rule, requests, fleet, routes, estimates, mask, draws, now, out)
    x, residual, harm = np.empty((count, K)), np.empty(count), np.empty(count)
    for i in range(mask.shape[0]):
        value = out.route[i]
        worth, free = observe_into(
            x, value, harm, rule, requests, fleet, routes, estimates, mask, i, now
        )
        hold, shed = forward_into(residual, params, x, mask, i)
        best, loss, chance = -np.inf, 0.0, 0.0
        for c in range(count):
            if not mask[i, c]:
                continue
            score = value[c] + worth * bounded(residual[c], reach)
            value[c] = score
            chance = max(chance, estimates.p_slo[i, c])
            if score > best:
                best, loss = score, harm[c]
        if best == -np.inf:
            continue
        refuse = worth * (bounded(shed, reach) - chance)
        out.shed[i] = best + refuse
        above = max(rule[6] - bounded(hold, reach), 0.0)
        if until > 0.0 and not free and loss > above * worth and loss - above * worth >= refuse:
            hold_back(requests.arrived[i] + until * requests.ttft[i], mask, i, now, out)


Layers = Mapping[str, Any]
"""`w1`, `b1`, `w2`, `b2`, `route`, `hold`, `shed` and `bias` (of the last two), as nested lists."""


def flat(layers: Layers | None) -> Sequence[float]:
    """Width and weights in the order of the parameter vector; a network of width 1 that says
    nothing, if there is none.
    """
    if layers is None:
        return [1.0, *(0.0 for _ in range(K + 1 + 2 + 1 + 3 + 2))]
    parts = [np.asarray(layers[name], np.float64).ravel() for name in
             ("w1", "b1", "w2", "b2", "route", "hold", "shed", "bias")]  # fmt: skip
    return [float(len(parts[1])), *np.concatenate(parts).tolist()]


def network(
    layers: Layers | None,
    rule: MarginalParams | None = None,
    reach: float = 0.5,
    envelope: Floats | None = None,
) -> KernelScorer:
    """The scorer with these layers on this marginal rule. `envelope` (2, D): the ranges of
    `policies.names.TRAITS` that it was trained on.
    """
    whole = rule if rule is not None else MarginalParams()
    first = astuple(replace(whole, hold_until=0.0))
    return KernelScorer(
        name="network",
        kernel=network_kernel,
        unit="value",
        needs_estimates=True,
        params=np.array([*first, whole.hold_until, reach, *flat(layers)]),
        envelope=envelope,
    )
