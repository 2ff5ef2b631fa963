"""Thinking and answer, apart."""

import numpy as np
import pytest

from predictors.parts import PartLengths

MODEL = "r1"


def taught(count=3000, seed=0, factor=lambda thought: 1.0, group=0):
    """Parts that saw `count` outputs: thinking about 400, answers about 100 times a factor."""
    rng = np.random.default_rng(seed)
    parts = PartLengths()
    for _ in range(count):
        thought = float(np.ceil(400.0 * np.exp(0.8 * rng.standard_normal())))
        answer = float(np.ceil(100.0 * factor(thought) * np.exp(0.5 * rng.standard_normal())))
        parts.observe(MODEL, group, thought + 1.0, thought + answer)
    return parts


def test_a_model_that_never_thought_has_no_parts():
    """Answers that begin with the first token teach nothing, and cost nothing."""
    parts = PartLengths()
    for _ in range(50):
        parts.observe("plain", 0, 1.0, 120.0)
    assert not parts.thinks("plain")
    parts.observe("plain", 0, 61.0, 120.0)
    assert parts.thinks("plain")


def test_both_parts_are_learned():
    """Medians of thinking and answer come near those of the outputs."""
    parts = taught()
    assert parts.first(MODEL).quantile(0.5) == pytest.approx(400, rel=0.2)
    assert parts.answer(MODEL, 0, 400.0).quantile(0.5) == pytest.approx(100, rel=0.2)


def test_the_answer_depends_on_the_thinking():
    """Where long thinking brings long answers, the forecast at the boundary says so; where it does
    not, it says the same for all.
    """
    linked = taught(factor=lambda thought: np.sqrt(thought / 400.0))
    short, long = (linked.answer(MODEL, 0, first).quantile(0.5) for first in (150.0, 1200.0))
    assert long > 1.8 * short
    apart = taught()
    short, long = (apart.answer(MODEL, 0, first).quantile(0.5) for first in (150.0, 1200.0))
    assert long == pytest.approx(short, rel=0.2)


def test_a_group_has_its_own_lengths_and_the_models_link():
    """A group that thinks ten times as long is in the same classes of its own ranks."""
    parts = taught(factor=lambda thought: np.sqrt(thought / 400.0))
    rng = np.random.default_rng(5)
    for _ in range(300):
        thought = float(np.ceil(4000.0 * np.exp(0.8 * rng.standard_normal())))
        parts.observe(MODEL, 7, thought + 1.0, thought + 100.0)
    assert parts.first(MODEL, 7).quantile(0.5) == pytest.approx(4000, rel=0.3)
    assert parts.first(MODEL).quantile(0.5) < 2000


@pytest.mark.parametrize("seed", range(3))
def test_nine_in_ten_answers_are_covered(seed):
    """The P90 of both parts covers 90 % of outputs of a mixture of groups, two errors allowed."""
    rng = np.random.default_rng(seed)
    parts, inside = PartLengths(), []
    for i in range(2500):
        group = int(rng.integers(1, 5))
        thought = float(np.ceil(100.0 * group * np.exp(rng.standard_normal())))
        answer = float(np.ceil(0.3 * thought * np.exp(0.7 * rng.standard_normal())))
        if i >= 500:
            first, after = parts.first(MODEL, group), parts.answer(MODEL, group, thought + 1.0)
            inside.append(
                (thought + 1.0 <= first.quantile(0.9), answer <= after.quantile(0.9)),
            )
        parts.observe(MODEL, group, thought + 1.0, thought + answer)
    np.testing.assert_allclose(np.mean(inside, axis=0), 0.9, atol=0.02)


def test_thinking_that_was_cut_is_censored():
    """Outputs cut while they still think move the thinking up, and leave the answer alone."""
    parts = taught(count=400)
    answer = parts.answer(MODEL, 0, 400.0).quantile(0.5)
    before = parts.first(MODEL).quantile(0.8)
    for _ in range(200):
        parts.observe(MODEL, 0, None, 1000.0, cut=True)
    assert parts.first(MODEL).quantile(0.8) > max(before, 1000.0)
    assert parts.answer(MODEL, 0, 400.0).quantile(0.5) == pytest.approx(answer, rel=0.1)


@pytest.mark.parametrize(
    ("first", "whole"), [(0.0, 10.0), (12.0, 10.0), (None, 0.0), (float("nan"), 10.0)]
)
def test_impossible_counts_are_left_out(first, whole):
    """A boundary outside the output, or no output, teaches nothing."""
    parts = PartLengths()
    parts.observe(MODEL, 0, first, whole)
    assert not parts.thinks(MODEL)


def test_the_same_outputs_give_the_same_forecasts():
    """A replay learns the same."""
    one, two = taught(count=500), taught(count=500)
    for first in (1.0, 50.0, 5000.0):
        np.testing.assert_array_equal(
            one.answer(MODEL, 0, first).survival, two.answer(MODEL, 0, first).survival
        )
