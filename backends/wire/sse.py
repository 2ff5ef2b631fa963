r"""Server-sent events as engines send them, metered without decoding them.

A stream is a sequence of events, each ended by a blank line (WHATWG HTML, section 9.2.6; lines may
end in LF, CRLF or CR). The meter counts events that carry generated text by looking for a few byte
patterns, and passes whole events on as the bytes they came in. That is safe because inside a JSON
string every quote is escaped: `"content":"` cannot occur in text, only `\"content\":\"` can.

A reasoning model thinks first and answers then. Where thinking has a field of its own, the answer
begins with the first text of another; where it stands in `<think>` tags at the start of the text,
after the event that closes them.

What leaves the meter differs from what entered it in three places only: a usage event goes out
when the client asked for one (once, before `[DONE]`), a `finish_reason` is not repeated, and an
event cut off by the end of the connection stays behind.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from backends.wire.usage import usage_of
from domain.errors import BackendProtocolError
from domain.outcome import Usage

MAX_EVENT = 4 << 20
"""Bytes of one event held back until it is whole; more is a broken engine."""

QUOTE = ord(b'"')

OPENED = re.compile(rb":\s*\"\s*(?:\\n)*(?:<|\\u003c)think(?:>|\\u003e)")
"""Text that opens with thinking; some encoders escape the brackets."""
CLOSING = b"/think"
"""What closes it, however the brackets are written."""

_BLANK_LINE = re.compile(rb"\n\r?\n|\r\r")
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_REASON = b'"finish_reason"'
_UNFINISHED = (b'"finish_reason":null', b'"finish_reason": null')
_DATA = re.compile(rb"(?:^|[\r\n])data:[ ]?([^\r\n]*)")


class ContentPattern(NamedTuple):
    """How text looks in the events of one endpoint.

    `any` finds a non-empty piece of generated text, `answer` one that is no thinking (None: they
    look alike); `needles` are the common spellings of text up to the opening quote, for a count
    without a regular expression.
    """

    any: re.Pattern[bytes]
    answer: re.Pattern[bytes] | None
    needles: tuple[bytes, ...]


def _pattern(fields: bytes, thinking: bytes = b"", extra: bytes = b"") -> ContentPattern:
    names = fields.split() + thinking.split()

    def text(fields: bytes) -> re.Pattern[bytes]:
        return re.compile(rb'"(?:%b)"\s*:\s*"(?!")' % b"|".join(fields.split()) + extra)

    needles = tuple(b'"%b":%b"' % (n, s) for n in names for s in (b"", b" "))
    return ContentPattern(text(b" ".join(names)), text(fields), needles)


CHAT_CONTENT = _pattern(
    b"content refusal arguments",
    b"reasoning_content reasoning",
    rb'|"tool_calls"\s*:\s*\[\s*\{|"function_call"\s*:\s*\{',
)
COMPLETION_CONTENT = _pattern(b"text")
RESPONSE_CONTENT = _pattern(b"delta")._replace(answer=None)


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def payload(event: bytes) -> bytes:
    """The data of one event: its `data:` lines joined by line feeds."""
    return b"\n".join(_DATA.findall(event))


class StreamMeter:
    """Counts and passes the events of one streamed answer; owns no socket and no clock.

    `events` counts events with generated text: the first chunk that only names the role is none.
    `first_at` and `last_at` are the times of the first and last of them, None before. `thought`
    counts those of thinking once the answer has begun, at `answer_at`; both are None before, and in
    streams that do not think. `done` says that the stream ended as its protocol wants it; `error`
    holds the payload of an error event.
    """

    __slots__ = (
        "_answer",
        "_closing",
        "_content",
        "_empty",
        "_finished",
        "_held_usage",
        "_keep_usage",
        "_needle",
        "_single",
        "_tail",
        "_thinking",
        "_unfinished",
        "_usage_event",
        "answer_at",
        "done",
        "error",
        "events",
        "first_at",
        "last_at",
        "thought",
    )

    def __init__(
        self, content: ContentPattern, *, keep_usage: bool = False, choices: int = 1
    ) -> None:
        self._content = content
        self._keep_usage = keep_usage
        self._single = choices == 1
        self._answer = content.answer if self._single else None
        self._needle: bytes | None = None
        self._empty = b""
        self._unfinished = b""  # how its events say that there is more; empty: not at all
        self._tail = bytearray()
        self._finished: set[int] = set()
        self._held_usage = b""
        self._usage_event = b""
        self._thinking = False
        self._closing: bytes | None = None  # what ends the thinking, where it stands in the text
        self.thought: int | None = None
        self.answer_at: float | None = None
        self.events = 0
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.done = False
        self.error: bytes | None = None

    def feed(self, data: bytes, now: float) -> bytes:
        """Take body bytes that came at `now`; return the whole events to pass on.

        The common case is a read of whole content events, told by four byte scans. With several
        choices one event may hold several needles, which would break the count, so those streams
        take the long way.

        Raises: BackendProtocolError for an event above `MAX_EVENT`.
        """
        needle = self._needle
        if needle is not None and not self._tail and data.endswith(b"\n\n"):
            found = data.count(needle) - data.count(self._empty)
            if (
                found == data.count(b"\n\n")
                and self._plain(data, found)
                and (self._closing is None or self._closing not in data)
            ):
                self.events += found
                self.last_at = now
                return data
        return self._scan(data, now)

    def single(self, data: bytes, start: int, end: int, now: float) -> bool:
        """Whether data[start:], which came at `now`, begins with an event of one line whose blank
        line stands at `end`, with text that can go on as it is; counted if so. What follows (the
        end of its chunk) must be no part of an event.
        """
        needle, more = self._needle, self._unfinished
        if needle is None or self._tail or data.find(b"\n", start) != end or b'"usage"' in data:
            return False
        if more not in data or (not more and _REASON in data):  # as `_plain`, for one event
            return False
        at = data.find(needle)
        if at < 0 or data[at + len(needle)] == QUOTE:
            return False
        if self._closing is not None and self._closing in data:
            return False
        self.events += 1
        self.last_at = now
        return True

    def _plain(self, data: bytes, count: int) -> bool:
        """Whether so many events of text say nothing else: no usage, no reason to finish."""
        if b'"usage"' in data:
            return False
        more, reasons = self._unfinished, data.count(_REASON)
        return reasons == data.count(more) == count if more else not reasons

    def finish(self, now: float) -> bytes:
        """The answer ended cleanly; return what was held back."""
        rest = bytes(self._tail)
        self._tail.clear()
        kept = self._take(rest, now) if rest else b""
        held, self._held_usage = self._held_usage, b""
        return held + kept

    def thinking(self, completion: float) -> float | None:
        """How many of so many tokens were thinking, by the events; None where these do not tell: of
        several choices, or while a tag has not been closed (it may have come in pieces).
        """
        if self.thought is not None:
            return completion * self.thought / self.events
        if self._answer is None or self._closing is not None or not self.events:
            return None
        return completion if self._thinking else 0.0

    @property
    def complete(self) -> bool:
        """Whether the answer reached its end: `[DONE]`, or a reason to finish."""
        return self.done or bool(self._finished)

    def usage(self) -> Usage | None:
        """What the engine reported last, or None."""
        return usage_of(payload(self._usage_event)) if self._usage_event else None

    def _scan(self, data: bytes, now: float) -> bytes:
        tail = self._tail
        start = max(len(tail) - 3, 0)
        tail += data
        kept, at = [], 0
        for blank in _BLANK_LINE.finditer(tail, start):
            end = blank.end()
            kept.append(self._take(bytes(memoryview(tail)[at:end]), now))
            at = end
        if at:
            del tail[:at]
        if len(tail) > MAX_EVENT:
            raise BackendProtocolError(f"one event exceeds {MAX_EVENT} bytes")
        return b"".join(kept)

    def _take(self, event: bytes, now: float) -> bytes:
        """Classify one event; return the bytes that take its place."""
        text = self._content.any.search(event)
        if text is not None:
            self._count(event, now)
        if b"[DONE]" in event and payload(event) == b"[DONE]":
            self.done = True
            held, self._held_usage = self._held_usage, b""
            return held + event
        if _USAGE.search(event) is not None:
            self._usage_event = event
            if text is None and self._is_usage_only(event):
                self._held_usage = event if self._keep_usage else b""
                return b""
        if _FINISH.search(event) is not None and self._repeats_finish(event, text is not None):
            return b""
        if text is None and b'"error"' in event:
            self._note_error(event)
        if b"response." in event:
            self._note_end(event)
        return event

    def _count(self, event: bytes, now: float) -> None:
        if self._answer is not None and (self._thinking or self.first_at is None):
            self._part(self._answer, event, now)
        self.events += 1
        self.last_at = now
        if self.first_at is None:
            self.first_at = now
        if self._single:
            for needle in self._content.needles:
                if event.count(needle) - event.count(needle + b'"') == 1:
                    self._needle, self._empty = needle, needle + b'"'
                    self._unfinished = next((u for u in _UNFINISHED if u in event), b"")
                    return

    def _part(self, pattern: re.Pattern[bytes], event: bytes, now: float) -> None:
        """Tell thinking from answer, before the event is counted."""
        answer = pattern.search(event) is not None
        if self.first_at is None:
            if answer and OPENED.search(event) is not None:
                self._closing = CLOSING
            self._thinking = self._closing is not None or not answer
        if not self._thinking:
            return
        if self._closing is not None and self._closing in event:
            self.thought = self.events + 1  # the tag is the last of the thinking
        elif self._closing is None and answer:
            self.thought = self.events
        else:
            return
        self._thinking, self._closing, self.answer_at = False, None, now

    def _is_usage_only(self, event: bytes) -> bool:
        try:
            return _decode_chunk(payload(event)).choices == []
        except msgspec.DecodeError:
            return False

    def _repeats_finish(self, event: bytes, has_text: bool) -> bool:
        """Whether the event only ends choices that have ended before."""
        try:
            choices = _decode_chunk(payload(event)).choices or []
        except msgspec.DecodeError:
            return False
        ending = {choice.index for choice in choices if choice.finish_reason is not None}
        repeated = bool(ending) and len(ending) == len(choices) and ending <= self._finished
        self._finished |= ending
        return repeated and not has_text

    def _note_error(self, event: bytes) -> None:
        data = payload(event)
        try:
            body = msgspec.json.decode(data)
        except msgspec.DecodeError:
            return
        if isinstance(body, dict) and (body.get("error") or body.get("type") == "error"):
            self.error = data

    def _note_end(self, event: bytes) -> None:
        """Events that end a stream of the Responses endpoint, which knows no `[DONE]`."""
        if re.search(rb'"type"\s*:\s*"response\.(?:completed|incomplete|failed)"', event):
            self.done = True
