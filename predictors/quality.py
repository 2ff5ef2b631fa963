"""Is the answer of this variant good enough? A calibrated probability per request and variant.

    logit P(good | request, m) = calibrate(logit prior_m + f(request, m))

The prior of a variant is its base rate (from feedback, else from its config); boosted trees add
what the prompt says, from kernel regressions of difficulty: one over all models, and one per model
that the fit knew. f = 0 where features are missing or strange, so the prior is the fallback.
`predictors.feedback` moves the priors with sparse feedback.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from domain.errors import ShapeError
from predictors.artifact import Artifact, ArtifactError, load
from predictors.features import DENSE_SIZE, MODEL_SIZE, SCHEMA_HASH, SIZE, model_features
from predictors.length_gbdt import KernelScores, forest_from, kernel_from
from predictors.text import TextEncoder
from predictors.trees import check, walk

Floats = NDArray[np.float64]

KIND = "quality"
MAX_LOGIT = 8.0
PRECISION_LOSS = {"fp16": 0.0, "bf16": 0.0, "fp8": 0.005, "int8": 0.005, "int4": 0.015, "q4": 0.015}
"""Share of answers that turn bad under a precision, where nothing was measured: upper figures of
vendors' and papers' reports (FP8 below 0.5 %, INT4 below 1.5 % overall; more on arithmetic: GSM8K
-4 % at INT4). A prior, replaced by feedback."""


def logit(p: float) -> float:
    """log(p / (1 - p)), p kept within [0.0005, 0.9995]."""
    p = min(max(p, 0.0005), 0.9995)
    return math.log(p / (1.0 - p))


def sigmoid(x: float) -> float:
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + math.exp(-min(max(x, -40.0), 40.0)))


class QualityModel:
    """A fitted quality model; pure. `text` is the encoder that ships, if it is loaded already.

    Raises: ArtifactError at construction when the arrays do not fit each other or this version.
    """

    def __init__(self, artifact: Artifact, text: TextEncoder | None = None) -> None:
        try:
            arrays = dict(artifact.arrays)
            self.version = artifact.version
            kernel = kernel_from(arrays)
            self._scores = KernelScores(kernel, TextEncoder.of(artifact, text))
            self._forest = forest_from(arrays)
            check(self._forest, ROW_SIZE)
            names = artifact.card["models"]
            self._column = {str(name): i + 1 for i, name in enumerate(names)}
            self._from = np.ascontiguousarray(arrays["calibration_from"], np.float64)
            self._to = np.ascontiguousarray(arrays["calibration_to"], np.float64)
            self._check_shapes(kernel.alpha.shape[1])
        except (KeyError, ShapeError, ValueError, TypeError, IndexError) as exc:
            raise ArtifactError(f"quality artifact does not fit together: {exc}") from exc

    def _check_shapes(self, columns: int) -> None:
        if len(self._column) + 1 != columns:
            raise ShapeError("one kernel column per known model, and one for all")
        rising = np.all(np.diff(self._from) > 0) and np.all(np.diff(self._to) >= 0)
        if self._from.ndim != 1 or self._from.shape != self._to.shape or not rising:
            raise ShapeError("calibration must be a rising curve")

    @classmethod
    def load(cls, path: Path, text: TextEncoder | None = None) -> QualityModel:
        """Read an artifact file.

        Raises: ArtifactError as `predictors.artifact.load` and the constructor.
        """
        return cls(load(path, kind=KIND, schema=SCHEMA_HASH), text)

    def scores(self, features: Floats) -> Floats:
        """Kernel columns of one request: difficulty over all models, then per known model."""
        return self._scores(features)

    def predict(self, features: Floats, models: list[str], priors: list[float]) -> list[float]:
        """P(good) of each variant, given its base rate; never raises for a strange vector."""
        if features.shape != (SIZE,) or not np.all(np.isfinite(features)):
            return list(priors)
        scores = self.scores(features)
        return [
            self.calibrate(logit(prior) + self.shift(features, scores, model, prior))
            for model, prior in zip(models, priors, strict=True)
        ]

    def shift(self, features: Floats, scores: Floats, model: str, prior: float) -> float:
        """f(request, model) in log odds."""
        column = self._column.get(model)
        own = math.nan if column is None else float(scores[column])
        row = row_of(features, float(scores[0]), own, model, prior)
        raw = float(walk(row, *self._forest))
        return min(max(raw, -MAX_LOGIT), MAX_LOGIT)

    def calibrate(self, log_odds: float) -> float:
        """Probability of raw log odds, by the isotonic curve of the fit."""
        return float(np.interp(log_odds, self._from, self._to))


ROW_SIZE = DENSE_SIZE + MODEL_SIZE + 3


def row_of(features: Floats, difficulty: float, own: float, model: str, prior: float) -> Floats:
    """Input of the trees, (ROW_SIZE,): dense numbers, model features, prior, the two scores."""
    row = np.empty(ROW_SIZE)
    row[:DENSE_SIZE] = features[:DENSE_SIZE]
    row[DENSE_SIZE : DENSE_SIZE + MODEL_SIZE] = model_features(model)
    row[-3] = logit(prior)
    row[-2] = difficulty
    row[-1] = own
    return row
