"""A running gateway put together from settings: fleet, core, store, tenants, logs.

`serve` is one process that listens; `sluice.workers` runs several of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from domain.errors import ConfigError
from domain.ports import Store
from domain.request import Tenant
from gateway.config import LogsConfig, StoreConfig
from gateway.fleet import Place, opened, url_place
from sluice.reload import Door, Reloader
from sluice.settings import Settings

if TYPE_CHECKING:
    from backends.local import ReplicaChange
    from gateway.app import StorePorts
    from gateway.shell import Shell
    from gateway.siblings import Siblings

_log = logging.getLogger("sluice")


def set_up_logging(*, verbose: bool) -> None:
    """Our own log to standard error."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    for noisy in ("httpx", "httpcore", "numba", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def run_loop(main: Any) -> None:
    """Run a coroutine on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)


class Source(NamedTuple):
    """Settings and where they come from.

    `config` is the file that SIGHUP, or a change of it, has read again; `given` are settings of the
    server that the command line puts over the file's.
    """

    settings: Settings
    config: Path | None = None
    given: Mapping[str, Any] = MappingProxyType({})


class Worker(NamedTuple):
    """What a worker process has to itself, beside the settings that it shares.

    `places` of a fleet that its parent keeps; `logs` and `store` with names of its own. `late` if
    it takes a dead one's place: the config file may have changed since its settings were read.
    """

    places: Sequence[Place]
    siblings: Siblings
    logs: LogsConfig
    store: StoreConfig
    late: bool


class Listening(NamedTuple):
    """Where a gateway listens, and what it serves."""

    url: str
    models: tuple[str, ...]


Ready = Callable[[Listening], None]
"""Called once, when requests are served."""


async def until_signalled(
    serving: Callable[[Ready, asyncio.Event], Awaitable[None]], announce: Ready
) -> None:
    """Serve; SIGINT or SIGTERM drains and ends it, or ends the start-up if that is not over."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    started = asyncio.Event()

    def ready(listening: Listening) -> None:
        started.set()
        announce(listening)

    served = asyncio.ensure_future(serving(ready, stop))
    waiting = asyncio.ensure_future(stop.wait())
    await asyncio.wait({served, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not started.is_set():
        served.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await served


async def serve(
    source: Source, ready: Ready, stop: asyncio.Event, *, worker: Worker | None = None
) -> None:
    """Serve until told to stop, then drain. A change of the config file is taken meanwhile."""
    opening = reloadable(source.settings, worker=worker)
    async with opening as reloader, asyncio.TaskGroup() as tasks:
        gateway = reloader.gateway
        gc.collect()
        gc.freeze()  # what was built so far lives as long as the process: never scan it again
        gc.set_threshold(50_000, 20, 50)  # requests leave no cycles; young ones are cheap to keep
        ready(Listening(gateway.url, gateway.shell.fleet.models))
        watch = None
        if source.config is not None:
            reloader.given = source.given
            if worker is not None and worker.late:
                reloader.wake.set()
            watch = tasks.create_task(reloader.watching(source.config))
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, reloader.wake.set)
        await stop.wait()
        if watch is not None:
            watch.cancel()
        _log.info("draining; a second signal is not needed")


@contextlib.asynccontextmanager
async def gateway_of(settings: Settings) -> AsyncIterator[Any]:
    """Everything that the settings name, running. Yields a `gateway.app.Gateway`.

    Raises: ConfigError if a part cannot be built.
    """
    async with reloadable(settings) as reloader:
        yield reloader.gateway


@contextlib.asynccontextmanager
async def reloadable(
    settings: Settings, *, worker: Worker | None = None
) -> AsyncIterator[Reloader]:
    """Everything that the settings name, running, and what takes other settings into it.

    Raises: ConfigError if a part cannot be built.
    """
    from gateway.app import Parts, running
    from gateway.features import feature_vector
    from policies.bucket import DAY
    from policies.factory import build_core, warm
    from predictors.config import LearnedConfig
    from predictors.factory import build_estimator
    from predictors.tokens import TokenRatio
    from sluice.refit import learning

    door = Door(settings)
    tenants = door.tenants
    classes = [c.slo_class(name) for name, c in settings.classes.items()]
    async with contextlib.AsyncExitStack() as stack:
        # A core of its own is warmed, while the fleet starts: what it learns there must not reach
        # the one that serves.
        began = time.monotonic()
        warming = asyncio.ensure_future(
            asyncio.to_thread(warm, settings.policy, build_estimator(settings.predictors))
        )
        stack.callback(warming.cancel)
        children = Children()
        places: Sequence[Place]
        if worker is None:
            places = await stack.enter_async_context(placed(settings, children))
        else:
            places = worker.places
        fleet = await stack.enter_async_context(opened(places, settings.models, settings.breaker))
        await warming
        _log.info("fleet and kernels ready after %.1f s", time.monotonic() - began)
        now = time.monotonic()
        midnight = now - time.time() % DAY
        core = build_core(
            settings.policy,
            fleet=fleet.spec,
            estimator=build_estimator(settings.predictors),
            tenants=tenants,
            classes=classes,
            now=now,
            midnight=midnight,
        )
        tokens = TokenRatio()
        parts = Parts(
            core=core,
            open_store=open_store(settings.store if worker is None else worker.store, tenants),
            fleet=fleet,
            routes=route_names(fleet.spec),
            identify=door.identify,
            classes=classes,
            default_class=settings.default_class,
            estimate=tokens.estimate,
            learn_tokens=tokens.observe,
            server=settings.server,
            timeouts=settings.timeouts,
            monitor=settings.monitor,
            logs=settings.logs if worker is None else worker.logs,
            event_header=event_header(settings, fleet.spec, tenants, now, midnight),
            features=feature_vector if settings.predictors.kind == "learned" else None,
            siblings=None if worker is None else worker.siblings,
            elastic=settings.elastic,
        )
        gateway = await stack.enter_async_context(running(parts))
        children.watcher = gateway.shell

        async def warmed(changed: Settings) -> None:
            await asyncio.to_thread(warm, changed.policy, build_estimator(changed.predictors))

        reloader = Reloader(gateway, settings, door, stack, route_names, warmed)
        if settings.policy_registry is not None:
            from sluice.rollout import RegistryWatch

            watch = RegistryWatch(
                settings.policy_registry,
                gateway,
                lambda: reloader.settings.policy,
                lambda p: warm(p, build_estimator(settings.predictors), trial=True),
            )
            await watch.look()
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(tasks.create_task(watch.watching()).cancel)
        if isinstance(settings.predictors, LearnedConfig):
            await stack.enter_async_context(learning(gateway, core.estimator, settings.predictors))
        yield reloader


class Children:
    """Passes on at once what the local fleet knows of its children: a poll would notice later."""

    def __init__(self) -> None:
        self.watcher: Shell | None = None

    def changed(self, change: ReplicaChange) -> None:
        """A child became ready, or is not any more."""
        if self.watcher is not None and change.name in self.watcher.replicas:
            index = self.watcher.replicas.index(change.name)
            self.watcher.health(index, ok=change.state == "ready")


@contextlib.asynccontextmanager
async def placed(settings: Settings, children: Children) -> AsyncIterator[list[Place]]:
    """Where every replica is; local ones are started, and stopped on leaving."""
    async with contextlib.AsyncExitStack() as stack:
        local = None
        if settings.local_replicas:
            from backends.local import LocalFleet, LocalReplica

            local = await stack.enter_async_context(
                LocalFleet(
                    [
                        LocalReplica(
                            name=r.name,
                            variant=r.precision,
                            slots=r.slots,
                            context=r.context,
                            port=r.port,
                        )
                        for r in settings.local_replicas
                    ],
                    settings.local_cache,
                    on_change=children.changed,
                )
            )
        places = []
        for replica in settings.fleet:
            if replica.kind == "url":
                places.append(url_place(replica))
            elif local is not None:
                known = local.variants[replica.precision]
                _log.info(
                    "%s: %s, perplexity %.2f, quality prior %.3f",
                    replica.name,
                    known.description,
                    known.perplexity.value,
                    known.quality,
                )
                places.append(
                    Place(
                        config=replica,
                        url=local.urls[replica.name],
                        engine="llamacpp",
                        served_model=known.model,
                        quality=known.quality,
                    )
                )
        yield places


def open_store(
    config: StoreConfig, tenants: Sequence[Tenant]
) -> Callable[[StorePorts], AbstractAsyncContextManager[Store]]:
    """How the configured store is opened, given what it calls.

    Raises: ConfigError where its address is missing.
    """
    if config.kind == "memory":
        from gateway.store.memory import MemoryStore

        return lambda _ports: contextlib.nullcontext(MemoryStore())
    from gateway.store.redis import LedgerView, RedisStore

    url = config.url()
    if url is None:
        raise ConfigError(f"store: set {config.url_env} to redis://host:port")

    def opened_with(ports: StorePorts) -> AbstractAsyncContextManager[Store]:
        return RedisStore(
            url=url,
            gateway=config.name(),
            tenants={t.name: t for t in tenants},
            answer=ports.answer,
            foreign=ports.foreign,
            signal=ports.signal,
            ledger=lambda: LedgerView(*ports.ledger()),
            prefix=config.prefix,
            lease=config.lease_ms / 1000,
            answer_timeout=config.answer_timeout_ms / 1000,
        )

    return opened_with


def route_names(fleet: Any) -> tuple[str, ...]:
    """Names of the fleet's routes, in the core's order: a replica, or prefill>decode."""
    from domain.columns import route_table

    routes = route_table(fleet).routes
    names = [r.name for r in fleet.replicas]
    return tuple(
        names[d] if d == p else f"{names[p]}>{names[d]}"
        for d, p in zip(routes.decode.tolist(), routes.prefill.tolist(), strict=True)
    )


def event_header(
    settings: Settings, fleet: Any, tenants: Sequence[Tenant], now: float, midnight: float
) -> dict[str, Any]:
    """What a fresh core is built from: no keys."""
    import msgspec

    return {
        "policy": settings.policy.model_dump(mode="json"),
        "predictors": settings.predictors.model_dump(mode="json"),
        "fleet": msgspec.to_builtins(fleet),
        "tenants": msgspec.to_builtins(tenants),
        "classes": msgspec.to_builtins([c.slo_class(n) for n, c in settings.classes.items()]),
        "now": now,
        "midnight": midnight,
    }
