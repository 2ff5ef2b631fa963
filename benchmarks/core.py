"""CPU time of the decision core alone: an arrival decided and booked, plus its end settled.

    python benchmarks/core.py [--policy best_fit] [--json]

Prints microseconds of CPU (median of repetitions, with min and max) at 8 and 64 replicas,
unsaturated and with 100, 1,000 and 10,000 waiting. Trust ratios more than single figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pydantic import TypeAdapter

from domain.events import Arrived, AttemptEnded, Commit, Committed, FirstToken, Send
from domain.fleet import FleetSpec, Profile, ReplicaSpec, Variant
from domain.outcome import Cause, Usage, UsageSource
from domain.request import InferenceRequest, Slo, SloClass, Tenant
from policies.config import PolicyConfig
from policies.core import DecisionCore
from policies.factory import build_core
from predictors.estimator import BaselineEstimator

SLO = Slo(ttft=2.0, tpot=0.2, e2e=600.0)  # type: ignore[arg-type]


def mixed_fleet(m: int, max_seqs: int = 64) -> FleetSpec:
    """M replicas of four speeds, two variants of one model."""
    speeds = (0.6, 1.0, 1.7, 2.4)
    replicas = tuple(
        ReplicaSpec(
            name=f"r{i}",
            variant="full" if i % 2 else "int8",
            profile=Profile(
                weights=0.012 * speeds[i % 4], per_token=6e-5 * speeds[i % 4], max_seqs=max_seqs
            ),
        )
        for i in range(m)
    )
    return FleetSpec(
        replicas=replicas,
        variants=(Variant(name="full", model="m"), Variant(name="int8", model="m")),
    )


def policy(name: str, **kwargs: float) -> PolicyConfig:
    """The configuration of that policy with its defaults."""
    return TypeAdapter(PolicyConfig).validate_python({"kind": name} | kwargs)


def request(i: int, limited: bool = True) -> InferenceRequest:
    """Request number i: 400 prompt tokens, at most 200 of output."""
    return InferenceRequest(
        id=f"req-{i}",
        tenant=f"t{i % 4}",
        model="m",
        prompt_tokens=400.0,
        max_tokens=200.0,
        slo=SLO if limited else Slo(),
        class_name="standard",
        tie=i * 7919 % 2**31,
    )


def new_core(name: str, m: int, max_seqs: int = 64) -> DecisionCore:
    """A fresh core without quotas."""
    return build_core(
        policy(name),
        fleet=mixed_fleet(m, max_seqs),
        estimator=BaselineEstimator(),
        tenants=[Tenant(name=f"t{i}") for i in range(4)],
        classes=[SloClass(name="standard", rank=1, sheddable=False, max_wait=1e6, patience=1e6)],  # type: ignore[arg-type]
    )


def answer(core: DecisionCore, actions: list, now: float) -> list[Send]:
    """Play the memory store; returns what is sent."""
    sends = []
    for action in actions:
        if type(action) is Commit and action.route is not None:
            sends += answer(core, core.handle(Committed(now, action.id, action.attempt)), now)
        elif type(action) is Send:
            sends.append(action)
    return sends


USAGE = Usage(prompt=400, completion=100, source=UsageSource.ENGINE)


def arrivals_us(name: str, m: int, waiting: int, count: int) -> float:
    """Microseconds of CPU per (arrival + first token + end), with `waiting` requests held all the
    while.
    """
    core = new_core(name, m, max_seqs=4 if waiting else 64)
    now, i = 0.0, 0
    fresh: list[Send] = []
    for _ in range(waiting + 4 * m):
        now += 1e-4
        fresh += answer(core, core.handle(Arrived(now, request(i, not waiting))), now)
        i += 1
        if not waiting:
            send = fresh[-1]
            answer(core, core.handle(FirstToken(now, send.id, send.attempt)), now)
    held = len(core.queue)
    start = time.process_time()
    for _ in range(count):
        now += 1e-3
        fresh += answer(core, core.handle(Arrived(now, request(i, not waiting))), now)
        i += 1
        send = fresh.pop(0)
        if waiting:
            fresh += answer(core, core.handle(FirstToken(now, send.id, send.attempt)), now)
        else:
            last = fresh[-1]
            answer(core, core.handle(FirstToken(now, last.id, last.attempt)), now)
        end = AttemptEnded(now + 0.5e-3, send.id, send.attempt, Cause.FINISHED, USAGE, now)
        fresh += answer(core, core.handle(end), now)
    if abs(len(core.queue) - held) > 4 * m or (held > 0) != (waiting > 0):
        raise SystemExit(f"the queue went from {held} to {len(core.queue)}: not what is measured")
    return (time.process_time() - start) / count * 1e6


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="best_fit")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    cold = time.perf_counter()
    arrivals_us(args.policy, 8, 0, 10)
    warm_s = time.perf_counter() - cold
    rows = []
    for m in (8, 64):
        for waiting in (0, 100, 1000, 10_000):
            values = [arrivals_us(args.policy, m, waiting, args.count) for _ in range(args.repeat)]
            rows.append(
                {
                    "replicas": m,
                    "waiting": waiting,
                    "us": statistics.median(values),
                    "min": min(values),
                    "max": max(values),
                }
            )
    if args.json:
        print(json.dumps({"policy": args.policy, "first_call_s": warm_s, "rows": rows}))
        return 0
    print(f"{args.policy}: kernels ready in {warm_s:.1f} s")
    for row in rows:
        print("{replicas:3d} replicas {waiting:6d} waiting".format(**row), end="")
        print("  {us:7.1f} us [{min:.1f}-{max:.1f}]".format(**row))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
