"""The ablation of predictors: what a variant knows, and ratios that are read off curves."""

import numpy as np
import pytest

from benchmarks.ablation import BASE, VARIANTS, estimator_of, ratios
from training.scenario import Promise, Replicas, Scenario, build

CASE = build(
    Scenario(
        name="t",
        fleet=(Replicas(profile="h100-bf16-14b", count=2),),
        classes={"all": Promise()},
        requests=200,
    ),
    5.0,
    1,
)


def forecasts(lengths):
    """Medians of all requests."""
    estimator = estimator_of(CASE, lengths, "roofline", None)
    return np.array([np.interp(-0.5, -row, np.arange(len(row))) for row in estimator.rows(0)])


def test_constant_lengths_tell_nothing_and_exact_ones_everything():
    """By how forecasts rank the answers: not at all, a little, wholly."""
    truth = CASE.trace.output
    assert np.ptp(forecasts("constant")) == pytest.approx(0.0)
    learned, exact = (np.corrcoef(forecasts(x), np.log(truth))[0, 1] for x in ("learned", "exact"))
    assert 0.2 < learned < 0.8
    assert exact > 0.95


def test_ratios_are_of_what_is_carried():
    """A variant whose curve falls at twice the rate carries twice as much."""
    rates = np.array([10.0, 20.0, 40.0, 80.0])
    plain = np.tile([1.0, 0.95, 0.85, 0.5], (3, 1))
    twice = np.tile([1.0, 1.0, 0.95, 0.85], (3, 1))
    curves = np.stack([twice if v == ("exact", "exact") else plain for v in VARIANTS])
    base, found = ratios(curves, rates, 3)
    assert base == pytest.approx(30.0)
    by = dict(zip(VARIANTS, found, strict=True))
    assert by[BASE].value == 1.0
    assert by["exact", "exact"].value == pytest.approx(2.0)
    assert by["exact", "exact"].low == pytest.approx(2.0)
