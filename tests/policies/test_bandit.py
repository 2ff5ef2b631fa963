"""The bandit's learner: starts as P(SLO), learns where that is wrong, forgets."""

import numpy as np
import pytest

from domain.ports import Lesson
from policies.names import TRAITS
from policies.scorers.bandit import HEAD, bandit

D = len(TRAITS)


def traits(**values):
    x = np.zeros(D)
    x[0] = 1.0
    for name, value in values.items():
        x[TRAITS.index(name)] = value
    return x


def value(scorer, x):
    return float(scorer.params[HEAD : HEAD + D] @ x)


def test_it_starts_as_p_slo():
    scorer = bandit()
    assert value(scorer, traits(p_slo=0.37, running=2.0)) == pytest.approx(0.37)


def test_it_learns_where_p_slo_is_wrong():
    """Replicas with many running miss, whatever was predicted."""
    rng, scorer = np.random.default_rng(1), bandit()
    for _ in range(800):
        running = float(rng.choice([0.0, 3.0]))
        x = traits(p_slo=0.9, running=running)
        scorer.learner.learn(Lesson(0, bool(rng.random() < (0.9 if running == 0.0 else 0.2)), 1, x))
    assert value(scorer, traits(p_slo=0.9)) == pytest.approx(0.9, abs=0.07)
    assert value(scorer, traits(p_slo=0.9, running=3.0)) == pytest.approx(0.2, abs=0.07)


def test_it_forgets():
    """After a silent change the new truth is learned within a few half-lives of the memory."""
    rng, scorer = np.random.default_rng(2), bandit(forgetting=0.99, ridge=2.0)
    x = traits(p_slo=0.9)
    for chance in (0.95, 0.1):
        for _ in range(600):
            scorer.learner.learn(Lesson(0, bool(rng.random() < chance), 1.0, x))
        assert value(scorer, x) == pytest.approx(chance, abs=0.12)


def test_least_squares_without_forgetting_is_ridge():
    """The recursion's answer is the closed form's."""
    rng, scorer = np.random.default_rng(3), bandit(forgetting=1.0, ridge=2.0)
    xs, ys = rng.random((60, D)), rng.random(60) < 0.5
    for x, y in zip(xs, ys, strict=True):
        scorer.learner.learn(Lesson(0, bool(y), 1.0, x))
    start = np.eye(D)[TRAITS.index("p_slo")]
    a, b = xs.T @ xs + 2.0 * np.eye(D), xs.T @ ys + 2.0 * start
    assert scorer.params[HEAD : HEAD + D] == pytest.approx(np.linalg.solve(a, b))
    assert scorer.params[HEAD + D :].reshape(D, D) == pytest.approx(np.linalg.inv(a))


def test_what_says_nothing_teaches_nothing():
    scorer = bandit()
    before = scorer.params.copy()
    scorer.learner.learn(Lesson(0, None, 1.0, traits()))
    scorer.learner.learn(Lesson(0, True, 1.0, None))
    assert np.array_equal(before, scorer.params)
