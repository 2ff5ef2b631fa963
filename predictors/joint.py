"""The joint P(SLO), calibrated on outcomes: a running reliability curve over bins of the raw
probability.

With few outcomes it is the identity; monotone always, so that it never turns a ranking over.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from domain.columns import Floats, Mask

BINS = 10
PRIOR = 12.0
"""Outcomes that the identity is worth in each bin."""
FORGET = 0.995


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


class Reliability:
    """Observed share met per bin of predicted P(SLO), shrunk to the identity and made monotone."""

    def __init__(self) -> None:
        self._knots = np.linspace(0.0, 1.0, BINS + 1)
        self._weight = np.zeros(BINS + 1)
        self._met = np.zeros(BINS + 1)
        self.curve = self._knots.copy()

    def observe(self, raw: float, *, met: bool) -> None:
        """One outcome: the raw probability it was sent with, and whether all limits were met."""
        x = min(max(raw, 0.0), 1.0) * BINS
        k = min(int(x), BINS - 1)
        self._weight *= FORGET
        self._met *= FORGET
        for index, share in ((k, 1.0 - (x - k)), (k + 1, x - k)):
            self._weight[index] += share
            self._met[index] += share * met
        value = (self._met + PRIOR * self._knots) / (self._weight + PRIOR)
        self.curve = _isotonic(value, self._weight + PRIOR)


def _isotonic(value: Floats, weight: Floats) -> Floats:
    """Pool adjacent violators: the nearest non-decreasing sequence under these weights."""
    levels: list[tuple[float, float, int]] = []
    for v, w in zip(value.tolist(), weight.tolist(), strict=True):
        mean, total, count = v, w, 1
        while levels and levels[-1][0] > mean:
            m, t, n = levels.pop()
            mean = (m * t + mean * total) / (t + total)
            total += t
            count += n
        levels.append((mean, total, count))
    return np.concatenate([np.full(n, m) for m, _, n in levels])
