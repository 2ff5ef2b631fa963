"""The decision core, driven by random histories and by small scenarios."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.events import (
    AnswerBegan,
    Arrived,
    AttemptEnded,
    AvailabilityChanged,
    ClientGone,
    Commit,
    Committed,
    ConfigReloaded,
    Draining,
    FirstToken,
    FleetChanged,
    ForeignLoad,
    Progress,
    Reading,
    Reason,
    ScorerLate,
    Send,
    Settle,
    Shed,
    Tick,
)
from domain.outcome import Cause, Miss, Usage, UsageSource
from domain.request import Quota, Slo, SloClass, Tenant
from tests.fakes.networks import layers_of
from tests.fakes.shells import CLASSES, SCORERS, Shell, make_core, request, small_fleet

COUNTED = Usage(prompt=100, completion=20, source=UsageSource.COUNTED)
THOUGHT = Usage(prompt=100, completion=20, thinking=15, source=UsageSource.COUNTED)

steps = st.lists(
    st.tuples(
        st.sampled_from("aaaaaaffppbeexcgtrvwd"),
        st.integers(0, 40),
        st.integers(0, 2_000),
    ),
    max_size=120,
)


def play(shell: Shell, script, now: float = 0.0) -> float:
    """Turn a random script into a legal history from `now` on; returns the time at its end."""
    number, firsts = len(shell.arrived), set()
    m = len(shell.core.fleet.replicas)
    for op, who, amount in script:
        now += amount * 1e-3
        running = list(shell.sends.values())
        send = running[who % len(running)] if running else None
        if op == "a":
            shell.tell(
                Arrived(
                    now,
                    request(
                        f"q{number}",
                        tenant="tu"[who % 2],
                        prompt_tokens=float(1 + amount),
                        class_name=("interactive", "standard", "batch")[who % 3],
                        slo=(Slo(ttft=1.0, tpot=0.1), Slo(e2e=8.0), Slo())[who % 3],
                        stream=who % 5 > 0,
                        blocks=(who % 7, 100 + who % 7),
                        session=f"s{who % 4}" if who % 2 else None,
                    ),
                )
            )
            number += 1
        elif op == "f" and send:
            firsts.add(send.slot)
            shell.tell(FirstToken(now, send.id, send.attempt))
        elif op == "p" and send and send.slot in firsts:
            shell.tell(Progress(now, (send.replica,), (send.slot,), (1 + amount,)))
        elif op == "b" and send:
            shell.tell(AnswerBegan(now, send.id, send.attempt, 1 + amount))
        elif op == "e" and send:
            usage = (COUNTED, THOUGHT)[who % 2]
            shell.tell(AttemptEnded(now, send.id, send.attempt, Cause.FINISHED, usage, now))
        elif op == "x" and send:
            cause = (Cause.REFUSED, Cause.TIMEOUT, Cause.INTERRUPTED, Cause.REJECTED)[who % 4]
            shell.tell(AttemptEnded(now, send.id, send.attempt, cause))
        elif op == "c" and send:
            shell.tell(ClientGone(now, send.id, COUNTED))
        elif op == "g" and shell.core.open:
            waiting = [i for i, e in shell.core.open.items() if e.state == "held"]
            if waiting:
                shell.tell(ClientGone(now, waiting[who % len(waiting)]))
        elif op == "t":
            shell.tell(Tick(now))
        elif op == "r":
            shell.tell(Reading(now, who % m, now - 0.2, float(who % 5), None, 0.1))
        elif op == "v":
            shell.tell(AvailabilityChanged(now, who % m, who % 2 == 0))
        elif op == "w":
            shell.tell(ScorerLate(now, 0.1))
        elif op == "d" and who == 0:
            shell.tell(Draining(now))
    return now


def finish(shell: Shell, now: float) -> float:
    """Let everything that is open come to its end; returns the time then."""
    for i in range(len(shell.core.fleet.replicas)):
        shell.tell(AvailabilityChanged(now, i, True))
    for _ in range(10_000):
        if not shell.core.open:
            return now
        now += 0.5
        shell.tell(Tick(now))
        for send in list(shell.sends.values()):
            shell.tell(AttemptEnded(now, send.id, send.attempt, Cause.FINISHED, COUNTED, now))
    raise AssertionError(f"still open: {list(shell.core.open)}")


@settings(max_examples=150, deadline=None)
@given(steps, st.sampled_from(SCORERS), st.booleans())
def test_every_request_is_settled_once_and_nothing_is_left(script, kind, explore):
    """Whatever happens, each arrival ends in exactly one Settle and all books return to zero."""
    shell = Shell(make_core(kind, explore=0.3 if explore else 0.0))
    now = play(shell, script)
    finish(shell, now)
    assert set(shell.settled) == shell.arrived
    shell.assert_empty()
    for account in ("t", "u"):
        assert shell.core.account(account).usage(now)["tenant"].running == 0


@pytest.mark.slow
def test_ten_thousand_histories_leave_nothing():
    """10,000 random histories of cancels, timeouts, failures and readings, one after another
    through one core per policy: after each, nothing is left.
    """
    chance = random.Random(7)
    ops = "aaaaaaffppeexcgtrvw"
    settled = 0
    for number, kind in enumerate(SCORERS):
        shell, now = Shell(make_core(kind, explore=0.1)), 0.0
        for _ in range(10_000 // len(SCORERS) + (number < 10_000 % len(SCORERS))):
            script = [
                (chance.choice(ops), chance.randrange(41), chance.randrange(2_001))
                for _ in range(chance.randrange(10, 60))
            ]
            now = finish(shell, play(shell, script, now))
            shell.assert_empty()
            shell.log.clear()
        assert set(shell.settled) == shell.arrived
        settled += len(shell.settled)
    assert settled > 50_000


@settings(max_examples=60, deadline=None)
@given(steps, st.sampled_from(SCORERS))
def test_a_log_fed_to_a_fresh_core_gives_the_same_actions(script, kind):
    """Replay is exact: same events, same actions, draws and learning included."""
    shell = Shell(make_core(kind, explore=0.2))
    play(shell, script)
    again = make_core(kind, explore=0.2)
    for event, actions in shell.log:
        assert again.handle(event) == actions


@settings(max_examples=60, deadline=None)
@given(steps)
def test_windows_are_respected(script):
    """No replica is ever sent more sequences than its window takes."""
    shell = Shell(make_core("least_requests"))
    core = shell.core
    original = shell.tell

    def checked(event):
        actions = original(event)
        assert (core.columns.running <= core.columns.max_seqs).all()
        assert (core.columns.running >= 0).all()
        assert (core.columns.backlog_tokens >= 0).all()
        return actions

    shell.tell = checked
    play(shell, script)


def test_unknown_model_forbidden_model_and_long_prompt_cost_nothing():
    """Refusals name their reason and charge no quota."""
    tenants = (Tenant(name="t", models=frozenset({"m"}), quota=Quota(requests_per_minute=1)),)
    shell = Shell(make_core(tenants=tenants))
    for name, kwargs, reason in (
        ("a", {"model": "nope"}, Reason.UNKNOWN_MODEL),
        ("b", {"model": "full"}, Reason.FORBIDDEN),
        ("c", {"tenant": "stranger"}, Reason.FORBIDDEN),
        ("d", {"prompt_tokens": 1e6}, Reason.CONTEXT),
    ):
        shell.tell(Arrived(0.0, request(name, **kwargs)))
        assert shell.shed[name].reason is reason
        assert name in shell.settled
    shell.tell(Arrived(0.0, request("ok")))
    assert "ok" in shell.sends
    shell.tell(Arrived(0.0, request("over")))
    assert shell.shed["over"].reason is Reason.RATE
    assert shell.shed["over"].retry_after > 0


def test_a_full_fleet_holds_and_the_next_end_releases():
    """Late binding: what does not fit waits, and goes out when a stream ends."""
    shell = Shell(make_core("least_requests", fleet=small_fleet(1, max_seqs=2)))
    for i in range(3):
        shell.tell(Arrived(i * 1e-3, request(f"q{i}", slo=Slo(), class_name="batch")))
        if f"q{i}" in shell.sends:
            shell.tell(FirstToken(i * 1e-3, f"q{i}", 1))
    assert set(shell.sends) == {"q0", "q1"}
    assert shell.held == {"q2"}
    shell.tell(AttemptEnded(0.5, "q0", 1, Cause.FINISHED, COUNTED, 0.5))
    assert set(shell.sends) == {"q1", "q2"}


def crowded(**options):
    """Two streams that a third request with a long prompt would take out of their pace."""
    fleet = small_fleet(1, kv_capacity=60_000.0)
    shell = Shell(make_core("marginal", fleet=fleet, shed_below=0.0, **options))
    for name in ("a", "b"):
        shell.tell(Arrived(0.0, request(name, slo=Slo(ttft=1.0, tpot=0.015))))
        shell.tell(FirstToken(0.1, name, 1))
    shell.tell(Arrived(0.2, request("long", prompt_tokens=3000.0, slo=Slo(ttft=4.0))))
    return shell


def test_who_is_held_back_goes_when_that_ends():
    """Nothing happens meanwhile, so the core asks to be woken."""
    shell = crowded(hold_until=0.5)
    assert set(shell.sends) == {"a", "b"}
    assert shell.core.wake_at == pytest.approx(2.2)
    shell.tell(Tick(shell.core.wake_at))
    assert set(shell.sends) == {"a", "b", "long"}


def test_who_is_held_back_goes_when_it_costs_others_less():
    """An end is a reason to look again."""
    shell = crowded()
    assert set(shell.sends) == {"a", "b"}
    shell.tell(AttemptEnded(0.3, "a", 1, Cause.FINISHED, COUNTED, 0.3))
    assert set(shell.sends) == {"b", "long"}


def test_without_late_binding_nobody_is_held_back():
    """`hold: false` sends at once."""
    assert set(crowded(hold=False).sends) == {"a", "b", "long"}


def test_a_policy_may_refuse_what_may_be_refused():
    """Whose best route scores less than not serving it; not a class that is never refused."""
    hopeless = {"layers": layers_of(bias=[0.0, 1e3]), "reach": 10.0, "shed_below": 0.0}
    shell = Shell(make_core("network", **hopeless))
    for name in ("interactive", "batch"):
        shell.tell(Arrived(0.0, request(name, slo=Slo(ttft=1.0), class_name=name)))
    assert shell.shed["interactive"].reason is Reason.UNREACHABLE
    assert set(shell.sends) == {"batch"}


def test_what_waited_past_its_limit_is_shed_and_blamed_on_the_queue():
    """A sheddable request whose latest useful start passes is refused with a reason."""
    shell = Shell(make_core("least_requests", fleet=small_fleet(1, max_seqs=1)))
    shell.tell(Arrived(0.0, request("busy", slo=Slo(), class_name="batch")))
    shell.tell(Arrived(0.1, request("late", slo=Slo(ttft=1.0), class_name="interactive")))
    wake = shell.core.wake_at
    assert 0.1 < wake < 1.1
    shell.tell(Tick(wake))
    assert shell.shed["late"].reason is Reason.EXPIRED
    assert shell.settled["late"].outcome.miss is Miss.QUEUE


def test_failure_before_the_first_byte_is_retried_elsewhere():
    """A refused attempt goes to another replica; after the first token it does not."""
    shell = Shell(make_core())
    shell.tell(Arrived(0.0, request("q")))
    first = shell.sends["q"]
    shell.tell(AttemptEnded(0.1, "q", first.attempt, Cause.REFUSED))
    second = shell.sends["q"]
    assert second.replica != first.replica
    assert second.attempt == first.attempt + 1
    shell.tell(FirstToken(0.2, "q", second.attempt))
    shell.tell(AttemptEnded(0.3, "q", second.attempt, Cause.INTERRUPTED, COUNTED, 0.3))
    assert shell.settled["q"].outcome.met is False
    assert shell.settled["q"].outcome.miss is Miss.ENGINE
    shell.assert_empty()


def test_late_words_about_an_old_attempt_are_ignored():
    """An end or a first token of attempt 1 does not touch attempt 2."""
    shell = Shell(make_core())
    shell.tell(Arrived(0.0, request("q")))
    old = shell.sends["q"]
    shell.tell(AttemptEnded(0.1, "q", old.attempt, Cause.REFUSED))
    before = shell.core.columns.running.copy()
    shell.tell(AttemptEnded(0.2, "q", old.attempt, Cause.FINISHED, COUNTED, 0.2))
    shell.tell(FirstToken(0.2, "q", old.attempt))
    assert np.array_equal(before, shell.core.columns.running)
    assert "q" not in shell.settled


def test_a_refused_booking_is_chosen_again_without_that_route():
    """Optimistic booking: at most twice elsewhere, then the request waits."""
    core = make_core("least_requests")
    tried = []
    actions = core.handle(Arrived(0.0, request("q")))
    for _ in range(3):
        commit = next(a for a in actions if isinstance(a, Commit) and a.route is not None)
        tried.append(commit.route)
        actions = core.handle(Committed(0.0, "q", commit.attempt, booked=False))
    assert len(set(tried)) == 3
    assert any(isinstance(a, Commit) and a.route is None for a in actions)
    assert core.columns.running.sum() == 0
    sent = core.handle(Tick(0.1))
    assert any(isinstance(a, Commit) and a.route is not None for a in sent)


def test_a_refused_reservation_is_shed_with_the_stores_word():
    """The store's no to the tokens is a 429 with its own retry time."""
    core = make_core()
    core.handle(Arrived(0.0, request("q")))
    actions = core.handle(Committed(0.0, "q", 1, reserved=False, retry_after=7.0))
    shed = next(a for a in actions if isinstance(a, Shed))
    assert (shed.reason, shed.retry_after) == (Reason.RATE, 7.0)
    assert core.columns.running.sum() == 0


