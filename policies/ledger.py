"""The ledger's lines: what the core knows of each open request, from arrival to settlement.

state       means                                          left by
held        in the queue, nothing sent                     release, expiry, client gone
committing  booked here, waiting for the store's answer    Committed, client gone
sent        an attempt runs on a replica                   AttemptEnded, client gone
(gone)      settled: the line is deleted                   -
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from domain.columns import Bools, Floats
from domain.events import Candidate
from domain.outcome import Prediction
from domain.request import InferenceRequest, SloClass
from policies.bucket import Account, Admission


@dataclass(slots=True, eq=False)
class Attempt:
    """One booking: slot and replicas are the key under which the columns hold it. `route` is None
    once another fleet has no such route any more.
    """

    number: int
    route: int | None
    replica: int
    prefill: int
    slot: int
    propensity: float
    prediction: Prediction
    candidates: tuple[Candidate, ...]
    policy: str
    version: str
    shadow: Candidate | None = None
    sent: float | None = None
    first_token: float | None = None


@dataclass(slots=True, eq=False)
class Entry:
    """One open request.

    `prompt` and `expected` are whole tokens; `length_q` (Q,); `thinking` the median tokens before
    the answer, 0 where the model was never seen to think. `start_by` is the latest useful
    start, `work` the predicted seconds of service on the fastest replica, `row` its float columns
    in the order of `domain.columns.REQUEST_FLOATS`, `expires` when waiting ends. `order` is the
    order of arrival. `feasible`: an idle fleet would meet the limits with room to spare.
    `warm_until` ends its waiting for a warm replica, inf before it began.
    """

    request: InferenceRequest
    slo_class: SloClass
    account: Account
    admission: Admission
    arrived: float
    order: int
    allowed: Bools
    prompt: float
    expected: float
    median: float
    p90: float
    length_q: Floats
    thinking: float
    start_by: float
    work: float
    expires: float
    limits: tuple[float, float, float]
    row: Floats
    feasible: bool = True
    state: Literal["held", "committing", "sent", "gone"] = "held"
    held_once: bool = False
    ticket: int = 0
    refusals: int = 0
    attempts: int = 0
    attempt: Attempt | None = None
    claim: int | None = None
    warm_until: float = inf
    excluded: list[int] = field(default_factory=list)

    def exclude(self, route: int | None) -> None:
        """Do not try a route again, where it still is one."""
        if route is not None:
            self.excluded.append(route)

    @property
    def ripe(self) -> float:
        """When its patience ends: it has reached the ageing bound."""
        return self.arrived + self.slo_class.patience
