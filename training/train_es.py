"""`sluice train policy`: the learned set scorer by an evolution strategy over the compiled loop.

It starts as the marginal rule (no residual, holding as the rule does) and moves the mean of a
CMA-ES (Hansen, arXiv 1604.00772) over `policies.scorers.actor`'s weights, five constants of the
rule, and the core's two (`shed_below`, `alpha_max`). Each generation draws worlds
(`training.worlds`) and fresh seeds; all its candidates and the start meet the same requests.
Fitness is the gain over the start in size-fair goodput averaged over targets from 80 to 100 %,
which is what the area under clipped attainment is; a world that gets worse counts twice. Every few
generations the mean is judged on worlds and seeds that it never meets, and the best mean so judged
is kept: the start itself, if none is better.

`--kind` with a rule's name tunes that rule's constants (`training.tune.KNOBS`) in the same worlds
with the same budget: what a comparison of learned and tuned needs.

    OUT/generations.jsonl           fitness of every generation: what a resumed run is told
    OUT/report.html, report.md      curves, gains by world, what was learned
    REGISTRY/entries/NAME.json      the policy with its card and the ranges it was trained on

Same arguments, same result, however often it is interrupted and however many processes run it.
Half a CPU-minute a generation.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from backends.sim.profiles import load_profiles, shipped
from domain.columns import EstimateColumns, FleetColumns, Mask, RequestColumns, Routes
from domain.errors import ConfigError
from policies import registry
from policies.config import ActorPolicy, PolicyConfig
from policies.factory import build_core
from policies.names import ACTOR_CONTEXTS, ACTOR_TRAITS, HOLD_CONTEXTS, TRAITS, Trait
from policies.traits import COUNT, seen_into
from training.compare import policy_of
from training.evaluate import Runner, policy_named
from training.informed import InformedEstimator
from training.intervals import last_at
from training.measures import Run, fair, measure
from training.scenario import Case, Pools, Scenario, read
from training.traces import Floats
from training.tune import KNOBS, knobs
from training.virtual import VirtualShell
from training.worlds import Ranges, World, case_of, draw, with_knee

LOADS: tuple[float, ...] = (0.6, 0.85, 1.1, 1.4)
FLOOR = 0.8
TARGETS = (0.9, 0.99)
RULE = policy_named("marginal", overload_target=0.0)
WEIGHT_STEP, HOLD_STEP, SHARE_STEP = 0.06, 0.12, 0.25
"""What one unit of the search is worth in a weight of the residual, in one of holding, and in the
share of the range of a rule's constant.
"""
CONSTANTS: Mapping[str, float] = {
    "loss": 0.2, "price": 0.35, "sharpness": 0.15, "hold_above": 0.3, "shed_below": 0.4,
    "alpha_max": 0.3,
}  # fmt: skip
"""And in the logarithm of a constant."""
SIZE_STEP = 0.1
WEIGHTS = len(ACTOR_TRAITS) * len(ACTOR_CONTEXTS)
LOGS_AT = WEIGHTS + len(HOLD_CONTEXTS)
DIMENSIONS = LOGS_AT + len(CONSTANTS) + 1

Tell = Callable[[int, int, str], None]


def policy_at(u: Floats) -> ActorPolicy:
    """The set scorer at a point (DIMENSIONS,) of the search; the origin is the marginal rule."""
    w = (WEIGHT_STEP * u[:WEIGHTS]).reshape(len(ACTOR_TRAITS), len(ACTOR_CONTEXTS))
    hold = HOLD_STEP * u[WEIGHTS:LOGS_AT]
    logs = u[LOGS_AT:-1]
    plain = RULE.model_dump()
    fields: dict[str, Any] = {
        name: _short(plain[name] * math.exp(step * float(x)))
        for (name, step), x in zip(CONSTANTS.items(), logs, strict=True)
    }
    fields["shed_below"] = min(fields["shed_below"], 0.9)
    fields["size"] = _short(min(abs(SIZE_STEP * float(u[-1])), 2.0))
    return ActorPolicy(
        kind="actor",
        overload_target=0.0,
        log_candidates=0,
        weights={
            x: {z: _short(w[k, j]) for j, z in enumerate(ACTOR_CONTEXTS) if w[k, j]}
            for k, x in enumerate(ACTOR_TRAITS)
            if w[k].any()
        },
        hold_more={z: _short(hold[j]) for j, z in enumerate(HOLD_CONTEXTS) if hold[j]},
        **fields,
    )


def rule_at(kind: str, u: Floats) -> PolicyConfig:
    """A rule at a point of the search over its knobs (D,); the origin has its defaults."""
    plain = policy_of(kind, {}).model_dump()
    found = {
        k.name: _short(k.at(k.share(float(plain[k.name])) + SHARE_STEP * float(x)))
        for k, x in zip(knobs(kind), u, strict=True)
        if x
    }
    return policy_of(kind, found)


def _short(x: float) -> float:
    return float(f"{x:.5g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, and how much; the same job gives the same result.

    `worlds` are drawn once; a generation meets `sample` of them at every load. `validate`: worlds
    that judge the mean every `every` generations.
    """

    scenarios: tuple[str, ...]
    kind: str = "actor"
    generations: int = 60
    population: int = 16
    seed: int = 1
    worlds: int = 48
    sample: int = 5
    validate: int = 10
    validation_seeds: int = 2
    every: int = 10
    sigma: float = 0.5
    ranges: Ranges = Ranges()

    @property
    def dimensions(self) -> int:
        """Of the search. Raises: ConfigError for a kind that has nothing to search."""
        return DIMENSIONS if self.kind == "actor" else len(knobs(self.kind))

    def policy(self, u: Floats) -> PolicyConfig:
        """The policy at a point (dimensions,) of the search."""
        return policy_at(u) if self.kind == "actor" else rule_at(self.kind, u)

    @property
    def start(self) -> PolicyConfig:
        """The rule that gains are counted from."""
        return RULE if self.kind == "actor" else rule_at(self.kind, np.zeros(self.dimensions))


