"""A length predictor of known quality for simulations: the truth, blurred.

A trace has no text to predict from, so the forecast of a request is drawn: median = truth x
exp(sigma z), spread sigma, which is what a calibrated log-normal predictor with that error would
say. Everything else is the baseline estimator.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from domain.length import EDGES, LengthDistribution
from domain.outcome import Outcome
from domain.request import InferenceRequest
from predictors.estimator import BaselineEstimator
from training.traces import Floats, Ints

_GRID = np.linspace(-8.0, 8.0, 3201)
_TAIL = np.array([1.0 - NormalDist().cdf(float(z)) for z in _GRID])
CHUNK = 4096
"""Forecasts made at once."""


def survival_rows(truth: Ints, sigma: float, rng: np.random.Generator) -> Floats:
    """Forecasts (n, BINS + 1) as survival at `domain.length.EDGES`; sigma is at least 0.02."""
    spread = max(sigma, 0.02)
    median = np.log(truth) + sigma * rng.standard_normal(len(truth))
    with np.errstate(divide="ignore"):
        z = (np.log(EDGES)[None, :] - median[:, None]) / spread
    rows: Floats = np.interp(z, _GRID, _TAIL, left=1.0, right=0.0)
    rows[:, 0], rows[:, -1] = 1.0, 0.0
    return rows


class InformedEstimator(BaselineEstimator):
    """The baseline whose length forecasts are the truth blurred by `sigma`; request ids are row
    numbers of `truth` (n,) tokens. `learning` False freezes what outcomes would teach.
    """

    def __init__(self, truth: Ints, sigma: float, seed: int, *, learning: bool = True) -> None:
        super().__init__()
        self._truth = truth
        self._sigma = sigma
        self._seed = seed
        self._learning = learning
        self._rows: dict[int, Floats] = {}

    def rows(self, chunk: int) -> Floats:
        """Forecasts of requests chunk * CHUNK and on."""
        if chunk not in self._rows:
            part = self._truth[chunk * CHUNK : (chunk + 1) * CHUNK]
            rng = np.random.default_rng([self._seed, 5, chunk])
            self._rows[chunk] = survival_rows(part, self._sigma, rng)
        return self._rows[chunk]

    def length(self, request: InferenceRequest) -> LengthDistribution:
        """The blurred truth about this request."""
        i = int(request.id)
        return LengthDistribution(self.rows(i // CHUNK)[i % CHUNK])

    def learn(self, outcome: Outcome) -> None:
        """As the baseline does, unless frozen."""
        if self._learning:
            super().learn(outcome)
