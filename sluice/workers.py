"""`sluice serve --workers N`: N gateways on one port, and the parent that keeps them.

    parent: settings, port, local fleet ──job (one JSON line)──► worker 0 ─┐ listens, SO_REUSEPORT
                                        └─────────────────────► worker 1 ─┘ siblings in one folder
            worker ends unasked: another takes its place       parent ends: its workers drain

Workers are gateways like any others: they agree on quotas and on the fleet's load through the
shared store, which is therefore required. What belongs to one machine (metrics, `/admin`, the logs)
they put together themselves, see `gateway.siblings`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from backends.backoff import Backoff, BackoffRule
from domain.errors import ConfigError
from domain.units import Seconds
from gateway.config import LogsConfig, StoreConfig
from gateway.decision_log import worker_path
from gateway.fleet import Place, url_place
from gateway.siblings import Siblings
from sluice.assembly import (
    Children,
    Listening,
    Ready,
    Source,
    Worker,
    placed,
    run_loop,
    serve,
    set_up_logging,
    until_signalled,
)
from sluice.cli import BAD_INPUT, DONE
from sluice.settings import Settings

KILL_AFTER = 5.0
"""Seconds that a worker may take to end after its streams had their grace."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlace:
    """Where the parent runs a local replica."""

    url: str
    served_model: str | None
    quality: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker is told. `settings` as JSON, without secrets: those are in the environment.

    `name` is its own among all workers of this run: its number, and its life where that is not
    the first.
    """

    settings: str
    config: str | None
    given: dict[str, Any]
    number: int
    name: str
    folder: str
    local: dict[str, LocalPlace]
    verbose: bool


# ---- the parent


async def serve_with_workers(source: Source, ready: Ready, stop: asyncio.Event) -> None:
    """Start the workers, tell `ready` once all of them listen, keep them, stop them.

    Raises: ConfigError where workers could not agree, the port is taken, or one cannot start.
    """
    settings = source.settings
    if settings.store.kind == "memory":
        raise ConfigError(
            f"{settings.server.workers} workers need a store that they share, or each would grant "
            "every quota in full: set `store: {kind: redis}` and SLUICE_REDIS_URL, or run one"
        )
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-"))
        host, port = settings.server.host, settings.server.port
        held = stack.enter_context(contextlib.closing(held_port(host, port)))
        address = {"port": held.getsockname()[1]}
        server = settings.server.model_copy(update=address)
        settings = settings.model_copy(update={"server": server})
        source = Source(settings, source.config, {**source.given, **address})
        places = await stack.enter_async_context(placed(settings, Children()))
        async with keeping(source, places, Path(folder)) as (keepers, started):
            first = (await started)[0]
            ready(first)
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, lambda: list(map(Keeper.hang_up, keepers)))
            await stop.wait()


@contextlib.asynccontextmanager
async def keeping(
    source: Source, places: Sequence[Place], folder: Path
) -> AsyncIterator[tuple[list[Keeper], asyncio.Future[list[Listening]]]]:
    """Keep the workers alive inside the `async with`; gives their keepers, and what to await until
    all listen.

    Raises: ConfigError if one ends before it listened for the first time.
    """
    count = source.settings.server.workers
    keepers = [Keeper(source, places, folder, i) for i in range(count)]
    try:
        async with asyncio.TaskGroup() as tasks:
            for keeper in keepers:
                tasks.create_task(keeper.keep(), name=f"worker {keeper.number}")
            yield keepers, asyncio.gather(*(keeper.listening for keeper in keepers))
            for keeper in keepers:
                keeper.stop()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group  # one reason is enough to end, and to tell


class Keeper:
    """Keeps one worker process alive. `listening` is what it said when it first listened."""

    def __init__(self, source: Source, places: Sequence[Place], folder: Path, number: int) -> None:
        self.number = number
        self.listening: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
        self._source = source
        self._local = {
            place.config.name: LocalPlace(
                url=place.url, served_model=place.served_model, quality=place.quality
            )
            for place in places
            if place.config.kind == "local"
        }
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._listens = False
        self._stopping = asyncio.Event()
        self._patience = KILL_AFTER + 2 * source.settings.server.drain_ms / 1000

    def stop(self) -> None:
        """Have the worker drain and end; `keep` returns when it has."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    def hang_up(self) -> None:
        """Have the worker read the config file again; one that is starting will anyway."""
        if self._process is not None and self._listens:
            self._process.send_signal(signal.SIGHUP)

    async def keep(self) -> None:
        """Run one worker after another until `stop`. Raises: ConfigError if the first never
        listened.
        """
        backoff = Backoff(BackoffRule())
        life = 0
        try:
            while not self._stopping.is_set():
                life += 1
                name = str(self.number) if life == 1 else f"{self.number}.{life}"
                began = time.monotonic()
                code = await self._live(name)
                if self._stopping.is_set():
                    return
                if not self.listening.done():
                    raise ConfigError(f"worker {name} ended with code {code}; it said why above")
                delay = backoff.after_death(Seconds(time.monotonic() - began))
                _log.warning("worker %s ended with code %d; next in %.2f s", name, code, delay)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay)
        finally:
            self.listening.cancel()

    async def _live(self, name: str) -> int:
        """One life of the worker; its exit code."""
        job = Job(
            settings=self._source.settings.model_dump_json(by_alias=True),
            config=None if self._source.config is None else str(self._source.config),
            given=dict(self._source.given),
            number=self.number,
            name=name,
            folder=str(self._folder),
            local=self._local,
            verbose=_log.isEnabledFor(logging.DEBUG),
        )
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sluice.workers"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is the parent's, which tells its workers
        )
        try:
            if process.stdin is None or process.stdout is None:
                raise RuntimeError("a worker without pipes")
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            told = await process.stdout.readline()
            self._listens = bool(told)
            if told and not self.listening.done():
                self.listening.set_result(msgspec.json.decode(told, type=Listening))
            if self._stopping.is_set():
                process.terminate()
            return await self._ended(process)
        finally:
            self._listens = False
            if process.returncode is None:  # cancelled: the start-up of all is over
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                await asyncio.shield(self._ended(process, drained=True))
            (self._folder / f"{name}.sock").unlink(missing_ok=True)

    async def _ended(self, process: asyncio.subprocess.Process, *, drained: bool = False) -> int:
        """Wait for its end; once it was told to, only as long as draining may take."""
        waiting = asyncio.ensure_future(process.wait())
        if not drained:
            stopping = asyncio.ensure_future(self._stopping.wait())
            await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
        try:
            return await asyncio.wait_for(waiting, self._patience)
        except TimeoutError:
            process.kill()
            return await process.wait()


