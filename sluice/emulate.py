"""`sluice emulate`: a fleet of emulated replicas on real ports, from the gateway's own config file.

Every `kind: url` replica of the file that points to this machine is served at its port, at the
speed of its profile; the rest of the file is the gateway's. So one file serves both commands.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from urllib.parse import urlsplit

from domain.errors import ConfigError
from domain.fleet import ReplicaSpec
from gateway.config import UrlReplica
from sluice.assembly import run_loop
from sluice.cli import DONE
from sluice.settings import Settings, load

EXAMPLE = "sluice emulate -c configs/emulated.yaml --dilate 4"
HERE = {"127.0.0.1", "localhost"}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "-c",
        "--config",
        type=Path,
        metavar="FILE",
        required=True,
        help="a gateway config whose replicas are `kind: url` on 127.0.0.1",
    )
    parser.add_argument(
        "--dilate", type=float, default=1.0, metavar="X", help="real seconds of a model second"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="serve only this replica; repeat for more (one process a core)",
    )
    parser.add_argument(
        "--output-median",
        type=float,
        default=74.0,
        metavar="TOKENS",
        help="median of answers whose length no request fixes",
    )
    parser.add_argument("--seed", type=int, default=0, help="of those lengths")
    parser.add_argument("--json", action="store_true", help="say what serves where as JSON")


def run(args: Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Raises: ConfigError if the file names nothing to emulate."""
    if not args.dilate > 0:
        raise ConfigError(f"--dilate must be above 0, not {args.dilate:g}")
    specs = emulated(load(args.config), args.only)
    run_loop(_serve(specs, args))
    return DONE


def emulated(settings: Settings, only: list[str] | None = None) -> list[tuple[ReplicaSpec, str]]:
    """Replicas to emulate, with the model name each answers to.

    Raises: ConfigError if there are none, or `only` names another.
    """
    owner = {v: model for model, section in settings.models.items() for v in section.variants}
    found = []
    for config in settings.fleet:
        if not isinstance(config, UrlReplica) or urlsplit(config.url).hostname not in HERE:
            continue
        if only is not None and config.name not in only:
            continue
        served = config.served_model or owner[config.variant]
        spec = ReplicaSpec(
            name=config.name,
            variant=config.variant,
            profile=config.profile.profile(engine="vllm", model=served),
            url=config.url,
            engine_model=served,
        )
        found.append((spec, served))
    missing = set(only or ()) - {spec.name for spec, _ in found}
    if missing or not found:
        names = ", ".join(r.name for r in settings.fleet)
        raise ConfigError(
            f"nothing to emulate under {sorted(missing) or 'this file'}: replicas must be "
            f"`kind: url` on 127.0.0.1; the file has {names}"
        )
    return found


async def _serve(specs: list[tuple[ReplicaSpec, str]], args: Namespace) -> None:
    from backends.sim.emulator import EmulatedReplica, Emulator

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    replicas = [
        EmulatedReplica(
            spec,
            model=served,
            dilate=args.dilate,
            port=urlsplit(spec.url).port or 80,
            output_median=args.output_median,
            seed=args.seed,
        )
        for spec, served in specs
    ]
    try:
        async with Emulator(replicas) as emulator:
            if args.json:
                print(json.dumps(emulator.urls), flush=True)
            else:
                for name, url in emulator.urls.items():
                    print(f"{name:<16} {url}", file=sys.stderr, flush=True)
            await stop.wait()
    except OSError as exc:
        raise ConfigError(f"cannot listen: {exc}") from exc
