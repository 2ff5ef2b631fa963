"""Drift plus penalty on top of any scorer: promises that the scorer's objective does not contain.

Each constraint (a class's attainment, or its mean quality) has a virtual queue Q that grows by
target - delivered with every settled request; the price lambda = Q / V of falling short is added to
the scores:

    score = base + lambda_attainment[class] x P(SLO) + lambda_quality[class] x quality

A target that cannot be met would let Q grow without end and starve everybody else, also long after
it was given up. So Q is capped, and where what is delivered falls far short although the cap is
reached, Q leaks away and rests before it tries again.

Source: MESS+ (argmin V E + Q (alpha - s), Q <- max(0, Q + alpha - s); `papers.md` section 2b),
after Neely, "Stochastic Network Optimization", 2010. Cap, leak and rest are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numba import njit

from domain.columns import (
    Draws,
    EstimateColumns,
    FleetColumns,
    Floats,
    Mask,
    Params,
    RequestColumns,
    Routes,
    Scores,
)
from domain.ports import Lesson, OnlineLearner, Scorer
from policies.scorers.bandit import bandit_kernel
from policies.scorers.best_fit import best_fit_kernel
from policies.scorers.cheapest import cheapest_kernel
from policies.scorers.classic import least_requests_kernel
from policies.scorers.kernel_scorer import KernelScorer
from policies.scorers.linear import linear_kernel
from policies.scorers.marginal import marginal_kernel
from policies.scorers.predicted import predicted_kernel

BASES = ("best_fit", "marginal", "cheapest", "linear", "bandit", "predicted", "least_requests")
"""Scorers it goes on top of; the kernel knows them by their place here. Another one takes a line
here and a line there: each is compiled into the kernel, so not all of them are."""

RANKS = 8
"""Classes with prices of their own; a rank beyond counts as the last."""
HEAD = 2
"""Numbers before the prices: the base's place, 1 if its scores are only a rank."""
BASE_AT = HEAD + 2 * RANKS


@njit(cache=True, error_model="numpy")
def drift_plus_penalty_kernel(
    params: Params,
    requests: RequestColumns,
    fleet: FleetColumns,
    routes: Routes,
    estimates: EstimateColumns,
    mask: Mask,
    draws: Draws,
    now: float,
    out: Scores,
) -> None:
    """Base score plus the prices of attainment and quality.

    params: place of the base in `BASES`, 1 if it is a rank, lambda of attainment and of quality by
    class rank (`RANKS` each), the base's own params. Scores of a rank are first put on [0, 1]
    within each request, so that one price means the same under every base.
    """
    base = int(params[0])
    own = params[BASE_AT:]
    if base == 0:
        best_fit_kernel(own, requests, fleet, routes, estimates, mask, draws, now, out)
    elif base == 1:
        marginal_kernel(own, requests, fleet, routes, estimates, mask, draws, now, out)
    elif base == 2:
        cheapest_kernel(own, requests, fleet, routes, estimates, mask, draws, now, out)
    elif base == 3:
        linear_kernel(own, requests, fleet, routes, estimates, mask, draws, now, out)
    elif base == 4:
        bandit_kernel(own, requests, fleet, routes, estimates, mask, draws, now, out)
    elif base == 5:
        predicted_kernel(own, requests, fleet, routes, estimates, mask, draws, now, out)
    else:
        least_requests_kernel(own, requests, fleet, routes, estimates, mask, draws, now, out)
    for i in range(mask.shape[0]):
        rank = min(max(requests.class_id[i], 0), RANKS - 1)
        attainment, quality = params[HEAD + rank], params[HEAD + RANKS + rank]
        low, high = np.inf, -np.inf
        if params[1] > 0.0:
            for c in range(mask.shape[1]):
                if mask[i, c] and out.route[i, c] > -np.inf:
                    low, high = min(low, out.route[i, c]), max(high, out.route[i, c])
        for c in range(mask.shape[1]):
            if not mask[i, c] or not out.route[i, c] > -np.inf:
                continue
            if params[1] > 0.0:
                out.route[i, c] = (out.route[i, c] - low) / (high - low) if high > low else 1.0
            out.route[i, c] += (
                attainment * estimates.p_slo[i, c] + quality * estimates.quality[i, c]
            )


