"""A shell for tests: plays the store and keeps the books that the core must agree with."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import TypeAdapter

from domain.events import (
    Abort,
    Action,
    Arrived,
    Commit,
    Committed,
    Event,
    Hold,
    Send,
    Settle,
    Shed,
)
from domain.fleet import FleetSpec, Profile, ReplicaSpec, Variant
from domain.request import InferenceRequest, Slo, SloClass, Tenant
from policies.config import PolicyConfig
from policies.core import DecisionCore
from policies.factory import build_core
from predictors.estimator import BaselineEstimator

SCORERS = (
    "random",
    "round_robin",
    "weighted_round_robin",
    "least_requests",
    "least_tokens",
    "power_of_two",
    "lmetric",
    "best_fit",
    "prefix_affinity",
    "sticky",
    "predicted",
    "just_enough",
    "pools",
    "marginal",
    "cheapest",
    "linear",
    "actor",
    "network",
    "bandit",
    "drift_plus_penalty",
)

_POLICY = TypeAdapter(PolicyConfig)

CLASSES = (
    SloClass(name="interactive", rank=0, slo=Slo(ttft=1.0, tpot=0.1)),
    SloClass(name="standard", rank=1, slo=Slo(ttft=5.0)),
    SloClass(name="batch", rank=2, sheddable=False, max_wait=30.0, patience=2.0),
)


def policy(kind: str, **kwargs) -> PolicyConfig:
    """The configuration of a policy by name."""
    return _POLICY.validate_python({"kind": kind} | kwargs)


def small_fleet(m: int = 3, **profile) -> FleetSpec:
    """M replicas of different speeds; the odd ones run the int8 variant."""
    base = {"max_seqs": 4, "kv_capacity": 6000.0, "max_context": 4096} | profile
    replicas = tuple(
        ReplicaSpec(
            name=f"r{i}",
            variant="int8" if i % 2 else "full",
            weight=1.0 + i,
            profile=Profile(weights=0.01 * (1 + i), per_token=5e-5 * (1 + i), **base),
        )
        for i in range(m)
    )
    return FleetSpec(
        replicas=replicas,
        variants=(
            Variant(name="full", model="m", quality=0.9),
            Variant(name="int8", model="m", quality=0.7),
        ),
    )


def make_core(
    kind: str = "best_fit",
    fleet: FleetSpec | None = None,
    tenants: Sequence[Tenant] = (Tenant(name="t"), Tenant(name="u", weight=2.0)),
    classes: Sequence[SloClass] = CLASSES,
    **options,
) -> DecisionCore:
    """A fresh core over a small fleet."""
    return build_core(
        policy(kind, **options),
        fleet=fleet or small_fleet(),
        estimator=BaselineEstimator(),
        tenants=tenants,
        classes=classes,
    )


def request(id_: str, **kwargs) -> InferenceRequest:
    """A small request of tenant t for model m."""
    base = {
        "tenant": "t",
        "model": "m",
        "prompt_tokens": 100.0,
        "max_tokens": 64.0,
        "tie": sum(map(ord, id_)),
    }
    return InferenceRequest(id=id_, **(base | kwargs))


class Shell:
    """Drives a core with the memory store's answers; logs events and actions; checks every promise
    on the way.
    """

    def __init__(self, core: DecisionCore) -> None:
        self.core = core
        self.log: list[tuple[Event, list[Action]]] = []
        self.sends: dict[str, Send] = {}
        self.settled: dict[str, Settle] = {}
        self.shed: dict[str, Shed] = {}
        self.held: set[str] = set()
        self.aborted: list[Abort] = []
        self.arrived: set[str] = set()

    def tell(self, event: Event) -> list[Action]:
        """Hand one event over, play the store, and return every action that followed."""
        if isinstance(event, Arrived):
            self.arrived.add(event.request.id)
        actions = self.core.handle(event)
        self.log.append((event, actions))
        seen = list(actions)
        for action in actions:
            match action:
                case Commit():
                    seen += self.tell(Committed(event.at, action.id, action.attempt))
                case Send():
                    assert action.id not in self.settled, "sent after it was settled"
                    self.sends[action.id] = action
                case Shed():
                    self.shed[action.id] = action
                case Hold():
                    self.held.add(action.id)
                case Abort():
                    self.aborted.append(action)
                    self.sends.pop(action.id)
                case Settle():
                    assert action.id not in self.settled, "settled twice"
                    self.settled[action.id] = action
                    self.sends.pop(action.id, None)
        return seen

    def assert_empty(self) -> None:
        """Nothing is left anywhere in the core."""
        core, columns = self.core, self.core.columns
        assert not core.open
        assert len(core.queue) == 0
        assert core.queue.work == 0.0
        for name in ("running", "context", "backlog_tokens", "kv_used"):
            assert not getattr(columns, name).any(), name
        assert not columns.n_streams.any()
        assert not core.state._claims
        assert (core.state.claimed == -1).all()
