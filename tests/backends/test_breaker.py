"""The breaker's table, line by line."""

from hypothesis import given
from hypothesis import strategies as st

from backends.breaker import Breaker, Result, State


def opened(limit=3):
    breaker = Breaker(limit=limit, pause=1.0, longest_pause=3.0)
    for _ in range(limit):
        breaker.sent()
        breaker.ended(Result.FAILED, 0.0)
    return breaker


def test_opens_after_failures_in_a_row_only():
    """A generation in between starts the count again."""
    breaker = Breaker(limit=3)
    for result in (Result.FAILED, Result.FAILED, Result.GENERATED, Result.FAILED, Result.FAILED):
        breaker.ended(result, 0.0)
    assert breaker.admits()
    breaker.ended(Result.FAILED, 0.0)
    assert breaker.state is State.OPEN
    assert not breaker.admits()


@given(st.integers(0, 50))
def test_client_errors_neither_open_nor_close(n):
    breaker = Breaker(limit=1)
    for _ in range(n):
        breaker.ended(Result.NEUTRAL, 0.0)
    assert breaker.state is State.CLOSED
    breaker.ended(Result.FAILED, 0.0)
    for _ in range(n):
        breaker.ended(Result.NEUTRAL, 0.0)
    assert breaker.state is State.OPEN


def test_half_open_lets_one_probe_in_and_closes_on_a_generation():
    breaker = opened()
    breaker.tick(0.99)
    assert not breaker.admits()
    breaker.tick(1.0)
    assert breaker.admits()
    breaker.sent()
    assert not breaker.admits()
    breaker.ended(Result.GENERATED, 1.5)
    assert breaker.state is State.CLOSED


def test_neutral_probe_keeps_it_half_open():
    breaker = opened()
    breaker.tick(1.0)
    breaker.sent()
    breaker.ended(Result.NEUTRAL, 1.1)
    assert breaker.state is State.HALF_OPEN
    assert breaker.admits()


def test_a_failing_probe_doubles_the_pause_up_to_the_longest():
    breaker = opened()
    at, pauses = 0.0, []
    for _ in range(4):
        pauses.append(breaker.opens_until - at)
        at = breaker.opens_until
        breaker.tick(at)
        breaker.sent()
        breaker.ended(Result.FAILED, at)
    assert pauses == [1.0, 2.0, 3.0, 3.0]


def test_a_straggler_sent_before_it_opened_does_not_close_it():
    breaker = opened()
    breaker.ended(Result.GENERATED, 0.5)
    assert breaker.state is State.OPEN
