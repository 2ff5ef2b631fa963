"""One pipelined connection to the shared store, without a task, future or timeout per call.

A call is bytes written and a callback; replies come in order. What was called within one turn of
the loop leaves in one write. A reply that takes longer than `answer_timeout`, or an error in place
of one, means that the store is away: the connection is closed, everything in flight is answered
with None, and a new connection is tried every `retry_interval`. Nothing ever waits longer than
`answer_timeout` for the store.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import unquote, urlsplit

from gateway.store.scripts import Script, Verb

Reply = bytes | int | None
Done = Callable[[Reply], None]

MAX_IN_FLIGHT = 10_000
"""Calls that may wait for a reply; beyond it the store counts as away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the store is and how to log in."""

    host: str
    port: int
    user: str | None = None
    password: str | None = None
    database: int = 0
    tls: bool = False


def address(url: str) -> Address:
    """Parse `redis[s]://[user:password@]host[:port][/database]`; `valkey` says the same.

    Raises: ValueError for another scheme or a database that is no number.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"redis", "rediss", "valkey", "valkeys"} or parts.hostname is None:
        raise ValueError(f"store url must look like redis://host:6379/0, not {parts.scheme}://...")
    path = parts.path.strip("/")
    return Address(
        host=parts.hostname,
        port=parts.port or 6379,
        user=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        database=int(path) if path else 0,
        tls=parts.scheme in {"rediss", "valkeys"},
    )


def command(*parts: bytes) -> bytes:
    """One command in the server's wire format (RESP)."""
    head = [b"*%d\r\n" % len(parts)]
    head += [b"$%d\r\n%b\r\n" % (len(part), part) for part in parts]
    return b"".join(head)


class ReplyReader:
    """Bytes in, complete replies out: simple strings, errors, integers and bulk strings."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, chunk: bytes) -> list[Reply | StoreRefusal]:
        """Replies that are complete now. Raises ValueError for what no verb of ours answers."""
        data = self._tail + chunk if self._tail else chunk
        replies: list[Reply | StoreRefusal] = []
        at = 0
        while True:
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            kind, body = data[at : at + 1], data[at + 1 : end]
            if kind == b"$":
                size = int(body)
                if size < 0:
                    replies.append(None)
                    at = end + 2
                    continue
                if len(data) < end + 4 + size:
                    break
                replies.append(data[end + 2 : end + 2 + size])
                at = end + 4 + size
                continue
            if kind == b":":
                replies.append(int(body))
            elif kind == b"+":
                replies.append(body)
            elif kind == b"-":
                replies.append(StoreRefusal(body.decode(errors="replace")))
            else:
                raise ValueError(f"unexpected reply {data[at : at + 16]!r} from the store")
            at = end + 2
        self._tail = data[at:]
        return replies


@dataclass(frozen=True, slots=True)
class StoreRefusal:
    """An error that the server answered with."""

    message: str


class _Pipe(asyncio.Protocol):
    """The connection itself: writes in order, hands replies to their callbacks."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        answer_timeout: float,
        refused: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._timeout = answer_timeout
        self._refused = refused
        self._reader = ReplyReader()
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[tuple[float, Done]] = deque()
        self._outgoing: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._graced = False
        self.closed: asyncio.Future[None] = loop.create_future()
        self.lost: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def call(self, data: bytes, done: Done) -> bool:
        """Send; False if too much is in flight or the connection is gone."""
        if self._transport is None or len(self._waiting) >= MAX_IN_FLIGHT:
            return False
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(data)
        self._waiting.append((self._loop.time(), done))
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout, self._look)
        return True

    async def asked(self, data: bytes) -> Reply:
        """Send and wait for the reply; None if there is none."""
        answered: asyncio.Future[Reply] = self._loop.create_future()

        def done(reply: Reply) -> None:
            if not answered.done():
                answered.set_result(reply)

        return await answered if self.call(data, done) else None

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is not None and outgoing:
            self._transport.write(b"".join(outgoing))

    def data_received(self, data: bytes) -> None:
        """Hand replies to the calls they belong to."""
        try:
            replies = self._reader.feed(data)
        except ValueError:
            self.abort()
            return
        self._graced = False
        for reply in replies:
            if not self._waiting:
                self.abort()
                return
            if isinstance(reply, StoreRefusal):
                self._refused(reply.message)
                self.abort()
                return
            _, done = self._waiting.popleft()
            done(reply)

    def _look(self) -> None:
        """Close the connection if the oldest call waits too long; else look again when it would.

        A loop that was busy itself may not have read what has come: it gets one more turn.
        """
        self._timer = None
        if not self._waiting:
            return
        now = self._loop.time()
        left = self._waiting[0][0] + self._timeout - now
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        elif left < -0.2 * self._timeout and not self._graced:
            self._graced = True
            self._timer = self._loop.call_later(0.1 * self._timeout, self._look)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()
            self._end()

    def close(self) -> None:
        """Write what was called and close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Answer everything in flight with None."""
        self._end()

    def _end(self) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.closed.done():
            self.closed.set_result(None)
        if self.lost is not None:
            self.lost()
        waiting, self._waiting = self._waiting, deque()
        for _, done in waiting:
            done(None)


