"""The estimator with learned parts: length from the prompt, conformal bound, optional quality.

It wraps the baseline: what is not learned, or cannot be loaded, stays the baseline's. Four guards
stand between a fit and a decision: strange vectors get the model's own distribution, others are
believed as far as forecasts have proved better than it (`predictors.trust`), the P90 is corrected
by what came before, and a drift alarm on the length forecast switches a model back to its running
distribution until the errors are small again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from domain.columns import (
    EstimateColumns,
    FleetColumns,
    Floats,
    Mask,
    RequestColumns,
    Routes,
)
from domain.fleet import FleetSpec
from domain.length import LengthDistribution
from domain.outcome import Cause, Outcome, UsageSource
from domain.ports import Estimator
from domain.request import InferenceRequest
from predictors.align import ScoreAlign
from predictors.artifact import ArtifactError
from predictors.conformal import RollingConformal, corrected
from predictors.drift import PageHinkley
from predictors.estimator import BaselineEstimator
from predictors.latency_gbdt import LatencyGbdt
from predictors.latency_layer import LatencyLayer
from predictors.length_gbdt import LengthGbdt, z_of
from predictors.quality import QualityModel
from predictors.running import RunningLengths
from predictors.trust import Trust, mixed

_log = logging.getLogger(__name__)

PACKAGED = Path(__file__).parent / "artifacts"
REMEMBERED = 16_384
"""Forecasts kept between arrival and outcome."""


class Forecast(NamedTuple):
    """What was said of a request's length: by the fit, by the running distribution alone, and the
    `served` mixture of both; with the raw score it came from, None where the running one stands
    alone.
    """

    served: LengthDistribution
    fitted: LengthDistribution
    own: LengthDistribution
    score: float | None


class LearnedEstimator:
    """Baseline estimator whose lengths, and optionally quality, are learned.

    A part given as None is the baseline's.
    """

    def __init__(
        self,
        length: LengthGbdt | None = None,
        quality: QualityModel | None = None,
        latency: LatencyGbdt | None = None,
    ) -> None:
        self.latency = LatencyLayer(latency)
        self._prefill: list[int] = []
        self._length = length
        self._quality_model = quality
        self._running = RunningLengths()
        self._base = BaselineEstimator(self._running)
        self._conformal = RollingConformal()
        self._align = ScoreAlign()
        self._forecasts: dict[str, Forecast] = {}
        self._trust = Trust()
        self._drift: dict[str, PageHinkley] = {}
        self._variants: tuple[str, ...] = ()
        self._priors: list[float] = []
        self._variant_of = np.zeros(0, np.int64)
        self._judged: dict[str, Floats] = {}

    @property
    def version(self) -> str:
        """Versions of what was fitted; on-line state does not change it."""
        parts = [self._base.version]
        parts += [part.version for part in (self._length, self._quality_model) if part is not None]
        if self.latency.model is not None:
            parts.append(self.latency.version)
        return "+".join(parts)

    @property
    def alarmed(self) -> tuple[str, ...]:
        """Models whose learned length is switched off by the drift alarm."""
        return tuple(name for name, detector in self._drift.items() if detector.alarmed)

    def bind(self, fleet: FleetSpec, routes: Routes) -> None:
        """Take the fleet in."""
        self._base.bind(fleet, routes)
        self.latency.bind(fleet)
        self._prefill = routes.prefill.tolist()
        self._variants = tuple(variant.name for variant in fleet.variants)
        self._priors = [self._base.rate(variant) for variant in fleet.variants]
        self._variant_of = routes.variant
        self._judged.clear()

    def length(self, request: InferenceRequest) -> LengthDistribution:
        """Forecast of the request, its P90 corrected to cover 90 % of this tenant's answers."""
        forecast = self._forecast(request)
        if len(self._forecasts) >= REMEMBERED:
            self._forecasts.pop(next(iter(self._forecasts)))
        self._forecasts[request.id] = forecast
        return corrected(forecast.served, self._conformal.level(request.model, request.tenant))

    def thinking(self, request: InferenceRequest) -> LengthDistribution | None:
        """As the baseline's: no public answers come with their prompt and both parts."""
        return self._base.thinking(request)

    def answering(self, request: InferenceRequest, thought: float) -> LengthDistribution | None:
        """As the baseline's."""
        return self._base.answering(request, thought)

    def _forecast(self, request: InferenceRequest) -> Forecast:
        """Forecast of a request from its prompt, as far as it is believed."""
        own = self._running.distribution(request.model, request.text_group)
        detector = self._drift.get(request.model)
        if self._length is None or (detector is not None and detector.alarmed):
            return Forecast(own, own, own, None)
        features = np.array(request.features, np.float64)
        if not self._length.knows(features):
            return Forecast(own, own, own, None)
        scores = self._length.scores(features)
        raw = float(scores[0])
        scores[0] = self._align(request.tenant, raw)
        fitted = self._length.forecast(features, scores, request.model, own)
        served = mixed(fitted, own, self._trust.weight(request.model))
        return Forecast(served, fitted, own, raw)

    def fill(
        self,
        requests: RequestColumns,
        fleet: FleetColumns,
        routes: Routes,
        mask: Mask,
        now: float,
        out: EstimateColumns,
        requests_of: Sequence[InferenceRequest],
    ) -> None:
        """The baseline's columns, with learned quality where a request carries features."""
        self._base.fill(requests, fleet, routes, mask, now, out, requests_of)
        self.latency.fill(requests, fleet, routes, mask, self._base.step_factors, now, out)
        if self._quality_model is None or len(self._variants) < 2:
            return
        for i, request in enumerate(requests_of):
            good = self._quality(self._quality_model, request)[self._variant_of]
            np.copyto(out.quality[i], good, where=mask[i])

    def _quality(self, model: QualityModel, request: InferenceRequest) -> Floats:
        """P(good) of every variant, (variants,); asked once for a request, however often it is
        looked at.
        """
        judged = self._judged.get(request.id)
        if judged is None:
            features = np.array(request.features, np.float64)
            judged = np.array(model.predict(features, list(self._variants), self._priors))
            if len(self._judged) >= REMEMBERED:
                self._judged.pop(next(iter(self._judged)))
            self._judged[request.id] = judged
        return judged

    def stepped(self, replicas: Sequence[int], times: Sequence[float]) -> None:
        """When steps ended, for the phase of those that run."""
        self.latency.stepped(replicas, times)

    def basis(self, index: int, route: int) -> tuple[float, ...]:
        """The row of the chosen route, for the next fit."""
        return self.latency.basis(index, route)

    def feedback(self, variant: str, score: float) -> float | None:
        """Move the base rate that a variant's learned quality starts from."""
        rate = self._base.feedback(variant, score)
        if rate is not None:
            self._priors[self._variants.index(variant)] = rate
            self._judged.clear()
        return rate

    def swap(self, version: str, data: bytes) -> None:
        """Another latency model."""
        self.latency.swap(version, data)

    def learn(self, outcome: Outcome) -> None:
        """Take one outcome in: conformal rank and drift of the forecast, then the baseline's."""
        request, usage = outcome.request, outcome.usage
        kept = self._forecasts.pop(request.id, None)
        self._judged.pop(request.id, None)
        counted = usage.source is not UsageSource.NONE and usage.completion >= 1
        counted = counted and request.choices == 1  # else it may be the tokens of one, or of all
        if counted and outcome.cause in {Cause.FINISHED, Cause.CLIENT_GONE}:
            tokens = usage.completion
            cut = outcome.cause is not Cause.FINISHED or (
                request.max_tokens is not None and usage.completion >= request.max_tokens
            )
            forecast = kept if kept is not None else self._forecast(request)
            rank = 1.0 - forecast.served.survives(tokens)
            self._conformal.observe(request.model, request.tenant, rank, censored=cut)
            if not cut and self._length is not None:
                self._judge(request, forecast, tokens)
        if outcome.route is not None:
            self.latency.learn(outcome, self._prefill[outcome.route])
        self._base.learn(outcome)

    def _judge(self, request: InferenceRequest, forecast: Forecast, tokens: float) -> None:
        """How much worse than the running distribution the forecast did, in nats: for its weight
        and for the alarm.
        """
        model = request.model
        own = self._running.distribution(model, request.text_group)
        if forecast.score is not None:
            self._align.observe(request.tenant, forecast.score, z_of(own, tokens))
            gain = _density(forecast.fitted, tokens) - _density(forecast.own, tokens)
            self._trust.observe(model, gain)
        if model not in self._drift:
            self._drift[model] = PageHinkley(reference=0.0, slack=0.1, threshold=12.0)
        score = _density(own, tokens) - _density(forecast.fitted, tokens)
        was = self._drift[model].alarmed
        if self._drift[model].observe(score) and not was:
            _log.warning("length forecasts of %s are worse than its running lengths: off", model)