def test_own_requests_in_a_reading_are_not_counted_twice():
    """Load = own + max(0, reading - own at the reading's time)."""
    shell = Shell(make_core("least_requests", fleet=small_fleet(1)))
    shell.tell(Arrived(1.0, request("q")))
    shell.tell(Reading(1.3, 0, 1.2, 1.0, 0.0, None))
    assert shell.core.replica(0).foreign_running == 0
    shell.tell(Reading(1.5, 0, 1.4, 3.0, 1.0, None))
    assert shell.core.replica(0).foreign_running == 3
    shell.tell(AttemptEnded(1.6, "q", 1, Cause.FINISHED, COUNTED, 1.6))
    # Measured before the end, seen after it: the ended request is still in the reading.
    shell.tell(Reading(1.7, 0, 1.55, 1.0, 0.0, None))
    assert shell.core.replica(0).foreign_running == 0


def test_other_gateways_counts_beat_a_reading_while_they_are_fresh():
    """ForeignLoad is exact; a reading does not overwrite it until it stops coming."""
    shell = Shell(make_core("least_requests", fleet=small_fleet(2)))
    shell.tell(ForeignLoad(1.0, (3.0, 0.0), (300.0, 0.0), (0.0, 0.0)))
    shell.tell(Reading(1.1, 0, 1.1, 1.0, 0.0, None))
    assert shell.core.replica(0).foreign_running == 3
    shell.tell(Arrived(1.2, request("q")))
    assert shell.sends["q"].replica == 1
    shell.tell(Reading(3.0, 0, 2.9, 1.0, 0.0, None))
    assert shell.core.replica(0).foreign_running == 1


