"""Which engine answers at a URL, what it serves and how much of it: found by asking.

To add an engine: one module with its table, one entry in `ADAPTERS`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import orjson

from backends.adapters.llamacpp import LLAMACPP
from backends.adapters.openai import OPENAI
from backends.adapters.table import Adapter, kv_capacity
from backends.adapters.vllm import VLLM

ADAPTERS: tuple[Adapter, ...] = (LLAMACPP, VLLM, OPENAI)
"""Every engine known; the generic one comes last."""

Get = Callable[[str], Awaitable[bytes | None]]
"""Asks one path of the engine: its body when the answer is a 200, else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """What a URL turned out to be; None where it did not say. `max_context` in tokens a
    sequence.
    """

    adapter: Adapter
    models: tuple[str, ...]
    max_context: int | None = None
    max_seqs: int | None = None
    kv_capacity: float | None = None


def adapter_named(name: str) -> Adapter:
    """The adapter of that name. Raises: ValueError naming those known."""
    for adapter in ADAPTERS:
        if adapter.name == name:
            return adapter
    known = ", ".join(a.name for a in ADAPTERS)
    raise ValueError(f"unknown engine {name!r}; known: {known}")


async def discover(get: Get) -> Discovery | None:
    """Ask an engine who it is; None when it lists no models, so is not one (or not up)."""
    listed = _models(await get("/v1/models"))
    if not listed:
        return None
    metrics = (await get("/metrics") or b"").decode(errors="replace")
    adapter = recognise({str(m.get("owned_by", "")) for m in listed}, metrics)
    props = _object(await get(adapter.props_path)) if adapter.props_path else {}
    settings = props.get("default_generation_settings")
    context = settings.get("n_ctx") if isinstance(settings, dict) else None
    slots = props.get("total_slots")
    return Discovery(
        adapter=adapter,
        models=tuple(str(m["id"]) for m in listed),
        max_context=_count(context) or _count(listed[0].get("max_model_len")),
        max_seqs=_count(slots),
        kv_capacity=kv_capacity(adapter, metrics),
    )


def recognise(owners: set[str], metrics: str) -> Adapter:
    """The adapter whose mark is seen: the owner in the model list first, then metric names."""
    for adapter in ADAPTERS:
        if owners & set(adapter.owned_by):
            return adapter
    for adapter in ADAPTERS:
        if adapter.prefix and any(line.startswith(adapter.prefix) for line in metrics.splitlines()):
            return adapter
    return OPENAI


def _models(body: bytes | None) -> list[dict[str, object]]:
    data = _object(body).get("data")
    if not isinstance(data, list):
        return []
    return [m for m in data if isinstance(m, dict) and isinstance(m.get("id"), str)]


def _object(body: bytes | None) -> dict[str, object]:
    if body is None:
        return {}
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and value >= 1 else None
