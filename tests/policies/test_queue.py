"""The waiting room: order, fairness, expiry, bounds and cost."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domain.request import SloClass
from policies.queue import WaitingRoom
from tests.fakes.waiting import Waiting


def room(*entries: Waiting, k_best: int = 8, **options) -> WaitingRoom:
    queue = WaitingRoom(k_best=k_best, **({"fairness": 1.0, "alpha_max": 4.0} | options))
    for entry in entries:
        queue.push(entry)
    return queue


def test_deadline_first_at_low_load_and_short_work_as_load_grows():
    """The weight slides from deadline to work."""
    soon_long, late_short = Waiting(start_by=10.0, work=9.0), Waiting(start_by=20.0, work=1.0)
    queue = room(late_short, soon_long)
    assert queue.candidates(0.0, 0.0) == [soon_long, late_short]
    assert queue.candidates(0.0, 1.0) == [late_short, soon_long]


def test_who_waits_past_the_ageing_bound_comes_first():
    """Oldest first among those, before all others."""
    aged = SloClass(name="aged", patience=5.0, max_wait=1e9)
    old = [Waiting(start_by=500.0 + i, slo_class=aged, arrived=0.0) for i in range(2)]
    fresh = Waiting(start_by=1.0, slo_class=aged, arrived=9.0)
    queue = room(fresh, *old)
    assert queue.candidates(4.0, 0.0)[0] is fresh
    assert queue.candidates(10.0, 0.0)[:2] == old


def test_served_tenants_step_back_in_proportion_to_their_weight():
    """Service over weight is the virtual time that deadlines are shifted by."""
    heavy, light = Waiting(tenant="a", start_by=10.0), Waiting(tenant="b", start_by=12.0)
    queue = room(heavy, light)
    assert queue.candidates(0.0, 0.0)[0] is heavy
    queue.charge(Waiting(tenant="a", work=3.0), 1.0)
    assert queue.candidates(0.0, 0.0)[0] is light
    queue.charge(Waiting(tenant="b", work=3.0, weight=0.5), 1.0)
    assert queue.candidates(0.0, 0.0)[0] is heavy


def test_a_tenant_that_comes_back_does_not_spend_its_absence():
    """Virtual time is lifted to the least of those who wait."""
    queue = room(Waiting(tenant="a", start_by=10.0))
    queue.charge(Waiting(tenant="a", work=50.0), 1.0)
    back = Waiting(tenant="b", start_by=11.0)
    queue.push(back)
    assert queue.candidates(0.0, 0.0)[1] is back


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ppppr"),
            st.integers(0, 50),
            st.floats(0.0, 100.0),
            st.floats(0.01, 30.0),
            st.sampled_from("abc"),
        ),
        max_size=120,
    )
)
def test_books_agree_with_a_plain_list(script):
    """Length, work, least prompt, next expiry and the heads agree with a list kept beside."""
    queue, plain = room(k_best=4, fairness=0.0), []
    for op, who, start_by, work, tenant in script:
        if op == "p":
            entry = Waiting(
                start_by=start_by, work=work, tenant=tenant, expires=start_by, prompt=who + 1.0
            )
            queue.push(entry)
            plain.append(entry)
        elif plain:
            queue.remove(plain.pop(who % len(plain)))
        assert len(queue) == len(plain)
        assert bool(queue) == bool(plain)
        assert queue.work == pytest.approx(sum(e.work for e in plain), abs=1e-9)
        assert queue.next_expiry == min((e.expires for e in plain), default=inf)
        assert queue.least_prompt <= min((e.prompt for e in plain), default=inf)
        assert list(queue.oldest(3)) == plain_oldest(plain, 3)
        heads = queue.candidates(0.0, 0.0)
        assert len(heads) == len(set(map(id, heads))) <= 4
        assert all(e in plain for e in heads)
        if plain:
            first = min(plain, key=lambda e: (e.start_by, e.order))
            assert heads[0] is first
    if not plain:
        assert (queue.work, queue.least_prompt) == (0.0, inf)


def plain_oldest(entries, k):
    return sorted(entries, key=lambda e: e.ticket)[:k]


def test_expired_entries_are_given_once_and_stay_until_removed():
    """Expiry order is by time; a removed entry never expires."""
    early, late, gone = Waiting(expires=1.0), Waiting(expires=2.0), Waiting(expires=0.5)
    queue = room(late, early, gone)
    queue.remove(gone)
    assert queue.expired(0.9) == []
    assert queue.expired(5.0) == [early, late]
    assert queue.expired(5.0) == []
    assert len(queue) == 2


def test_dead_lines_do_not_pile_up():
    """Heaps stay within a constant of twice what waits."""
    queue = room(Waiting(start_by=0.0))
    for _ in range(2000):
        entry = Waiting(start_by=50.0)
        queue.push(entry)
        queue.remove(entry)
    (lane,) = queue._lanes.values()
    assert max(len(lane.by_start), len(lane.by_work), len(queue._expiry)) <= 2 * 1 + 66


def test_a_look_costs_the_same_whatever_waits():
    """Entries ranked per look are bounded by lanes and K, not by the length of the queue."""
    ranked = []
    for n in (50, 5000):
        queue = room(*(Waiting(start_by=float(i % 97), tenant=f"t{i % 40}") for i in range(n)))
        found = queue.candidates(0.0, 0.5)
        ranked.append(len(found))
    assert ranked == [8, 8]
