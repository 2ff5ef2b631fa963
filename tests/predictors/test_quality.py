import numpy as np
import pytest

from predictors.artifact import Artifact, ArtifactError
from predictors.features import DENSE_SIZE, SCHEMA_HASH, SIZE, PromptFacts, encode
from predictors.feedback import FeedbackPriors
from predictors.length_gbdt import Kernel, forest_arrays, kernel_arrays
from predictors.quality import KIND, ROW_SIZE, QualityModel, logit, sigmoid
from predictors.trees import Forest
from tests.fakes.length_model import toy_text


def toy(**change) -> Artifact:
    """Hard prompts say "long": log odds fall by one there, except for the model named strong."""
    landmarks = np.zeros((1, 2 + DENSE_SIZE))
    landmarks[0, 0] = 1.0
    kernel = Kernel(
        np.zeros(DENSE_SIZE), np.full(DENSE_SIZE, 1e9), landmarks, np.array([[-1.0, 1.0]]), 0.5
    )
    own = ROW_SIZE - 1
    forest = Forest(
        np.zeros(1, np.int32),
        np.array([own - 1, own, -1, -1, -1], np.int32),
        np.array([-0.5, 0.5, 0.0, -1.0, 0.5]),
        np.array([1, 3, 2, 3, 4], np.int32),
        np.array([2, 4, 2, 3, 4], np.int32),
        np.array([0, 1, 0, 0, 0], np.uint8),
    )
    line = np.linspace(-6, 6, 200)
    arrays = {
        **toy_text().arrays("text_"),
        **kernel_arrays(kernel),
        **forest_arrays(forest),
        "calibration_from": line,
        "calibration_to": 1 / (1 + np.exp(-line)),
    }
    return Artifact(
        kind=KIND, schema=SCHEMA_HASH, arrays=arrays | change, card={"models": ["strong"]}
    )


MODEL = QualityModel(toy())


def test_easy_prompts_keep_the_prior_and_hard_ones_differ_by_model():
    """F is added to the prior's log odds, per model where the fit knew it."""
    names, priors = ["strong", "weak-1b"], [0.8, 0.6]
    easy = MODEL.predict(encode(PromptFacts(text="hm")), names, priors)
    hard = MODEL.predict(encode(PromptFacts(text="long")), names, priors)
    assert easy == pytest.approx(priors, abs=1e-3)
    expected = [sigmoid(logit(0.8) + 0.5), sigmoid(logit(0.6) - 1.0)]
    assert hard == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("features", [np.zeros(0), np.full(SIZE, np.nan), np.zeros(3)])
def test_strange_vectors_give_the_priors(features):
    assert MODEL.predict(features, ["strong"], [0.7]) == [0.7]


@pytest.mark.parametrize(
    "change",
    [
        {"calibration_to": np.linspace(1, 0, 200)},
        {"calibration_from": np.zeros(200)},
        {"kernel_alpha": np.zeros((1, 5))},
        {"forest_right": np.zeros(5, np.int32)},
    ],
)
def test_hostile_arrays_are_refused(change):
    with pytest.raises(ArtifactError):
        QualityModel(toy(**change))


def test_feedback_moves_the_prior_and_is_forgotten():
    """Bad answers pull the rate down, later good ones back up; nonsense is ignored."""
    rates = FeedbackPriors(weight=10.0, half_life=50.0)
    assert rates.rate("v", 0.9) == 0.9
    for _ in range(100):
        rates.observe("v", 0.0)
    low = rates.rate("v", 0.9)
    assert low < 0.2
    for score in (float("nan"), 2.0, -1.0):
        rates.observe("v", score)
    assert rates.rate("v", 0.9) == low
    for _ in range(200):
        rates.observe("v", 1.0)
    assert rates.rate("v", 0.9) > 0.8
