"""`sluice train length|latency|quality|policy`: an artifact with its card, and a report.

Predictors are fitted on tables (public data sets, or the fleet model for latency), decision logs,
or both; a policy in the fleet model. The jobs are modules of `training`, which run alone as well;
their flags follow the kind.
"""

from __future__ import annotations

import sys
import threading
import time
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from sluice.compare import progress as bar

if TYPE_CHECKING:
    from training.compare import Advance

EXAMPLE = (
    "sluice train latency --logs .sluice/decisions.jsonl --out latency.npz --report report\n"
    "  sluice train length --data ../shared/data --sets ship --out length.npz\n"
    "  sluice train quality --data ../shared/data --logs .sluice/decisions.jsonl\n"
    "  sluice train policy --scenario configs/scenarios/heterogeneous.yaml --algo es --shadow"
)
KINDS = ("length", "latency", "quality", "policy")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", action="store_true", help="only the result, as JSON; no progress")
    parser.add_argument("kind", choices=KINDS, help="what to fit")
    parser.add_argument(
        "flags", nargs=REMAINDER, help="of that job: sluice train KIND --help lists them"
    )


def run(args: Namespace) -> int:
    """Run the job; its exit code."""
    if args.kind == "policy":
        choice = ArgumentParser(add_help=False)
        choice.add_argument("--algo", choices=("es", "ppo"), default="es")
        train = _policy_job(choice.parse_known_args(args.flags)[0].algo)
        with nullcontext(_silent) if args.json else bar() as advance:
            return train(args.flags, advance)
    with nullcontext() if args.json else progress(f"fitting {args.kind}"):
        return _job(args.kind)(args.flags)


def _policy_job(algo: str) -> Callable[[Sequence[str], Advance], int]:
    """The job of an algorithm; torch is imported for PPO only."""
    if algo == "ppo":
        from training.train_ppo import main
    else:
        from training.train_es import main
    return main


def _silent(done: int, total: int, what: str) -> None:
    """Say nothing."""


def _job(kind: str) -> Callable[[Sequence[str]], int]:
    """The job's entry point; its libraries are imported only now."""
    match kind:
        case "length":
            from training.fit_length import main
        case "latency":
            from training.fit_latency import main
        case _:
            from training.fit_quality import main
    return main


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Say on a terminal's standard error, once a second, how long it has been."""
    if not sys.stderr.isatty():
        yield
        return
    over = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        while not over.wait(1.0):
            print(f"\r{what}: {time.monotonic() - began:.0f} s ", end="", file=sys.stderr)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
        print("\r" + " " * (len(what) + 12) + "\r", end="", file=sys.stderr)
