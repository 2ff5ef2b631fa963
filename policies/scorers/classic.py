"""Classic load balancing: random, round robin, weighted round robin, least requests, least tokens,
power of two.

None of them predicts anything. Round robin is a ledger column: the route sent to least often is
next.
"""

from __future__ import annotations

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
from policies.scorers.kernel_scorer import KernelScorer


@njit(cache=True, error_model="numpy")
def random_kernel(
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
    """A uniform route: the largest draw wins."""
    for i in range(mask.shape[0]):
        for c in range(mask.shape[1]):
            if mask[i, c]:
                out.route[i, c] = draws[i, c]


@njit(cache=True, error_model="numpy")
def round_robin_kernel(
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
    """-(dispatched + 1): the replica that was sent to least often."""
    for i in range(mask.shape[0]):
        for c in range(mask.shape[1]):
            if mask[i, c]:
                out.route[i, c] = -(fleet.dispatched[routes.decode[c]] + 1.0)


@njit(cache=True, error_model="numpy")
def weighted_round_robin_kernel(
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
    """-(dispatched + 1) / weight: shares in proportion to the replicas' weights."""
    for i in range(mask.shape[0]):
        for c in range(mask.shape[1]):
            if mask[i, c]:
                d = routes.decode[c]
                out.route[i, c] = -(fleet.dispatched[d] + 1.0) / fleet.speed[d]


@njit(cache=True, error_model="numpy")
def least_requests_kernel(
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
    """-(requests in flight)."""
    for i in range(mask.shape[0]):
        for c in range(mask.shape[1]):
            if mask[i, c]:
                d = routes.decode[c]
                out.route[i, c] = -(fleet.running[d] + fleet.foreign_running[d])


@njit(cache=True, error_model="numpy")
def least_tokens_kernel(
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
    """-(tokens resident in the replica's KV cache)."""
    for i in range(mask.shape[0]):
        for c in range(mask.shape[1]):
            if mask[i, c]:
                d = routes.decode[c]
                out.route[i, c] = -(fleet.context[d] + fleet.foreign_context[d])


@njit(cache=True, error_model="numpy")
def power_of_two_kernel(
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
    """The less loaded of two random routes (Mitzenmacher, 2001): those with the two largest
    draws.
    """
    for i in range(mask.shape[0]):
        one, two = -1, -1
        for c in range(mask.shape[1]):
            if not mask[i, c]:
                continue
            if one < 0 or draws[i, c] > draws[i, one]:
                one, two = c, one
            elif two < 0 or draws[i, c] > draws[i, two]:
                two = c
        if one >= 0:
            d = routes.decode[one]
            out.route[i, one] = -(fleet.running[d] + fleet.foreign_running[d])
        if two >= 0:
            d = routes.decode[two]
            out.route[i, two] = -(fleet.running[d] + fleet.foreign_running[d])


RANDOM = KernelScorer(name="random", kernel=random_kernel, random=True)
ROUND_ROBIN = KernelScorer(name="round_robin", kernel=round_robin_kernel)
WEIGHTED_ROUND_ROBIN = KernelScorer(name="weighted_round_robin", kernel=weighted_round_robin_kernel)
LEAST_REQUESTS = KernelScorer(name="least_requests", kernel=least_requests_kernel)
LEAST_TOKENS = KernelScorer(name="least_tokens", kernel=least_tokens_kernel)
POWER_OF_TWO = KernelScorer(name="power_of_two", kernel=power_of_two_kernel, random=True)
