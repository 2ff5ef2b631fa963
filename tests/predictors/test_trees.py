import numpy as np
import pytest

from domain.errors import ShapeError
from predictors.trees import Forest, check, flatten, predict

lightgbm = pytest.importorskip("lightgbm")


def fitted(missing: bool, rounds: int = 40):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 6))
    if missing:
        x[rng.random(x.shape) < 0.2] = np.nan
    y = np.nan_to_num(x[:, 0]) * 2 + np.sin(3 * np.nan_to_num(x[:, 1])) + np.isnan(x[:, 2])
    data = lightgbm.Dataset(x, y)
    booster = lightgbm.train({"objective": "regression", "verbose": -1}, data, rounds)
    return booster, x


@pytest.mark.parametrize("missing", [False, True])
def test_walk_equals_the_library(missing):
    """Flattened trees give the library's raw score to 1e-9, NaN and values on a border included."""
    booster, x = fitted(missing)
    forest = flatten(booster)
    borders = np.tile(forest.threshold[forest.feature >= 0][:50, None], (1, 6))
    for rows in (x, borders, np.full((3, 6), np.nan)):
        assert predict(forest, rows) == pytest.approx(
            booster.predict(rows, raw_score=True), abs=1e-9
        )


@pytest.mark.parametrize(
    "harm",
    [
        lambda f: f._replace(left=np.zeros_like(f.left)),
        lambda f: f._replace(right=f.right + 10**6),
        lambda f: f._replace(feature=f.feature + 7),
        lambda f: f._replace(root=f.root - 1),
        lambda f: f._replace(threshold=f.threshold * np.nan),
        lambda f: f._replace(missing=f.missing[:-1]),
        lambda f: f._replace(missing=f.missing + 3),
    ],
)
def test_hostile_forests_are_refused(harm):
    """Loops, out-of-range nodes and features, NaN and ragged columns never reach the walk."""
    booster, _ = fitted(missing=False, rounds=3)
    forest = flatten(booster)
    check(forest, 6)
    with pytest.raises(ShapeError):
        check(harm(forest), 6)


def test_a_single_leaf_is_a_tree():
    """A tree without a split adds its constant."""
    forest = Forest(
        np.zeros(1, np.int32),
        np.array([-1], np.int32),
        np.array([0.25]),
        np.zeros(1, np.int32),
        np.zeros(1, np.int32),
        np.zeros(1, np.uint8),
    )
    check(forest, 1)
    assert predict(forest, np.zeros((2, 1))).tolist() == [0.25, 0.25]
