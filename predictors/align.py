"""Scores of prompts, put on the scale of the traffic that is here.

A fit learns how prompts compare *within* a set, and a model's own distribution already holds the
level of its traffic. So a score counts from the traffic's mean, and as much as it has proved to say
there: s' = b (s - mean), with b the running slope of the outcome's rank on the score. Without it a
model fitted on long tasks makes every short chat look short, on top of what its own distribution
says.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Moments:
    n: float = 0.0
    s: float = 0.0
    z: float = 0.0
    ss: float = 0.0
    sz: float = 0.0


class ScoreAlign:
    """Running mean and slope per key (a tenant); deterministic, bounded memory.

    Prior: mean 0 worth `centre_weight` outcomes, slope 1 worth `slope_weight` outcomes whose scores
    vary by `variance`. Old outcomes count half after `half_life`.
    """

    def __init__(
        self,
        *,
        centre_weight: float = 5.0,
        slope_weight: float = 60.0,
        variance: float = 0.2,
        half_life: float = 2000.0,
        capacity: int = 4096,
    ) -> None:
        self._centre = centre_weight
        self._slope = slope_weight * variance
        self._keep = 0.5 ** (1.0 / half_life)
        self._capacity = capacity
        self._moments: dict[str, _Moments] = {}

    def __call__(self, key: str, score: float) -> float:
        """The aligned score."""
        m = self._moments.get(key)
        if m is None:
            return score
        mean = m.s / (m.n + self._centre)
        centred = max(m.ss - m.s * m.s / m.n, 0.0)
        crossed = m.sz - m.s * m.z / m.n
        slope = (crossed + self._slope) / (centred + self._slope)
        return min(max(slope, 0.0), 1.5) * (score - mean)

    def observe(self, key: str, score: float, z: float) -> None:
        """Take one outcome in: the raw score and the normal score of its rank in S_m."""
        if not (abs(score) < 1e6 and abs(z) < 1e6):
            return
        m = self._moments.pop(key, None) or _Moments()
        for name, value in (("n", 1.0), ("s", score), ("z", z)):
            setattr(m, name, getattr(m, name) * self._keep + value)
        m.ss = m.ss * self._keep + score * score
        m.sz = m.sz * self._keep + score * z
        self._moments[key] = m
        if len(self._moments) > self._capacity:
            del self._moments[next(iter(self._moments))]
