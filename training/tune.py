"""CMA-ES over a policy's flat parameters, on size-fair goodput, with equal budgets.

Every policy gets the same number of simulated cases and the same seeds, which are not those of the
comparison. Strategy: N. Hansen's pycma ("The CMA Evolution Strategy: A Tutorial",
arXiv 1604.00772).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from domain.errors import ConfigError
from training.compare import policy_of
from training.intervals import last_at
from training.measures import fair
from training.scenario import Scenario
from training.workers import Entrant, Unit, Worker

SEEDS = (101, 102, 103)
LOADS = (0.6, 0.85, 1.1, 1.35, 1.7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """An option of a policy and its range; `log` for scales."""

    name: str
    low: float
    high: float
    log: bool = False

    def at(self, u: float) -> float:
        """Value at the share `u` of the range, folded into [0, 1] by reflection."""
        u = abs(u) % 2.0
        u = 2.0 - u if u > 1.0 else u
        if self.log:
            return self.low * math.exp(u * math.log(self.high / self.low))
        return self.low + u * (self.high - self.low)

    def share(self, value: float) -> float:
        """Share of the range at which a value lies."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


COMMON = (Knob(name="shed_below", low=0.0, high=0.5), Knob(name="alpha_max", low=0.0, high=8.0))
"""Every policy has them, so that none wins by its door or its queue alone."""
KNOBS: Mapping[str, tuple[Knob, ...]] = {
    "best_fit": (
        Knob(name="ttft_margin", low=0.2, high=1.0),
        Knob(name="tpot_margin", low=0.2, high=1.0),
    ),
    "just_enough": (Knob(name="margin", low=0.2, high=1.0),),
    "predicted": (Knob(name="decode", low=0.02, high=5.0, log=True),),
    "lmetric": (),
    "least_requests": (),
    "prefix_affinity": (
        Knob(name="prefix", low=0.1, high=10.0, log=True),
        Knob(name="memory", low=0.1, high=10.0, log=True),
    ),
    "sticky": (
        Knob(name="saturated_ms", low=20.0, high=5000.0, log=True),
        Knob(name="session", low=0.0, high=1.0),
    ),
    "marginal": (
        Knob(name="loss", low=0.1, high=5.0, log=True),
        Knob(name="price", low=0.002, high=1.0, log=True),
        Knob(name="sharpness", low=3.0, high=40.0, log=True),
        Knob(name="size", low=0.0, high=1.2),
        Knob(name="hold_above", low=0.0, high=2.0),
        Knob(name="hold_until", low=0.0, high=1.0),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The best options found, their score (requests/s), the defaults' score, and cases spent."""

    kind: str
    options: Mapping[str, float]
    score: float
    default_score: float
    spent: int


def knobs(kind: str) -> tuple[Knob, ...]:
    """What is tuned of a kind. Raises: ConfigError for one that has nothing to tune."""
    if kind not in KNOBS:
        raise ConfigError(f"policy {kind!r} is not tuned; known: {', '.join(KNOBS)}")
    return (*KNOBS[kind], *COMMON)


def objective(
    worker: Worker, scenario: Scenario, knee: float, target: float, seeds: Sequence[int] = SEEDS
) -> Callable[[str, Mapping[str, float]], float]:
    """Size-fair goodput@target (requests/s) of a kind with options, plus a hundredth of the knee
    times mean attainment, so that there is a slope where nothing reaches the target.
    """
    rates = [load * knee for load in LOADS]

    def score(kind: str, options: Mapping[str, float]) -> float:
        entrant = Entrant(label=kind, policy=policy_of(kind, options))
        unit = Unit(scenario=scenario, entrants=(entrant,))
        curve = np.array(
            [
                np.mean(
                    [
                        fair(report)
                        for seed in seeds
                        for _, _, report in worker.reports(replace(unit, seed=seed, rate=rate))
                    ]
                )
                for rate in rates
            ]
        )
        carried = last_at(np.array(rates), curve[None, :], target)[0]
        return float(carried + 0.01 * knee * curve.mean())

    return score


def tune(
    kind: str,
    score: Callable[[str, Mapping[str, float]], float],
    *,
    evaluations: int,
    seed: int = 1,
    tell: Callable[[int], None] = lambda _done: None,
) -> Tuned:
    """The best of about `evaluations` scored options (whole generations), the defaults included."""
    import cma

    space = knobs(kind)
    plain = policy_of(kind, {}).model_dump()
    start = [knob.share(float(plain[knob.name])) for knob in space]

    def options(x: Sequence[float]) -> dict[str, float]:
        return {k.name: float(f"{k.at(u):.4g}") for k, u in zip(space, x, strict=True)}

    default = score(kind, {})
    best_score, best = default, {}
    strategy = cma.CMAEvolutionStrategy(
        start, 0.25, {"seed": seed, "verbose": -9, "maxfevals": evaluations}
    )
    done = 1
    while done < evaluations:
        asked: list[Any] = strategy.ask()
        values = []
        for x in asked:
            found = options(x)
            value = score(kind, found)
            values.append(-value)
            if value > best_score:
                best_score, best = value, found
            done += 1
            tell(done)
        strategy.tell(asked, values)
    return Tuned(
        kind=kind,
        options=best,
        score=best_score,
        default_score=default,
        spent=done * len(LOADS) * len(SEEDS),
    )
