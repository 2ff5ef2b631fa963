"""The sequential test: rarely a false alarm however often one looks, and soon a true one."""

import numpy as np
import pytest

from policies.sequential import AttainmentTest, Capital


def run(rng, candidate, control, *, share=0.25, most=20_000, strata=1, **options):
    """Outcomes until the alarm; the candidate's requests by then, or None."""
    test = AttainmentTest(**options)
    mine = rng.random(most) < share
    drawn = rng.random(most)
    kind = rng.integers(0, strata, most)
    for i in range(most):
        met = drawn[i] < (candidate if mine[i] else control)[kind[i]]
        test.observe(int(kind[i]), candidate=bool(mine[i]), met=bool(met))
        if test.alarm:
            return test.candidate
    return None


def test_no_difference_is_rarely_called_one():
    """At alpha 0.05, looking after every request: at most 1 run in 20 (40 runs, so 6 at most)."""
    rng = np.random.default_rng(1)
    alarms = [
        run(rng, [0.95], [0.95], most=4_000, alpha=0.05, tolerance=0.0) is not None
        for _ in range(40)
    ]
    assert sum(alarms) <= 6


def test_a_disaster_is_seen_within_dozens():
    """A candidate that meets nothing is stopped within 60 of its requests."""
    rng = np.random.default_rng(2)
    assert max(run(rng, [0.0], [0.95], most=2_000) for _ in range(20)) <= 60


def test_strata_are_compared_with_themselves():
    """A candidate that is as good in every class is not blamed for having the harder ones."""
    rng = np.random.default_rng(3)
    test = AttainmentTest()
    for _ in range(8_000):
        mine = rng.random() < 0.5
        hard = rng.random() < (0.9 if mine else 0.1)
        test.observe(int(hard), candidate=mine, met=bool(rng.random() < (0.7 if hard else 0.99)))
    assert test.difference < -0.1
    assert not test.alarm


def test_evidence_that_it_is_safe():
    """A better candidate soon excludes that it is worse by the margin; a worse one never does."""
    rng = np.random.default_rng(4)
    better, worse = AttainmentTest(), AttainmentTest()
    for _ in range(6_000):
        mine = bool(rng.random() < 0.5)
        draw = rng.random()
        better.observe(0, candidate=mine, met=bool(draw < (0.97 if mine else 0.95)))
        worse.observe(0, candidate=mine, met=bool(draw < (0.92 if mine else 0.95)))
    assert better.safe
    assert not worse.safe


@pytest.mark.parametrize("difference", [-1.0, 0.0, 0.3, 1.0])
def test_capital_is_the_mean_of_the_products(difference):
    """The mixture, worked out by hand for three blocks."""
    from policies.sequential import BETS

    capital = Capital(0.01)
    for _ in range(3):
        capital.bet(difference)
    each = [(1 + bet / 1.01 * (difference - 0.01)) ** 3 for bet in BETS]
    assert np.exp(capital.log) == pytest.approx(np.mean(each))
