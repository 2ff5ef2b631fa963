"""A latency model for fleets that nobody has seen: what a gateway could start with.

    python -m training.latency_worlds --out predictors/artifacts/latency.npz --report report.json

Fits on many small simulated fleets whose every constant is drawn anew, under workloads, loads,
policies and metric delays that are drawn too, and tests on fleets that were not drawn: profiles
measured elsewhere (`configs/profiles`), other lengths, other seeds. The test is what a new gateway
would see: the learned layer with its guards from the first request on, beside the roofline with its
on-line scales on the same requests. The artifact is written only if both errors are smaller on the
mean fleet, 95 % interval included, and no fleet is more than `WORSE` worse (exit 1 otherwise).
Resumable: finished runs are kept in --work.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from backends.sim.profiles import load_profiles, shipped
from domain.fleet import Profile
from policies.config import PolicyConfig
from predictors.artifact import save
from predictors.latency_gbdt import LatencyGbdt
from training.dataset import data_folder
from training.evaluate import guess, policy_named
from training.fit_latency import DONE, NOT_BETTER, FitConfig, fit
from training.intervals import Interval, interval, seed_weights
from training.latency_data import LatencyRows, joined, load_window, save_window
from training.latency_report import POLICIES, THINK, accuracy, rows_of
from training.latency_sim import LearnedLatency, lived
from training.scenario import Arrivals, Case, Metrics, Pools, Promise, Replicas, Scenario, Source
from training.scenario import build as build_case
from training.worlds import TIMES

BASES = ("h100-bf16-14b", "h100-fp8-14b", "a100-bf16-14b", "l40s-int4-14b")
"""Profiles whose names drawn kinds carry; their constants are drawn around these."""
SPREAD = (0.3, 3.0)
"""A drawn kind's constant over its base's, each its own factor, log-uniform."""
ROOM = (1.5e4, 3.0e5)
"""KV tokens of a replica, log-uniform."""
LOAD = (0.2, 1.3)
"""Rate over what the processors could do at full batches."""
CLASSES = {
    "interactive": Promise(share=0.4, ttft=0.3, ttft_per_token=2e-4, tpot=0.03),
    "relaxed": Promise(rank=1, share=0.3, ttft=1.0, ttft_per_token=6e-4, tpot=0.1),
    "whole": Promise(rank=1, share=0.3, ttft=0.6, tpot=0.035, e2e=6.0),
}
WORSE = 0.03
"""Share by which a single fleet's error may be above the roofline's."""
UNSEEN = {
    "14B on four kinds, chat and agents": (
        ("h100-bf16-14b", 3), ("h100-fp8-14b", 2), ("a100-bf16-14b", 2), ("l40s-int4-14b", 1),
    ),
    "14B on H100": (("h100-bf16-14b", 4),),
    "Llama-3.1-8B on RTX, as measured": (
        ("rtx4090-vllm-llama-3.1-8b-bf16-tp1-requests", 2),
        ("rtxpro6000-vllm-llama-3.1-8b-bf16-tp1-requests", 2),
    ),
    "Llama-2-70B on DGX (Splitwise)": (
        ("a100-80gb-splitwise-llama2-70b-fp16-tp4", 2),
        ("h100-80gb-splitwise-llama2-70b-fp16-tp8", 2),
    ),
    "Llama-2-7B on A100 (Vidur)": (
        ("a100-vidur-llama-2-7b-fp16-tp1", 3), ("a100-vidur-llama-2-7b-fp16-tp4", 1),
    ),
    "70B and 8B on Hopper and Blackwell (AIConfigurator)": (
        ("h100_sxm-vllm-llama-3.1-70b-bfloat16-tp8", 2),
        ("h200_sxm-vllm-llama-3.1-8b-bfloat16-tp1", 2),
        ("b200_sxm-vllm-qwen3-8b-bfloat16-tp2", 1),
    ),
}  # fmt: skip
"""Fleets to test on, by name: (profile, how many)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bed:
    """A case and the policy that routes in it."""

    case: Case
    policy: PolicyConfig


