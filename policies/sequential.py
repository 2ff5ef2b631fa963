"""Is the candidate worse? A test that may be looked at after every request.

Capital starts at 1 and bets that the candidate is worse: for each block of outcomes, D = mean met
of the control - mean met of the candidate lies in [-1, 1], and the capital is multiplied by
1 + lambda (D - tolerance). If the candidate is worse by no more than the tolerance, capital is a
supermartingale whatever the bets, so it ever reaches 1 / alpha with probability alpha at most
(Ville's inequality): the alarm is false that rarely, however often one looks. A mixture over fixed
bets needs no tuning. The mirrored bet gathers evidence that the candidate is *not* worse by more
than a margin, which is what a promotion wants to see.

Source: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS B
2024 (capital processes, mixtures of bets); Ville, 1939. Blocks pair outcomes of the same class that
settled next to each other, so that load that comes and goes hits both sides.

What it cannot know: candidate and control share the fleet, so harm done to the others' requests
shows in both; and canaries are chosen by tenant, so a candidate may be blamed for harder tenants.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf, log, log1p

BETS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
"""Shares of the capital that are staked; small ones find small differences, late."""


class Capital:
    """The mean of the capitals of all bets, in logarithms; never 0, since no bet is 1."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._logs = [0.0] * len(BETS)

    def bet(self, difference: float) -> None:
        """Take one block in; `difference` in [-1, 1], expected at or below the threshold if the
        null holds.
        """
        gain = difference - self._threshold
        self._logs = [
            total + log1p(max(bet / (1.0 + self._threshold) * gain, -0.999))
            for total, bet in zip(self._logs, BETS, strict=True)
        ]

    @property
    def log(self) -> float:
        """Natural logarithm of the capital."""
        top = max(self._logs)
        return top + log(sum(exp(x - top) for x in self._logs) / len(BETS))


@dataclass(slots=True)
class _Block:
    control: int = 0
    control_met: int = 0
    candidate: int = 0
    candidate_met: int = 0


@dataclass(slots=True)
class AttainmentTest:
    """Compares met limits of candidate and control, class by class, request by request.

    `alpha` bounds the chance that the alarm is false; `tolerance` is how much worse the candidate
    may be; `margin` what a promotion wants excluded. All in shares of requests.
    """

    alpha: float = 0.01
    tolerance: float = 0.005
    margin: float = 0.02
    control: int = 0
    control_met: int = 0
    candidate: int = 0
    candidate_met: int = 0
    _worse: Capital = field(init=False)
    _fine: Capital = field(init=False)
    _blocks: dict[int, _Block] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._worse = Capital(self.tolerance)
        self._fine = Capital(-self.margin)

    def observe(self, stratum: int, *, candidate: bool, met: bool) -> None:
        """One settled request of either side."""
        block = self._blocks.get(stratum)
        if block is None:
            block = self._blocks[stratum] = _Block()
        if candidate:
            self.candidate += 1
            self.candidate_met += met
            block.candidate += 1
            block.candidate_met += met
        else:
            self.control += 1
            self.control_met += met
            block.control += 1
            block.control_met += met
        if block.candidate and block.control:
            difference = block.control_met / block.control - block.candidate_met / block.candidate
            self._worse.bet(difference)
            self._fine.bet(-difference)
            self._blocks[stratum] = _Block()

    @property
    def alarm(self) -> bool:
        """Whether the candidate is worse, at level `alpha`."""
        return self._worse.log >= log(1.0 / self.alpha)

    @property
    def safe(self) -> bool:
        """Whether it is excluded, at level `alpha`, that the candidate is worse by `margin`."""
        return self._fine.log >= log(1.0 / self.alpha)

    @property
    def evidence(self) -> float:
        """The capital against the candidate: at least 1 / alpha once in false alarms, alpha of all
        roll-outs at most.
        """
        return exp(min(self._worse.log, 700.0))

    @property
    def difference(self) -> float:
        """Attainment of the candidate minus that of the control; nan before both were seen."""
        if not self.candidate or not self.control:
            return inf - inf
        return self.candidate_met / self.candidate - self.control_met / self.control
