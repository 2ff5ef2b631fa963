"""`sluice calibrate`: fit profiles from step tables, end-to-end points, logs of requests or a
decision log; says how far off they are on what the fit has not seen.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from domain.errors import ConfigError
from sluice.cli import DONE, FAILED

if TYPE_CHECKING:
    from training.calibrate_report import Outcome

EXAMPLE = (
    "sluice calibrate steps my_steps.csv --out configs/profiles/mine.yaml\n"
    "  sluice calibrate log decisions.jsonl --gpu cpu --model smol --precision q4_0 --out my.yaml\n"
    "  sluice calibrate steps --check        (all step tables under --data; exit 1 below the bar)"
)

SOURCES = {
    "steps": "step tables: FILE with the columns of engine_aiconfigurator_grid, or every set",
    "e2e": "end-to-end points: FILE with the columns of engine_silicon_e2e, or that set",
    "runs": "whole requests of engine_vllm_request_logs: fit the first fifth, predict the rest",
    "log": "decision logs of a gateway: FILE...",
}

T = TypeVar("T")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("source", choices=SOURCES, metavar="SOURCE", help=" | ".join(SOURCES))
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="; ".join(
        f"{name}: {what}" for name, what in SOURCES.items()
    ))  # fmt: skip
    parser.add_argument("--data", type=Path, help="folder of the data sets (or SLUICE_DATA)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the profiles, YAML")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="runs: queues as CSV")
    parser.add_argument("--only", metavar="WORD", help="families whose name contains it")
    parser.add_argument("--good", action="store_true", help="write only what is within the bar")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bar is missed")
    parser.add_argument("--seed", type=int, default=1, help="of what is left out")
    parser.add_argument("--share", type=float, default=0.25, help="steps: shapes left out")
    parser.add_argument(
        "--folds",
        type=int,
        default=0,
        help="e2e: leave configurations out in so many groups; 0: each on its own",
    )
    parser.add_argument("--licence", help="of your own measurements, for --out")
    parser.add_argument("--gpu", default="unknown", help="log: what it ran on")
    parser.add_argument("--engine", default="unknown", help="log: what ran it")
    parser.add_argument("--model", help="log: what it served; names the profile")
    parser.add_argument("--precision", default="unknown", help="log: of the weights")
    parser.add_argument("--replica", metavar="NAME", help="log: this replica only")
    parser.add_argument("--chunk", type=int, default=64, help="log: prefill tokens of a step")
    parser.add_argument("--max-seqs", type=int, default=4, help="log: sequences at once")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: Namespace) -> int:
    """Fit, report, write."""
    from backends.sim.profiles import write_profiles
    from domain.fleet import ProfileKey
    from training import calibrate_report as report
    from training.trace_sources import default_data

    if not 0 < args.share < 1:
        raise ConfigError(f"--share must lie between 0 and 1, not {args.share:g}")
    if args.folds < 0 or args.folds == 1:
        raise ConfigError(f"--folds must be 0 or at least 2, not {args.folds}")
    if args.source == "log" and not args.files:
        raise ConfigError("sluice calibrate log needs a decision log: FILE...")
    if args.source == "runs" and args.files:
        raise ConfigError("sluice calibrate runs takes no FILE; --data names the folder of sets")
    if args.source != "log" and len(args.files) > 1:
        raise ConfigError(f"sluice calibrate {args.source} takes one FILE, not {len(args.files)}")
    if args.out is not None and not args.out.resolve().parent.is_dir():
        raise ConfigError(f"--out {args.out}: no such folder")
    file = args.files[0] if args.files else None
    progress = _quiet if args.json or not sys.stderr.isatty() else _bar
    try:
        data = args.data or default_data()
        outcome: Outcome
        match args.source:
            case "steps":
                outcome = report.steps(
                    data, file, only=args.only, seed=args.seed, share=args.share, progress=progress
                )
            case "e2e":
                outcome = report.end_to_end(
                    data,
                    file,
                    only=args.only,
                    folds=args.folds,
                    seed=args.seed,
                    progress=progress,
                )
            case "runs":
                outcome = report.runs(data, plots=args.plot, progress=progress)
            case _:
                outcome = report.decision_logs(
                    args.files,
                    key=ProfileKey(
                        gpu=args.gpu,
                        engine=args.engine,
                        model=args.model or "unknown",
                        precision=args.precision,
                    ),
                    only=args.replica,
                    chunk=args.chunk,
                    max_seqs=args.max_seqs,
                    progress=progress,
                )
    except FileNotFoundError as exc:
        raise ConfigError(str(exc)) from exc
    print(json.dumps(outcome.as_json()) if args.json else outcome.text())
    if args.out is not None:
        chosen = [p for p in outcome.profiles if p.good or not args.good]
        if not chosen:
            raise ConfigError(f"--out {args.out}: no profile to write")
        source = outcome.source
        write_profiles(
            args.out,
            source=source.source,
            licence=args.licence or source.licence,
            profiles={p.name: (p.profile, p.residuals) for p in chosen},
        )
    return FAILED if args.check and not outcome.passed else DONE


def _bar(items: Iterable[T]) -> Iterable[T]:
    """The items, counted on the terminal's error stream as they go."""
    every = list(items)
    for k, item in enumerate(every):
        print(f"\rfit {k + 1} of {len(every)} ", end="", file=sys.stderr, flush=True)
        yield item
    print("\r" + " " * 24 + "\r", end="", file=sys.stderr, flush=True)


def _quiet(items: Iterable[T]) -> Iterable[T]:
    return iter(items)