def held_port(host: str, port: int) -> socket.socket:
    """A socket that holds the port for the workers without listening itself. Port 0: any.

    Raises: ConfigError if it is not free: sharing a port with strangers would go unnoticed.
    """
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        with socket.socket(family, kind, proto) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
            alone.listen()
            address = alone.getsockname()
        held = socket.socket(family, kind, proto)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
    except OSError as exc:
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}") from exc
    return held


# ---- a worker


def own(job: Job, settings: Settings) -> Worker:
    """What this worker has to itself; the settings stay those of all."""
    return Worker(
        places=places_of(job, settings),
        siblings=Siblings(Path(job.folder), job.name),
        logs=own_logs(job, settings.logs),
        store=own_store(settings.store),
        late=job.name != str(job.number),
    )


def own_logs(job: Job, logs: LogsConfig) -> LogsConfig:
    """Decisions go to one file whoever is this worker; a core's events are of one life only."""
    return logs.model_copy(
        update={
            "decisions": logs.decisions and worker_path(logs.decisions, str(job.number)),
            "events": logs.events and worker_path(logs.events, job.name),
        }
    )


def own_store(store: StoreConfig) -> StoreConfig:
    """Never the name of a worker that died: its leases are still its own."""
    if store.kind == "memory":
        return store
    name = f"{store.gateway or socket.gethostname()}-{os.getpid()}"
    return store.model_copy(update={"gateway": name})


def places_of(job: Job, settings: Settings) -> list[Place]:
    """Where the replicas are: by URL, or where the parent runs them."""
    places = []
    for replica in settings.fleet:
        if replica.kind == "url":
            places.append(url_place(replica))
        else:
            known = job.local[replica.name]
            places.append(
                Place(
                    config=replica,
                    url=known.url,
                    engine="llamacpp",
                    served_model=known.served_model,
                    quality=known.quality,
                )
            )
    return places


async def work(job: Job, ready: Ready, stop: asyncio.Event) -> None:
    """Serve as a worker until told to stop, or until the parent is gone."""
    settings = Settings.model_validate_json(job.settings)
    config = None if job.config is None else Path(job.config)
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)  # readable: it has ended
    source = Source(settings, config, job.given)
    await serve(source, ready, stop, worker=own(job, settings))


def main() -> int:
    """A worker process: the job on standard input, where it listens on standard output."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    set_up_logging(verbose=job.verbose)

    def ready(listening: Listening) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(listening) + b"\n")
        sys.stdout.buffer.flush()

    try:
        run_loop(until_signalled(partial(work, job), ready))
    except ConfigError as exc:
        print(exc, file=sys.stderr)
        return BAD_INPUT
    return DONE


if __name__ == "__main__":
    sys.exit(main())
