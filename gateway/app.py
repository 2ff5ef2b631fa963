"""The gateway put together: shell, relay plane, monitor, server and the FastAPI app around them.

Everything with a lifetime is entered in one exit stack and left in reverse: the server stops taking
clients, running streams end, the monitor stops, the log is written out.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from backends.upstream import Timeouts
from backends.wire.openai import RequestFacts, RequestParser
from domain.columns import FleetColumns
from domain.errors import ConfigError, ServingError
from domain.events import Committed, ForeignLoad
from domain.ports import Store
from domain.request import SloClass
from gateway.config import LogsConfig, MonitorConfig, ServerConfig, TimeoutsConfig
from gateway.decision_log import DecisionLog
from gateway.error_map import ErrorReply, http_reply, reply
from gateway.event_log import EventLog
from gateway.fleet import OpenFleet
from gateway.intake import Estimate, Identify, Intake, request_ids
from gateway.metrics import Metrics
from gateway.monitor import Monitor, Pace
from gateway.planner import Planner
from gateway.relay import Plane
from gateway.routes import Desk, answers, build_router, inference_routes, join
from gateway.server import GatewayServer, ServerLimits
from gateway.shell import Core, LearnTokens, Shell
from gateway.siblings import Alone, Siblings
from gateway.tenants import AdminKey
from policies.config import ElasticConfig

_log = logging.getLogger(__name__)


class StorePorts(NamedTuple):
    """What a store calls: its late answers, the other gateways' load, whether it is away, and this
    gateway's own ledger (replica names, columns).
    """

    answer: Callable[[Committed], None]
    foreign: Callable[[ForeignLoad], None]
    signal: Callable[[bool], None]
    ledger: Callable[[], tuple[tuple[str, ...], FleetColumns]]


OpenStore = Callable[[StorePorts], contextlib.AbstractAsyncContextManager[Store]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Built parts of a gateway. `event_header` is what the core was built from, as plain values."""

    core: Core
    open_store: OpenStore
    fleet: OpenFleet
    routes: tuple[str, ...]
    identify: Identify
    classes: Sequence[SloClass]
    default_class: str
    estimate: Estimate
    learn_tokens: LearnTokens
    server: ServerConfig
    timeouts: TimeoutsConfig
    monitor: MonitorConfig
    logs: LogsConfig
    event_header: dict[str, Any]
    features: Callable[[RequestFacts], tuple[float, ...]] | None = None
    siblings: Siblings | None = None
    """The other worker processes on the same port; None where there is only this one."""
    elastic: ElasticConfig | None = None
    """How plans for the fleet are made; None: they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A gateway that listens."""

    host: str
    port: int
    shell: Shell
    app: FastAPI
    metrics: Metrics
    log: DecisionLog
    monitor: Monitor

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.host}:{self.port}"


@contextlib.asynccontextmanager
async def running(parts: Parts) -> AsyncIterator[Gateway]:
    """Serve inside the `async with`; on leaving, drain."""
    async with contextlib.AsyncExitStack() as stack:
        logs = parts.logs
        log = await stack.enter_async_context(
            DecisionLog(logs.decisions, max_bytes=int(logs.max_mb * 2**20), keep=logs.keep)
        )
        event_log = None
        if logs.events is not None:
            event_log = stack.enter_context(EventLog(logs.events, parts.event_header))
        metrics = Metrics(models=parts.fleet.spec.models)
        shell = Shell(
            core=parts.core,
            fleet=parts.fleet.spec,
            seats=parts.fleet.seats,
            routes=parts.routes,
            intake=Intake(
                identify=parts.identify,
                classes={c.name: c for c in parts.classes},
                default_class=parts.default_class,
                estimate=parts.estimate,
                features=parts.features,
                new_id=request_ids(),
            ),
            timeouts=upstream_timeouts(parts.timeouts),
            log=log,
            metrics=metrics,
            learn_tokens=parts.learn_tokens,
            event_log=event_log,
        )
        stack.callback(shell.close)
        ports = StorePorts(
            shell.committed,
            shell.foreign_load,
            shell.store_away,
            lambda: (shell.replicas, parts.core.columns),
        )
        shell.start(await stack.enter_async_context(parts.open_store(ports)))
        monitor = Monitor(parts.fleet.targets, shell, _pace(parts.monitor))
        await stack.enter_async_context(monitor.watching())
        planner = None
        if parts.elastic is not None:
            workers = parts.server.workers if parts.siblings is not None else 1
            planner = Planner(parts.elastic, lambda: shell.fleet, workers=workers)
            log.readers.append(planner.saw)
            metrics.gauges.extend(planner.gauges())
            await stack.enter_async_context(planner.planning())
        plane = Plane(dispatcher=shell, parser=RequestParser())
        admin_hash = parts.server.admin_key_hash
        desk = Desk(
            shell=shell,
            identify=parts.identify,
            metrics=metrics,
            log=log,
            started_at=int(time.time()),
            admin_key=AdminKey(admin_hash) if admin_hash is not None else None,
            others=parts.siblings or Alone(),
            planner=planner,
        )
        if parts.siblings is not None:
            await stack.enter_async_context(
                parts.siblings.answering(
                    answers(desk), lambda: metrics.snapshot(counters_only=True)
                )
            )
            await join(desk)
        app = create_app(desk, plane)
        server = GatewayServer(
            plane, app, limits=ServerLimits(max_body_bytes=parts.server.body_limit_kb << 10)
        )
        grace = parts.server.drain_ms / 1000
        try:
            host, port = await stack.enter_async_context(
                server.listening(
                    parts.server.host,
                    parts.server.port,
                    reuse_port=parts.siblings is not None,
                    grace=grace,
                )
            )
        except OSError as exc:
            raise ConfigError(
                f"cannot listen on {parts.server.host}:{parts.server.port}: "
                f"{exc.strerror or exc}; choose another with --port or `server.port`"
            ) from exc
        stack.push_async_callback(shell.drain, grace)
        yield Gateway(
            host=host, port=port, shell=shell, app=app, metrics=metrics, log=log, monitor=monitor
        )


def create_app(desk: Desk, plane: Plane) -> FastAPI:
    """Everything off the token path, and the inference endpoints for a foreign ASGI server."""
    app = FastAPI(title="Sluice", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    app.include_router(build_router(desk))
    app.router.routes.extend(inference_routes(plane))

    @app.exception_handler(ServingError)
    async def refused(_: Request, error: ServingError) -> Response:
        return _response(reply(error))

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = _response(http_reply(error.status_code, message))
        response.headers.update(error.headers or {})  # `Allow`, which a 405 must carry
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return _response(http_reply(400, str(error.errors()[0].get("msg", "invalid request"))))

    return app


def upstream_timeouts(config: TimeoutsConfig) -> Timeouts:
    """Milliseconds of the config in seconds."""
    return Timeouts(
        connect=config.connect_ms / 1000,
        first_token=config.first_token_ms / 1000,
        between_tokens=config.between_tokens_ms / 1000,
        total=config.total_ms / 1000,
    )


def _pace(config: MonitorConfig) -> Pace:
    return Pace(
        every=config.every_ms / 1000,
        timeout=config.timeout_ms / 1000,
        refusals=config.down_after,
        silence=config.silence_ms / 1000,
    )


def _response(answer: ErrorReply) -> Response:
    headers = {name.decode(): value.decode() for name, value in answer.headers}
    return Response(answer.body, answer.status, headers=headers)
