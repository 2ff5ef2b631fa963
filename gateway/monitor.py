"""Watches the replicas: polls their metrics, and says who is up.

A replica is down after `refusals` polls in a row that nobody answered (or answered with a 5xx), or
after `silence` seconds without an answer: an engine that is only busy answers late, and late is not
down. Its first good answer makes it up. A missing reading changes nothing else: decisions go on
with the gateway's own counts (DESIGN section 7).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from backends.adapters.detect import discover
from backends.adapters.table import Adapter, Load, read_load
from backends.probe import Probe, asked
from domain.errors import BackendError, BackendTimeout, BackendUnavailable

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Target:
    """One replica to watch. `adapter` None: ask it who it is once it answers."""

    url: str
    adapter: Adapter | None
    api_key: str | None = None


class Watcher(Protocol):
    """Who is told."""

    def reading(self, replica: int, load: Load, measured_at: float) -> None:
        """A replica told its load, which it had at `measured_at`."""

    def recognised(self, replica: int, adapter: Adapter) -> None:
        """A replica that was not there at the start has said which engine it is."""

    def health(self, replica: int, *, ok: bool) -> None:
        """A replica's health check passed or failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often to ask and when to give up; seconds."""

    every: float = 0.5
    timeout: float = 2.0
    refusals: int = 3
    silence: float = 15.0


class Monitor:
    """Polls every target on its own; `watching` is its lifetime."""

    def __init__(
        self,
        targets: Sequence[Target],
        watcher: Watcher,
        pace: Pace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._targets = list(targets)
        self._watcher = watcher
        self._pace = pace
        self._clock = clock
        self._tasks: asyncio.TaskGroup | None = None
        self._polls: list[asyncio.Task[None]] = []

    def add(self, target: Target) -> None:
        """Watch one more replica, the next by number; inside `watching` only."""
        if self._tasks is None:
            raise RuntimeError("nothing is being watched; enter `watching` first")
        watch = self._watch(len(self._targets), target)
        self._targets.append(target)
        self._polls.append(self._tasks.create_task(watch, name=f"monitor {target.url}"))

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Poll inside the `async with`."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            targets, self._targets = self._targets, []
            for target in targets:
                self.add(target)
            try:
                yield
            finally:
                self._tasks = None
                for poll in self._polls:
                    poll.cancel()

    async def _watch(self, replica: int, target: Target) -> None:
        refused = 0
        answered = self._clock()
        async with Probe(target.url, timeout=self._pace.timeout, api_key=target.api_key) as probe:
            while True:
                began = self._clock()
                try:
                    load = await self._ask(probe, replica, target)
                except BackendTimeout:
                    if self._clock() - answered > self._pace.silence:
                        self._watcher.health(replica, ok=False)
                except BackendError:
                    refused += 1
                    if refused >= self._pace.refusals:
                        self._watcher.health(replica, ok=False)
                else:
                    refused = 0
                    answered = self._clock()
                    self._watcher.health(replica, ok=True)
                    if load is not None:
                        self._watcher.reading(replica, load, (began + answered) / 2)
                await asyncio.sleep(max(began + self._pace.every - self._clock(), 0.01))

    async def _ask(self, probe: Probe, replica: int, target: Target) -> Load | None:
        """The load of a replica that is up, None where it shows none. Raises: BackendError."""
        if target.adapter is None:
            found = await discover(lambda path: asked(probe, path))
            if found is None:
                raise BackendUnavailable(f"{target.url} lists no models")
            _log.info("%s is %s", target.url, found.adapter.name)
            target.adapter = found.adapter
            self._watcher.recognised(replica, found.adapter)
        adapter = target.adapter
        if adapter.metrics_path:
            answer = await probe.get(adapter.metrics_path)
            if answer.good:
                return read_load(adapter, answer.body.decode(errors="replace"))
        answer = await probe.get(adapter.health_path)
        if not answer.good:
            raise BackendUnavailable(f"{target.url}{adapter.health_path}: {answer.status}")
        return None
