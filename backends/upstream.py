"""The client side of the token path: one pool of keep-alive connections per replica.

Written for a stream of small reads: a received block costs one parser call, one call of the sink
and nothing else; in full flow not even the parser's (`Express`). There is no task, queue, generator
or timeout object per token, and one timer per request, which is armed again only when it fires.

An exchange is one request and its answer:

    DIALLING --connected--> SENT --head--> ANSWERING --last byte--> over (on_end)
        |                     |                |
        +----- any failure, or one of the four timeouts -----------> over (on_error)
        +----- abort(): the connection is closed at once ----------> over (no callback)

Closing the connection is how an engine notices a cancel. A request on a kept connection that the
engine closed before it sent a byte is sent once more on a fresh one (RFC 9112, section 9.3.1): the
two ends crossed on the wire. Anything else is the caller's to retry.
"""

from __future__ import annotations

import asyncio
import ssl as tls
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, cast
from urllib.parse import urlsplit

from backends.wire.http import Headers, ResponseReader
from domain.errors import (
    BackendError,
    BackendProtocolError,
    BackendTimeout,
    BackendUnavailable,
    Phase,
    StreamInterrupted,
)

RESEND_WINDOW = 1.0
"""Seconds after a send in which a silent close of a kept connection counts as a crossing."""


class Sink(Protocol):
    """Takes an answer as it comes. Every call is made on the event loop, none after the exchange
    is over or aborted.
    """

    def on_head(self, status: int, headers: Headers) -> None:
        """The final status and headers; names in lower case."""

    def on_data(self, data: bytes, now: float) -> bool:
        """Body bytes, framing removed, read at `now`; return whether they were progress.

        Progress (a generated token) ends the first-token phase and restarts the clock between
        tokens.
        """

    def on_end(self) -> None:
        """The answer is whole."""

    def on_error(self, error: BackendError) -> None:
        """The answer will not become whole."""

    def on_stall(self) -> None:
        """The sink has kept the stream paused for longer than the limit between tokens; the
        exchange was aborted.
        """


class Express(Protocol):
    """Takes received blocks as they are, chunk framing included, before any parser sees them.

    Set by the sink as `Exchange.express` once it may. Asked only where a chunk begins, for as long
    as it takes what it is given.
    """

    @property
    def last_at(self) -> float | None:
        """When progress came last, if any has come."""

    def take(self, block: bytes) -> bool:
        """Take one whole chunk that is progress; False, and nothing done, for anything else."""


EVENT_CHUNK_END = b"\n\n\r\n"
"""How a chunk ends that ends with an event. No line of framing ends so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Limits of one exchange in seconds; None is no limit.

    `first_token` counts from the send to the first progress, `between_tokens` from one progress to
    the next, `total` from the send. `shortest` is the shortest of them.
    """

    connect: float | None = 2.0  # a replica in the same network answers within milliseconds
    first_token: float | None = 120.0  # the longest prompts of a laptop fleet
    between_tokens: float | None = 60.0  # an engine that preempts may pause for long
    total: float | None = 900.0  # the longest answers, at a slow pace
    shortest: float | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shortest = None
        for name in ("connect", "first_token", "between_tokens", "total"):
            limit = getattr(self, name)
            if limit is None:
                continue
            if not limit > 0:
                raise ValueError(f"timeout {name} must be above 0 seconds, not {limit}")
            shortest = limit if shortest is None else min(shortest, limit)
        object.__setattr__(self, "shortest", shortest)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamLimits:
    """Bounds of one pool."""

    max_head_bytes: int = 64 << 10
    max_idle: int = 512  # kept connections; more concurrent requests open more, and close them
    idle_seconds: float = 20.0  # servers close after 5 to 75 s; a crossing is sent again
    write_high_water: int = 256 << 10


