"""The gate before the queue: who is refused early, how smoothly, and when to come back."""

import itertools

import pytest

from domain.request import SloClass
from policies.overload import VALID, Gate
from tests.fakes.shells import request

CLASSES = (
    SloClass(name="top", rank=0),
    SloClass(name="middle", rank=1),
    SloClass(name="low", rank=2),
    SloClass(name="kept", rank=3, sheddable=False),
)
BY_NAME = {c.name: c for c in CLASSES}


def gate(target: float = 0.05) -> Gate:
    made = Gate(target)
    made.configure(CLASSES)
    return made


def press(made: Gate, seconds: float, chance: float, start: float = 0.0, tenant="t") -> float:
    """Fifty decisions a second, each with this P(SLO); returns the time at the end."""
    now = start
    while now < start + seconds:
        now += 0.02
        made.refused(ask(0), BY_NAME["kept"], 1.0, now)
        made.admitted(tenant, 1.0, "low", 1.0, now)
        made.decided("top", chance, 1.0, now)
    return now


def ask(i: int, name: str = "low", tenant: str = "t"):
    return request(f"r{i}", class_name=name, tenant=tenant, tie=i * 7919, prompt_chars=i)


def test_nothing_is_refused_while_promises_are_kept():
    """Below the target the level stays at zero."""
    made = gate()
    press(made, 60.0, chance=0.99)
    assert made.level == 0.0
    assert made.refused(ask(1), BY_NAME["low"], 1.0, 60.0) is None


def test_without_a_target_the_gate_is_always_open():
    """0 switches it off, whatever happens."""
    made = gate(0.0)
    now = press(made, 60.0, chance=0.0)
    assert all(made.refused(ask(i), BY_NAME["low"], 1.0, now) is None for i in range(100))


def test_the_lowest_class_goes_first_and_the_unsheddable_never():
    """As the level rises, low is refused wholly before middle is touched, and middle before top."""
    made = gate()
    now, orders = 0.0, []
    for _ in range(600):
        now = press(made, 0.2, chance=0.85, start=now)
        orders.append([made.probability(c, "flood") for c in ("low", "middle", "top", "kept")])
        made._over = frozenset({"flood"})
    assert orders[-1][:3] == [1.0, 1.0, 1.0]
    for low, middle, top, kept in orders:
        assert low >= middle >= top
        assert kept == 0.0
        assert middle == 0.0 or low == 1.0
        assert top == 0.0 or middle == 1.0


def test_the_probability_has_no_step():
    """From one look to the next, a fifth of a second later, it moves by less than a third."""
    made = gate()
    now, seen = 0.0, []
    for _ in range(300):
        now = press(made, 0.2, chance=0.9, start=now)
        made._over = frozenset({"t"})
        seen.append(made.probability("low", "t"))
    assert max(b - a for a, b in itertools.pairwise(seen)) < 1 / 3
    assert seen[-1] == 1.0


def test_it_opens_again_when_the_pressure_is_gone():
    """Level and probability fall to zero."""
    made = gate()
    now = press(made, 20.0, chance=0.7)
    assert made.level > 0.5
    press(made, 120.0, chance=1.0, start=now)
    assert made.level == 0.0


def test_a_tenant_within_its_share_is_spared():
    """While one tenant offers twenty times what another does, only its requests are refused."""
    made = gate()
    now = 0.0
    for i in range(3000):
        now += 0.01
        tenant = "small" if i % 21 == 0 else "flood"
        if made.refused(ask(i, tenant=tenant), BY_NAME["low"], 1.0, now) is None:
            made.admitted(tenant, 1.0, "low", 1.0, now)
            made.decided("low", 0.9, 1.0, now)
    assert made.probability("low", "flood") > 0.5
    assert made.probability("low", "small") == 0.0


def test_who_waits_retry_after_is_let_pass_once():
    """The kept time opens the gate for the same request, not before, not twice, not for ever."""
    made = gate()
    now = press(made, 40.0, chance=0.5)
    made._over = frozenset({"t"})
    wait = made.refused(ask(1), BY_NAME["low"], 1.0, now)
    assert wait >= 1.0
    assert made.refused(ask(1), BY_NAME["low"], 1.0, now + 0.5 * wait) is not None
    due = made._tickets[next(iter(made._tickets))]
    assert made.refused(ask(1), BY_NAME["low"], 1.0, due) is None
    made._over = frozenset({"t"})
    assert made.refused(ask(1), BY_NAME["low"], 1.0, due) is not None
    later = made._tickets[next(iter(made._tickets))] + VALID + 1.0
    press(made, later - due, chance=0.5, start=due)
    made._over = frozenset({"t"})
    assert made.refused(ask(1), BY_NAME["low"], 1.0, later) is not None


def test_kept_times_follow_one_another():
    """Two refused at once are not told the same time."""
    made = gate()
    now = press(made, 40.0, chance=0.5)
    made._over = frozenset({"t"})
    waits = [made.refused(ask(i), BY_NAME["low"], 1.0, now) for i in range(2, 12)]
    assert waits == sorted(waits)
    assert len(set(waits)) == len(waits)


@pytest.mark.parametrize("work", [0.0, 10.0, 1e9])
def test_the_drain_is_work_over_pace_and_bounded(work):
    """What waits, at the rate at which work was sent lately."""
    made = gate()
    now = press(made, 40.0, chance=1.0)
    assert made.drain(work, now) == pytest.approx(min(work / 50.0, 120.0), rel=0.1)
