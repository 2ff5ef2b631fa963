"""`sluice check FILE`: everything that is wrong with a config, each with its line and a remedy."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from sluice.cli import BAD_INPUT, DONE
from sluice.settings import BadConfig, load

EXAMPLE = "sluice check configs/local.yaml"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", type=Path, help="the YAML file")
    parser.add_argument("--json", action="store_true", help="print problems as JSON")


def run(args: Namespace) -> int:
    """Print the problems, or what the file would serve."""
    try:
        settings = load(args.file)
    except BadConfig as exc:
        if args.json:
            print(json.dumps({"ok": False, "problems": [asdict(p) for p in exc.problems]}))
        else:
            print(exc)
        return BAD_INPUT
    if args.json:
        print(json.dumps({"ok": True, "problems": []}))
    else:
        print(
            f"{args.file}: good. {len(settings.fleet)} replicas, "
            f"{len(settings.models)} models, {len(settings.tenants)} tenants, "
            f"{len(settings.classes)} classes, policy {settings.policy.kind}"
        )
    return DONE
