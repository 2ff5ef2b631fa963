"""The two crossings between the token path and ASGI.

`AsgiCall` lets the server hand a request that is not hot to the FastAPI app: it writes what the
app sends into a `Reply`. `AsgiReply` is the other way round: it lets the same dispatcher and relay
answer when the app runs under a foreign ASGI server (uvicorn, a test client).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

from backends.wire.http import Headers, header_line
from gateway.relay import ClientRequest, Plane, Relay, Reply, ReplyListener

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_QUEUED = 256 << 10
"""Body bytes that wait for a slow ASGI server before the engine is paused."""

_FRAMING = {b"content-length", b"transfer-encoding", b"connection", b"keep-alive"}
_log = logging.getLogger(__name__)


def http_scope(
    *,
    method: str,
    target: bytes,
    headers: Headers,
    version: str,
    client: tuple[str, int] | None,
    server: tuple[str, int] | None,
) -> dict[str, Any]:
    """The ASGI scope of a request; `target` as on the request line, origin or absolute form."""
    if not target.startswith((b"/", b"*")) and b"://" in target:
        _, _, rest = target.partition(b"://")
        target = b"/" + rest.partition(b"/")[2]
    path, _, query = target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": version,
        "method": method,
        "scheme": "http",
        "path": unquote(path.decode("ascii", "surrogateescape")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "client": client,
        "server": server,
        "state": {},
    }


class AsgiCall:
    """One request served by an ASGI app; its body is complete before the app starts."""

    def __init__(self, app: AsgiApp, scope: Scope, body: bytes, reply: Reply) -> None:
        self._app = app
        self._scope = scope
        self._body: bytes | None = body
        self._reply = reply
        self._started = False
        self._ended = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._gone = asyncio.Event()

    async def run(self) -> None:
        """Call the app; an exception in it becomes a bare 500, or a cut body."""
        try:
            await self._app(self._scope, self._receive, self._send)
        except asyncio.CancelledError:
            self._reply.abort()
            raise
        except Exception:  # noqa: BLE001 - the outermost frame of the app; logged
            _log.exception("%s %s failed", self._scope["method"], self._scope["path"])
        if not self._ended:
            if self._started:
                self._reply.abort()
            else:
                self._reply.start(500, b"content-type: text/plain\r\n", 21)
                self._reply.write(b"Internal Server Error")
                self._reply.end()

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._reply.closed:
            return
        if message["type"] == "http.response.start":
            headers = [(bytes(k).lower(), bytes(v)) for k, v in message.get("headers", ())]
            length = next((int(v) for k, v in headers if k == b"content-length"), None)
            lines = b"".join(header_line(k, v) for k, v in headers if k not in _FRAMING)
            self._reply.start(message["status"], lines, length)
            self._started = True
        elif message["type"] == "http.response.body":
            body = message.get("body", b"")
            if body:
                self._reply.write(bytes(body))
            if not message.get("more_body", False):
                self._ended = True
                self._reply.end()
            else:
                await self._writable.wait()

    # ReplyListener

    def pause(self) -> None:
        """The client reads slowly: the app waits in its next send."""
        self._writable.clear()

    def resume(self) -> None:
        """The client has caught up."""
        self._writable.set()

    def client_gone(self) -> None:
        """The app learns it from its next receive."""
        self._gone.set()
        self._writable.set()


class AsgiReply:
    """A `Reply` over a foreign ASGI server's `send`.

    What the relay writes is queued, and the engine paused while the queue is long.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._queue: deque[Message] = deque()
        self._queued = 0
        self._paused = False
        self._cut = False
        self._wake = asyncio.Event()
        self._over = False
        self.listener: ReplyListener | None = None

    @property
    def closed(self) -> bool:
        """Whether the reply is over or its client gone."""
        return self._over

    @property
    def framed(self) -> None:
        """The server around the app does the framing."""
        return None

    def start(self, status: int, headers: bytes, length: int | None) -> None:
        """Set status and headers."""
        pairs = [
            (name.lower(), value.strip())
            for name, _, value in (line.partition(b":") for line in headers.split(b"\r\n") if line)
        ]
        if length is not None:
            pairs.append((b"content-length", b"%d" % length))
        self._put({"type": "http.response.start", "status": status, "headers": pairs})

    def write(self, data: bytes) -> None:
        """Queue body bytes."""
        self._put({"type": "http.response.body", "body": data, "more_body": True})
        self._queued += len(data)
        if self._queued > MAX_QUEUED and not self._paused and self.listener is not None:
            self._paused = True
            self.listener.pause()

    def end(self, *, close: bool = False) -> None:  # noqa: ARG002 - the server owns the connection
        """The body is whole."""
        self._put({"type": "http.response.body", "body": b"", "more_body": False})
        self._over = True
        self.listener = None

    def abort(self) -> None:
        """Leave the body unfinished; the server then closes the connection."""
        self._over = self._cut = True
        self.listener = None
        self._wake.set()

    def _put(self, message: Message) -> None:
        if not self._over:
            self._queue.append(message)
            self._wake.set()

    async def run(self) -> None:
        """Send what is queued until the reply is over; watch for the client's leaving."""
        watch = asyncio.ensure_future(self._watch())
        try:
            while not self._cut:
                while self._queue:
                    message = self._queue.popleft()
                    self._queued -= len(message.get("body", b""))
                    await self._send(message)
                    if self._paused and self._queued < MAX_QUEUED // 2 and self.listener:
                        self._paused = False
                        self.listener.resume()
                if self._over:
                    return
                self._wake.clear()
                await self._wake.wait()
        finally:
            watch.cancel()
            if not self._over:
                self._leave()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        if not self._over:
            self._over = self._cut = True
            self._wake.set()
            listener, self.listener = self.listener, None
            if listener is not None:
                listener.client_gone()


async def answer(plane: Plane, request: ClientRequest, receive: Receive, send: Send) -> None:
    """Serve one inference request under a foreign ASGI server: the route of the FastAPI app."""
    reply = AsgiReply(receive, send)
    relay = Relay(plane, request, reply)
    reply.listener = relay
    plane.dispatcher.open(relay)
    await reply.run()
