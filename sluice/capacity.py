"""`sluice capacity`: the rate a fleet carries, what binds first, and the cheapest addition."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from domain.errors import ConfigError
from sluice.cli import DONE, FAILED

EXAMPLE = "sluice capacity configs/scenarios/heterogeneous.yaml --policy marginal --target-rate 60"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("scenario", type=Path, metavar="SCENARIO", help="a scenario file")
    parser.add_argument(
        "--policy", default="marginal", metavar="P", help="as in `sluice compare --policies`"
    )
    parser.add_argument(
        "--targets",
        type=float,
        nargs="+",
        default=[90.0, 99.0],
        metavar="X",
        help="percent of the work that must meet its limits",
    )
    parser.add_argument("--target-rate", type=float, metavar="R", help="what to add to carry this")
    parser.add_argument(
        "--offer", nargs="+", metavar="PROFILE", help="what may be added; default: the fleet's own"
    )
    parser.add_argument("--most", type=int, default=8, help="replicas to add at most")
    parser.add_argument("--seeds", type=int, default=3, help="runs a question")
    parser.add_argument("--requests", type=int, help="of a run, instead of the scenario's")
    parser.add_argument("--data", type=Path, help="folder of the data sets (or SLUICE_DATA)")
    parser.add_argument("--profiles", type=Path, help="folder of profiles, instead of the shipped")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(args: Namespace) -> int:
    """Answer; exit code 1 if nothing on offer carries the rate."""
    from backends.sim.profiles import load_profiles, shipped
    from training.capacity import Planner, offered
    from training.compare import entrants
    from training.scenario import read

    if not all(0 < x < 100 for x in args.targets):
        raise ConfigError("--targets are percents between 0 and 100")
    scenario = read(args.scenario)
    if args.requests is not None:
        scenario = scenario.model_copy(update={"requests": args.requests})
    policy = entrants([args.policy])[0].policy
    seeds = range(1, args.seeds + 1)
    planner = Planner(scenario, policy, seeds=seeds, data=args.data, profiles=args.profiles)
    try:
        carried = [planner.carried(x / 100.0) for x in args.targets]
        addition = None
        if args.target_rate is not None:
            known = load_profiles(shipped() if args.profiles is None else args.profiles)
            offer = args.offer or offered(scenario, known)
            target = args.targets[0] / 100.0
            addition = planner.cheapest(args.target_rate, target, offer, args.most)
    except FileNotFoundError as exc:
        raise ConfigError(str(exc)) from exc
    found = {
        "carried": [asdict(c) for c in carried],
        "addition": None if addition is None else asdict(addition),
    }
    if args.json:
        print(json.dumps(found))
    else:
        for c in carried:
            shares = ", ".join(f"{k} {100 * v:.0f} %" for k, v in c.misses.items() if v > 0)
            print(
                f"{scenario.name} under {args.policy}: {c.rate:.1f}/s at {100 * c.target:g} %\n"
                f"  at {c.over:.1f}/s {100 * c.attainment:.1f} %; binds first: {c.binds} ({shares})"
                f"; preempted {100 * c.kv:.1f} %"
            )
        if addition is not None:
            what = " + ".join(f"{n} x {name}" for name, n in addition.counts.items()) or "nothing"
            print(
                f"for {args.target_rate:g}/s at {args.targets[0]:g} % add {what}: price "
                f"{addition.price:g} a busy second, {100 * addition.attainment:.1f} % "
                f"({addition.tried} fleets simulated)"
            )
        elif args.target_rate is not None:
            print(f"no {args.most} replicas on offer carry {args.target_rate:g}/s")
    return FAILED if args.target_rate is not None and addition is None else DONE
