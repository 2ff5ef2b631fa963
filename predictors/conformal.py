"""Rolling conformal correction: quantiles that keep their promise while the traffic changes.

A predictor says F(L); if it is right, u = F(L) is uniform. Per key the last `window` values of u
are kept, and the level to ask for, so that the target share of recent outcomes lay below, is their
empirical quantile (split conformal, with the finite-sample +1). Few values of a key are
joined by those of the coarser keys, (model, tenant) -> model -> all, as `backoff` observations'
worth. An adaptive step on top reacts in tens of outcomes when coverage breaks.
Sources: Vovk et al., "Algorithmic Learning in a Random World", 2005; Gibbs and Candes, "Adaptive
conformal inference under distribution shift", NeurIPS 2021.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from domain.length import LengthDistribution

Floats = NDArray[np.float64]

MOST = 8.0
"""Largest factor on the hazard by which a forecast is corrected."""


class RollingConformal:
    """Corrected levels per (model, tenant); deterministic, bounded memory.

    `window` values are kept per key and `backoff` observations' worth of each coarser key are mixed
    in. `step` is the adaptive gain (gamma of ACI), applied to the miss rate at `target`. At most
    `capacity` keys, the least recently seen go first.
    """

    def __init__(
        self,
        *,
        target: float = 0.9,
        window: int = 300,
        backoff: float = 60.0,
        step: float = 0.01,
        capacity: int = 4096,
    ) -> None:
        self.target = target
        self._window = window
        self._backoff = backoff
        self._step = step
        self._capacity = capacity
        self._ranks: dict[tuple[str, str], deque[float]] = {}
        self._shift: dict[tuple[str, str], float] = {}
        self._levels: dict[tuple[str, str], float] = {}

    def level(self, model: str, tenant: str) -> float:
        """Level in (0, 1) to ask of the model's distribution so that `target` is covered."""
        key = (model, tenant)
        found = self._levels.get(key)
        if found is None:
            found = self._levels[key] = self._compute(key)
        return found

    def observe(self, model: str, tenant: str, rank: float, *, censored: bool = False) -> None:
        """Take the rank F(L) of one outcome in.

        A censored answer (cut, or left by its client) says only that the rank is at least this: it
        counts as a miss where it already lies beyond the bound and is left out otherwise. NaN is
        ignored.
        """
        if not 0.0 <= rank <= 1.0:
            return
        key = (model, tenant)
        asked = self.level(model, tenant)
        missed = rank > asked
        if censored and not missed:
            return
        shift = self._shift.pop(key, 0.0) + self._step * (missed - (1.0 - self.target))
        self._shift[key] = min(max(shift, -0.5), 0.5)
        for each in self._chain(key):
            ranks = self._ranks.pop(each, None)
            if ranks is None:
                ranks = deque(maxlen=self._window)
            ranks.append(rank)
            self._ranks[each] = ranks
        self._levels.pop(key, None)
        if len(self._levels) > self._capacity:
            self._levels.clear()
        while len(self._ranks) > self._capacity:
            oldest = next(iter(self._ranks))
            del self._ranks[oldest]
            self._shift.pop(oldest, None)
            self._levels.pop(oldest, None)

    def _chain(self, key: tuple[str, str]) -> tuple[tuple[str, str], ...]:
        return (key, (key[0], ""), ("", ""))

    def _compute(self, key: tuple[str, str]) -> float:
        values: list[Floats] = []
        weights: list[Floats] = []
        for depth, each in enumerate(self._chain(key)):
            ranks = self._ranks.get(each)
            if not ranks:
                continue
            array = np.fromiter(ranks, np.float64, len(ranks))
            share = 1.0 if depth == 0 else min(1.0, self._backoff / 2**depth / len(array))
            values.append(array)
            weights.append(np.full(len(array), share))
        # the predictor's own word: uniform ranks, worth a tenth of `backoff`
        values.append((np.arange(20) + 0.5) / 20)
        weights.append(np.full(20, self._backoff / 200.0))
        value = np.concatenate(values)
        weight = np.concatenate(weights)
        order = np.argsort(value, kind="stable")
        reached = np.cumsum(weight[order])
        total = float(reached[-1])
        target = min(self.target + self._shift.get(key, 0.0), 0.9995)
        # the finite-sample +1 for the share that the key's own outcomes have
        total += len(self._ranks.get(key, ())) / total
        at = int(np.searchsorted(reached, target * total - 1e-9))
        found = float(value[order[min(at, len(order) - 1)]])
        return min(max(found, 0.05), 0.9995)


def corrected(forecast: LengthDistribution, level: float) -> LengthDistribution:
    """The forecast whose P90 is its quantile at `level`, as far as the hazard is not scaled by more
    than `MOST`. The lower half stays as it is (two thirds of `level` where that is less): a bound
    that is off says nothing about the median.
    """
    if abs(level - 0.9) < 1e-3:
        return forecast
    start = -np.log1p(-min(0.5, level * 2.0 / 3.0))
    scale = (np.log(10.0) - start) / (-np.log1p(-level) - start)
    spent = -np.log(np.maximum(forecast.survival, 1e-300))
    tail = np.maximum(spent - start, 0.0)
    spent += (min(max(scale, 1.0 / MOST), MOST) - 1.0) * tail
    return LengthDistribution(np.where(forecast.survival > 0.0, np.exp(-spent), 0.0))
