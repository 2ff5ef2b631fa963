"""The client-facing HTTP/1.1 server: hot routes straight to the relay, everything else to the app.

A framework costs more per token than the kernel does, so the inference endpoints are served from
the protocol object itself: the parsed request goes to the dispatcher, and what the relay writes
goes to the transport. All other requests are handed to an ASGI app (FastAPI) with their body.

A connection:

    IDLE --first byte--> HEAD --blank line--> BODY --last byte--> SERVING --reply over--> IDLE
      |                   |                    |                     |
      +-- idle limit      +-- head limit: 408  +-- body limit: 408   +-- client leaves: client_gone
                          +-- too long: 431    +-- too long: 413
    any refusal here --> LINGERING (what still comes is dropped, so that it is read) --> closed

Limits hold before anything is buffered. Requests sent ahead (pipelining) wait their turn in a short
queue, and so do all while the client leaves earlier replies unread. The clocks of all connections
are looked at by one sweep a second, not by a timer each; none runs out while a client still takes
what was written to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from email.utils import formatdate
from enum import Enum, auto
from http import HTTPStatus
from typing import NamedTuple, cast

import httptools

from backends.wire.http import Headers
from backends.wire.openai import SURFACES
from domain.errors import MalformedBody, PayloadTooLarge, ServingError
from gateway import error_map
from gateway.asgi import AsgiApp, AsgiCall, http_scope
from gateway.relay import JSON_TYPE, ClientRequest, Plane, Relay, ReplyListener

SWEEP_SECONDS = 1.0
LINGER_SECONDS = 2.0
MAX_QUEUED = 1 << 20
"""Bytes of requests sent ahead after which a connection is not read until its queue is empty."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINES = {s.value: b"HTTP/1.1 %d %b\r\n" % (s, s.phrase.encode()) for s in HTTPStatus}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one client may ask of the server."""

    max_head_bytes: int = 32 << 10
    max_body_bytes: int = 32 << 20  # a few images in base64; prompts end near one MiB
    max_pipelined: int = 16
    head_seconds: float = 15.0  # from a connection's first byte to the end of the head
    body_seconds: float = 60.0  # a MiB from a slow link takes half of that
    idle_seconds: float = 75.0  # nginx's default for kept connections
    write_high_water: int = 64 << 10  # bytes in flight to one client before its engine is paused


class _State(Enum):
    IDLE = auto()
    HEAD = auto()
    BODY = auto()


class _Inbound(NamedTuple):
    """A complete request that waits its turn."""

    method: bytes
    target: bytes
    version: str
    headers: Headers
    body: bytes
    keep_alive: bool
    received_at: float


class WireReply:
    """A `Reply` written to the client's own transport."""

    __slots__ = (
        "_bare",
        "_chunked",
        "_connection",
        "_flowing",
        "_head",
        "_http10",
        "_keep_alive",
        "_send",
        "closed",
        "listener",
    )

    def __init__(
        self, connection: ClientConnection, *, keep_alive: bool, http10: bool, bare: bool
    ) -> None:
        self._connection = connection
        self._send = connection.send
        self._flowing = False  # chunks leave as they come: the head is out
        self._keep_alive = keep_alive
        self._http10 = http10
        self._bare = bare  # a HEAD request: headers only
        self._chunked = False
        self._head: bytes | None = None
        self.listener: ReplyListener | None = None
        self.closed = False

    @property
    def framed(self) -> Callable[[bytes], None] | None:
        """The transport's own write while chunks flow."""
        return self._send if self._flowing and not self.closed else None

    def start(self, status: int, headers: bytes, length: int | None) -> None:
        """Set status and headers; they leave with the first bytes of the body."""
        if self.closed:
            return
        if status in {204, 304} or status < 200:
            self._bare = True
            framing = b""
        elif length is not None:
            framing = b"content-length: %d\r\n" % length
        elif self._http10:
            framing = b""
            self._keep_alive = False  # the body ends with the connection
        else:
            framing = b"transfer-encoding: chunked\r\n"
            self._chunked = True
        server = self._connection.server
        if server.draining:
            self._keep_alive = False
        if not self._keep_alive:
            framing += b"connection: close\r\n"
        elif self._http10:
            framing += b"connection: keep-alive\r\n"
        line = STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status
        self._head = b"%b%b%b%b\r\n" % (line, server.date, headers, framing)

    def write(self, data: bytes) -> None:
        """Send body bytes."""
        if self._flowing and not self.closed:
            self._send(b"%x\r\n%b\r\n" % (len(data), data))
            return
        if self.closed or self._bare:
            return
        if self._chunked:
            self._flowing = True
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head is not None:
            data = self._head + data
            self._head = None
        self._send(data)

    def end(self, *, close: bool = False) -> None:
        """The body is whole."""
        if self.closed:
            return
        self.closed = True
        self.listener = None
        rest = b"0\r\n\r\n" if self._chunked and not self._bare else b""
        if self._head is not None:
            rest = self._head + rest
            self._head = None
        if rest:
            self._send(rest)
        self._connection.reply_over(close=close or not self._keep_alive)

    def abort(self) -> None:
        """Close the connection so that the client sees the body was cut."""
        if not self.closed:
            self.closed = True
            self.listener = None
            self._connection.cut()


