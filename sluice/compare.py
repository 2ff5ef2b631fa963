"""`sluice compare`: a table of policies over scenarios, loads and seeds, with intervals."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from domain.errors import ConfigError
from sluice.cli import DONE

if TYPE_CHECKING:
    from training.compare import Advance
    from training.scenario import Scenario

EXAMPLE = (
    "sluice compare configs/scenarios/heterogeneous.yaml configs/scenarios/delay_500.yaml "
    "--policies best_fit marginal work=marginal:size=1 --seeds 20 --out compare-out"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "scenarios", type=Path, nargs="+", metavar="SCENARIO", help="scenario files, or a folder"
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["all"],
        metavar="P",
        help="kind, kind:option=value, label=kind:option=value, a YAML file of them, or `all`",
    )
    parser.add_argument("--seeds", type=int, default=20, help="paired seeds, from 1")
    parser.add_argument(
        "--loads", type=float, nargs="+", metavar="X", help="multiples of the best heuristic's knee"
    )
    parser.add_argument("--requests", type=int, help="of a case, instead of the scenario's")
    parser.add_argument(
        "--live-requests", type=int, default=1600, help="of a case that needs the live core"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--ray", metavar="ADDRESS", help="run the grid on this Ray cluster")
    parser.add_argument("--data", type=Path, help="folder of the data sets (or SLUICE_DATA)")
    parser.add_argument("--profiles", type=Path, help="folder of profiles, instead of the shipped")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("compare-out"),
        help="folder of finished cells (a second run takes them from there), table.json and "
        "report.html",
    )
    parser.add_argument(
        "--yardsticks",
        type=int,
        default=0,
        metavar="K",
        help="seeds on which look-ahead and LP bound are worked out too",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(args: Namespace) -> int:
    """Run what is missing, print the table and write the report."""
    from training.compare import LOADS, Plan, entrants, execute
    from training.report import html, markdown, terminal
    from training.table import summarise, table_json

    if args.seeds < 1 or args.jobs < 1:
        raise ConfigError("--seeds and --jobs must be 1 or more")
    plan = Plan(
        scenarios=tuple(_scenarios(args.scenarios)),
        entrants=tuple(entrants(args.policies)),
        loads=tuple(sorted(args.loads)) if args.loads else LOADS,
        seeds=tuple(range(1, args.seeds + 1)),
        requests=args.requests,
        live_requests=args.live_requests,
    )
    with progress() as advance:
        try:
            outcome = execute(
                plan,
                args.out,
                data=args.data,
                profiles=args.profiles,
                jobs=args.jobs,
                ray=args.ray,
                yardstick_seeds=args.yardsticks,
                advance=advance,
            )
        except FileNotFoundError as exc:
            raise ConfigError(str(exc)) from exc
    table = summarise(plan, outcome)
    text = json.dumps(table_json(table), indent=1)
    (args.out / "table.json").write_text(text)
    (args.out / "report.html").write_text(html(table))
    if args.markdown is not None:
        args.markdown.write_text(markdown(table))
    print(text if args.json else terminal(table))
    return DONE


def _scenarios(paths: list[Path]) -> Iterator[Scenario]:
    from training.scenario import read

    for path in paths:
        files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"{path}: no scenario files")
        yield from map(read, files)


@contextmanager
def progress() -> Iterator[Advance]:
    """A bar with the time left on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("starting", total=None)

        def advance(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield advance
