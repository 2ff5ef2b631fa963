"""Short questions to one engine: health, metrics, models. One kept connection, little CPU.

A poll a few times a second of every replica is most of an idle gateway's work; this costs about a
tenth of a general HTTP client.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from backends.wire.http import ResponseReader
from domain.errors import BackendError, BackendTimeout, BackendUnavailable

MAX_HEAD = 64 << 10
MAX_BODY = 8 << 20
"""Bytes of an answer that are read; metrics of a large engine have a few hundred thousand."""
PIECE = 64 << 10


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body of one answer."""

    status: int
    body: bytes

    @property
    def good(self) -> bool:
        """Whether the engine said yes."""
        return 200 <= self.status < 300


class Probe:
    """Asks one engine, one question after another; an async context manager.

    `url` is `http[s]://host[:port][/prefix]`; every answer is whole within `timeout` seconds.
    """

    def __init__(self, url: str, *, timeout: float, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"URL must be http[s]://host[:port], not {url!r}")
        self.url = url
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = parts.scheme == "https"
        self._prefix = parts.path.rstrip("/").encode()
        key = "" if api_key is None else f"authorization: Bearer {api_key}\r\n"
        host = parts.netloc.rpartition("@")[2]
        self._tail = f" HTTP/1.1\r\nhost: {host}\r\n{key}\r\n".encode("latin-1")
        self._timeout = timeout
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def get(self, path: str) -> Answer:
        """The answer to GET `path`.

        Raises: BackendUnavailable, BackendProtocolError, BackendTimeout.
        """
        kept = self._streams is not None
        try:
            async with asyncio.timeout(self._timeout):
                try:
                    return await self._ask(path)
                except BackendUnavailable:
                    if not kept:
                        raise
                    return await self._ask(path)  # the kept connection had been closed meanwhile
        except TimeoutError as exc:
            self.close()
            raise BackendTimeout(
                f"{self.url}{path} did not answer within {self._timeout:g} s", phase="total"
            ) from exc
        except BaseException:
            self.close()
            raise

    async def _ask(self, path: str) -> Answer:
        answer = ResponseReader(MAX_HEAD)
        body = []
        size = 0
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(
                    self._host, self._port, ssl=self._tls or None
                )
            reader, writer = self._streams
            writer.write(b"GET %b%b%b" % (self._prefix, path.encode(), self._tail))
            while not answer.complete:
                data = await reader.read(PIECE)
                if not data:
                    if answer.eof():
                        break
                    raise ConnectionResetError("closed before the answer was whole")
                piece = answer.feed(data)
                body.append(piece)
                size += len(piece)
                if size > MAX_BODY:
                    raise ConnectionAbortedError(f"answer exceeds {MAX_BODY} bytes")
        except OSError as exc:
            self.close()
            raise BackendUnavailable(f"{self.url}{path}: {exc}") from exc
        if not answer.reusable:
            self.close()
        return Answer(answer.head.status if answer.head is not None else 0, b"".join(body))


async def asked(probe: Probe, path: str) -> bytes | None:
    """The body of a good answer, else None: for questions that an engine may not know."""
    with contextlib.suppress(BackendError):
        answer = await probe.get(path)
        return answer.body if answer.good else None
    return None
