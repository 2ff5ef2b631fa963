"""asyncio around the decision core: what happens becomes events, what it decides is done.

    relay, monitor, timers --event--> core --actions--> relays, store, log

The core has no clock and no I/O, so everything it may react to goes through `_feed`, in one order:
the event log is that order. Calls that actions cause (a store that answers at once, a relay that
fails at once) are queued behind the event that is being handled, never nested in it.

What a request costs here: two dictionary entries, one context object, the events; no task. Progress
of running streams is pulled from the relays' meters, all at once, and only when a decision is near
and the last look is older than `FRESH` (CORE section 3.3).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from backends.adapters.table import Adapter, Load
from backends.breaker import Breaker, Result, State
from backends.upstream import Timeouts, UpstreamPool
from domain.columns import LOAD_GRID, FleetColumns
from domain.errors import BackendError, NoReplica, ServingError
from domain.events import (
    Abort,
    Action,
    AnswerBegan,
    Arrived,
    AttemptEnded,
    AvailabilityChanged,
    Candidate,
    ClientGone,
    Commit,
    Committed,
    ConfigReloaded,
    Draining,
    Event,
    FeedbackGiven,
    FirstToken,
    FleetChanged,
    ForeignLoad,
    Hold,
    ModelSwapped,
    PolicyChanged,
    Progress,
    Reading,
    Reason,
    RolledBack,
    ScorerLate,
    Send,
    Settle,
    Shed,
    Tick,
    TrialChanged,
)
from domain.fleet import FleetSpec
from domain.outcome import Cause, Outcome, Usage, UsageSource
from domain.ports import Scorer, Store
from domain.records import decision_record, feedback_record
from domain.request import InferenceRequest, QuotaUsage, Tenant
from gateway.decision_log import DecisionLog, Record
from gateway.error_map import refusal
from gateway.event_log import EventLog
from gateway.feedback import AnsweredRequests
from gateway.intake import PASSED_ON, Intake, ignored_limits
from gateway.limit_headers import limit_headers
from gateway.metrics import Gauge, Metrics
from gateway.relay import AttemptReport, Relay
from gateway.store.memory import MemoryStore
from policies.bucket import Account
from policies.rollout import GuardTally, Trial, TrialStatus, status_of
from predictors import latency
from predictors.features import SCHEMA_HASH

FRESH = 0.02
"""Seconds for which a look at the streams' progress is good enough for a decision."""
LATE = 0.05
"""Seconds that one event may take in the core before the fallback takes over."""
EARLIEST_WAKE = 0.001
"""Seconds between two ticks at least, so that a clock's rounding never makes a busy loop."""

NOT_IMPLEMENTED = 501
"""What engines answer to a kind of request that they do not serve."""

DEGRADED = b"x-sluice-degraded: store\r\n"
"""Header of answers that were admitted on the local share."""

_MEDIAN = len(LOAD_GRID) // 2
_log = logging.getLogger(__name__)


class Core(Protocol):
    """What the shell asks of `policies.core.DecisionCore`."""

    @property
    def fleet(self) -> FleetSpec:
        """The fleet in force; replicas that left keep their index."""

    @property
    def columns(self) -> FleetColumns:
        """This gateway's own ledger."""

    @property
    def wake_at(self) -> float | None:
        """When time alone will change something."""

    def handle(self, event: Event) -> list[Action]:
        """Take one event in; what is to be done."""

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names of the tenants in force."""

    def account(self, tenant: str) -> Account | None:
        """A tenant's quotas, to look at."""

    @property
    def scorer(self) -> Scorer:
        """The policy in force."""

    @property
    def trial(self) -> Trial | None:
        """What is tried beside it."""

    @property
    def guarded(self) -> GuardTally | None:
        """Requests that the fallback decided for a learned one."""


LearnTokens = Callable[[str, int, float], None]
"""An engine counted prompt tokens: model, characters, tokens."""


