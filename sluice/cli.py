"""The `sluice` command: a table of subcommands, each in a module imported only when it runs.

Exit codes: 0 done, 1 ran and found a failure, 2 bad input.
"""

from __future__ import annotations

import importlib
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from domain.errors import ConfigError
from sluice.kernel_cache import drop_stale

DONE = 0
FAILED = 1
BAD_INPUT = 2


class Subcommand(NamedTuple):
    """Where a subcommand lives, and what it does in one line."""

    module: str
    summary: str


SUBCOMMANDS = {
    "serve": Subcommand("sluice.serve", "run the gateway"),
    "check": Subcommand("sluice.check", "validate a config file: line, value, remedy"),
    "schema": Subcommand("sluice.schema", "print the config's JSON Schema"),
    "key": Subcommand("sluice.key", "make an API key, and the hash that a config holds"),
    "explain": Subcommand("sluice.explain", "why a request went where it went"),
    "policy": Subcommand("sluice.policy", "registry of policies: shadow, promote, roll back"),
    "verify": Subcommand("sluice.verify", "live a recorded run through again, event by event"),
    "emulate": Subcommand("sluice.emulate", "a fleet of emulated replicas on real ports"),
    "simulate": Subcommand("sluice.simulate", "one policy in one scenario, in virtual time"),
    "evaluate-log": Subcommand("sluice.evaluate_log", "judge another policy by a decision log"),
    "compare": Subcommand("sluice.compare", "policies x scenarios x loads, with intervals"),
    "capacity": Subcommand("sluice.capacity", "what a fleet carries, what binds, what to add"),
    "tune": Subcommand("sluice.tune", "options of policies by CMA-ES, equal budgets"),
    "calibrate": Subcommand("sluice.calibrate", "fit profiles; how far off they are"),
    "train": Subcommand("sluice.train", "fit length, latency, quality or policy: artifact, card"),
    "predict": Subcommand("sluice.predict", "look at one prediction, and why"),
    "replay": Subcommand("sluice.replay", "open-loop load against any OpenAI URL; goodput"),
}


class Module(Protocol):
    """What a subcommand's module offers."""

    EXAMPLE: str

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare its arguments."""

    def run(self, args: Namespace) -> int:
        """Do it; returns the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in {"-h", "--help", "help"}:
        print(overview())
        return DONE if words else BAD_INPUT
    name, *rest = words
    found = SUBCOMMANDS.get(name)
    if found is None:
        print(f"sluice: no subcommand {name!r}\n\n{overview()}", file=sys.stderr)
        return BAD_INPUT
    drop_stale()
    module: Module = importlib.import_module(found.module)
    parser = ArgumentParser(
        prog=f"sluice {name}",
        description=found.summary,
        epilog=f"example:\n  {module.EXAMPLE}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    try:
        return module.run(parser.parse_args(rest))
    except ConfigError as exc:
        print(exc, file=sys.stderr)
        return BAD_INPUT
    except BaseExceptionGroup as group:
        told, more = group.split(ConfigError)  # a part that could not be built, among its tasks
        if told is None or more is not None:
            raise
        for problem in _leaves(told):
            print(problem, file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return FAILED
    except BrokenPipeError:
        return FAILED


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """The exceptions in a group of groups."""
    for exc in group.exceptions:
        if isinstance(exc, BaseExceptionGroup):
            yield from _leaves(exc)
        else:
            yield exc


def overview() -> str:
    """The help text of the whole command."""
    lines = [f"  {name:<12} {sub.summary}" for name, sub in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "usage: sluice SUBCOMMAND [options]      SUBCOMMAND --help shows an example",
            "",
            *lines,
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
