"""Requests per CPU-second of the compiled loop and of the live core in virtual time, decisions per
CPU-second of the training environment, memory for a million requests.

    python benchmarks/simulator_speed.py [--part table|scaling|load|queue|memory|live|environment]
    python benchmarks/simulator_speed.py --count 20000 --policies round_robin,best_fit,marginal

The fleet is the mix of `configs/scenarios/heterogeneous.yaml`, 8 replicas or a multiple; its knee
is the largest rate at which least requests meets 90 % of the limits. Times are of this process's
CPU, the best of three runs; compilation is not counted. Everything the loop knows is on: waiting
room, late readings, tenants, classes, forecasts.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from policies import encoding
from training.evaluate import policy_named, run_live
from training.fast_path import CompiledLoop
from training.fleet_env import FleetVectorEnv
from training.measures import MET
from training.scenario import Case, Metrics, Promise, Replicas, Scenario, build

GROUP = (
    ("h100-bf16-14b", 3), ("h100-fp8-14b", 2), ("a100-bf16-14b", 2), ("l40s-int4-14b", 1),
)  # fmt: skip
POLICIES = ("round_robin", "least_requests", "lmetric", "best_fit", "predicted", "marginal")
REPEATS = 3


def scenario(replicas: int, count: int, **fields: Any) -> Scenario:
    """The mixed fleet of so many replicas (a multiple of 8) under so many requests."""
    fleet = tuple(Replicas(profile=name, count=k * (replicas // 8)) for name, k in GROUP)
    classes = {
        "fast": Promise(ttft=0.3, ttft_per_token=2e-4, tpot=0.03),
        "slow": Promise(rank=1, ttft=1.0, ttft_per_token=6e-4, tpot=0.1),
        "batch": Promise(rank=2, share=0.3, e2e=20.0, sheddable=False, max_wait=60, patience=1.0),
    }
    base: dict[str, Any] = {
        "tenants": {"a": 3.0, "b": 1.0},
        "requests": count,
        "metrics": Metrics(delay=0.2),
    }
    return Scenario(name="speed", fleet=fleet, classes=classes, **(base | fields))


def policy(kind: str, **options: Any) -> Any:
    """A policy; early refusal off, so that loads above the knee are served and not refused."""
    return policy_named(kind, overload_target=0.0, **options)


def knee(loop: CompiledLoop, replicas: int, count: int = 4000) -> float:
    """The rate, in requests/s, up to which least requests meets 90 % of the limits; by halves."""
    low, high = 1.0 * replicas, 16.0 * replicas
    for _ in range(7):
        middle = (low + high) / 2
        case = build(scenario(replicas, count), middle, 1)
        met = float((loop.run(case, policy("least_requests")).verdict == MET).mean())
        low, high = (middle, high) if met >= 0.9 else (low, middle)
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One row: requests per CPU-second, what was met, mean requests on a replica."""

    policy: str
    replicas: int
    load: float
    per_second: float
    met: float
    running: float
    note: str = ""


def timed(loop: CompiledLoop, case: Case, kind: str, load: float, **options: Any) -> Speed:
    """The best of `REPEATS` runs."""
    runs = [loop.run(case, policy(kind, **options)) for _ in range(REPEATS)]
    run = runs[0]
    span = float(np.nanmax(run.last) - np.nanmin(run.arrival))
    lived = float(np.nansum(run.last - run.sent))
    m = len(case.fleet.replicas)
    return Speed(
        policy=kind,
        replicas=m,
        load=load,
        per_second=len(case.trace) / min(r.seconds for r in runs),
        met=float((run.verdict == MET).mean()),
        running=lived / span / m,
    )


def table(loop: CompiledLoop, count: int, kinds: list[str]) -> Iterator[Speed]:
    """Every policy at 8 and 64 replicas, at 0.9 and 1.1 times the knee."""
    for replicas in (8, 64):
        at = knee(loop, replicas)
        for load in (0.9, 1.1):
            case = build(scenario(replicas, count), load * at, 2)
            yield from (timed(loop, case, kind, load) for kind in kinds)


