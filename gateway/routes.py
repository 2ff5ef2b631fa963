"""Everything off the token path: models, health, metrics, administration, dashboard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import orjson
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from backends.wire.openai import SURFACES, Surface
from domain.errors import (
    FeedbackRepeated,
    ModelForbidden,
    Unauthenticated,
    UnknownModel,
    UnknownRequest,
)
from domain.request import AUTO, QuotaUsage, Tenant
from gateway.api_schema import (
    ERROR,
    FEEDBACK,
    FEEDBACK_BODY,
    HEALTH,
    MODEL,
    MODELS,
    PLAN,
    READY,
    RECORD,
    REPLICA,
    STATUS,
    TENANT_USAGE,
    USAGE,
    answers_json,
    answers_text,
    takes_json,
)
from gateway.asgi import answer
from gateway.decision_log import DecisionLog
from gateway.error_map import http_reply
from gateway.feedback import read_feedback
from gateway.intake import Identify
from gateway.metrics import Metrics, Snapshot
from gateway.planner import Planner
from gateway.relay import ClientRequest, Plane
from gateway.shell import Seat, Shell
from gateway.siblings import Alone, Answer, Others
from gateway.tenants import AdminKey

DASHBOARD = Path(__file__).with_name("dashboard") / "index.html"
SHOWN = 50
"""Requests that the dashboard lists."""
LOOPBACK = frozenset({"127.0.0.1", "::1"})
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
"""Headers of a proxy: the client is not who is connected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What the routes answer from."""

    shell: Shell
    identify: Identify
    metrics: Metrics
    log: DecisionLog
    started_at: int
    admin_key: AdminKey | None = None
    """None: only this machine may administer."""
    others: Others = Alone()
    planner: Planner | None = None
    """None: no plan is made for the fleet."""


def build_router(desk: Desk) -> APIRouter:
    """The routes over one gateway."""
    router = APIRouter()
    administrator = [Depends(_administrator(desk.admin_key))]

    def tenant_of(request: Request) -> Tenant:
        return desk.identify(_authorization(request)).tenant

    @router.get("/v1/models", response_class=Response, responses=answers_json(MODELS, _401=ERROR))
    async def models(request: Request) -> Response:
        tenant = tenant_of(request)
        names = [*desk.shell.fleet.models, AUTO]
        listed = [_model(desk, name) for name in names if _may(tenant, name)]
        return _json({"object": "list", "data": listed})

    @router.get(
        "/v1/models/{name:path}",
        response_class=Response,
        responses=answers_json(MODEL, _401=ERROR, _403=ERROR, _404=ERROR),
    )
    async def model(name: str, request: Request) -> Response:
        tenant = tenant_of(request)
        if name not in {*desk.shell.fleet.models, AUTO}:
            raise UnknownModel(f"no model {name!r}; GET /v1/models lists those served")
        if not _may(tenant, name):
            raise ModelForbidden(f"this key may not use {name!r}")
        return _json(_model(desk, name))

    @router.post(
        "/v1/feedback",
        response_class=Response,
        responses=answers_json(
            FEEDBACK, _400=ERROR, _401=ERROR, _404=ERROR, _409=ERROR, _413=ERROR
        ),
        openapi_extra=takes_json(FEEDBACK_BODY),
    )
    async def feedback(request: Request) -> Response:
        tenant = tenant_of(request)
        told = read_feedback(await request.body())
        try:
            variant = desk.shell.feedback(told.id, tenant.name, told.score)
        except UnknownRequest:
            argument = orjson.dumps([told.id, tenant.name, told.score]).decode()
            elsewhere = await desk.others.ask("feedback", argument)
            if not elsewhere:
                raise
            variant = elsewhere[0]["variant"]
            if variant is None:
                raise FeedbackRepeated(
                    f"request {told.id!r} has been judged already", param="id"
                ) from None
        return _json({"object": "feedback", "id": told.id, "variant": variant, "score": told.score})

    @router.get("/health", response_class=Response, responses=answers_json(HEALTH))
    async def health() -> Response:
        return _json({"status": "ok"})

    @router.get("/ready", response_class=Response, responses=answers_json(READY, _503=READY))
    async def ready() -> Response:
        usable = [s.name for s in desk.shell.seats if s.usable]
        is_ready = desk.shell.ready
        return _json(
            {"ready": is_ready, "draining": desk.shell.draining, "usable": usable},
            status=200 if is_ready else 503,
        )

    @router.get("/metrics", response_class=Response, responses=answers_text("text/plain"))
    async def metrics() -> Response:
        others = [msgspec.convert(c, Snapshot) for c in await desk.others.counts()]
        text = desk.metrics.text(others)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/", response_class=HTMLResponse)
    async def dashboard() -> str:
        return DASHBOARD.read_text()

    @router.get(
        "/admin/status",
        dependencies=administrator,
        response_class=Response,
        responses=answers_json(STATUS, _401=ERROR),
    )
    async def status() -> Response:
        return _json(_together([_status(desk), *await desk.others.ask("status")]))

    @router.get(
        "/admin/requests/{request_id}",
        dependencies=administrator,
        response_class=Response,
        responses=answers_json(RECORD, _401=ERROR, _404=ERROR),
    )
    async def explain(request_id: str) -> Response:
        record = desk.log.find(request_id)
        if record is None:
            elsewhere = await desk.others.ask("find", request_id)
            record = elsewhere[0] if elsewhere else None
        if record is None:
            message = f"no recent request {request_id!r}; older ones: sluice explain"
            return _not_found(message)
        return _json(record)

    @router.get(
        "/admin/usage",
        dependencies=administrator,
        response_class=Response,
        responses=answers_json(USAGE, _401=ERROR),
    )
    async def usage() -> Response:
        shared, tenants = await desk.shell.usage(desk.shell.tenants)
        shown = [_usage(name, meters, shared=shared) for name, meters in tenants.items()]
        return _json({"shared": shared, "tenants": shown})

    @router.get(
        "/admin/usage/{tenant}",
        dependencies=administrator,
        response_class=Response,
        responses=answers_json(TENANT_USAGE, _401=ERROR, _404=ERROR),
    )
    async def usage_of(tenant: str) -> Response:
        shared, found = await desk.shell.usage(
            [name for name in desk.shell.tenants if name == tenant]
        )
        if tenant not in found:
            return _not_found(f"no tenant {tenant!r}; GET /admin/usage lists them")
        return _json(_usage(tenant, found[tenant], shared=shared))

    @router.get(
        "/admin/plan",
        dependencies=administrator,
        response_class=Response,
        responses=answers_json(PLAN, _401=ERROR, _404=ERROR),
    )
    async def plan() -> Response:
        if desk.planner is None:
            return _not_found("no plan is made; a section `elastic` in the config asks for one")
        return _json(desk.planner.plan)

    @router.post(
        "/admin/replicas/{name}/{verb}",
        dependencies=administrator,
        response_class=Response,
        responses=answers_json(REPLICA, _401=ERROR, _404=ERROR),
    )
    async def drain(name: str, verb: str) -> Response:
        if name not in desk.shell.replicas or verb not in {"drain", "restore"}:
            message = "POST /admin/replicas/NAME/drain or /restore, NAME from /admin/status"
            return _not_found(message)
        _drain(desk.shell, name, drained=verb == "drain")
        await desk.others.ask(verb, name)
        index = desk.shell.replicas.index(name)
        return _json(_seat(desk.shell, index, desk.shell.seats[index]))

    return router


def answers(desk: Desk) -> dict[str, Answer]:
    """What the other workers may ask this one."""
    return {
        "counts": lambda _: desk.metrics.snapshot(),
        "status": lambda _: _status(desk),
        "find": desk.log.find,
        "drain": lambda name: _drain(desk.shell, name, drained=True),
        "restore": lambda name: _drain(desk.shell, name, drained=False),
        "feedback": lambda argument: _feedback(desk.shell, argument),
        "drained": lambda _: [seat.name for seat in desk.shell.seats if seat.drained],
    }


def _feedback(shell: Shell, argument: str) -> dict[str, str | None] | None:
    """A feedback that another worker was given: which variant it was for, None in it where it had
    been judged, None where the answer was not from here.
    """
    request_id, tenant, score = orjson.loads(argument)
    try:
        return {"variant": shell.feedback(request_id, tenant, score)}
    except UnknownRequest:
        return None
    except FeedbackRepeated:
        return {"variant": None}


async def join(desk: Desk) -> None:
    """Leave alone what an administrator had drained before this worker started."""
    for drained in await desk.others.ask("drained"):
        for name in drained:
            _drain(desk.shell, name, drained=True)


def _drain(shell: Shell, name: str, *, drained: bool) -> None:
    if name in shell.replicas:  # a worker may have read the fleet's last change before the others
        shell.drain_replica(shell.replicas.index(name), drained=drained)


def _status(desk: Desk) -> dict[str, Any]:
    """One worker as `/admin/status` shows it."""
    return {
        "ready": desk.shell.ready,
        "draining": desk.shell.draining,
        "workers": 1,
        "queued": desk.shell.queued,
        "replicas": [_seat(desk.shell, i, s) for i, s in enumerate(desk.shell.seats)],
        "open": list(desk.shell.open_records()),
        "recent": desk.log.recent()[:SHOWN],
    }


def _together(shown: list[dict[str, Any]]) -> dict[str, Any]:
    """The workers' status as one; of what each has to itself the first one's is shown."""
    first, *others = shown
    if not others:
        return first
    recent = [record for status in shown for record in status["recent"]]
    recent.sort(key=lambda r: r["at"] + r["outcome"]["e2e"], reverse=True)
    running = Counter[str]()
    for status in shown:
        for replica in status["replicas"]:
            running[replica["name"]] += replica["running"]
    replicas = [mine | {"running": running[mine["name"]]} for mine in first["replicas"]]
    return first | {
        "workers": len(shown),
        "queued": sum(status["queued"] for status in shown),
        "replicas": replicas,
        "open": [record for status in shown for record in status["open"]],
        "recent": recent[:SHOWN],
    }


def inference_routes(plane: Plane) -> list[Route]:
    """The inference endpoints as ASGI routes, for when the app runs under a foreign server."""
    return [
        Route(path.decode(), _Inference(plane, surface), methods=["POST"])
        for path, surface in SURFACES.items()
    ]


class _Inference:
    """One inference endpoint over ASGI."""

    def __init__(self, plane: Plane, surface: Surface) -> None:
        self._plane = plane
        self._surface = surface

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await request.body()
        peer = scope.get("client")
        await answer(
            self._plane,
            ClientRequest(
                surface=self._surface,
                headers=[(bytes(k).lower(), bytes(v)) for k, v in scope["headers"]],
                body=body,
                received_at=self._plane.clock(),
                peer=peer[0] if peer else "",
            ),
            receive,
            send,
        )


def _authorization(request: Request) -> bytes | None:
    value = request.headers.get("authorization")
    return None if value is None else value.encode("latin-1")


def _administrator(admin_key: AdminKey | None) -> Any:
    """A dependency that lets the administrator in: by key, or from this machine if none is set."""

    def check(request: Request) -> None:
        if admin_key is None:
            if not _is_local(request):
                raise Unauthenticated("set an admin key to open /admin to other machines")
            return
        if not admin_key.opens(_authorization(request)):
            raise Unauthenticated("the admin key is missing or wrong")

    return check


def _is_local(request: Request) -> bool:
    """Whether somebody on this machine asks: not a proxy here for others, and not a browser for a
    page from elsewhere (by its origin, or by a name made to point here).
    """
    if request.client is None or request.client.host not in LOOPBACK:
        return False
    headers = request.headers
    if any(name in headers for name in FORWARDED):
        return False
    host = headers.get("host", "")
    origin = headers.get("origin")
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name in {*LOOPBACK, "localhost"} and origin in {None, f"http://{host}"}


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _not_found(message: str) -> Response:
    return Response(http_reply(404, message).body, 404, media_type="application/json")


def _may(tenant: Tenant, model: str) -> bool:
    return tenant.models is None or model in tenant.models


def _model(desk: Desk, name: str) -> dict[str, Any]:
    variants = [v.name for v in desk.shell.fleet.variants if name in {v.model, AUTO}]
    return {
        "id": name,
        "object": "model",
        "created": desk.started_at,
        "owned_by": "sluice",
        "variants": variants,
    }


def _usage(tenant: str, meters: Mapping[str, QuotaUsage], *, shared: bool) -> dict[str, Any]:
    """One tenant's meters: its own, its keys' and its models', where these have a quota."""
    shown: dict[str, Any] = {"tenant": tenant, "shared": shared, "keys": {}, "models": {}}
    for name, counted in meters.items():
        kind, _, rest = name.partition(":")
        if kind == "tenant":
            shown["total"] = counted
        else:
            shown[f"{kind}s"][rest] = counted
    return shown


def _seat(shell: Shell, index: int, seat: Seat) -> Mapping[str, Any]:
    spec = shell.fleet.replicas[index]
    return {
        "name": seat.name,
        "variant": spec.variant,
        "url": spec.url,
        "engine": spec.profile.key.engine,
        "usable": seat.usable,
        "why": "" if seat.usable else seat.why,
        "running": seat.running,
        "reported": {
            "running": seat.load.running,
            "waiting": seat.load.waiting,
            "kv_used": seat.load.kv_used,
        },
    }
