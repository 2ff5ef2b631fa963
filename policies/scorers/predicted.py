"""Lowest predicted latency: the greedy rule that every rule which leaves room must beat."""

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
def predicted_kernel(
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
    """-(params[0] x TTFT + params[1] x decode time), seconds, at the middle load quantile.

    Decode time is (expected output - 1) x TPOT; with both weights 1 the score is minus the
    predicted time to the last token.
    """
    middle = estimates.ttft.shape[2] // 2
    for i in range(mask.shape[0]):
        steps = max(requests.expected[i] - 1.0, 0.0)
        for c in range(mask.shape[1]):
            if mask[i, c]:
                decode = steps * estimates.tpot[i, c, middle]
                out.route[i, c] = -(params[0] * estimates.ttft[i, c, middle] + params[1] * decode)


def predicted(ttft: float = 1.0, decode: float = 1.0) -> KernelScorer:
    """The scorer with these weights of seconds before and after the first token."""
    return KernelScorer(
        name="predicted",
        kernel=predicted_kernel,
        needs_estimates=True,
        params=np.array([ttft, decode]),
    )
