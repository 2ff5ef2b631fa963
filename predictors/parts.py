"""Thinking and answer of a reasoning model, apart: two hazards, the second given the first.

The place F of the first answer token in the output (1: no thinking) has a running distribution per
(model, group), and so has the length A of the answer from that token on; the whole is F - 1 + A.
How long a model thought says something about its answer. With v = -log S_A(A), exponential with
mean 1 where it says nothing, the hazard in stretch k of v, after thinking whose rank among the
model's own falls in class c, is multiplied by

    g[c, k] = (events + w) / (exposure + w),

the posterior mean of that factor under a Gamma prior of mean 1 (its likelihood is Poisson with the
exposure as offset: Friedman, "Piecewise exponential models for survival data with covariates", Ann.
Statist. 1982). Ranks make the factors the same for groups that think briefly and at length, so one
table per model serves them all; a model without outcomes has the factors 1. The P90 of each part is
corrected by what came before (`predictors.conformal`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from domain.length import LengthDistribution
from predictors.conformal import RollingConformal, corrected
from predictors.length_gbdt import KNOTS, STRETCHES, exposure, reshape
from predictors.running import KEEP, RunningLengths

CLASSES = 4
"""Classes of the rank of the thinking: quarters of the model's own."""
PRIOR_WEIGHT = 10.0
"""Events (w) that the factor 1 is worth in each cell."""

Floats = NDArray[np.float64]


class PartLengths:
    """Running distributions of both parts, by (model, group); deterministic.

    Models that were never seen to think have no parts and cost nothing.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._first = RunningLengths(capacity)
        self._answer = RunningLengths(capacity)
        self._first_level = RollingConformal(capacity=capacity)
        self._answer_level = RollingConformal(capacity=capacity)
        self._linked: dict[str, tuple[Floats, Floats]] = {}

    def thinks(self, model: str) -> bool:
        """Whether an answer of this model began with thinking."""
        return model in self._linked

    def first(self, model: str, group: int = 0) -> LengthDistribution:
        """Place of the first answer token in the output, in tokens; 1 is an answer at once."""
        own = self._first.distribution(model, group)
        return corrected(own, self._first_level.level(model, str(group)))

    def answer(self, model: str, group: int, first: float) -> LengthDistribution:
        """Tokens of an answer whose first token is the `first`-th of the output, that one
        included.
        """
        given = self._given(model, group, first)
        return corrected(given, self._answer_level.level(model, str(group)))

    def observe(
        self, model: str, group: int, first: float | None, whole: float, *, cut: bool = False
    ) -> None:
        """Take in one output of `whole` tokens whose answer began with the `first`-th; None: it
        never began. `cut`: it was ended from outside.
        """
        if whole < 1 or (first is not None and not 1 <= first <= whole):
            return
        if not self.thinks(model):
            if first == 1:
                return
            self._linked[model] = (np.zeros((CLASSES, STRETCHES)), np.zeros((CLASSES, STRETCHES)))
        place = whole if first is None else first
        rank = 1.0 - self._first.distribution(model, group).survives(place)
        self._first_level.observe(model, str(group), rank, censored=first is None)
        if first is not None:
            self._learn_answer(model, group, first, whole - first + 1.0, cut=cut)
        self._first.observe(model, group, place, censored=first is None)

    def _given(self, model: str, group: int, first: float) -> LengthDistribution:
        own = self._answer.distribution(model, group)
        if model not in self._linked:
            return own
        c = self._class(model, group, first)
        events, spent = self._linked[model]
        return reshape(own, (events[c] + PRIOR_WEIGHT) / (spent[c] + PRIOR_WEIGHT))

    def _class(self, model: str, group: int, first: float) -> int:
        rank = 1.0 - self._first.distribution(model, group).survives(first - 0.5)
        return min(int(CLASSES * rank), CLASSES - 1)

    def _learn_answer(
        self, model: str, group: int, first: float, tokens: float, *, cut: bool
    ) -> None:
        """Take in how long the answer was, and in the class of its thinking when it ended."""
        rank = 1.0 - self._given(model, group, first).survives(tokens)
        self._answer_level.observe(model, str(group), rank, censored=cut)
        own = self._answer.distribution(model, group)
        survival = np.array(max(own.survives(tokens - 0.5), 1e-12))
        events, spent = self._linked[model]
        events *= KEEP
        spent *= KEEP
        c = self._class(model, group, first)
        spent[c] += exposure(survival)
        if not cut:
            last = int(np.searchsorted(KNOTS, -np.log(survival), side="left")) - 1
            events[c, min(max(last, 0), STRETCHES - 1)] += 1.0
        self._answer.observe(model, group, tokens, censored=cut)
