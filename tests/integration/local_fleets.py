"""A local fleet on an event loop of its own, for tests that look at it from outside."""

import asyncio
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from backends.local import LocalFleet, LocalReplica, Patience, ReplicaChange, ReplicaState


@dataclass(frozen=True, slots=True)
class RunningFleet:
    """What a test needs of a fleet that lives in another thread."""

    fleet: LocalFleet
    urls: dict[str, str]
    changes: queue.Queue[ReplicaChange] = field(default_factory=queue.Queue)

    def wait_for(self, name: str, state: ReplicaState, seconds: float = 60.0) -> ReplicaChange:
        """Block until the replica reports this state; raises queue.Empty if it does not."""
        while True:
            change = self.changes.get(timeout=seconds)
            if (change.name, change.state) == (name, state):
                return change


@contextmanager
def running(
    replicas: Sequence[LocalReplica], cache: Path, patience: Patience | None = None
) -> Iterator[RunningFleet]:
    """Enter a fleet in a thread, leave it after the block; start-up errors come out here."""
    changes: queue.Queue[ReplicaChange] = queue.Queue()
    started: queue.Queue[RunningFleet | BaseException] = queue.Queue()
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def live() -> None:
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        async with LocalFleet(replicas, cache, on_change=changes.put, patience=patience) as fleet:
            started.put(RunningFleet(fleet, dict(fleet.urls), changes))
            await stop.wait()

    def run() -> None:
        try:
            asyncio.run(live())
        except BaseException as error:  # noqa: BLE001  handed to the test's thread
            started.put(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        first = started.get(timeout=240)
        if isinstance(first, BaseException):
            raise first
        yield first
    finally:
        loop, stop = loops[0]
        if thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=30)
        assert not thread.is_alive()
