"""Running length distributions: convergence, censoring, groups, forgetting and memory."""

import numpy as np
import pytest

from domain.length import LengthDistribution
from predictors.running import LARGEST_UNIT, PRIOR, RunningLengths

LEVELS = np.array([0.1, 0.5, 0.9])


def fed(lengths, *, model="m", group=0, into=None) -> RunningLengths:
    running = into or RunningLengths()
    for tokens in lengths:
        running.observe(model, group, float(tokens))
    return running


def test_before_any_outcome_it_is_the_prior():
    """An unknown model gets the cold-start distribution."""
    assert RunningLengths().distribution("m").mean == pytest.approx(PRIOR.mean)


def test_quantiles_converge_to_those_of_the_stream():
    """After 3,000 log-normal lengths the quantiles are within a tenth of the truth."""
    rng = np.random.default_rng(0)
    stream = np.maximum(np.round(rng.lognormal(np.log(400.0), 0.5, 3000)), 1)
    learned = fed(stream).distribution("m")
    truth = LengthDistribution.lognormal(400.0, 0.5)
    assert learned.quantiles(LEVELS) == pytest.approx(truth.quantiles(LEVELS), rel=0.12)


def test_censored_answers_are_not_taken_for_short_ones():
    """Answers cut at 256 tokens: treated as censored the tail survives, taken as complete it
    vanishes.
    """
    rng = np.random.default_rng(1)
    stream = np.round(rng.lognormal(np.log(300.0), 0.7, 2000))
    aware, naive = RunningLengths(), RunningLengths()
    for tokens in stream:
        cut = tokens >= 256
        aware.observe("m", 0, min(tokens, 256.0), censored=bool(cut))
        naive.observe("m", 0, min(tokens, 256.0))
    # The bin that holds the cut ends below 310 tokens.
    assert aware.distribution("m").survives(310.0) == pytest.approx((stream > 310).mean(), abs=0.15)
    assert naive.distribution("m").survives(310.0) < 0.05
    assert aware.distribution("m").survives(128.0) == pytest.approx((stream > 128).mean(), abs=0.06)


def test_a_group_has_its_own_distribution_shrunk_to_its_model():
    """A template with short answers is known apart; an unseen group gets the model's."""
    running = fed([500] * 300, group=1)
    fed([20] * 300, group=2, into=running)
    assert running.distribution("m", 2).quantile(0.5) < 40
    assert running.distribution("m", 1).quantile(0.5) > 300
    assert running.distribution("m", 3).mean == running.distribution("m").mean
    few = fed([20] * 3, group=4, into=running)
    assert few.distribution("m", 4).mean > 50


def test_models_do_not_mix():
    """Lengths of one model say nothing about another."""
    running = fed([5] * 200, model="a")
    assert running.distribution("b").mean == pytest.approx(PRIOR.mean)


def test_it_follows_a_change():
    """A stream that becomes ten times longer is followed within two half-lives."""
    running = fed([50] * 2000)
    fed([500] * 1000, into=running)
    assert running.distribution("m").quantile(0.5) > 300


def test_forgetting_in_growing_units_is_forgetting():
    """Past the point where units are brought back, the distribution is still the plain one."""
    rng = np.random.default_rng(2)
    stream = np.round(rng.lognormal(5.0, 0.6, 12_000))  # 2 ** 24 is beyond the largest unit
    assert 0.5 ** (-len(stream) / 500) > LARGEST_UNIT
    whole, last = fed(stream), fed(stream[-6000:])
    for level in LEVELS:
        whole_q, last_q = (
            whole.distribution("m").quantile(level),
            last.distribution("m").quantile(level),
        )
        assert whole_q == pytest.approx(last_q, rel=0.02)


def test_memory_is_bounded():
    """At most `capacity` keys are kept; the least recently seen group goes first."""
    running = RunningLengths(capacity=10)
    for group in range(1, 200):
        running.observe("m", group, 700.0)
        running.observe("m", 5, 7.0)
    assert len(running._of) <= 10
    assert running.distribution("m", 5).quantile(0.5) < 20
    assert running.distribution("m", 100).mean == running.distribution("m").mean


def test_it_is_deterministic():
    """The same outcomes in the same order give the same distribution, bit for bit."""
    stream = np.round(np.random.default_rng(3).lognormal(5.0, 1.0, 500))
    one, two = (fed(stream, group=3).distribution("m", 3).survival for _ in range(2))
    assert np.array_equal(one, two)


def test_answers_without_tokens_teach_nothing():
    """Zero tokens is no length."""
    running = fed([0, 0.5])
    assert running.distribution("m").mean == pytest.approx(PRIOR.mean)
