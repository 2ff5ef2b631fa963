"""Base rates of variants that move with feedback: a few scores among thousands of answers."""

from __future__ import annotations


class FeedbackPriors:
    """Base rate of each variant: a beta posterior that forgets.

    `weight` outcomes' worth of the configured prior; old feedback counts half after `half_life`
    answers of that variant. Scores outside [0, 1] and NaN are ignored.
    """

    def __init__(self, *, weight: float = 30.0, half_life: float = 1000.0) -> None:
        self._weight = weight
        self._keep = 0.5 ** (1.0 / half_life)
        self._sums: dict[str, tuple[float, float]] = {}

    def rate(self, variant: str, prior: float) -> float:
        """Expected share of good answers."""
        good, seen = self._sums.get(variant, (0.0, 0.0))
        return (good + self._weight * prior) / (seen + self._weight)

    def observe(self, variant: str, score: float) -> None:
        """Take one feedback in, 0 (bad) to 1 (good)."""
        if 0.0 <= score <= 1.0:
            good, seen = self._sums.get(variant, (0.0, 0.0))
            self._sums[variant] = (good * self._keep + score, seen * self._keep + 1.0)
