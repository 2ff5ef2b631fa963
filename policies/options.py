"""Plain options of the decision core; `policies.factory` makes them from the configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreOptions:
    """How the core decides, beside the scorer.

    `shed_below`: a sheddable request whose best P(SLO) falls below is refused with a probability
    that grows from 0 at the threshold to 1 at P = 0. `overload_target`: mean shortfall of P(SLO)
    that is tolerated before arrivals are refused (`policies.overload`); 0: never. `explore`: share
    of requests sent to a uniform route among those within `explore_within` of the best P(SLO); the
    top class never is. `hold`
    False sends at once whatever the replicas' windows say. `retry_share` bounds retries to a share
    of what was sent (plus `retry_floor`). `late_penalty` (s) is how long the fallback scorer
    decides after a late decision. `warm_wait`: a request may wait for a full replica that holds its
    prefix, if the policy prefers that replica and the predicted wait is shorter than the prefill it
    saves; `warm_wait_min` (s) is the least such saving.
    """

    k_best: int = 8
    hold: bool = True
    shed_below: float = 0.0
    overload_target: float = 0.0
    explore: float = 0.0
    explore_within: float = 0.02
    max_attempts: int = 3
    retry_share: float = 0.2
    retry_floor: float = 10.0
    candidates: int = 8
    queue_limit: int = 10_000
    fairness: float = 1.0
    alpha_max: float = 4.0
    late_penalty: float = 10.0
    warm_wait: bool = False
    warm_wait_min: float = 0.05
    seed: int = 0