@dataclass(slots=True)
class Seat:
    """One replica as the shell sees it: how to reach it, and whether to."""

    name: str
    model: str
    """The engine's own name for what it serves."""
    pool: UpstreamPool
    breaker: Breaker
    ask_usage: bool = True
    salt_field: str | None = None
    """What the engine calls a cache salt; None: it knows none, or has not said what it is."""
    healthy: bool = True
    drained: bool = False
    removed: bool = False
    """The config names it no more; it keeps its place until the process ends."""
    told_usable: bool = True
    running: int = 0
    load: Load = field(default_factory=Load)
    measured_at: float | None = None

    @property
    def usable(self) -> bool:
        """Whether a request may be sent."""
        serving = not (self.drained or self.removed)
        return self.healthy and serving and self.breaker.admits()

    @property
    def why(self) -> str:
        """Why it is not usable."""
        if self.removed:
            return "removed"
        if self.drained:
            return "drained"
        return self.breaker.state.value if self.healthy else "unhealthy"


@dataclass(slots=True)
class Pending:
    """One open request: the relay's context."""

    request: InferenceRequest
    relay: Relay
    send: Send | None = None
    candidates: tuple[Candidate, ...] = ()
    shadow: Candidate | None = None
    error: BackendError | None = None
    held: bool = False
    answering: int = 0
    """The attempt whose thinking the core knows to be over."""
    doubted: list[int] = field(default_factory=list)
    """Replicas that answered it with a 5xx; whose fault that is shows elsewhere."""


class UsageReport(NamedTuple):
    """What the meters have counted, by tenant and meter. `shared`: by all gateways together."""

    shared: bool
    tenants: Mapping[str, Mapping[str, QuotaUsage]]


