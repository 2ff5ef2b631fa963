"""Configuration of the policy: which scorer, and how the core decides around it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from policies.names import (
    NETWORK_INPUTS,
    NETWORK_SCHEMA,
    TRAITS,
    ActorContext,
    ActorTrait,
    HoldContext,
    Trait,
)

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Weight = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
Edge = Annotated[float, Field(allow_inf_nan=False)]
Range = tuple[Edge, Edge]


class _Policy(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    hold: bool = True  # late binding: wait at the gateway while every replica's window is full
    shed_below: Share = 0.0  # P(SLO) under which a sheddable request is refused; 0: never
    # Mean 1 - P(SLO) beyond which arrivals are refused; 0: never. 0.05 keeps the top class whole at
    # 1.3 x the knee and costs a fifth of the goodput (policies/README.md).
    overload_target: Share = 0.0
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
    warm_wait: bool = False  # wait for a full replica that holds the prefix while that pays
    warm_wait_min_ms: float = Field(default=50.0, ge=0.0)  # least prefill such a wait must save
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
        "pools",
        "cheapest",
    ]


class BestFitPolicy(_Policy):
    """Best-fit headroom, shedding what no replica can serve in time; decides where a learned or
    late policy may not.
    """

    kind: Literal["best_fit"] = "best_fit"
    shed_below: Share = 0.05  # below one chance in twenty, serving it costs others more
    ttft_margin: Share = 0.8  # share of the TTFT limit a prediction may use
    tpot_margin: Share = 0.8  # of the TPOT limit
    e2e_margin: Share = 0.8  # of the E2E limit


class PrefixAffinityPolicy(_Policy):
    """Prefix affinity weighed against load."""

    kind: Literal["prefix_affinity"]
    prefix: float = Field(default=3.0, ge=0.0)  # weight of the cached share of the prompt
    queue: float = Field(default=2.0, ge=0.0)  # weight of having few requests in flight
    memory: float = Field(default=2.0, ge=0.0)  # weight of a free KV cache


class StickyPolicy(_Policy):
    """The cache-warm replica until it is saturated, else the least loaded."""

    kind: Literal["sticky"]
    saturated_ms: float = Field(default=1000.0, gt=0.0)  # prefill backlog that ends stickiness
    session: Share = 0.5  # warmth of a replica that the session ran on, as a share of the prompt
    prefill_bound: bool = False  # load is pending prefill time instead of requests in flight


class PredictedPolicy(_Policy):
    """Lowest predicted latency, greedily."""

    kind: Literal["predicted"]
    ttft: float = Field(default=1.0, ge=0.0)  # weight of a second before the first token
    decode: float = Field(default=1.0, ge=0.0)  # weight of a second after it


class JustEnoughPolicy(_Policy):
    """The slowest route that still meets the limits."""

    kind: Literal["just_enough"]
    shed_below: Share = 0.05  # as best-fit
    margin: Share = 0.8  # share of each limit that a prediction may use


class _Marginal(_Policy):
    """Marginal goodput: P(all limits met) minus what others lose minus the price of the work."""

    shed_below: Share = 0.05  # as best-fit
    loss: float = Field(default=1.0, ge=0.0)  # a limit lost by another counts as one of its own
    price: float = Field(default=0.05, ge=0.0)  # value of one unit of price x second of work
    sharpness: float = Field(default=12.0, gt=0.0)  # slope at the limit: 10 % over is met in 1 of 4
    least_left_tokens: float = Field(default=8.0, ge=1.0)  # left of a stream past its forecast
    foreign_tpot_ms: float = Field(default=0.0, ge=0.0)  # assumed of foreign streams; 0: own limit
    size: float = Field(default=0.0, ge=0.0, le=2.0)  # 0 counts requests, 1 counts work
    # A request waits while joining costs others more than `hold_above` of its own worth and no
    # replica idles, at most for `hold_until` of its TTFT limit; 0 holds nobody back.
    hold_above: float = Field(default=0.4, ge=0.0)
    hold_until: Share = 1.0


class MarginalPolicy(_Marginal):
    """The rule as it is: the default."""

    kind: Literal["marginal"] = "marginal"


class _Learned(_Policy):
    """A scorer fitted on data: outside what it was fitted on, best-fit decides."""

    envelope: dict[Trait, Range] = {}  # lowest and highest value of each trait in the fit
    slack: float = Field(default=0.1, ge=0.0)  # share of a range by which it may be passed

    def ranges(self) -> Any:
        """The envelope (2, D) with its slack, all open where a trait has none; None without any."""
        if not self.envelope:
            return None
        low, high = np.full(len(TRAITS), -np.inf), np.full(len(TRAITS), np.inf)
        for name, (least, most) in self.envelope.items():
            extra = self.slack * (most - least)
            low[TRAITS.index(name)], high[TRAITS.index(name)] = least - extra, most + extra
        return np.stack([low, high])


class LinearPolicy(_Learned):
    """Weighted traits: a cloned log or an off-line fit."""

    kind: Literal["linear"]
    weights: dict[Trait, Weight] = {"p_slo": 1.0}  # the others are 0
    within: float = Field(default=2.0, ge=0.0)  # only routes so near to the best P(SLO); 2: all


class ActorPolicy(_Learned, _Marginal):
    """The learned set scorer: a bounded residual on the marginal rule (`sluice train policy`).

    Without weights it is the one that is shipped, but for the options given here; with `{}` it is
    the marginal rule itself.
    """

    kind: Literal["actor"]
    weights: dict[ActorTrait, dict[ActorContext, Weight]] | None = None  # of trait x context
    reach: float = Field(default=1.0, gt=0.0, le=100.0)  # requests by which a score moves at most
    hold_more: dict[HoldContext, Weight] = {}  # what each adds to `hold_above`


Row = tuple[Weight, ...]


class NetworkLayers(BaseModel):
    """The weights of a set scorer of width H: `policies.scorers.network` says what they mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: str  # `policies.names.NETWORK_SCHEMA` of the inputs that they were trained on
    w1: tuple[Row, ...]  # (H, K)
    b1: Row  # (H,)
    w2: tuple[Row, ...]  # (H, 2 H)
    b2: Row
    route: Row  # heads (H,)
    hold: Row
    shed: Row
    bias: tuple[Weight, Weight] = (0.0, 0.0)  # of hold and shed

    @model_validator(mode="after")
    def _fits(self) -> NetworkLayers:
        h = len(self.b1)
        if self.inputs != NETWORK_SCHEMA:
            raise ValueError(f"trained on inputs {self.inputs}, not {NETWORK_SCHEMA}; train again")
        rows = {len(self.w1), len(self.w2), *map(len, (self.b2, self.route, self.hold, self.shed))}
        if not 1 <= h <= 256 or rows != {h}:
            raise ValueError("layers must have one width, 1 to 256")
        if {len(row) for row in self.w1} != {len(NETWORK_INPUTS)}:
            raise ValueError(f"w1 must have {len(NETWORK_INPUTS)} columns")
        if {len(row) for row in self.w2} != {2 * h}:
            raise ValueError(f"w2 must have {2 * h} columns")
        return self


