"""The whole gateway, real core and all, over engines at given URLs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Self

import numpy as np

from gateway.app import Gateway
from sluice.assembly import gateway_of
from sluice.settings import Settings


def settings_for(*urls: str, **sections: Any) -> Settings:
    """Settings over bare engines, all one variant, logging nothing to disk."""
    return Settings.model_validate(
        {
            "server": {"port": 0, "drain_ms": 200},
            "models": {"m": {"variants": {"v": {}}}},
            "fleet": [
                {"kind": "url", "name": f"r{i}", "url": url, "variant": "v"}
                for i, url in enumerate(urls)
            ],
            "monitor": {"every_ms": 50},
            "logs": {"decisions": None},
        }
        | sections
    )


@contextlib.asynccontextmanager
async def serving(*urls: str, **sections: Any) -> AsyncIterator[Gateway]:
    """A gateway over these engines on this loop."""
    async with gateway_of(settings_for(*urls, **sections)) as gateway:
        yield gateway


def left_behind(gateway: Gateway) -> dict[str, Any]:
    """Everything that an idle gateway must not hold; empty where all is well."""
    shell = gateway.shell
    core = shell._core
    fleet = core.columns
    found: dict[str, Any] = {
        "open": shell.open_requests,
        "running": [seat.running for seat in shell.seats if seat.running],
        "core open": list(core.open),
        "core queue": len(core.queue),
        "streams": int(fleet.n_streams.sum()),
        "pooled": [s.name for s in shell.seats if s.pool.open != s.pool.idle],
    }
    for column in ("running", "context", "backlog_tokens", "kv_used"):
        values = getattr(fleet, column)
        found[column] = [] if np.all(np.abs(values) < 1e-6) else values.tolist()
    return {name: value for name, value in found.items() if value}


async def settled(gateway: Gateway, within: float = 1.0) -> None:
    """Wait until the gateway holds nothing; fails after `within` seconds, saying what is left."""
    deadline = asyncio.get_running_loop().time() + within
    while left_behind(gateway):
        assert asyncio.get_running_loop().time() < deadline, left_behind(gateway)
        await asyncio.sleep(0.005)


class LoopThread:
    """An event loop in a thread, for tests whose client blocks."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=30)
        self.loop.close()

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float = 300) -> Any:
        """Run a coroutine there and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    @contextlib.contextmanager
    def holding(self, make: Callable[[], Any]) -> Any:
        """Hold an async context manager open there, entered and left in one task."""
        entered: asyncio.Future[Any] = self.loop.create_future()
        stop = asyncio.Event()

        async def hold() -> None:
            try:
                async with make() as value:
                    entered.set_result(value)
                    await stop.wait()
            except BaseException as exc:
                if not entered.done():
                    entered.set_exception(exc)
                raise

        async def wait() -> Any:
            return await entered

        holder = asyncio.run_coroutine_threadsafe(hold(), self.loop)
        try:
            yield self.run(wait())
        finally:
            self.loop.call_soon_threadsafe(stop.set)
            holder.result(60)
