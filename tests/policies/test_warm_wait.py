"""Waiting for a warm replica: when it pays, for how long, and in nobody's way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.events import Arrived, AttemptEnded, ClientGone, Draining, FirstToken, Progress, Tick
from domain.fleet import FleetSpec, Profile, ReplicaSpec, Variant
from domain.outcome import Cause
from domain.request import Slo, SloClass
from policies.queue import PARKED
from tests.fakes.shells import Shell, make_core, request
from tests.policies.test_core import COUNTED, finish, play, steps

PREFIX = tuple(range(100, 131))
"""Blocks of a prompt of 2000 tokens, but for its end; 0.4 s of prefill."""
KINDS = ("best_fit", "sticky", "prefix_affinity", "lmetric", "predicted", "marginal")


def twins(max_seqs: int = 1) -> FleetSpec:
    """Two equal replicas: 0.2 ms a prompt token, about 11 ms a decode step."""
    profile = Profile(
        weights=0.01,
        per_token=2e-4,
        max_seqs=max_seqs,
        kv_capacity=20_000.0,
        max_context=8192,
    )
    return FleetSpec(
        replicas=tuple(ReplicaSpec(name=n, variant="v", profile=profile) for n in "ab"),
        variants=(Variant(name="v", model="m"),),
    )


PATIENT = (SloClass(name="standard", rank=0, patience=10.0, max_wait=60.0, sheddable=False),)


def warmed(left: int, kind: str = "sticky", fleet: FleetSpec | None = None, **options) -> Shell:
    """A replica that holds the prefix and runs one stream about `left` tokens from its end."""
    options = {"warm_wait": True} | options
    shell = Shell(make_core(kind, fleet=fleet or twins(), classes=PATIENT, **options))
    shell.tell(Arrived(0.0, turn("first", max_tokens=float(left))))
    shell.tell(FirstToken(0.5, "first", 1))
    return shell


def turn(name: str, prompt: float = 2000.0, **kwargs):
    """A request whose prompt begins with the prefix."""
    blocks = PREFIX[: int(prompt) // 64]
    return request(name, **({"prompt_tokens": prompt, "blocks": blocks, "slo": Slo()} | kwargs))


def end(shell: Shell, name: str, now: float) -> None:
    """The request's stream finishes."""
    shell.tell(AttemptEnded(now, name, shell.sends[name].attempt, Cause.FINISHED, COUNTED, now))


@pytest.mark.parametrize("kind", KINDS)
def test_it_waits_for_the_warm_replica_when_that_is_shorter_than_the_prefill(kind):
    """Five tokens to wait, 0.4 s of prefill to save: held though the other replica is idle."""
    shell = warmed(5, kind)
    shell.tell(Arrived(0.51, turn("second")))
    assert shell.held == {"second"}
    home = shell.sends["first"].replica
    end(shell, "first", 0.56)
    assert shell.sends["second"].replica == home
    assert shell.sends["second"].prediction.cached > 1900


def test_without_the_option_it_goes_cold_at_once():
    """Off is off."""
    shell = warmed(5, warm_wait=False)
    shell.tell(Arrived(0.51, turn("second")))
    assert shell.sends["second"].replica != shell.sends["first"].replica


@pytest.mark.parametrize(
    ("case", "left", "options", "kwargs"),
    [
        ("the stream has long to go", 2000, {}, {}),
        ("too little is saved", 5, {}, {"prompt": 128.0}),
        ("the least saving is larger", 5, {"warm_wait_min_ms": 500.0}, {}),
        ("its limit would pass", 10, {}, {"slo": Slo(ttft=0.45)}),
        ("nothing is cached", 5, {}, {"blocks": (7, 8, 9)}),
        ("it names no blocks", 5, {}, {"blocks": ()}),
    ],
)
def test_it_does_not_wait_when_that_does_not_pay(case, left, options, kwargs):
    """Each reason alone sends it cold at once."""
    shell = warmed(left, **options)
    shell.tell(Arrived(0.51, turn("second", **kwargs)))
    assert "second" not in shell.held, case
    assert shell.sends["second"].replica != shell.sends["first"].replica


def test_it_does_not_wait_for_what_the_policy_would_not_choose():
    """A policy that looks only at load prefers the idle replica."""
    shell = warmed(5, "least_requests")
    shell.tell(Arrived(0.51, turn("second")))
    assert shell.sends["second"].replica != shell.sends["first"].replica


def test_the_wait_is_no_longer_than_the_prefill_it_would_have_saved():
    """The stream runs over its forecast: at the bound the core wakes and the request goes cold."""
    shell = warmed(5)
    shell.tell(Arrived(0.51, turn("second")))
    bound = 0.51 + 0.42
    while "second" not in shell.sends:
        wake = shell.core.wake_at
        assert wake is not None
        assert wake <= bound
        shell.tell(Tick(wake))
    assert wake > 0.51 + 0.3
    assert shell.sends["second"].replica != shell.sends["first"].replica


def test_looking_again_does_not_move_the_bound():
    """However often events come, the first bound stands."""
    shell = warmed(5)
    shell.tell(Arrived(0.51, turn("second")))
    wake = shell.core.wake_at
    for i in range(20):
        shell.tell(Tick(0.52 + i * 0.01))
        assert shell.core.wake_at == wake


