"""`sluice schema`: the JSON Schema of the config file, for editors."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from sluice.cli import DONE
from sluice.settings import Settings

EXAMPLE = "sluice schema > sluice.schema.json"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", action="store_true", help="compact, on one line")


def run(args: Namespace) -> int:
    """Print it."""
    print(json.dumps(Settings.model_json_schema(), indent=None if args.json else 2))
    return DONE