@dataclass(slots=True)
class VirtualQueue:
    """One constraint: mean delivered at least `target`. Q counts requests owed.

    `cap` bounds Q. The target is out of reach when Q is at the cap and what is delivered, averaged
    over `memory` requests, is `far` below it: chance alone, over 100 requests, stays nearer.
    Then `leak` is the share of Q that is lost per request, and `rest` how many requests pass before
    it tries again.
    """

    target: float
    cap: float = 10.0
    leak: float = 0.05
    rest: int = 500
    memory: float = 100.0
    far: float = 0.15
    q: float = 0.0
    delivered: float = 1.0
    given_up: int = 0
    """Requests since the target was given up; 0 while it is pursued."""

    def add(self, delivered: float) -> float:
        """Take one request's delivery in [0, 1] in; the new Q."""
        self.delivered += (delivered - self.delivered) / self.memory
        if self.given_up:
            self.given_up += 1
            self.q *= 1.0 - self.leak
            if self.q < 1e-3:
                self.q = 0.0
            if self.given_up > self.rest or self.delivered >= self.target:
                self.given_up = 0
            return self.q
        self.q = min(max(self.q + self.target - delivered, 0.0), self.cap)
        if self.q >= self.cap and self.delivered < self.target - self.far:
            self.given_up = 1
        return self.q


class Prices:
    """Virtual queues by class rank; writes lambda = Q / V into the scorer's params and passes
    lessons on to what is beneath.
    """

    def __init__(
        self,
        params: Params,
        base: OnlineLearner | None,
        *,
        v: float,
        attainment: Mapping[int, VirtualQueue],
        quality: Mapping[int, VirtualQueue],
    ) -> None:
        self._params = params
        self._base = base
        self._v = v
        self.attainment = dict(attainment)
        self.quality = dict(quality)

    def learn(self, lesson: Lesson) -> Params:
        """Take one lesson in; the same array, changed. What says nothing of a limit (a client that
        left) leaves every queue alone.
        """
        rank = min(max(lesson.rank, 0), RANKS - 1)
        if lesson.met is not None:
            owed = self.attainment.get(rank)
            if owed is not None:
                self._params[HEAD + rank] = owed.add(float(lesson.met)) / self._v
            short = self.quality.get(rank)
            if short is not None and lesson.traits is not None:
                self._params[HEAD + RANKS + rank] = short.add(lesson.quality) / self._v
        if self._base is not None:
            own = self._base.learn(lesson)
            self._params[BASE_AT:] = own
        return self._params


def drift_plus_penalty(
    base: Scorer,
    *,
    v: float = 10.0,
    attainment: Mapping[int, VirtualQueue] | None = None,
    quality: Mapping[int, VirtualQueue] | None = None,
) -> KernelScorer:
    """`base` with prices; `v` requests owed cost one unit of its score.

    Raises: ValueError for a base that the kernel does not know, or v that is not above 0.
    """
    if base.name not in BASES:
        raise ValueError(f"no drift-plus-penalty over {base.name!r}; known: {', '.join(BASES)}")
    if not (v > 0 and isfinite(v)):
        raise ValueError(f"v must be above 0, not {v}")
    params: Floats = np.zeros(BASE_AT + len(base.params))
    params[0] = BASES.index(base.name)
    params[1] = float(base.unit == "rank")
    params[BASE_AT:] = base.params
    targets = {"a": attainment or {}, "q": quality or {}}
    settings = [
        f"{kind}{rank}:{queue.target}:{queue.cap}:{queue.leak}:{queue.rest}"
        for kind, queues in targets.items()
        for rank, queue in sorted(queues.items())
    ]
    return KernelScorer(
        name="drift_plus_penalty",
        kernel=drift_plus_penalty_kernel,
        unit=base.unit,
        needs_estimates=True,
        random=base.random,
        params=params,
        learner=Prices(params, base.learner, v=v, attainment=targets["a"], quality=targets["q"]),
        envelope=base.envelope,
        version=f"{base.version}-{v}-{'-'.join(settings)}",
    )
