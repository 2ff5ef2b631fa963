"""Best-fit headroom: the replica that meets the limits with the least to spare, so that room is
left for harder ones.

The rule is llm-d's least-headroom strategy (positive headroom preferred and packed tightly; where
none has any, the least negative). Headroom is measured in units of the request's own limits.
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
def best_fit_kernel(
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
    """Least non-negative headroom first, then the least negative; without limits, the least
    predicted E2E.

    params: margins on TTFT, TPOT and E2E: the share of each limit that a prediction (at the middle
    load quantile) may use.
    """
    middle = estimates.ttft.shape[2] // 2
    for i in range(mask.shape[0]):
        waited = now - requests.arrived[i]
        for c in range(mask.shape[1]):
            if not mask[i, c]:
                continue
            ttft = waited + estimates.ttft[i, c, middle]
            tpot = estimates.tpot[i, c, middle]
            e2e = ttft + max(requests.expected[i] - 1.0, 0.0) * tpot
            room = min(
                params[0] - ttft / requests.ttft[i],
                params[1] - tpot / requests.tpot[i],
                params[2] - e2e / requests.e2e[i],
            )
            if (
                requests.ttft[i] == np.inf
                and requests.tpot[i] == np.inf
                and requests.e2e[i] == np.inf
            ):
                out.route[i, c] = 1.0 / (1.0 + e2e)
            elif room >= 0.0:
                out.route[i, c] = 2.0 - room
            else:
                out.route[i, c] = room


def best_fit(
    ttft_margin: float = 0.8, tpot_margin: float = 0.8, e2e_margin: float = 0.8
) -> KernelScorer:
    """The scorer with these margins (shares of a limit, 0 to 1)."""
    return KernelScorer(
        name="best_fit",
        kernel=best_fit_kernel,
        needs_estimates=True,
        params=np.array([ttft_margin, tpot_margin, e2e_margin]),
    )
