"""Events into the decision core and actions out of it. Time comes with every event; the core has no
clock.

An event log is a list of these values; fed to a fresh core it gives the same actions.
"""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import NamedTuple

from domain.fleet import FleetSpec
from domain.outcome import Cause, Outcome, Prediction, Usage
from domain.request import InferenceRequest, SloClass, Tenant
from domain.values import dataclass


class Reason(StrEnum):
    """Why a request is refused; each maps to one error class."""

    UNKNOWN_MODEL = "unknown_model"
    FORBIDDEN = "forbidden"
    CONTEXT = "context"
    PROMPT_LIMIT = "prompt_limit"
    RATE = "rate"
    QUOTA = "quota"
    CONCURRENCY = "concurrency"
    QUEUE_FULL = "queue_full"
    OVERLOAD = "overload"
    UNREACHABLE = "unreachable"
    EXPIRED = "expired"
    NO_REPLICA = "no_replica"
    UPSTREAM = "upstream"
    SHUTTING_DOWN = "shutting_down"


# ---- events


@dataclass(frozen=True, slots=True)
class Arrived:
    """A complete request is held by the gateway."""

    at: float
    request: InferenceRequest


@dataclass(frozen=True, slots=True)
class Committed:
    """The store's answer to `Commit`: whether the tokens were reserved and the route booked.

    `retry_after` (s) comes with a refused reservation; `level` is the bucket's level after it,
    where known.
    """

    at: float
    id: str
    attempt: int
    reserved: bool = True
    booked: bool = True
    retry_after: float | None = None
    level: float | None = None


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first content byte of an attempt came."""

    at: float
    id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens seen so far by many attempts at once: parallel tuples of replica index, slot and count
    (whole tokens), and of when the last of them came; `last` is empty where that is not known.
    """

    at: float
    replicas: tuple[int, ...]
    slots: tuple[int, ...]
    tokens: tuple[int, ...]
    last: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerBegan:
    """The thinking of an attempt is over: `thought` tokens of it came."""

    at: float
    id: str
    attempt: int
    thought: int


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """An attempt is over. `last_token` is the time of its last content byte, None if none came."""

    at: float
    id: str
    attempt: int
    cause: Cause
    usage: Usage = Usage()
    last_token: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """The client closed its connection. `usage` is what was counted of the running attempt."""

    at: float
    id: str
    usage: Usage = Usage()


@dataclass(frozen=True, slots=True)
class Reading:
    """A replica's own metrics. None is unknown, not zero. `kv_used` is a share in [0, 1];
    `measured_at` on the same clock.
    """

    at: float
    replica: int
    measured_at: float
    running: float | None = None
    waiting: float | None = None
    kv_used: float | None = None


@dataclass(frozen=True, slots=True)
class ForeignLoad:
    """What the other gateways together have on each replica, by their own ledgers: parallel tuples
    by replica index.

    `kv` is room reserved, in tokens, `backlog` prompt tokens not yet prefilled. Fresher than a
    `Reading`, which must not overwrite it while it comes regularly.
    """

    at: float
    running: tuple[float, ...]
    kv: tuple[float, ...]
    backlog: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class AvailabilityChanged:
    """A replica became usable or unusable (breaker, health, drain, supervisor)."""

    at: float
    replica: int
    usable: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FleetChanged:
    """Another fleet; replicas are matched by name, state of those kept is kept."""

    at: float
    fleet: FleetSpec


@dataclass(frozen=True, slots=True)
class ConfigReloaded:
    """Other tenants and classes, compared by name: bucket levels are kept, a new capacity scales
    them.
    """

    at: float
    tenants: tuple[Tenant, ...]
    classes: tuple[SloClass, ...]


@dataclass(frozen=True, slots=True)
class ModelSwapped:
    """A learned model of the estimator is replaced by another of this version; `artifact` is the
    model itself as a file's bytes, so that a log can be lived through without any file.
    """

    at: float
    version: str
    artifact: bytes = b""


