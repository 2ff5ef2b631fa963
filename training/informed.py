"""A length predictor of known quality for simulations: the truth, blurred.

A trace has no text to predict from, so the forecast of a request is drawn: median = truth x
exp(sigma z), spread sigma, which is what a log-normal predictor with that error would say that
knows nothing of how long answers are elsewhere. A `calibrated` one knows: it says the trace's own
lengths, reweighted by how likely each makes log(truth) + sigma z. Its forecasts keep their promise
at every sigma: 0 is the truth, infinity one distribution for all. Everything else is the baseline
estimator.
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


def calibrated_rows(
    truth: Ints, sigma: float, population: Floats, rng: np.random.Generator
) -> Floats:
    """Forecasts (n, BINS + 1) as survival at `domain.length.EDGES`, given the share of lengths in
    every bin, (BINS,).
    """
    centre = np.log(0.5 * (EDGES[:-1] + 1.0 + EDGES[1:]))
    spread = max(sigma, 0.02)
    seen = np.log(truth)[:, None] + np.where(
        np.isfinite(sigma), sigma * rng.standard_normal((len(truth), 1)), 0.0
    )
    likely = -0.5 * ((seen - centre) / spread) ** 2
    weight = population * np.exp(likely - likely.max(1, keepdims=True))
    rows = np.ones((len(truth), len(EDGES)))
    rows[:, 1:] = np.maximum(1.0 - np.cumsum(weight, 1) / weight.sum(1, keepdims=True), 0.0)
    rows[:, -1] = 0.0
    return rows


def population_of(truth: Ints) -> Floats:
    """Share of lengths in every bin, (BINS,), none quite empty."""
    counts = np.histogram(np.searchsorted(EDGES, truth) - 1, np.arange(len(EDGES)) - 0.5)[0]
    shares: Floats = (counts + 1e-6) / (counts + 1e-6).sum()
    return shares


def sigma_of(tau: float, truth: Ints) -> float:
    """Noise under which forecasts rank the lengths with about Kendall's tau, if those were
    log-normal: tau = 2 / pi asin(rho), rho = s / sqrt(s^2 + sigma^2).
    """
    if tau <= 0.0:
        return float("inf")
    rho = np.sin(0.5 * np.pi * min(tau, 1.0))
    return float(np.log(truth).std() * np.sqrt(max(1.0 / rho**2 - 1.0, 0.0)))


class InformedEstimator(BaselineEstimator):
    """The baseline whose length forecasts are the truth blurred by `sigma`; request ids are row
    numbers of `truth` (n,) tokens. `learning` False freezes what outcomes would teach.
    """

    def __init__(
        self,
        truth: Ints,
        sigma: float,
        seed: int,
        *,
        learning: bool = True,
        calibrated: bool = False,
    ) -> None:
        super().__init__()
        self._truth = truth
        self._sigma = sigma
        self._seed = seed
        self._learning = learning
        self._population = population_of(truth) if calibrated else None
        self._rows: dict[int, Floats] = {}

    def rows(self, chunk: int) -> Floats:
        """Forecasts of requests chunk * CHUNK and on."""
        if chunk not in self._rows:
            part = self._truth[chunk * CHUNK : (chunk + 1) * CHUNK]
            rng = np.random.default_rng([self._seed, 5, chunk])
            if self._population is None:
                self._rows[chunk] = survival_rows(part, self._sigma, rng)
            else:
                self._rows[chunk] = calibrated_rows(part, self._sigma, self._population, rng)
        return self._rows[chunk]

    def length(self, request: InferenceRequest) -> LengthDistribution:
        """The blurred truth about this request."""
        i = int(request.id)
        return LengthDistribution(self.rows(i // CHUNK)[i % CHUNK])

    def learn(self, outcome: Outcome) -> None:
        """As the baseline does, unless frozen."""
        if self._learning:
            super().learn(outcome)