def scaling(loop: CompiledLoop, count: int, kinds: list[str]) -> Iterator[Speed]:
    """8 to 256 replicas at 0.9 times the knee of 8, a replica; so many requests that each of them
    gets a few hundred.
    """
    at = knee(loop, 8)
    for replicas in (8, 16, 32, 64, 128, 256):
        requests = max(count, count * replicas // 64)
        case = build(scenario(replicas, requests), 0.9 * at * replicas / 8, 2)
        yield from (timed(loop, case, kind, 0.9) for kind in kinds)


def by_load(loop: CompiledLoop, count: int, kinds: list[str]) -> Iterator[Speed]:
    """8 replicas at 0.5 to 2 times the knee."""
    at = knee(loop, 8)
    for load in (0.5, 0.7, 0.9, 1.0, 1.1, 1.3, 2.0):
        case = build(scenario(8, count), load * at, 2)
        yield from (timed(loop, case, kind, load) for kind in kinds)


def by_queue(loop: CompiledLoop, count: int, kinds: list[str]) -> Iterator[Speed]:
    """Requests that come at once and wait as long as it takes: queues of 100 to 5 x `count`."""
    calm = {"all": Promise(e2e=1e6, sheddable=False, max_wait=1e6, patience=1e6)}
    for length in (100, 1_000, 10_000, 100_000):
        if length > 5 * count:
            break
        case = build(scenario(8, length).model_copy(update={"classes": calm}), 1e6, 2)
        for kind in kinds:
            row = timed(loop, case, kind, 0.0, queue_limit=length)
            yield replace(row, note=f"queue of {length:,}")


def memory(loop: CompiledLoop, count: int) -> dict[str, float]:
    """Peak bytes that so many requests add to this process, and their speed."""
    rate = 0.9 * knee(loop, 8)
    _forget()
    base = _peak()
    case = build(scenario(8, count), rate, 2)
    drawn = _peak()
    run = loop.run(case, policy("least_requests"))
    lived = _peak()
    return {
        "requests": count,
        "trace_mib": drawn - base,
        "loop_mib": lived - base,
        "bytes_per_request": (lived - base) * 2**20 / count,
        "per_second": len(case.trace) / run.seconds,
    }


def _peak() -> float:
    """MiB that this process held at most since `_forget`."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in status if x.startswith("VmHWM")).split()[1]) / 1024


def _forget() -> None:
    """Let the peak be what is held now (Linux: proc(5), clear_refs)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def live(loop: CompiledLoop, count: int, kinds: list[str]) -> Iterator[Speed]:
    """The live core in virtual time, 8 and 64 replicas, 0.9 times the knee."""
    for replicas in (8, 64):
        case = build(scenario(replicas, count), 0.9 * knee(loop, replicas), 2)
        for kind in kinds:
            run_live(build(scenario(replicas, 50), 10.0, 2), policy(kind))
            began = time.process_time()
            run = run_live(case, policy(kind), learning=False)
            spent = time.process_time() - began
            yield Speed(
                policy=kind,
                replicas=replicas,
                load=0.9,
                per_second=count / spent,
                met=float((run.verdict == MET).mean()),
                running=float("nan"),
                note="live core",
            )


def environment(fleets: int, steps: int = 200) -> dict[str, float]:
    """Decisions per CPU-second of `FleetVectorEnv.step` alone, choosing the best P(SLO)."""
    env = FleetVectorEnv(fleets)
    seen, info = env.reset(seed=1)
    best = encoding.ROUTE_FEATURES.index("p_slo")
    spent = decisions = 0.0
    for step in range(2 * steps):
        mask = info["action_mask"]
        chance = np.where(mask[:, : env.hold] > 0, seen["routes"][:, :, best], -1.0)
        wait = np.where(mask[:, env.hold] > 0, env.hold, env.refuse)
        actions = np.where(chance.max(axis=1) < 0, wait, chance.argmax(axis=1))
        began = time.process_time()
        seen, _, terminated, truncated, info = env.step(actions)
        if step >= steps:
            spent += time.process_time() - began
            decisions += fleets - float((terminated | truncated).sum())
    return {"fleets": fleets, "decisions_per_second": decisions / spent}


def shown(rows: Iterable[Speed]) -> Iterator[Speed]:
    """The rows, each printed as it comes."""
    print(
        f"{'policy':<22}{'replicas':>9}{'load':>6}{'met':>7}{'a replica':>11}{'requests/CPU-s':>16}"
    )
    for r in rows:
        print(
            f"{r.policy:<22}{r.replicas:>9}{r.load:>6.2f}{r.met:>7.3f}{r.running:>11.1f}"
            f"{r.per_second:>16,.0f}  {r.note}",
            flush=True,
        )
        yield r


def main() -> None:
    """Print the parts asked for."""
    parts = ("table", "scaling", "load", "queue", "memory", "live", "environment")
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--part", choices=(*parts, "all"), default="table")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--fleets", type=int, default=256, help="of the environment")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kinds = args.policies.split(",")
    loop = CompiledLoop()
    found: dict[str, Any] = {}
    for part in parts if args.part == "all" else (args.part,):
        print(f"\n{part}")
        match part:
            case "memory":
                found[part] = memory(loop, 50 * args.count)
                print(found[part])
            case "environment":
                found[part] = environment(args.fleets)
                print(found[part])
            case _:
                found[part] = [asdict(row) for row in shown(_rows(part, loop, args.count, kinds))]
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))


def _rows(part: str, loop: CompiledLoop, count: int, kinds: list[str]) -> Iterator[Speed]:
    match part:
        case "table":
            return table(loop, count, kinds)
        case "scaling":
            return scaling(loop, count, kinds)
        case "load":
            return by_load(loop, count, kinds)
        case "queue":
            return by_queue(loop, count, kinds)
        case _:
            return live(loop, max(count // 2, 500), kinds)


if __name__ == "__main__":
    main()
