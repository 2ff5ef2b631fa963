import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.length import BINS, EDGES, LengthDistribution
from predictors.artifact import Artifact, ArtifactError, save
from predictors.features import DENSE_SIZE, SCHEMA_HASH, SIZE, WORD_IDS, PromptFacts, encode
from predictors.length_gbdt import (
    KIND,
    KNOTS,
    STRETCHES,
    LengthGbdt,
    exposure,
    reshape,
    row_size,
)
from tests.fakes.length_model import toy

OWN = LengthDistribution.lognormal(200.0, 0.9)


MODEL = LengthGbdt(toy())


def ask(text: str, own: LengthDistribution = OWN) -> LengthDistribution:
    return MODEL.predict(encode(PromptFacts(text=text)), "any-7b", own)


def test_words_move_the_distribution():
    """The prompt that asks for more gets the longer distribution, the neutral one the model's
    own.
    """
    short, neutral, long = (ask(text).mean for text in ("short", "say so", "long"))
    assert short < neutral < long
    assert ask("say so").survival == pytest.approx(OWN.survival, abs=1e-9)


def test_half_the_hazard_is_the_square_root_of_survival():
    """With one factor for all stretches the formula is the proportional-hazards one."""
    assert ask("long").survival == pytest.approx(np.sqrt(OWN.survival), abs=1e-9)
    assert ask("short").survival == pytest.approx(OWN.survival**2, abs=1e-9)


@settings(max_examples=60)
@given(
    st.lists(st.floats(0.02, 50.0), min_size=STRETCHES, max_size=STRETCHES),
    st.floats(2.0, 5000.0),
    st.floats(0.1, 2.0),
)
def test_reshape_matches_the_integral(factors, median, sigma):
    """S = exp(-integral of exp(f) over v), computed here stretch by stretch, and a survival
    function.
    """
    own = LengthDistribution.lognormal(median, sigma)
    new = reshape(own, np.array(factors))
    expected = np.exp(-(exposure(own.survival) @ np.array(factors)))
    alive = own.survival > 1e-9
    assert new.survival[alive] == pytest.approx(expected[alive], abs=1e-9)
    assert np.all(np.diff(new.survival) <= 1e-12)


def test_exposure_adds_up():
    """Time at risk over all stretches is v itself."""
    survival = np.array([1.0, 0.97, 0.5, 0.01])
    assert exposure(survival).sum(-1) == pytest.approx(-np.log(survival))
    assert KNOTS[0] == 0.0


@pytest.mark.parametrize(
    "features",
    [
        np.zeros(0),
        np.zeros(SIZE - 1),
        np.full(SIZE, np.nan),
        np.full(SIZE, np.inf),
        np.full(SIZE, -1e12),
    ],
)
def test_bad_or_strange_vectors_give_the_models_own(features):
    """No vector raises; one outside the schema or the training range changes nothing."""
    assert MODEL.predict(features, "m", OWN) is OWN


def test_an_answer_under_way_is_left_alone():
    """A conditioned distribution is not reshaped: `remaining` of the forecast is the way."""
    running = OWN.remaining(50.0)
    assert MODEL.predict(encode(PromptFacts(text="long")), "m", running) is running


def test_same_question_same_answer():
    vector = encode(PromptFacts(text="long and short"))
    before = vector.copy()
    first = MODEL.predict(vector, "m", OWN).survival
    assert MODEL.predict(vector, "m", OWN).survival.tolist() == first.tolist()
    assert vector.tolist() == before.tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"kernel_alpha": np.zeros((3, 1))},
        {"kernel_std": np.zeros(DENSE_SIZE)},
        {"kernel_width": np.array([0.0])},
        {"kernel_landmarks": np.zeros((2, 5))},
        {"forest_left": np.zeros(5, np.int32)},
        {"forest_feature": np.full(5, row_size(1), np.int32)},
        {"text_rows": np.zeros((2, 2))},
        {"text_index": np.full(WORD_IDS, 7)},
        {"range_low": np.zeros(3)},
    ],
)
def test_arrays_that_do_not_fit_are_refused(change):
    """Digest and schema may be right and the numbers still hostile."""
    with pytest.raises(ArtifactError, match="fit together"):
        LengthGbdt(toy(**change))


def test_missing_arrays_are_refused():
    arrays = dict(toy().arrays)
    del arrays["kernel_mean"]
    with pytest.raises(ArtifactError):
        LengthGbdt(Artifact(kind=KIND, schema=SCHEMA_HASH, arrays=arrays))


def test_through_a_file(tmp_path):
    """Saved and loaded, the model says the same."""
    path = tmp_path / "length.npz"
    save(toy(), path)
    loaded = LengthGbdt.load(path)
    vector = encode(PromptFacts(text="long"))
    assert loaded.predict(vector, "m", OWN).mean == pytest.approx(
        MODEL.predict(vector, "m", OWN).mean
    )
    assert loaded.version == MODEL.version


def test_bins_are_the_domains():
    assert len(EDGES) == BINS + 1