def drawn(seed: int, requests: int, pools: Pools, profiles: Mapping[str, Profile]) -> Bed:
    """Fleet, workload, promises' load and policy number `seed` of the training set."""
    rng = np.random.default_rng([seed, 71])
    names = rng.choice(BASES, int(rng.integers(1, 4)), replace=False).tolist()
    fleet = tuple(
        Replicas(profile=name, count=int(rng.integers(1, 4)), change=_kind(profiles[name], rng))
        for name in names
    )
    lengths = {
        "prompt_median": _log_uniform(rng, (100.0, 3000.0)),
        "output_median": _log_uniform(rng, (30.0, 400.0)),
    }
    sessions = rng.random() < 0.4
    source = (
        Source(trace="agents", max_prompt=8000, max_output=1500)
        if sessions
        else Source(options=lengths)
    )
    arrivals = Arrivals(kind="source" if sessions else "gamma", cv=float(rng.uniform(1.0, 3.0)))
    scenario = Scenario(
        name=f"drawn {seed}",
        fleet=fleet,
        workload=(source,),
        arrivals=arrivals,
        classes=CLASSES,
        metrics=Metrics(every=float(rng.choice([0.25, 0.5, 1.0])), delay=float(rng.uniform(0, 1))),
        constants_error=float(rng.uniform(0.0, 0.4)),
        length_sigma=float(rng.uniform(0.2, 1.0)),
        requests=requests,
    )
    load = float(rng.uniform(*LOAD))
    policy = policy_named(POLICIES[seed % len(POLICIES)], hold=bool(rng.random() < 0.5))
    return Bed(case=case_at(scenario, load, seed, pools, profiles), policy=policy)


def _kind(base: Profile, rng: np.random.Generator) -> dict[str, float]:
    """Constants of a kind of replica; a quarter have no overhead to speak of, or no cost of a
    sequence, a third experts.
    """
    change = {name: getattr(base, name) * _log_uniform(rng, SPREAD) for name in TIMES}
    for name in ("overhead", "per_sequence"):
        if rng.random() < 0.25:
            change[name] *= 0.02
    if rng.random() < 0.33:
        change["experts"] = base.weights * _log_uniform(rng, SPREAD)
        change["expert_tokens"] = _log_uniform(rng, (10.0, 500.0))
    if rng.random() < 0.5:
        change["per_attention"] = _log_uniform(rng, (1e-9, 2e-8))
    return {
        **change,
        "chunk": float(rng.choice([256, 512, 1024, 2048, 8192])),
        "max_seqs": float(rng.choice([64, 128, 256])),
        "kv_capacity": _log_uniform(rng, ROOM),
    }


def case_at(
    scenario: Scenario, load: float, seed: int, pools: Pools, profiles: Mapping[str, Profile]
) -> Case:
    """The case at `load` times what the fleet could do at full batches."""
    rate = load * guess(build_case(scenario, 1.0, seed, pools=pools, profiles=profiles))
    case = build_case(scenario, rate, seed, pools=pools, profiles=profiles)
    return replace(case, trace=replace(case.trace, think=case.trace.think * THINK))


def never_seen(
    name: str, seed: int, requests: int, pools: Pools, profiles: Mapping[str, Profile]
) -> Bed:
    """One of the fleets to test on, constants off by up to 30 %, readings 0.5 s old."""
    sessions = "chat" in name
    source = (
        Source(trace="sharegpt", max_prompt=3000, max_output=1000)
        if sessions
        else Source(trace="servegen/m-large", max_prompt=3000, max_output=1000, seconds=120)
    )
    scenario = Scenario(
        name=name,
        fleet=tuple(Replicas(profile=profile, count=n) for profile, n in UNSEEN[name]),
        workload=(source,),
        arrivals=Arrivals(kind="source" if sessions else "gamma"),
        classes=CLASSES,
        metrics=Metrics(every=0.5, delay=0.5),
        constants_error=0.3,
        requests=requests,
    )
    load = (0.5, 0.8)[seed % 2]
    case = case_at(scenario, load, 5000 + seed, pools, profiles)
    return Bed(case=case, policy=policy_named("marginal"))


def _log_uniform(rng: np.random.Generator, pair: tuple[float, float]) -> float:
    return float(np.exp(rng.uniform(*np.log(pair))))


def outcomes(bed: Bed, model: LatencyGbdt | None) -> tuple[LatencyRows, dict[str, Any]]:
    """What a run leaves to fit on, and its accuracy from the first request on."""
    sigma = bed.case.scenario.length_sigma
    estimator = LearnedLatency(bed.case.trace.output, sigma or 0.6, bed.case.seed, model)
    log, _, _ = lived(bed.case, bed.policy, estimator)
    used = log.rows[:, -1].mean() if len(log) else 0.0
    return rows_of(log), {"used": round(float(used), 3), **accuracy(log)}


