"""Drift alarm: says when the error of a predictor has changed for the worse.

Page and Hinkley's test on a stream of scores whose mean is known while all is well: `m` adds up
(score - reference - slack) and is compared with its own minimum; an alarm stays until enough good
scores have come. One number per outcome, no window.
Source: E. S. Page, "Continuous inspection schemes", Biometrika 1954.
"""

from __future__ import annotations


class PageHinkley:
    """One-sided change detector.

    `reference` is the expected score; None learns it as the mean of the first `warm_up` scores.
    `slack` is the change too small to matter, `threshold` what must add up before the alarm, both
    in the score's unit. `recovery` scores in a row no worse than reference + slack on average clear
    it. NaN and infinite scores are ignored.
    """

    def __init__(
        self,
        *,
        reference: float | None = None,
        slack: float = 0.05,
        threshold: float = 5.0,
        warm_up: int = 50,
        recovery: int = 100,
    ) -> None:
        self.reference = reference
        self.slack = slack
        self.threshold = threshold
        self.warm_up = warm_up
        self.recovery = recovery
        self.alarmed = False
        self.alarms = 0
        self._seen = 0
        self._sum = 0.0
        self._above = 0.0
        self._since: list[float] = []

    def observe(self, score: float) -> bool:
        """Take one score in (higher is worse) and say whether the alarm is on."""
        if not abs(score) < float("inf"):
            return self.alarmed
        if self.reference is None:
            self._seen += 1
            self._sum += score
            if self._seen >= self.warm_up:
                self.reference = self._sum / self._seen
            return False
        if self.alarmed:
            self._recover(score, self.reference)
            return self.alarmed
        self._above = max(0.0, self._above + score - self.reference - self.slack)
        if self._above > self.threshold:
            self.alarmed = True
            self.alarms += 1
            self._since = []
        return self.alarmed

    def _recover(self, score: float, reference: float) -> None:
        """Clear the alarm once the last `recovery` scores are fine on average."""
        self._since.append(score)
        if len(self._since) > self.recovery:
            del self._since[0]
        full = len(self._since) == self.recovery
        if full and sum(self._since) / self.recovery <= reference + self.slack:
            self.alarmed = False
            self._above = 0.0
