"""Fleets that change while they serve, beside every fixed one: docs/elastic.md.

    python benchmarks/elastic.py --jobs 2              10 seeds
    python benchmarks/elastic.py --small --out X       everything once, 2 seeds, one load

Each decision of `policies.elastic` in a scenario made for it (configs/scenarios/elastic), and where
it has nothing to win. Fixed fleets are tried at every setting, and the best of them on these very
seeds is what the changing one is measured against. Runs are kept in --out, so that a call goes on
where the last one stopped. The section "What it says" is written by hand and kept.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.table import reading, told
from policies import elastic
from training.compare import Cell, Outcome, policy_of
from training.elastic import script_for, static_script
from training.evaluate import Runner, run_live
from training.intervals import Interval
from training.measures import Report, fair, measure
from training.scenario import Case, Replicas, Scenario, build, read
from training.table import against

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "configs" / "scenarios" / "elastic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A fleet and what is done to it: a scenario (with its fleet), a policy, a controller's name or
    None. `planned` gives the pools that are best for the whole trace, known beforehand.
    """

    label: str
    scenario: Scenario
    policy: str = "marginal"
    controller: str | None = None
    fixed: bool = False
    planned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Ways that meet the same requests, at these rates (requests/s)."""

    name: str
    title: str
    rates: tuple[float, ...]
    ways: tuple[Way, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run."""

    contest: str
    way: Way
    rate: float
    seed: int

    @property
    def key(self) -> str:
        """What a run is known by: everything but the code."""
        what = [
            self.way.scenario.model_dump(exclude={"about"}, mode="json"),
            self.way.policy, self.way.controller, self.way.planned, self.rate, self.seed,
        ]  # fmt: skip
        return blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=12).hexdigest()


# ---- the contests


def contests() -> list[Contest]:
    """All of them."""
    return [
        *(roles(name, title) for name, title in (
            ("roles", "Prefill and decode: reading turns into writing"),
            ("roles_back", "Prefill and decode: writing turns into reading"),
            ("roles_steady", "Prefill and decode: nothing changes"),
        )),
        *(layouts(name, title) for name, title in (
            ("layouts", "Parallel layouts: relaxed reading turns into tight chat"),
            ("layouts_steady", "Parallel layouts: nothing changes"),
        )),
        *(pools(name, title) for name, title in (
            ("pools", "Length pools: short questions turn into long documents"),
            ("pools_steady", "Length pools: lengths of one kind"),
        )),
    ]  # fmt: skip


RATES = {
    "roles": (24.0, 32.0, 40.0, 48.0, 56.0),
    "roles_back": (24.0, 32.0, 40.0, 48.0, 56.0),
    "roles_steady": (24.0, 32.0, 40.0, 48.0, 56.0),
    "layouts": (12.0, 16.0, 20.0, 24.0, 28.0),
    "layouts_steady": (12.0, 16.0, 20.0, 24.0, 28.0),
    "pools": (12.0, 18.0, 24.0, 30.0, 36.0),
    "pools_steady": (30.0, 40.0, 50.0, 60.0, 70.0),
}


def scenario(name: str) -> Scenario:
    """One of the folder."""
    return read(FOLDER / f"{name}.yaml")


def roles(name: str, title: str) -> Contest:
    """Every number of prefill replicas, and the one that follows the work."""
    start = scenario(name)
    one = start.fleet[0]
    total = sum(group.count for group in start.fleet)

    def split(prefill: int) -> Scenario:
        sides = (("prefill", prefill), ("decode", total - prefill))
        fleet = tuple(one.model_copy(update={"phase": p, "count": n}) for p, n in sides)
        return start.model_copy(update={"fleet": fleet})

    whole = (one.model_copy(update={"phase": "both", "count": total}),)
    return Contest(
        name=name,
        title=title,
        rates=RATES[name],
        ways=(
            *(
                Way(label=f"{p} prefill", scenario=split(p), fixed=True)
                for p in range(2, total - 1)
            ),
            Way(label="flips", scenario=start, controller="roles"),
            Way(label="no split", scenario=start.model_copy(update={"fleet": whole})),
        ),
    )