class Shell:
    """Runs one core on one event loop. `fleet` and `seats` have the same order.

    Implements `gateway.relay.Dispatcher`. `late` is the budget of a decision in seconds.
    """

    def __init__(
        self,
        *,
        core: Core,
        fleet: FleetSpec,
        seats: Sequence[Seat],
        routes: tuple[str, ...],
        intake: Intake,
        timeouts: Timeouts,
        log: DecisionLog,
        metrics: Metrics,
        learn_tokens: LearnTokens,
        event_log: EventLog | None = None,
        late: float = LATE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._store: Store = MemoryStore()
        self._degraded = False
        self._seats = list(seats)
        self._take_fleet(fleet, routes)
        self._intake = intake
        self._timeouts = timeouts
        self._log = log
        self._metrics = metrics
        self._learn_tokens = learn_tokens
        self._event_log = event_log
        self._late = late
        self._clock = clock
        self._wall_offset = time.time() - clock()
        self._doers: dict[type[Action], Callable[[Any], None]] = {
            Commit: self._commit,
            Send: self._send,
            Hold: self._hold,
            Shed: self._refuse,
            Abort: self._abort,
            Settle: self._settle,
            RolledBack: self._rolled_back,
        }
        self.rolled_back: Callable[[RolledBack], None] = _say_rolled_back
        """What is done when a trial has ended by itself; replaced by whoever keeps the registry."""
        self.rollbacks = 0
        self._inbox: deque[Event] = deque()
        self._busy = False
        self._open: dict[str, Pending] = {}
        self.answered = AnsweredRequests()
        self._looked_at = 0.0
        self._last = clock()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._reopens = float("inf")
        """When a breaker that is open lets the next request in."""
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False
        metrics.gauges.extend(self._gauges())

    # ---- what people look at

    @property
    def open_requests(self) -> int:
        """Requests that are not settled."""
        return len(self._open)

    @property
    def queued(self) -> int:
        """Open requests that are at no replica."""
        return sum(1 for p in self._open.values() if p.send is None)

    @property
    def intake(self) -> Intake:
        """How requests are read."""
        return self._intake

    @property
    def store(self) -> Store:
        """Whom reservations and bookings are agreed with."""
        return self._store

    @property
    def seats(self) -> Sequence[Seat]:
        """The replicas, in the fleet's order."""
        return self._seats

    @property
    def fleet(self) -> FleetSpec:
        """The fleet that is served."""
        return self._fleet

    @property
    def replicas(self) -> tuple[str, ...]:
        """Names of the replicas, in the fleet's order."""
        return self._replicas

    @property
    def ready(self) -> bool:
        """Whether a request would be served now."""
        return not self.draining and any(seat.usable for seat in self._seats)

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names of the tenants in force."""
        return self._core.tenants

    async def usage(self, tenants: Sequence[str]) -> UsageReport:
        """What is counted of these tenants: by the store for all gateways, else in this process;
        tenants without an account are left out.
        """
        shared = await self._store.usage(tenants)
        if shared is not None:
            return UsageReport(shared=True, tenants=shared)
        now = self._at(self._clock())
        accounts = {name: self._core.account(name) for name in tenants}
        own = {name: account.usage(now) for name, account in accounts.items() if account}
        return UsageReport(shared=False, tenants=own)

    def open_records(self) -> Iterator[Mapping[str, object]]:
        """What is open now, oldest first, for people."""
        now = self._clock()
        for pending in self._open.values():
            send = pending.send
            yield {
                "id": pending.request.id,
                "tenant": pending.request.tenant,
                "class": pending.request.class_name,
                "model": pending.request.model,
                "age": now - pending.relay.request.received_at,
                "replica": None if send is None else self._replicas[send.replica],
                "tokens": 0 if send is None else pending.relay.tokens(send.attempt),
            }

    # ---- Dispatcher: called by relays

    def open(self, relay: Relay) -> None:
        """A complete request."""
        request_id = self._intake.new_id()
        relay.early_headers = relay.error_headers = b"x-request-id: %b\r\n" % request_id.encode()
        try:
            request = self._intake.read(relay, request_id)
        except ServingError as error:
            self._metrics.refused(type(error).__name__)
            relay.fail(error)
            return
        pending = Pending(request, relay)
        relay.context = pending
        self._open[request.id] = pending
        self._empty.clear()
        self._feed(Arrived(self._at(relay.request.received_at), request))

    def first_token(self, relay: Relay, attempt: int, at: float) -> None:
        """The first content of an attempt."""
        self._feed(FirstToken(self._at(at), _pending(relay).request.id, attempt))

    def ended(self, relay: Relay, report: AttemptReport) -> None:
        """An attempt is over."""
        pending = _pending(relay)
        pending.error = report.error
        cause = report.cause
        if not report.retryable and cause in {Cause.REFUSED, Cause.TIMEOUT}:
            # Bytes have gone out, though perhaps no token: the core must not send it again.
            cause = Cause.INTERRUPTED
        send = pending.send
        if send is not None and send.attempt == report.attempt:
            self._left(pending, send, self._judge(pending, send, cause, report))
            self._metrics.attempts.add((self._replicas[send.replica], report.cause.value))
        self._feed(
            AttemptEnded(
                self._at(report.at),
                pending.request.id,
                report.attempt,
                cause,
                report.usage,
                report.last_token,
                "" if report.error is None else report.error.detail,
            )
        )

    def superseded(self, relay: Relay, attempt: int, usage: Usage) -> None:
        """Another attempt answers; this one is over without fault."""
        self._feed(
            AttemptEnded(
                self._at(self._clock()),
                _pending(relay).request.id,
                attempt,
                Cause.CLIENT_GONE,
                usage,
            )
        )

    def client_gone(self, relay: Relay, usage: Usage) -> None:
        """The client left."""
        if relay.context is None:
            return
        pending = _pending(relay)
        send = pending.send
        if send is not None:
            self._left(pending, send, _verdict(Cause.CLIENT_GONE, usage))
            self._metrics.attempts.add((self._replicas[send.replica], Cause.CLIENT_GONE.value))
        self._feed(ClientGone(self._at(self._clock()), pending.request.id, usage))

    # ---- called by the monitor and the administrator

    def reading(self, replica: int, load: Load, measured_at: float) -> None:
        """A replica told its load, which it had at `measured_at`."""
        seat = self._seats[replica]
        seat.load, seat.measured_at = load, measured_at
        self._feed(
            Reading(
                self._at(self._clock()),
                replica,
                measured_at,
                running=load.running,
                waiting=load.waiting,
                kv_used=load.kv_used,
            )
        )

    def feedback(self, request_id: str, tenant: str, score: float) -> str:
        """A tenant has judged the answer to its request, 0 (bad) to 1 (good); the variant that
        gave it.

        Raises: UnknownRequest, FeedbackRepeated.
        """
        variant = self.answered.judge(request_id, tenant)
        at = self._at(self._clock())
        self._feed(FeedbackGiven(at, request_id, variant, score))
        self._metrics.feedback.add((variant,))
        self._log.append(
            lambda: feedback_record(request_id, tenant, variant, score, at + self._wall_offset)
        )
        return variant

    def recognised(self, replica: int, adapter: Adapter) -> None:
        """A replica that joined late has said which engine it is."""
        self._seats[replica].salt_field = adapter.cache_salt

    def health(self, replica: int, *, ok: bool) -> None:
        """A replica's health check passed or failed."""
        self._seats[replica].healthy = ok
        self._check(replica)

    def drain_replica(self, replica: int, *, drained: bool) -> None:
        """Send nothing new to a replica, or send again."""
        self._seats[replica].drained = drained
        self._check(replica)

    def reload(
        self,
        *,
        fleet: FleetSpec,
        seats: Sequence[Seat],
        route_names: Callable[[FleetSpec], tuple[str, ...]],
        intake: Intake,
        tenants: Sequence[Tenant],
        timeouts: Timeouts,
        policy: str | None,
    ) -> None:
        """Take another config (DESIGN section 10): `fleet` as it is now wanted, `seats` of replicas
        that were not there before, in the fleet's order, `policy` where it is another.

        Replicas that are not wanted any more drain; they keep their index. Waiting requests are
        checked again, bucket levels stay, a bad part has been refused before this is called.
        """
        self._intake, self._timeouts = intake, timeouts
        now = self._at(self._clock())
        if policy is not None:
            self._feed(PolicyChanged(now, policy))
        wanted = {r.name for r in fleet.replicas}
        for seat in self._seats:
            seat.removed = seat.name not in wanted
            if seat.removed:
                seat.told_usable = False  # `FleetChanged` says so
        self._seats.extend(seats)
        self._feed(FleetChanged(now, fleet))
        self._take_fleet(self._core.fleet, route_names(self._core.fleet))
        classes = tuple(intake.classes.values())
        self._feed(ConfigReloaded(now, tuple(tenants), classes))
        for i in range(len(self._seats)):
            self._check(i)

    def change_policy(self, policy: str) -> None:
        """Let another policy, as JSON, decide from now on; its kernels have been warmed."""
        self._feed(PolicyChanged(self._at(self._clock()), policy))

    def change_trial(self, plan: str) -> None:
        """Try another policy beside the active one, as JSON; empty: none any more."""
        self._feed(TrialChanged(self._at(self._clock()), plan))

    @property
    def trial(self) -> TrialStatus | None:
        """How what is tried beside the active policy stands."""
        trial = self._core.trial
        return None if trial is None else status_of(trial)

    @property
    def policy(self) -> tuple[str, str]:
        """Name and version of the policy in force."""
        return self._core.scorer.name, self._core.scorer.version

    def _rolled_back(self, action: RolledBack) -> None:
        self.rollbacks += 1
        self.rolled_back(action)

    def _take_fleet(self, fleet: FleetSpec, routes: tuple[str, ...]) -> None:
        """Names and headers of a fleet."""
        self._fleet, self._routes = fleet, routes
        self._replicas = tuple(r.name for r in fleet.replicas)
        self._kinds = tuple(latency.class_of(r.profile) for r in fleet.replicas)
        self._variants = tuple(v.name for v in fleet.variants)
        self._variant_of = {r.name: fleet.variant(r.variant) for r in fleet.replicas}
        self._headers = [_name_headers(r.name, r.variant) for r in fleet.replicas]

    def swap_model(self, version: str, artifact: bytes) -> None:
        """Let the estimator predict with another model from now on."""
        self._feed(ModelSwapped(self._at(self._clock()), version, artifact))

    async def drain(self, grace: float) -> None:
        """Take nothing new, refuse what waits, and wait for what runs, at most `grace` seconds."""
        self.draining = True
        self._feed(Draining(self._at(self._clock())))
        try:
            async with asyncio.timeout(grace):
                await self._empty.wait()
        except TimeoutError:
            _log.warning("%d requests still open after %g s of grace", len(self._open), grace)

    def committed(self, answer: Committed) -> None:
        """The store's late answer."""
        self._feed(replace(answer, at=self._at(self._clock())))

    def foreign_load(self, load: ForeignLoad) -> None:
        """What the other gateways have on each replica."""
        self._feed(replace(load, at=self._at(self._clock())))

    def store_away(self, away: bool) -> None:
        """The store went away or came back; answers say so in a header."""
        self._degraded = away
        _log.warning("store is %s", "away: deciding on the local share" if away else "back")

    def start(self, store: Store) -> None:
        """Agree with this store from now on; tell the core which replicas are not there yet."""
        self._store = store
        for i in range(len(self._seats)):
            self._check(i)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- the core

    def _feed(self, event: Event) -> None:
        """Handle an event and all that follow from it."""
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox:
                self._handle(self._inbox.popleft())
        finally:
            self._busy = False
        self._arm()

    def _handle(self, event: Event) -> None:
        labels = _DECIDES.get(type(event))
        if labels is not None and event.at - self._looked_at > FRESH:
            self._look(event.at)
        began = self._clock()
        actions = self._core.handle(event)
        took = self._clock() - began
        if self._event_log is not None:
            self._event_log.append(event, actions)
        if labels is not None:
            self._metrics.decision.observe(labels, took)
            if took > self._late:
                self._inbox.append(ScorerLate(self._at(self._clock()), took))
        for action in actions:
            self._do(action)

    def _look(self, at: float) -> None:
        """Tell the core how far the running streams are."""
        self._looked_at = at
        replicas: list[int] = []
        slots: list[int] = []
        counts: list[int] = []
        last: list[float] = []
        begun: list[AnswerBegan] = []
        for pending in self._open.values():
            send = pending.send
            running = None if send is None else pending.relay.running(send.attempt)
            if send is None or running is None or running.last_at is None:
                continue
            replicas.append(send.replica)
            slots.append(send.slot)
            counts.append(running.events)
            last.append(running.last_at)
            if running.thought is not None and pending.answering != send.attempt:
                pending.answering = send.attempt
                begun.append(AnswerBegan(at, pending.request.id, send.attempt, running.thought))
        if not replicas:
            return
        progress = Progress(at, tuple(replicas), tuple(slots), tuple(counts), tuple(last))
        events: list[Event] = [progress, *begun]
        for event in events:
            actions = self._core.handle(event)
            if self._event_log is not None:
                self._event_log.append(event, actions)
            for action in actions:
                self._do(action)

    def _do(self, action: Action) -> None:
        self._doers[type(action)](action)

    def _commit(self, commit: Commit) -> None:
        answer = self._store.commit(commit, self._last)
        if answer is not None:
            self._inbox.append(answer)

    def _hold(self, hold: Hold) -> None:
        self._open[hold.id].held = True

    def _send(self, send: Send) -> None:
        pending = self._open[send.id]
        pending.send, pending.candidates, pending.shadow = send, send.candidates, send.shadow
        seat = self._seats[send.replica]
        seat.running += 1
        if seat.breaker.state is not State.CLOSED:
            seat.breaker.sent()
            self._check(send.replica)
        self._metrics.sent.add((seat.name,))
        relay = pending.relay
        relay.start(
            send.attempt,
            seat.pool,
            seat.model,
            timeouts=self._timeouts,
            reply_headers=relay.early_headers
            + self._headers[send.replica]
            + _prediction_headers(send, relay)
            + self._limits(pending.request)
            + (DEGRADED if self._degraded else b""),
            upstream_headers=relay.early_headers + _passed_on(relay),
            ask_usage=seat.ask_usage,
            salt_field=seat.salt_field,
        )

    def _limits(self, request: InferenceRequest) -> bytes:
        """Rate headers, where this client has limits."""
        account = self._core.account(request.tenant)
        if account is None:
            return b""
        return limit_headers(account.standing(key=request.key, model=request.model, now=self._last))

    def _refuse(self, shed: Shed) -> None:
        pending = self._open[shed.id]
        pending.relay.error_headers += self._limits(pending.request)
        error: ServingError = refusal(shed)
        if shed.reason is Reason.UPSTREAM and pending.error is not None:
            error = pending.error
        pending.relay.fail(error)

    def _abort(self, abort: Abort) -> None:
        pending = self._open[abort.id]
        send = pending.send
        if send is not None and send.attempt == abort.attempt:
            usage = pending.relay.abort(abort.attempt)
            self._left(pending, send, _verdict(Cause.CLIENT_GONE, usage))

    def _settle(self, settle: Settle) -> None:
        self._store.settle(settle, self._last)
        pending = self._open.pop(settle.id)
        outcome = settle.outcome
        if pending.send is not None:
            self._left(pending, pending.send, Result.NEUTRAL)
        if outcome.cause is not Cause.REJECTED and len(set(pending.doubted)) == 1:
            self._blame(pending.doubted[:1])  # nobody else was asked; two that agree are right
        if not pending.relay.over:
            # Never leave a client waiting for a request that the core has closed.
            pending.relay.fail(pending.error or NoReplica("the request was closed"))
        pending.relay.context = None
        replica = None if outcome.replica is None else self._replicas[outcome.replica]
        self._metrics.settled(outcome, replica)
        if outcome.usage.source is UsageSource.ENGINE and replica is not None:
            model = self._variant_of[replica].model
            self._learn_tokens(model, outcome.request.prompt_chars, outcome.usage.prompt)
        self._log.append(lambda: self._record(outcome, pending.candidates, pending.shadow))
        answered = outcome.cause is Cause.FINISHED or outcome.first_token is not None
        if answered and outcome.variant is not None:
            request = outcome.request
            self.answered.remember(request.id, request.tenant, self._variants[outcome.variant])
        if not self._open:
            self._empty.set()

    def _record(
        self, outcome: Outcome, candidates: tuple[Candidate, ...], shadow: Candidate | None
    ) -> Record:
        return decision_record(
            outcome,
            candidates,
            replicas=self._replicas,
            variants=self._variants,
            routes=self._routes,
            wall_offset=self._wall_offset,
            feature_schema=SCHEMA_HASH if outcome.request.features else "",
            shadow=shadow,
            kinds=self._kinds,
            latency_schema=latency.SCHEMA_HASH,
        )

    # ---- replicas

    def _left(self, pending: Pending, send: Send, verdict: Result) -> None:
        """An attempt has left its replica."""
        pending.send = None
        seat = self._seats[send.replica]
        seat.running -= 1
        state = seat.breaker.state
        seat.breaker.ended(verdict, self._clock())
        if seat.breaker.state is not state:
            self._check(send.replica)
        if verdict is Result.GENERATED:
            self._blame(pending.doubted)
            pending.doubted = []

    def _judge(self, pending: Pending, send: Send, cause: Cause, report: AttemptReport) -> Result:
        """What the end of an attempt says about its replica.

        Engines answer 5xx to requests that are at fault themselves (images without a vision model,
        tools they cannot read): while the request may be tried elsewhere, nobody is blamed yet.
        """
        verdict = _verdict(cause, report.usage)
        status = report.status
        if verdict is not Result.FAILED or status is None or status < 500:
            return verdict
        if status == NOT_IMPLEMENTED or pending.relay.facts().has_media:
            return Result.NEUTRAL
        if self._seats[send.replica].breaker.state is not State.CLOSED:
            return verdict
        pending.doubted.append(send.replica)
        return Result.NEUTRAL

    def _blame(self, replicas: Iterable[int]) -> None:
        """These failed a request that was not at fault."""
        for replica in replicas:
            self._seats[replica].breaker.ended(Result.FAILED, self._clock())
            self._check(replica)

    def _check(self, replica: int) -> None:
        """Tell the core when a replica has become usable or unusable."""
        opening = [s.breaker.opens_until for s in self._seats]
        self._reopens = min((at for at in opening if at is not None), default=float("inf"))
        seat = self._seats[replica]
        usable = seat.usable
        if usable != seat.told_usable:
            seat.told_usable = usable
            why = "" if usable else seat.why
            self._feed(AvailabilityChanged(self._at(self._clock()), replica, usable, why))

    # ---- time

    def _at(self, at: float) -> float:
        """`at`, but never before an earlier event: the core's time does not go back."""
        self._last = max(self._last, at)
        return self._last

    def _arm(self) -> None:
        """Have the timer fire when the core or a breaker wants it."""
        wake = self._core.wake_at
        at = self._reopens if wake is None else min(wake, self._reopens)
        if at >= self._timer_at and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._timer_at = float("inf")
        if at < float("inf"):
            delay = max(at - self._clock(), EARLIEST_WAKE)
            self._timer = asyncio.get_running_loop().call_later(delay, self._wake)
            self._timer_at = at

    def _wake(self) -> None:
        self._timer = None
        self._timer_at = float("inf")
        now = self._clock()
        for i, seat in enumerate(self._seats):
            if seat.breaker.state is State.OPEN:
                seat.breaker.tick(now)
                self._check(i)
        self._feed(Tick(self._at(now)))

    # ---- gauges

    def _gauges(self) -> list[Gauge]:
        def by_seat(value: Callable[[Seat], float | None]) -> Iterator[tuple[tuple[str], float]]:
            for seat in self._seats:
                found = value(seat)
                if found is not None:
                    yield (seat.name,), found

        def age(seat: Seat) -> float | None:
            return None if seat.measured_at is None else self._clock() - seat.measured_at

        replica = ("replica",)
        return [
            Gauge("sluice_open", "Requests not settled.", (), lambda: [((), self.open_requests)]),
            Gauge("sluice_queued", "Requests at no replica.", (), lambda: [((), self.queued)]),
            Gauge(
                "sluice_replica_running",
                "Own requests at a replica.",
                replica,
                lambda: by_seat(lambda s: s.running),
            ),
            Gauge(
                "sluice_replica_usable",
                "1 where requests may be sent.",
                replica,
                lambda: by_seat(lambda s: s.usable),
                max,
            ),
            Gauge(
                "sluice_replica_reported_running",
                "Requests that the replica itself reports.",
                replica,
                lambda: by_seat(lambda s: s.load.running),
                max,
            ),
            Gauge(
                "sluice_replica_reading_age_seconds",
                "Age of the last reading.",
                replica,
                lambda: by_seat(age),
                max,
            ),
            Gauge(
                "sluice_store_degraded",
                "1 while the shared store is away.",
                (),
                lambda: [((), float(self._degraded))],
                max,
            ),
            *self._trial_gauges(),
            Gauge(
                "sluice_log_dropped",
                "Decision-log lines lost.",
                (),
                lambda: [((), self._log.dropped)],
            ),
        ]

    def _trial_gauges(self) -> list[Gauge]:
        """A trial as it stands; nothing while there is none."""

        def sides() -> Iterator[tuple[tuple[str, str], float]]:
            trial = self.trial
            if trial is not None:
                yield ("candidate", "met"), trial.candidate_met
                yield ("candidate", "missed"), trial.candidate - trial.candidate_met
                yield ("control", "met"), trial.control_met
                yield ("control", "missed"), trial.control - trial.control_met

        def decisions() -> Iterator[tuple[tuple[str], float]]:
            trial = self.trial
            if trial is not None:
                yield ("all",), trial.decisions
                yield ("same",), trial.same
                yield ("faults",), trial.faults
                yield ("shifted",), trial.shifted
                yield ("late",), trial.late

        def evidence() -> Iterator[tuple[tuple[()], float]]:
            trial = self.trial
            if trial is not None:
                yield (), trial.evidence

        def guarded() -> Iterator[tuple[tuple[str], float]]:
            tally = self._core.guarded
            if tally is not None:
                yield ("shifted",), tally.shifted
                yield ("faults",), tally.faults

        return [
            Gauge(
                "sluice_trial_requests",
                "Settled requests of candidate and control.",
                ("side", "limits"),
                sides,
            ),
            Gauge("sluice_trial_decisions", "Decisions of the candidate.", ("what",), decisions),
            Gauge(
                "sluice_trial_evidence",
                "Evidence that the candidate is worse; rolled back at 1 / alpha.",
                (),
                evidence,
                max,
            ),
            Gauge(
                "sluice_guarded_decisions",
                "Requests the fallback policy decided for a learned one.",
                ("why",),
                guarded,
            ),
            Gauge(
                "sluice_rollbacks",
                "Trials that ended by themselves.",
                (),
                lambda: [((), self.rollbacks)],
            ),
        ]


def _say_rolled_back(action: RolledBack) -> None:
    _log.error("trial %s rolled back (%s): %s", action.trial, action.reason, action.detail)


_DECIDES: Mapping[type[Event], tuple[str]] = {
    kind: (kind.__name__,) for kind in (Arrived, AttemptEnded, ClientGone, FirstToken, Tick)
}
"""Events at which something is decided, with the label under which their time is counted."""


def _pending(relay: Relay) -> Pending:
    """The context of a relay that was opened."""
    context = relay.context
    if not isinstance(context, Pending):  # the relay keeps it as an object of ours
        raise TypeError(f"relay without a request: {context!r}")
    return context


def _verdict(cause: Cause, usage: Usage) -> Result:
    """What the end of an attempt says about its replica."""
    match cause:
        case Cause.FINISHED:
            return Result.GENERATED
        case Cause.REFUSED | Cause.TIMEOUT | Cause.INTERRUPTED:
            return Result.FAILED
        case _:
            return Result.GENERATED if usage.completion > 0 else Result.NEUTRAL


def _name_headers(replica: str, variant: str) -> bytes:
    return f"x-sluice-replica: {replica}\r\nx-sluice-variant: {variant}\r\n".encode("latin-1")


def _prediction_headers(send: Send, relay: Relay) -> bytes:
    """What was promised, in milliseconds; and which limits could not be."""
    prediction = send.prediction
    lines = b"x-sluice-p-slo: %.3f\r\n" % prediction.p_slo
    if prediction.ttft:
        lines += b"x-sluice-predicted-ttft-ms: %.1f\r\n" % (1000 * prediction.ttft[_MEDIAN])
    if prediction.tpot:
        lines += b"x-sluice-predicted-tpot-ms: %.2f\r\n" % (1000 * prediction.tpot[_MEDIAN])
    answer = prediction.answer_p50
    if answer is not None:
        lines += b"x-sluice-predicted-answer-ms: %.1f\r\n" % (1000 * answer)
    if not relay.facts().stream:
        ignored = ignored_limits([name for name, _ in relay.request.headers])
        if ignored:
            lines += b"x-sluice-ignored-limits: %b\r\n" % ignored.encode()
    return lines


def _passed_on(relay: Relay) -> bytes:
    """Trace headers of the client, for the engine."""
    headers = relay.request.headers
    if PASSED_ON.isdisjoint([name for name, _ in headers]):
        return b""
    return b"".join(b"%b: %b\r\n" % (name, value) for name, value in headers if name in PASSED_ON)
