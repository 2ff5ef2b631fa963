"""Read-offs and intervals over paired seeds: what a comparison may claim.

All seeds of a scenario met every policy with the same requests, so resampling draws whole seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from training.traces import Floats

RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def seed_weights(seeds: int, rng: np.random.Generator, resamples: int = RESAMPLES) -> Floats:
    """(resamples + 1, seeds) shares of seeds: the first row is the sample itself."""
    drawn = rng.multinomial(seeds, np.full(seeds, 1.0 / seeds), size=resamples) / seeds
    return np.concatenate([np.full((1, seeds), 1.0 / seeds), drawn])


def interval(values: Floats, seeds: int) -> Interval:
    """95 % interval of a statistic: `values` (1 + B,) on the sample and on B resamples.

    The percentile interval is expanded for few seeds: its tails are Phi(-sqrt(n/(n-1)) t), t the
    quantile of Student's t with n - 1 degrees (Hesterberg, "What Teachers Should Know About the
    Bootstrap", 2015, section 5.2). One seed has no interval: nan.
    """
    from scipy import stats

    if seeds < 2:
        return Interval(value=float(values[0]), low=float("nan"), high=float("nan"))
    t = float(stats.t.ppf(0.975, seeds - 1))
    tail = float(stats.norm.cdf(-sqrt(seeds / (seeds - 1)) * t))
    low, high = np.quantile(values[1:], [tail, 1.0 - tail]).tolist()
    return Interval(value=float(values[0]), low=low, high=high)


def falling_rows(values: Floats) -> Floats:
    """Closest never-rising sequence of every row of `values` (B, L), by the min-max formula
    (Barlow et al., "Statistical Inference under Order Restrictions", 1972).
    """
    rows, length = values.shape
    total = np.concatenate([np.zeros((rows, 1)), np.cumsum(values, axis=1)], axis=1)
    fit = np.empty_like(values)
    for k in range(length):
        best = np.full(rows, np.inf)
        for i in range(k + 1):
            means = (total[:, k + 1 :] - total[:, [i]]) / (np.arange(k, length) - i + 1)
            best = np.minimum(best, means.max(axis=1))
        fit[:, k] = best
    return fit


def last_at(rates: Floats, values: Floats, target: float) -> Floats:
    """(B,) last rate at which the falling fit of each row of `values` (B, L) reaches `target`,
    linear between grid points; 0 where none does, the last rate where all do.
    """
    fit = falling_rows(values)
    above = fit >= target
    count = above.sum(axis=1)
    k = np.clip(count - 1, 0, len(rates) - 2)
    rows = np.arange(len(values))
    here, after = fit[rows, k], fit[rows, k + 1]
    with np.errstate(invalid="ignore", divide="ignore"):
        part = np.where(here > after, (here - target) / (here - after), 0.0)
    inside = rates[k] + part * (rates[k + 1] - rates[k])
    found = np.where(count == len(rates), rates[-1], inside)
    return np.where(count == 0, 0.0, found)


def rank_agreement(one: Floats, other: Floats) -> float:
    """Kendall's tau-b of two score vectors (ties corrected); nan if one of them is constant."""
    from scipy import stats

    return float(stats.kendalltau(one, other).statistic)


Curves = NDArray[np.float64]
"""(seeds, loads) of one policy."""
