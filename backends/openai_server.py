"""The server side of the OpenAI wire, bare: what an engine, real or emulated, puts in front of its
generator.

One `asyncio.Protocol` per connection, no framework: a token costs one byte join and one write. A
generator is anything that takes a `Call` and later feeds it: `token`, `finish`, `fail`. A client
that leaves ends its calls through `Generator.cancel`, once each.

    Connection:  reading --whole request--> answering --last byte--> reading
                     `--- the client leaves: every open call is cancelled ---> closed

Other paths (health, metrics, engine-specific pages) are a table of plain functions.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Protocol, Self, cast

import httptools
import msgspec
import orjson

from backends.wire.openai import CHAT, SURFACES, RequestFacts, RequestParser
from domain.errors import MalformedBody

MAX_BODY = 64 << 20
MAX_UNREAD = 8 << 20
"""Bytes a client may leave unread before it counts as gone."""
CHARS_PER_TOKEN = 4.0
"""How a prompt of text is counted where no tokenizer is at hand."""
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Page:
    """Status, content type and body of a plain answer."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"


Handler = Callable[[bytes], Page]
"""A page from a request body."""


class _Extras(msgspec.Struct):
    """Fields that engines take beyond OpenAI's own."""

    ignore_eos: bool = False
    min_tokens: int = 0
    n_predict: int | None = None


_decode_extras = msgspec.json.Decoder(_Extras).decode


@dataclass(slots=True, eq=False)
class Call:
    """One choice of one request, on its way through the generator.

    `prompt_tokens` are counted from text (4 characters a token) or given as ids. `exact` is how
    many tokens are wanted, where the request fixes it: `n_predict` (llama.cpp's own field, which a
    gateway does not read), or `max_tokens` with `ignore_eos`. The generator calls `token` for each
    piece of text, then `finish` or `fail`, and nothing after `cancel`.
    """

    facts: RequestFacts
    prompt_tokens: int
    exact: int | None
    min_tokens: int
    index: int
    answer: _Answer
    cached_tokens: int = 0
    sent: int = 0
    over: bool = False
    handle: Any = None  # the generator's own

    def token(self, text: str, count: int = 1) -> None:
        """`count` tokens whose text is `text`."""
        self.sent += count
        self.answer.token(self, text)

    def finish(self, reason: str) -> None:
        """The choice is complete: `stop` or `length`."""
        self.over = True
        self.answer.finish(self, reason)

    def fail(self, status: int, message: str, kind: str = "server_error") -> None:
        """The choice will not become complete; an SSE error event after the first byte."""
        self.over = True
        self.answer.fail(status, message, kind)

    def drop(self) -> None:
        """Close the connection in the middle, as a dying engine does."""
        self.answer.drop()


class Generator(Protocol):
    """Makes tokens. Both calls come on the event loop."""

    @property
    def models(self) -> tuple[str, ...]:
        """Names it answers to; the first is its own."""

    def submit(self, call: Call) -> None:
        """Take a call; feed it now or later."""

    def cancel(self, call: Call) -> None:
        """The client of this call is gone; feed it no more."""


