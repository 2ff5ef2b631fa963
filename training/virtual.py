"""The decision core in virtual time: a shell like the gateway's, around modelled replicas.

One loop over what happens next: a replica's event, a timer (a monitor's reading, a death, an
exchange between gateways), the core's own wake-up, an arrival; in that order at the same instant.
Token counts are pulled from the replicas before a decision when the last pull is older than 20 ms,
as the gateway pulls them from its meters (CORE section 3.3). The store agrees at once.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Protocol

import numpy as np

from backends.sim.actions import Costs, FleetActions, HandOver, Notice, Order, Stage
from backends.sim.fleet import FleetModel, Happening
from domain.events import (
    Abort,
    Action,
    Arrived,
    AttemptEnded,
    AvailabilityChanged,
    Commit,
    Committed,
    Event,
    FirstToken,
    FleetChanged,
    ForeignLoad,
    Progress,
    Reading,
    Send,
    Settle,
    Tick,
)
from domain.fleet import ReplicaSpec
from domain.outcome import Cause, Outcome, Usage, UsageSource
from domain.request import BLOCK_TOKENS, InferenceRequest
from policies.core import DecisionCore
from training.measures import ABSENT, MET, MISSED, OUT, Run
from training.scenario import Case
from training.traces import Floats, Trace

PULL = 0.02
"""Seconds after which token counts are pulled again before a decision."""
EXCHANGE = 0.05
"""Seconds between two pushes of a gateway's own counts to the others."""
SPARE_JOBS = 256

