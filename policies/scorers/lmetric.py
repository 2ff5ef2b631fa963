"""LMetric: (queued + new uncached prefill tokens) x batch, with no predictor and no weights.

Source: `papers.md` section 1.2 lists the rule; both factors are counts that a router has.
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
def lmetric_kernel(
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
    """-(prefill tokens queued, this prompt's uncached ones included) x (batch with it)."""
    for i in range(mask.shape[0]):
        for c in range(mask.shape[1]):
            if mask[i, c]:
                d, p = routes.decode[c], routes.prefill[c]
                queued = fleet.backlog_tokens[p] + fleet.foreign_backlog[p]
                queued += max(requests.prompt[i] - estimates.cached[i, c], 0.0)
                batch = fleet.running[d] + fleet.foreign_running[d] + 1.0
                out.route[i, c] = -queued * batch


LMETRIC = KernelScorer(name="lmetric", kernel=lmetric_kernel)
