"""Cores in virtual time: N gateways' decision cores over one fleet of modelled replicas.

A discrete-event shell. Replicas are `backends.sim.replica` (continuous batching in closed form);
the store agrees with what all gateways together have booked, or refuses (DESIGN section 8); each
gateway sees readings as old as it is told, and the others' own counts every `push_every` seconds.
Clients may come back after `Retry-After`. Nothing here decides.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf
from pathlib import Path

import numpy as np
from numba import njit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backends.sim.replica import (
    FIRST_TOKEN,
    NONE,
    Ints,
    Physics,
    abort,
    enter,
    fire,
    idle,
    next_event,
    physics,
    plan,
    progress_into,
    set_job,
)
from domain.events import (
    Abort,
    Action,
    Arrived,
    AttemptEnded,
    Commit,
    Committed,
    Event,
    FirstToken,
    ForeignLoad,
    Progress,
    Reading,
    Send,
    Settle,
    Shed,
    Tick,
)
from domain.fleet import FleetSpec
from domain.outcome import Cause, Outcome, Usage, UsageSource
from domain.request import InferenceRequest
from policies.core import DecisionCore

LOOK_EVERY = 0.05
"""Seconds between two looks at the progress of running streams."""


@njit(cache=True, error_model="numpy")
def _step(ph: Physics, limit: float, kinds: Ints, jobs: Ints) -> tuple[float, int, int]:
    """Fire the next event of the fleet if it is due by `limit`: (time, replica, events)."""
    at, r = next_event(ph)
    if at > limit or r == NONE:
        return at, NONE, 0
    return at, r, fire(ph, r, kinds, jobs)


@njit(cache=True, error_model="numpy")
def _resume(ph: Physics, r: int, now: float) -> None:
    """Form the next stretch if the replica stands between two."""
    if idle(ph, r):
        plan(ph, r, now)


@njit(cache=True, error_model="numpy")
def _enter(ph: Physics, r: int, j: int, prompt: int, output: int, now: float, wait: bool) -> bool:
    """A new job reaches replica r; `wait`: the caller resumes the replica itself."""
    set_job(ph, j, prompt, output, NONE, 0, 0)
    if not enter(ph, r, j, now):
        return False
    if not wait and idle(ph, r):
        plan(ph, r, now)
    return True


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a client: when, through which gateway, and how many tokens the answer has.

    `patient`: refused, the client comes back once after `Retry-After` (whole seconds).
    """

    at: float
    request: InferenceRequest
    output: int
    gateway: int = 0
    patient: bool = False
    tries: int = 1


@dataclass(slots=True)
class Record:
    """What became of one call. `retry_after` in seconds, as the client saw it, where refused."""

    call: Call
    outcome: Outcome
    retry_after: int | None = None

    @property
    def refused(self) -> bool:
        """Whether it was never answered."""
        return self.outcome.cause is Cause.SHED


@dataclass(slots=True)
class _Job:
    gateway: int
    send: Send
    call: Call
    last: float | None = None


