"""The shell turns what relays and monitors say into events, and actions into calls; no sockets."""

import asyncio
from types import SimpleNamespace

import pytest

from backends.adapters.table import Load
from backends.breaker import Breaker
from backends.upstream import Timeouts
from backends.wire.openai import CHAT, RequestParser
from domain.errors import BackendTimeout, BackendUnavailable, ServingError
from domain.events import (
    Abort,
    AnswerBegan,
    Arrived,
    AttemptEnded,
    AvailabilityChanged,
    ClientGone,
    Commit,
    Committed,
    FirstToken,
    Hold,
    Progress,
    Reason,
    Send,
    Settle,
    Shed,
    Tick,
)
from domain.fleet import FleetSpec, ReplicaSpec, Variant
from domain.outcome import Cause, Outcome, Prediction, Usage
from domain.request import SloClass, Tenant
from gateway.decision_log import DecisionLog
from gateway.intake import Intake
from gateway.metrics import Metrics
from gateway.relay import AttemptReport, ClientRequest
from gateway.shell import Seat, Shell
from gateway.store.memory import MemoryStore
from gateway.tenants import Identity

FLEET = FleetSpec(
    replicas=(ReplicaSpec(name="r0", variant="v"), ReplicaSpec(name="r1", variant="v")),
    variants=(Variant(name="v", model="m"),),
)
BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}],"stream":true}'


class ScriptedCore:
    """Answers kinds of events with scripted actions; keeps every event."""

    def __init__(self):
        self.events = []
        self.wake_at = None
        self.script = {Arrived: lambda e: [Commit(e.request.id, 1, "t", 0, 1.0)]}
        self.script[Committed] = lambda e: [send(e.id)]
        self.columns = None
        self.trial = self.guarded = None

    def handle(self, event):
        self.events.append(event)
        return self.script.get(type(event), lambda e: [])(event)

    def account(self, tenant):
        return None

    def of(self, kind):
        return [e for e in self.events if type(e) is kind]


def send(ident, attempt=1, replica=0, slot=7):
    prediction = Prediction(ttft=(0.1,) * 7, tpot=(0.02,) * 7, p_slo=0.5)
    return Send(ident, attempt, replica, replica, replica, slot, 1.0, "p", "1", prediction)


def settle(event, cause=Cause.FINISHED, request=None):
    outcome = Outcome(request=request, cause=cause, arrived=0.0, ended=event.at)
    return Settle(event.id, "t", 1.0, 0.0, outcome)


class FakeRelay:
    """What the shell does to a relay, noted."""

    def __init__(self, body=BODY, headers=(), at=100.0):
        self.request = ClientRequest(surface=CHAT, headers=list(headers), body=body, received_at=at)
        self.context = None
        self.early_headers = self.error_headers = b""
        self.over = False
        self.started = []
        self.failed = []
        self.aborted = []
        self.count = 0
        self.thought = None

    def facts(self):
        return RequestParser().parse(CHAT, self.request.body)

    def start(self, attempt, pool, model, **options):
        self.started.append((attempt, pool, model, options))

    def fail(self, error):
        self.failed.append(error)
        self.over = True

    def abort(self, attempt):
        self.aborted.append(attempt)
        return Usage()

    def tokens(self, attempt):
        return self.count

    def running(self, attempt):
        last_at = 100.01 if self.count else None
        return SimpleNamespace(events=self.count, last_at=last_at, thought=self.thought)


class Bench:
    """A shell over a scripted core and a clock that stands still."""

    def __init__(self, **options):
        self.now = 100.0
        self.core = ScriptedCore()
        self.seats = [
            Seat(name=n, model="engine-m", pool=SimpleNamespace(name=n), breaker=Breaker(limit=2))
            for n in ("r0", "r1")
        ]
        self.learned = []
        self.log = DecisionLog(None)
        self.shell = Shell(
            core=self.core,
            fleet=FLEET,
            seats=self.seats,
            routes=("r0", "r1"),
            intake=Intake(
                identify=lambda _: Identity(Tenant(name="t"), None),
                classes={"standard": SloClass(name="standard")},
                default_class="standard",
                estimate=lambda model, chars: 4.0,
                new_id=iter(f"q{i}" for i in range(100)).__next__,
            ),
            timeouts=Timeouts(),
            log=self.log,
            metrics=Metrics(models=["m"]),
            learn_tokens=lambda *a: self.learned.append(a),
            clock=lambda: self.now,
            **options,
        )
        self.shell.start(MemoryStore())

    def report(self, cause, *, attempt=1, retryable=False, error=None, usage=None):
        return AttemptReport(
            attempt, self.now, cause, usage or Usage(), None, None, None, error, retryable
        )