@dataclass(frozen=True, slots=True)
class FeedbackGiven:
    """A client has judged the answer to its request `id` by `variant`: `score` in [0, 1]."""

    at: float
    id: str
    variant: str
    score: float


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    """Another policy, as the JSON of its configuration. What the old one learned stays with it."""

    at: float
    config: str


@dataclass(frozen=True, slots=True)
class TrialChanged:
    """Another policy is tried beside the active one, in shadow or as a canary: the plan as JSON
    (`policies.config.TrialConfig`); empty: nothing is tried any more.
    """

    at: float
    plan: str


@dataclass(frozen=True, slots=True)
class ScorerLate:
    """The shell measured a decision beyond its budget; the fallback policy decides for a while."""

    at: float
    took: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: expiries, patience and leases are looked at."""

    at: float


@dataclass(frozen=True, slots=True)
class Draining:
    """The gateway shuts down: nothing new is taken, what waits is refused."""

    at: float


Event = (
    Arrived
    | Committed
    | FirstToken
    | Progress
    | AttemptEnded
    | ClientGone
    | Reading
    | AvailabilityChanged
    | FleetChanged
    | ConfigReloaded
    | ModelSwapped
    | ScorerLate
    | Tick
    | Draining
    | ForeignLoad
    | PolicyChanged
    | TrialChanged
    | FeedbackGiven
    | AnswerBegan
)

# ---- actions


@dataclass(frozen=True, slots=True)
class Commit:
    """Ask the store to reserve `tokens` of the tenant and to book the route; `route` None reserves
    only (a held request), `tokens` 0 books only (its release, or another attempt).

    `key` and `model` say which further quotas count, `cost` is the expected price. `replica` and
    `prefill` are the route's replicas; `room` KV tokens and `backlog` prompt tokens are what the
    booking adds to them, already counted in the core's own columns.
    """

    id: str
    attempt: int
    tenant: str
    route: int | None
    tokens: float
    key: str | None = None
    model: str = ""
    cost: float = 0.0
    replica: int | None = None
    prefill: int | None = None
    room: float = 0.0
    backlog: float = 0.0


class Candidate(NamedTuple):
    """One route that was scored for a decision: what it promised, for the decision log.

    A tuple, since eight are made per decision and a frozen dataclass costs three times as much.
    """

    route: int
    score: float
    p_slo: float
    ttft: float
    tpot: float
    quality: float


@dataclass(frozen=True, slots=True)
class Send:
    """Send the request now along `route`: to `replica` (index), under engine slot `slot`, for the
    `attempt`-th time. `route` is None where the fleet has changed since it was chosen and has no
    such route any more.
    """

    id: str
    attempt: int
    route: int | None
    replica: int
    prefill: int
    slot: int
    propensity: float
    policy: str
    version: str
    prediction: Prediction
    candidates: tuple[Candidate, ...] = ()
    shadow: Candidate | None = None
    """What a policy in shadow would have done."""


@dataclass(frozen=True, slots=True)
class Hold:
    """The request waits at the gateway."""

    id: str


@dataclass(frozen=True, slots=True)
class Shed:
    """Refuse the request. `retry_after` in seconds where waiting helps. A `Settle` goes with it."""

    id: str
    reason: Reason
    retry_after: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    """Close the attempt's upstream connection at once."""

    id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Settle:
    """The request is over, exactly once. It used `tokens`; none means that it has cost nothing, not
    even a request. `refund` tokens (may be negative: a charge) go back to the tenant. `cost` is the
    actual price, None where it was not worked out.
    """

    id: str
    tenant: str
    tokens: float
    refund: float
    outcome: Outcome = field(repr=False)
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The trial of that name has ended by itself: the active policy decides for everybody again."""

    trial: str
    reason: str
    detail: str


Action = Commit | Send | Hold | Shed | Abort | Settle | RolledBack