def _density(distribution: LengthDistribution, tokens: float) -> float:
    """Log probability of the neighbourhood (a quarter either way) of a length, at least -5."""
    low, high = tokens / 1.25 - 1.0, tokens * 1.25 + 1.0
    mass = distribution.survives(max(low, 0.0)) - distribution.survives(high)
    return float(np.log(max(mass, 6.7e-3)))


def packaged_latency() -> Path | None:
    """The latency artifact that ships; None where none does: the roofline serves until a refit."""
    path = PACKAGED / "latency.npz"
    return path if path.exists() else None


def load_parts(
    length: Path | None, quality: Path | None, latency: Path | None = None
) -> tuple[LengthGbdt | None, QualityModel | None, LatencyGbdt | None]:
    """Models of the artifacts; one that cannot be used is logged and left to the baseline."""
    pace: LatencyGbdt | None = None
    model: LengthGbdt | None = None
    judge: QualityModel | None = None
    try:
        model = None if length is None else LengthGbdt.load(length)
    except ArtifactError:
        _log.exception("learned lengths are off, running lengths serve")
    try:
        text = None if model is None else model.text
        judge = None if quality is None else QualityModel.load(quality, text)
    except ArtifactError:
        _log.exception("learned quality is off, the variants' priors serve")
    try:
        pace = None if latency is None else LatencyGbdt.load(latency)
    except ArtifactError:
        _log.exception("learned latency is off, the roofline serves")
    return model, judge, pace


_conforms: type[Estimator] = LearnedEstimator
