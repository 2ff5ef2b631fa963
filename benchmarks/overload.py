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
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.virtual_time import Call, Record, VirtualTime
from domain.events import (
    Action,
    Arrived,
    AttemptEnded,
    Commit,
    Committed,
    Event,
    FirstToken,
    Hold,
    Send,
    Settle,
)
from domain.fleet import FleetSpec, Profile, ReplicaSpec, Variant
from domain.outcome import Cause, Usage, UsageSource
from domain.request import InferenceRequest, Slo, SloClass, Tenant
from policies.config import BestFitPolicy, PolicyConfig
from policies.core import DecisionCore
from policies.factory import build_core
from predictors.estimator import BaselineEstimator

KNEE = 53.0
"""Requests/s at which 90 % of this workload's limits are met on this fleet (`knee`)."""

CLASSES = (
    SloClass(name="top", rank=0, slo=Slo(ttft=1.0, tpot=0.06)),  # type: ignore[arg-type]
    SloClass(name="middle", rank=1, slo=Slo(ttft=3.0, tpot=0.08)),  # type: ignore[arg-type]
    SloClass(name="low", rank=2, slo=Slo(ttft=10.0, tpot=0.12)),  # type: ignore[arg-type]
)
SHARES = (0.4, 0.3, 0.3)


def fleet(m: int = 4) -> FleetSpec:
    """M replicas of four speeds."""
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


def refusing(seed: int = 0) -> BestFitPolicy:
    """What is measured here: best-fit with early refusal, which is off unless asked for."""
    return BestFitPolicy(overload_target=0.05, seed=seed)


