"""Output length as a distribution: a discrete hazard over log-spaced bins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from domain.errors import ShapeError

BINS = 64
"""Number of bins of every length distribution."""

EDGES: NDArray[np.float64] = np.unique(
    np.round(np.concatenate([np.arange(9.0), np.geomspace(9.0, 131_072.0, BINS - 8)]))
)
"""Bin edges in tokens, (BINS + 1,): bin k holds lengths in (EDGES[k], EDGES[k + 1]]; exact up to 8
tokens, then log-spaced."""
EDGES.setflags(write=False)

QUANTILE_GRID: NDArray[np.float64] = (np.arange(8) + 0.5) / 8
"""Levels, (Q,), at which `RequestColumns.length_q` holds quantiles: midpoints of Q equal parts, so
a plain mean integrates."""
QUANTILE_GRID.setflags(write=False)


@dataclass(frozen=True, slots=True, eq=False)
class LengthDistribution:
    """P(output tokens = L) as survival at the bin edges, linear inside a bin.

    `survival` is (BINS + 1,), float64: P(L > EDGES[k]); starts at 1, never rises, ends at 0.
    `shift` is the age already spent: the distribution is of L - shift (what is left) when `shift` >
    0.

    Raises: ShapeError for another shape; ValueError where it is not a survival function.
    """

    survival: NDArray[np.float64]
    shift: float = 0.0

    def __post_init__(self) -> None:
        if self.survival.shape != EDGES.shape:
            raise ShapeError(f"survival must be {EDGES.shape}, not {self.survival.shape}")
        s = self.survival
        if not (s[0] == 1.0 and s[-1] == 0.0 and np.all(np.diff(s) <= 1e-12)):
            raise ValueError("survival must start at 1, end at 0 and never rise")

    @classmethod
    def from_hazard(cls, hazard: NDArray[np.float64]) -> LengthDistribution:
        """From P(L in bin k | L > EDGES[k]), (BINS,), each in [0, 1]; the last bin takes the
        rest.
        """
        survival = np.ones(len(EDGES))
        np.cumprod(1.0 - np.clip(hazard, 0.0, 1.0), out=survival[1:])
        survival[-1] = 0.0
        return cls(survival)

    @classmethod
    def from_counts(cls, counts: NDArray[np.float64]) -> LengthDistribution:
        """From non-negative weights per bin, (BINS,), not all zero."""
        total = float(counts.sum())
        if not total > 0:
            raise ValueError("a length distribution needs at least one count above 0")
        survival = np.ones(len(EDGES))
        survival[1:] = np.maximum(0.0, 1.0 - np.cumsum(counts) / total)
        survival[-1] = 0.0
        return cls(survival)

    @classmethod
    def lognormal(cls, median: float, sigma: float) -> LengthDistribution:
        """Cold-start prior: log-normal with this median (tokens) and log standard deviation."""
        from math import erf, log, sqrt

        z = [(log(e) - log(median)) / (sigma * sqrt(2.0)) if e > 0 else -np.inf for e in EDGES]
        survival = np.array([1.0 if v == -np.inf else 0.5 - 0.5 * erf(v) for v in z])
        survival[-1] = 0.0
        return cls(survival)

    @classmethod
    def fixed(cls, tokens: float) -> LengthDistribution:
        """All mass in the bin that ends nearest at or above `tokens`."""
        k = int(np.searchsorted(EDGES, max(tokens, 1.0)))
        survival = np.where(np.arange(len(EDGES)) < min(k, BINS), 1.0, 0.0)
        return cls(survival)

    def survives(self, tokens: float) -> float:
        """P(L - shift > tokens), given that the answer has reached the shift."""
        return float(np.interp(tokens + self.shift, EDGES, self.survival)) / self._alive

    def quantile(self, level: float) -> float:
        """Smallest length, in tokens from the shift, whose P(L <= length) reaches `level`."""
        return float(self.quantiles(np.array([level]))[0])

    def quantiles(self, levels: NDArray[np.float64]) -> NDArray[np.float64]:
        """Lengths at `levels` (each in (0, 1]), same shape, tokens from the shift."""
        cdf = 1.0 - self.survival
        target = 1.0 - self._alive * (1.0 - np.asarray(levels, np.float64))
        k = np.clip(np.searchsorted(cdf, target - 1e-12), 1, BINS)
        rise = np.maximum(cdf[k] - cdf[k - 1], 1e-300)
        part = np.clip((target - cdf[k - 1]) / rise, 0.0, 1.0)
        at: NDArray[np.float64] = EDGES[k - 1] + part * (EDGES[k] - EDGES[k - 1])
        return np.maximum(at - self.shift, 0.0)

    @property
    def mean(self) -> float:
        """Expected tokens from the shift: the integral of survival."""
        knots = np.concatenate([[self.shift], EDGES[self.shift < EDGES]])
        return float(np.trapezoid(np.interp(knots, EDGES, self.survival), knots)) / self._alive

    def capped(self, limit: float) -> LengthDistribution:
        """The same answer under `max_tokens` = limit (tokens, above 0).

        Mass beyond the bin that holds the limit ends in that bin; callers still take min(., limit).
        """
        k = max(int(np.searchsorted(EDGES, limit + self.shift)), 1)
        return LengthDistribution(
            np.where(np.arange(len(EDGES)) < k, self.survival, 0.0), self.shift
        )

    def remaining(self, age: float) -> LengthDistribution:
        """What is left of an answer that has run `age` more tokens and goes on; no model call.

        Past everything the distribution allows, the answer is expected to end within one bin.
        """
        shift = self.shift + age
        if np.interp(shift, EDGES, self.survival) > 1e-12:
            return LengthDistribution(self.survival, shift)
        k = min(int(np.searchsorted(EDGES, shift, side="right")), BINS)
        return LengthDistribution(
            np.where(np.arange(len(EDGES)) < k, 1.0, 0.0), min(shift, EDGES[-1] - 1.0)
        )

    @property
    def _alive(self) -> float:
        """P(L > shift): 1 for an answer that has not begun."""
        return float(np.interp(self.shift, EDGES, self.survival)) if self.shift else 1.0