def test_a_held_request_reserves_once_and_books_when_it_is_released():
    """Tokens are asked for when the request is held, the route when it goes."""
    shell = Shell(make_core("least_requests", fleet=small_fleet(1, max_seqs=1)))
    shell.tell(Arrived(0.0, request("busy", slo=Slo(), class_name="batch")))
    shell.tell(Arrived(0.1, request("waits", slo=Slo(), class_name="batch")))
    shell.tell(AttemptEnded(0.2, "busy", 1, Cause.FINISHED, COUNTED, 0.2))
    commits = [
        a for _, acts in shell.log for a in acts if isinstance(a, Commit) and a.id == "waits"
    ]
    assert [(c.route, c.tokens > 0) for c in commits] == [(None, True), (0, False)]


def test_what_can_no_longer_be_met_lets_others_pass():
    """A request of a class that is never shed goes behind what can still be met, not before it."""
    classes = (SloClass(name="batch", rank=1, sheddable=False, patience=60.0, max_wait=90.0),)
    shell = Shell(make_core("least_requests", fleet=small_fleet(1, max_seqs=1), classes=classes))
    shell.tell(Arrived(0.0, request("busy", slo=Slo(), class_name="batch")))
    shell.tell(Arrived(0.1, request("hopeless", slo=Slo(e2e=2.0), class_name="batch")))
    shell.tell(Tick(5.0))
    shell.tell(Arrived(5.1, request("fresh", slo=Slo(e2e=20.0), class_name="batch")))
    shell.tell(AttemptEnded(6.0, "busy", 1, Cause.FINISHED, COUNTED, 6.0))
    assert set(shell.sends) == {"fresh"}
    shell.tell(AttemptEnded(7.0, "fresh", 1, Cause.FINISHED, COUNTED, 7.0))
    assert set(shell.sends) == {"hopeless"}