class NetworkPolicy(_Learned, _Marginal):
    """A small network's bounded residual on the marginal rule (`sluice train policy --algo ppo`);
    without layers the marginal rule itself.
    """

    kind: Literal["network"]
    layers: NetworkLayers | None = None
    reach: float = Field(default=0.5, gt=0.0, le=100.0)  # requests by which a score moves at most


class BanditPolicy(_Learned):
    """A linear bandit that learns from outcomes while it serves."""

    kind: Literal["bandit"]
    mode: Literal["ucb", "thompson"] = "thompson"
    alpha: float = Field(default=0.3, ge=0.0)  # widths that exploration adds
    budget: Share = 0.02  # met limits that one decision may risk to learn: as `explore_within`
    price: float = Field(default=0.0, ge=0.0)  # met limits that one unit of cost is worth
    forgetting: float = Field(default=0.9995, gt=0.9, le=1.0)  # half of it is 1,400 requests old
    ridge: float = Field(default=50.0, gt=0.0)  # outcomes that the start, P(SLO), weighs


class Target(BaseModel):
    """A promise to the classes of one rank; what is None is not promised."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(ge=0, lt=8)  # of the class, 0 is the top
    attainment: Share | None = None  # of its requests that meet their limits
    quality: Share | None = None  # mean chance of a good enough answer


class PlainBase(BaseModel):
    """A rule without parameters to stand on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["cheapest", "least_requests"]


