"""How long to wait before a dead child is started again: a rule without processes or clocks.

The delay doubles with every life that ended early and falls back to the first one after a life that
lasted. A child killed once is back within a second; one that cannot live costs one start per
`longest` seconds and never more.
"""

from dataclasses import dataclass

from domain.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffRule:
    """Delays between the death of a child and its next start.

    Raises: ValueError if `first` is not positive or `longest` is below it.
    """

    first: Seconds = Seconds(0.25)  # shorter than a model load, so one crash costs little
    longest: Seconds = Seconds(30.0)  # a broken child wastes at most one start per half minute
    lasted: Seconds = Seconds(60.0)  # a life this long was no failure to start

    def __post_init__(self) -> None:
        if not 0 < self.first <= self.longest:
            raise ValueError(f"need 0 < first <= longest, got {self.first} and {self.longest}")


class Backoff:
    """Counts the early deaths of one child and says when it may start again."""

    def __init__(self, rule: BackoffRule) -> None:
        self._rule = rule
        self.early_deaths = 0

    def after_death(self, served: Seconds) -> Seconds:
        """Delay before the next start, given how long the child had been serving.

        Mutates: the count of early deaths in a row.
        """
        if served >= self._rule.lasted:
            self.early_deaths = 0
        delay = min(self._rule.first * 2.0 ** min(self.early_deaths, 60), self._rule.longest)
        self.early_deaths += 1
        return Seconds(delay)