def layouts(name: str, title: str) -> Contest:
    """Every number of pairs, and GPUs that join and part; the latter also by a slow restart."""
    start = scenario(name)
    single, pair = start.changes.layouts
    total = len(start.fleet) and sum(group.count for group in start.fleet)

    def pairs(count: int) -> Scenario:
        fleet = (
            Replicas(profile=pair, count=max(count, 1)),
            Replicas(profile=single, count=max(total - 2 * count, 1)),
        )
        kept = tuple(g for g, n in zip(fleet, (count, total - 2 * count), strict=True) if n)
        changes = start.changes.model_copy(update={"down": ()})
        return start.model_copy(update={"fleet": kept, "changes": changes})

    slow = start.changes.model_copy(update={"warm_up": 30.0})
    return Contest(
        name=name,
        title=title,
        rates=RATES[name],
        ways=(
            *(
                Way(label=f"{n} pairs", scenario=pairs(n), fixed=True)
                for n in range(total // 2 + 1)
            ),
            Way(label="changes", scenario=start, controller="layouts"),
            Way(
                label="changes in 30 s",
                scenario=start.model_copy(update={"changes": slow}),
                controller="layouts",
            ),
        ),
    )


def pools(name: str, title: str) -> Contest:
    """One pool, pools planned for the whole trace, pools that move, and no pools but ours."""
    start = scenario(name)
    return Contest(
        name=name,
        title=title,
        rates=RATES[name],
        ways=(
            Way(label="one pool", scenario=start, policy="pools", fixed=True),
            Way(label="planned", scenario=start, policy="pools", fixed=True, planned=True),
            Way(label="moving pools", scenario=start, policy="pools", controller="pools"),
            Way(label="marginal, no pools", scenario=start),
        ),
    )


# ---- running them

_RUNNER = Runner()


def answer(task: Task) -> tuple[str, dict[str, Any]]:
    """The report of one run, under its key."""
    way = task.way
    case = build(way.scenario, task.rate, task.seed)
    policy = policy_of(way.policy, {})
    if way.planned:
        case = with_pools(case)
    if way.controller is not None:
        run = run_live(case, policy, learning=False, script=script_for(case, way.controller))
    elif case.scenario.changes.down:
        run = run_live(case, policy, learning=False, script=static_script(case))
    else:
        run, _ = _RUNNER.run(case, policy)
    return task.key, asdict(measure(case, run, way.label))


def with_pools(case: Case) -> Case:
    """The case with the pools that are best for all its requests, their true lengths known."""
    trace = case.trace
    rows = elastic.Sample(
        prompt=trace.prompt.astype(np.float64),
        output=trace.output.astype(np.float64),
        ttft=case.ttft,
        tpot=case.tpot,
    )
    replicas = case.fleet.replicas
    found = elastic.best_pools(rows, trace.duration, replicas[0].profile, len(replicas))
    bounds = [(b.low, b.high) for b in found.bands for _ in range(b.replicas)]
    fleet = replace(
        case.fleet,
        replicas=tuple(
            replace(r, pool_low=low, pool_high=high)
            for r, (low, high) in zip(replicas, bounds, strict=True)
        ),
    )
    return replace(case, fleet=fleet, believed=fleet)


def results(tasks: Sequence[Task], jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every task's report as it is done."""
    if jobs == 1:
        yield from map(answer, tasks)
        return
    with mp.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(answer, tasks)


def executed(
    all_of: Sequence[Contest], folder: Path, seeds: int, jobs: int
) -> dict[str, list[Cell]]:
    """Cells by contest; what the folder holds is not run again."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "runs.jsonl"
    known: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed
        known[row["key"]] = row["report"]
    tasks = [
        Task(contest=c.name, way=way, rate=rate, seed=seed)
        for seed in range(1, seeds + 1)  # whole seeds first, so that a cut run is of use
        for c in all_of
        for rate in c.rates
        for way in c.ways
    ]
    missing = [task for task in tasks if task.key not in known]
    advance = told()
    with path.open("a") as file:
        for done, (key, report) in enumerate(results(missing, jobs), 1):
            known[key] = report
            file.write(json.dumps({"key": key, "report": report}) + "\n")
            file.flush()
            advance(done, len(missing), "runs")
    cells: dict[str, list[Cell]] = {}
    for task in tasks:
        cell = Cell(
            scenario=task.contest,
            policy=task.way.label,
            load=task.rate,
            seed=task.seed,
            report=Report(**known[task.key]),
            live=task.way.controller is not None,
        )
        cells.setdefault(task.contest, []).append(cell)
    return cells


# ---- the document


def table(contest: Contest, cells: Sequence[Cell]) -> list[str]:
    """One contest: size-fair goodput@90 and its ratio to the best fixed fleet's, attainment."""
    found = Outcome(knees={}, cells=cells)

    def carried(label: str, base: str) -> tuple[Interval, Interval]:
        return against(found, contest.name, label, base, 0.9)

    def mean(label: str, rate: float) -> float:
        mine = [fair(c.report) for c in cells if (c.policy, c.load) == (label, rate)]
        return float(np.mean(mine))

    fixed = [way.label for way in contest.ways if way.fixed]
    best = max(
        fixed,
        key=lambda x: (carried(x, x)[0].value, sum(mean(x, rate) for rate in contest.rates)),
    )
    lines = [
        "| fleet | @90 /s | x best fixed | " + " | ".join(f"{r:g}/s" for r in contest.rates) + " |",
        "|" + " --- |" * (3 + len(contest.rates)),
    ]
    for way in contest.ways:
        rate, ratio = carried(way.label, best)
        label = f"{way.label} (best fixed)" if way.label == best else way.label
        shares = [f"{100 * mean(way.label, r):.1f}" for r in contest.rates]
        cells_ = [_interval(rate, 1), _interval(ratio, 2), *shares]
        lines.append(f"| {label} | " + " | ".join(cells_) + " |")
    return lines


def _interval(x: Interval, digits: int) -> str:
    if isnan(x.value):
        return "–"
    if isnan(x.low):
        return f"{x.value:.{digits}f}"
    return f"{x.value:.{digits}f} [{x.low:.{digits}f}, {x.high:.{digits}f}]"


def document(all_of: Sequence[Contest], cells: dict[str, list[Cell]], path: Path) -> list[str]:
    """The lines of docs/elastic.md."""
    seeds = len({c.seed for some in cells.values() for c in some})
    lines = [
        "# Fleets that change while they serve",
        "",
        (
            f"Made by `python benchmarks/elastic.py`: {seeds} seeds, in virtual time. Profiles are "
            "`configs/profiles/estimated.yaml` and, for parallel layouts, kernel timings of "
            "`aiconfigurator-vllm.yaml`; no number is a measurement of a GPU. @90 is size-fair "
            "goodput (DESIGN section 11) in requests/s with its 95 % interval over seeds; the last "
            "columns are size-fair attainment in % at fixed rates. The best fixed fleet is best on "
            "these very seeds: nobody knows it beforehand."
        ),
        "",
        *reading(path),
    ]
    for contest in all_of:
        lines += [f"## {contest.title}", "", about(contest), ""]
        lines += [*table(contest, cells[contest.name]), ""]
    return lines


def about(contest: Contest) -> str:
    """What the scenario is."""
    told_of = contest.ways[-1].scenario.about
    return f"`configs/scenarios/elastic/{contest.name}.yaml`: {told_of}"


def main(argv: list[str] | None = None) -> int:
    """Run what is missing and write the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="2 seeds, 200 requests, two loads")
    parser.add_argument("--only", nargs="+", metavar="CONTEST", help="of these alone")
    parser.add_argument("--out", type=Path, default=Path("elastic-out"))
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args(argv)
    chosen = [c for c in contests() if not args.only or c.name in args.only]
    if args.small:
        args.seeds, args.docs = 2, args.out
        chosen = [small(c) for c in chosen]
    cells = executed(chosen, args.out, args.seeds, args.jobs)
    args.docs.mkdir(exist_ok=True)
    path = args.docs / "elastic.md"
    lines = document(chosen, cells, path)
    path.write_text("\n".join(lines).rstrip() + "\n")
    print("\n".join(lines))
    return 0


def small(contest: Contest) -> Contest:
    """The same with a few requests at two loads."""
    ways = tuple(
        replace(way, scenario=way.scenario.model_copy(update={"requests": 200, "warmup": 20}))
        for way in contest.ways
    )
    return replace(contest, rates=contest.rates[:2], ways=ways)


if __name__ == "__main__":
    raise SystemExit(main())