class Arena:
    """Worlds, data and the compiled loop: what a candidate is judged with."""

    def __init__(
        self, job: Job, templates: Sequence[Scenario], data: Path | None, profiles: Path | None
    ) -> None:
        self.job = job
        self._templates = templates
        self._pools = Pools(data)
        self._profiles = load_profiles(shipped() if profiles is None else profiles)
        self._runner = Runner()
        self._worlds: dict[tuple[str, int], World] = {}

    def world(self, part: str, k: int) -> World:
        """The k-th world of a part (`train`, `validate`), with its knee."""
        if (part, k) not in self._worlds:
            number = {"train": 1, "validate": 2}[part]
            rng = np.random.default_rng([self.job.seed, number, k])
            template = self._templates[k % len(self._templates)]
            world = draw(template, self.job.ranges, rng)
            seed = 10_000 * number + k
            self._worlds[part, k] = with_knee(
                world, RULE, self._runner, self._pools, self._profiles, seed
            )
        return self._worlds[part, k]

    def cases(self, world: World, seed: int) -> list[Case]:
        """The world at every load; at one, drawn by the seed, if it needs the live core."""
        loads = LOADS
        if world.scenario.gateways > 1:
            loads = loads[seed % len(loads) :][:1]
        return [
            case_of(world, load * world.knee, seed, self._pools, self._profiles) for load in loads
        ]

    def run(self, case: Case, policy: PolicyConfig) -> Run:
        """One policy in one case."""
        return self._runner.run(case, policy)[0]

    def fair(self, case: Case, policy: PolicyConfig) -> float:
        """Its size-fair attainment."""
        return fair(measure(case, self.run(case, policy), policy.kind))


def worth(attainment: float) -> float:
    """What an attainment counts: the share of targets from `FLOOR` to 1 that it reaches, and a
    tenth of itself, so that there is a slope below.
    """
    return min(max((attainment - FLOOR) / (1.0 - FLOOR), 0.0), 1.0) + 0.1 * attainment