class UpstreamPool:
    """Connections to one replica. Use as an async context manager, or call `close`.

    `base_url` is `http[s]://host:port[/prefix]`; a path given to `send` is put after the prefix.
    `headers` are encoded lines sent with every request (an engine's own API key).
    """

    def __init__(
        self,
        base_url: str,
        *,
        limits: UpstreamLimits | None = None,
        headers: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
        ssl: tls.SSLContext | None = None,
    ) -> None:
        url = urlsplit(base_url)
        if url.scheme not in {"http", "https"} or not url.hostname:
            raise ValueError(f"base URL must be http[s]://host[:port], not {base_url!r}")
        self.base_url = base_url
        self.host = url.hostname
        self.port = url.port or (443 if url.scheme == "https" else 80)
        self.limits = limits or UpstreamLimits()
        self.clock = clock
        self._ssl = (ssl or tls.create_default_context()) if url.scheme == "https" else None
        self._prefix = url.path.rstrip("/").encode()
        self._fixed = (
            b" HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n%bcontent-length: "
            % (url.netloc.rpartition("@")[2].encode(), headers)
        )
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._dials: dict[asyncio.Task[None], Exchange] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def idle(self) -> int:
        """Kept connections that carry no request."""
        return len(self._idle)

    @property
    def open(self) -> int:
        """All connections, idle or not."""
        return len(self._open)

    def send(
        self, path: bytes, body: bytes, sink: Sink, timeouts: Timeouts, *, headers: bytes = b""
    ) -> Exchange:
        r"""POST `body` to `path`; the answer goes to `sink`, never before this returns.

        `headers` are further encoded lines, each ending in `\r\n`.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        message = b"POST %b%b%b%d\r\n%b\r\n%b" % (
            self._prefix,
            path,
            self._fixed,
            len(body),
            headers,
            body,
        )
        exchange = Exchange(self, self._loop, message, sink, timeouts)
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                exchange.begin(connection, reused=True)
                return exchange
        self.dial(exchange)
        return exchange

    def dial(self, exchange: Exchange) -> None:
        """Open a connection for `exchange`."""
        task = exchange.loop.create_task(self._dial(exchange))
        self._dials[task] = exchange
        exchange.dialling = task
        task.add_done_callback(self._dials.pop)

    async def _dial(self, exchange: Exchange) -> None:
        if self._closed:
            exchange.dialling = None
            exchange.fail(self._removed())
            return
        try:
            _, connection = await exchange.loop.create_connection(
                lambda: _Connection(self), self.host, self.port, ssl=self._ssl
            )
        except OSError as exc:  # TLS errors are OSErrors too
            exchange.dialling = None
            log = f"cannot connect to {self.base_url}: {exc}"
            exchange.fail(BackendUnavailable("cannot connect to the engine", log=log))
            return
        exchange.dialling = None
        # Counted only now: a dial that is cancelled after its socket opened is closed by the loop,
        # and uvloop does not tell the protocol.
        if not connection.alive:
            exchange.fail(self.silent())
            return
        self._open.add(connection)
        if exchange.over or self._closed:
            connection.close()
            exchange.fail(self._removed())
        else:
            exchange.begin(connection, reused=False)

    def _removed(self) -> BackendUnavailable:
        log = f"{self.base_url} was removed from the fleet"
        return BackendUnavailable("the engine was removed from the fleet", log=log)

    def silent(self) -> BackendUnavailable:
        """The error of a connection that ended before its answer began."""
        log = f"{self.base_url} closed before it answered"
        return BackendUnavailable("the engine closed before it answered", log=log)

    def lost(self, connection: _Connection) -> None:
        """Forget a closed connection."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def release(self, connection: _Connection) -> None:
        """Keep a connection whose answer is whole for the next request."""
        if self._closed or len(self._idle) >= self.limits.max_idle:
            connection.close()
            return
        now = self.clock()
        connection.idle_since = now
        self._idle.append(connection)
        oldest = self._idle[0]
        if now - oldest.idle_since > self.limits.idle_seconds:
            del self._idle[0]
            oldest.close()

    async def close(self) -> None:
        """Close every connection; running exchanges end with an error."""
        self._closed = True
        dials = dict(self._dials)
        for exchange in dials.values():
            exchange.fail(self._removed())  # this cancels the dial
        await asyncio.gather(*dials, return_exceptions=True)
        for connection in tuple(self._open):
            connection.close()
        self._idle.clear()


