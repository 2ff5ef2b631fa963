"""The token path: one client request, the attempts to answer it, and the bytes between them.

A `Relay` is made when a complete request has arrived and lives until its reply is over. It decides
nothing: the dispatcher (the shell around the decision core) starts attempts and is told how they
end. Streamed and unstreamed answers, and all endpoints, take this one path, so retry, quota and
trace are written once, in the dispatcher.

    WAITING --start--> TRYING --first content--> COMMITTED --last byte--> OVER
       ^                 |                           |
       +--- retryable ---+                           +-- failure: error event, close --> OVER
       any state --fail--> OVER          any state --client gone--> OVER

Nothing of an answer reaches the client before its first content (or its end): the role-only chunk
and the head wait, so an attempt that dies first can be replaced unseen. After that an error is an
SSE error event and the connection is closed; text is never sent twice. Keep-alive comments may
have opened the stream earlier; they carry no content and change none of this, except that a
refusal then comes as an error event too.

Nothing here runs per token but `Flow.take` (`Attempt.on_data` for what is no plain token): a byte
scan and a write. Who wants the count of tokens asks for it (`Relay.tokens`).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from backends.upstream import EVENT_CHUNK_END, Exchange, Timeouts, UpstreamPool
from backends.wire.answer import AnswerMeter
from backends.wire.http import CHUNK_HEADS, Headers, header_line
from backends.wire.openai import RequestFacts, RequestParser, Salt, Surface, splice
from backends.wire.sse import StreamMeter
from domain.errors import (
    BackendError,
    BackendProtocolError,
    BackendTimeout,
    BackendUnavailable,
    MalformedBody,
    ServingError,
    StreamInterrupted,
)
from domain.outcome import Cause, Usage, UsageSource
from gateway import error_map
from gateway.error_map import ErrorReply

HELD_EVENTS = 64 << 10
"""Bytes of events without content that are held before an answer counts as begun."""

ERROR_BODY = 64 << 10
"""Bytes of an engine's error that are read; an error longer than this is cut."""

SSE_HEADERS = b"content-type: text/event-stream\r\ncache-control: no-cache\r\n"
JSON_TYPE = b"content-type: application/json\r\n"
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class ReplyListener(Protocol):
    """Who writes a reply is told what becomes of its client."""

    def pause(self) -> None:
        """The client reads slower than we write: stop."""

    def resume(self) -> None:
        """Write on."""

    def client_gone(self) -> None:
        """The client closed the connection before the reply was over."""


class Reply(Protocol):
    """The way back to the client of one request. Calls after `end`, `abort` or the client's leaving
    do nothing.
    """

    @property
    def closed(self) -> bool:
        """Whether the reply is over or its client gone."""

    @property
    def framed(self) -> Callable[[bytes], None] | None:
        """Takes whole HTTP chunks as they are on the wire, in place of `write`, until the reply is
        over; None where the body is not chunked or has not begun.
        """

    def start(self, status: int, headers: bytes, length: int | None) -> None:
        """Set status and headers (encoded lines); `length` of the body in bytes where known."""

    def write(self, data: bytes) -> None:
        """Send body bytes; never empty."""

    def end(self, *, close: bool = False) -> None:
        """The body is whole. `close` ends the connection too."""

    def abort(self) -> None:
        """Close the connection so that the client sees the body was cut."""


@dataclass(slots=True, kw_only=True)
class ClientRequest:
    """A complete request to an inference endpoint, as it came.

    The body is dropped, and `RequestFacts.turns` with it, once an answer has begun.
    `received_at` is when its last byte was read; `headers` have lower-case names, in order.
    """

    surface: Surface
    headers: Headers
    body: bytes
    received_at: float
    peer: str = ""

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header, by its lower-case name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class AttemptReport(NamedTuple):
    """How an attempt ended.

    `retryable`: nothing of it reached the client, and the dispatcher must now `start` another or
    `fail` the relay. Otherwise the reply is over. `status` is the engine's, None if it gave none;
    `error` is None for FINISHED and REJECTED. Times are absolute, None where no token came.
    """

    attempt: int
    at: float
    cause: Cause
    usage: Usage
    first_token: float | None
    last_token: float | None
    status: int | None
    error: BackendError | None
    retryable: bool