def frame_of_worlds(
    count: int, requests: int, work: Path, pools: Pools, profiles: Mapping[str, Profile]
) -> LatencyRows:
    """Outcomes of `count` drawn worlds, each kept in `work`."""
    parts = []
    for seed in range(count):
        path = work / f"world-{requests}-{seed}.npz"
        if not path.exists():
            rows, _ = outcomes(drawn(seed, requests, pools, profiles), None)
            save_window(rows, path.with_suffix(".part.npz"))
            path.with_suffix(".part.npz").rename(path)
            print(f"world {seed + 1} of {count}: {len(rows)} outcomes", flush=True)
        rows = load_window(path)
        # worlds are classes of their own to the fit: none may outweigh the others
        parts.append(replace(rows, kind=np.full(len(rows), f"world {seed}")))
    return joined(parts)


def tested(
    model: LatencyGbdt,
    seeds: Iterable[int],
    requests: int,
    work: Path,
    pools: Pools,
    profiles: Mapping[str, Profile],
) -> list[dict[str, Any]]:
    """Errors of both on every fleet and seed, kept in `work`."""
    path = work / f"tested-{model.version}-{requests}.jsonl"
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["fleet"], row["seed"]) for row in known}
    for seed in seeds:
        for name in UNSEEN:
            if (name, seed) in done:
                continue
            bed = never_seen(name, seed, requests, pools, profiles)
            row: dict[str, Any] = {"fleet": name, "seed": seed}
            for which, used in (("learned", model), ("roofline", None)):
                _, row[which] = outcomes(bed, used)
            known.append(row)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{name}, seed {seed}: {_short(row)}", flush=True)
    return known


def _short(row: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{time} {row['learned'][time]['all']['mape']:.3f} for"
        f" {row['roofline'][time]['all']['mape']:.3f}"
        for time in ("ttft", "tpot")
    )


def verdict(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean of log(learned / roofline) MAPE over fleets with its interval (fleets resampled), each
    fleet's own ratio, and whether that is enough to ship.
    """
    found: dict[str, Any] = {}
    good = True
    for time in ("ttft", "tpot"):
        logs: dict[str, list[float]] = {}
        for row in rows:
            pair = (row[which][time]["all"]["mape"] for which in ("learned", "roofline"))
            mine, roof = pair
            logs.setdefault(row["fleet"], []).append(float(np.log(mine / roof)))
        means = np.array([np.mean(v) for v in logs.values()])
        weights = seed_weights(len(means), np.random.default_rng(0))
        over: Interval = interval(np.exp(weights @ means), len(means))
        good &= bool(over.high < 1.0 and np.exp(means.max()) < 1.0 + WORSE)
        found[time] = {
            "ratio": round(over.value, 3),
            "interval": [round(over.low, 3), round(over.high, 3)],
            "fleets": {k: round(float(np.exp(np.mean(v))), 3) for k, v in logs.items()},
        }
    return {**found, "ship": good}


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, fit, test; 0 where the artifact was written, 1 where it is not good enough."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", type=int, default=48)
    parser.add_argument("--requests", type=int, default=700, help="of a drawn world")
    parser.add_argument("--seeds", type=int, default=2, help="test runs of a fleet")
    parser.add_argument("--test-requests", type=int, default=1200)
    parser.add_argument("--data", help="folder of the public data sets (default: SLUICE_DATA)")
    parser.add_argument("--work", type=Path, default=Path("latency-worlds"))
    parser.add_argument("--out", type=Path, default=Path("latency.npz"))
    parser.add_argument("--report", type=Path, help="JSON file for the figures")
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    pools, profiles = Pools(data_folder(args.data)), load_profiles(shipped())
    frame = frame_of_worlds(args.worlds, args.requests, args.work, pools, profiles)
    config = FitConfig(centre=160, spread=40, leaves=31)
    source = f"fleet model: {args.worlds} drawn fleets, synthetic and agents lengths"
    model = LatencyGbdt(fit(frame, config, source))
    rows = tested(model, range(args.seeds), args.test_requests, args.work, pools, profiles)
    report = verdict(rows)
    if args.report:
        args.report.write_text(json.dumps({"verdict": report, "runs": rows}, indent=1))
    print(json.dumps(report, indent=1))
    save(fit(frame, config, source, report), args.work / "latency.npz")
    if not report["ship"]:
        print("not better than the roofline on every fleet it has not seen; nothing written")
        return NOT_BETTER
    args.out.parent.mkdir(parents=True, exist_ok=True)
    (args.work / "latency.npz").replace(args.out)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
