"""Back-off of a child: doubles, stays capped, forgives a long life."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.backoff import Backoff, BackoffRule

RULE = BackoffRule(first=0.25, longest=30.0, lasted=60.0)


def test_delays_double_up_to_the_longest():
    backoff = Backoff(RULE)
    delays = [backoff.after_death(0.0) for _ in range(9)]
    assert delays == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_long_life_is_forgiven_at_once():
    backoff = Backoff(RULE)
    for _ in range(5):
        backoff.after_death(1.0)
    assert backoff.after_death(60.0) == 0.25
    assert backoff.after_death(59.9) == 0.5


@given(st.lists(st.floats(0.0, 200.0), min_size=1, max_size=2000))
def test_every_delay_is_between_first_and_longest(lives):
    backoff = Backoff(RULE)
    for served in lives:
        assert RULE.first <= backoff.after_death(served) <= RULE.longest


def test_a_child_that_never_lives_is_started_at_most_twice_a_minute_in_the_long_run():
    backoff = Backoff(RULE)
    total, starts = 0.0, 0
    while total < 3600.0:
        total += backoff.after_death(0.0)
        starts += 1
    assert starts <= 3600 / 30 + 8


@pytest.mark.parametrize(("first", "longest"), [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0)])
def test_a_rule_that_cannot_hold_is_refused(first, longest):
    with pytest.raises(ValueError, match="0 < first <= longest"):
        BackoffRule(first=first, longest=longest)