@pytest.fixture
def bench():
    """A bench on a running loop, since the shell arms timers on it."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def make():
        return Bench()

    made = loop.run_until_complete(make())
    made.loop = loop
    yield made
    made.shell.close()
    if made.log._timer is not None:
        made.log._timer.cancel()
    loop.close()
    asyncio.set_event_loop(None)


def on_loop(bench, call):
    """Run a call where a loop is running."""

    async def run():
        return call()

    return bench.loop.run_until_complete(run())


def opened(bench, **options):
    relay = FakeRelay(**options)
    on_loop(bench, lambda: bench.shell.open(relay))
    return relay


def test_a_request_is_committed_then_sent_with_what_was_promised(bench):
    relay = opened(bench, headers=[(b"traceparent", b"00-1-2-01")])
    assert [type(e) for e in bench.core.events] == [Arrived, Committed]
    [(attempt, pool, model, options)] = relay.started
    assert (attempt, pool.name, model) == (1, "r0", "engine-m")
    assert options["reply_headers"].splitlines() == [
        b"x-request-id: q0",
        b"x-sluice-replica: r0",
        b"x-sluice-variant: v",
        b"x-sluice-p-slo: 0.500",
        b"x-sluice-predicted-ttft-ms: 100.0",
        b"x-sluice-predicted-tpot-ms: 20.00",
    ]
    assert b"traceparent: 00-1-2-01\r\n" in options["upstream_headers"]
    assert bench.seats[0].running == 1


def test_bad_requests_never_reach_the_core(bench):
    relay = opened(bench, body=b"{")
    assert bench.core.events == []
    assert relay.error_headers == b"x-request-id: q0\r\n"
    assert isinstance(relay.failed[0], ServingError)
    assert relay.context is None
    on_loop(bench, lambda: bench.shell.client_gone(relay, Usage()))
    assert bench.core.events == []


def test_refusals_become_errors(bench):
    bench.core.script[Arrived] = lambda e: [
        Shed(e.request.id, Reason.UNREACHABLE, 2.0),
        Settle(
            e.request.id,
            "t",
            0.0,
            0.0,
            Outcome(request=e.request, cause=Cause.SHED, arrived=e.at, ended=e.at),
        ),
    ]
    relay = opened(bench)
    assert relay.failed[0].retry_after == 2.0
    assert bench.shell.open_requests == 0


def test_a_held_request_counts_as_queued(bench):
    bench.core.script[Arrived] = lambda e: [Hold(e.request.id)]
    opened(bench)
    assert (bench.shell.queued, bench.shell.open_requests) == (1, 1)


def test_an_end_is_told_once_and_frees_the_seat(bench):
    relay = opened(bench)
    on_loop(bench, lambda: bench.shell.first_token(relay, 1, bench.now))
    request = relay.context.request
    bench.core.script[AttemptEnded] = lambda e: [settle(e, request=request)]
    usage = Usage(prompt=9, completion=2)
    on_loop(bench, lambda: bench.shell.ended(relay, bench.report(Cause.FINISHED, usage=usage)))
    assert [type(e) for e in bench.core.events][2:] == [FirstToken, AttemptEnded]
    assert bench.core.of(AttemptEnded)[0].usage == usage
    assert bench.seats[0].running == 0
    assert bench.shell.open_requests == 0
    assert relay.context is None


def test_a_late_failure_without_tokens_is_not_retried(bench):
    """Bytes have reached the client though no token did: the core hears of an interruption."""
    relay = opened(bench)
    on_loop(
        bench,
        lambda: bench.shell.ended(
            relay, bench.report(Cause.TIMEOUT, error=BackendTimeout("t", phase="total"))
        ),
    )
    assert bench.core.of(AttemptEnded)[0].cause is Cause.INTERRUPTED


def test_a_retry_goes_out_as_the_next_attempt(bench):
    relay = opened(bench)
    bench.core.script[AttemptEnded] = lambda e: [send(e.id, attempt=2, replica=1)]
    error = BackendUnavailable("refused")
    on_loop(
        bench,
        lambda: bench.shell.ended(relay, bench.report(Cause.REFUSED, retryable=True, error=error)),
    )
    assert [(a, p.name) for a, p, _, _ in relay.started] == [(1, "r0"), (2, "r1")]
    assert [s.running for s in bench.seats] == [0, 1]


def test_out_of_retries_the_client_gets_the_last_error(bench):
    relay = opened(bench)
    request = relay.context.request
    error = BackendTimeout("too slow", phase="first_token")
    bench.core.script[AttemptEnded] = lambda e: [
        Shed(e.id, Reason.UPSTREAM),
        settle(e, Cause.TIMEOUT, request),
    ]
    on_loop(
        bench,
        lambda: bench.shell.ended(relay, bench.report(Cause.TIMEOUT, retryable=True, error=error)),
    )
    assert relay.failed == [error]


def test_a_client_that_leaves_ends_its_attempt(bench):
    relay = opened(bench)
    request = relay.context.request
    bench.core.script[ClientGone] = lambda e: [
        Abort(e.id, 1),
        settle(e, Cause.CLIENT_GONE, request),
    ]
    on_loop(bench, lambda: bench.shell.client_gone(relay, Usage()))
    assert bench.seats[0].running == 0
    assert bench.shell.open_requests == 0
    assert bench.seats[0].breaker.admits()


def test_failures_open_the_breaker_and_time_closes_it_again(bench):
    for _ in range(2):
        relay = opened(bench)
        request = relay.context.request
        bench.core.script[AttemptEnded] = lambda e, r=request: [settle(e, Cause.REFUSED, r)]
        on_loop(
            bench, lambda r=relay: bench.shell.ended(r, bench.report(Cause.REFUSED, error=None))
        )
    changes = bench.core.of(AvailabilityChanged)
    assert [(e.replica, e.usable, e.reason) for e in changes] == [(0, False, "open")]
    bench.now += 1.0
    on_loop(bench, bench.shell._wake)
    assert bench.core.of(AvailabilityChanged)[-1].usable is True
    assert bench.core.of(Tick)
    opened(bench)  # the probe: nothing else is let in until it gives a token
    assert bench.core.of(AvailabilityChanged)[-1].usable is False
    assert not bench.shell.seats[0].usable


def test_progress_is_pulled_once_for_many_decisions(bench):
    first = opened(bench)
    first.count = 5
    bench.now += 0.021
    opened(bench, at=bench.now)
    opened(bench, at=bench.now + 0.01)
    assert bench.core.of(Progress) == [Progress(bench.now, (0,), (7,), (5,), (100.01,))]
    bench.now += 0.04
    opened(bench, at=bench.now)
    assert len(bench.core.of(Progress)) == 2


def test_the_core_hears_once_that_an_answer_began(bench):
    """With the progress of the streams, before the next decision."""
    first = opened(bench)
    first.count = 5
    bench.now += 0.021
    opened(bench, at=bench.now)
    assert not bench.core.of(AnswerBegan)
    first.thought = 4
    for _ in range(2):
        bench.now += 0.04
        opened(bench, at=bench.now)
    began = bench.core.of(AnswerBegan)
    assert [(e.id, e.attempt, e.thought) for e in began] == [(first.context.request.id, 1, 4)]
    kinds = [type(e) for e in bench.core.events]
    assert kinds[kinds.index(AnswerBegan) - 1] is Progress
    assert Arrived in kinds[kinds.index(AnswerBegan) :]


def test_time_never_goes_back_in_the_core(bench):
    opened(bench, at=100.5)
    opened(bench, at=100.2)
    times = [e.at for e in bench.core.events]
    assert times == sorted(times)


def test_health_and_readings_become_events_only_when_they_say_something_new(bench):
    for ok in (True, False, False, True):
        on_loop(bench, lambda ok=ok: bench.shell.health(1, ok=ok))
    changes = bench.core.of(AvailabilityChanged)
    assert [(e.replica, e.usable) for e in changes] == [(1, False), (1, True)]
    assert changes[0].reason == "unhealthy"
    on_loop(bench, lambda: bench.shell.reading(1, Load(running=3), 99.9))
    reading = bench.core.events[-1]
    assert (reading.replica, reading.running, reading.waiting) == (1, 3, None)
    assert reading.measured_at == 99.9


def test_the_timer_follows_the_core(bench):
    bench.core.wake_at = bench.now + 0.01
    opened(bench)

    async def wait():
        async with asyncio.timeout(5):
            while not bench.core.of(Tick):
                bench.core.wake_at = None
                await asyncio.sleep(0.002)

    bench.loop.run_until_complete(wait())


def test_a_slow_decision_is_told_to_the_core(bench):
    def slow(event):
        bench.now += 1.0
        return []

    bench.core.script[Arrived] = slow
    opened(bench)
    assert [type(e).__name__ for e in bench.core.events] == ["Arrived", "ScorerLate"]
    assert bench.core.events[1].took == pytest.approx(1.0)


def answered(bench, relay, replica, status, *, then=None):
    """The replica answers with `status`; `then` is what the core does next, else it settles."""
    request = relay.context.request
    attempt = relay.context.send.attempt
    assert relay.context.send.replica == replica
    error = BackendUnavailable(f"the engine answered {status}", said="no")
    report = bench.report(Cause.REFUSED, attempt=attempt, retryable=True, error=error)
    bench.core.script[AttemptEnded] = lambda e: (
        [settle(e, Cause.REFUSED, request)] if then is None else [then(e)]
    )
    on_loop(bench, lambda: bench.shell.ended(relay, report._replace(status=status)))


def elsewhere(event):
    return send(event.id, attempt=2, replica=1)


def test_a_request_that_every_replica_answers_with_500_says_nothing_about_them(bench):
    for _ in range(5):
        relay = opened(bench)
        answered(bench, relay, 0, 500, then=elsewhere)
        answered(bench, relay, 1, 500)
    assert [seat.breaker.admits() for seat in bench.seats] == [True, True]
    assert bench.core.of(AvailabilityChanged) == []
    assert [seat.running for seat in bench.seats] == [0, 0]


def test_a_500_that_another_replica_contradicts_counts(bench):
    for _ in range(2):
        relay = opened(bench)
        request = relay.context.request
        answered(bench, relay, 0, 500, then=elsewhere)
        bench.core.script[AttemptEnded] = lambda e, r=request: [settle(e, request=r)]
        done = bench.report(Cause.FINISHED, attempt=2, usage=Usage(prompt=9, completion=2))
        on_loop(bench, lambda r=relay, d=done: bench.shell.ended(r, d))
    assert [seat.breaker.admits() for seat in bench.seats] == [False, True]


def test_a_500_that_nobody_else_was_asked_about_counts_once_a_request(bench):
    relay = opened(bench)
    answered(bench, relay, 0, 500, then=lambda e: send(e.id, attempt=2))
    answered(bench, relay, 0, 500)
    assert bench.seats[0].breaker.admits()
    answered(bench, opened(bench), 0, 500)
    assert not bench.seats[0].breaker.admits()


def test_what_an_engine_does_not_serve_says_nothing_about_it(bench):
    media = (
        b'{"model":"m","messages":[{"role":"user","content":'
        b'[{"type":"image_url","image_url":{"url":"data:,"}}]}]}'
    )
    for _ in range(3):
        answered(bench, opened(bench), 0, 501)
        answered(bench, opened(bench, body=media), 0, 500)
    assert bench.seats[0].breaker.admits()


def test_logs_hear_of_a_failure_without_the_words_of_the_engine(bench):
    """Engines repeat in their errors what they were sent."""
    relay = opened(bench)
    error = BackendUnavailable("the engine answered 500", said="cannot parse 'secret'")
    assert "secret" in error.message
    on_loop(
        bench,
        lambda: bench.shell.ended(relay, bench.report(Cause.REFUSED, retryable=True, error=error)),
    )
    assert bench.core.of(AttemptEnded)[0].detail == "the engine answered 500"
