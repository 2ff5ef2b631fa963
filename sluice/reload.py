"""Another config while the gateway serves: what changes at once, and what needs a restart.

Fleet, models, tenants, classes and policy are compared by name (DESIGN section 10): bucket levels
are kept, a replica that is not named any more drains, waiting requests are checked again, and what
a policy learned stays with it. Ports, store, logs and the like need a restart; a change of theirs
is said and left alone. A file that cannot be served leaves the old one in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from domain.errors import ConfigError
from domain.fleet import FleetSpec, ReplicaSpec
from domain.request import Tenant
from domain.units import seconds_from_ms
from gateway.config import ReplicaConfig, UrlReplica
from gateway.fleet import opened, url_place
from gateway.metrics import Gauge
from gateway.tenants import Identity, KeyTable, key_table
from sluice.settings import Settings, load

if TYPE_CHECKING:
    from gateway.app import Gateway

EVERY = 1.0
"""Seconds between two looks at the files: a mounted config map is swapped within as many."""

RESTART = (
    "server", "store", "logs", "monitor", "breaker", "predictors", "local_cache", "policy_registry",
    "elastic",
)  # fmt: skip
"""Sections of which a change needs a restart."""

_log = logging.getLogger("sluice")


class Door:
    """Whose key a request carries, by the key table in force."""

    def __init__(self, settings: Settings) -> None:
        self._table: KeyTable = key_table(settings.tenants)

    def change(self, table: KeyTable) -> None:
        """Let another table decide from now on."""
        self._table = table

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """Everybody who may ask."""
        return tenants_of(self._table)

    def identify(self, authorization: bytes | None) -> Identity:
        """The tenant of an `Authorization` header. Raises: Unauthenticated."""
        return self._table.identify(authorization)


def tenants_of(table: KeyTable) -> tuple[Tenant, ...]:
    """A table's tenants; of an open gateway, everybody's."""
    return table.tenants or (table.identify(None).tenant,)


def digest(settings: Settings) -> str:
    """Twelve hex digits that stand for a config; equal on every worker that has the same."""
    return hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:12]


@dataclass(slots=True)
class Reloader:
    """Takes new settings into a gateway that serves. `stack` owns the pools of new replicas."""

    gateway: Gateway
    settings: Settings
    door: Door
    stack: AsyncExitStack
    route_names: Callable[[FleetSpec], tuple[str, ...]]
    warm: Callable[[Settings], Awaitable[None]]
    given: Mapping[str, object] = field(default_factory=dict)
    """Settings of the server that the command line puts over the file's."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: read the file at once, changed or not."""
    taken: int = 0
    refused: int = 0
    _seen: dict[str, ReplicaConfig] = field(init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._seen = {r.name: r for r in self.settings.fleet}
        worker = str(os.getpid())
        self.gateway.metrics.gauges += [
            Gauge(
                "sluice_config_info",
                "1 for the config in force.",
                ("hash", "worker"),
                lambda: [((digest(self.settings), worker), 1.0)],
            ),
            Gauge(
                "sluice_config_reloads",
                "Reloads by result.",
                ("result",),
                lambda: [(("taken",), self.taken), (("refused",), self.refused)],
            ),
        ]

    async def read(self, path: Path) -> bool:
        """Take the file's settings; False, and the old ones stay, if they cannot be served."""
        try:
            settings = load(path)
            server = settings.server.model_copy(update=dict(self.given))
            settings = settings.model_copy(update={"server": server})
            said = await self.take(settings)
        except ConfigError as exc:
            self.refused += 1
            _log.error("the config was not taken, the old one serves on:\n%s", exc)
            return False
        for line in said:
            _log.warning("%s", line)
        _log.info("config %s is in force", digest(self.settings))
        return True

    async def take(self, settings: Settings) -> list[str]:
        """Take these settings; returns what of them needs a restart.

        Raises: ConfigError, with nothing changed, where they cannot be served.
        """
        async with self._lock:
            return await self._take(settings)

    async def _take(self, settings: Settings) -> list[str]:
        old = self.settings
        said = [
            f"{name}: a change takes effect after a restart"
            for name in RESTART
            if getattr(settings, name) != getattr(old, name)
        ]
        kept = {name: getattr(old, name) for name in RESTART}
        if settings.policy.hold != old.policy.hold:
            said.append("policy.hold: a change takes effect after a restart")
            policy = settings.policy.model_copy(update={"hold": old.policy.hold})
            kept["policy"] = policy
        settings = settings.model_copy(update=kept)
        table = key_table(settings.tenants)
        wanted, fresh = self._fleet(settings, said)
        if not wanted and not fresh:
            raise ConfigError("fleet: none of its replicas can join without a restart")
        policy_json = None
        if settings.policy != old.policy:
            await self.warm(settings)
            if settings.policy_registry is None:  # else whoever watches it says who decides
                policy_json = settings.policy.model_dump_json()
        joined = await self.stack.enter_async_context(
            opened([url_place(r) for r in fresh], settings.models, settings.breaker)
        )
        shell = self.gateway.shell
        specs = (*wanted, *joined.spec.replicas)
        served = {spec.variant for spec in specs}
        variants = [v for v in joined.spec.variants if v.name in served]
        measured = {v.name: v.quality for v in shell.fleet.variants}
        variants = [
            replace(v, quality=measured[v.name])
            if v.name in measured and _unset(settings, v.name)
            else v
            for v in variants
        ]
        from gateway.app import upstream_timeouts

        classes = {name: c.slo_class(name) for name, c in settings.classes.items()}
        tenants = tenants_of(table)
        self.door.change(table)
        shell.store.reload({t.name: t for t in tenants})
        shell.reload(
            fleet=FleetSpec(replicas=specs, variants=tuple(variants)),
            seats=joined.seats,
            route_names=self.route_names,
            intake=replace(shell.intake, classes=classes, default_class=settings.default_class),
            tenants=tenants,
            timeouts=upstream_timeouts(settings.timeouts),
            policy=policy_json,
        )
        for target in joined.targets:
            self.gateway.monitor.add(target)
        self.settings = settings
        self._seen |= {r.name: r for r in settings.fleet}
        self.taken += 1
        return said

    def _fleet(
        self, settings: Settings, said: list[str]
    ) -> tuple[list[ReplicaSpec], list[UrlReplica]]:
        """Specs of replicas that were there before, as they are now wanted, and the new ones."""
        known = {spec.name: spec for spec in self.gateway.shell.fleet.replicas}
        wanted, fresh = [], []
        for config in settings.fleet:
            spec, before = known.get(config.name), self._seen.get(config.name)
            if spec is None or before is None:
                if config.kind == "url":
                    fresh.append(config)
                else:
                    said.append(f"fleet.{config.name}: a local replica joins after a restart")
            elif _place_of(config) != _place_of(before):
                raise ConfigError(
                    f"fleet.{config.name}: another address, engine or process needs another name"
                )
            else:
                wanted.append(spec if config == before else changed(spec, config, settings))
        return wanted, fresh

    async def watching(self, path: Path) -> None:
        """Take the file again whenever it, or the tenants file beside it, has changed, or `wake` is
        set.
        """
        seen = self._signature(path)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY):
                    await self.wake.wait()
            now = self._signature(path)
            if now != seen or self.wake.is_set():
                self.wake.clear()
                seen = now
                try:
                    await self.read(path)
                except Exception:  # noqa: BLE001 - outermost loop of a background task: log and count
                    self.refused += 1
                    _log.exception("the config was not taken")

    def _signature(self, path: Path) -> tuple[tuple[int, int, int] | None, ...]:
        """What differs when a file was written, moved over or linked anew."""
        files = [path]
        if self.settings.tenants_file is not None:
            files.append(path.parent / self.settings.tenants_file)
        found: list[tuple[int, int, int] | None] = []
        for file in files:
            try:
                stat = file.stat()
            except OSError:
                found.append(None)
            else:
                found.append((stat.st_mtime_ns, stat.st_ino, stat.st_size))
        return tuple(found)


def changed(spec: ReplicaSpec, config: ReplicaConfig, settings: Settings) -> ReplicaSpec:
    """A replica that stays, with its new weight, window, variant and profile; what the engine told
    stays where the config is silent.
    """
    owner = {v: model for model, section in settings.models.items() for v in section.variants}
    told = spec.profile
    profile = config.profile.profile(
        engine=told.key.engine,
        model=owner[config.variant],
        max_seqs=told.max_seqs,
        max_context=told.max_context,
        kv_capacity=told.kv_capacity,
    )
    return replace(
        spec,
        variant=config.variant,
        weight=config.weight,
        window=seconds_from_ms(config.window_ms),
        profile=profile,
    )


def _place_of(config: ReplicaConfig) -> tuple[object, ...]:
    """What may not change under one name."""
    if config.kind == "url":
        return (config.kind, config.url, config.engine, config.served_model, config.api_key_env)
    return (config.kind, config.precision, config.slots, config.context, config.port)


def _unset(settings: Settings, variant: str) -> bool:
    """Whether the config leaves a variant's quality to what was measured."""
    return any(
        section.variants[variant].quality is None
        for section in settings.models.values()
        if variant in section.variants
    )
