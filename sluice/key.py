"""`sluice key`: a fresh API key, shown once, and the hash that stands in the config."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from gateway.tenants import new_key
from sluice.cli import DONE

EXAMPLE = "sluice key"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", action="store_true", help="print both as JSON")


def run(args: Namespace) -> int:
    """Print a key and its hash."""
    made = new_key()
    if args.json:
        print(json.dumps({"key": made.key, "hash": made.hash}))
    else:
        print(f"key   {made.key}\nhash  {made.hash}\n")
        print("Give the key away; write the hash under tenants.NAME.keys in the config.")
    return DONE