def core(
    tenants: Sequence[str],
    policy: PolicyConfig | None = None,
    m: int = 4,
    classes: Sequence[SloClass] = CLASSES,
) -> DecisionCore:
    """A fresh core without quotas."""
    return build_core(
        policy or refusing(),
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
    """Attainment against load: the knee is where it falls below 90 %."""
    rows = []
    for rate in args.rates or (45, 50, 55, 60, 65):
        found = [
            settled(play([core(["t"])], calls(s, rate, args.seconds)), 20, args.seconds)
            for s in range(args.seeds)
        ]
        mean, half = interval([attainment(r) for r in found])
        rows.append({"rate": rate, "attainment": mean, "half": half})
    return {"rows": rows}


def shed(args: argparse.Namespace) -> dict[str, Any]:
    """The top class at 1.3 x knee beside 0.9 x, and the refused share against load."""
    loads = args.loads or [round(0.8 + 0.05 * i, 2) for i in range(13)]
    rows = []
    for load in sorted({*loads, 0.9, 1.3}):
        found = [
            settled(play([core(["t"])], calls(s, load * KNEE, args.seconds)), 20, args.seconds)
            for s in range(args.seeds)
        ]
        mean, half = interval([refused_share(r) for r in found])
        by_class = {c.name: [attainment(of_class(r, c.name)) for r in found] for c in CLASSES}
        rows.append(
            {
                "load": load,
                "refused": mean,
                "half": half,
                "goodput": float(np.mean([attainment(r) for r in found])) * load * KNEE,
                "attainment": {name: interval(values) for name, values in by_class.items()},
                "refused_of": {
                    c.name: float(np.mean([refused_share(of_class(r, c.name)) for r in found]))
                    for c in CLASSES
                },
                "top": by_class["top"],
            }
        )
    at = {row["load"]: row for row in rows}
    ratios = [b / a for a, b in zip(at[0.9]["top"], at[1.3]["top"], strict=True)]
    shares = [row["refused"] for row in rows]
    steps = [b - a for a, b in pairwise(shares)]
    return {
        "rows": rows,
        "top_at_1.3_over_0.9": interval(ratios),
        "largest_step": max(steps),
        "largest_fall": min(steps),
    }


def retry(args: argparse.Namespace) -> dict[str, Any]:
    """Every refused client comes back after `Retry-After`: bursts, and a steady 1.3 x knee."""
    rows = []
    for name, pattern in (
        ("bursts 1.5 x 20 s, 0.6 x 40 s", [(1.5, 20.0), (0.6, 40.0)] * 3),
        ("steady 1.3 x", [(1.3, args.seconds)]),
    ):
        shares, waits = [], []
        for s in range(args.seeds):
            stream: list[Call] = []
            at = 0.0
            for k, (load, length) in enumerate(pattern):
                part = calls(1000 * s + k, load * KNEE, length, start=at, patient=True)
                stream += [
                    replace(c, request=replace(c.request, id=f"{k}-{c.request.id}")) for c in part
                ]
                at += length
            found = play([core(["t"])], stream)
            back = [r for r in found if r.call.tries == 2]
            shares.append(sum(not r.refused for r in back) / max(len(back), 1))
            waits += [r.retry_after for r in found if r.call.tries == 1 and r.retry_after]
        rows.append(
            {
                "pattern": name,
                "admitted": interval(shares),
                "came_back": len(waits),
                "retry_after_p50_p95_max": np.percentile(waits, [50, 95, 100]).tolist(),
            }
        )
    return {"rows": rows}


def fairness(args: argparse.Namespace) -> dict[str, Any]:
    """Nine tenants at half a fair share each, then a tenth that floods at 20 x that rate."""
    quiet = [f"t{i}" for i in range(9)]
    rate = 0.05 * KNEE
    loss, jain, oldest, flood_refused, rows = [], [], [], [], []
    for s in range(args.seeds):
        own = [c for name in quiet for c in calls(s, rate, args.seconds, tenant=name)]
        alone = play([core(quiet)], own)
        flood = calls(s, 20 * rate, args.seconds, tenant="flood")
        watch = Inversions()
        both = play([core([*quiet, "flood"])], own + flood, watch=watch)
        before = attainment(settled(alone, 0, args.seconds))
        theirs = [r for r in both if r.call.request.tenant != "flood"]
        after = attainment(settled(theirs, 0, args.seconds))
        each = [attainment(r for r in theirs if r.call.request.tenant == name) for name in quiet]
        loss.append(100 * (before - after))
        jain.append(sum(each) ** 2 / (len(each) * sum(x * x for x in each)))
        oldest.append(watch.longest)
        flood_refused.append(refused_share(r for r in both if r.call.request.tenant == "flood"))
        rows.append({"alone": before, "with_flood": after})
    return {
        "rows": rows,
        "loss_points": interval(loss),
        "jain_of_others": interval(jain),
        "flood_refused": interval(flood_refused),
        "longest_inversion_beyond_bound_s": max(oldest),
    }


class Inversions:
    """Watches one core: how long past its ageing bound a request was when a younger one of its own
    tenant was sent although both fitted the same route.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self._waiting: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
        self._of: dict[str, tuple[str, float]] = {}
        self._patience = {c.name: float(c.patience) for c in CLASSES}

    def __call__(self, now: float, _gateway: int, event: Event, actions: list[Action]) -> None:
        """Take one event of the core and what followed."""
        if isinstance(event, Arrived):
            request = event.request
            self._of[request.id] = (request.tenant, now)
        for action in actions:
            if isinstance(action, Hold):
                request_tenant, at = self._of[action.id]
                self._waiting[request_tenant][action.id] = (at, 0.0)
            elif isinstance(action, Send):
                self._left(action.id)
                tenant, at = self._of[action.id]
                for other, _ in self._waiting[tenant].values():
                    bound = min(self._patience.values())
                    if other < at and now - other > bound:
                        self.longest = max(self.longest, now - other - bound)
            elif isinstance(action, Settle):
                self._left(action.id)

    def _left(self, name: str) -> None:
        self._waiting[self._of[name][0]].pop(name, None)


def release(args: argparse.Namespace) -> dict[str, Any]:
    """CPU time of a stream's end with a release behind it, so many waiting."""
    rows = []
    for waiting in (10, 100, 1000, 10_000):
        costs = [release_us(waiting, s) for s in range(args.seeds)]
        mean, half = interval(costs)
        rows.append({"waiting": waiting, "us": mean, "half": half})
    return {"rows": rows, "ratio_10000_to_10": rows[-1]["us"] / rows[0]["us"]}


def release_us(waiting: int, seed: int, count: int = 400) -> float:
    """Microseconds of CPU per end of a stream; each releases one request and one more arrives."""
    endless = [
        SloClass(name=c.name, rank=c.rank, sheddable=False, patience=1e6, max_wait=1e7)  # type: ignore[arg-type]
        for c in CLASSES
    ]
    tenants = [f"t{i}" for i in range(8)]
    one = core(tenants, BestFitPolicy(overload_target=0.0), classes=endless)
    requests = [
        replace(c.request, slo=Slo(), id=f"{name}/{c.request.id}")
        for name in tenants
        for c in calls(seed, (waiting + count) / 8 + 150, 1.0, tenant=name)
    ]
    sends: list[Send] = []
    now, i = 0.0, 0

    def handle(event: Event) -> None:
        pending = one.handle(event)
        while pending:
            action = pending.pop(0)
            if isinstance(action, Commit):
                pending += one.handle(Committed(now, action.id, action.attempt))
            elif isinstance(action, Send):
                sends.append(action)

    def end(send: Send) -> None:
        usage = Usage(prompt=100, completion=10, source=UsageSource.ENGINE)
        handle(FirstToken(now, send.id, send.attempt))
        handle(AttemptEnded(now, send.id, send.attempt, Cause.FINISHED, usage, now))

    while len(one.queue) < waiting:
        now += 1e-4
        handle(Arrived(now, requests[i]))
        i += 1
        if sends and not one.queue:
            handle(FirstToken(now, sends[-1].id, sends[-1].attempt))
    began = time.process_time()
    for _ in range(count):
        now += 1e-3
        end(sends.pop(0))
        if len(one.queue) < waiting and i < len(requests):
            handle(Arrived(now, requests[i]))
            i += 1
    return (time.process_time() - began) / count * 1e6


def gateways(args: argparse.Namespace) -> dict[str, Any]:
    """The same load through one, two and four gateways."""
    loads = args.loads or [0.9, 1.1]
    rows = []
    for load in loads:
        goodput: dict[int, list[float]] = {}
        share: dict[int, list[float]] = {}
        for n in (1, 2, 4):
            goodput[n], share[n] = [], []
            for s in range(args.seeds):
                found = play(
                    [core(["t"], refusing(seed=g)) for g in range(n)],
                    calls(s, load * KNEE, args.seconds, gateways=n),
                    metrics_delay=0.5,
                    round_trip=1e-3,
                )
                found = settled(found, 20, args.seconds)
                goodput[n].append(attainment(found) * load * KNEE)
                where = Counter(r.outcome.replica for r in found if r.outcome.replica is not None)
                share[n].append(max(where.values()) / sum(where.values()))
        for n in (2, 4):
            lost = [1.0 - b / a for a, b in zip(goodput[1], goodput[n], strict=True)]
            rows.append(
                {
                    "load": load,
                    "gateways": n,
                    "goodput": interval(goodput[n]),
                    "goodput_of_one": interval(goodput[1]),
                    "lost_share": interval(lost),
                    "largest_share": interval(share[n]),
                    "largest_share_of_one": interval(share[1]),
                }
            )
    return {"rows": rows}


def main(argv: list[str] | None = None) -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--rates", type=float, nargs="+", help="requests/s, for knee")
    parser.add_argument("--loads", type=float, nargs="+", help="multiples of the knee")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    began = time.process_time()
    result = COMMANDS[args.what](args)
    result["cpu_s"] = time.process_time() - began
    print(json.dumps(result, indent=None if args.json else 1))
    return 0


COMMANDS = {
    "knee": knee,
    "shed": shed,
    "retry": retry,
    "fairness": fairness,
    "release": release,
    "gateways": gateways,
}

if __name__ == "__main__":
    raise SystemExit(main())
