"""HTTP/1.1 response reader without I/O: bytes in, head and body bytes out.

`httptools` (llhttp, strict) does the parsing; this module adds what a parser leaves open: limits on
the head, informational responses, bodies that end with the connection, and bytes after the end.

State of one message:

    HEAD --head complete--> BODY --last byte--> COMPLETE
      ^ 1xx: start again      |
                              `-- connection closed: COMPLETE if the body is delimited by it

Anything else is a `BackendProtocolError`. Theory: RFC 9112, sections 6 and 9.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import httptools

from domain.errors import BackendProtocolError

Headers = list[tuple[bytes, bytes]]
"""Header lines in order; names in lower case."""

MAX_INFORMATIONAL = 8
"""Interim (1xx) responses taken before the real one; a server that sends more is broken."""


def _chunk_heads(limit: int) -> tuple[bytes, ...]:
    heads = [b"\n"] * limit  # no chunk begins with a line feed
    for size in range(1, limit):
        head = b"%x\r\n" % size
        whole = len(head) + size + 2
        if whole < limit:
            heads[whole] = head
    return tuple(heads)


CHUNK_HEADS: Final = _chunk_heads(4096)
"""By the length of a block of bytes: what it begins with if it is one whole chunk, its size spelled
the common way, in lower-case digits without zeros before them or extensions after them."""


class ResponseHead(NamedTuple):
    """Status line and headers of a response, without the framing headers' meaning."""

    status: int
    headers: Headers


class ResponseReader:
    """Reads the responses of one connection, one after another; owns no socket.

    `head` is None until the head is complete; `complete` turns true with the last byte of the body;
    `reusable` then says whether the connection may carry another request, after `reset`.
    `chunk_ended`: the last bytes of the body that came were the end of a chunk.
    """

    __slots__ = (
        "_bodiless",
        "_body",
        "_feed",
        "_head_bytes",
        "_headers",
        "_informational",
        "_junk",
        "_keep_alive",
        "_max_head",
        "_more",
        "_parser",
        "_until_close",
        "chunk_ended",
        "complete",
        "head",
    )

    def __init__(self, max_head: int) -> None:
        self._max_head = max_head
        self._parser = httptools.HttpResponseParser(self)
        self._feed = self._parser.feed_data
        self._body = b""
        self._more: list[bytes] | None = None
        self._junk = False
        self.reset()

    def reset(self) -> None:
        """Be ready for the response to the next request."""
        self._head_bytes = 0
        self._bodiless = 0  # bytes since the last of the body: chunk lines, trailers
        self._headers: Headers = []
        self._informational = 0
        self._until_close = False
        self._keep_alive = False
        self.head: ResponseHead | None = None
        self.complete = False
        self.chunk_ended = False

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the connection; return the body bytes among them, chunk framing removed.

        Raises: BackendProtocolError for what is not HTTP/1.1, a head or trailers above the limit.
        """
        self._body = b""
        if self.head is None:
            self._head_bytes += len(data)
        else:
            self._bodiless += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserUpgrade as exc:
            raise BackendProtocolError("the engine switched protocols unasked") from exc
        except httptools.HttpParserError as exc:
            if not self.complete:
                raise BackendProtocolError(f"the engine's answer is not HTTP/1.1: {exc}") from exc
            self._junk = True  # the answer is whole; what follows it is not HTTP
        if self._head_bytes > self._max_head and self._head_too_long():
            raise BackendProtocolError(f"response head exceeds {self._max_head} bytes")
        if self._body:
            self._bodiless = 0
        elif self._bodiless > self._max_head and not self.complete:
            raise BackendProtocolError(f"response trailers exceed {self._max_head} bytes")
        if self._more is not None:
            self._body = b"".join(self._more)
            self._more = None
        return self._body

    def _head_too_long(self) -> bool:
        """Of a head that came in one read with its body only the lines' own length is known."""
        if self.head is None:
            return True
        size = sum(len(name) + len(value) + 4 for name, value in self.head.headers)
        self._head_bytes = size
        return size > self._max_head

    def eof(self) -> bool:
        """The engine closed the connection; return whether the message is complete."""
        if self.head is not None and self._until_close:
            self.complete = True
        return self.complete

    @property
    def started(self) -> bool:
        """Whether any byte of this response has come."""
        return self._head_bytes > 0

    @property
    def reusable(self) -> bool:
        """Whether the connection may carry another request."""
        return self.complete and self._keep_alive and not self._junk

    # callbacks of the parser, in the order in which it makes them

    def on_message_begin(self) -> None:
        """A second message after the answer is bytes that nobody asked for."""
        if self.complete:
            self._junk = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line (or trailer, which is dropped)."""
        if self.head is None:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is whole; decide how the body ends."""
        status = self._parser.get_status_code()
        if self.complete or status < 200:
            return
        self.head = ResponseHead(status, self._headers)
        self._until_close = status not in {204, 304} and not any(
            name in {b"content-length", b"transfer-encoding"} for name, _ in self._headers
        )

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self.chunk_ended = False
        if not self._body:
            if not self.complete:
                self._body = body
        elif self._more is not None:
            self._more.append(body)
        elif not self.complete:
            self._more = [self._body, body]

    def on_chunk_complete(self) -> None:
        """The line break after a chunk."""
        self.chunk_ended = True

    def on_message_complete(self) -> None:
        """The end of the answer, or of an interim response before it."""
        if self.head is not None:
            if not self.complete:
                self.complete = True
                self._keep_alive = self._parser.should_keep_alive()
            return
        self._informational += 1
        if self._informational > MAX_INFORMATIONAL:
            raise BackendProtocolError(f"more than {MAX_INFORMATIONAL} interim responses")
        self._headers = []


def header_line(name: bytes, value: bytes) -> bytes:
    r"""One encoded header line, `name: value\r\n`.

    Raises: ValueError if a line break or NUL would let the value forge another header.
    """
    for byte in b"\r\n\0":
        if byte in name or byte in value:
            raise ValueError(f"header {name!r} holds a line break or NUL: {value!r}")
    return b"%b: %b\r\n" % (name, value)
