"""`sluice verify FILE`: feeds a recorded run's events to a fresh core and compares what it does."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from sluice.cli import BAD_INPUT, DONE, FAILED

EXAMPLE = "sluice verify .sluice/events.bin"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", type=Path, help="an event log (logs.events in the config)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: Namespace) -> int:
    """Replay and report."""
    from gateway.event_log import read, read_header, replay
    from sluice.recorded import core_of

    try:
        core = core_of(read_header(args.file))
    except (OSError, ValueError) as exc:
        print(exc, file=sys.stderr)
        return BAD_INPUT
    result = replay(read(args.file), core.handle)
    same = result.differs_at is None
    if args.json:
        print(json.dumps({"same": same, "events": result.events, "differs_at": result.differs_at}))
    elif same:
        print(f"{result.events} events, {result.actions} actions: all the same")
    else:
        print(f"event {result.differs_at} gave other actions: {result.differing}")
    return DONE if same else FAILED
