"""Calibrated forecasts keep their promise at every quality, from the truth to nothing known."""

import numpy as np
import pytest
from scipy import stats

from domain.length import LengthDistribution
from training.informed import calibrated_rows, population_of, sigma_of

TRUTH = np.ceil(np.exp(np.random.default_rng(1).normal(5.0, 1.0, 3000))).astype(np.int64)


def forecasts(sigma, truth=TRUTH):
    rows = calibrated_rows(truth, sigma, population_of(truth), np.random.default_rng(2))
    return [LengthDistribution(row) for row in rows]


@pytest.mark.parametrize("tau", [0.0, 0.2, 0.5])
def test_nine_in_ten_lie_below_the_p90_and_ranks_agree_as_asked(tau):
    found = forecasts(sigma_of(tau, TRUTH))
    covered = np.mean([t <= f.quantile(0.9) for t, f in zip(TRUTH.tolist(), found, strict=True)])
    assert covered == pytest.approx(0.9, abs=0.02)
    if tau:
        medians = [f.quantile(0.5) for f in found]
        assert stats.kendalltau(medians, TRUTH).statistic == pytest.approx(tau, abs=0.04)


def test_at_the_ends_stand_one_distribution_for_all_and_the_truth():
    same = forecasts(float("inf"))
    assert np.array_equal(same[0].survival, same[-1].survival)
    exact = forecasts(0.0)
    error = [abs(f.quantile(0.5) / t - 1.0) for t, f in zip(TRUTH.tolist(), exact, strict=True)]
    assert np.quantile(error, 0.95) < 0.15  # bins are a sixth wide
