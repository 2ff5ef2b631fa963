"""The decision log: one JSON line a settled request, rotating, never in the loop's way.

Records are kept as values, encoded in batches, and written by a thread of their own. When the disk
is slower than the traffic, whole batches are dropped and counted rather than kept without bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import orjson

Record = dict[str, Any]

FLUSH_EVERY = 0.1
"""Seconds a record may stay in memory."""
PENDING_BATCHES = 64
"""Batches the writer may be behind before new ones are dropped."""

_log = logging.getLogger(__name__)


class DecisionLog:
    """Async context manager over a rotating JSONL file; `path` None keeps only the recent ones.

    `readers` are shown every record. `append` takes a function that makes the record, so that the
    work happens off the critical path. Files rotate at `max_bytes` to `path.1`, `path.2`, ... up to
    `keep`.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        max_bytes: int = 64 << 20,
        keep: int = 4,
        recent: int = 256,
    ) -> None:
        self.path = path
        self.dropped = 0
        self.written = 0
        self._max_bytes = max_bytes
        self._keep = keep
        self._waiting: list[Callable[[], Record]] = []
        self._recent: deque[Record] = deque(maxlen=recent)
        self.readers: list[Callable[[Record], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._batches: queue.Queue[tuple[bytes, int] | None] = queue.Queue(PENDING_BATCHES)
        self._writer: threading.Thread | None = None

    async def __aenter__(self) -> Self:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = threading.Thread(
                target=self._write, args=(self.path,), name="decision-log", daemon=True
            )
            self._writer.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._flush()
        if self._writer is not None:
            writer = self._writer
            await asyncio.to_thread(self._batches.put, None)
            await asyncio.to_thread(writer.join)

    def append(self, make: Callable[[], Record]) -> None:
        """Log the record that `make` returns, within `FLUSH_EVERY` seconds."""
        self._waiting.append(make)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_EVERY, self._flush)

    def recent(self) -> list[Record]:
        """The latest records, newest first."""
        self._take()
        return list(reversed(self._recent))

    def find(self, request_id: str) -> Record | None:
        """The latest record of this request, if it is still in memory."""
        return next((r for r in self.recent() if r["id"] == request_id), None)

    def _take(self) -> list[Record]:
        waiting, self._waiting = self._waiting, []
        records = []
        for make in waiting:
            try:
                records.append(make())
            except Exception:  # noqa: BLE001 - outermost of a background job: one bad record is one line
                self.dropped += 1
                _log.exception("a decision record could not be made")
        self._recent.extend(r for r in records if "feedback_to" not in r)
        for read in self.readers:
            for record in records:
                read(record)
        if self._writer is not None and records:
            lines = b"".join(
                orjson.dumps(r, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
                for r in records
            )
            try:
                self._batches.put_nowait((lines, len(records)))
            except queue.Full:
                self.dropped += len(records)
        return records

    def _flush(self) -> None:
        self._timer = None
        self._take()

    def _write(self, path: Path) -> None:
        """The writer thread: append batches, rotate, until it is told to stop."""
        file: BinaryIO | None = None
        while (batch := self._batches.get()) is not None:
            lines, count = batch
            try:
                if file is None:
                    file = path.open("ab")
                if file.tell() and file.tell() + len(lines) > self._max_bytes:
                    file.close()
                    file = None
                    rotate(path, self._keep)
                    file = path.open("ab")
                file.write(lines)
                file.flush()
                self.written += count
            except OSError:
                self.dropped += count
                _log.exception("cannot write %s; %d records lost", path, count)
        if file is not None:
            with contextlib.suppress(OSError):  # what could not be written was counted
                file.close()


def rotate(path: Path, keep: int) -> None:
    """Move `path` to `path.1`, `path.1` to `path.2` and so on; the one after `keep` is lost."""
    for i in range(keep, 0, -1):
        source = path if i == 1 else numbered(path, i - 1)
        if source.exists():
            source.replace(numbered(path, i))


def numbered(path: Path, i: int) -> Path:
    """The i-th rotated file of `path`."""
    return path.with_name(f"{path.name}.{i}")


def worker_path(path: Path, worker: str) -> Path:
    """Where a worker process of that name writes its part of a log."""
    return path.with_name(f"{path.stem}.worker-{worker}{path.suffix}")


def log_files(path: Path) -> Iterator[Path]:
    """The files of a log that exist, those of its workers included; of each, newest first."""
    workers = path.parent.glob(worker_path(path, "*").name)
    for newest in (path, *sorted(workers)):
        if newest.exists():
            yield newest
        i = 1
        while (older := numbered(newest, i)).exists():
            yield older
            i += 1


def search(path: Path, request_id: str) -> Record | None:
    """The latest record of a request in a log and its rotated files, or None.

    Raises: OSError where a file cannot be read.
    """
    wanted = orjson.dumps(request_id)
    for file in log_files(path):
        found = None
        with file.open("rb") as lines:
            for line in lines:
                if wanted in line:
                    record = _parse(line)
                    if record is not None and record.get("id") == request_id:
                        found = record
        if found is not None:
            return found
    return None


def _parse(line: bytes) -> Record | None:
    """A line as a record; None for one cut short by a crash."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
