"""A contextual bandit: one linear model of P(all limits met) over a candidate's traits, learned
from outcomes while it serves.

It starts as P(SLO) itself and learns where that is wrong. Old outcomes fade (`forgetting`), since
engines change without saying so. Exploration is bounded twice: by the width of what is not known,
and by `budget`, the largest expected loss of met limits that one decision may accept.

Sources: LinUCB, Li et al., "A contextual-bandit approach to personalized news article
recommendation", 2010; linear Thompson sampling, Agrawal and Goyal, 2013, here with independent
draws per candidate; discounted least squares, Russac, Vernade and Cappe, "Weighted linear bandits
for non-stationary environments", 2019.
"""

from __future__ import annotations

import math
from typing import Literal

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
from domain.ports import Lesson
from policies.names import TRAITS
from policies.scorers.kernel_scorer import KernelScorer
from policies.traits import COUNT, seen_into

HEAD = 4
"""Numbers before the model in `params`: alpha, budget, 1 for Thompson, price weight."""
LOGISTIC_SD = math.pi / math.sqrt(3.0)


@njit(cache=True, error_model="numpy")
def bandit_kernel(
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
    """Weight x (theta . x + bonus) - price weight x cost trait.

    params: alpha, budget, mode, price weight, theta (D), P (D, D). The width is sqrt(x P x); the
    bonus alpha x width for UCB, alpha x width x z for Thompson, where z is a logistic variate of
    unit variance made of the draw; in both cases within plus and minus `budget`.
    """
    count = COUNT
    x = np.empty(count)
    for i in range(mask.shape[0]):
        for c in range(mask.shape[1]):
            if not mask[i, c]:
                continue
            seen_into(x, requests, fleet, routes, estimates, i, c, now)
            mean = 0.0
            square = 0.0
            for j in range(count):
                mean += params[HEAD + j] * x[j]
                row = 0.0
                for k in range(count):
                    row += params[HEAD + count + j * count + k] * x[k]
                square += x[j] * row
            bonus = params[0] * math.sqrt(max(square, 0.0))
            if params[2] > 0.0:
                u = min(max(draws[i, c], 1e-9), 1.0 - 1e-9)
                bonus *= math.log(u / (1.0 - u)) / LOGISTIC_SD
            bonus = min(max(bonus, -params[1]), params[1])
            out.route[i, c] = requests.weight[i] * (mean + bonus) - params[3] * x[count - 1]


class LinearLearner:
    """Discounted ridge regression of met limits on traits; writes theta and P into `params`.

    A <- g A + (1 - g) r I + x x', b <- g b + (1 - g) r theta0 + y x, with ridge r and forgetting g:
    without outcomes it goes back to theta0, which is P(SLO) itself. One update costs a Cholesky
    factorisation of a D x D matrix, tens of microseconds.
    """

    def __init__(self, params: Params, *, forgetting: float, ridge: float) -> None:
        self._params = params
        self._forgetting = forgetting
        self._ridge = ridge
        self._start = np.zeros(COUNT)
        self._start[TRAITS.index("p_slo")] = 1.0
        self._a: Floats = ridge * np.eye(COUNT)
        self._b: Floats = ridge * self._start
        self.seen = 0
        self._write()

    def learn(self, lesson: Lesson) -> Params:
        """Take one outcome in; the same array, changed."""
        if lesson.traits is None or lesson.met is None:
            return self._params
        x, g = lesson.traits, self._forgetting
        pull = (1.0 - g) * self._ridge
        self._a *= g
        self._a += np.outer(x, x)
        self._a[np.diag_indices(COUNT)] += pull
        self._b *= g
        self._b += pull * self._start + float(lesson.met) * x
        self.seen += 1
        self._write()
        return self._params

    def _write(self) -> None:
        inverse = np.linalg.inv(self._a)
        self._params[HEAD : HEAD + COUNT] = inverse @ self._b
        self._params[HEAD + COUNT :] = inverse.ravel()


def bandit(
    mode: Literal["ucb", "thompson"] = "thompson",
    *,
    alpha: float = 0.3,
    budget: float = 0.02,
    price: float = 0.0,
    forgetting: float = 0.9995,
    ridge: float = 50.0,
    envelope: Floats | None = None,
) -> KernelScorer:
    """A bandit that has learned nothing yet. `alpha` scales the width, `budget` bounds what it may
    add, `price` is what one unit of the cost trait is worth in met limits.
    """
    params = np.zeros(HEAD + COUNT + COUNT * COUNT)
    params[:HEAD] = alpha, budget, float(mode == "thompson"), price
    learner = LinearLearner(params, forgetting=forgetting, ridge=ridge)
    return KernelScorer(
        name="bandit",
        kernel=bandit_kernel,
        unit="value",
        needs_estimates=True,
        random=mode == "thompson",
        params=params,
        learner=learner,
        envelope=envelope,
        version=f"{forgetting}-{ridge}",
    )
