"""Configuration of the policy: which scorer, and how the core decides around it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class _Policy(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    hold: bool = True  # late binding: wait at the gateway while every replica's window is full
    shed_below: Share = 0.0  # P(SLO) under which a sheddable request is refused; 0: never
    explore: Share = (
        0.0  # share of uniform choices among nearly equal routes; logged with propensity
    )
    explore_within: Share = 0.02  # how near to the best P(SLO) such a route must be
    seed: int = 0  # of the core's own generator
    max_attempts: int = Field(default=3, ge=1, le=10)  # first try and retries before the first byte
    retry_share: Share = 0.2  # retries at most this share of what was sent
    queue_limit: int = Field(default=10_000, ge=0)  # requests that may wait
    fairness: float = Field(default=1.0, ge=0.0)  # seconds of deadline a second of service costs
    alpha_max: float = Field(default=4.0, ge=0.0)  # weight of shortest work at full load
    log_candidates: int = Field(default=8, ge=0, le=64)  # routes per decision-log line


class ClassicPolicy(_Policy):
    """Load balancing without predictions."""

    kind: Literal[
        "random",
        "round_robin",
        "weighted_round_robin",
        "least_requests",
        "least_tokens",
        "power_of_two",
        "lmetric",
    ]


class BestFitPolicy(_Policy):
    """Best-fit headroom, shedding what no replica can serve in time: the default."""

    kind: Literal["best_fit"] = "best_fit"
    shed_below: Share = 0.05  # below one chance in twenty, serving it costs others more
    ttft_margin: Share = 0.8  # share of the TTFT limit a prediction may use
    tpot_margin: Share = 0.8  # of the TPOT limit
    e2e_margin: Share = 0.8  # of the E2E limit


PolicyConfig = Annotated[ClassicPolicy | BestFitPolicy, Field(discriminator="kind")]
