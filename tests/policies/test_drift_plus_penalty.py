"""Virtual queues: a promise is kept when it can be, given up when it cannot, and soon forgotten."""

import itertools
import random

import numpy as np
import pytest

from domain.ports import Lesson
from policies.scorers.best_fit import best_fit
from policies.scorers.drift_plus_penalty import (
    BASE_AT,
    HEAD,
    RANKS,
    VirtualQueue,
    drift_plus_penalty,
)


def test_q_counts_what_is_owed():
    """Q <- max(0, Q + target - delivered), as MESS+ writes it."""
    queue = VirtualQueue(0.75)
    assert [queue.add(s) for s in (0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)] == pytest.approx(
        [0.75, 1.5, 1.25, 1.0, 0.75, 0.5, 0.25, 0.0]
    )
    assert queue.add(1.0) == 0.0


def test_a_promise_that_a_price_can_keep_is_kept():
    """Good answers cost a price of 0.6; the queue buys as many as the target says."""
    queue, got = VirtualQueue(0.8, cap=20.0), []
    for _ in range(2_000):
        got.append(float(queue.q / 5.0 > 0.6))
        queue.add(got[-1])
    assert np.mean(got[-1000:]) == pytest.approx(0.8, abs=0.01)


def test_bad_luck_is_no_reason_to_give_up():
    """A target that is met on average is pursued through every run of misses."""
    chance, queue = random.Random(3), VirtualQueue(0.9)
    for _ in range(20_000):
        queue.add(float(chance.random() < 0.9))
        assert queue.given_up == 0
    assert queue.q <= queue.cap


def test_the_unreachable_is_given_up_and_tried_again():
    """At the cap and far short: the price falls to nothing, rests, and comes back once in a while;
    most requests are decided without it.
    """
    queue = VirtualQueue(0.95)
    prices = [queue.add(0.3) for _ in range(5_000)]
    assert max(prices) == queue.cap
    assert np.mean(np.array(prices) > 1.0) < 0.25
    assert sum(a < b == queue.cap for a, b in itertools.pairwise(prices)) >= 5


@pytest.mark.parametrize("before", [1, 10, 30, 1_000])
@pytest.mark.parametrize("delivered", [0.0, 0.5, 0.9])
def test_others_recover_within_200(before, delivered):
    """However long and far the target was out of reach, 200 requests after it can be met the price
    is gone.
    """
    queue = VirtualQueue(0.95)
    for _ in range(before):
        queue.add(delivered)
    after = [queue.add(1.0) for _ in range(210)]
    assert after[200] == 0.0


def test_each_class_has_its_own_price():
    """A lesson changes the price of its own rank only, and the base's parameters stay."""
    base = best_fit(0.7, 0.6, 0.5)
    scorer = drift_plus_penalty(
        base,
        v=4.0,
        attainment={0: VirtualQueue(0.9), 2: VirtualQueue(0.5)},
        quality={2: VirtualQueue(0.8)},
    )
    x = np.zeros(12)
    scorer.learner.learn(Lesson(2, False, 0.2, x))
    scorer.learner.learn(Lesson(1, False, 0.2, x))
    scorer.learner.learn(Lesson(0, None, 0.2, x))  # a client that left says nothing
    prices = scorer.params[HEAD:BASE_AT]
    assert prices[2] == pytest.approx(0.5 / 4.0)
    assert prices[RANKS + 2] == pytest.approx(0.6 / 4.0)
    assert np.count_nonzero(prices) == 2
    assert scorer.params[BASE_AT:].tolist() == base.params.tolist()


def test_what_it_cannot_stand_on_is_said():
    from policies.scorers.prefix import sticky

    with pytest.raises(ValueError, match="known: best_fit"):
        drift_plus_penalty(sticky())
    with pytest.raises(ValueError, match="v must be"):
        drift_plus_penalty(best_fit(), v=0.0)
