"""Running length distributions: what every learned length model must beat, and where it falls back
to.

Counts per bin, forgotten exponentially, per key, and each key shrunk towards the next coarser one:
(model, text group) -> model -> prior.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from domain.length import BINS, EDGES, LengthDistribution

HALF_LIFE = 500.0
"""Outcomes after which an old one counts half."""

PRIOR_WEIGHT = 20.0
"""Outcomes that the coarser distribution is worth in the finer one."""

REBUILD = 0.02
"""Share of new evidence after which a distribution is rebuilt; between that, the last one
serves."""

PRIOR = LengthDistribution.lognormal(150.0, 1.1)
"""Before any outcome: chat answers of the public logs have medians near 150 tokens."""


class RunningLengths:
    """Length distributions per (model, group) that follow the outcomes; deterministic.

    An answer cut by `max_tokens` is censored: its mass is spread over the bins beyond the cut in
    the present proportions. At most `capacity` groups are kept, the least recently seen are dropped
    first.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._keep = 0.5 ** (1.0 / HALF_LIFE)
        self._counts: dict[tuple[str, int], NDArray[np.float64]] = {}
        self._cache: dict[tuple[str, int], LengthDistribution] = {}
        self._fresh: dict[tuple[str, int], float] = {}

    def distribution(self, model: str, group: int = 0) -> LengthDistribution:
        """The present distribution of output tokens; `group` 0 is the whole model."""
        key = (model, group) if (model, group) in self._counts else (model, 0)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = LengthDistribution.from_counts(self._smoothed(key))
        return found

    def observe(self, model: str, group: int, tokens: float, *, censored: bool = False) -> None:
        """Take one outcome in: `tokens` of output; `censored` if it was cut there."""
        if tokens < 1:
            return
        keys = [(model, 0)] if group == 0 else [(model, 0), (model, group)]
        weights = self._mass(keys[-1], tokens, censored=censored)
        for key in keys:
            counts = self._counts.pop(key, None)
            if counts is None:
                counts = np.zeros(BINS)
            counts *= self._keep
            counts += weights
            self._counts[key] = counts  # moved to the end: most recently seen
            # A distribution is rebuilt once its counts have changed by a fiftieth.
            changed = self._fresh.get(key, 0.0) + 1.0
            if changed >= REBUILD * (PRIOR_WEIGHT + counts.sum()):
                self._cache.pop(key, None)
                changed = 0.0
            self._fresh[key] = changed
        if group == 0:
            return
        while len(self._counts) > self._capacity:
            oldest = next(iter(self._counts))
            del self._counts[oldest]
            self._cache.pop(oldest, None)
            self._fresh.pop(oldest, None)

    def _mass(self, key: tuple[str, int], tokens: float, *, censored: bool) -> NDArray[np.float64]:
        k = min(int(np.searchsorted(EDGES, tokens)), BINS) - 1
        weights = np.zeros(BINS)
        if not censored:
            weights[k] = 1.0
            return weights
        beyond = self._smoothed(key)[k:]
        total = beyond.sum()
        weights[k:] = beyond / total if total > 0 else 1.0 / len(beyond)
        return weights

    def _smoothed(self, key: tuple[str, int]) -> NDArray[np.float64]:
        """Counts of the key plus `PRIOR_WEIGHT` of the coarser distribution; (BINS,)."""
        if key[1] == 0:
            prior = -np.diff(PRIOR.survival)
        else:
            coarse = self._smoothed((key[0], 0))
            prior = coarse / coarse.sum()
        counts = self._counts.get(key)
        spread = prior * PRIOR_WEIGHT
        return spread if counts is None else counts + spread
