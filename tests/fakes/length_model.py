"""A length artifact small enough to know by heart."""

import numpy as np

from predictors.artifact import Artifact
from predictors.features import DENSE_SIZE, SCHEMA_HASH, WORD_IDS, word_id
from predictors.length_gbdt import KIND, Kernel, forest_arrays, kernel_arrays
from predictors.text import TextEncoder
from predictors.trees import Forest


def toy_text() -> TextEncoder:
    """Two words with known vectors, the rest unknown."""
    index = np.full(WORD_IDS, -1)
    index[word_id(b"long")] = 0
    index[word_id(b"short")] = 1
    rows = np.array([[127, 0], [0, 127]], np.int8)
    return TextEncoder(index, rows, np.full(2, 1.0 / 127.0))


def toy(**change) -> Artifact:
    """A model that answers "long" with half the hazard and "short" with twice of it."""
    landmarks = np.zeros((2, 2 + DENSE_SIZE))
    landmarks[0, 0] = landmarks[1, 1] = 1.0
    kernel = Kernel(
        np.zeros(DENSE_SIZE),
        np.full(DENSE_SIZE, 1e9),
        landmarks,
        np.array([[1.0], [-1.0]]),
        0.5,
    )
    score = DENSE_SIZE
    forest = Forest(
        np.zeros(1, np.int32),
        np.array([score, -1, score, -1, -1], np.int32),
        np.array([-0.5, np.log(2.0), 0.5, 0.0, -np.log(2.0)]),
        np.array([1, 1, 3, 3, 4], np.int32),
        np.array([2, 1, 4, 3, 4], np.int32),
        np.zeros(5, np.uint8),
    )
    arrays = {
        **toy_text().arrays("text_"),
        **kernel_arrays(kernel),
        **forest_arrays(forest),
        "range_low": np.full(DENSE_SIZE, -1.0),
        "range_high": np.full(DENSE_SIZE, 100.0),
    }
    return Artifact(kind=KIND, schema=SCHEMA_HASH, arrays=arrays | change)
