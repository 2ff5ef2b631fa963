"""One policy in one scenario at one rate: `simulate`; the rates policies carry: `Scan`, `climb`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from domain.errors import ConfigError
from domain.fleet import Profile
from domain.ports import Estimator
from policies.config import PolicyConfig
from policies.factory import build_core
from predictors.estimator import BaselineEstimator
from training.fast_path import CompiledLoop, supports
from training.informed import InformedEstimator
from training.measures import Report, Run, measure
from training.scenario import Case, Scenario, build
from training.virtual import Script, VirtualShell

KNEE_TARGET = 0.9
"""What is met at a knee, size-fair."""
_STEP = 1.3

_policy: TypeAdapter[Any] = TypeAdapter(PolicyConfig)


def policy_named(kind: str, **options: Any) -> PolicyConfig:
    """A policy by name with options. Raises: ConfigError naming what is wrong."""
    try:
        return _policy.validate_python({"kind": kind, "log_candidates": 0, **options})  # type: ignore[no-any-return]
    except ValidationError as exc:
        raise ConfigError(f"policy {kind!r}: {exc}") from exc


def estimator_for(case: Case, *, learning: bool = True) -> Estimator:
    """The estimator that the scenario asks for."""
    sigma = case.scenario.length_sigma
    if sigma is None:
        return BaselineEstimator()
    return InformedEstimator(case.trace.output, sigma, case.seed, learning=learning)


def run_live(
    case: Case, policy: PolicyConfig, *, learning: bool = True, script: Script | None = None
) -> Run:
    """A case through the real decision core, one per gateway; `script`: what is done to the fleet
    meanwhile.
    """
    cores = [
        build_core(
            policy.model_copy(update={"seed": case.core_seed(policy.seed, g)}),
            fleet=case.believed,
            estimator=estimator_for(case, learning=learning),
            tenants=case.tenants,
            classes=case.classes,
        )
        for g in range(case.scenario.gateways)
    ]
    return VirtualShell(case, cores, script=script).run()


class Runner:
    """Runs cases through the compiled loop where it knows all they need, else the live core."""

    def __init__(self) -> None:
        self._loop: CompiledLoop | None = None

    def run(self, case: Case, policy: PolicyConfig) -> tuple[Run, bool]:
        """The run, and whether the live core did it. What outcomes would teach the estimator stays
        frozen in both, so that they decide alike.
        """
        if not supports(case, policy):
            return run_live(case, policy, learning=False), True
        if self._loop is None:
            self._loop = CompiledLoop()
        return self._loop.run(case, policy), False


def simulate(
    scenario: Scenario,
    policy: PolicyConfig,
    rate: float,
    seed: int,
    *,
    data: Path | None = None,
    profiles: Mapping[str, Profile] | None = None,
) -> tuple[Run, Report]:
    """One run in virtual time and its measures (DESIGN section 11)."""
    case = build(scenario, rate, seed, data=data, profiles=profiles)
    run = run_live(case, policy)
    return run, measure(case, run, policy.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Rates of a grid with what was met at each: (k,) requests/s and attainment."""

    rates: tuple[float, ...]
    attainment: tuple[float, ...]

    def last_at(self, target: float) -> float:
        """The last rate at which the isotonic (falling) fit of attainment reaches `target`, linear
        between grid points; 0 if none does.
        """
        fit = falling(np.array(self.attainment))
        rates = np.array(self.rates)
        above = np.flatnonzero(fit >= target)
        if not len(above):
            return 0.0
        k = int(above[-1])
        if k + 1 == len(rates) or fit[k] == fit[k + 1]:
            return float(rates[k])
        part = (fit[k] - target) / (fit[k] - fit[k + 1])
        return float(rates[k] + part * (rates[k + 1] - rates[k]))


def falling(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The closest never-rising sequence, by pooling adjacent violators (Ayer et al., 1955)."""
    pools: list[list[float]] = []
    for value in values.tolist():
        pools.append([value, 1.0])
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            mean, count = pools.pop()
            before = pools[-1]
            total = before[1] + count
            pools[-1] = [(before[0] * before[1] + mean * count) / total, total]
    return np.concatenate([np.full(int(count), mean) for mean, count in pools])


@dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """The last rate (requests/s) at which each rule meets `KNEE_TARGET`, 0 if none; `reached` is
    False if no rule ever did: then the last one with what the best had less 10 points.
    """

    rates: tuple[float, ...]
    reached: bool


def climb(met: Callable[[float], Sequence[float]], start: float, rungs: int = 8) -> Climb:
    """Knees on a ladder of rates around `start`: down to where the best rule meets the target, up
    to where it has lost 10 points, but no more than `rungs` either way. `met` gives what each rule
    meets at a rate.
    """
    curves: dict[float, Sequence[float]] = {}

    def best_at(rate: float) -> float:
        curves[rate] = met(rate)
        return max(curves[rate])

    for k in range(rungs):
        if best_at(start / _STEP**k) >= KNEE_TARGET:
            break
    for k in range(1, rungs):
        if best_at(start * _STEP**k) < KNEE_TARGET - 0.1:
            break
    grid = tuple(sorted(curves))
    best = max(max(curve) for curve in curves.values())
    target = KNEE_TARGET if best >= KNEE_TARGET else best - 0.1
    return Climb(
        rates=tuple(
            Scan(rates=grid, attainment=curve).last_at(target)
            for curve in zip(*(curves[rate] for rate in grid), strict=True)
        ),
        reached=best >= KNEE_TARGET,
    )


def guess(case: Case) -> float:
    """Requests/s that the fleet's processors could do at full batches, roughly."""
    prompt, output = float(case.trace.prompt.mean()), float(case.trace.output.mean())
    rate = 0.0
    for spec in case.fleet.replicas:
        p = spec.profile
        token = (p.overhead + p.weights) / 32 + p.per_sequence + p.per_context * prompt
        rate += 1.0 / (p.per_token * prompt + output * token)
    return rate
