"""Every event of the decision core in a file, so that a run can be lived through again.

A file is a header (what the core was built from) and frames, all length-prefixed msgpack:
[kind, event, digest of the actions it gave]. A fresh core built from the same header and fed the
same events gives the same actions; `replay` says where it does not.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, get_args

import msgspec

from domain.events import Action, Event

MAGIC = b"sluice-events-1\n"
_KINDS: tuple[type, ...] = get_args(Event)
_KIND_OF = {kind: i for i, kind in enumerate(_KINDS)}
_DECODERS: list[msgspec.msgpack.Decoder[Event]] = [msgspec.msgpack.Decoder(kind) for kind in _KINDS]
_FRAME = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw, bytes])
_ENCODER = msgspec.msgpack.Encoder()

BUFFER_BYTES = 1 << 16

_log = logging.getLogger(__name__)


def digest(actions: Sequence[Action]) -> bytes:
    """Eight bytes that stand for a list of actions."""
    data = _ENCODER.encode([[type(a).__name__, a] for a in actions])
    return hashlib.blake2b(data, digest_size=8).digest()


class EventLog:
    """Writes events and what they gave; a context manager. Buffered, so a crash may cut the end; a
    file that cannot be written ends too, and `append` does nothing from then on.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self._path = path
        self._header = header
        self._file: BinaryIO | None = None
        self._broken = False

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("wb", buffering=BUFFER_BYTES)
        header = _ENCODER.encode(self._header)
        self._file.write(MAGIC + len(header).to_bytes(4, "little") + header)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
            except OSError as exc:
                self._give_up(exc)

    def append(self, event: Event, actions: Sequence[Action]) -> None:
        """Write one event and the digest of the actions that it gave."""
        frame = _ENCODER.encode((_KIND_OF[type(event)], event, digest(actions)))
        if self._file is None:
            if self._broken:
                return
            raise ValueError("the event log is not open; enter it first")
        try:
            self._file.write(len(frame).to_bytes(4, "little") + frame)
        except OSError as exc:
            self._give_up(exc)

    def _give_up(self, why: OSError) -> None:
        """Requests go on without it: a log with a gap would be of no use."""
        _log.error("cannot write %s, which ends here: %s", self._path, why)
        self._broken = True
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class Frame:
    """One event and the digest of the actions that it gave."""

    event: Event
    digest: bytes


def read_header(path: Path) -> dict[str, Any]:
    """What the core of this log was built from. Raises: ValueError if it is no event log."""
    with path.open("rb") as file:
        return _header(file, path)


def read(path: Path) -> Iterator[Frame]:
    """The frames of a log, up to the first one that was cut short.

    Raises: ValueError if it is no event log.
    """
    with path.open("rb") as file:
        _header(file, path)
        while len(size := file.read(4)) == 4:
            length = int.from_bytes(size, "little")
            data = file.read(length)
            if len(data) < length:
                return
            kind, event, actions = _FRAME.decode(data)
            yield Frame(_DECODERS[kind].decode(event), actions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How a replay went: `differs_at` is the number of the first event whose actions differ."""

    events: int
    actions: int
    differs_at: int | None = None
    differing: Event | None = None


def replay(frames: Iterator[Frame], handle: Callable[[Event], list[Action]]) -> Replay:
    """Feed events to a fresh core; stop at the first whose actions differ."""
    count = given = 0
    for frame in frames:
        actions = handle(frame.event)
        given += len(actions)
        if digest(actions) != frame.digest:
            return Replay(events=count + 1, actions=given, differs_at=count, differing=frame.event)
        count += 1
    return Replay(events=count, actions=given)


def _header(file: BinaryIO, path: Path) -> dict[str, Any]:
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError(f"{path} is no event log of this version (expected {MAGIC!r})")
    size = int.from_bytes(file.read(4), "little")
    header: dict[str, Any] = msgspec.msgpack.decode(file.read(size))
    return header