class Exchange:
    """One request and its answer; made by `UpstreamPool.send`.

    `over` turns true with the last callback or with `abort`, whichever comes first.
    """

    __slots__ = (
        "_clock",
        "_connection",
        "_dialled_at",
        "_message",
        "_paused_at",
        "_pool",
        "_progress_at",
        "_reused",
        "_sent_at",
        "_sink",
        "_started",
        "_timeouts",
        "_timer",
        "dialling",
        "express",
        "loop",
        "over",
    )

    def __init__(
        self,
        pool: UpstreamPool,
        loop: asyncio.AbstractEventLoop,
        message: bytes,
        sink: Sink,
        timeouts: Timeouts,
    ) -> None:
        self._pool = pool
        self._message = message
        self._sink = sink
        self._timeouts = timeouts
        self._connection: _Connection | None = None
        self._reused = False
        self._started = False
        self._clock = pool.clock
        self._sent_at = self._dialled_at = self._clock()
        self._progress_at: float | None = None
        self._paused_at: float | None = None
        self.loop = loop
        self.dialling: asyncio.Task[None] | None = None
        self.express: Express | None = None
        self.over = False
        self._timer: asyncio.TimerHandle | None = None
        if timeouts.shortest is not None:
            self._timer = loop.call_later(timeouts.shortest, self._expire)

    def abort(self) -> None:
        """Close the upstream connection at once; no callback follows. Harmless when over."""
        if not self.over:
            self._finish(keep=False)

    def pause(self) -> None:
        """Stop reading from the engine; the kernel's buffers then slow it down."""
        if not self.over and self._paused_at is None:
            self._paused_at = self._clock()
            if self._connection is not None:
                self._connection.pause()

    def resume(self) -> None:
        """Read on after `pause`."""
        if not self.over and self._paused_at is not None:
            if self._last_progress() is not None:
                self._progress_at = self._clock()  # the pause was not the engine's
            self._paused_at = None
            if self._connection is not None:
                self._connection.resume()

    # called by the pool and its connections

    def begin(self, connection: _Connection, *, reused: bool) -> None:
        """The connection is there: send."""
        self._connection = connection
        self._reused = reused
        connection.carry(self, self._message)
        if self._paused_at is not None:
            connection.pause()

    def receive(self, connection: _Connection, data: bytes) -> None:
        """Bytes of the answer."""
        reader = connection.reader
        try:
            body = reader.feed(data)
        except BackendProtocolError as exc:
            self.fail(exc)
            return
        if not self._started:
            if reader.head is None:
                return
            self._started = True
            self._message = b""
            self._sink.on_head(*reader.head)
            if self.over:
                return
        if body:
            now = self._clock()
            if self._sink.on_data(body, now):
                self._progress_at = now
            if self.over:
                return
            if self.express is not None and reader.chunk_ended and data.endswith(EVENT_CHUNK_END):
                connection.express = self.express.take
        if reader.complete:
            self._finish(keep=True)
            self._sink.on_end()

    def lost(self, reader: ResponseReader, exc: Exception | None) -> None:
        """The engine closed the connection."""
        if not self._started:
            now = self._clock()
            if self._reused and not reader.started and now - self._sent_at < RESEND_WINDOW:
                self._connection = None
                self._reused = False
                self._dialled_at = now
                self._pool.dial(self)
                return
            self.fail(self._pool.silent())
        elif reader.eof():
            self._finish(keep=False)
            self._sink.on_end()
        else:
            why = f": {exc}" if exc is not None else ""
            log = f"{self._pool.base_url} closed in the middle of its answer{why}"
            self.fail(StreamInterrupted("the engine closed in the middle of its answer", log=log))

    def fail(self, error: BackendError) -> None:
        """End with an error."""
        if not self.over:
            self._finish(keep=False)
            self._sink.on_error(error)

    def _finish(self, *, keep: bool) -> None:
        self.over = True
        self.express = None
        self._message = b""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.dialling is not None:
            self.dialling.cancel()
            self.dialling = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop(keep=keep)

    # the one timer

    def _arm(self, now: float) -> None:
        """Fire at the next deadline, or earlier: a limit between tokens that starts to run after
        this cannot end before `between_tokens` from now.
        """
        deadline = self._deadline()
        if deadline is not None:
            wait = deadline[0] - now
            between = self._timeouts.between_tokens
            if between is not None and between < wait:
                wait = between
            self._timer = self.loop.call_later(max(wait, 0.0), self._expire)

    def _deadline(self) -> tuple[float, Phase] | None:
        """The earliest limit that now holds, and its name."""
        limits = self._timeouts
        waits: list[tuple[float, Phase]] = []
        if limits.total is not None:
            waits.append((self._sent_at + limits.total, "total"))
        if self._connection is None and limits.connect is not None:
            waits.append((self._dialled_at + limits.connect, "connect"))
        if self._paused_at is not None:
            if limits.between_tokens is not None:
                waits.append((self._paused_at + limits.between_tokens, "between_tokens"))
        elif (progress := self._last_progress()) is not None:
            if limits.between_tokens is not None:
                waits.append((progress + limits.between_tokens, "between_tokens"))
        elif limits.first_token is not None:
            waits.append((self._sent_at + limits.first_token, "first_token"))
        return min(waits) if waits else None

    def _last_progress(self) -> float | None:
        """When the clock between tokens was last started, None before the first token."""
        express = None if self.express is None else self.express.last_at
        if express is None or self._progress_at is None:
            return self._progress_at
        return max(express, self._progress_at)

    def _expire(self) -> None:
        """The timer fired; most often the stream has moved on and it is only armed again."""
        now = self._clock()
        deadline = self._deadline()
        if deadline is None:
            self._timer = None
            return
        at, phase = deadline
        if now < at:
            self._arm(now)
            return
        if self._paused_at is not None and phase == "between_tokens":
            self._finish(keep=False)
            self._sink.on_stall()
            return
        limit = getattr(self._timeouts, phase)
        what = f"exceeded its {phase} limit of {limit:g} s"
        log = f"{self._pool.base_url} {what}"
        self.fail(BackendTimeout(f"the engine {what}", phase=phase, log=log))