def test_a_stale_reading_degrades_to_the_ledger():
    """Old metrics never stop dispatch."""
    shell = Shell(make_core("least_requests", fleet=small_fleet(1)))
    shell.tell(Reading(1.0, 0, 1.0, 99.0, 99.0, 1.0))
    shell.tell(Arrived(1.5, request("early", slo=Slo(), class_name="batch")))
    assert "early" not in shell.sends
    shell.tell(Arrived(9.0, request("later", slo=Slo(), class_name="batch")))
    assert {"early", "later"} <= set(shell.sends)


def test_exploration_is_bounded_logged_and_off_for_the_top_class():
    """Propensities are exact: they average to the share with which each choice is made."""
    core = make_core(explore=0.5, fleet=small_fleet(3, max_seqs=64))
    shell = Shell(core)
    seen = set()
    for i in range(300):
        now = i * 1.0
        shell.tell(Arrived(now, request(f"q{i}", slo=Slo(ttft=5.0), class_name="standard")))
        send = shell.sends[f"q{i}"]
        seen.add((send.replica, round(send.propensity, 3)))
        shell.tell(FirstToken(now, send.id, send.attempt))
        shell.tell(AttemptEnded(now + 0.2, send.id, send.attempt, Cause.FINISHED, COUNTED, now))
    assert len({r for r, _ in seen}) > 1
    assert all(0 < p <= 1 for _, p in seen)
    shell.tell(Arrived(999.0, request("top", slo=Slo(ttft=5.0), class_name="interactive")))
    assert shell.sends["top"].propensity == 1.0


