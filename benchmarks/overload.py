"""Overload, fairness and several gateways, in virtual time through the real decision core.

    python benchmarks/overload.py knee|shed|retry|fairness|release|gateways [--json] [--seeds 5]

knee      attainment against load for the fleet used here; loads below are multiples of its knee
shed      attainment per class at 0.9 and 1.3 x knee, and the shed share against load
retry     of the clients that wait `Retry-After`, how many are admitted
fairness  one tenant floods at 20 x its share: the others' attainment beside their run alone
release   CPU time of one release with 10 to 10,000 waiting
gateways  two and four gateways against one at the same load, metrics 500 ms old, pushes every 50 ms

Intervals are 95 % over seeds (paired where two runs of a seed are compared).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.virtual_time import Call, Record, VirtualTime
from domain.events import Arrived, AttemptEnded, Commit, Committed, Send
from domain.fleet import FleetSpec, Profile, ReplicaSpec, Variant
from domain.outcome import Cause, Usage, UsageSource
from domain.request import InferenceRequest, Slo, SloClass, Tenant
from policies.config import BestFitPolicy, PolicyConfig
from policies.core import DecisionCore
from policies.factory import build_core
from predictors.estimator import BaselineEstimator

KNEE = 70.0
"""Requests/s at which 90 % of this workload's limits are met on this fleet (`knee`)."""

CLASSES = (
    SloClass(name="top", rank=0, slo=Slo(ttft=1.0, tpot=0.06)),  # type: ignore[arg-type]
    SloClass(name="middle", rank=1, slo=Slo(ttft=3.0, tpot=0.08)),  # type: ignore[arg-type]
    SloClass(name="low", rank=2, slo=Slo(ttft=10.0, tpot=0.12)),  # type: ignore[arg-type]
)
SHARES = (0.4, 0.3, 0.3)


def fleet(m: int = 4) -> FleetSpec:
    """m replicas of four speeds."""
    speeds = (0.6, 1.0, 1.7, 2.4)
    return FleetSpec(
        replicas=tuple(
            ReplicaSpec(
                name=f"r{i}",
                variant="v",
                profile=Profile(
                    weights=0.012 * speeds[i % 4],
                    per_token=6e-5 * speeds[i % 4],
                    max_seqs=64,
                    kv_capacity=60_000.0,
                ),
            )
            for i in range(m)
        ),
        variants=(Variant(name="v", model="m"),),
    )


def core(
    tenants: Sequence[str],
    policy: PolicyConfig | None = None,
    m: int = 4,
    classes: Sequence[SloClass] = CLASSES,
) -> DecisionCore:
    """A fresh core without quotas."""
    return build_core(
        policy or BestFitPolicy(),
        fleet=fleet(m),
        estimator=BaselineEstimator(),
        tenants=[Tenant(name=name) for name in tenants],
        classes=list(classes),
    )


def calls(
    seed: int,
    rate: float,
    seconds: float,
    *,
    tenant: str = "t",
    shares: Sequence[float] = SHARES,
    classes: Sequence[SloClass] = CLASSES,
    gateways: int = 1,
    patient: bool = False,
    start: float = 0.0,
) -> list[Call]:
    """A Poisson stream of one tenant: log-normal prompts and answers, classes by share."""
    rng = np.random.default_rng([seed, *tenant.encode()])
    n = rng.poisson(rate * seconds)
    at = np.sort(rng.uniform(start, start + seconds, n))
    prompt = np.clip(rng.lognormal(np.log(400), 0.8, n), 16, 4000).round()
    output = np.clip(rng.lognormal(np.log(120), 0.7, n), 2, 1000).round()
    kind = rng.choice(len(classes), n, p=np.array(shares) / sum(shares))
    gate = rng.integers(gateways, size=n)
    tie = rng.integers(2**31, size=n)
    found = []
    for i in range(n):
        promised = classes[kind[i]]
        request = InferenceRequest(
            id=f"{tenant}{i}",
            tenant=tenant,
            model="m",
            prompt_tokens=float(prompt[i]),
            max_tokens=1000.0,
            slo=promised.slo,
            class_name=promised.name,
            tie=int(tie[i]),
            text_group=int(tie[i]) % 7,
            prompt_chars=int(prompt[i]) * 4,
        )
        found.append(Call(float(at[i]), request, int(output[i]), int(gate[i]), patient))
    return found


def play(
    cores: Sequence[DecisionCore], stream: Sequence[Call], m: int = 4, **kwargs: Any
) -> list[Record]:
    """Run a stream through these cores."""
    world = VirtualTime(fleet(m), cores, capacity=4 * len(stream) + 16, **kwargs)
    return world.run(sorted(stream, key=lambda call: call.at))


# ---- figures


def attainment(records: Iterable[Record]) -> float:
    """Share of first tries that met every limit; refused ones are misses."""
    met = [r.outcome.met is True for r in records if r.call.tries == 1]
    return float(np.mean(met)) if met else float("nan")


def refused_share(records: Iterable[Record]) -> float:
    """Share of first tries that were refused."""
    refused = [r.refused for r in records if r.call.tries == 1]
    return float(np.mean(refused)) if refused else float("nan")


def settled(records: Iterable[Record], after: float, before: float) -> list[Record]:
    """Records of calls that arrived in [after, before): the start is left out."""
    return [r for r in records if after <= r.call.at < before]


def of_class(records: Iterable[Record], name: str) -> list[Record]:
    """Records of one class."""
    return [r for r in records if r.call.request.class_name == name]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of a 95 % interval (t quantiles for few seeds)."""
    a = np.asarray(values)
    if len(a) < 2:
        return float(a.mean()), float("inf")
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
    half = t.get(len(a), 2.0) * float(a.std(ddof=1)) / sqrt(len(a))
    return float(a.mean()), half


def knee(args: argparse.Namespace) -> dict[str, Any]:
    """Attainment against load."""
    rows = []
    for rate in args.rates:
        found = [
            settled(play([core(["t"])], calls(s, rate, args.seconds)), 10, args.seconds)
            for s in range(args.seeds)
        ]
        mean, half = interval([attainment(r) for r in found])
        rows.append({
            "rate": rate, "attainment": mean, "half": half,
            "refused": float(np.mean([refused_share(r) for r in found])),
            "classes": {c.name: float(np.mean([attainment(of_class(r, c.name)) for r in found])) for c in CLASSES},
            "reasons": dict(Counter(x.outcome.reason for r in found for x in r if x.outcome.met is False)),
        })
    return {"rows": rows}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[40, 55, 70, 85, 100])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    began = time.process_time()
    result = COMMANDS[args.what](args)
    result["cpu_s"] = time.process_time() - began
    print(json.dumps(result, indent=None if args.json else 1))
    return 0


COMMANDS = {"knee": knee}

if __name__ == "__main__":
    raise SystemExit(main())
