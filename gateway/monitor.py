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

import httpx

from backends.adapters.detect import Get, discover
from backends.adapters.table import Adapter, Load, read_load

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

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Poll inside the `async with`."""
        async with new_client(self._pace.timeout) as client, asyncio.TaskGroup() as tasks:
            polls = [
                tasks.create_task(self._watch(client, i, target), name=f"monitor {target.url}")
                for i, target in enumerate(self._targets)
            ]
            try:
                yield
            finally:
                for poll in polls:
                    poll.cancel()

    async def _watch(self, client: httpx.AsyncClient, replica: int, target: Target) -> None:
        refused = 0
        answered = self._clock()
        while True:
            began = self._clock()
            try:
                load = await self._ask(client, target)
            except httpx.TimeoutException:
                if self._clock() - answered > self._pace.silence:
                    self._watcher.health(replica, ok=False)
            except httpx.HTTPError:
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

    async def _ask(self, client: httpx.AsyncClient, target: Target) -> Load | None:
        """The load of a replica that is up, None where it shows none. Raises: httpx.HTTPError."""
        if target.adapter is None:
            found = await discover(getter(client, target.url, target.api_key))
            if found is None:
                raise httpx.TransportError(f"{target.url} lists no models")
            _log.info("%s is %s", target.url, found.adapter.name)
            target.adapter = found.adapter
        adapter = target.adapter
        headers = auth(target.api_key)
        if adapter.metrics_path:
            response = await client.get(target.url + adapter.metrics_path, headers=headers)
            if response.is_success:
                return read_load(adapter, response.text)
        response = await client.get(target.url + adapter.health_path, headers=headers)
        response.raise_for_status()
        return None


def new_client(timeout: float) -> httpx.AsyncClient:
    """A client for polls: no proxies of the environment, few connections."""
    return httpx.AsyncClient(
        timeout=timeout, trust_env=False, limits=httpx.Limits(max_keepalive_connections=64)
    )


def auth(api_key: str | None) -> dict[str, str]:
    """The header that opens an engine."""
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def getter(client: httpx.AsyncClient, url: str, api_key: str | None) -> Get:
    """Asks paths of one engine."""

    async def get(path: str) -> bytes | None:
        try:
            response = await client.get(url + path, headers=auth(api_key))
        except httpx.HTTPError:
            return None
        return response.content if response.is_success else None

    return get
