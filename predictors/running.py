"""Running length distributions: what every learned length model must beat, and where it falls back
to.

Counts per bin, forgotten exponentially, per key, and each key shrunk towards the next coarser one:
(model, text group) -> model -> prior.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from domain.length import BINS, EDGES, LengthDistribution

HALF_LIFE = 500.0
"""Outcomes after which an old one counts half."""

KEEP = 0.5 ** (1.0 / HALF_LIFE)
"""What an outcome's weight is multiplied by when the next one comes."""

LARGEST_UNIT = 1e6
"""Counts are brought back to unit 1 beyond this, long before a float loses digits."""

PRIOR_WEIGHT = 20.0
"""Outcomes that the coarser distribution is worth in the finer one."""

REBUILD = 0.02
"""Share of new evidence after which a distribution is rebuilt; between that, the last one
serves."""

PRIOR = LengthDistribution.lognormal(150.0, 1.1)
"""Before any outcome: chat answers of the public logs have medians near 150 tokens."""

_EDGES: list[float] = EDGES.tolist()
_PRIOR_MASS: NDArray[np.float64] = -np.diff(PRIOR.survival)


class _Counts:
    """Counts per bin, (BINS,), in growing units instead of shrinking counts: forgetting costs O(1).

    An outcome weighs `unit`, which grows by 1 / keep with each; true counts are `counts` / `unit`.
    `fresh` is how many outcomes came since `distribution` was built.
    """

    __slots__ = ("counts", "distribution", "fresh", "total", "unit")

    def __init__(self) -> None:
        self.counts = np.zeros(BINS)
        self.total = 0.0
        self.unit = 1.0
        self.fresh = 0.0
        self.distribution: LengthDistribution | None = None

    def age(self) -> None:
        """One more outcome comes: those before it count less."""
        self.unit /= KEEP
        if self.unit > LARGEST_UNIT:
            self.counts /= self.unit
            self.total /= self.unit
            self.unit = 1.0


class RunningLengths:
    """Length distributions per (model, group) that follow the outcomes; deterministic.

    An answer cut by `max_tokens` is censored: its mass is spread over the bins beyond the cut in
    the present proportions. At most `capacity` groups are kept, the least recently seen are dropped
    first.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._of: dict[tuple[str, int], _Counts] = {}

    def distribution(self, model: str, group: int = 0) -> LengthDistribution:
        """The present distribution of output tokens; `group` 0 is the whole model."""
        key = (model, group)
        counts = self._of.get(key)
        if counts is None:
            key = (model, 0)
            counts = self._of.get(key)
            if counts is None:
                return PRIOR
        if counts.distribution is None:
            counts.distribution = LengthDistribution.from_counts(self._smoothed(key))
        return counts.distribution

    def observe(self, model: str, group: int, tokens: float, *, censored: bool = False) -> None:
        """Take one outcome in: `tokens` of output; `censored` if it was cut there."""
        if tokens < 1:
            return
        k = min(bisect_left(_EDGES, tokens), BINS) - 1
        keys = [(model, 0)] if group == 0 else [(model, 0), (model, group)]
        mass = self._beyond(keys[-1], k) if censored else None
        for key in keys:
            # Taken out and put in at the end: most recently seen.
            counts = self._of.pop(key, None) or _Counts()
            self._of[key] = counts
            counts.age()
            if mass is None:
                counts.counts[k] += counts.unit
            else:
                counts.counts += counts.unit * mass
            counts.total += counts.unit
            counts.fresh += 1.0
            if counts.fresh >= REBUILD * (PRIOR_WEIGHT + counts.total / counts.unit):
                counts.distribution = None
                counts.fresh = 0.0
        if group == 0:
            return
        while len(self._of) > self._capacity:
            del self._of[next(iter(self._of))]

    def _beyond(self, key: tuple[str, int], k: int) -> NDArray[np.float64]:
        """One outcome's mass, (BINS,), spread over bin k and those after it as the key's mass is
        now.
        """
        mass = np.zeros(BINS)
        beyond = self._smoothed(key)[k:]
        total = beyond.sum()
        mass[k:] = beyond / total if total > 0 else 1.0 / len(beyond)
        return mass

    def _smoothed(self, key: tuple[str, int]) -> NDArray[np.float64]:
        """Counts of the key plus `PRIOR_WEIGHT` of the coarser distribution; (BINS,)."""
        if key[1] == 0:
            prior = _PRIOR_MASS
        else:
            coarse = self._smoothed((key[0], 0))
            prior = coarse / coarse.sum()
        spread = prior * PRIOR_WEIGHT
        counts = self._of.get(key)
        return spread if counts is None else counts.counts / counts.unit + spread
