"""`sluice tune`: options of policies by CMA-ES on size-fair goodput, with equal budgets."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from domain.errors import ConfigError
from sluice.cli import DONE
from sluice.compare import progress

if TYPE_CHECKING:
    from training.compare import Advance

EXAMPLE = (
    "sluice tune configs/scenarios/heterogeneous.yaml --policies best_fit marginal --budget 60 "
    "--out tuned.yaml"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("scenario", type=Path, metavar="SCENARIO", help="a scenario file")
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["lmetric", "predicted", "just_enough", "best_fit", "marginal"],
        metavar="KIND",
        help="kinds to tune",
    )
    parser.add_argument("--budget", type=int, default=60, help="options scored for each kind")
    parser.add_argument("--target", type=float, default=90.0, help="percent of the work")
    parser.add_argument("--requests", type=int, help="of a case, instead of the scenario's")
    parser.add_argument("--seed", type=int, default=1, help="of the search")
    parser.add_argument("--data", type=Path, help="folder of the data sets (or SLUICE_DATA)")
    parser.add_argument("--profiles", type=Path, help="folder of profiles, instead of the shipped")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("tuned.yaml"),
        help="policy file for `sluice compare --policies`",
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(args: Namespace) -> int:
    """Tune each kind and write the policy file."""
    from backends.sim.profiles import shipped
    from training.compare import KNEE_POLICIES, entrants
    from training.scenario import read
    from training.tune import knobs, objective, tune
    from training.workers import Unit, Worker

    if not 0 < args.target < 100 or args.budget < 1:
        raise ConfigError("--target is a percent between 0 and 100, --budget at least 1")
    for kind in args.policies:
        knobs(kind)
    scenario = read(args.scenario)
    if args.requests is not None:
        scenario = scenario.model_copy(update={"requests": args.requests})
    worker = Worker(args.data, shipped() if args.profiles is None else args.profiles)
    try:
        knee = worker.knee(Unit(scenario=scenario, entrants=tuple(entrants(KNEE_POLICIES))))
        score = objective(worker, scenario, knee.rate, args.target / 100.0)
        with progress() as advance:
            found = [
                tune(
                    kind,
                    score,
                    evaluations=args.budget,
                    seed=args.seed,
                    tell=partial(_tell, advance, args.budget, kind),
                )
                for kind in args.policies
            ]
    except FileNotFoundError as exc:
        raise ConfigError(str(exc)) from exc
    rows = {f"{t.kind} tuned": {"kind": t.kind, **t.options} for t in found}
    args.out.write_text(yaml.safe_dump(rows, sort_keys=False))
    if args.json:
        print(json.dumps([asdict(t) for t in found]))
        return DONE
    for t in found:
        options = ", ".join(f"{k} {v:g}" for k, v in t.options.items()) or "defaults"
        print(f"{t.kind}: {t.default_score:.2f} -> {t.score:.2f}/s ({t.spent} cases): {options}")
    return DONE


def _tell(advance: Advance, total: int, kind: str, done: int) -> None:
    advance(done, total, kind)
