"""`sluice simulate`: one policy in one scenario at one rate, in virtual time."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domain.errors import ConfigError
from sluice.cli import DONE

if TYPE_CHECKING:
    from training.measures import Report

EXAMPLE = (
    "sluice simulate configs/scenarios/heterogeneous.yaml --policy marginal --rate 20 --seed 1"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("scenario", type=Path, metavar="SCENARIO", help="a scenario file")
    parser.add_argument("--policy", default="marginal", metavar="P", help="kind of the policy")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the policy, e.g. shed_below=0.1; repeat for more",
    )
    parser.add_argument("--rate", type=float, required=True, help="requests a second")
    parser.add_argument("--seed", type=int, default=1, help="of everything drawn")
    parser.add_argument("--requests", type=int, help="how many, instead of the scenario's")
    parser.add_argument("--data", type=Path, help="folder of the data sets (or SLUICE_DATA)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: Namespace) -> int:
    """Run it and print the report."""
    from dataclasses import asdict

    from training.evaluate import policy_named, simulate
    from training.scenario import read

    if not args.rate > 0:
        raise ConfigError(f"--rate must be above 0 requests/s, not {args.rate:g}")
    scenario = read(args.scenario)
    if args.requests is not None:
        scenario = scenario.model_copy(update={"requests": args.requests})
    policy = policy_named(args.policy, **dict(map(_option, args.set)))
    try:
        _, report = simulate(scenario, policy, args.rate, args.seed, data=args.data)
    except FileNotFoundError as exc:
        raise ConfigError(str(exc)) from exc
    print(json.dumps(asdict(report)) if args.json else text(report))
    return DONE


def _option(word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    if not equals:
        raise ConfigError(f"--set takes NAME=VALUE, not {word!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def text(report: Report) -> str:
    """The report for people."""
    ms = {
        name: "  ".join(f"{k} {1e3 * v:.1f}" for k, v in getattr(report, name).items())
        for name in ("ttft", "tpot")
    }
    by_work = ", ".join(f"w={w} {100 * v:.1f} %" for w, v in report.by_work.items())
    spent = f"cost {report.cost_per_good:.3g} and {report.joules_per_good:.3g} J a good request"
    lines = [
        f"{report.scenario}: {report.policy} at {report.rate:g}/s, seed {report.seed}",
        f"attainment  {100 * report.attainment:.1f} % of {report.arrivals}   by work {by_work}",
        f"goodput     {report.goodput:.2f}/s   worst slice {100 * report.worst_slice:.1f} %",
        f"shed {100 * report.shed:.1f} %   lost {100 * report.lost:.1f} %",
        f"preemptions {report.preemptions}   prompt tokens cached {100 * report.cached_share:.1f}%",
        f"TTFT ms     {ms['ttft']}",
        f"TPOT ms     {ms['tpot']}",
        f"largest replica share {100 * report.largest_share:.0f} %   Jain {report.jain:.3f}",
        spent,
        *(f"  {name:<20} {100 * value:.1f} %" for name, value in report.slices.items()),
        f"{report.requests_per_cpu_second:.0f} requests a CPU second",
    ]
    return "\n".join(lines)