BasePolicy = Annotated[
    PlainBase | BestFitPolicy | MarginalPolicy | PredictedPolicy | LinearPolicy | BanditPolicy,
    Field(discriminator="kind"),
]
"""What drift-plus-penalty stands on (`policies.scorers.drift_plus_penalty.BASES`)."""


class DriftPlusPenaltyPolicy(_Policy):
    """Another policy's scores with a price on broken promises."""

    kind: Literal["drift_plus_penalty"]
    base: BasePolicy = BestFitPolicy()  # only its scorer counts; the core's options are here
    targets: tuple[Target, ...] = ()
    v: float = Field(
        default=1.0, gt=0.0
    )  # requests owed that weigh one unit of score (a rank's: 1)
    cap: float = Field(default=10.0, gt=0.0)  # requests owed at most: 5 % to spare pays in 200
    leak: float = Field(default=0.05, gt=0.0, lt=1.0)  # lost per request once out of reach
    rest: int = Field(default=500, ge=1)  # requests before an unreachable target is tried again


PolicyConfig = Annotated[
    ClassicPolicy
    | BestFitPolicy
    | PrefixAffinityPolicy
    | StickyPolicy
    | PredictedPolicy
    | JustEnoughPolicy
    | MarginalPolicy
    | LinearPolicy
    | ActorPolicy
    | NetworkPolicy
    | BanditPolicy
    | DriftPlusPenaltyPolicy,
    Field(discriminator="kind"),
]


class TrialConfig(BaseModel):
    """A policy that is tried beside the active one, and when that ends by itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    policy: PolicyConfig
    mode: Literal["shadow", "canary"] = "shadow"
    share: Share = 0.0  # of the tenants, by hash
    unit: Literal["tenant", "session"] = "tenant"  # session where one tenant is all there is
    salt: str = ""  # another one picks other tenants
    alpha: float = Field(default=0.01, gt=0.0, lt=1.0)  # share of good candidates rolled back
    tolerance: Share = 0.005  # attainment that a candidate may lose: noise of the tenants' mix
    margin: Share = 0.02  # loss of attainment that a promotion wants excluded
    late: int = Field(default=3, ge=1)  # late decisions in 1,000
    faults: int = Field(default=3, ge=1)  # scores that are no numbers, in 1,000 decisions
    shifted: Share = 0.5  # of the last 200 decisions, outside what it was fitted on


class ElasticConfig(BaseModel):
    """What the fleet should be, worked out from what came lately; nothing is changed by it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    every_ms: float = Field(default=10_000.0, ge=100.0)  # a plan that changes faster is noise
    window_ms: float = Field(default=120_000.0, ge=1_000.0)  # of requests that a plan is made for
    warm_up_ms: float = Field(default=60_000.0, ge=0.0)  # until a started replica serves
    target: float = Field(default=0.8, gt=0.0, le=1.0)  # of its limits that a prediction may use
    margin: Share = 0.1  # by which other pools must be better
    most_pools: int = Field(default=4, ge=1, le=8)  # more fragment a fleet
    most_replicas: int = Field(default=64, ge=1, le=1024)  # of one variant
