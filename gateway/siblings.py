"""What the worker processes of one gateway ask one another; each answers on a socket of its own.

    /metrics or /admin at one worker ──question──► every NAME.sock in the folder ──► what is so now

Asked when somebody looks rather than written now and then: a sum of counters that different workers
tell must never go down, or Prometheus takes it for a restart. What a worker has counted is kept in
NAME.json too, every `KEEP_EVERY` seconds and when it ends, so that the counts of one that died are
still part of the sum.

A question is one JSON line, [verb, argument]; the answer is one JSON line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import orjson

KEEP_EVERY = 1.0
"""Seconds between two copies of the counts; a worker that is killed loses what came since."""
PATIENCE = 1.0
"""Seconds that a sibling may take to answer."""
LONGEST = 16 << 20
"""Bytes of one answer at most."""

Answer = Callable[[str], Any]
"""From a question's argument to its answer, a JSON value."""

_log = logging.getLogger(__name__)


class Others(Protocol):
    """The other processes of this gateway."""

    async def ask(self, verb: str, argument: str = "") -> list[Any]:
        """What each of them answers now."""

    async def counts(self) -> list[Any]:
        """What each of them has counted, those that ended included."""


class Alone:
    """A gateway of one process."""

    async def ask(self, verb: str, argument: str = "") -> list[Any]:
        """Nobody answers."""
        del verb, argument
        return []

    async def counts(self) -> list[Any]:
        """Nobody else counts."""
        return []


class Siblings:
    """The workers that share `folder`; this one is called `name`, as none was before it."""

    def __init__(self, folder: Path, name: str, *, patience: float = PATIENCE) -> None:
        self._folder = folder
        self._name = name
        self._patience = patience

    @contextlib.asynccontextmanager
    async def answering(
        self, answers: Mapping[str, Answer], counted: Callable[[], Any]
    ) -> AsyncIterator[None]:
        """Answer the siblings by verb inside the `async with`. `counted` is what is kept: counters
        only, since what a dead worker had open is open no more.
        """

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                verb, argument = orjson.loads(await reader.readuntil(b"\n"))
                writer.write(_encoded(answers[verb](argument)))
                await writer.drain()
            writer.close()

        server = await asyncio.start_unix_server(serve, self._socket(self._name))
        keeping = asyncio.ensure_future(self._keep(counted))
        try:
            yield
        finally:
            keeping.cancel()
            server.close()
            self._write(counted())

    async def ask(self, verb: str, argument: str = "") -> list[Any]:
        """What each sibling answers; one that does not within `patience` seconds is left out."""
        names = [path.stem for path in self._folder.glob("*.sock") if path.stem != self._name]
        found = await asyncio.gather(*(self._ask(name, verb, argument) for name in names))
        return [answer for answer in found if answer is not None]

    async def counts(self) -> list[Any]:
        """What each sibling has counted: as it says itself, else as it was last kept."""
        paths = (*self._folder.glob("*.sock"), *self._folder.glob("*.json"))
        names = sorted({path.stem for path in paths} - {self._name})
        found = await asyncio.gather(*(self._ask(name, "counts", "") for name in names))
        told = [
            self._kept(name) if answer is None else answer
            for name, answer in zip(names, found, strict=True)
        ]
        return [counts for counts in told if counts is not None]

    async def _ask(self, name: str, verb: str, argument: str) -> Any:
        try:
            async with asyncio.timeout(self._patience):
                reader, writer = await asyncio.open_unix_connection(
                    self._socket(name), limit=LONGEST
                )
                try:
                    writer.write(_encoded([verb, argument]))
                    return orjson.loads(await reader.readuntil(b"\n"))
                finally:
                    writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return None  # it ended, or is too busy to say

    async def _keep(self, counted: Callable[[], Any]) -> None:
        while True:
            self._write(counted())
            await asyncio.sleep(KEEP_EVERY)

    def _write(self, value: Any) -> None:
        whole = self._folder / f"{self._name}.json"
        part = whole.with_suffix(".part")
        try:
            part.write_bytes(_encoded(value))
            part.replace(whole)
        except OSError:
            _log.exception("cannot keep the counts in %s", whole)

    def _kept(self, name: str) -> Any:
        try:
            return orjson.loads((self._folder / f"{name}.json").read_bytes())
        except OSError:
            return None  # it ended before it had counted anything

    def _socket(self, name: str) -> str:
        return str(self._folder / f"{name}.sock")


def _encoded(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
