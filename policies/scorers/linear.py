"""A linear scorer over the traits of a candidate: what cloning a log, or an off-line fit, leaves.

Twelve weights in a readable file. Among routes whose P(SLO) is within `within` of the best it takes
the one with the largest weighted sum; the others come after.
"""

from __future__ import annotations

from collections.abc import Mapping

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
from policies.names import TRAITS
from policies.scorers.kernel_scorer import KernelScorer
from policies.traits import seen_into

BEHIND = 1e3
"""How far a route that is not nearly the best in P(SLO) is put behind."""


@njit(cache=True, error_model="numpy")
def linear_kernel(
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
    """Weights . traits, minus `BEHIND` where P(SLO) is not within params[D] of the best.

    params: D weights in the order of `policies.names.TRAITS`, then `within`.
    """
    count = params.shape[0] - 1
    x = np.empty(count)
    for i in range(mask.shape[0]):
        best = -np.inf
        for c in range(mask.shape[1]):
            if mask[i, c] and estimates.p_slo[i, c] > best:
                best = estimates.p_slo[i, c]
        for c in range(mask.shape[1]):
            if not mask[i, c]:
                continue
            seen_into(x, requests, fleet, routes, estimates, i, c, now)
            score = 0.0
            for k in range(count):
                score += params[k] * x[k]
            if estimates.p_slo[i, c] < best - params[count]:
                score -= BEHIND
            out.route[i, c] = score


def linear(
    weights: Mapping[str, float], within: float = 2.0, envelope: Floats | None = None
) -> KernelScorer:
    """The scorer with these weights by trait; those not named are 0. `within` 1 or more lets every
    route compete. `envelope` (2, D): the ranges that it was fitted on.
    """
    return KernelScorer(
        name="linear",
        kernel=linear_kernel,
        needs_estimates=True,
        params=np.array([*(weights.get(name, 0.0) for name in TRAITS), within]),
        envelope=envelope,
    )
