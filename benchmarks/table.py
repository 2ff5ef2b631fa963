"""The table that decides the default policy: every scorer in every scenario, with intervals.

    python benchmarks/table.py --jobs 2                  20 seeds (4 through the live core)
    python benchmarks/table.py --small                   3 seeds, fewer loads, minutes
    python benchmarks/table.py --only heterogeneous delay_500 two_gateways_500

Four steps, each kept in --out, so that a run that was stopped goes on where it was:

1. every scorer with its defaults, and some variants (`ENTRANTS`), in every scenario;
2. five scorers tuned (CMA-ES, equal budgets) for size-fair goodput@90 in four scenarios;
3. the best three of those tuned for @99 in the mixed fleet;
4. look-ahead and linear relaxation beside 1 in the scenarios of 2.

Writes docs/table.md (its section "What it says" is written by hand and kept) and docs/table.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backends.sim.profiles import shipped
from training.compare import KNEE_POLICIES, Entrant, Plan, entrants, execute
from training.report import html, markdown, terminal
from training.scenario import Scenario, read
from training.table import Table, summarise, table_json
from training.tune import objective, tune
from training.workers import Unit, Worker

ROOT = Path(__file__).resolve().parent.parent
TUNED_IN = ("heterogeneous", "homogeneous", "reasoning", "delay_500")
TUNED = ("lmetric", "predicted", "just_enough", "best_fit", "marginal")
BEST = ("just_enough", "best_fit", "marginal")
ENTRANTS = [
    "all",
    "marginal_by_work=marginal:size=1",
    "marginal_no_hold=marginal:hold_until=0",
    "best_fit_50=best_fit:ttft_margin=0.5:tpot_margin=0.5",
    "just_enough_50=just_enough:margin=0.5",
    "actor",
]
"""With their defaults; and the rule by work, the rule that holds nobody back, two that use half of
each limit, and the learned policy that is shipped.
"""
LOADS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.3)
LOADS_99 = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
READING = "## What it says"
SMALL_LOADS = (0.3, 0.6, 0.85, 1.0, 1.15, 1.4)


def main(argv: list[str] | None = None) -> int:
    """Run what is missing and write the documents."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=2500, help="of a compiled case")
    parser.add_argument("--live-requests", type=int, default=1600)
    parser.add_argument("--live-seeds", type=int, default=4, help="of scenarios that need that")
    parser.add_argument("--budget", type=int, default=60, help="options scored a policy")
    parser.add_argument("--yardsticks", type=int, default=3, help="seeds of look-ahead and LP")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="3 seeds, 6 loads, 24 options")
    parser.add_argument("--only", nargs="+", metavar="SCENARIO", help="step 1 in these alone")
    parser.add_argument("--policies", nargs="+", default=ENTRANTS)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("table-out"))
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args(argv)
    if args.small:
        args.seeds, args.budget, args.yardsticks = 3, 24, 1
    args.loads = SMALL_LOADS if args.small else LOADS
    names = sorted(path.stem for path in (ROOT / "configs" / "scenarios").glob("*.yaml"))
    args.names = ["heterogeneous", *(n for n in names if n != "heterogeneous")]
    if args.only:
        args.names = args.only
    args.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Table] = {}
    if 1 in args.steps:
        parts["Defaults"] = compared(args, args.names, entrants(args.policies), args.loads)
    if 2 in args.steps:
        blocks = [
            compared(args, [name], tuned(args, name, TUNED, 0.9), args.loads).blocks[0]
            for name in TUNED_IN
            if name in args.names
        ]
        parts["Tuned for @90"] = Table(blocks=tuple(blocks))
    if 3 in args.steps:
        best = tuned(args, "heterogeneous", BEST, 0.99)
        parts["Tuned for @99"] = compared(args, ["heterogeneous"], best, LOADS_99)
    write(args, parts)
    return 0


def scenario_of(args: argparse.Namespace, name: str) -> Scenario:
    """A shipped scenario at this run's size."""
    scenario = read(ROOT / "configs" / "scenarios" / f"{name}.yaml")
    return scenario.model_copy(update={"requests": args.requests})


