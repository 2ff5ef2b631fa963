"""How far a forecast is believed beside the running distribution that it was made from.

Served is the mixture w F + (1 - w) S of forecast and running distribution. Bayes' rule moves w by
what comes: the odds of F are multiplied by f(L) / s(L) after every outcome. So the mixture's log
loss, added up over all outcomes, never exceeds that of S alone by more than -log(1 - w) at the
start, and it comes as near to F where F is better. A share of the start is mixed back in after each
outcome, so that w can turn when the traffic does (fixed share: Herbster and Warmuth, "Tracking the
best expert", Machine Learning 1998). A model's first w is what all models' outcomes have taught.
"""

from __future__ import annotations

from math import exp, log

from domain.length import LengthDistribution

START = 0.2
"""Weight of a forecast about which nothing is known."""
SHARE = 0.005
"""Weight of the start that is mixed in after an outcome."""
STEP = 2.0
"""Most nats that one outcome moves the odds by."""


def mixed(
    forecast: LengthDistribution, own: LengthDistribution, weight: float
) -> LengthDistribution:
    """Weight * forecast + (1 - weight) * own, of survivals from the same age."""
    return LengthDistribution(
        weight * forecast.survival + (1.0 - weight) * own.survival, forecast.shift
    )


class Trust:
    """Weights by model, and of all models together; deterministic, at most `capacity` of them."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._all = START
        self._of: dict[str, float] = {}

    def weight(self, model: str) -> float:
        """What a forecast for this model is believed, in (0, 1)."""
        return self._of.get(model, self._all)

    def observe(self, model: str, gain: float) -> None:
        """Take in how much likelier (nats) the forecast found an outcome than the running
        distribution. NaN is ignored.
        """
        if not abs(gain) < float("inf"):
            return
        before = self._of.pop(model, self._all)
        self._of[model] = _moved(before, gain, self._all)
        self._all = _moved(self._all, gain, START)
        if len(self._of) > self._capacity:
            del self._of[next(iter(self._of))]


def _moved(weight: float, gain: float, start: float) -> float:
    """The weight after an outcome, with a share of `start`."""
    odds = log(weight / (1.0 - weight)) + min(max(gain, -STEP), STEP)
    return (1.0 - SHARE) / (1.0 + exp(-odds)) + SHARE * start
