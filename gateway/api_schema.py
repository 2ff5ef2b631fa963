"""What the control API answers, as OpenAPI: one table beside the routes that answer so.

Answers are written by hand, not built from models: they are read from live objects, and a scrape
costs no validation. A slow test holds them against this table with schemathesis.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
Responses = dict[int | str, dict[str, Any]]


def _object(**properties: Schema) -> Schema:
    """An object with all of these, and perhaps more."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
NUMBER_OR_NULL: Schema = {"type": ["number", "null"]}

ERROR = _object(error=_object(message=TEXT, type=TEXT, param=TEXT_OR_NULL, code=TEXT_OR_NULL))
MODEL = _object(
    id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT, variants=_list(TEXT)
)
MODELS = _object(object={"const": "list"}, data=_list(MODEL))
HEALTH = _object(status={"const": "ok"})
READY = _object(ready=FLAG, draining=FLAG, usable=_list(TEXT))
REPLICA = _object(
    name=TEXT,
    variant=TEXT,
    url=TEXT,
    engine=TEXT,
    usable=FLAG,
    why=TEXT,
    running=COUNT,
    reported=_object(running=NUMBER_OR_NULL, waiting=NUMBER_OR_NULL, kv_used=NUMBER_OR_NULL),
)
RECORD = _object(id=TEXT, at=NUMBER, tenant=TEXT, model=TEXT, outcome={"type": "object"})
STATUS = _object(
    ready=FLAG,
    draining=FLAG,
    workers=COUNT,
    queued=COUNT,
    replicas=_list(REPLICA),
    open=_list(_object(id=TEXT, tenant=TEXT, model=TEXT, age=NUMBER, tokens=COUNT)),
    recent=_list(RECORD),
)
POOLS = _list(_object(low_tokens=NUMBER, high_tokens=NUMBER_OR_NULL, replicas=COUNT))
PLAN = _object(
    made_at=NUMBER_OR_NULL,
    window_s=NUMBER,
    applied={"const": False},
    variants=_list(
        _object(
            variant=TEXT,
            requests_per_s=NUMBER,
            growth=NUMBER,
            pressure=_object(ttft=NUMBER, tpot=NUMBER),
            replicas=_object(now=COUNT, wanted=COUNT, reason=TEXT),
            pools=_object(
                now=POOLS,
                wanted=POOLS,
                missed_per_s_now=NUMBER,
                missed_per_s_then=NUMBER,
                reason=TEXT,
            ),
        )
    ),
)
FEEDBACK = _object(
    object={"const": "feedback"},
    id=TEXT,
    variant=TEXT,
    score={"type": "number", "minimum": 0, "maximum": 1},
)
FEEDBACK_BODY: Schema = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "minLength": 1, "maxLength": 128},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
    },
    "required": ["id", "score"],
    "additionalProperties": False,
}
METER = _object(
    running=COUNT,
    requests_in_window={"type": ["integer", "null"], "minimum": 0},
    level=NUMBER_OR_NULL,
    burst=NUMBER_OR_NULL,
    used_today=NUMBER_OR_NULL,
    cost_today=NUMBER_OR_NULL,
)
METERS: Schema = {"type": "object", "additionalProperties": METER}
TENANT_USAGE = _object(tenant=TEXT, shared=FLAG, total=METER, keys=METERS, models=METERS)
USAGE = _object(shared=FLAG, tenants=_list(TENANT_USAGE))


def answers_json(schema: Schema, **others: Schema) -> Responses:
    """A route's answers: 200 with this schema; others by status, spelled `_404`."""
    found: Responses = {200: _json("As asked.", schema)}
    for status, other in others.items():
        found[int(status[1:])] = _json("See its message.", other)
    return found


def takes_json(schema: Schema) -> dict[str, Any]:
    """What a route takes, for `openapi_extra`."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answers_text(kind: str) -> Responses:
    """A route that answers text of one media type."""
    return {200: {"description": "As asked.", "content": {kind: {"schema": TEXT}}}}


def _json(description: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