def test_a_wait_that_grew_too_long_ends_at_once():
    """The warm replica's stream turns out to stall behind others: the prediction is made anew."""
    shell = warmed(30)
    shell.tell(Arrived(0.51, turn("second")))
    assert shell.held == {"second"}
    shell.tell(Tick(0.8))  # 30 tokens at 11 ms from here end after the bound
    assert shell.sends["second"].replica != shell.sends["first"].replica


def test_others_pass():
    """As many waiters as there may be, all of one lane, and a request without blocks still goes."""
    shell = warmed(5)
    for i in range(PARKED):
        shell.tell(Arrived(0.51, turn(f"w{i}")))
    assert len(shell.held) == PARKED
    shell.tell(Arrived(0.52, request("plain", slo=Slo())))
    assert "plain" in shell.sends


def test_beyond_the_most_that_may_wait_one_goes_cold():
    """Every batch looks at all that are parked, so their number is bounded."""
    shell = warmed(5)
    for i in range(PARKED + 1):
        shell.tell(Arrived(0.51, turn(f"w{i}")))
    assert set(shell.sends) == {"first", f"w{PARKED}"}


def test_a_waiter_that_leaves_leaves_nothing():
    """Client gone, or shutting down, in the middle of the wait."""
    for event in (ClientGone(0.52, "second"), Draining(0.52)):
        shell = warmed(5)
        shell.tell(Arrived(0.51, turn("second")))
        shell.tell(event)
        assert "second" in shell.settled
        end(shell, "first", 0.6)
        shell.assert_empty()
        assert shell.core.queue.next_line_up == float("inf")


turns = st.lists(
    st.tuples(
        st.sampled_from("aaaaabfffeeeptg"),
        st.integers(0, 40),
        st.integers(0, 120),
    ),
    max_size=100,
)


def chat(shell: Shell, script) -> float:
    """Turns of three sessions with shared prefixes, and plain requests among them."""
    now, firsts = 0.0, set()
    for number, (op, who, amount) in enumerate(script):
        now += amount * 1e-3
        running = list(shell.sends.values())
        send = running[who % len(running)] if running else None
        waiting = [i for i, e in shell.core.open.items() if e.state == "held"]
        if op == "a":
            blocks = tuple(range(1000 * (who % 3), 1000 * (who % 3) + 31))
            limits = (Slo(), Slo(ttft=2.0), Slo(e2e=4.0))[who % 3]
            tenant = "tu"[who % 2]
            shell.tell(
                Arrived(
                    now,
                    turn(f"q{number}", blocks=blocks, slo=limits, tenant=tenant, max_tokens=8.0),
                )
            )
        elif op == "b":
            shell.tell(Arrived(now, request(f"q{number}", slo=Slo(), max_tokens=16.0)))
        elif op == "f" and send:
            firsts.add(send.slot)
            shell.tell(FirstToken(now, send.id, send.attempt))
        elif op == "e" and send:
            shell.tell(AttemptEnded(now, send.id, send.attempt, Cause.FINISHED, COUNTED, now))
        elif op == "p" and send and send.slot in firsts:
            shell.tell(Progress(now, (send.replica,), (send.slot,), (1 + amount,)))
        elif op == "g" and waiting:
            shell.tell(ClientGone(now, waiting[who % len(waiting)]))
        elif op == "t":
            shell.tell(Tick(now))
    return now


@settings(max_examples=100, deadline=None)
@given(turns, st.sampled_from(KINDS), st.integers(1, 2))
def test_nothing_is_left_behind(script, kind, seats):
    """Whoever waited, each arrival ends in one Settle and all books return to zero."""
    shell = Shell(make_core(kind, fleet=twins(seats), warm_wait=True))
    finish(shell, chat(shell, script))
    assert set(shell.settled) == shell.arrived
    shell.assert_empty()


@settings(max_examples=60, deadline=None)
@given(steps, st.sampled_from(KINDS))
def test_nothing_is_left_behind_by_any_history(script, kind):
    """The core's own random histories: deaths, retries, drains, claims, with waits allowed."""
    shell = Shell(make_core(kind, warm_wait=True, warm_wait_min_ms=0.0))
    finish(shell, play(shell, script))
    assert set(shell.settled) == shell.arrived
    shell.assert_empty()


@settings(max_examples=60, deadline=None)
@given(turns, st.sampled_from(KINDS), st.integers(1, 2))
def test_a_replay_is_identical(script, kind, seats):
    """Same events, same actions."""
    shell = Shell(make_core(kind, fleet=twins(seats), warm_wait=True, explore=0.2))
    chat(shell, script)
    again = make_core(kind, fleet=twins(seats), warm_wait=True, explore=0.2)
    for event, actions in shell.log:
        assert again.handle(event) == actions


@settings(max_examples=60, deadline=None)
@given(turns, st.sampled_from(KINDS))
def test_with_nothing_to_wait_for_the_option_changes_nothing(script, kind):
    """A least saving that nothing reaches: the same actions as with the option off."""
    off = Shell(make_core(kind, fleet=twins()))
    chat(off, script)
    on = make_core(kind, fleet=twins(), warm_wait=True, warm_wait_min_ms=1e6)
    for event, actions in off.log:
        assert on.handle(event) == actions