Listener = Callable[[Event, list[Action]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a controller sees of a fleet: descriptions and stages of its replicas, and by the first
    gateway's books streams (m,) on each and prompt tokens (m,) that wait there for their prefill.
    `held` prompt tokens wait at the gateways.
    """

    specs: Sequence[ReplicaSpec]
    stages: Sequence[Stage]
    running: Floats
    backlog: Floats
    held: float


class Controller(Protocol):
    """Changes a fleet while it serves: hears of arrivals, gives orders every `every` seconds."""

    every: float

    def arrived(self, now: float, request: InferenceRequest, expected: float | None) -> None:
        """A request came; `expected` output tokens, None where it was refused at once."""
        ...

    def orders(self, now: float, sight: Sight) -> Sequence[Order]:
        """What shall be done to the fleet now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What is done to the fleet while it serves: orders with their times, seconds on the trace's
    clock, a controller that gives more, what changes cost, and the replicas that are down at first.

    The job of a `HandOver` is the number of its request. Gateways hear of every change at once.
    """

    orders: tuple[tuple[float, Order], ...] = ()
    costs: Costs = field(default_factory=Costs)
    down: tuple[int, ...] = ()
    controller: Controller | None = None


class VirtualShell:
    """Drives one core per gateway through a case, and a script if there is one; `run` once."""

    def __init__(
        self,
        case: Case,
        cores: Sequence[DecisionCore],
        listener: Listener | None = None,
        script: Script | None = None,
    ) -> None:
        self._case = case
        self._trace = case.trace
        self._cores = list(cores)
        self._listener = listener
        n, trace = len(case.trace), case.trace
        spare = SPARE_JOBS + n // 4
        self._model = FleetModel(
            case.fleet.replicas,
            n + spare,
            blocks=trace.blocks if len(trace.blocks) else None,
            block_tokens=trace.block_tokens if len(trace.blocks) else BLOCK_TOKENS,
        )
        self._script = script
        self._actions: FleetActions | None = None
        if script is not None:
            self._actions = FleetActions(
                self._model, case.fleet.replicas, script.costs, down=script.down
            )
        self._believed = list(case.believed.replicas)
        self._profiles = [spec.profile for spec in case.fleet.replicas]
        self._spare = list(range(n + spare - 1, n - 1, -1))
        self._request_of = np.full(n + spare, -1, np.int64)
        self._slot_of = np.zeros(n + spare, np.int64)
        self._seat_of = np.zeros(n + spare, np.int64)
        self._job_of: dict[int, int] = {}
        self._attempt_of: dict[int, int] = {}
        self._first_seen: dict[int, bool] = {}
        self._timers: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._serial = 0
        self._pulled = [-inf] * len(self._cores)
        self._blocks = _PrefixBlocks(trace)
        self._followers: dict[int, list[int]] = {}
        self._open = 0
        self._decision_seconds = 0.0
        self.outcomes: list[Outcome | None] = [None] * n
        self.run_columns = {
            "sent": np.full(n, np.nan),
            "first": np.full(n, np.nan),
            "last": np.full(n, np.nan),
            "arrival": trace.arrival.copy(),
        }
        self._replica = np.zeros(n, np.int64)
        self._cached = np.zeros(n, np.int64)
        self._verdict = np.full(n, ABSENT, np.int8)

    @property
    def model(self) -> FleetModel:
        """The replicas."""
        return self._model

    @property
    def actions(self) -> FleetActions | None:
        """Where the replicas stand under the script."""
        return self._actions

    def run(self) -> Run:
        """Live through the case. Raises: RuntimeError if a request is left without an outcome,
        ValueError for an order that the replica's stage does not allow.
        """
        began = time.process_time()
        case, trace = self._case, self._trace
        arrivals = [(float(trace.arrival[i]), i) for i in np.flatnonzero(trace.roots).tolist()]
        for i in np.flatnonzero(~trace.roots).tolist():
            self._followers.setdefault(int(trace.follows[i]), []).append(i)
        heapq.heapify(arrivals)
        self._arrivals = arrivals
        self._monitor()
        for failure in case.scenario.failures:
            at = float(trace.arrival[0]) + failure.at * trace.duration
            self._at(at, self._death(failure.replica, failure.down, failure.noticed))
        if len(self._cores) > 1:
            self._at(0.0, self._exchange)
        self._begin_script()
        while True:
            at, r = self._model.next_at()
            wake = min((w for c in self._cores if (w := c.wake_at) is not None), default=inf)
            timer = self._timers[0][0] if self._timers else inf
            arrival = arrivals[0][0] if arrivals else inf
            if not arrivals and self._open == 0 and at == inf:
                break
            due = inf if self._actions is None else self._actions.due_at
            now = min(at, timer, wake, arrival, due)
            if at == now:
                for kind, job in self._model.happen(r):
                    self._happened(kind, job, at)
            elif timer == now:
                heapq.heappop(self._timers)[3](now)
            elif wake == now:
                for g in range(len(self._cores)):
                    self._tell(g, Tick(now))
            elif arrival == now:
                self._arrive(heapq.heappop(arrivals)[1], now)
            self._model.settle(now)
            if self._actions is not None:
                self._notify(self._actions.settle(now), now)
        left = [core for core in self._cores if core.open]
        if left or (self._verdict == ABSENT).sum() > (~trace.roots).sum():
            raise RuntimeError("requests were lost on the way")
        physics = self._model.physics.replica
        return Run(
            **self.run_columns,
            replica=self._replica,
            cached=self._cached,
            verdict=self._verdict,
            busy=physics["busy"].copy(),
            preemptions=int(physics["preemptions"].sum()),
            seconds=time.process_time() - began,
            decision_seconds=self._decision_seconds,
        )

    # ---- into the core

    def _tell(self, g: int, event: Event) -> None:
        """Hand an event to gateway g's core and carry out what follows."""
        core, now = self._cores[g], event.at
        if now - self._pulled[g] >= PULL and (core.queue or isinstance(event, Arrived)):
            self._pull(g, now)
        self._carry_out(g, event, now)

    def _handled(self, core: DecisionCore, event: Event) -> list[Action]:
        began = time.process_time()
        actions = core.handle(event)
        self._decision_seconds += time.process_time() - began
        if self._listener is not None:
            self._listener(event, actions)
        return actions

    def _carry_out(self, g: int, event: Event, now: float) -> None:
        core = self._cores[g]
        pending = [event]
        while pending:
            for action in self._handled(core, pending.pop(0)):
                match action:
                    case Commit():
                        pending.append(Committed(now, action.id, action.attempt))
                    case Send():
                        refused = self._send(action, now)
                        if refused is not None:
                            pending.append(refused)
                    case Abort():
                        self._model.abort(self._job_of[int(action.id)], now)
                    case Settle():
                        self._settle(action.outcome, now)
                    case _:
                        pass

    def _pull(self, g: int, now: float) -> None:
        self._pulled[g] = now
        _, jobs, counts = self._model.progress(now)
        if len(self._cores) > 1:
            mine = self._request_of[jobs] % len(self._cores) == g
            jobs, counts = jobs[mine], counts[mine]
        event = Progress(
            now,
            tuple(self._seat_of[jobs].tolist()),  # also where a stream was handed over
            tuple(self._slot_of[jobs].tolist()),
            tuple(counts.tolist()),
            tuple(self._model.began(now)[self._seat_of[jobs]].tolist()),
        )
        self._handled(self._cores[g], event)

    def _arrive(self, i: int, now: float) -> None:
        trace, case = self._trace, self._case
        self.run_columns["arrival"][i] = now
        self._open += 1
        request = InferenceRequest(
            id=str(i),
            tenant=trace.tenants[trace.tenant_id[i]],
            model=case.model,
            prompt_tokens=float(trace.prompt[i]),
            slo=case.slo(i),
            class_name=trace.classes[trace.class_id[i]],
            tie=tie(case.seed, i),
            session=str(trace.session[i]),
            blocks=self._blocks.of(i),
        )
        core = self._cores[i % len(self._cores)]
        self._tell(i % len(self._cores), Arrived(now, request))
        if self._script is not None and self._script.controller is not None:
            entry = core.open.get(request.id)
            expected = None if entry is None else entry.expected
            self._script.controller.arrived(now, request, expected)

    def _send(self, send: Send, now: float) -> AttemptEnded | None:
        """Put the attempt on its replica; what the core must hear if that refuses."""
        i = int(send.id)
        job = i if send.attempt == 1 else self._spare.pop()
        self._request_of[job], self._slot_of[job] = i, send.slot
        self._seat_of[job] = send.replica
        self._job_of[i], self._attempt_of[i] = job, send.attempt
        low, high = int(self._trace.block_start[i]), int(self._trace.block_start[i + 1])
        taken = self._model.put(
            job,
            int(self._trace.prompt[i]),
            int(self._trace.output[i]),
            send.replica,
            send.prefill,
            (low, high),
            now,
        )
        return None if taken else self._ended(i, now, Cause.REFUSED)

    # ---- out of the model

    def _happened(self, kind: Happening, job: int, now: float) -> None:
        i = int(self._request_of[job])
        if self._job_of.get(i) != job:
            return  # an attempt that nobody waits for
        g = i % len(self._cores)
        if kind is Happening.FIRST_TOKEN:
            self._first_seen[i] = True
            self._cached[i] = self._model.hits(job)
            self._tell(g, FirstToken(now, str(i), self._attempt_of[i]))
        elif kind is Happening.FINISHED:
            self._tell(g, self._ended(i, now, Cause.FINISHED))
        else:
            self._lost(i, now)

    def _lost(self, i: int, now: float) -> None:
        seen = self._first_seen.get(i, False)
        cause = Cause.INTERRUPTED if seen else Cause.REFUSED
        self._tell(i % len(self._cores), self._ended(i, now, cause))

    def _ended(self, i: int, now: float, cause: Cause) -> AttemptEnded:
        usage = Usage()
        if cause is Cause.FINISHED:
            usage = Usage(
                prompt=float(self._trace.prompt[i]),
                completion=float(self._trace.output[i]),
                cached=float(self._cached[i]),
                source=UsageSource.ENGINE,
            )
        last = now if cause is Cause.FINISHED else None
        return AttemptEnded(now, str(i), self._attempt_of[i], cause, usage, last)

    def _settle(self, outcome: Outcome, now: float) -> None:
        i = int(outcome.request.id)
        self.outcomes[i] = outcome
        self._open -= 1
        nan = float("nan")
        columns = self.run_columns
        columns["sent"][i] = nan if outcome.sent is None else outcome.sent
        columns["first"][i] = nan if outcome.first_token is None else outcome.first_token
        finished = outcome.cause is Cause.FINISHED
        columns["last"][i] = (
            nan if outcome.last_token is None or not finished else outcome.last_token
        )
        self._replica[i] = 0 if outcome.replica is None else outcome.replica
        self._verdict[i] = OUT if outcome.met is None else (MET if outcome.met else MISSED)
        for j in self._followers.pop(i, []):
            if finished:
                heapq.heappush(self._arrivals, (now + float(self._trace.think[j]), j))
        self._job_of.pop(i, None)

    # ---- timers

    def _at(self, at: float, act: Callable[[float], None]) -> None:
        self._serial += 1
        heapq.heappush(self._timers, (at, 0, self._serial, act))

    def _monitor(self) -> None:
        """Every replica is read every so often, staggered; the gateways hear of it later."""
        metrics, m = self._case.scenario.metrics, len(self._case.fleet.replicas)
        for r in range(m):
            self._at(metrics.every * r / m, self._read(r))

    def _read(self, r: int) -> Callable[[float], None]:
        metrics = self._case.scenario.metrics

        def read(now: float) -> None:
            running, waiting, share = self._model.reading(r, now)
            self._at(now + metrics.delay, told(now, running, waiting, share))
            self._at(now + metrics.every, read)

        def told(
            measured: float, running: float, waiting: float, share: float
        ) -> Callable[[float], None]:
            def tell(now: float) -> None:
                for g in range(len(self._cores)):
                    self._tell(g, Reading(now, r, measured, running, waiting, share))

            return tell

        return read

    # ---- changes of the fleet

    def _begin_script(self) -> None:
        if self._script is None:
            return
        for r in self._script.down:
            for g in range(len(self._cores)):
                self._tell(g, AvailabilityChanged(0.0, r, usable=False))
        for at, order in self._script.orders:
            self._at(at, self._ordered(order))
        if self._script.controller is not None:
            self._at(self._script.controller.every, self._control)

    def _control(self, now: float) -> None:
        """Let the controller look, and carry out what it orders."""
        assert self._actions is not None
        assert self._script is not None
        controller = self._script.controller
        assert controller is not None
        columns, actions = self._cores[0].columns, self._actions
        waiting = [e for core in self._cores for e in core.queue.oldest(len(core.queue))]
        sight = Sight(
            specs=[actions.spec(r) for r in range(len(self._believed))],
            stages=[actions.stage(r) for r in range(len(self._believed))],
            running=columns.running.copy(),
            backlog=columns.backlog_tokens.copy(),
            held=sum(entry.prompt for entry in waiting),
        )
        for order in controller.orders(now, sight):
            self._notify(actions.order(order, now), now)
        self._at(now + controller.every, self._control)

    def _ordered(self, order: Order) -> Callable[[float], None]:
        def give(now: float) -> None:
            assert self._actions is not None
            given = order
            if isinstance(given, HandOver):
                if given.job not in self._job_of:
                    raise ValueError(f"request {given.job} is not on its way at {now:g} s")
                given = replace(given, job=self._job_of[given.job])
            self._notify(self._actions.order(given, now), now)

        return give

    def _notify(self, notices: Sequence[Notice], now: float) -> None:
        """Tell every gateway what became of replicas. Of one that is the same engine as before it
        believes the same constants; a new one it knows as it is.
        """
        for notice in notices:
            r, was = notice.replica, self._believed[notice.replica]
            same = notice.spec.profile == self._profiles[r]
            believed = replace(notice.spec, profile=was.profile if same else notice.spec.profile)
            self._profiles[r] = notice.spec.profile
            changed, self._believed[r] = believed != was, believed
            fleet = replace(self._case.believed, replicas=tuple(self._believed))
            for g in range(len(self._cores)):
                if changed:
                    self._tell(g, FleetChanged(now, fleet))
                self._tell(g, AvailabilityChanged(now, r, notice.usable))

    def _death(self, r: int, down: float, noticed: float) -> Callable[[float], None]:
        def serves() -> bool:
            return self._actions is None or self._actions.stage(r) is Stage.SERVING

        def usable(flag: bool) -> Callable[[float], None]:
            def tell(now: float) -> None:
                for g in range(len(self._cores)):
                    if serves() or not flag:
                        self._tell(g, AvailabilityChanged(now, r, flag))

            return tell

        def revive(_now: float) -> None:
            if serves():
                self._model.revive(r)

        def die(now: float) -> None:
            for job in self._model.kill(r, now):
                i = int(self._request_of[job])
                if self._job_of.get(i) == job:
                    self._lost(i, now)
            self._at(now + noticed, usable(flag=False))
            self._at(now + down, revive)
            self._at(now + down + noticed, usable(flag=True))

        return die

    def _exchange(self, now: float) -> None:
        """Every gateway hears what the others have booked."""
        columns: list[Any] = [core.columns for core in self._cores]
        for g in range(len(self._cores)):
            others = [c for k, c in enumerate(columns) if k != g]
            self._tell(
                g,
                ForeignLoad(
                    now,
                    tuple(sum(c.running for c in others).tolist()),
                    tuple(sum(c.kv_used for c in others).tolist()),
                    tuple(sum(c.backlog_tokens for c in others).tolist()),
                ),
            )
        self._at(now + EXCHANGE, self._exchange)


def tie(seed: int, i: int) -> int:
    """A 31-bit hash of a request, the same wherever the case is run."""
    return (i * 2654435761 + seed * 40503 + 12345) % (1 << 31)


class _PrefixBlocks:
    """Block hashes of `BLOCK_TOKENS` tokens as the gateway would compute them, from the blocks of a
    trace, which may be larger or smaller.

    Raises: ValueError where neither size divides the other.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        size = trace.block_tokens
        self._split = self._join = 1
        if not len(trace.blocks):
            return
        if size % BLOCK_TOKENS == 0:
            self._split = int(size) // BLOCK_TOKENS
        elif BLOCK_TOKENS % size == 0:
            self._join = int(BLOCK_TOKENS / size)
        else:
            raise ValueError(f"blocks of {size:g} tokens do not fit ones of {BLOCK_TOKENS}")

    def of(self, i: int) -> tuple[int, ...]:
        """Whole blocks of request i's prompt."""
        mine = self._trace.blocks_of(i)
        if not len(mine):
            return ()
        whole = int(self._trace.prompt[i]) // BLOCK_TOKENS
        if self._split > 1:
            fine = mine[:, None] * self._split + np.arange(self._split)
            return tuple(fine.ravel()[:whole].tolist())
        return tuple(mine[self._join - 1 :: self._join][:whole].tolist())
