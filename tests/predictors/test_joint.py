"""Calibration of P(SLO): the identity at first, monotone always, better after a biased stream."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictors.joint import BINS, Reliability, calibrate_into


def calibrated(reliability: Reliability, raw) -> np.ndarray:
    raw = np.atleast_2d(np.asarray(raw, np.float64))
    out = np.zeros_like(raw)
    calibrate_into(reliability.curve, np.ones(raw.shape, np.bool_), raw, out)
    return out[0]


def test_before_any_outcome_it_is_the_identity():
    """Nothing seen, nothing changed; probabilities outside [0, 1] are brought back."""
    grid = np.linspace(0, 1, 37)
    assert calibrated(Reliability(), grid) == pytest.approx(grid)
    assert calibrated(Reliability(), [-0.5, 1.5]).tolist() == [0.0, 1.0]


def test_only_masked_pairs_are_written():
    """Outside the mask the output stays as it was."""
    out = np.full((1, 3), 7.0)
    calibrate_into(Reliability().curve, np.array([[True, False, True]]), np.full((1, 3), 0.5), out)
    assert out[0].tolist() == [0.5, 7.0, 0.5]


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans()), max_size=150))
def test_the_curve_never_falls_and_stays_a_probability(stream):
    """Whatever comes: monotone, in [0, 1], so a ranking is never turned over."""
    reliability = Reliability()
    for raw, met in stream:
        reliability.observe(raw, met=met)
    curve = reliability.curve
    assert len(curve) == BINS + 1
    assert (np.diff(curve) >= -1e-12).all()
    assert (curve >= 0).all()
    assert (curve <= 1).all()


def brier(p, met):
    return float(np.mean((np.asarray(p) - np.asarray(met)) ** 2))


@pytest.mark.parametrize("truth", [lambda p: p**3, lambda p: 0.2 + 0.3 * p, lambda p: p**0.3])
def test_a_miscalibrated_stream_is_put_right(truth):
    """After a thousand outcomes the Brier score on fresh ones is lower than raw, near the best
    possible.
    """
    rng = np.random.default_rng(5)
    reliability = Reliability()
    for raw in rng.random(1000):
        reliability.observe(raw, met=bool(rng.random() < truth(raw)))
    raw = rng.random(4000)
    met = rng.random(4000) < truth(raw)
    ours, before, best = (brier(p, met) for p in (calibrated(reliability, raw), raw, truth(raw)))
    assert ours < before - 0.01
    assert ours < best + 0.01


def test_a_calibrated_stream_stays_nearly_as_it_is():
    """Where raw is right already, calibration costs next to nothing."""
    rng = np.random.default_rng(6)
    reliability = Reliability()
    for raw in rng.random(1500):
        reliability.observe(raw, met=bool(rng.random() < raw))
    raw = rng.random(4000)
    met = rng.random(4000) < raw
    assert brier(calibrated(reliability, raw), met) < brier(raw, met) + 0.005


def test_it_follows_a_change():
    """Old outcomes are forgotten: a stream that turns bad is believed."""
    reliability = Reliability()
    for _ in range(500):
        reliability.observe(0.9, met=True)
    assert calibrated(reliability, [0.9])[0] > 0.95
    for _ in range(1000):
        reliability.observe(0.9, met=False)
    assert calibrated(reliability, [0.9])[0] < 0.2
