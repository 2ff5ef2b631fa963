import numpy as np
import pytest

from predictors.conformal import RollingConformal
from predictors.drift import PageHinkley


def run(conformal, ranks, model="m", tenant="t"):
    """Whether each outcome lay at or below the bound that stood when it came."""
    inside = []
    for rank in ranks:
        inside.append(rank <= conformal.level(model, tenant))
        conformal.observe(model, tenant, float(rank))
    return np.array(inside)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_coverage_of_a_wrong_predictor(power):
    """Ranks that are not uniform are still covered at 90 %, within two points."""
    ranks = np.random.default_rng(1).random(3000) ** power
    assert run(RollingConformal(), ranks)[200:].mean() == pytest.approx(0.9, abs=0.02)


def test_a_shift_is_followed():
    """Coverage breaks with the shift and is back at 87 % within 300 outcomes."""
    rng = np.random.default_rng(2)
    conformal = RollingConformal()
    run(conformal, rng.random(600))
    after = run(conformal, rng.random(800) ** 0.25)
    assert after[:50].mean() < 0.85
    assert after[200:300].mean() >= 0.87 - 2 * 0.03
    assert after[300:].mean() == pytest.approx(0.9, abs=0.03)


def test_a_new_key_starts_from_the_coarser_ones():
    """Before its own outcomes a tenant has what the model's other tenants taught."""
    conformal = RollingConformal()
    run(conformal, np.random.default_rng(3).random(500) ** 0.2)
    assert conformal.level("m", "new") > 0.95
    assert conformal.level("other", "new") > 0.93
    assert RollingConformal().level("m", "t") == pytest.approx(0.9, abs=0.06)


def test_cut_answers_and_nan_are_harmless():
    """A cut answer below the bound teaches nothing, one beyond it is a miss; NaN is ignored."""
    conformal = RollingConformal()
    before = conformal.level("m", "t")
    conformal.observe("m", "t", 0.2, censored=True)
    conformal.observe("m", "t", float("nan"))
    assert conformal.level("m", "t") == before
    conformal.observe("m", "t", 0.999, censored=True)
    assert conformal.level("m", "t") > before


def test_memory_is_bounded():
    conformal = RollingConformal(capacity=50)
    for i in range(500):
        conformal.observe(f"m{i}", "t", 0.5)
    assert len(conformal._ranks) <= 50
    assert len(conformal._shift) <= 50


def test_drift_is_seen_and_forgotten():
    """An error that grows raises the alarm; it clears when the error is small again."""
    rng = np.random.default_rng(4)
    detector = PageHinkley(slack=0.05, threshold=5.0)
    assert not any(detector.observe(x) for x in rng.normal(0.1, 0.05, 1000))
    raised = [detector.observe(x) for x in rng.normal(0.4, 0.05, 100)]
    assert raised.index(True) < 40
    cleared = [detector.observe(x) for x in rng.normal(0.1, 0.05, 300)]
    assert not cleared[-1]
    assert detector.alarms == 1


def test_drift_ignores_values_that_are_no_numbers():
    detector = PageHinkley(reference=0.0, threshold=1.0)
    assert not detector.observe(float("nan"))
    assert not detector.observe(float("inf"))