def test_a_small_tenant_is_not_starved_by_a_flood():
    """Fairness: with one seat, a tenant with two waiting is served between the flooder's
    hundred.
    """
    shell = Shell(
        make_core(
            "least_requests",
            fleet=small_fleet(1, max_seqs=1),
            classes=(SloClass(name="batch", rank=1, sheddable=False, patience=1e6, max_wait=1e6),),
        )
    )
    for i in range(100):
        shell.tell(Arrived(i * 1e-4, request(f"flood{i}", class_name="batch")))
    for i in range(2):
        shell.tell(Arrived(0.02, request(f"small{i}", tenant="u", class_name="batch")))
    order, now = [], 0.02
    for _ in range(12):
        (send,) = shell.sends.values()
        order.append(send.id)
        now += 0.1
        shell.tell(AttemptEnded(now, send.id, send.attempt, Cause.FINISHED, COUNTED, now))
    served = [i for i, name in enumerate(order) if name.startswith("small")]
    assert len(served) == 2
    assert served[0] <= 3


def test_no_wait_outlasts_the_ageing_bound_while_others_pass():
    """A large request past its patience claims a replica, so small ones cannot pass it for ever."""
    shell = Shell(make_core("least_requests", fleet=small_fleet(1, max_seqs=8, kv_capacity=3000.0)))
    now = 0.0
    shell.tell(Arrived(now, request("small0", slo=Slo(), class_name="batch")))
    big = request("big", prompt_tokens=2800.0, max_tokens=64.0, slo=Slo(), class_name="batch")
    shell.tell(Arrived(0.01, big))
    assert "big" in shell.held
    for i in itertools.count(1):
        now += 0.3
        shell.tell(Arrived(now, request(f"small{i}", slo=Slo(), class_name="batch")))
        shell.tell(Tick(now))
        for send in list(shell.sends.values()):
            if send.id != "big" and len(shell.sends) > 1:
                shell.tell(FirstToken(now, send.id, send.attempt))
                shell.tell(AttemptEnded(now, send.id, send.attempt, Cause.FINISHED, COUNTED, now))
                break
        if "big" in shell.sends or now > 20:
            break
        if now > 2.5:
            for send in list(shell.sends.values()):
                shell.tell(AttemptEnded(now, send.id, send.attempt, Cause.FINISHED, COUNTED, now))
    assert "big" in shell.sends
    assert now < 2.0 + 2.0 + 0.7


def test_quality_floor_routes_to_the_variant_that_reaches_it():
    """A floor above the small variant's prior leaves only the full one."""
    shell = Shell(make_core("least_requests", fleet=small_fleet(2, max_seqs=64)))
    for i in range(6):
        shell.tell(Arrived(i * 1.0, request(f"q{i}", slo=Slo(quality=0.85))))
        send = shell.sends[f"q{i}"]
        assert shell.core.fleet.replicas[send.replica].variant == "full"
        shell.tell(FirstToken(i * 1.0, send.id, send.attempt))


