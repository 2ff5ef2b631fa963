"""What one process of a comparison does, and how many processes share the work.

A unit is one case for several policies, its yardsticks, or a scenario's knee. Units are answered in
this process, in several, or by actors of a Ray cluster; data sets and the compiled loop are loaded
once a process.
"""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from backends.sim.profiles import load_profiles
from domain.errors import ConfigError
from policies.config import PolicyConfig
from training.bound import ceiling
from training.evaluate import Runner, climb, guess
from training.lookahead import look_ahead
from training.measures import Report, fair, measure, settled, work_of
from training.scenario import Pools, Scenario, build

KNEE_SEED = 9001


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A policy under the name it has in tables."""

    label: str
    policy: PolicyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """Where the best classic heuristic stops meeting 90 % of the work; requests/s.

    `reached` is False if none ever met it: then `rate` is where the best has lost 10 points.
    """

    rate: float
    policy: str
    reached: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """What a case allows: a clairvoyant policy's report, and stationary ceilings by linear
    relaxation of plain attainment and of that by work (w = 5), where the relaxation applies.
    """

    scenario: str
    load: float
    seed: int
    look_ahead: Report
    plain: float | None
    by_work: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Work for one process: all these policies on one case, its yardsticks, or (no rate) the
    scenario's knee.
    """

    scenario: Scenario
    entrants: tuple[Entrant, ...]
    seed: int = 0
    load: float = 0.0
    rate: float | None = None
    yardstick: bool = False


class Worker:
    """What one process keeps between units: data sets, profiles, the compiled loop."""

    def __init__(self, data: Path | None, profiles: Path, runner: Runner | None = None) -> None:
        self._pools = Pools(data)
        self._profiles = load_profiles(profiles)
        self._runner = Runner() if runner is None else runner

    def reports(self, unit: Unit) -> list[tuple[str, bool, Report]]:
        """(label, live, report) of every policy of a unit."""
        assert unit.rate is not None
        case = build(
            unit.scenario, unit.rate, unit.seed, profiles=self._profiles, pools=self._pools
        )
        found = []
        for entrant in unit.entrants:
            run, live = self._runner.run(case, entrant.policy)
            found.append((entrant.label, live, measure(case, run, entrant.label)))
        return found

    def yardstick(self, unit: Unit) -> Yardstick:
        """Look-ahead under the unit's policies, and ceilings."""
        assert unit.rate is not None
        case = build(
            unit.scenario, unit.rate, unit.seed, profiles=self._profiles, pools=self._pools
        )
        counted = settled(case).astype(np.float64)
        return Yardstick(
            scenario=unit.scenario.name,
            load=unit.load,
            seed=unit.seed,
            look_ahead=look_ahead(
                case,
                [entrant.policy for entrant in unit.entrants],
                lambda part, policy: self._runner.run(part, policy)[0],
            ),
            plain=ceiling(case, np.ones(len(case.trace)), counted, stationary=True),
            by_work=ceiling(case, work_of(case, 5.0), counted, stationary=True),
        )

    def knee(self, unit: Unit) -> Knee:
        """The best classic heuristic's knee, around what the fleet could do."""
        at = replace(unit, seed=KNEE_SEED)
        case = build(unit.scenario, 1.0, KNEE_SEED, profiles=self._profiles, pools=self._pools)
        found = climb(
            lambda rate: [fair(report) for _, _, report in self.reports(replace(at, rate=rate))],
            0.5 * guess(case),
        )
        knees = dict(zip((e.label for e in unit.entrants), found.rates, strict=True))
        name = max(knees, key=knees.__getitem__)
        return Knee(rate=knees[name], policy=name, reached=found.reached)


# ---- many units


Result = Knee | Yardstick | list[tuple[str, bool, Report]]


def _answer(worker: Worker, unit: Unit) -> Result:
    if unit.rate is None:
        return worker.knee(unit)
    return worker.yardstick(unit) if unit.yardstick else worker.reports(unit)


def results(
    units: Sequence[Unit],
    *,
    data: Path | None,
    profiles: Path,
    jobs: int = 1,
    ray: str | None = None,
) -> Iterator[tuple[Unit, Result]]:
    """Every unit with its result, as they finish; in this process, in `jobs`, or on a Ray cluster.

    Raises: ConfigError without ray when `ray` names a cluster; RuntimeError if a process failed.
    """
    if not units:
        return
    if ray is not None:
        yield from _on_ray(units, data, profiles, ray)
    elif jobs == 1 or len(units) == 1:
        worker = Worker(data, profiles)
        for unit in units:
            yield unit, _answer(worker, unit)
    else:
        yield from _in_processes(units, data, profiles, jobs)


@dataclass(frozen=True, slots=True)
class _Failed:
    why: str


def _in_processes(
    units: Sequence[Unit], data: Path | None, profiles: Path, jobs: int
) -> Iterator[tuple[Unit, Result]]:
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    inbox.cancel_join_thread()  # what was not taken is of no use at the end
    for k, unit in enumerate(units):
        inbox.put((k, unit))
    workers = [
        context.Process(target=_work, args=(data, profiles, inbox, outbox), daemon=True)
        for _ in range(min(jobs, len(units)))
    ]
    for _ in workers:
        inbox.put(None)
    for process in workers:
        process.start()
    try:
        for _ in units:
            k, result = outbox.get()
            if isinstance(result, _Failed):
                raise RuntimeError(f"{units[k].scenario.name}: {result.why}")  # noqa: TRY004
            yield units[k], result
    finally:
        for process in workers:
            process.terminate()
            process.join()


def _work(data: Path | None, profiles: Path, inbox: Any, outbox: Any) -> None:
    worker = Worker(data, profiles)
    while (item := inbox.get()) is not None:
        k, unit = item
        try:
            outbox.put((k, _answer(worker, unit)))
        except Exception as exc:  # noqa: BLE001 - the parent process raises it
            outbox.put((k, _Failed(f"{type(exc).__name__}: {exc}")))


def _on_ray(
    units: Sequence[Unit], data: Path | None, profiles: Path, address: str
) -> Iterator[tuple[Unit, Result]]:
    try:
        import ray
        from ray.util import ActorPool
    except ModuleNotFoundError as exc:
        raise ConfigError("--ray needs the ray package: `pip install ray`") from exc

    class Remote(Worker):
        def answer(self, item: tuple[int, Unit]) -> tuple[int, Result]:
            return item[0], _answer(self, item[1])

    ray.init(address=address)
    try:
        count = max(int(ray.cluster_resources().get("CPU", 1)), 1)
        actor = ray.remote(Remote)
        pool = ActorPool([actor.remote(data, profiles) for _ in range(min(count, len(units)))])
        for k, result in pool.map_unordered(lambda a, v: a.answer.remote(v), enumerate(units)):
            yield units[k], result
    finally:
        ray.shutdown()