class Dispatcher(Protocol):
    """Decides about requests; the shell around the decision core. Never awaited, never blocks.

    Calls come in this order for one relay: `open` once; per attempt at most one `first_token`
    (streamed requests only) and exactly one `ended` or `superseded`; instead of what is left of
    that, `client_gone` at any time, after which nothing follows.
    """

    def open(self, relay: Relay) -> None:
        """A complete request: now or later call `relay.start` or `relay.fail`."""

    def first_token(self, relay: Relay, attempt: int, at: float) -> None:
        """The first content of `attempt` was read; its bytes go out now."""

    def ended(self, relay: Relay, report: AttemptReport) -> None:
        """An attempt is over."""

    def superseded(self, relay: Relay, attempt: int, usage: Usage) -> None:
        """Another attempt gave the first content; this one was aborted."""

    def client_gone(self, relay: Relay, usage: Usage) -> None:
        """The client left; running attempts were aborted. `usage` is what they had generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """What all relays of one server share."""

    dispatcher: Dispatcher
    parser: RequestParser
    clock: Callable[[], float] = time.monotonic
    keep_alive: float | None = 15.0
    """Seconds of silence after which a streaming client gets a comment; None for never."""


class Relay:
    """One request's life on the token path; made by the server, driven by the dispatcher.

    `write` takes the bytes of the attempt that answers. `context` belongs to the dispatcher, which
    keeps there what it knows of the request.
    `early_headers` are sent if a keep-alive opens the stream before an attempt does,
    `error_headers` with a refusal; both are encoded lines. `cache_salt` keeps the prompt apart in
    the caches of engines that can.
    """

    __slots__ = (
        "_attempts",
        "_facts",
        "_paused",
        "_plane",
        "_quiet_since",
        "_reply",
        "_started",
        "_winner",
        "cache_salt",
        "committed",
        "context",
        "early_headers",
        "error_headers",
        "over",
        "request",
        "write",
    )

    def __init__(self, plane: Plane, request: ClientRequest, reply: Reply) -> None:
        self._plane = plane
        self._reply = reply
        self.write = reply.write
        self._facts: RequestFacts | None = None
        self._attempts: list[Attempt] = []
        self._winner: Attempt | None = None
        self._started = False
        self._paused = False
        self._quiet_since = request.received_at
        self.request = request
        self.committed = False
        """Whether content of an answer has gone to the client."""
        self.cache_salt: str | None = None
        self.context: object = None
        self.early_headers = b""
        self.error_headers = b""
        self.over = False

    # for the dispatcher

    def facts(self) -> RequestFacts:
        """What the body says, read on the first call.

        Raises: MalformedBody.
        """
        if self._facts is None:
            self._facts = self._plane.parser.parse(self.request.surface, self.request.body)
        return self._facts

    def start(
        self,
        attempt: int,
        pool: UpstreamPool,
        model: str,
        *,
        timeouts: Timeouts,
        reply_headers: bytes = b"",
        upstream_headers: bytes = b"",
        ask_usage: bool = True,
        salt_field: str | None = None,
    ) -> None:
        """Send the request to a replica as attempt number `attempt`, under the engine's own name
        for the model.

        `reply_headers` go to the client if this attempt answers, `upstream_headers` to the engine;
        both are encoded lines. `ask_usage` False leaves `stream_options` alone, for engines that
        refuse it. `salt_field` is what the engine calls a cache salt, None if it knows none. Does
        nothing once the relay is over.
        """
        if self.over:
            return
        facts = self.facts()
        salt = None
        if salt_field is not None and self.cache_salt is not None:
            salt = Salt(salt_field, self.cache_salt)
        body = splice(self.request.body, facts, model, ask_usage=ask_usage, salt=salt)
        begun = Attempt(self, attempt, facts, reply_headers)
        self._attempts.append(begun)
        begun.exchange = pool.send(
            self.request.surface.path,
            body,
            begun,
            timeouts if facts.stream else _unstreamed(timeouts),
            headers=upstream_headers,
        )

    def fail(self, error: ServingError) -> None:
        """Refuse the request, or end a begun stream with an error event. Aborts what still runs."""
        if self.over:
            return
        self._abort_all()
        self._close_with(error_map.reply(error))

    def abort(self, attempt: int) -> Usage:
        """Close one attempt's upstream connection at once; return what it had generated.

        No report follows. If it had been the one that answers, the client's connection is cut.
        """
        for running in self._attempts:
            if running.number == attempt:
                usage = running.usage()
                if self._drop(running):
                    self._reply.abort()
                    self.over = True
                return usage
        return Usage()

    def tokens(self, attempt: int) -> int:
        """Content events of a running attempt so far; 0 if there is no such attempt."""
        running = self.running(attempt)
        return 0 if running is None else running.events

    def running(self, attempt: int) -> Attempt | None:
        """A running attempt by its number."""
        winner = self._winner
        if winner is not None and winner.number == attempt and not self.over:
            return winner
        for running in self._attempts:
            if running.number == attempt:
                return running
        return None

    # for the reply

    def pause(self) -> None:
        """The client reads slowly: slow the engine down."""
        self._paused = True
        if self._winner is not None and self._winner.exchange is not None:
            self._winner.exchange.pause()

    def resume(self) -> None:
        """The client has caught up."""
        self._paused = False
        if self._winner is not None and self._winner.exchange is not None:
            self._winner.exchange.resume()

    def client_gone(self) -> None:
        """The client left: engines are told by closing their connections, then the dispatcher."""
        if self.over:
            return
        self.over = True
        usage = self._generated()
        self._abort_all()
        self._plane.dispatcher.client_gone(self, usage)

    def keep_alive(self, now: float) -> None:
        """Send a comment if the stream has been silent for long; called now and then."""
        every = self._plane.keep_alive
        if every is None or self.over or self._facts is None or not self._facts.stream:
            return
        if self._winner is not None and self._winner.last_at is not None:
            self._quiet_since = max(self._quiet_since, self._winner.last_at)
        if now - self._quiet_since >= every and not self._paused:
            self._quiet_since = now
            if not self._started:
                self._begin(200, SSE_HEADERS + self.early_headers, None)
            self._reply.write(KEEP_ALIVE)

    # for attempts

    def first_token(self, attempt: Attempt, now: float) -> None:
        """An attempt has its first content."""
        self._plane.dispatcher.first_token(self, attempt.number, now)

    def commit(self, attempt: Attempt, status: int, headers: bytes, length: int | None) -> bool:
        """Let this attempt answer; return False if another already does, or the relay is over."""
        if self.over or self._winner not in {None, attempt}:
            return False
        if self._winner is None:
            self._winner = attempt
            self.committed = True
            for other in [other for other in self._attempts if other is not attempt]:
                usage = other.usage()
                self._drop(other)
                self._plane.dispatcher.superseded(self, other.number, usage)
            self._forget_prompt()
            if not self._started:
                self._begin(status, headers, length)
            if self._paused and attempt.exchange is not None:
                attempt.exchange.pause()
        return True

    def finished(self, attempt: Attempt, cause: Cause) -> None:
        """The attempt's answer has been written to its end."""
        self._forget(attempt)
        self.over = True
        self._reply.end()
        self._report(attempt, cause, None, retryable=False)

    def rejected(self, attempt: Attempt, response: ErrorReply) -> None:
        """The engine found the request at fault; its answer is the client's."""
        if self.over or self.committed:
            return
        self._drop(attempt)
        self._abort_all()
        self._close_with(response)
        self._report(attempt, Cause.REJECTED, None, retryable=False)

    def failed(self, attempt: Attempt, error: BackendError, *, told: bool = False) -> None:
        """An attempt came to nothing, or broke off; `told` if the engine's error event went out."""
        answered = self._forget(attempt)
        timeout = isinstance(error, BackendTimeout)
        if not answered:
            cause = Cause.TIMEOUT if timeout else Cause.REFUSED
            self._report(attempt, cause, error, retryable=True)
            return
        if told:
            self.over = True
            self._reply.end(close=True)
        else:
            self._close_with(error_map.reply(error))
        cause = Cause.TIMEOUT if timeout else Cause.INTERRUPTED
        self._report(attempt, cause, error, retryable=False)

    def express(self, attempt: Attempt, meter: StreamMeter) -> None:
        """The attempt's stream flows: from now on its tokens may go the short way."""
        write = self._reply.framed
        if write is not None and attempt.exchange is not None:
            attempt.exchange.express = Flow(meter, write, self._plane.clock)

    def stalled(self) -> None:
        """The client has not read for too long: it counts as gone."""
        self._reply.abort()
        self.client_gone()

    def now(self) -> float:
        """The plane's clock."""
        return self._plane.clock()

    def _forget_prompt(self) -> None:
        """No attempt will send it again: ten thousand open streams hold no prompts."""
        self.request.body = b""
        if self._facts is not None:
            self._facts.turns = ()

    def _begin(self, status: int, headers: bytes, length: int | None) -> None:
        self._started = True
        self._reply.start(status, headers, length)

    def _close_with(self, reply: ErrorReply) -> None:
        self.over = True
        if not self._started:
            headers = b"".join(header_line(name, value) for name, value in reply.headers)
            self._begin(reply.status, headers + self.error_headers, len(reply.body))
            if reply.body:
                self._reply.write(reply.body)
            self._reply.end()
        elif self._facts is not None and self._facts.stream:
            self._reply.write(b"data: %b\n\n" % reply.body.replace(b"\n", b" "))
            self._reply.end(close=True)
        else:
            self._reply.abort()

    def _report(
        self, attempt: Attempt, cause: Cause, error: BackendError | None, *, retryable: bool
    ) -> None:
        self._plane.dispatcher.ended(
            self,
            AttemptReport(
                attempt=attempt.number,
                at=self._plane.clock(),
                cause=cause,
                usage=attempt.usage(),
                first_token=attempt.first_at,
                last_token=attempt.last_at,
                status=attempt.status,
                error=error,
                retryable=retryable,
            ),
        )

    def _generated(self) -> Usage:
        if self._winner is not None:
            return self._winner.usage()
        return self._attempts[0].usage() if self._attempts else Usage()

    def _drop(self, attempt: Attempt) -> bool:
        """Abort an attempt; whether it was the one that answers."""
        if attempt.exchange is not None:
            attempt.exchange.abort()
        return self._forget(attempt)

    def _forget(self, attempt: Attempt) -> bool:
        """The attempt is over; whether it was the one that answers. What referred to each other no
        longer does: a request that ended is freed at once, not by the garbage collector.
        """
        self._attempts.remove(attempt)
        attempt.exchange = None
        answered = attempt is self._winner
        if answered:
            self._winner = None
        return answered

    def _abort_all(self) -> None:
        for attempt in tuple(self._attempts):
            self._drop(attempt)


