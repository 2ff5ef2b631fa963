"""How far forecasts are believed."""

import numpy as np
import pytest

from domain.length import LengthDistribution
from predictors.trust import START, Trust, mixed


def test_what_proves_better_is_believed_and_what_proves_worse_is_not():
    """Tens of outcomes suffice either way."""
    good, bad = Trust(), Trust()
    for _ in range(60):
        good.observe("m", 0.1)
        bad.observe("m", -0.1)
    assert good.weight("m") > 0.7
    assert bad.weight("m") < 0.05


def test_a_new_model_starts_at_what_the_others_taught():
    """Strength is shared between models; the model's own outcomes then count for it."""
    trust = Trust()
    assert trust.weight("new") == START
    for i in range(200):
        trust.observe(f"m{i % 5}", 0.1)
    assert trust.weight("new") > 0.9
    for _ in range(60):
        trust.observe("new", -0.3)
    assert trust.weight("new") < 0.5 < trust.weight("m1")


@pytest.mark.parametrize("seed", range(5))
def test_the_mixture_is_never_far_behind_the_running_distribution(seed):
    """Over a stream on which forecasts lose, the mixture loses the start's price and the little
    that sharing costs.
    """
    rng = np.random.default_rng(seed)
    trust, lost = Trust(), 0.0
    gains = rng.normal(-0.5, 1.0, 1000).clip(-2.0, 2.0)
    for gain in gains.tolist():
        w = trust.weight("m")
        lost -= np.log(w * np.exp(gain) + 1.0 - w)
        trust.observe("m", gain)
    assert lost < -np.log(1.0 - START) + 0.005 * len(gains)


def test_trust_comes_back_when_the_traffic_turns():
    """A share of the start is always left."""
    trust = Trust()
    for _ in range(2000):
        trust.observe("m", -1.0)
    for _ in range(60):
        trust.observe("m", 0.2)
    assert trust.weight("m") > 0.5


@pytest.mark.parametrize("gain", [float("nan"), float("inf"), -float("inf")])
def test_absurd_gains_are_ignored(gain):
    """NaN and infinities move nothing."""
    trust = Trust()
    trust.observe("m", gain)
    assert trust.weight("m") == START


def test_memory_is_bounded():
    """The model that was quiet for longest goes first."""
    trust = Trust(capacity=3)
    for name in "abcdea":
        trust.observe(name, 1.0)
    assert set(trust._of) == {"d", "e", "a"}


def test_a_mixture_lies_between():
    """At every length, and at the ends it is one or the other."""
    one, two = (LengthDistribution.lognormal(m, 0.8) for m in (100.0, 400.0))
    half = mixed(one, two, 0.5).survival
    assert np.all((half >= one.survival) & (half <= two.survival))
    assert np.array_equal(mixed(one, two, 1.0).survival, one.survival)