def test_draining_refuses_the_new_and_the_waiting():
    """SIGTERM: running streams go on, everything else gets a 503 with a retry time."""
    shell = Shell(make_core("least_requests", fleet=small_fleet(1, max_seqs=1)))
    shell.tell(Arrived(0.0, request("runs", slo=Slo(), class_name="batch")))
    shell.tell(Arrived(0.1, request("waits", slo=Slo(), class_name="batch")))
    shell.tell(Draining(0.2))
    shell.tell(Arrived(0.3, request("new")))
    assert shell.shed["waits"].reason is Reason.SHUTTING_DOWN
    assert shell.shed["new"].reason is Reason.SHUTTING_DOWN
    assert "runs" in shell.sends


def test_fleet_change_keeps_running_streams_and_drains_the_removed():
    """Replicas are matched by name; a removed one gets nothing new and its streams still settle."""
    shell = Shell(make_core("least_requests", fleet=small_fleet(2, max_seqs=64)))
    shell.tell(Arrived(0.0, request("q", model="full")))
    assert shell.sends["q"].replica == 0
    wider = small_fleet(4, max_seqs=64)
    shell.tell(FleetChanged(1.0, type(wider)(replicas=wider.replicas[1:], variants=wider.variants)))
    for i in range(6):
        shell.tell(Arrived(2.0 + i, request(f"n{i}")))
        assert shell.sends[f"n{i}"].replica != 0
    shell.tell(AttemptEnded(9.0, "q", 1, Cause.FINISHED, COUNTED, 9.0))
    for send in list(shell.sends.values()):
        shell.tell(AttemptEnded(9.0, send.id, send.attempt, Cause.FINISHED, COUNTED, 9.0))
    shell.assert_empty()


def test_reload_keeps_bucket_levels():
    """A new capacity scales a level, it never refills it."""
    tenants = (Tenant(name="t", quota=Quota(tokens_per_minute=600, burst_tokens=200)),)
    shell = Shell(make_core(tenants=tenants))
    shell.tell(Arrived(0.0, request("q")))
    level = shell.core.account("t").usage(0.0)["tenant"].level
    double = (Tenant(name="t", quota=Quota(tokens_per_minute=600, burst_tokens=400)),)
    shell.tell(ConfigReloaded(0.0, double, CLASSES))
    assert shell.core.account("t").usage(0.0)["tenant"].level == pytest.approx(2 * level)


def test_a_late_scorer_hands_over_to_the_default_for_a_while():
    """The fallback policy decides, under its own name, until the penalty is over."""
    shell = Shell(make_core("round_robin"))
    shell.tell(ScorerLate(0.0, 0.2))
    shell.tell(Arrived(1.0, request("q0")))
    assert shell.sends["q0"].policy == "best_fit"
    shell.tell(Arrived(30.0, request("q1")))
    assert shell.sends["q1"].policy == "round_robin"


def test_the_reservation_is_settled_by_what_was_used():
    """A bucket ends lower by exactly prompt + completion, whatever was reserved."""
    tenants = (Tenant(name="t", quota=Quota(tokens_per_minute=1, burst_tokens=1000)),)
    shell = Shell(make_core(tenants=tenants))
    shell.tell(Arrived(0.0, request("q")))
    shell.tell(AttemptEnded(0.0, "q", 1, Cause.FINISHED, COUNTED, 0.0))
    assert shell.core.account("t").usage(0.0)["tenant"].level == pytest.approx(1000 - 120)
    settle: Settle = shell.settled["q"]
    assert settle.tokens == 120
    assert isinstance(shell.log[0][1][0], Commit)
    assert any(isinstance(a, Send) for _, actions in shell.log for a in actions)


def test_a_session_stays_where_it_ran_while_that_replica_has_room():
    """The sticky policy follows the session, not only the prefix."""
    shell = Shell(make_core("sticky", fleet=small_fleet(3, max_seqs=64)))
    shell.tell(Arrived(0.0, request("first", session="s")))
    home = shell.sends["first"].replica
    shell.tell(FirstToken(0.1, "first", 1))
    for i in range(5):
        shell.tell(Arrived(1.0 + i, request(f"other{i}")))
        shell.tell(FirstToken(1.1 + i, f"other{i}", 1))
        shell.tell(Arrived(1.5 + i, request(f"again{i}", session="s")))
        shell.tell(FirstToken(1.6 + i, f"again{i}", 1))
        assert shell.sends[f"again{i}"].replica == home
    assert {shell.sends[f"other{i}"].replica for i in range(5)} != {home}
