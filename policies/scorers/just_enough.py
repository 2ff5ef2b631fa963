"""Just enough: the slowest route that still meets the limits, so that fast ones stay free.

The rule is GoodServe's (arXiv 2605.16867), which knows an E2E limit only; TTFT and TPOT limits
count here too. Where best-fit compares what is left of the tightest limit, this compares predicted
time.
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
def just_enough_kernel(
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
    """1 + t / (1 + t) where the limits hold, the slowest of these first; else 1 / (1 + t), the
    fastest first.

    t is the predicted time from arrival to the last token, seconds, at the middle load quantile. A
    request without limits takes the fastest route. params[0]: share of each limit that a prediction
    may use.
    """
    middle = estimates.ttft.shape[2] // 2
    for i in range(mask.shape[0]):
        waited = now - requests.arrived[i]
        steps = max(requests.expected[i] - 1.0, 0.0)
        limited = min(requests.ttft[i], requests.tpot[i], requests.e2e[i]) < np.inf
        for c in range(mask.shape[1]):
            if not mask[i, c]:
                continue
            ttft = waited + estimates.ttft[i, c, middle]
            tpot = estimates.tpot[i, c, middle]
            e2e = ttft + steps * tpot
            meets = (
                ttft <= params[0] * requests.ttft[i]
                and tpot <= params[0] * requests.tpot[i]
                and e2e <= params[0] * requests.e2e[i]
            )
            if limited and meets:
                out.route[i, c] = 1.0 + e2e / (1.0 + e2e)
            else:
                out.route[i, c] = 1.0 / (1.0 + e2e)


def just_enough(margin: float = 0.8) -> KernelScorer:
    """The scorer with this margin (share of a limit, 0 to 1)."""
    return KernelScorer(
        name="just_enough",
        kernel=just_enough_kernel,
        needs_estimates=True,
        params=np.array([margin]),
    )
