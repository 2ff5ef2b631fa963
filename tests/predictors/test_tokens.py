"""Characters to tokens: converges per model, whatever the vocabulary."""

import numpy as np
import pytest

from predictors.tokens import START_RATIO, TEMPLATE_TOKENS, TokenRatio


def taught(ratio: float, template: float, *, noise: float = 0.05, count: int = 400) -> TokenRatio:
    rng = np.random.default_rng(2)
    learner = TokenRatio()
    for _ in range(count):
        chars = int(rng.integers(40, 20_000))
        tokens = template + chars / ratio * np.exp(rng.normal(0.0, noise))
        learner.observe("m", chars, float(round(tokens)))
    return learner


def test_the_start_is_english_text_under_byte_pairs():
    """Nothing seen: template plus characters over four; never below one token."""
    assert TokenRatio().estimate("m", 4000) == round(TEMPLATE_TOKENS + 4000 / START_RATIO)
    assert TokenRatio(template=0.0).estimate("m", 0) == 1.0


@pytest.mark.parametrize(("ratio", "template"), [(4.6, 12.0), (2.2, 30.0), (1.3, 6.0)])
def test_it_converges_to_ratio_and_template(ratio, template):
    """English, code-heavy and Chinese-like text: long prompts within 4 %, short ones within a few
    tokens.
    """
    learner = taught(ratio, template)
    for chars in (500, 5_000, 18_000):
        assert learner.estimate("m", chars) == pytest.approx(
            template + chars / ratio, rel=0.04, abs=12
        )


def test_one_model_teaches_nothing_about_another():
    """Ratios are per model."""
    learner = taught(1.3, 6.0)
    assert learner.estimate("other", 4000) == TokenRatio().estimate("other", 4000)


def test_it_follows_a_change_of_tokenizer():
    """After another thousand prompts the old ratio is forgotten."""
    learner = taught(4.5, 10.0)
    for i in range(1000):
        chars = 100 + 7 * i % 9000
        learner.observe("m", chars, 10.0 + chars / 2.5)
    assert learner.estimate("m", 6000) == pytest.approx(10 + 6000 / 2.5, rel=0.05)


def test_one_outlier_does_not_turn_it_over():
    """A prompt counted ten times too long moves a settled estimate by less than a fifth."""
    learner = taught(4.0, 8.0)
    before = learner.estimate("m", 8000)
    learner.observe("m", 8000, 20_000.0)
    assert learner.estimate("m", 8000) == pytest.approx(before, rel=0.2)


def test_empty_prompts_and_counts_teach_nothing():
    """Zero characters or tokens are ignored."""
    learner = TokenRatio()
    learner.observe("m", 0, 50.0)
    learner.observe("m", 50, 0.0)
    assert learner.estimate("m", 400) == TokenRatio().estimate("m", 400)
