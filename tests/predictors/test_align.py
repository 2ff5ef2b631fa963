import numpy as np
import pytest

from predictors.align import ScoreAlign


def feed(align, scores, ranks, key="t"):
    for score, rank in zip(scores, ranks, strict=True):
        align.observe(key, float(score), float(rank))
    return align


def test_scores_count_from_the_traffics_mean():
    """Prompts that all score low are no shorter than usual: their own level is the zero."""
    rng = np.random.default_rng(0)
    scores = -0.7 + 0.4 * rng.normal(size=600)
    align = feed(ScoreAlign(), scores, scores + 0.7 + 0.5 * rng.normal(size=600))
    assert align("t", -0.7) == pytest.approx(0.0, abs=0.08)
    assert align("t", -0.2) == pytest.approx(0.5, abs=0.1)


def test_scores_that_say_nothing_fade():
    """Where the outcome does not follow the score, the slope falls towards zero, never below."""
    rng = np.random.default_rng(1)
    align = feed(ScoreAlign(), rng.normal(size=2000), rng.normal(size=2000))
    assert 0.0 <= align("t", 1.0) < 0.2
    against = rng.normal(size=2000)
    assert feed(ScoreAlign(), against, -against)("t", 1.0) == 0.0


def test_before_any_outcome_the_score_stands():
    align = feed(ScoreAlign(), [0.3], [0.2], key="other")
    assert align("t", 0.4) == 0.4


def test_nonsense_is_ignored_and_memory_is_bounded():
    align = ScoreAlign(capacity=10)
    align.observe("t", float("nan"), 0.0)
    align.observe("t", 0.0, float("inf"))
    assert align("t", 0.4) == 0.4
    for i in range(100):
        align.observe(f"k{i}", 0.1, 0.1)
    assert len(align._moments) == 10
