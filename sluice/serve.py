"""`sluice serve`: the command. What it runs is put together in `sluice.assembly`."""

from __future__ import annotations

import asyncio
import json
import logging
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from domain.errors import ConfigError
from gateway.config import LogsConfig, ModelConfig, ServerConfig, UrlReplica, VariantConfig
from gateway.fleet import who_is
from sluice.assembly import Listening, Source, run_loop, serve, set_up_logging, until_signalled
from sluice.cli import DONE
from sluice.settings import Settings, load
from sluice.workers import serve_with_workers

EXAMPLE = (
    "sluice serve -c configs/local.yaml\n  sluice serve --backend http://127.0.0.1:8000 --port 8080"
)

_log = logging.getLogger("sluice")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-c", "--config", type=Path, metavar="FILE", help="the YAML file")
    source.add_argument(
        "--backend",
        action="append",
        metavar="URL",
        help="an engine to serve without a file; it is asked what it is; repeat for more",
    )
    parser.add_argument("--host", help="address to listen on instead of the file's")
    parser.add_argument("--port", type=int, help="port to listen on instead of the file's; 0: any")
    parser.add_argument(
        "--workers", type=int, help="processes that share the port; more than one need a store"
    )
    parser.add_argument("--json", action="store_true", help="say where it listens as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")


def run(args: Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    set_up_logging(verbose=args.verbose)
    settings = asyncio.run(ask(args.backend)) if args.backend else load(args.config)
    options = {"host": args.host, "port": args.port, "workers": args.workers}
    given = {name: value for name, value in options.items() if value is not None}
    if given:
        try:
            server = ServerConfig.model_validate(settings.server.model_dump() | given)
        except ValidationError as exc:
            raise ConfigError(f"--{exc.errors()[0]['loc'][0]}: {exc.errors()[0]['msg']}") from exc
        settings = settings.model_copy(update={"server": server})
    source = Source(settings, args.config, given)
    announce = _as_json if args.json else _as_text
    serving = serve_with_workers if settings.server.workers > 1 else serve
    run_loop(until_signalled(partial(serving, source), announce))
    return DONE


async def ask(urls: list[str]) -> Settings:
    """Settings for bare engines: each is asked what it serves; one class, no tenants.

    Raises: ConfigError where a URL does not answer like an engine.
    """
    bases = [url.rstrip("/").removesuffix("/v1") for url in urls]
    for url in bases:
        try:
            address = urlsplit(url)
            good = address.scheme in {"http", "https"} and address.hostname and address.port != 0
        except ValueError:  # brackets or a port that are none
            good = False
        if not good:
            raise ConfigError(f"--backend must be http[s]://host[:port], not {url!r}")
        if address.username is not None:
            raise ConfigError("--backend must hold no user or password; a config file names keys")
    found = await asyncio.gather(*map(who_is, bases))
    models: dict[str, dict[str, VariantConfig]] = {}
    replicas = []
    for i, (url, told) in enumerate(zip(bases, found, strict=True)):
        if told is None:
            raise ConfigError(f"{url} lists no models at /v1/models; is an engine running there?")
        model = told.models[0]
        models.setdefault(model, {})[model] = VariantConfig()
        address = urlsplit(url)
        replicas.append(
            UrlReplica(
                name=f"{told.adapter.name}-{i}",
                variant=model,
                url=url,
                engine=told.adapter.name,
                served_model=model,
            )
        )
        _log.info(
            "%s:%s is %s and serves %s", address.hostname, address.port, told.adapter.name, model
        )
    return Settings(
        models={name: ModelConfig(variants=variants) for name, variants in models.items()},
        fleet=tuple(replicas),
        logs=LogsConfig(),
    )


def _as_json(listening: Listening) -> None:
    print(json.dumps(listening._asdict()), flush=True)


def _as_text(listening: Listening) -> None:
    url, models = listening
    print(
        f"Sluice listens on {url}\n"
        f"  OpenAI clients: base_url={url}/v1  model={models[0]} (or auto)\n"
        f"  dashboard {url}/   metrics {url}/metrics\n",
        flush=True,
    )
