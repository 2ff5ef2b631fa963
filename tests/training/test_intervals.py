"""Intervals cover, stay paired, and read rates off as the slow way does."""

import numpy as np
import pytest

from training.evaluate import Scan, falling
from training.intervals import falling_rows, interval, last_at, rank_agreement, seed_weights


@pytest.mark.parametrize("seeds", [6, 8, 20])
def test_the_interval_covers_as_often_as_it_says(seeds):
    rng = np.random.default_rng(seeds)
    covered = 0
    for _ in range(400):
        sample = rng.exponential(1.0, seeds)
        found = interval(seed_weights(seeds, rng, 400) @ sample, seeds)
        covered += found.low <= 1.0 <= found.high
    assert 0.87 <= covered / 400 <= 0.995


def test_pairs_cancel_what_seeds_share():
    rng = np.random.default_rng(1)
    base = rng.uniform(1.0, 3.0, 6)
    weights = seed_weights(6, rng)
    ratio = interval((weights @ (1.1 * base)) / (weights @ base), 6)
    alone = interval(weights @ base, 6)
    assert ratio.low == pytest.approx(1.1)
    assert ratio.high == pytest.approx(1.1)
    assert alone.high - alone.low > 0.3


def test_one_seed_has_no_interval():
    found = interval(np.ones(3), 1)
    assert found.value == 1.0
    assert np.isnan(found.low)


def test_fit_and_read_off_agree_with_pooling_adjacent_violators():
    rng = np.random.default_rng(2)
    rates = np.array([5.0, 10.0, 20.0, 30.0, 45.0, 60.0])
    rows = rng.uniform(0.6, 1.0, (200, 6))
    np.testing.assert_allclose(falling_rows(rows), [falling(row) for row in rows])
    for target in (0.7, 0.8, 0.95):
        slow = [
            Scan(rates=tuple(rates), attainment=tuple(row)).last_at(target) for row in rows.tolist()
        ]
        np.testing.assert_allclose(last_at(rates, rows, target), slow)


def test_equal_orders_agree():
    assert rank_agreement(np.array([1.0, 2, 3]), np.array([10.0, 20, 90])) == pytest.approx(1.0)
    assert rank_agreement(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == pytest.approx(-1.0)