class ClientConnection(asyncio.Protocol):
    """One client's connection; callbacks of the parser are the methods named `on_`."""

    def __init__(self, server: GatewayServer) -> None:
        self.server = server
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._state = _State.IDLE
        self._deadline = server.plane.clock() + server.limits.head_seconds
        self._head_bytes = 0  # of the head, or since the last of the body: chunk lines, trailers
        self._read_bytes = 0  # of the newest read
        self._target = b""
        self._headers: Headers = []
        self._body: bytes | bytearray = b""
        self._reply: WireReply | None = None
        self._queue: deque[_Inbound] = deque()
        self._queued_bytes = 0
        self._reading = True
        self._paused = False  # what was written lies unread above the high water
        self._unsent = 0  # bytes of it at the last sweep
        self._refused = False  # nothing is parsed any more
        self._refusal: tuple[int, ServingError] | None = None  # its answer, due after earlier ones
        self._peer: tuple[str, int] | None = None
        self.send: Callable[[bytes], None]

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._transport = cast("asyncio.Transport", transport)
        self.send = self._transport.write
        self._transport.set_write_buffer_limits(high=self.server.limits.write_high_water)
        peer = transport.get_extra_info("peername")
        self._peer = (peer[0], peer[1]) if isinstance(peer, tuple) and len(peer) >= 2 else None
        self.server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        if self._refused:
            return
        self._head_bytes += len(data)
        self._read_bytes = len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as exc:
            if not self._refused:
                self._refuse(400, MalformedBody(f"not an HTTP/1.1 request: {exc}"))
            return
        if (
            not self._refused  # by its declared length, with much of the body in this same read
            and self._state is not _State.IDLE
            and self._head_bytes > self.server.limits.max_head_bytes
        ):
            self._refuse_head()

    def _feed(self, data: bytes) -> None:
        """Give `data` to the parser; where that would switch protocols, read HTTP/1.1 on.

        A server may ignore `Upgrade` (RFC 9110, 7.8). The parser cannot: it ends the message with
        the head. So the head is read once more without that line, by a parser for what follows.
        """
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as exc:
                if self._refused:
                    return
                method, version = self._parser.get_method(), self._parser.get_http_version()
                if method == b"CONNECT":
                    self._refuse(501, MalformedBody("this server is no proxy: no CONNECT"))
                    return
                lines = [b"%b %b HTTP/%b\r\n" % (method, self._target, version.encode())]
                lines += [b"%b: %b\r\n" % h for h in self._headers if h[0] != b"upgrade"]
                self._parser = httptools.HttpRequestParser(self)
                self._parser.feed_data(b"".join(lines) + b"\r\n")
                rest = rest[exc.args[0] :]
            else:
                return

    def eof_received(self) -> bool:
        """The client closed its side: it counts as gone."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        del exc
        self.server.connections.discard(self)
        self._transport = None
        del self.send
        self._queue.clear()
        reply, self._reply = self._reply, None
        if reply is not None and not reply.closed:
            reply.closed = True
            listener, reply.listener = reply.listener, None
            if listener is not None:
                listener.client_gone()
        del self._parser  # parser and connection refer to each other
        self.server.left()

    def pause_writing(self) -> None:
        """The client reads slower than we write: the reply waits, and so does the next request."""
        self._paused = True
        self._took()
        if self._reply is None:
            self._hold()
        elif self._reply.listener is not None:
            self._reply.listener.pause()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._paused = False
        if self._reply is not None and self._reply.listener is not None:
            self._reply.listener.resume()
        self._read_on()
        self._next()

    # the parser, in the order in which it calls

    def on_message_begin(self) -> None:
        """A request starts."""
        if self._refused:
            return
        self._state = _State.HEAD
        self._target = b""
        self._headers = []
        self._body = b""
        self._deadline = self.server.plane.clock() + self.server.limits.head_seconds

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line, or a trailer, which is dropped."""
        if self._state is _State.HEAD:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is whole: refuse what is too long before it comes."""
        if self._refused or self._state is not _State.HEAD or self._parser.should_upgrade():
            return
        limits = self.server.limits
        most = max(self._head_bytes, self._read_bytes)  # one read may hold several requests
        if most > limits.max_head_bytes and limits.max_head_bytes < len(self._target) + sum(
            len(name) + len(value) + 4 for name, value in self._headers
        ):
            self._refuse_head()  # the whole head came in one read, perhaps with its body
            return
        expects = False
        for name, value in self._headers:
            if name == b"content-length":
                if int(value) > limits.max_body_bytes:
                    self._refuse_body()
                    return
            elif name == b"expect":
                expects = value.lower() == b"100-continue"
        self._state = _State.BODY
        self._head_bytes = 0
        self._deadline = self.server.plane.clock() + limits.body_seconds
        if expects and self._reply is None and not self._queue:
            self.send(CONTINUE)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self._refused or self._state is not _State.BODY:
            return
        self._head_bytes = 0
        if len(self._body) + len(body) > self.server.limits.max_body_bytes:
            self._refuse_body()
        elif not self._body:
            self._body = body
        else:  # joined at once, as a list of tiny chunks takes many times their bytes
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += body

    def on_message_complete(self) -> None:
        """A request is whole: serve it, or let it wait for the one before it."""
        if self._refused or self._state is not _State.BODY:
            return
        self._state = _State.IDLE
        self._head_bytes = 0
        inbound = _Inbound(
            self._parser.get_method(),
            self._target,
            self._parser.get_http_version(),
            self._headers,
            bytes(self._body),
            self._parser.should_keep_alive(),
            self.server.plane.clock(),
        )
        self._body = b""
        if self._reply is None and not self._queue and not self._paused:
            self._serve(inbound)
            return
        self._queue.append(inbound)
        self._queued_bytes += len(inbound.body)
        limits = self.server.limits
        if len(self._queue) > limits.max_pipelined:
            self.cut()
        elif (
            # A paused socket does not tell that its client left: the first few wait unpaused.
            len(self._queue) > limits.max_pipelined // 2 or self._queued_bytes > MAX_QUEUED
        ):
            self._hold()

    # serving

    def _serve(self, inbound: _Inbound) -> None:
        reply = WireReply(
            self,
            keep_alive=inbound.keep_alive,
            http10=inbound.version == "1.0",
            bare=inbound.method == b"HEAD",
        )
        self._reply = reply
        path = inbound.target.partition(b"?")[0]
        surface = SURFACES.get(path)
        if surface is not None and inbound.method == b"POST":
            request = ClientRequest(
                surface=surface,
                headers=inbound.headers,
                body=inbound.body,
                received_at=inbound.received_at,
                peer=self._peer[0] if self._peer is not None else "",
            )
            relay = Relay(self.server.plane, request, reply)
            reply.listener = relay
            self.server.plane.dispatcher.open(relay)
        else:
            scope = http_scope(
                method=inbound.method.decode("ascii"),
                target=inbound.target,
                headers=inbound.headers,
                version=inbound.version,
                client=self._peer,
                server=None,
            )
            call = AsgiCall(self.server.app, scope, inbound.body, reply)
            reply.listener = call
            self.server.spawn(call)

    def reply_over(self, *, close: bool) -> None:
        """The reply was written: serve what waits, or be idle, or close."""
        self._reply = None
        self._took()
        if close or self.server.draining:
            self._refused = True
            self._queue.clear()
            if self._transport is not None:
                self._transport.close()  # sends what is buffered first
            return
        if self._paused:
            self._hold()
        elif self._queue:
            # not from here: a reply may end inside `open`, and the queue may be long
            self.server.loop.call_soon(self._next)
        else:
            self._answer_refused()

    def _next(self) -> None:
        if self._reply is not None or self._paused or self._transport is None:
            return
        if not self._queue:
            self._answer_refused()
            return
        inbound = self._queue.popleft()
        self._queued_bytes -= len(inbound.body)
        self._serve(inbound)
        self._read_on()

    def _hold(self) -> None:
        """Read no further requests for now; the rest of a refused one is read and dropped."""
        if self._reading and not self._refused and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()

    def _read_on(self) -> None:
        held = self._queue or (self._paused and self._reply is None)
        if not self._reading and not held and self._transport is not None:
            self._reading = True
            self._transport.resume_reading()

    def cut(self) -> None:
        """Close at once."""
        self._refused = True
        if self._transport is not None:
            self._transport.abort()

    def _refuse_head(self) -> None:
        self._refuse(431, PayloadTooLarge("request header fields are too large"))

    def _refuse_body(self) -> None:
        limit = self.server.limits.max_body_bytes
        self._refuse(413, PayloadTooLarge(f"request body exceeds {limit} bytes"))

    def _refuse(self, status: int, error: ServingError) -> None:
        """A request will not be read to its end: it is answered in its turn, then all is over."""
        self._refused = True
        self._body = b""
        self._refusal = status, error
        if self._reply is None and not self._queue:
            self._answer_refused()

    def _answer_refused(self) -> None:
        """Answer the request that was refused, and close; what came before it has its reply."""
        if self._refusal is None or self._transport is None:
            return
        (status, error), self._refusal = self._refusal, None
        self._deadline = self.server.plane.clock() + LINGER_SECONDS
        response = error_map.reply(error)
        reply = WireReply(self, keep_alive=False, http10=False, bare=False)
        reply.start(status, JSON_TYPE, len(response.body))
        reply.write(response.body)
        reply.closed = True
        if self._transport.can_write_eof():
            self._transport.write_eof()

    # the sweep

    def _took(self) -> None:
        """From here the client has its time to take what was written."""
        self._deadline = self.server.plane.clock() + self.server.limits.idle_seconds
        if self._transport is not None:
            self._unsent = self._transport.get_write_buffer_size()

    def look(self, now: float) -> None:
        """Act on a clock that ran out; called once per sweep."""
        reply = self._reply
        if reply is not None:
            if isinstance(reply.listener, Relay):
                reply.listener.keep_alive(now)  # and it drops a client that takes nothing
                return
            if not self._paused:
                return  # what came early of the next request has its time when this one is over
        if self._transport is None:
            return
        unsent, before = self._transport.get_write_buffer_size(), self._unsent
        self._unsent = unsent
        if unsent < before:  # the client takes what was written
            self._deadline = now + self.server.limits.idle_seconds
        if now < self._deadline:
            return
        if not self._refused and not unsent and self._state is not _State.IDLE:
            self._refuse(408, MalformedBody("the request did not come in time"))
        else:
            self.cut()

    def drain(self) -> None:
        """Close if nothing is being served."""
        if self._reply is None and self._state is _State.IDLE and not self._queue:
            self._refused = True
            if self._transport is not None:
                self._transport.close()  # sends what is buffered first


class GatewayServer:
    """Listens for clients. `plane` serves the inference endpoints, `app` everything else."""

    def __init__(self, plane: Plane, app: AsgiApp, *, limits: ServerLimits | None = None) -> None:
        self.plane = plane
        self.app = app
        self.limits = limits or ServerLimits()
        self.connections: set[ClientConnection] = set()
        self.draining = False
        self.date = b""
        self._calls: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._sweep_timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def listening(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        reuse_port: bool = False,
        backlog: int = 2048,
        grace: float = 30.0,
    ) -> AsyncIterator[tuple[str, int]]:
        """Serve inside the `async with`; gives the address that was bound.

        On leaving, nothing new is accepted, idle connections are closed, running replies get
        `grace` seconds to end, and what is left is cut. With `reuse_port` several processes share
        one port.
        """
        self.loop = asyncio.get_running_loop()
        self._sweep()
        server = await self.loop.create_server(
            lambda: ClientConnection(self),
            host,
            port,
            reuse_port=reuse_port or None,
            backlog=backlog,
        )
        try:
            bound = server.sockets[0].getsockname()
            yield (bound[0], bound[1])
        finally:
            server.close()
            await self._drain(grace)
            if self._sweep_timer is not None:
                self._sweep_timer.cancel()

    def spawn(self, call: AsgiCall) -> None:
        """Run an app's call; the server owns the task until it ends."""
        task = self.loop.create_task(call.run())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def left(self) -> None:
        """A connection is gone."""
        if self.draining and not self.connections:
            self._empty.set()

    async def _drain(self, grace: float) -> None:
        self.draining = True
        for connection in tuple(self.connections):
            connection.drain()
        if self.connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), grace)
        for connection in tuple(self.connections):
            connection.cut()
        for task in tuple(self._calls):
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _sweep(self) -> None:
        self.date = b"date: %b\r\n" % formatdate(usegmt=True).encode()
        now = self.plane.clock()
        for connection in tuple(self.connections):
            connection.look(now)
        self._sweep_timer = self.loop.call_later(SWEEP_SECONDS, self._sweep)
