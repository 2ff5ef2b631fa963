"""Fleet-level decisions carried out in virtual time: controllers for `training.virtual.Script`.

Each keeps what came in the last seconds, as a gateway knows it (lengths are the gateway's
forecasts), asks `policies.elastic` what the fleet should be, and turns the difference into orders.
What a change costs is the simulator's (`backends.sim.actions.Costs`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from backends.sim.actions import Bounds, Costs, Flip, Order, Reshape, Scale, Stage
from backends.sim.profiles import load_profiles, shipped
from domain.errors import ConfigError
from domain.request import InferenceRequest
from domain.units import Seconds
from policies import elastic
from training.scenario import Case
from training.virtual import Controller, Script, Sight

FEWEST = 20
"""Requests in the window below which nothing is decided."""


class Window:
    """What came in the last `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._rows: deque[tuple[float, str, tuple[float, float, float, float]]] = deque()
        self._began: float | None = None

    def add(self, now: float, request: InferenceRequest, expected: float | None) -> None:
        """One more request."""
        slo = request.slo
        row = (
            float(request.prompt_tokens),
            float("nan") if expected is None else expected,
            inf if slo.ttft is None else float(slo.ttft),
            inf if slo.tpot is None else float(slo.tpot),
        )
        self._began = now if self._began is None else self._began
        self._rows.append((now, request.class_name, row))

    def sample(self, now: float) -> tuple[elastic.Sample, list[str], float] | None:
        """(requests, their classes, seconds they came in); None where they are too few."""
        while self._rows and self._rows[0][0] < now - self.seconds:
            self._rows.popleft()
        if len(self._rows) < FEWEST or self._began is None:
            return None
        seconds = min(self.seconds, max(now - self._began, 1e-9))
        rows = elastic.sample([row for _, _, row in self._rows])
        return rows, [name for _, name, _ in self._rows], seconds


class _Controller:
    """Listens; what it orders is for others to say."""

    def __init__(self, every: float, window: float) -> None:
        self.every = every
        self._window = Window(window)

    def arrived(self, now: float, request: InferenceRequest, expected: float | None) -> None:
        """A request came."""
        self._window.add(now, request, expected)


class PoolBounds(_Controller):
    """Adaptive length pools over replicas of one profile, which keep their order: the first take
    the shortest.
    """

    def __init__(
        self, every: float = 2.0, window: float = 15.0, *, most: int = 4, margin: float = 0.1
    ) -> None:
        super().__init__(every, window)
        self._most = most
        self._margin = margin
        self._bands: tuple[elastic.Band, ...] = ()

    def orders(self, now: float, sight: Sight) -> Sequence[Order]:
        """Bounds of the replicas whose pool has changed."""
        seen = self._window.sample(now)
        if seen is None:
            return []
        rows, _, seconds = seen
        if not self._bands:
            self._bands = bands_of(sight)
        found = elastic.pools(
            self._bands,
            rows,
            seconds,
            sight.specs[0].profile,
            most=self._most,
            margin=self._margin,
        )
        self._bands = found.bands
        return [
            Bounds(replica=r, low=low, high=high)
            for r, (low, high) in enumerate(bounds_of(found.bands))
            if (low, high) != (sight.specs[r].pool_low, sight.specs[r].pool_high)
        ]


def bands_of(sight: Sight) -> tuple[elastic.Band, ...]:
    """Pools as the replicas' bounds say, in their order."""
    bands: list[elastic.Band] = []
    for spec in sight.specs:
        beside = bool(bands) and bands[-1].low == spec.pool_low
        count = bands.pop().replicas + 1 if beside else 1
        bands.append(elastic.Band(low=spec.pool_low, high=spec.pool_high, replicas=count))
    return tuple(bands)


def bounds_of(bands: Sequence[elastic.Band]) -> list[tuple[float, float]]:
    """(low, high) of each replica, in order."""
    return [(band.low, band.high) for band in bands for _ in range(band.replicas)]


class Roles(_Controller):
    """Prefill and decode replicas of one profile change sides by predicted TTFT and TPOT."""

    def __init__(
        self, every: float = 1.0, window: float = 8.0, *, margin: float = 0.2, calm: float = 0.5
    ) -> None:
        super().__init__(every, window)
        self._margin = margin
        self._calm = calm

    def orders(self, now: float, sight: Sight) -> Sequence[Order]:
        """At most one flip: the serving replica that is empty first."""
        seen = self._window.sample(now)
        if seen is None:
            return []
        rows, _, seconds = seen
        phases = [spec.phase for spec in sight.specs]
        prefill = phases.count("prefill")
        queued = sight.held + sum(
            float(sight.backlog[r]) for r, phase in enumerate(phases) if phase == "prefill"
        )
        found = elastic.split(
            elastic.demand(rows, seconds),
            sight.specs[0].profile,
            len(phases),
            prefill,
            queued=queued,
            margin=self._margin,
            calm=self._calm,
        )
        if found.prefill == prefill:
            return []
        giver = "decode" if found.prefill > prefill else "prefill"
        load = sight.running if giver == "decode" else sight.backlog
        serving = [
            r
            for r, phase in enumerate(phases)
            if phase == giver and sight.stages[r] is Stage.SERVING
        ]
        if len(serving) < 2:
            return []  # the last one goes on until another serves
        replica = min(serving, key=lambda r: (float(load[r]), r))
        return [Flip(replica=replica, phase="prefill" if giver == "decode" else "decode")]


class Plans(_Controller):
    """Parallel layouts by goodput per GPU. Replica r is the engine that begins at GPU r; one whose
    GPU belongs to another's engine is down. `patience` looks in a row must want the same plan
    before engines are emptied for it, those of at most `share` of the GPUs at a time, or of one
    place.
    """

    def __init__(
        self,
        offers: Sequence[elastic.Layout],
        every: float = 2.0,
        window: float = 10.0,
        *,
        classes: Sequence[str],
        target: float = 0.8,
        patience: int = 2,
        share: float = 0.5,
    ) -> None:
        super().__init__(every, window)
        self._offers = list(offers)
        self._classes = list(classes)
        self._target = target
        self._patience = patience
        self._share = share
        self._wanted: list[int] | None = None
        self._goal: list[int] | None = None
        self._seen = 0

    def orders(self, now: float, sight: Sight) -> Sequence[Order]:
        """Drain what has to make room, start what has room."""
        present = self._standing(sight)
        if self._goal is None:
            self._goal = present
        self._plan(now, present)
        return self._towards(self._goal, present, sight)

    def _standing(self, sight: Sight) -> list[int]:
        """(gpus,) index of the layout that begins at each GPU, -1 where none does."""
        profiles = [offer.profile for offer in self._offers]
        return [
            -1 if stage is Stage.DOWN else profiles.index(spec.profile)
            for spec, stage in zip(sight.specs, sight.stages, strict=True)
        ]

    def _plan(self, now: float, present: Sequence[int]) -> None:
        """Set another goal where the same plan was wanted for long enough."""
        seen = self._window.sample(now)
        if seen is None or self._goal is None:
            return
        rows, names, seconds = seen
        tiers = np.array([self._classes.index(name) for name in names], np.int64)
        asked = elastic.demand(rows, seconds, tiers, len(self._classes))
        found = elastic.layouts(asked, self._offers, len(present), target=self._target)
        wanted = elastic.arranged(self._goal, found.counts, self._offers, len(present))
        self._seen = self._seen + 1 if wanted == self._wanted else 1
        self._wanted = wanted
        if self._seen >= self._patience:
            self._goal = wanted

    def _towards(
        self, goal: Sequence[int], present: Sequence[int], sight: Sight
    ) -> Sequence[Order]:
        orders: list[Order] = []
        told: set[int] = set()
        widths = [offer.gpus for offer in self._offers]
        still = sum(
            widths[max(o, 0)]
            for o, stage in zip(present, sight.stages, strict=True)
            if stage in {Stage.DRAINING, Stage.STILL}
        )
        for start, o in enumerate(goal):
            if o < 0 or present[start] == o:
                continue
            block = range(start, start + widths[o])
            inside = [r for r in range(len(goal)) if _covers(r, present, widths, block)]
            if not inside:
                orders.append(Reshape(replica=start, profile=self._offers[o].profile))
                continue
            serving = [r for r in inside if sight.stages[r] is Stage.SERVING and r not in told]
            freed = sum(widths[present[r]] for r in serving)
            if serving and (still == 0 or still + freed <= self._share * len(goal)):
                orders += [Scale(replica=r, up=False) for r in serving]
                told.update(serving)
                still += freed
        return orders


def _covers(r: int, present: Sequence[int], widths: Sequence[int], block: range) -> bool:
    """Whether the engine that begins at GPU r stands on one of these GPUs."""
    return present[r] >= 0 and r < block.stop and r + widths[present[r]] > block.start


CONTROLLERS = ("pools", "roles", "layouts", "size")


def script_for(case: Case, kind: str) -> Script:
    """The controller of that name over the case's fleet, with the costs its scenario names.

    Raises: ConfigError for an unknown name, or layouts of a scenario that names none.
    """
    changes = case.scenario.changes
    controller: Controller
    match kind:
        case "pools":
            controller = PoolBounds()
        case "roles":
            controller = Roles()
        case "layouts":
            if not changes.layouts:
                raise ConfigError(f"scenario {case.scenario.name!r} names no layouts to choose of")
            known = load_profiles(shipped())
            offers = [
                elastic.Layout(name=name, gpus=gpus, profile=known[name])
                for name, gpus in changes.layouts.items()
            ]
            controller = Plans(offers, classes=tuple(case.scenario.classes))
        case "size":
            controller = Size(changes.warm_up)
        case _:
            raise ConfigError(f"unknown controller {kind!r}; known: {', '.join(CONTROLLERS)}")
    return replace(static_script(case), controller=controller)


def static_script(case: Case) -> Script:
    """Nothing changes; replicas that the scenario has down at first stay down."""
    changes = case.scenario.changes
    costs = Costs(warm_up=Seconds(changes.warm_up), flip=Seconds(changes.flip))
    return Script(costs=costs, down=changes.down)


class Size(_Controller):
    """As many replicas as the forecast asks for when a started one would serve (`warm_up` s from
    now). `foresee` False goes by what comes now.
    """

    def __init__(
        self,
        warm_up: float,
        every: float = 5.0,
        window: float = 15.0,
        *,
        target: float = 0.7,
        foresee: bool = True,
        slack: int = 3,
    ) -> None:
        super().__init__(every, window)
        self._warm_up = warm_up
        self._target = target
        self._foresee = foresee
        self._slack = slack  # looks in a row that want fewer before one goes
        self._fewer = 0
        self._counts: list[float] = []

    def orders(self, now: float, sight: Sight) -> Sequence[Order]:
        """Start all that lack at once; let one go at a time."""
        seen = self._window.sample(now)
        if seen is None:
            return []
        rows, _, seconds = seen
        rate = len(rows.prompt) / seconds
        self._counts.append(rate)
        ahead = (self._warm_up + self.every) / self.every if self._foresee else 0.0
        factor = max(elastic.forecast(self._counts, ahead) / rate, 1.0) if self._foresee else 1.0
        wanted = elastic.wanted(
            elastic.demand(rows, seconds).times(factor),
            sight.specs[0].profile,
            len(sight.specs),
            target=self._target,
            queued=sight.held,
        )
        there = [r for r, s in enumerate(sight.stages) if s in {Stage.SERVING, Stage.STILL}]
        lacking = wanted - len(there)
        if lacking > 0:
            self._fewer = 0
            down = [r for r, s in enumerate(sight.stages) if s is Stage.DOWN]
            return [Scale(replica=r, up=True) for r in down[:lacking]]
        self._fewer = self._fewer + 1 if lacking < 0 else 0
        serving = [r for r in there if sight.stages[r] is Stage.SERVING]
        if self._fewer < self._slack or len(serving) < 2:
            return []
        self._fewer = 0
        return [Scale(replica=min(serving, key=lambda r: (float(sight.running[r]), r)), up=False)]
