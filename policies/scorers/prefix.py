"""Prefix-aware routing: affinity weighed against load, and sticky until saturated.

Neither predicts a latency; both read how much of the prompt a replica's prefix cache is thought to
hold (`estimates.cached`) and whether the session ran there (`estimates.sticky`).
"""

from __future__ import annotations

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
from policies.scorers.kernel_scorer import KernelScorer


@njit(cache=True, error_model="numpy")
def prefix_affinity_kernel(
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
    """Weighted sum of three shares in [0, 1]: prompt cached, requests below the most loaded
    candidate, KV cache free.

    params: the three weights. The request share is 1 at the least loaded candidate and 0 at the
    most loaded one; 1 everywhere if all are equal.
    Source: the weighted scorers of llm-d's inference scheduler (prefix, queue, KV utilisation;
    tuned 3 : 2 : 2, `papers.md` section 2e).
    """
    for i in range(mask.shape[0]):
        least, most = np.inf, -np.inf
        for c in range(mask.shape[1]):
            if mask[i, c]:
                d = routes.decode[c]
                load = fleet.running[d] + fleet.foreign_running[d]
                least, most = min(least, load), max(most, load)
        for c in range(mask.shape[1]):
            if not mask[i, c]:
                continue
            d = routes.decode[c]
            load = fleet.running[d] + fleet.foreign_running[d]
            spare = (most - load) / (most - least) if most > least else 1.0
            used = (fleet.kv_used[d] + fleet.foreign_context[d]) / fleet.kv_capacity[d]
            warm = estimates.cached[i, c] / max(requests.prompt[i], 1.0)
            out.route[i, c] = (
                params[0] * warm + params[1] * spare + params[2] * (1.0 - min(used, 1.0))
            )


@njit(cache=True, error_model="numpy")
def sticky_kernel(
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
    """The warmest unsaturated replica, scored 1 + warmth; every other by its load, in (-1, 0].

    Warmth is the cached share of the prompt, at least `params[1]` where the session ran before. A
    replica is saturated when its pending prefill takes more than `params[0]` seconds (its own
    per-token time, so tau = peak prefill rate x that). Load is pending prefill seconds if
    `params[2]` is above 0, else requests in flight.
    Source: llm-d, "sticky until saturated" (`papers.md` section 2e).
    """
    for i in range(mask.shape[0]):
        for c in range(mask.shape[1]):
            if not mask[i, c]:
                continue
            d, p = routes.decode[c], routes.prefill[c]
            pending = (fleet.backlog_tokens[p] + fleet.foreign_backlog[p]) * fleet.per_token[p]
            warm = estimates.cached[i, c] / max(requests.prompt[i], 1.0)
            if estimates.sticky[i, c] > 0.0:
                warm = max(warm, params[1])
            if warm > 0.0 and pending <= params[0]:
                out.route[i, c] = 1.0 + warm
                continue
            load = fleet.running[d] + fleet.foreign_running[d]
            if params[2] > 0.0:
                load = pending
            out.route[i, c] = -load / (1.0 + load)


def prefix_affinity(prefix: float = 3.0, queue: float = 2.0, memory: float = 2.0) -> KernelScorer:
    """The scorer with these weights (no unit, 0 or more)."""
    return KernelScorer(
        name="prefix_affinity",
        kernel=prefix_affinity_kernel,
        params=np.array([prefix, queue, memory]),
    )


def sticky(
    saturated: float = 1.0, session: float = 0.5, *, prefill_bound: bool = False
) -> KernelScorer:
    """The scorer that leaves a warm replica once its prefill backlog exceeds `saturated` seconds.

    `session` is the warmth (share of the prompt) of a replica that the session ran on.
    """
    return KernelScorer(
        name="sticky",
        kernel=sticky_kernel,
        params=np.array([saturated, session, float(prefill_bound)]),
    )