class _Answer:
    """The reply to one request: its calls, written as a stream or as one JSON body."""

    __slots__ = (
        "_chat",
        "_connection",
        "_created",
        "_facts",
        "_head",
        "_id",
        "_reasons",
        "_started",
        "_texts",
        "calls",
        "closed",
    )

    def __init__(self, connection: _Connection, facts: RequestFacts, serial: int) -> None:
        self._connection = connection
        self._facts = facts
        self._chat = facts.surface is CHAT
        self._created = int(time.time())
        self._id = f"{'chatcmpl' if self._chat else 'cmpl'}-{serial:x}"
        self._head: list[bytes] = []
        self._texts: list[list[str]] = [[] for _ in range(facts.choices)]
        self._reasons: dict[int, str] = {}
        self._started = False
        self.calls: list[Call] = []
        self.closed = False

    def token(self, call: Call, text: str) -> None:
        if self.closed:
            return
        if not self._facts.stream:
            self._texts[call.index].append(text)
            return
        if not self._started:
            self._start()
        before, after = self._frame(call.index)
        self._write(before + msgspec.json.encode(text) + after)

    def finish(self, call: Call, reason: str) -> None:
        if self.closed:
            return
        self._reasons[call.index] = reason
        last = len(self._reasons) == self._facts.choices
        if self._facts.stream:
            if not self._started:
                self._start()
            delta: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
            data = self._event([{"index": call.index, **delta, "finish_reason": reason}])
            if last:
                if self._facts.wants_usage:
                    data += self._event([], usage=self._usage())
                data += DONE
            self._write(data)
        elif last:
            self._connection.reply(Page(self._whole()))
        if last:
            self.closed = True
            if self._facts.stream:
                self._connection.end_stream()
            self._connection.answered()

    def fail(self, status: int, message: str, kind: str) -> None:
        if self.closed:
            return
        self.closed = True
        for call in self.calls:
            if not call.over:
                call.over = True
                self._connection.server.generator.cancel(call)
        page = error_page(status, message, kind)
        if self._started:
            self._write(b"data: " + page.body + b"\n\n" + DONE)
            self._connection.end_stream()
        else:
            self._connection.reply(page)
        self._connection.answered()

    def drop(self) -> None:
        self._connection.abort()

    def gone(self) -> None:
        """The client left."""
        self.closed = True
        for call in self.calls:
            if not call.over:
                call.over = True
                self._connection.server.generator.cancel(call)

    # ---- bytes

    def _start(self) -> None:
        self._started = True
        self._connection.write(SSE_HEAD)
        if self._chat:
            for index in range(self._facts.choices):
                delta = {"role": "assistant", "content": ""}
                self._write(self._event([{"index": index, "delta": delta, "finish_reason": None}]))

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        body: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": self._created,
            "model": self._facts.model,
            "choices": choices,
        }
        if usage is not None:
            body["usage"] = usage
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text of a token event; the same for every token."""
        if not self._head:
            mark = "\ue000"
            for i in range(self._facts.choices):
                piece: dict[str, Any] = (
                    {"delta": {"content": mark}} if self._chat else {"text": mark}
                )
                event = self._event([{"index": i, **piece, "finish_reason": None}])
                self._head += event.split(orjson.dumps(mark))
        return self._head[2 * index], self._head[2 * index + 1]

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self.calls[0].prompt_tokens, sum(c.sent for c in self.calls)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.calls[0].cached_tokens},
        }

    def _whole(self) -> bytes:
        choices = []
        for index, pieces in enumerate(self._texts):
            text = "".join(pieces)
            choice: dict[str, Any] = {"index": index, "finish_reason": self._reasons[index]}
            choice |= (
                {"message": {"role": "assistant", "content": text}}
                if self._chat
                else {"text": text}
            )
            choices.append(choice)
        return orjson.dumps(
            {
                "id": self._id,
                "object": "chat.completion" if self._chat else "text_completion",
                "created": self._created,
                "model": self._facts.model,
                "choices": choices,
                "usage": self._usage(),
            }
        )

    def _write(self, data: bytes) -> None:
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data))


def error_page(status: int, message: str, kind: str = "server_error") -> Page:
    """OpenAI's error body."""
    error = {"message": message, "type": kind, "param": None, "code": None}
    return Page(orjson.dumps({"error": error}), status)