def compared(
    args: argparse.Namespace, names: list[str], policies: list[Entrant], loads: tuple[float, ...]
) -> Table:
    """The table of these policies in these scenarios."""
    plan = Plan(
        scenarios=tuple(scenario_of(args, name) for name in names),
        entrants=tuple(policies),
        loads=loads,
        seeds=tuple(range(1, args.seeds + 1)),
        live_seeds=args.live_seeds,
        live_requests=args.live_requests,
    )
    table = None
    for part in (False, True):  # yardsticks only where step 2 tunes
        chosen = tuple(
            s for s in plan.scenarios if (4 in args.steps and s.name in TUNED_IN) == part
        )
        if not chosen:
            continue
        mine = replace(plan, scenarios=chosen)
        outcome = execute(
            mine,
            args.out,
            data=args.data,
            jobs=args.jobs,
            yardstick_seeds=args.yardsticks if part else 0,
            advance=told(),
        )
        found = summarise(mine, outcome)
        blocks = (*found.blocks, *(table.blocks if table else ()))
        table = Table(blocks=blocks)
    assert table is not None
    order = {name: k for k, name in enumerate(names)}
    return Table(
        blocks=tuple(sorted(table.blocks, key=lambda b: order[b.scenario])),
    ).ranked()


def tuned(
    args: argparse.Namespace, name: str, kinds: tuple[str, ...], target: float
) -> list[Entrant]:
    """These kinds tuned in a scenario; what was found is kept in --out."""
    path = args.out / f"tuned-{name}-{round(100 * target)}-{args.budget}.yaml"
    known: dict[str, Any] = yaml.safe_load(path.read_text()) if path.exists() else {}
    if any(f"{kind} tuned" not in known for kind in kinds):
        worker = Worker(args.data, shipped())
        scenario = scenario_of(args, name)
        classic = tuple(entrants(KNEE_POLICIES))
        knee = worker.knee(Unit(scenario=scenario, entrants=classic)).rate
        score = objective(worker, scenario, knee if target < 0.95 else 0.5 * knee, target)
        for kind in kinds:
            if f"{kind} tuned" in known:
                continue
            found = tune(kind, score, evaluations=args.budget)
            print(f"{name} {kind}: {found.default_score:.2f} -> {found.score:.2f}/s", flush=True)
            known[f"{kind} tuned"] = {"kind": kind, **found.options}
            path.write_text(yaml.safe_dump(known, sort_keys=False))
    return entrants([str(path)])


def told() -> Any:
    """Prints how far it is, every half minute."""
    began = last = time.monotonic()

    def advance(done: int, total: int, what: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 30 or done == total:
            last = now
            print(f"{now - began:.0f} s: {done} of {total}, {what}", flush=True)

    return advance


def write(args: argparse.Namespace, parts: dict[str, Table]) -> None:
    """The documents, and a page with plots in --out."""
    args.docs.mkdir(exist_ok=True)
    lines = [
        "# The table",
        "",
        (
            f"Made by `python benchmarks/table.py`: {args.seeds} seeds of {args.requests} requests "
            f"a case, {min(args.live_seeds, args.seeds)} of {args.live_requests} where the live "
            f"core is needed; {args.budget} options scored a tuned policy. Simulation on "
            "`configs/profiles/estimated.yaml`; no number is a measurement of a GPU."
        ),
        "",
    ]
    lines += reading(args.docs / "table.md")
    for title, table in parts.items():
        lines += [f"## {title}", "", markdown(table)]
        (args.out / f"{title.lower().replace(' ', '-').replace('@', '')}.html").write_text(
            html(table)
        )
        print(title, terminal(table), sep="\n\n")
    for path in sorted(args.out.glob(f"tuned-*-{args.budget}.yaml")):
        lines += [f"`{path.stem}`:", "", "```yaml", path.read_text().strip(), "```", ""]
    (args.docs / "table.md").write_text("\n".join(lines).rstrip() + "\n")
    small = {title: table_json(table) for title, table in parts.items()}
    for row in (r for part in small.values() for block in part["blocks"] for r in block["rows"]):
        for name in ("slices", "difference", "at_knee", "plain"):
            row.pop(name)
    (args.docs / "table.json").write_text(json.dumps(small, separators=(",", ":")) + "\n")


def reading(path: Path) -> list[str]:
    """The section that says what the table says, kept from the file that is replaced."""
    before = path.read_text().splitlines() if path.exists() else []
    if READING not in before:
        return []
    rest = before[before.index(READING) + 1 :]
    ends = [k for k, line in enumerate(rest) if line.startswith("## ")]
    return [READING, *rest[: ends[0] if ends else None]]


if __name__ == "__main__":
    raise SystemExit(main())
