"""Static length pools: each replica takes requests whose predicted total length lies in its band.

Short and long sequences in one batch slow each other (CascadeInfer, arXiv 2512.19179); without
migration a gateway can only part them by the predicted final length. Fixed bands need the right
sizes: with the wrong ones this is worse than round robin (`papers.md` section 2d).
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
def pools_kernel(
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
    """1 / (1 + requests in flight) inside the band; outside, minus the distance to it in tokens.

    The band of a replica is `pool_low` <= prompt + expected output < `pool_high`. Outside it a
    request goes to the nearest band that has room, the least loaded replica of that first.
    """
    for i in range(mask.shape[0]):
        length = requests.prompt[i] + requests.expected[i]
        for c in range(mask.shape[1]):
            if not mask[i, c]:
                continue
            d = routes.decode[c]
            load = fleet.running[d] + fleet.foreign_running[d]
            if fleet.pool_low[d] <= length < fleet.pool_high[d]:
                out.route[i, c] = 1.0 / (1.0 + load)
            elif length < fleet.pool_low[d]:
                out.route[i, c] = -(fleet.pool_low[d] - length + load / (1.0 + load))
            else:
                out.route[i, c] = -(length - fleet.pool_high[d] + 1.0 + load / (1.0 + load))


POOLS = KernelScorer(name="pools", kernel=pools_kernel)
