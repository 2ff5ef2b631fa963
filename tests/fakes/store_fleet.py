"""Several scripted gateway processes against one real store, and what their stories add up to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.fakes.scripted_gateway import Plan, Story

ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class Run:
    """What all gateways of a run did. A gateway that was killed has left nothing."""

    gateways: list[dict[str, Any]]
    stories: list[Story]

    @property
    def started(self) -> float:
        """Wall time at which the last gateway began."""
        return max(g["started"] for g in self.gateways)

    @property
    def admitted(self) -> list[Story]:
        """Requests that were sent, in order."""
        return sorted(
            (s for s in self.stories if s.admitted is not None), key=lambda s: s.admitted or 0.0
        )

    @property
    def refused(self) -> list[Story]:
        """Requests that were not."""
        return [s for s in self.stories if s.reason is not None]


def run_gateways(
    plans: Sequence[Plan], meanwhile: Callable[[list[int]], None] | None = None
) -> Run:
    """Run one process per plan, all from the same moment; `meanwhile` gets their process ids and
    runs beside them. Raises RuntimeError when one that was not killed gives no result.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.scripted_gateway", json.dumps(asdict(plan))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for plan in plans
    ]
    try:
        for process in processes:
            if _line(process) != "ready\n":
                raise RuntimeError("a gateway did not start")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        beside = threading.Thread(
            target=meanwhile or (lambda _: None), args=([p.pid for p in processes],)
        )
        beside.start()
        lines = [_line(process) for process in processes]
        beside.join()
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
    results = [json.loads(line) for line in lines if line]
    if not results:
        raise RuntimeError("no gateway gave a result")
    return Run(results, [Story(**s) for r in results for s in r.pop("stories")])


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def most_in_window(times: Sequence[float], length: float = 60.0) -> int:
    """The largest number of times within any window of that length; `times` sorted."""
    most, first = 0, 0
    for last, at in enumerate(times):
        while times[first] <= at - length:
            first += 1
        most = max(most, last - first + 1)
    return most


def worst_token_excess(run: Run, burst: float, rate: float) -> float:
    """The largest excess, over all times, of tokens used by what was admitted until then over
    burst + rate x time + what was under-reserved (which is repaid afterwards).
    """
    used = under = 0.0
    worst = -burst
    for story in run.admitted:
        assert story.admitted is not None
        if story.admitted < run.started:
            continue  # what warmed up the gateways was refilled before the clock started
        used += story.used
        under += max(story.used - story.reserved, 0.0)
        elapsed = max(story.admitted - run.started, 0.0)
        worst = max(worst, used - (burst + rate * elapsed + under))
    return worst


def most_at_once(run: Run) -> dict[int, int]:
    """For each replica, the most requests of all gateways that it held at one time."""
    edges = sorted(
        edge
        for s in run.admitted
        if s.replica is not None and s.admitted is not None and s.ended is not None
        for edge in ((s.admitted, 1, s.replica), (s.ended, -1, s.replica))
    )
    now: dict[int, int] = {}
    most: dict[int, int] = {}
    for _, step, replica in edges:
        now[replica] = now.get(replica, 0) + step
        most[replica] = max(most.get(replica, 0), now[replica])
    return most


def sleep_until(at: float) -> None:
    """Wait for a wall time; part of a schedule, never a synchronisation."""
    time.sleep(max(at - time.time(), 0.0))
