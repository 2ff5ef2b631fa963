"""The cheapest route: what to spend least means, before any promise is looked at.

Alone it keeps no limit; under drift-plus-penalty with a quality floor it is MESS+'s rule.
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
from policies.traits import work_cost


@njit(cache=True, error_model="numpy")
def cheapest_kernel(
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
    """-(route price x seconds of work), uncached prompt tokens and expected output counted."""
    for i in range(mask.shape[0]):
        prompt, expected = requests.prompt[i], requests.expected[i]
        for c in range(mask.shape[1]):
            if mask[i, c]:
                d, p = routes.decode[c], routes.prefill[c]
                new = max(prompt - estimates.cached[i, c], 1.0)
                out.route[i, c] = -work_cost(fleet, d, p, routes.price[c], new, prompt, expected)


CHEAPEST = KernelScorer(name="cheapest", kernel=cheapest_kernel)
