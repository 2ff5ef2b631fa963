"""From configured replicas to a fleet that is there: asked, profiled, a pool opened for each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from backends.adapters.detect import Discovery, adapter_named, discover
from backends.breaker import Breaker
from backends.probe import Probe, asked
from backends.upstream import UpstreamPool
from domain.fleet import FleetSpec, ReplicaSpec, Variant
from domain.units import seconds_from_ms
from gateway.config import BreakerConfig, LocalReplicaConfig, ModelConfig, UrlReplica
from gateway.monitor import Target
from gateway.shell import Seat

DISCOVERY_TIMEOUT = 5.0
"""Seconds that an engine may take to say who it is at start-up; later the monitor asks again."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a replica is, and what is known of it before it is asked."""

    config: UrlReplica | LocalReplicaConfig
    url: str
    engine: str
    """Name of its adapter, or `auto`."""
    served_model: str | None = None
    api_key: str | None = None
    quality: float | None = None
    """Measured quality of its variant, where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFleet:
    """The fleet as the core knows it, how the shell reaches it, what the monitor watches."""

    spec: FleetSpec
    seats: Sequence[Seat]
    targets: Sequence[Target]


def url_place(replica: UrlReplica) -> Place:
    """Where an engine is that somebody else runs."""
    return Place(
        config=replica,
        url=replica.url.rstrip("/").removesuffix("/v1"),
        engine=replica.engine,
        served_model=replica.served_model,
        api_key=replica.api_key(),
    )


@contextlib.asynccontextmanager
async def opened(
    places: Sequence[Place],
    models: Mapping[str, ModelConfig],
    breaker: BreakerConfig,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[OpenFleet]:
    """Ask every replica who it is and keep a connection pool for each."""
    found = await asyncio.gather(*(who_is(place.url, place.api_key) for place in places))
    measured = {p.config.variant: p.quality for p in places if p.quality is not None}
    variants = tuple(
        config.variant(name, model, measured.get(name))
        for model, section in models.items()
        for name, config in section.variants.items()
    )
    owner = {v.name: v for v in variants}
    async with contextlib.AsyncExitStack() as stack:
        specs, seats, targets = [], [], []
        for place, told in zip(places, found, strict=True):
            if told is None:
                _log.warning("%s does not answer yet; it joins when it does", place.url)
            spec = replica_spec(place, told, owner[place.config.variant])
            pool = UpstreamPool(place.url, headers=_key_line(place.api_key), clock=clock)
            await stack.enter_async_context(pool)
            specs.append(spec)
            named = None if place.engine == "auto" else adapter_named(place.engine)
            adapter = named if named is not None or told is None else told.adapter
            seats.append(
                Seat(
                    name=spec.name,
                    model=spec.engine_model,
                    pool=pool,
                    breaker=Breaker(
                        limit=breaker.failures,
                        pause=seconds_from_ms(breaker.pause_ms),
                        longest_pause=seconds_from_ms(breaker.longest_pause_ms),
                    ),
                    salt_field=None if adapter is None else adapter.cache_salt,
                    healthy=told is not None,
                )
            )
            targets.append(Target(url=place.url, adapter=adapter, api_key=place.api_key))
        yield OpenFleet(
            spec=FleetSpec(replicas=tuple(specs), variants=variants), seats=seats, targets=targets
        )


async def who_is(url: str, api_key: str | None = None) -> Discovery | None:
    """What answers at a URL; None if nothing there lists models."""
    async with Probe(url, timeout=DISCOVERY_TIMEOUT, api_key=api_key) as probe:
        return await discover(lambda path: asked(probe, path))


def replica_spec(place: Place, told: Discovery | None, variant: Variant) -> ReplicaSpec:
    """What the core knows of a replica: the config first, then what the engine told."""
    config = place.config
    engine = told.adapter.name if told is not None and place.engine == "auto" else place.engine
    listed = told.models[0] if told is not None else variant.model
    return ReplicaSpec(
        name=config.name,
        variant=config.variant,
        profile=config.profile.profile(
            engine=engine,
            model=variant.model,
            max_seqs=None if told is None else told.max_seqs,
            max_context=None if told is None else told.max_context,
            kv_capacity=_capacity(told),
        ),
        url=place.url,
        engine_model=place.served_model or listed,
        weight=config.weight,
        window=seconds_from_ms(config.window_ms),
    )


def _capacity(told: Discovery | None) -> float | None:
    """KV tokens: told, or as many slots as there are, each full (llama.cpp splits its cache so)."""
    if told is None:
        return None
    if told.kv_capacity is None and told.max_seqs is not None and told.max_context is not None:
        return float(told.max_seqs * told.max_context)
    return told.kv_capacity


def _key_line(api_key: str | None) -> bytes:
    return b"" if api_key is None else b"authorization: Bearer %b\r\n" % api_key.encode("latin-1")