class _Connection(asyncio.Protocol):
    """One client connection; the states stand in the module's docstring."""

    def __init__(self, server: OpenAIServer) -> None:
        self.server = server
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[tuple[bytes, bytes, bytes, bool]] = deque()
        self._answer: _Answer | None = None
        self._busy = False
        self._keep = True
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._body: list[bytes] = []
        self._size = 0

    # ---- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._transport = None
        self.server.connections.discard(self)
        if self._answer is not None:
            answer, self._answer = self._answer, None
            answer.gone()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.reply(error_page(400, "malformed HTTP request", "invalid_request_error"))
            self.abort(after_write=True)

    # ---- httptools

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= MAX_BODY:
            self._body.append(data)

    def on_message_complete(self) -> None:
        method, keep = self._parser.get_method(), bool(self._parser.should_keep_alive())
        path = self._url.partition(b"?")[0]
        self._waiting.append((method, path, b"".join(self._body), keep))
        self._reset()
        if not self._busy:
            self._next()

    def _next(self) -> None:
        while self._waiting and not self._busy and self._transport is not None:
            method, path, body, self._keep = self._waiting.popleft()
            self._busy = True
            self.server.handle(self, method, path, body)

    # ---- what answers write

    def write(self, data: bytes) -> None:
        transport = self._transport
        if transport is None:
            return
        transport.write(data)
        if transport.get_write_buffer_size() > MAX_UNREAD:
            transport.abort()

    def reply(self, page: Page) -> None:
        """A whole answer."""
        phrase = HTTPStatus(page.status).phrase
        self.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b"
            % (
                page.status,
                phrase.encode(),
                page.content_type.encode(),
                len(page.body),
                b"" if self._keep else b"connection: close\r\n",
                page.body,
            )
        )

    def end_stream(self) -> None:
        self.write(b"0\r\n\r\n")

    def serve(self, answer: _Answer) -> None:
        """This answer is being written from now on."""
        self._answer = answer

    def answered(self) -> None:
        """The present answer is complete."""
        self._answer = None
        self._busy = False
        if not self._keep:
            self.abort(after_write=True)
        else:
            asyncio.get_running_loop().call_soon(self._next)

    def abort(self, *, after_write: bool = False) -> None:
        """Close; at once, or when what was written has left."""
        if self._transport is None:
            return
        if after_write:
            self._transport.close()
        else:
            self._transport.abort()


class OpenAIServer(AbstractAsyncContextManager["OpenAIServer"]):
    """Serves one generator on one port; `async with` is its lifetime.

    `pages` maps (method, path) to plain handlers, beside `/v1/models`. `port` 0 takes any free one;
    `url` is known once entered.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        pages: Mapping[tuple[str, str], Handler] | None = None,
        owner: str = "sluice",
        max_context: int | None = None,
    ) -> None:
        self.generator = generator
        self.connections: set[_Connection] = set()
        self.refusing: Page | None = None
        """What every inference request is answered with, None to serve."""
        self._host = host
        self._port = port
        self._owner = owner
        self._max_context = max_context
        self._server: asyncio.Server | None = None
        self._parser = RequestParser()
        self._serial = itertools.count(1)
        self._pages = {("GET", "/v1/models"): self._models, **(pages or {})}

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self), self._host, self._port, backlog=4096
        )
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.abort()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self._host}:{self._port}"

    def handle(self, connection: _Connection, method: bytes, path: bytes, body: bytes) -> None:
        """Answer one request."""
        surface = SURFACES.get(path)
        if method == b"POST" and surface is not None and surface.asks_usage:
            self._infer(connection, path, body)
            return
        page = self._pages.get((method.decode(), path.decode("latin-1")))
        if page is None:
            answer = error_page(404, f"no {path.decode('latin-1')} here", "invalid_request_error")
        else:
            answer = page(body)
        connection.reply(answer)
        connection.answered()

    def _infer(self, connection: _Connection, path: bytes, body: bytes) -> None:
        if self.refusing is not None:
            connection.reply(self.refusing)
            connection.answered()
            return
        try:
            facts = self._parser.parse(SURFACES[path], body)
            extras = _decode_extras(body)
        except (MalformedBody, msgspec.DecodeError) as exc:
            connection.reply(error_page(400, str(exc), "invalid_request_error"))
            connection.answered()
            return
        answer = _Answer(connection, facts, next(self._serial))
        exact = facts.max_tokens if extras.ignore_eos else None
        if extras.n_predict is not None:
            exact = extras.n_predict
        tokens = max(facts.prompt_ids + round(facts.prompt_chars / CHARS_PER_TOKEN), 1)
        answer.calls = [
            Call(
                facts=facts,
                prompt_tokens=tokens,
                exact=exact,
                min_tokens=extras.min_tokens,
                index=index,
                answer=answer,
            )
            for index in range(facts.choices)
        ]
        connection.serve(answer)
        for call in answer.calls:
            if not call.over:
                self.generator.submit(call)

    def _models(self, _body: bytes) -> Page:
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": self._owner,
             "max_model_len": self._max_context}
            for name in self.generator.models
        ]  # fmt: skip
        return Page(orjson.dumps({"object": "list", "data": data}))
