"""Answers that come as one JSON document: kept while they are small, their usage read at the end.

A small answer is held until it is whole. That costs no time, since it comes in one or two reads,
and it buys two things: an engine that dies in the middle can be replaced, and the client gets a
`content-length`. A long one (embeddings) is passed on as it comes and only its tail is kept.
"""

from __future__ import annotations

from backends.wire.usage import usage_in_tail, usage_of
from domain.outcome import Usage

HOLD_BYTES = 64 << 10
"""Longest answer that is held until it is whole."""

TAIL_BYTES = 4 << 10
"""What is kept of a longer one to find the usage, which engines write last."""


class AnswerMeter:
    """Passes one JSON answer on; the unstreamed sibling of `StreamMeter`, owns no socket."""

    __slots__ = ("_held", "_kept", "_passing")

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._kept = 0
        self._passing = False

    def feed(self, data: bytes) -> bytes:
        """Take body bytes; return those to pass on now."""
        if self._passing:
            self._held[0] = (self._held[0] + data)[-TAIL_BYTES:]
            return data
        self._held.append(data)
        self._kept += len(data)
        if self._kept <= HOLD_BYTES:
            return b""
        whole = b"".join(self._held)
        self._held = [whole[-TAIL_BYTES:]]
        self._passing = True
        return whole

    def finish(self) -> bytes:
        """The answer is whole; return what was held back."""
        if self._passing:
            return b""
        whole = b"".join(self._held)
        self._held = [whole]
        return whole

    def usage(self) -> Usage | None:
        """The engine's own count, or None; to be asked after `finish`."""
        if self._passing:
            return usage_in_tail(self._held[0])
        return usage_of(b"".join(self._held))