class _Connection(asyncio.Protocol):
    """One socket to the engine; carries one exchange at a time. `express` is asked first."""

    __slots__ = (
        "_exchange",
        "_paused",
        "_pool",
        "_transport",
        "express",
        "idle_since",
        "reader",
    )

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._paused = False
        self.express: Callable[[bytes], bool] | None = None
        self.reader = ResponseReader(pool.limits.max_head_bytes)
        self.idle_since = 0.0

    @property
    def alive(self) -> bool:
        """Whether the socket is open."""
        return self._transport is not None

    @property
    def usable(self) -> bool:
        """Whether the next request may go out here."""
        fresh = self._pool.clock() - self.idle_since <= self._pool.limits.idle_seconds
        if not fresh:
            self.close()
        return fresh and self._transport is not None and not self._transport.is_closing()

    def carry(self, exchange: Exchange, message: bytes) -> None:
        """Send a request."""
        self.reader.reset()
        self._exchange = exchange
        if self._transport is not None:
            self._transport.write(message)

    def drop(self, *, keep: bool) -> None:
        """The exchange is over: keep the connection if its answer was whole, else close it."""
        self._exchange = self.express = None
        if keep and self.reader.reusable and self._all_sent():
            self.resume()
            self._pool.release(self)
        else:
            self.close()

    def _all_sent(self) -> bool:
        """Whether the request has left; an engine may refuse it before it has read it all."""
        return self._transport is not None and self._transport.get_write_buffer_size() == 0

    def pause(self) -> None:
        """Stop reading."""
        if self._transport is not None and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._transport is not None and self._paused:
            self._paused = False
            self._transport.resume_reading()

    def close(self) -> None:
        """Close at once; bytes still to be sent are dropped."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has no common base
        self._transport.set_write_buffer_limits(high=self._pool.limits.write_high_water)

    def data_received(self, data: bytes) -> None:
        """Bytes from the engine; without a request they are nobody's, and the socket is closed."""
        express = self.express
        if express is not None:
            if express(data):
                return
            self.express = None
        exchange = self._exchange
        if exchange is None:
            self.close()
        else:
            exchange.receive(self, data)

    def eof_received(self) -> bool:
        """The engine ended its side: nothing more will come, so the socket is closed."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        self._transport = self.express = None
        self._pool.lost(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.lost(self.reader, exc)
