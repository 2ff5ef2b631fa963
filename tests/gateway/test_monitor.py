"""Who is up, who is down, and what they said; over a scripted engine."""

import asyncio
import contextlib

import pytest

from backends.adapters.llamacpp import LLAMACPP
from backends.adapters.openai import OPENAI
from backends.adapters.table import Load
from gateway.monitor import Monitor, Pace, Target
from tests.fakes.engine import refused_url
from tests.fakes.paced_engine import PacedEngine

pytestmark = pytest.mark.integration


class Notes:
    """Keeps what it is told; lets a test wait for something."""

    def __init__(self):
        self.healthy = {}
        self.engines = {}
        self.readings = []
        self._news = asyncio.Event()

    def reading(self, replica, load, measured_at):
        self.readings.append((replica, load, measured_at))
        self._news.set()

    def recognised(self, replica, adapter):
        self.engines[replica] = adapter

    def health(self, replica, *, ok):
        self.healthy[replica] = ok
        self._news.set()

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition():
                self._news.clear()
                await self._news.wait()


@contextlib.asynccontextmanager
async def watching(targets, **pace):
    notes = Notes()
    monitor = Monitor(targets, notes, Pace(**{"every": 0.02, "timeout": 0.5} | pace))
    async with monitor.watching():
        yield notes


def test_an_engine_is_recognised_and_read():
    async def run():
        async with PacedEngine().running() as engine:
            target = Target(url=engine.url, adapter=None)
            async with watching([target]) as notes:
                await notes.until(lambda: notes.readings)
            replica, load, measured_at = notes.readings[0]
            assert target.adapter is LLAMACPP
            assert notes.engines == {0: LLAMACPP}
            assert (replica, load) == (0, Load(running=0, waiting=0))
            assert measured_at <= asyncio.get_running_loop().time()
            assert notes.healthy == {0: True}

    asyncio.run(run())


def test_an_engine_without_metrics_is_only_up():
    async def run():
        async with PacedEngine().running() as engine:
            async with watching([Target(url=engine.url, adapter=OPENAI)]) as notes:
                await notes.until(lambda: notes.healthy.get(0))
            assert notes.readings == []

    asyncio.run(run())


def test_down_after_refusals_in_a_row_and_up_with_the_first_answer():
    async def run():
        engine = PacedEngine()
        engine.port = int((await refused_url()).rsplit(":", 1)[1])
        async with watching([Target(url=engine.url, adapter=LLAMACPP)], refusals=3) as notes:
            await notes.until(lambda: notes.healthy.get(0) is False)
            async with engine.running():
                await notes.until(lambda: notes.healthy.get(0) is True)
            await notes.until(lambda: notes.healthy.get(0) is False)

    asyncio.run(run())


def test_a_busy_engine_is_late_not_down_and_a_hung_one_is_down():
    async def run():
        async def hang(reader, writer):
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()

        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            targets = [Target(url=url, adapter=LLAMACPP)]
            async with watching(targets, timeout=0.05, silence=0.3) as notes:
                loop = asyncio.get_running_loop()
                began = loop.time()
                await notes.until(lambda: notes.healthy.get(0) is False)
                assert loop.time() - began > 0.3
        finally:
            server.close()

    asyncio.run(run())