class Link:
    """Keeps one connection up while `keep` runs. `up` says whether calls reach the store.

    `on_up` is called when it has come (back), before any call; `on_down` when it is lost, before
    the calls in flight are answered with None.
    """

    def __init__(
        self,
        where: Address,
        verbs: Mapping[Verb, Script],
        *,
        on_up: Callable[[], None],
        on_down: Callable[[], None],
        refused: Callable[[str], None],
        answer_timeout: float,
        connect_timeout: float,
        retry_interval: float,
    ) -> None:
        self._where = where
        self._verbs = verbs
        self._on_up = on_up
        self._on_down = on_down
        self._refused = refused
        self._answer_timeout = answer_timeout
        self._connect_timeout = connect_timeout
        self._retry_interval = retry_interval
        self._heads = {
            verb: b"$7\r\nEVALSHA\r\n$40\r\n" + script.sha + b"\r\n"
            for verb, script in verbs.items()
        }
        self._pipe: _Pipe | None = None
        self._task: asyncio.Task[None] | None = None
        self.up = False
        self.tried = asyncio.Event()
        """Set once the first attempt to connect has ended, one way or the other."""

    def call(self, verb: Verb, keys: Sequence[bytes], args: Sequence[bytes], done: Done) -> bool:
        """Run a verb; `done` gets the reply, or None if the store went away or refused it.

        False, and `done` is never called, when the store is away already.
        """
        if self._pipe is None or not self.up:
            return False
        parts = [b"*%d\r\n" % (3 + len(keys) + len(args)), self._heads[verb]]
        count = b"%d" % len(keys)
        parts.append(b"$%d\r\n%b\r\n" % (len(count), count))
        parts += [b"$%d\r\n%b\r\n" % (len(part), part) for part in (*keys, *args)]
        return self._pipe.call(b"".join(parts), done)

    async def keep(self) -> None:
        """Connect, and connect again whenever the connection is lost; until cancelled."""
        try:
            while True:
                pipe = await self._connected()
                if pipe is not None:
                    self._pipe, self.up = pipe, True
                    pipe.lost = self._lost
                    self._on_up()
                self.tried.set()
                if pipe is not None:
                    await pipe.closed
                    self._lost()
                await asyncio.sleep(self._retry_interval)
        finally:
            if self._pipe is not None:
                self._pipe.lost = None
                self._pipe.close()

    def _lost(self) -> None:
        if self.up:
            self.up = False
            self._pipe = None
            self._on_down()

    async def _connected(self) -> _Pipe | None:
        """A connection that has logged in and knows every verb; None if there is none to be had."""
        loop = asyncio.get_running_loop()
        where = self._where
        pipe = _Pipe(loop, self._answer_timeout, self._refused)
        try:
            async with asyncio.timeout(self._connect_timeout):
                await loop.create_connection(
                    lambda: pipe,
                    where.host,
                    where.port,
                    ssl=ssl.create_default_context() if where.tls else None,
                )
                for greeting in self._greetings():
                    if await pipe.asked(greeting) is None:
                        pipe.abort()
                        return None
        except (OSError, TimeoutError):
            pipe.abort()
            return None
        except asyncio.CancelledError:
            pipe.abort()
            raise
        return pipe

    def _greetings(self) -> list[bytes]:
        where = self._where
        greetings = []
        if where.password is not None:
            login = [where.user.encode()] if where.user else []
            greetings.append(command(b"AUTH", *login, where.password.encode()))
        if where.database:
            greetings.append(command(b"SELECT", b"%d" % where.database))
        greetings += [command(b"SCRIPT", b"LOAD", script.text) for script in self._verbs.values()]
        return greetings
