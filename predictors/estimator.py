"""The estimator the decision core asks: length, latency, quality and the joint P(SLO), each
replaceable.

Here they are put together from running length quantiles, the roofline with on-line scales, quality
priors of the variants and the calibrated joint probability; learned models replace the parts they
beat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numba import njit

from domain.columns import (
    LOAD_GRID,
    EstimateColumns,
    FleetColumns,
    Floats,
    Mask,
    RequestColumns,
    Routes,
)
from domain.fleet import FleetSpec, Profile, Variant
from domain.length import LengthDistribution
from domain.native import compiled
from domain.outcome import Cause, Outcome, Prediction, UsageSource
from domain.ports import Estimator
from domain.request import InferenceRequest
from predictors.feedback import FeedbackPriors
from predictors.joint import Reliability, calibrate_into
from predictors.latency import ROOF_TPOT, ROOF_TTFT, USED, WIDTH
from predictors.parts import PartLengths
from predictors.roofline import FIXED, Loads, OnlineScales, loads_of, roofline_into
from predictors.running import RunningLengths

MIDDLE = len(LOAD_GRID) // 2


@njit(cache=True, error_model="numpy")
def _fill(
    requests: RequestColumns,
    fleet: Loads,
    routes: Routes,
    mask: Mask,
    scales: Floats,
    curve: Floats,
    quality: Floats,
    now: float,
    out: EstimateColumns,
) -> None:
    """Roofline, calibrated P(SLO) and quality priors (c,) in one call."""
    roofline_into(requests, fleet, routes, mask, scales, now, out)
    calibrate_into(curve, mask, out.p_raw, out.p_slo)
    for i in range(mask.shape[0]):
        for c in range(mask.shape[1]):
            if mask[i, c]:
                out.quality[i, c] = quality[c]


class BaselineEstimator:
    """Running lengths, roofline with on-line scales, quality priors, calibrated P(SLO)."""

    def __init__(self, lengths: RunningLengths | None = None) -> None:
        self._lengths = lengths if lengths is not None else RunningLengths()
        self._parts = PartLengths()
        self._reliability = Reliability()
        self._names: list[str] = []
        self._profiles: list[Profile] = []
        self._scales = OnlineScales(np.zeros(0))
        self._quality = np.zeros(0)
        self._feedback = FeedbackPriors()
        self._variants: list[Variant] = []
        self._native: Callable[..., None] | None = None
        self._loads: tuple[FleetColumns, Loads] | None = None

    @property
    def version(self) -> str:
        """Changes when the arithmetic does, not with what was learned on line."""
        return "baseline-2"

    @property
    def step_factors(self) -> Floats:
        """Learned factor on the profile's step of a stream alone, (m,)."""
        factors: Floats = self._scales.rows[FIXED]
        return factors

    def bind(self, fleet: FleetSpec, routes: Routes) -> None:
        """Take the fleet in; scales of replicas that stay, by name, are kept."""
        scales = OnlineScales(np.array([r.profile.uncertainty for r in fleet.replicas]))
        for i, replica in enumerate(fleet.replicas):
            if replica.name in self._names:
                scales.copy_from(self._scales, self._names.index(replica.name), i)
        self._names = [r.name for r in fleet.replicas]
        self._profiles = [r.profile for r in fleet.replicas]
        self._scales = scales
        self._variants = [fleet.variants[v] for v in routes.variant.tolist()]
        self._quality = np.array([self.rate(v) for v in self._variants])

    def rate(self, variant: Variant) -> float:
        """Base rate of good answers of a variant: its prior, moved by feedback."""
        return self._feedback.rate(variant.name, variant.quality)

    def length(self, request: InferenceRequest) -> LengthDistribution:
        """The running distribution of the request's model and text group."""
        return self._lengths.distribution(request.model, request.text_group)

    def thinking(self, request: InferenceRequest) -> LengthDistribution | None:
        """Where the answer begins, by the model and text group."""
        if not self._parts.thinks(request.model):
            return None
        return self._parts.first(request.model, request.text_group)

    def answering(self, request: InferenceRequest, thought: float) -> LengthDistribution | None:
        """How long the answer will be after so much thinking."""
        if not self._parts.thinks(request.model):
            return None
        return self._parts.answer(request.model, request.text_group, thought + 1.0)

    def fill(
        self,
        requests: RequestColumns,
        fleet: FleetColumns,
        routes: Routes,
        mask: Mask,
        now: float,
        out: EstimateColumns,
        requests_of: Sequence[InferenceRequest],  # noqa: ARG002 - learned estimators read features
    ) -> None:
        """Write wait, TTFT, TPOT, quality and P(SLO) where the mask is set; `out.cached` is an
        input.
        """
        scales, curve = self._scales, self._reliability.curve
        if self._loads is None or self._loads[0] is not fleet:
            self._loads = fleet, loads_of(fleet)
        loads = self._loads[1]
        if self._native is None:
            self._native = compiled(
                _fill,
                requests,
                loads,
                routes,
                mask,
                scales.rows,
                curve,
                self._quality,
                0.0,
                out,
            )
        self._native(
            requests,
            loads,
            routes,
            mask,
            scales.rows,
            curve,
            self._quality,
            now,
            out,
        )

    def stepped(self, replicas: Sequence[int], times: Sequence[float]) -> None:
        """Nothing: the roofline knows no phase."""

    def basis(self, index: int, route: int) -> tuple[float, ...]:  # noqa: ARG002 - learned ones do
        """Nothing: no learned latency model here."""
        return ()

    def feedback(self, variant: str, score: float) -> float | None:
        """Move the base rate of a variant of this fleet."""
        found = next((v for v in self._variants if v.name == variant), None)
        if found is None:
            return None
        self._feedback.observe(variant, score)
        rate = self.rate(found)
        for c, each in enumerate(self._variants):
            if each.name == variant:
                self._quality[c] = rate
        return rate

    def swap(self, version: str, data: bytes) -> None:
        """Nothing here can be replaced."""

    def learn(self, outcome: Outcome) -> None:
        """Take one outcome in: lengths from engine counts, scales from first tokens, P(SLO) from
        limits met.

        Of several choices neither length nor pace is learned: some engines count the tokens of all
        of them, some of one.
        """
        request, usage = outcome.request, outcome.usage
        single = request.choices == 1
        if single and outcome.cause is Cause.FINISHED and usage.source is not UsageSource.NONE:
            cut = request.max_tokens is not None and usage.completion >= request.max_tokens
            self._lengths.observe(request.model, request.text_group, usage.completion, censored=cut)
            if usage.thinking is not None:
                self._learn_parts(request, usage.completion, usage.thinking, cut=cut)
        prediction = outcome.prediction
        if prediction is None or outcome.replica is None or outcome.sent is None:
            return
        ttft, tpot, used = _roofline(prediction)
        if outcome.first_token is not None and request.stream:
            self._scales.learn_ttft(outcome.replica, ttft, outcome.first_token - outcome.sent)
        if single and outcome.tpot is not None and request.stream and usage.completion >= 4:
            alone, shared = self._step(outcome.replica, prediction, request.prompt_tokens)
            self._scales.learn_tpot(outcome.replica, alone, shared, tpot, outcome.tpot)
        if outcome.met is not None and outcome.cause is not Cause.SHED and not used:
            self._reliability.observe(prediction.p_raw, met=outcome.met)

    def _learn_parts(
        self, request: InferenceRequest, whole: float, thinking: float, *, cut: bool
    ) -> None:
        """Where the answer began; an output that is all thinking never came to one."""
        whole, thinking = round(whole), round(thinking)
        first = thinking + 1.0 if thinking < whole else None
        self._parts.observe(request.model, request.text_group, first, whole, cut=cut)

    def _step(self, replica: int, prediction: Prediction, prompt: float) -> tuple[float, float]:
        """The profile's seconds per token of a stream alone, and what the batch at hand added."""
        profile = self._profiles[replica]
        context = prediction.context + prompt + prediction.length_mean / 2.0
        memory = profile.weights + profile.per_context * context
        batch = prediction.running + 1.0
        alone = profile.overhead + profile.per_sequence + max(memory, profile.per_token)
        alone += profile.experts / (1.0 + profile.expert_tokens)
        step = profile.overhead + profile.per_sequence * batch
        step += profile.experts * batch / (batch + profile.expert_tokens)
        return alone, step + max(memory, profile.per_token * batch) - alone


def _roofline(prediction: Prediction) -> tuple[float, float, bool]:
    """The roofline's own medians (s) of TTFT and TPOT, and whether learned ones stood in for
    them.
    """
    basis = prediction.basis
    if len(basis) != WIDTH:
        return prediction.ttft[MIDDLE], prediction.tpot[MIDDLE], False
    return basis[ROOF_TTFT], basis[ROOF_TPOT], bool(basis[USED])


_conforms: type[Estimator] = BaselineEstimator