@dataclass(slots=True)
class VirtualTime:
    """Runs cores over one fleet; `run` gives a record per call, in order of their ends."""

    fleet: FleetSpec
    cores: Sequence[DecisionCore]
    capacity: int
    poll_every: float = 0.5
    metrics_delay: float = 0.1
    push_every: float = 0.05
    round_trip: float = 0.0
    watch: Callable[[float, int, Event, list[Action]], None] | None = None
    records: list[Record] = field(default_factory=list)
    now: float = 0.0
    _physics: Physics = field(init=False)
    _heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _jobs: dict[int, _Job] = field(default_factory=dict)
    _job_of: dict[tuple[int, str], int] = field(default_factory=dict)
    _calls: dict[str, Call] = field(default_factory=dict)
    _refused: dict[str, int | None] = field(default_factory=dict)
    _count: int = 0
    _number: int = 0
    _pending: int = 0
    _firing: int = NONE
    _looked: float = -inf

    def __post_init__(self) -> None:
        self._physics = physics(self.fleet.replicas, self.capacity)

    def run(self, calls: Sequence[Call]) -> list[Record]:
        """Let all calls happen and end."""
        most = 2 * max(r.profile.max_seqs for r in self.fleet.replicas) + 2
        kinds, jobs = np.zeros(most, np.int64), np.zeros(most, np.int64)
        for call in calls:
            self._pending += 1
            self._at(call.at, partial(self._arrive, call))
        self._at(0.0, self._poll)
        if len(self.cores) > 1:
            self._at(0.0, self._push)
        while self._pending:
            limit = self._heap[0][0] if self._heap else inf
            for core in self.cores:
                if core.wake_at is not None:
                    limit = min(limit, max(core.wake_at, self.now))
            at, r, n = _step(self._physics, limit, kinds, jobs)
            if r != NONE:
                self.now = max(self.now, at)
                self._firing = r
                for kind, job in zip(kinds[:n].tolist(), jobs[:n].tolist(), strict=True):
                    self._told(kind, job)
                self._firing = NONE
                _resume(self._physics, r, at)
                continue
            if limit == inf:
                raise RuntimeError(f"{self._pending} calls are open and nothing will happen")
            self.now = max(self.now, limit)
            while self._heap and self._heap[0][0] <= self.now:
                heapq.heappop(self._heap)[2]()
            for g, core in enumerate(self.cores):
                if core.wake_at is not None and core.wake_at <= self.now:
                    self._tell(g, Tick(self.now))
        return self.records

    # ---- what happens

    def _at(self, at: float, do: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._heap, (at, self._number, do))

    def _arrive(self, call: Call) -> None:
        self._calls[call.request.id] = call
        self._look()
        self._tell(call.gateway, Arrived(self.now, call.request))

    def _told(self, kind: int, number: int) -> None:
        job = self._jobs.get(number)
        if job is None:
            return
        send = job.send
        if kind == FIRST_TOKEN:
            self._tell(job.gateway, FirstToken(self.now, send.id, send.attempt))
            return
        del self._jobs[number]
        self._job_of.pop((job.gateway, send.id), None)
        usage = Usage(
            prompt=job.call.request.prompt_tokens,
            completion=job.call.output,
            source=UsageSource.ENGINE,
        )
        self._look()
        end = AttemptEnded(self.now, send.id, send.attempt, Cause.FINISHED, usage, self.now)
        self._tell(job.gateway, end)

    def _look(self) -> None:
        """Tell each core how far its streams are."""
        if self.now - self._looked < LOOK_EVERY:
            return
        self._looked = self.now
        n = len(self._jobs)
        if not n:
            return
        replicas, jobs, counts = (np.zeros(n, np.int64) for _ in range(3))
        n = progress_into(self._physics, self.now, replicas, jobs, counts)
        found: list[tuple[list[int], list[int], list[int]]] = [([], [], []) for _ in self.cores]
        for r, j, tokens in zip(
            replicas[:n].tolist(), jobs[:n].tolist(), counts[:n].tolist(), strict=True
        ):
            job = self._jobs.get(j)
            if job is not None:
                mine = found[job.gateway]
                mine[0].append(r)
                mine[1].append(job.send.slot)
                mine[2].append(tokens)
        for g, (r_, s_, t_) in enumerate(found):
            if r_:
                self._tell(g, Progress(self.now, tuple(r_), tuple(s_), tuple(t_)))

    def _poll(self) -> None:
        """Every replica's metrics are read now and known `metrics_delay` later."""
        measured = self.now
        state = self._physics.replica
        rows = [
            (
                float(x["n_decode"] + x["n_prefill"]),
                float(x["n_waiting"]),
                1.0 - float(x["free"]) / max(float(x["pages"]), 1.0),
            )
            for x in state
        ]

        def known() -> None:
            for r, (running, waiting, kv) in enumerate(rows):
                for g in range(len(self.cores)):
                    self._tell(g, Reading(self.now, r, measured, running, waiting, kv))

        self._at(measured + self.metrics_delay, known)
        self._at(measured + self.poll_every, self._poll)

    def _push(self) -> None:
        """Each gateway learns what the others have booked."""
        sums = [
            np.sum([getattr(c.columns, name) for c in self.cores], axis=0)
            for name in ("running", "kv_used", "backlog_tokens")
        ]
        for g, core in enumerate(self.cores):
            own = (core.columns.running, core.columns.kv_used, core.columns.backlog_tokens)
            rest = [tuple((s - o).tolist()) for s, o in zip(sums, own, strict=True)]
            self._tell(g, ForeignLoad(self.now, rest[0], rest[1], rest[2]))
        self._at(self.now + self.push_every, self._push)

    # ---- what the cores do

    def _tell(self, g: int, event: Event) -> None:
        actions = self.cores[g].handle(event)
        if self.watch is not None:
            self.watch(self.now, g, event, actions)
        for action in actions:
            match action:
                case Commit():
                    self._commit(g, action)
                case Send():
                    self._send(g, action)
                case Shed():
                    wait = action.retry_after
                    self._refused[action.id] = None if wait is None else max(1, ceil(wait))
                case Abort():
                    number = self._job_of.pop((g, action.id), None)
                    if number is not None:
                        del self._jobs[number]
                        abort(self._physics, number, self.now)
                case Settle():
                    self._settle(action)

    def _commit(self, g: int, commit: Commit) -> None:
        if self.round_trip > 0.0:
            self._at(self.now + self.round_trip, lambda: self._answer(g, commit))
        else:
            self._answer(g, commit)

    def _answer(self, g: int, commit: Commit) -> None:
        booked = commit.replica is None or self._has_room(commit)
        self._tell(g, Committed(self.now, commit.id, commit.attempt, booked=booked))

    def _has_room(self, commit: Commit) -> bool:
        """Whether all gateways' bookings together, this one included, fit the replica's window."""
        r, p = commit.replica, commit.prefill
        if len(self.cores) == 1 or r is None or p is None:
            return True
        columns = [core.columns for core in self.cores]
        c = columns[0]
        running = sum(x.running[r] for x in columns)
        if running > c.max_seqs[r]:
            return False
        if running > 1 and sum(x.kv_used[r] for x in columns) > c.kv_capacity[r]:
            return False
        backlog = sum(x.backlog_tokens[p] for x in columns)
        return bool(backlog <= commit.backlog or backlog * c.per_token[p] <= c.window[p])

    def _send(self, g: int, send: Send) -> None:
        call = self._calls[send.id]
        number = self._count
        self._count += 1
        wait = send.replica == self._firing
        prompt = max(int(call.request.prompt_tokens), 1)
        if _enter(self._physics, send.replica, number, prompt, call.output, self.now, wait):
            self._jobs[number] = _Job(g, send, call)
            self._job_of[g, send.id] = number
            return
        refused = AttemptEnded(self.now, send.id, send.attempt, Cause.REFUSED)
        self._at(self.now, lambda: self._tell(g, refused))

    def _settle(self, settle: Settle) -> None:
        call = self._calls.pop(settle.id)
        record = Record(call, settle.outcome, self._refused.pop(settle.id, None))
        self.records.append(record)
        if record.refused and call.patient and record.retry_after is not None and call.tries == 1:
            again = replace(call.request, id=f"{call.request.id}~", tie=call.request.tie ^ 1)
            at = self.now + record.retry_after
            retry = replace(call, at=at, request=again, tries=2)
            self._at(at, lambda: self._arrive(retry))
        else:
            self._pending -= 1
