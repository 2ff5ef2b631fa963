"""Ports: what the decision core asks of predictors, policies and stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from domain.columns import (
    Draws,
    EstimateColumns,
    FleetColumns,
    Floats,
    Mask,
    Params,
    RequestColumns,
    Routes,
    Scores,
)
from domain.events import Commit, Committed, Settle
from domain.fleet import FleetSpec
from domain.length import LengthDistribution
from domain.outcome import Outcome
from domain.request import InferenceRequest, QuotaUsage, Tenant

Kernel = Callable[
    [Params, RequestColumns, FleetColumns, Routes, EstimateColumns, Mask, Draws, float, Scores],
    None,
]
"""A compiled scoring function: (params, requests, fleet, routes, estimates, mask, draws, now, out).

Writes `out.route` (n, c), higher is better, only where the mask is set. `draws` is (n, c), uniform
in [0, 1): the only source of chance. No input is changed.
"""


class Lesson(NamedTuple):
    """What a settled request teaches a scorer.

    `rank` is its class's, `met` whether its limits were met, None where that says nothing;
    `quality` the chance that the answer was good enough. `traits` (D,) are those of the chosen
    route (`policies.traits`), None if it was never sent.
    """

    rank: int
    met: bool | None
    quality: float
    traits: Floats | None


class OnlineLearner(Protocol):
    """Learns from what became of requests, whoever decided them; returns the new parameters."""

    def learn(self, lesson: Lesson) -> Params:
        """Take one lesson in; writes the scorer's own parameters, which it returns."""


class Scorer(Protocol):
    """A policy: one compiled kernel with flat parameters.

    `unit` is `rank` (scores compare routes of one request only) or `value` (expected limits met:
    requests compare too).
    """

    @property
    def name(self) -> str:
        """Name in config, logs and metrics."""

    @property
    def version(self) -> str:
        """Hash or number of what decides; goes into every log line."""

    @property
    def unit(self) -> Literal["rank", "value"]:
        """What a score means; see the class."""

    @property
    def needs_estimates(self) -> bool:
        """Whether the kernel reads the estimate columns."""

    @property
    def random(self) -> bool:
        """Whether the kernel reads the draws."""
        ...

    @property
    def params(self) -> Params:
        """Everything tuned or learned, one flat float64 vector."""

    @property
    def kernel(self) -> Kernel:
        """The compiled function."""

    @property
    def learner(self) -> OnlineLearner | None:
        """What changes `params` while the scorer serves; None: nothing does."""
        ...

    @property
    def envelope(self) -> Floats | None:
        """Lowest and highest traits (2, D) that a learned scorer was fitted on; None: a rule."""
        ...


class Estimator(Protocol):
    """Predictions: length, latency, quality and P(SLO), as distributions.

    `bind` is called once per fleet, before anything else. `fill` writes every column of `out` where
    the mask (n, c) is set, from the columns and `requests_of` (the same n requests); it never
    changes state, so looking twice gives the same. `learn` is called by the core with every
    outcome, so that a replay learns the same.
    """

    @property
    def version(self) -> str:
        """Hash or number of what decides; goes into every log line."""

    def bind(self, fleet: FleetSpec, routes: Routes) -> None:
        """Take the fleet in; predictions index its replicas and routes."""

    def length(self, request: InferenceRequest) -> LengthDistribution:
        """Distribution of output tokens of this request."""

    def thinking(self, request: InferenceRequest) -> LengthDistribution | None:
        """Distribution of the place of the first answer token in the output, 1 being at once; None
        where the model was never seen to think.
        """

    def answering(self, request: InferenceRequest, thought: float) -> LengthDistribution | None:
        """Distribution of the answer's tokens now that the request has thought for so many; None
        where the model was never seen to think.
        """

    def fill(
        self,
        requests: RequestColumns,
        fleet: FleetColumns,
        routes: Routes,
        mask: Mask,
        now: float,
        out: EstimateColumns,
        requests_of: Sequence[InferenceRequest],
    ) -> None:
        """Write the predictions of every masked (request, route) into `out`."""

    def stepped(self, replicas: Sequence[int], times: Sequence[float]) -> None:
        """A token came from each of these replicas at these times, so a step of it had ended."""

    def basis(self, index: int, route: int) -> tuple[float, ...]:
        """What a learned latency model saw of the `index`-th request on a route at the last `fill`,
        for `Prediction.basis`; empty where there is none.
        """

    def feedback(self, variant: str, score: float) -> float | None:
        """Take in how good (0 to 1) a client found an answer of a variant; the variant's base rate
        from now on, None where it is not known.
        """

    def swap(self, version: str, data: bytes) -> None:
        """Take another model of this version, from its bytes; one that cannot be used is left."""

    def learn(self, outcome: Outcome) -> None:
        """Take one outcome in."""


class Store(Protocol):
    """Where reservations and bookings are agreed between gateways.

    `commit` answers at once (memory) or later through `answer`, given at construction. Idempotent
    by request id.
    """

    def commit(self, action: Commit, now: float) -> Committed | None:
        """Reserve and book; None when the answer comes later."""

    def settle(self, action: Settle, now: float) -> None:
        """Give back what was reserved and not used."""

    def reload(self, tenants: Mapping[str, Tenant]) -> None:
        """Take other quotas; tenants are matched by name, levels are kept."""

    async def usage(self, tenants: Sequence[str]) -> Mapping[str, Mapping[str, QuotaUsage]] | None:
        """What all gateways together have counted of these tenants, by tenant and meter (`tenant`,
        `key:NAME`, `model:NAME`). None where nobody counts for all, or who does is away.
        """