def gain(values: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> float:
    """Mean gain over worlds of mean worth over loads; losses count twice."""
    total = 0.0
    for mine, theirs in zip(values, base, strict=True):
        d = float(np.mean([worth(a) - worth(b) for a, b in zip(mine, theirs, strict=True)]))
        total += d if d > 0.0 else 2.0 * d
    return total / len(base)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A mean on the validation worlds: gain as it is trained on, geometric mean over worlds of the
    ratio of size-fair goodput to the start's by target, and the least of them at 90 %.
    """

    generation: int
    gain: float
    ratio: Mapping[str, float]
    least: float
    by_world: Sequence[float]


class Validation:
    """Worlds and seeds that training never meets, and what the start reaches there."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        job = arena.job
        self._cases: list[list[list[Case]]] = []
        for k in range(job.validate):
            world = arena.world("validate", k)
            if world.scenario.gateways > 1:  # a curve takes every load; the comparison has them
                world = replace(world, scenario=world.scenario.model_copy(update={"gateways": 1}))
            self._cases.append(
                [arena.cases(world, 20_000 + 100 * k + s) for s in range(job.validation_seeds)]
            )
        self._base = [self._curve(k, job.start) for k in range(job.validate)]

    def _curve(self, k: int, policy: PolicyConfig) -> Floats:
        """(seeds, loads) size-fair attainment in world k."""
        return np.array(
            [[self._arena.fair(case, policy) for case in cases] for cases in self._cases[k]]
        )

    def judge(self, generation: int, policy: PolicyConfig) -> Judged:
        """The policy beside the start."""
        loads = np.array(LOADS)
        ratios: dict[str, list[float]] = {f"{t:g}": [] for t in TARGETS}
        gains = []
        for k, base in enumerate(self._base):
            mine = self._curve(k, policy)
            gains.append(gain([mine.ravel().tolist()], [base.ravel().tolist()]))
            for t in TARGETS:
                a, b = (last_at(loads, c.mean(axis=0)[None, :], t)[0] for c in (mine, base))
                # below the grid nothing is known: such a world says nothing about that target
                ratios[f"{t:g}"].append(float(a / b) if a > 0.0 and b > 0.0 else math.nan)
        at90 = ratios["0.9"]
        return Judged(
            generation=generation,
            gain=float(np.mean(gains)),
            ratio={
                t: _short(float(np.exp(np.nanmean(np.log(r)))))
                if np.isfinite(r).any()
                else math.nan
                for t, r in ratios.items()
            },
            least=_short(float(np.nanmin(at90))) if np.isfinite(at90).any() else math.nan,
            by_world=[_short(r) for r in at90],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a job found: the best mean, how it was judged, the curve of judgements, seconds."""

    policy: PolicyConfig
    best: Judged
    curve: Sequence[Judged]
    fitness: Sequence[tuple[float, float]]
    """(mean, best) gain of every generation's candidates."""
    seconds: float
    worlds: Sequence[str]


class Log:
    """Generations that were run before, and a line for each that is run now."""

    def __init__(self, folder: Path, job: Job) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "generations.jsonl"
        head = {"job": _plain(job)}
        self.rows: list[dict[str, Any]] = []
        if self._path.exists():
            lines = self._path.read_text().splitlines()
            for line in lines:
                try:
                    self.rows.append(json.loads(line))
                except json.JSONDecodeError:
                    break  # the last line of a run that was killed
        if not self.rows:
            self.rows = [head]
        elif self._comparable(self.rows[0]) != self._comparable(head):
            raise ConfigError(f"{self._path} belongs to another job; take an empty folder")
        # rewritten whole, so that half a line at the end is gone
        self._path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    @staticmethod
    def _comparable(head: Mapping[str, Any]) -> dict[str, Any]:
        """A job may be continued with more generations."""
        return {k: v for k, v in head.get("job", {}).items() if k != "generations"}

    def known(self, generation: int) -> dict[str, Any] | None:
        """The line of a generation that was run before."""
        return self.rows[generation + 1] if generation + 1 < len(self.rows) else None

    def add(self, row: dict[str, Any]) -> None:
        """Keep a generation."""
        self.rows.append(row)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _plain(job: Job) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(asdict(job)))
    return fields


def train(
    arena: Arena,
    folder: Path,
    tell: Tell = lambda _done, _all, _what: None,
    minutes: float = math.inf,
    crew: Crew | None = None,
) -> Trained:
    """Run, or go on with, the arena's job; checkpoints in `folder`. Stops where `minutes`, of all
    calls together, are spent. `crew` runs the tasks; None: this process.
    """
    if crew is None:
        crew = partial(_alone, arena)
    import cma

    job, log = arena.job, Log(folder, arena.job)
    strategy = cma.CMAEvolutionStrategy(
        np.zeros(job.dimensions),
        job.sigma,
        {"seed": job.seed, "verbose": -9, "popsize": job.population, "maxiter": 1_000_000},
    )
    validation: Validation | None = None
    curve: list[Judged] = []
    fitness: list[tuple[float, float]] = []
    best, best_u, seconds, said = None, np.zeros(job.dimensions), 0.0, ""
    names: set[str] = set()
    for generation in range(job.generations):
        if seconds > 60.0 * minutes:
            break
        asked: list[Any] = strategy.ask()
        known = log.known(generation)
        row = known or _generation(crew, job, generation, [job.policy(x) for x in asked])
        strategy.tell(asked, [-v for v in row["gains"]])
        names |= set(row["worlds"])
        fitness.append((float(np.mean(row["gains"])), float(max(row["gains"]))))
        if (generation + 1) % job.every == 0 or generation + 1 == job.generations:
            mean = np.array(strategy.result.xfavorite)
            if "judged" not in row:
                began = time.process_time()
                validation = validation or Validation(arena)
                row["judged"] = asdict(validation.judge(generation + 1, job.policy(mean)))
                row["seconds"] = round(row["seconds"] + time.process_time() - began, 3)
            judged = Judged(**row["judged"])
            curve.append(judged)
            if judged.gain > (0.0 if best is None else best.gain):
                best, best_u = judged, mean
            said = f"goodput@90 x {judged.ratio['0.9']:.3f} of the start"
        if known is None:
            log.add(row)
        seconds += row["seconds"]
        tell(generation + 1, job.generations, said or f"gain {fitness[-1][0]:+.3f}")
    if best is None:
        best = Judged(
            generation=0, gain=0.0, ratio={f"{t:g}": 1.0 for t in TARGETS}, least=1.0, by_world=[]
        )
    return Trained(
        policy=job.policy(best_u),
        best=best,
        curve=curve,
        fitness=fitness,
        seconds=seconds,
        worlds=sorted(names),
    )


def _generation(
    crew: Crew, job: Job, generation: int, policies: Sequence[PolicyConfig]
) -> dict[str, Any]:
    """Gains of the candidates on worlds and seeds that this generation draws, the worlds'
    scenarios, and CPU seconds.
    """
    rng = np.random.default_rng([job.seed, 3, generation])
    chosen = rng.choice(job.worlds, size=min(job.sample, job.worlds), replace=False)
    halves = [list(part) for part in np.array_split(np.arange(len(policies)), 2)]
    tasks = [
        Task(world=int(k), seed=30_000 + generation, policies=tuple(policies[i] for i in half))
        for k in chosen
        for half in halves
    ]
    done = crew(tasks)
    gains = []
    for half, first in zip(halves, (0, 1), strict=True):
        mine = done[first::2]
        base = [a.start for a in mine]
        gains += [gain([a.values[i] for a in mine], base) for i in range(len(half))]
    return {
        "gains": [_short(g) for g in gains],
        "worlds": [a.scenario for a in done[::2]],
        "seconds": round(sum(a.seconds for a in done), 3),
    }


# ---- who runs it


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Policies to run in a training world, at every load, on the requests of one seed."""

    world: int
    seed: int
    policies: tuple[PolicyConfig, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Size-fair attainment by load, of the start and of every policy of a task."""

    scenario: str
    start: list[float]
    values: list[list[float]]
    seconds: float
    """Of CPU that it took."""


Crew = Callable[[Sequence[Task]], list[Answer]]


def _alone(arena: Arena, tasks: Sequence[Task]) -> list[Answer]:
    return [answer(arena, task) for task in tasks]


def answer(arena: Arena, task: Task) -> Answer:
    """Run a task."""
    began = time.process_time()
    world = arena.world("train", task.world)
    cases = arena.cases(world, task.seed)
    start = [arena.fair(case, arena.job.start) for case in cases]
    values = [[arena.fair(case, policy) for case in cases] for policy in task.policies]
    return Answer(
        scenario=world.scenario.name,
        start=start,
        values=values,
        seconds=time.process_time() - began,
    )


@contextmanager
def crew_of(arena: Arena, build: Callable[[], Arena], jobs: int) -> Iterator[Crew]:
    """This process, or `jobs` of them, each with the arena that `build` makes there. Who runs what
    changes nothing.
    """
    if jobs == 1:
        yield partial(_alone, arena)
        return
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    workers = [
        context.Process(target=_serve, args=(build, inbox, outbox), daemon=True)
        for _ in range(jobs)
    ]
    for worker in workers:
        worker.start()

    def run(tasks: Sequence[Task]) -> list[Answer]:
        for k, task in enumerate(tasks):
            inbox.put((k, task))
        found: dict[int, Answer] = {}
        while len(found) < len(tasks):
            k, result = outbox.get()
            if isinstance(result, str):
                raise RuntimeError(result)  # noqa: TRY004 - what went wrong in the other process
            found[k] = result
        return [found[k] for k in range(len(tasks))]

    try:
        yield run
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _serve(build: Callable[[], Arena], inbox: Any, outbox: Any) -> None:
    """One process of the crew."""
    arena = build()
    while True:
        k, task = inbox.get()
        try:
            outbox.put((k, answer(arena, task)))
        except Exception as exc:  # noqa: BLE001 - the parent process raises it
            outbox.put((k, f"{type(exc).__name__}: {exc}"))


# ---- what it was trained on


UNBOUNDED: tuple[Trait, ...] = ("ttft", "e2e", "running", "backlog", "cost")
"""Traits without a bound of their own, of those that the scorer reads in some form."""


@njit(cache=True, error_model="numpy")
def _widen(
    ranges: Floats,
    requests: RequestColumns,
    fleet: FleetColumns,
    routes: Routes,
    estimates: EstimateColumns,
    mask: Mask,
    now: float,
) -> None:
    """Let ranges (2, D), low and high, hold the traits of every pair of the mask."""
    x = np.empty(ranges.shape[1])
    for i in range(mask.shape[0]):
        for c in range(mask.shape[1]):
            if mask[i, c]:
                seen_into(x, requests, fleet, routes, estimates, i, c, now)
                for k in range(x.shape[0]):
                    ranges[0, k] = min(ranges[0, k], x[k])
                    ranges[1, k] = max(ranges[1, k], x[k])


class _Watcher(InformedEstimator):
    """The estimator, remembering the ranges of what it was asked about."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.trace.output, case.scenario.length_sigma or 0.0, case.seed)
        self.ranges = np.stack([np.full(COUNT, np.inf), np.full(COUNT, -np.inf)])

    def fill(self, *args: Any) -> None:
        """As the estimator does."""
        super().fill(*args)
        requests, fleet, routes, mask, now, out, _ = args
        _widen(self.ranges, requests, fleet, routes, out, mask, now)


def ranges_of(
    arena: Arena, policy: ActorPolicy, worlds: int = 8
) -> dict[Trait, tuple[float, float]]:
    """Ranges of the unbounded traits over the first training worlds at the least and the largest
    load, by the live core: outside of them best-fit decides.
    """
    found = []
    for k in range(min(worlds, arena.job.worlds)):
        world = arena.world("train", k)
        if world.scenario.gateways > 1:
            continue
        for case in arena.cases(world, 40_000 + k)[:: len(LOADS) - 1]:
            watcher = _Watcher(case)
            core = build_core(
                policy,
                fleet=case.believed,
                estimator=watcher,
                tenants=case.tenants,
                classes=case.classes,
            )
            VirtualShell(case, [core]).run()
            found.append(watcher.ranges)
    low, high = np.min([r[0] for r in found], axis=0), np.max([r[1] for r in found], axis=0)
    return {
        name: (_short(low[TRAITS.index(name)]), _short(high[TRAITS.index(name)]))
        for name in UNBOUNDED
    }


# ---- the job


DONE, NOT_BETTER = 0, 1


def main(argv: Sequence[str] | None = None, tell: Tell = lambda _done, _all, _what: None) -> int:
    """Run the job: 0 the policy is in the registry, 1 nothing better than the start was found.

    Raises: ConfigError.
    """
    parser = argparse.ArgumentParser(prog="sluice train policy", description=__doc__)
    parser.add_argument("--scenario", type=Path, nargs="+", required=True, help="templates")
    parser.add_argument("--algo", choices=("es",), default="es")
    parser.add_argument(
        "--kind",
        choices=("actor", *KNOBS),
        default="actor",
        help="the learned set scorer, or a rule whose constants are tuned",
    )
    parser.add_argument("--name", help="of the entry (the kind)")
    parser.add_argument("--registry", type=Path, default=Path(".sluice/policies"))
    parser.add_argument("--shadow", action="store_true", help="and let it score in shadow there")
    parser.add_argument(
        "--out", type=Path, default=Path(".sluice/train"), help="checkpoints, report"
    )
    parser.add_argument("--generations", type=int, default=60)
    parser.add_argument("--population", type=int, default=16)
    parser.add_argument("--requests", type=int, default=1500, help="of a case")
    parser.add_argument("--every", type=int, default=10, help="generations between judgements")
    parser.add_argument("--minutes", type=float, default=math.inf, help="at most, of all calls")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, help="folder of the data sets (or SLUICE_DATA)")
    parser.add_argument("--profiles", type=Path, help="folder of profiles, instead of the shipped")
    parser.add_argument("--nice", type=int, default=0, help="give way to others by so much")
    args = parser.parse_args(argv)
    if min(args.generations, args.every, args.requests, args.jobs) < 1 or args.population < 4:
        raise ConfigError(
            "--generations, --every, --requests, --jobs: 1 or more; --population: 4 or more"
        )
    if args.nice:
        os.nice(args.nice)
    templates = [read(path) for path in args.scenario]
    ranges = Ranges(requests=args.requests, live_requests=min(900, args.requests))
    job = Job(
        scenarios=tuple(t.name for t in templates),
        kind=args.kind,
        generations=args.generations,
        population=args.population,
        seed=args.seed,
        every=args.every,
        ranges=ranges,
    )
    try:
        build = partial(Arena, job, templates, args.data, args.profiles)
        arena = build()
        with crew_of(arena, build, args.jobs) as crew:
            found = train(arena, args.out, tell, args.minutes, crew)
        if found.best.generation == 0:
            print(f"no better than {job.start.kind} on the validation worlds; nothing written")
            return NOT_BETTER
        policy = found.policy
        if isinstance(policy, ActorPolicy):
            policy = policy.model_copy(update={"envelope": ranges_of(arena, policy)})
    except FileNotFoundError as exc:
        raise ConfigError(str(exc)) from exc
    command = ["sluice train policy --scenario", *map(str, args.scenario), "--algo", args.algo]
    for name in ("kind", "generations", "population", "requests", "every", "seed"):
        command += [f"--{name}", str(getattr(args, name))]
    name = args.name or args.kind
    entry = registry.entry_of(name, policy, _card(job, found, " ".join(command)))
    registry.probe(entry.policy)
    path = registry.write_entry(args.registry, entry)
    from training.policy_report import write

    write(args.out, arena, found, entry)
    if args.shadow:
        registry.change_state(
            args.registry, lambda state: registry.shadowed(state, name, time.time())
        )
    summary = {"entry": str(path), "hash": entry.hash[:12], "report": str(args.out / "report.html")}
    print(json.dumps(summary | entry.card["validation"], indent=1))
    return DONE


def _known(x: float) -> float | None:
    """JSON has no nan."""
    return None if math.isnan(x) else x


def _card(job: Job, found: Trained, command: str) -> dict[str, Any]:
    """What is known of a trained policy."""
    return {
        "job": "training.train_es",
        "command": command,
        "seed": job.seed,
        "starts from": job.start.kind,
        "scenarios": list(job.scenarios),
        "drawn": _plain(job)["ranges"],
        "generations": len(found.fitness),
        "population": job.population,
        "kept": found.best.generation,
        "cpu minutes": round(found.seconds / 60.0, 1),
        "validation": {
            "worlds": job.validate,
            "goodput@90 over the start": _known(found.best.ratio["0.9"]),
            "goodput@99 over the start": _known(found.best.ratio["0.99"]),
            "least @90": _known(found.best.least),
        },
        "limits": "simulated fleets only; one pool of replicas, no prefix blocks while training",
    }


if __name__ == "__main__":
    sys.exit(main())
