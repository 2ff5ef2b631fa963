"""What may be done to a modelled fleet while it serves, and what each change costs.

    serving ──Drain, Scale down─► draining ──empty─► down ──Scale up─► still ──warm_up─► serving
    serving ──Flip──────────────► draining ──empty─► still ──flip─────► serving
    serving ──Reshape───────────► draining ──empty─► still ──warm_up──► serving

A draining replica takes nothing new; what runs there runs to its end, or is handed over. `Bounds`
of a length pool cost nothing and hold at once; a `HandOver` costs the time in which the KV moves
(`backends.sim.replica`). Nothing here decides: a controller gives orders, `FleetActions` carries
them out in virtual time and says what gateways must hear (`Notice`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import inf

from backends.sim.fleet import FleetModel
from domain.fleet import Phase, Profile, ReplicaSpec
from domain.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds that a replica stands still: `warm_up` until a started engine serves (weights,
    graphs, first compilation), `flip` to change its phase.
    """

    warm_up: Seconds = Seconds(60.0)
    flip: Seconds = Seconds(2.0)

    def __post_init__(self) -> None:
        if self.warm_up < 0 or self.flip < 0:
            raise ValueError("costs must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Replica `replica` shall take nothing new and go down once empty; so does `Scale` down."""

    replica: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A replica that is down starts (`up`), or one that serves drains."""

    replica: int
    up: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A replica serves another phase from when it is empty and `flip` seconds have passed."""

    replica: int
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshape:
    """A replica is restarted, or started, with another profile: another parallel layout, precision
    or engine.
    """

    replica: int
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The predicted total lengths, in tokens, that a length pool's replica takes."""

    replica: int
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """A job that decodes goes on elsewhere."""

    job: int
    to: int


Order = Drain | Scale | Flip | Reshape | Bounds | HandOver


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What gateways must hear of a replica: its description, and whether it takes requests."""

    replica: int
    spec: ReplicaSpec
    usable: bool


class Stage(Enum):
    """Where a replica stands; the module has the table."""

    SERVING = "serving"
    DRAINING = "draining"
    STILL = "still"  # warming up or changing
    DOWN = "down"


@dataclass(slots=True)
class _Replica:
    spec: ReplicaSpec
    stage: Stage = Stage.SERVING
    then: ReplicaSpec | None = None
    """What it becomes once empty; None: it goes down."""
    pause: Seconds = Seconds(0.0)
    until: float = inf
    since: float = 0.0
    still: float = 0.0


class FleetActions:
    """Carries out orders over a `FleetModel`; the shell calls `settle` after everything that
    happened at an instant, and wakes it at `due_at`.

    `down`: replicas that are not started yet.
    """

    def __init__(
        self,
        model: FleetModel,
        replicas: Sequence[ReplicaSpec],
        costs: Costs | None = None,
        *,
        down: Sequence[int] = (),
    ) -> None:
        self._model = model
        self._costs = costs if costs is not None else Costs()
        self._replicas = [_Replica(spec) for spec in replicas]
        for r in down:
            self._replicas[r].stage = Stage.DOWN
            model.close(r)

    def spec(self, r: int) -> ReplicaSpec:
        """What replica r is, or becomes once it is empty."""
        x = self._replicas[r]
        return x.spec if x.then is None else x.then

    def stage(self, r: int) -> Stage:
        """Where replica r stands."""
        return self._replicas[r].stage

    def still_seconds(self, r: int) -> float:
        """Seconds that replica r has warmed up or changed, so far as they are over: paid for, and
        worth nothing.
        """
        return self._replicas[r].still

    @property
    def due_at(self) -> float:
        """When the next replica is ready; inf if none is to be."""
        return min((x.until for x in self._replicas), default=inf)

    def order(self, order: Order, now: float) -> list[Notice]:
        """Begin to carry out an order; what gateways must hear now.

        Raises: ValueError for one that the replica's stage, or room, does not allow.
        """
        match order:
            case HandOver(job=job, to=to):
                if not self._model.hand_over(job, to, now):
                    raise ValueError(f"job {job} does not decode anywhere but on replica {to}")
                return []
            case Bounds(replica=r, low=low, high=high):
                x = self._replicas[r]
                x.spec = replace(x.spec, pool_low=low, pool_high=high)
                if x.then is not None:
                    x.then = replace(x.then, pool_low=low, pool_high=high)
                return [self._notice(r)]
            case Scale(replica=r, up=True):
                x = self._in(r, Stage.DOWN)
                self._pause(x, x.spec, self._costs.warm_up, now)
                return []
            case Drain(replica=r) | Scale(replica=r):
                return self._drain(r, None, Seconds(0.0), now)
            case Flip(replica=r, phase=phase):
                spec = replace(self._replicas[r].spec, phase=phase)
                return self._drain(r, spec, self._costs.flip, now)
            case Reshape(replica=r, profile=profile):
                self._model.check_shape(profile)
                spec = replace(self._replicas[r].spec, profile=profile)
                if self.stage(r) is Stage.DOWN:
                    self._pause(self._replicas[r], spec, self._costs.warm_up, now)
                    return []
                return self._drain(r, spec, self._costs.warm_up, now)

    def settle(self, now: float) -> list[Notice]:
        """Let empty replicas that drain change or go down, and those that are ready serve."""
        notices = []
        for r, x in enumerate(self._replicas):
            if x.stage is Stage.DRAINING and self._model.empty(r):
                self._model.close(r)
                if x.then is None:
                    x.stage = Stage.DOWN
                else:
                    self._pause(x, x.then, x.pause, now)
            if x.stage is Stage.STILL and x.until <= now:
                x.stage, x.until = Stage.SERVING, inf
                x.still += now - x.since
                self._model.reshape(r, x.spec.profile)
                self._model.revive(r)
                notices.append(self._notice(r))
        return notices

    def _in(self, r: int, stage: Stage) -> _Replica:
        x = self._replicas[r]
        if x.stage is not stage:
            raise ValueError(f"replica {r} is {x.stage.value}, not {stage.value}")
        return x

    def _drain(self, r: int, then: ReplicaSpec | None, pause: Seconds, now: float) -> list[Notice]:
        x = self._in(r, Stage.SERVING)
        x.stage, x.then, x.pause = Stage.DRAINING, then, pause
        return [self._notice(r), *self.settle(now)]

    def _pause(self, x: _Replica, spec: ReplicaSpec, pause: Seconds, now: float) -> None:
        x.spec, x.then = spec, None
        x.stage, x.since, x.until = Stage.STILL, now, now + pause

    def _notice(self, r: int) -> Notice:
        x = self._replicas[r]
        return Notice(replica=r, spec=x.spec, usable=x.stage is Stage.SERVING)
