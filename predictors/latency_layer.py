"""The learned latency while it serves: on top of the roofline, watched, and taken back when wrong.

The layer keeps what outcomes teach (`predictors.latency.Pace`), puts the trees' word in place of
the roofline's on the shortlist, and watches both per class of replica (GPU, model, precision):

    error > roofline's for a while --> alarm: that class is the roofline's again
    error <= roofline's over the last outcomes --> the alarm ends

While an alarm lasts the trees are asked about every outcome all the same, so that recovery is seen.
Without a model the layer only takes rows down for the next fit. Deterministic: the same outcomes in
the same order give the same numbers; another model comes by `swap`, which the core calls for an
event.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from domain.columns import (
    LOAD_GRID,
    EstimateColumns,
    FleetColumns,
    Floats,
    Mask,
    RequestColumns,
    Routes,
)
from domain.fleet import FleetSpec
from domain.native import compiled
from domain.outcome import Cause, Outcome
from predictors import latency
from predictors.artifact import ArtifactError
from predictors.drift import PageHinkley
from predictors.joint import Reliability
from predictors.latency import (
    BASE_TTFT,
    ROOF_TPOT,
    ROOF_TTFT,
    Live,
    Pace,
    class_of,
    live_of,
    row_into,
)
from predictors.latency_gbdt import MIDDLE, LatencyGbdt, no_trees, refine_into

_log = logging.getLogger(__name__)

SHORTLIST = 8
"""Routes of one request that the trees are asked about."""
FORGET = 0.01
"""Weight of one outcome in the running error and coverage of a class."""
STEP = 0.02
"""Gain of the conformal factor: log(kappa) moves by this times (miss - 0.1)."""
MOST_KAPPA = 4.0
LEAST_TOKENS = 4.0
"""Answers shorter than this say too little about pace."""

_Z90 = (0.9 - float(LOAD_GRID[-2])) / float(LOAD_GRID[-1] - LOAD_GRID[-2])


def p90(quantiles: tuple[float, ...]) -> float:
    """The 90 % quantile from values at `LOAD_GRID`, linear in log between the last two."""
    low, high = math.log(max(quantiles[-2], 1e-9)), math.log(max(quantiles[-1], 1e-9))
    return math.exp(low + _Z90 * (high - low))


@dataclass(slots=True)
class Watch:
    """Running figures of one class: of the predictions that were acted on, and of both sources.

    `error` and `coverage` are (TTFT, TPOT): mean |predicted / actual - 1| and share below P90.
    """

    outcomes: int = 0
    error: list[float] = field(default_factory=lambda: [0.0, 0.0])
    coverage: list[float] = field(default_factory=lambda: [0.9, 0.9])
    detector: PageHinkley = field(
        default_factory=lambda: PageHinkley(reference=0.0, slack=0.03, threshold=4.0, recovery=60)
    )

    def saw(self, which: int, predicted: float, bound: float, actual: float) -> None:
        """One prediction (median and P90, s) with its outcome."""
        rate = max(FORGET, 1.0 / (1.0 + self.outcomes))
        error = min(abs(predicted / actual - 1.0), 10.0)
        self.error[which] += rate * (error - self.error[which])
        self.coverage[which] += FORGET * (float(actual <= bound) - self.coverage[which])


class LatencyLayer:
    """Learned latency over a fleet; `model` None takes rows down and leaves the roofline alone."""

    def __init__(self, model: LatencyGbdt | None = None, *, shortlist: int = SHORTLIST) -> None:
        self.model = model
        self.classes: dict[str, Watch] = {}
        self.refused = 0
        self._most = shortlist
        self._names: list[str] = []
        self._class: list[str] = []
        self._pace = Pace(0)
        self._kappa_of: dict[str, list[float]] = {}
        self._kappa = np.ones((2, 0))
        self._active = np.zeros(0)
        self.reliability = Reliability()
        self._live: tuple[FleetColumns, Live] | None = None
        self._last: tuple[Any, ...] | None = None
        self._row = np.zeros(latency.WIDTH)
        self._heads = np.zeros(4)
        self._picks = np.zeros(max(shortlist, 1), np.int64)
        self._kept = np.zeros((0, 0, 3))
        self._refine: Callable[..., None] | None = None
        self._row_into: Callable[..., None] | None = None
        self._ready: dict[str, LatencyGbdt] = {}

    # ---- models

    @property
    def version(self) -> str:
        """Of the model in force."""
        return "latency-roofline" if self.model is None else self.model.version

    @property
    def alarmed(self) -> tuple[str, ...]:
        """Classes whose learned latency is switched off by the drift alarm."""
        return tuple(name for name, watch in self.classes.items() if watch.detector.alarmed)

    def prepare(self, data: bytes) -> str:
        """Read a model off the event loop, for `swap` to find; its version.

        Raises: ArtifactError when it cannot be used.
        """
        model = LatencyGbdt.loads(data)
        self._ready = {model.version: model}
        return model.version

    def swap(self, version: str, data: bytes) -> None:
        """Take another model; one that cannot be used, or is not `version`, leaves the old one."""
        model = self._ready.pop(version, None)
        if model is None:
            try:
                model = LatencyGbdt.loads(data)
            except ArtifactError:
                _log.exception("the latency model was not taken; the old one serves on")
        if model is None or model.version != version:
            self.refused += 1
            return
        self.model = model
        for watch in self.classes.values():
            watch.detector.alarmed = False
        self._kappa_of.clear()
        self._bind_classes()

    # ---- fleet

    def bind(self, fleet: FleetSpec) -> None:
        """Take the fleet in; what was learned about replicas that stay, by name, is kept."""
        pace = Pace(len(fleet.replicas))
        for i, replica in enumerate(fleet.replicas):
            if replica.name in self._names:
                pace.copy_from(self._pace, self._names.index(replica.name), i)
        self._pace = pace
        self._names = [r.name for r in fleet.replicas]
        self._class = [class_of(r.profile) for r in fleet.replicas]
        self.classes = {name: self.classes.get(name) or Watch() for name in self._class}
        self._bind_classes()

    def _bind_classes(self) -> None:
        ones = [1.0, 1.0]
        kappa = [self._kappa_of.get(name, ones) for name in self._class]
        self._kappa = np.ascontiguousarray(np.array(kappa).reshape(-1, 2).T)
        self._active = np.array([float(not self.classes[n].detector.alarmed) for n in self._class])

    # ---- predictions

    def fill(
        self,
        requests: RequestColumns,
        fleet: FleetColumns,
        routes: Routes,
        mask: Mask,
        fixed: Floats,
        now: float,
        out: EstimateColumns,
    ) -> None:
        """Refine what the roofline wrote, `fixed` (m,) being its factors on a step; remembers only
        where `basis` is to look.
        """
        if self._live is None or self._live[0] is not fleet:
            self._live = fleet, live_of(fleet)
        live = self._live[1]
        if self._kept.shape[:2] != mask.shape:
            self._kept = np.zeros((*mask.shape, 3))
        self._last = requests, live, routes, fixed, now, out
        if self.model is None and self._refine is not None:
            return
        trees = no_trees() if self.model is None else self.model.trees
        arguments = (
            requests, live, routes, mask, self._pace.rows, fixed, trees,
            self._kappa, self._active, self.reliability.curve, self._most, now, self._row,
            self._heads, self._picks, self._kept, out,
        )  # fmt: skip
        if self._refine is None:
            # also without a model: the first swap must not wait for a compiler
            self._refine = compiled(refine_into, *arguments)
        if self.model is not None:
            self._refine(*arguments)

    def basis(self, i: int, c: int) -> tuple[float, ...]:
        """The row that request i's prediction on route c was made from, at the last `fill`."""
        if self._last is None:
            return ()
        requests, live, routes, fixed, now, out = self._last
        kept = self._kept[i, c].tolist() if self.model is not None else (0.0, 0.0, 0.0)
        used = kept[0] > 0.0
        ttft = kept[1] if used else out.ttft.item(i, c, MIDDLE)
        tpot = kept[2] if used else out.tpot.item(i, c, MIDDLE)
        row, cached = self._row, out.cached.item(i, c)
        arguments = (
            requests, live, routes, self._pace.rows, fixed, i, c, cached, ttft, tpot, now, row
        )  # fmt: skip
        if self._row_into is None:
            self._row_into = compiled(row_into, *arguments)
        self._row_into(*arguments)
        row[latency.USED] = float(used)
        return tuple(row.tolist())

    # ---- what comes in

    def stepped(self, replicas: Sequence[int], times: Sequence[float]) -> None:
        """A token came from each of these replicas at these times."""
        self._pace.stepped(replicas, times)

    def learn(self, outcome: Outcome, prefill: int) -> None:
        """Take one outcome in; `prefill` is the replica that computed its prompt."""
        prediction, replica = outcome.prediction, outcome.replica
        if prediction is None or replica is None or outcome.sent is None or not prediction.basis:
            return
        if len(prediction.basis) != latency.WIDTH or replica >= len(self._class):
            return
        basis = prediction.basis
        pace = self._pace
        pace.prefilled(prefill, outcome.ended, basis[latency.EXTRA])
        if outcome.cause is Cause.FINISHED:
            pace.ended(replica, outcome.ended, prediction.running)
        mu = self._centres(basis)
        if outcome.first_token is not None and outcome.request.stream:
            actual = outcome.first_token - outcome.sent
            if actual > 0.0:
                self._saw(0, prefill, basis, prediction.ttft, mu[0], actual)
                pace.learn_ttft(prefill, basis, math.log(actual / basis[BASE_TTFT]))
        tokens = outcome.usage.completion
        single = outcome.request.choices == 1 and outcome.request.stream
        if single and outcome.tpot is not None and outcome.tpot > 0 and tokens >= LEAST_TOKENS:
            self._saw(1, replica, basis, prediction.tpot, mu[1], outcome.tpot)
        if outcome.met is not None and outcome.cause is not Cause.SHED and basis[latency.USED]:
            self.reliability.observe(prediction.p_raw, met=outcome.met)

    def _centres(self, basis: tuple[float, ...]) -> tuple[float, float]:
        """Mu of TTFT and TPOT by the model in force, 0 where there is none."""
        if self.model is None:
            return 0.0, 0.0
        heads = self.model.heads(np.array(basis))
        return float(heads[0]), float(heads[2])

    def _saw(
        self,
        which: int,
        replica: int,
        basis: tuple[float, ...],
        quantiles: tuple[float, ...],
        mu: float,
        actual: float,
    ) -> None:
        """Error, coverage, conformal factor and drift of one class from one time."""
        name = self._class[replica]
        watch = self.classes[name]
        watch.outcomes += which == 0
        if quantiles:
            watch.saw(which, quantiles[MIDDLE], p90(quantiles), actual)
        if self.model is None:
            return
        roof = basis[(ROOF_TTFT, ROOF_TPOT)[which]]
        learned = basis[(BASE_TTFT, ROOF_TPOT)[which]] * math.exp(mu)
        was = watch.detector.alarmed
        if roof > 0.0:
            score = abs(math.log(actual / learned)) - abs(math.log(actual / roof))
            watch.detector.observe(min(max(score, -1.0), 1.0))
        if basis[latency.USED] and quantiles:
            self._stretch(which, name, missed=actual > p90(quantiles))
        if was != watch.detector.alarmed:
            self._bind_classes()
            what = "worse than the roofline: off" if not was else "fine again: on"
            _log.warning("learned latency of %s is %s", name, what)

    def _stretch(self, which: int, name: str, *, missed: bool) -> None:
        kappa = self._kappa_of.setdefault(name, [1.0, 1.0])
        moved = kappa[which] * math.exp(STEP * (float(missed) - 0.1))
        kappa[which] = min(max(moved, 1.0 / MOST_KAPPA), MOST_KAPPA)
        for r, each in enumerate(self._class):
            if each == name:
                self._kappa[which, r] = kappa[which]