class Flow:
    """A stream in full flow: the short way of its plain tokens, from one socket to the other.

    A block that is one whole chunk with one whole event of text, in one line, is counted and goes
    on as it came, framing included; most engines send little else.
    """

    __slots__ = ("_clock", "_meter", "_write")

    def __init__(
        self, meter: StreamMeter, write: Callable[[bytes], None], clock: Callable[[], float]
    ) -> None:
        self._meter = meter
        self._write = write
        self._clock = clock

    @property
    def last_at(self) -> float | None:
        """When the last token came."""
        return self._meter.last_at

    def take(self, block: bytes) -> bool:
        """Pass on one plain token; False, and nothing done, for anything else."""
        size = len(block)
        if size >= len(CHUNK_HEADS):
            return False
        head = CHUNK_HEADS[size]
        if (
            block.startswith(head)
            and block.endswith(EVENT_CHUNK_END)
            and self._meter.single(block, len(head), size - 4, self._clock())
        ):
            self._write(block)
            return True
        return False


class Attempt:
    """One try at one replica: the sink of its exchange.

    `exchange` is None only until `UpstreamPool.send` returns, which is before any callback.
    """

    __slots__ = (
        "_body",
        "_facts",
        "_length",
        "_pending",
        "_relay",
        "_reply_headers",
        "_stream",
        "_type",
        "_write",
        "_writing",
        "exchange",
        "number",
        "status",
    )

    def __init__(
        self, relay: Relay, number: int, facts: RequestFacts, reply_headers: bytes
    ) -> None:
        self._relay = relay
        self._facts = facts
        self._reply_headers = reply_headers
        self._stream: StreamMeter | None = None
        self._body: AnswerMeter | None = None
        self._pending = b""
        self._writing = False
        self._write = relay.write
        self._length: int | None = None
        self._type = b""
        self.number = number
        self.status: int | None = None
        self.exchange: Exchange | None = None

    @property
    def events(self) -> int:
        """Content events so far."""
        return self._stream.events if self._stream is not None else 0

    @property
    def thought(self) -> int | None:
        """Content events of thinking, once the answer has begun; None before or without."""
        return self._stream.thought if self._stream is not None else None

    @property
    def first_at(self) -> float | None:
        """When the first content came."""
        return self._stream.first_at if self._stream is not None else None

    @property
    def last_at(self) -> float | None:
        """When the last content came."""
        return self._stream.last_at if self._stream is not None else None

    def usage(self) -> Usage:
        """The engine's count, else the events counted, else nothing."""
        stream = self._stream
        meter = stream if stream is not None else self._body
        found = meter.usage() if meter is not None and self.status == 200 else None
        if found is None and self.events:
            found = Usage(completion=float(self.events), source=UsageSource.COUNTED)
        if found is None:
            return Usage()
        if stream is not None and found.thinking is None:
            found = dataclasses.replace(found, thinking=stream.thinking(found.completion))
        return found

    # Sink

    def on_head(self, status: int, headers: Headers) -> None:
        """Choose how the body is read; refuse what is no answer to this request."""
        self.status = status
        for name, value in headers:
            if name == b"content-type":
                self._type = value
            elif name == b"content-length":
                self._length = int(value)
        facts, kind = self._facts, self._type.lower()
        if status != 200:
            self._body = AnswerMeter()
        elif facts.stream:
            if kind and not kind.startswith(b"text/event-stream"):
                self._give_up(BackendProtocolError(f"asked for a stream, got {_shown(kind)}"))
                return
            self._stream = StreamMeter(
                facts.surface.content, keep_usage=facts.wants_usage, choices=facts.choices
            )
        elif kind and b"json" not in kind:
            self._give_up(BackendProtocolError(f"asked for JSON, got {_shown(kind)}"))
        else:
            self._body = AnswerMeter()

    def on_data(self, data: bytes, now: float) -> bool:
        """Pass on what has come; progress is a token, or any byte of an unstreamed answer."""
        meter = self._stream
        if meter is None:
            if self._body is not None:
                self._take_body(self._body, data)
            return True
        before = meter.events
        try:
            out = meter.feed(data, now)
        except BackendProtocolError as exc:
            self._give_up(exc)
            return False
        if self._writing:
            if out:
                self._write(out)
            return meter.events > before
        self._hold(meter, out)
        if before == 0 and meter.events > 0:
            self._relay.first_token(self, now)
        return meter.events > before

    def on_end(self) -> None:
        """The answer is whole."""
        if self._stream is not None:
            self._end_stream(self._stream)
        elif self._body is not None:
            self._end_body(self._body)

    def on_error(self, error: BackendError) -> None:
        """The answer will not become whole."""
        if not isinstance(error, BackendTimeout | BackendProtocolError):
            kind = StreamInterrupted if self._writing else BackendUnavailable
            error = kind(error.message, log=error.detail)
        told = self._writing and self._stream is not None and self._stream.error is not None
        self._relay.failed(self, error, told=told)

    def on_stall(self) -> None:
        """The client does not read."""
        self._relay.stalled()

    def _give_up(self, error: BackendError) -> None:
        if self.exchange is not None:
            self.exchange.abort()
        self._relay.failed(self, error)

    # streamed answers

    def _hold(self, meter: StreamMeter, out: bytes) -> None:
        """Keep what comes before the first content; commit when there is some."""
        self._pending += out
        if meter.error is not None and not meter.events:
            said = _engine_message(meter.error)
            self._give_up(BackendUnavailable("the engine sent an error", said=said))
        elif meter.events or meter.complete or len(self._pending) > HELD_EVENTS:
            self._flush(meter)

    def _flush(self, meter: StreamMeter) -> None:
        if self._relay.commit(self, 200, SSE_HEADERS + self._reply_headers, None):
            self._writing = True
            pending, self._pending = self._pending, b""
            if pending:
                self._write(pending)
            self._relay.express(self, meter)

    def _end_stream(self, meter: StreamMeter) -> None:
        out = meter.finish(self._relay.now())
        if meter.complete and meter.error is None:
            if not meter.done and self._facts.surface.asks_usage:
                out += DONE
            self._pending += out
            if self._writing:
                if out:
                    self._write(out)
            else:
                self._flush(meter)
            self._relay.finished(self, Cause.FINISHED)
        elif meter.error is not None:
            said = _engine_message(meter.error)
            told = StreamInterrupted("the engine sent an error", said=said)
            self._relay.failed(self, told, told=True)
        else:
            self.on_error(BackendUnavailable("the engine's stream ended without an end"))

    # unstreamed answers, and refusals of the engine

    def _take_body(self, meter: AnswerMeter, data: bytes) -> None:
        out = meter.feed(data)
        if not out:
            return
        if self.status != 200:
            if self.exchange is not None:
                self.exchange.abort()
            self._end_refusal(out[:ERROR_BODY])
        elif self._writing or self._relay.commit(
            self, 200, JSON_TYPE + self._reply_headers, self._length
        ):
            self._writing = True
            self._write(out)

    def _end_body(self, meter: AnswerMeter) -> None:
        out = meter.finish()
        if self.status != 200:
            self._end_refusal(out)
            return
        if not self._writing and not out:
            self.on_error(BackendProtocolError("the engine's answer is empty"))
            return
        if not self._writing:
            self._relay.commit(self, 200, JSON_TYPE + self._reply_headers, len(out))
        if out:
            self._write(out)
        self._relay.finished(self, Cause.FINISHED)

    def _end_refusal(self, body: bytes) -> None:
        """The engine said no: its own trouble is ours to hide, the client's fault is passed on."""
        status = self.status or 0
        if not 400 <= status < 500 or status in {401, 403, 407, 408, 425, 429}:
            self._relay.failed(
                self,
                BackendUnavailable(f"the engine answered {status}", said=_engine_message(body)),
            )
            return
        if b"json" not in self._type.lower():
            body = error_map.reply(MalformedBody(_engine_message(body))).body
        self._relay.rejected(self, ErrorReply(status=status, body=body))


@functools.lru_cache(maxsize=64)
def _unstreamed(timeouts: Timeouts) -> Timeouts:
    """An answer in one piece has no first token; the total limit holds."""
    return dataclasses.replace(timeouts, first_token=None)


def _engine_message(body: bytes) -> str:
    """The message in an engine's error, in any of the shapes in use; else the start of its text."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        found = None
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return found[:500] if isinstance(found, str) else _shown(body[:500])


def _shown(text: bytes) -> str:
    return text.decode("utf-8", "replace")
