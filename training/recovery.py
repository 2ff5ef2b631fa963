"""How soon others recover after a thousand requests of a promise that nobody can keep.

    python -m training.recovery [--seeds 5] [--json]

One class of the scenario is promised 99 % (drift-plus-penalty over best-fit). For a thousand of
its requests the limit is a pace that only the fastest replica reaches, and only while it is nearly
empty; before and after it is an easy one. The other class has ordinary limits. Shown is the
attainment of the other class before, during, and in the first and second 200 of its requests after,
for four policies on the same requests: best-fit alone, the wrapper, the wrapper without leak (the
queue stays at its cap), and the queue as MESS+ writes it (no cap either).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from domain.request import Slo
from policies.config import BestFitPolicy, DriftPlusPenaltyPolicy, PolicyConfig, Target
from training.evaluate import run_live
from training.measures import MET, MISSED
from training.scenario import Arrivals, Case, Promise, Replicas, Scenario, build

DEMANDING, OTHERS = "demanding", "others"
BEFORE, IMPOSSIBLE, AFTER = 600, 1_000, 600
"""Requests of the demanding class in each phase."""
RATE = 8.0
TIGHT = 0.0078
"""Seconds per token: the fast replica alone takes 0.0076."""
PLAIN = {"shed_below": 0.0, "overload_target": 0.0, "log_candidates": 0}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demand(Case):
    """A case in which one class's limits change: `impossible` (n,) says where nobody can keep
    them.
    """

    impossible: Any

    def slo(self, i: int) -> Slo:
        """Limits of request i."""
        if self.impossible[i]:
            return Slo(tpot=TIGHT)  # type: ignore[arg-type] # seconds
        return Case.slo(self, i)


def scenario() -> Scenario:
    """Two kinds of replica; the slow kind is enough for the others' limits while it is not full."""
    return Scenario(
        name="recovery",
        fleet=(
            Replicas(profile="h100-fp8-14b", count=1),
            Replicas(profile="a100-bf16-14b", count=1),
            Replicas(profile="l40s-int4-14b", count=1),
        ),
        arrivals=Arrivals(kind="poisson"),
        classes={
            DEMANDING: Promise(rank=0, share=0.5, ttft=2.0, tpot=0.2, sheddable=False),
            OTHERS: Promise(rank=1, share=0.5, ttft=1.0, tpot=0.05, sheddable=False),
        },
        requests=2 * (BEFORE + IMPOSSIBLE + AFTER),
        warmup=0,
    )


def demand(seed: int, rate: float = RATE) -> Demand:
    """The case of one seed."""
    case = build(scenario(), rate, seed)
    nth = np.cumsum(case.trace.class_id == _class(case, DEMANDING))
    phase = (nth > BEFORE) & (nth <= BEFORE + IMPOSSIBLE)
    values = {f.name: getattr(case, f.name) for f in fields(Case)}
    return Demand(**values, impossible=phase & (case.trace.class_id == _class(case, DEMANDING)))


def _class(case: Case, name: str) -> int:
    return case.trace.classes.index(name)


def policies() -> dict[str, PolicyConfig]:
    """The four that are compared."""

    def wrapped(**options: Any) -> DriftPlusPenaltyPolicy:
        targets = (Target(rank=0, attainment=0.99),)
        return DriftPlusPenaltyPolicy(
            kind="drift_plus_penalty", base=BestFitPolicy(), targets=targets, **(PLAIN | options)
        )

    return {
        "best_fit": BestFitPolicy(**PLAIN),
        "cap and leak": wrapped(),
        "cap, no leak": wrapped(leak=1e-12, rest=1_000_000),
        "neither": wrapped(cap=1e9),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Attainment of the other class: before, during, in two stretches of 200 after, the rest."""

    before: float
    during: float
    first: float
    second: float
    rest: float


def run(case: Demand, policy: PolicyConfig) -> Recovery:
    """One policy through the case."""
    verdict = run_live(case, policy, learning=False).verdict
    begin, end = np.flatnonzero(case.impossible)[[0, -1]]
    counted = (case.trace.class_id == _class(case, OTHERS)) & np.isin(verdict, (MET, MISSED))
    at = np.arange(len(verdict))
    met = verdict == MET
    after = np.flatnonzero(counted & (at > end))
    return Recovery(
        before=float(met[counted & (at < begin)].mean()),
        during=float(met[counted & (at >= begin) & (at <= end)].mean()),
        first=float(met[after[:200]].mean()),
        second=float(met[after[200:400]].mean()),
        rest=float(met[after[200:]].mean()),
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="how soon others recover from a vain promise")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=RATE, help="requests/s")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cases = [demand(seed, args.rate) for seed in range(1, args.seeds + 1)]
    names = [f.name for f in fields(Recovery)]
    table: dict[str, dict[str, list[float]]] = {}
    for name, policy in policies().items():
        results = [run(case, policy) for case in cases]
        table[name] = {n: [getattr(r, n) for r in results] for n in names}
    if args.json:
        print(json.dumps(table))
        return
    print("attainment of the others   " + "  ".join(n.rjust(14) for n in names))
    for name, columns in table.items():
        cells = [f"{np.mean(c):.3f} ± {_half(c):.3f}".rjust(14) for c in columns.values()]
        print(f"{name:<26} " + "  ".join(cells))


def _half(values: list[float]) -> float:
    """Half of a 95 % interval by Student's t."""
    from scipy.stats import t

    n = len(values)
    return float(t.ppf(0.975, n - 1) * np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else 0.0


if __name__ == "__main__":
    main()
