"""The joint P(SLO), calibrated on outcomes: a running reliability curve over bins of the raw
probability.

With few outcomes it is the identity; monotone always, so that it never turns a ranking over.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from domain.columns import Floats, Mask
from domain.native import compiled

BINS = 10
PRIOR = 4.0
"""Outcomes that the identity is worth at each knot."""

FORGET = 0.998
"""What an outcome's weight is multiplied by when the next one comes: about 500 outcomes count. With
12 and 0.995 a biased stream stayed a third uncorrected (squared error left after 3,000 outcomes:
0.012 against 0.0015 for P ** 3)."""


@njit(cache=True, error_model="numpy")
def calibrate_into(curve: Floats, mask: Mask, raw: Floats, out: Floats) -> None:
    """Map raw probabilities (n, c) through the curve (BINS + 1,), linear between its knots."""
    bins = curve.shape[0] - 1
    for i in range(mask.shape[0]):
        for c in range(mask.shape[1]):
            if mask[i, c]:
                x = min(max(raw[i, c], 0.0), 1.0) * bins
                k = min(int(x), bins - 1)
                out[i, c] = curve[k] + (x - k) * (curve[k + 1] - curve[k])


@njit(cache=True, error_model="numpy")
def observe_into(
    raw: float, met: float, weights: Floats, successes: Floats, levels: Floats, curve: Floats
) -> None:
    """Take one outcome into the knots (BINS + 1,) and refit the curve.

    Shrinks each knot towards the identity by `PRIOR` outcomes, then pools adjacent violators (Ayer
    et al., 1955), so that the curve never falls. `levels` (3, BINS + 1) is scratch: mean, weight
    and count of each pool.
    """
    bins = weights.shape[0] - 1
    x = min(max(raw, 0.0), 1.0) * bins
    k = min(int(x), bins - 1)
    for j in range(bins + 1):
        weights[j] *= FORGET
        successes[j] *= FORGET
    high = x - k
    weights[k] += 1.0 - high
    successes[k] += (1.0 - high) * met
    weights[k + 1] += high
    successes[k + 1] += high * met
    pools = 0
    for j in range(bins + 1):
        total = weights[j] + PRIOR
        mean = (successes[j] + PRIOR * j / bins) / total
        count = 1.0
        while pools > 0 and levels[0, pools - 1] > mean:
            pools -= 1
            before = levels[1, pools]
            mean = (levels[0, pools] * before + mean * total) / (before + total)
            total += before
            count += levels[2, pools]
        levels[0, pools], levels[1, pools], levels[2, pools] = mean, total, count
        pools += 1
    j = 0
    for pool in range(pools):
        for _ in range(int(levels[2, pool])):
            curve[j] = levels[0, pool]
            j += 1


class Reliability:
    """Observed share met per bin of predicted P(SLO), shrunk to the identity and made monotone."""

    def __init__(self) -> None:
        self._weights = np.zeros(BINS + 1)
        self._successes = np.zeros(BINS + 1)
        self._levels = np.zeros((3, BINS + 1))
        self.curve = np.linspace(0.0, 1.0, BINS + 1)
        self._observe = compiled(
            observe_into, 0.0, 0.0, self._weights, self._successes, self._levels, self.curve
        )

    def observe(self, raw: float, *, met: bool) -> None:
        """One outcome: the raw probability it was sent with, and whether all limits were met."""
        self._observe(raw, float(met), self._weights, self._successes, self._levels, self.curve)
