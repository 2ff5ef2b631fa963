"""Settings of others, lived through by our policies: who gains what over whom there.

    python benchmarks/reproductions.py            under a CPU-minute

1. *Intelligent Router* (Jain et al., arXiv 2408.13510): four equal replicas of a 7B model, 2,000
   requests at 20 a second, far more than they carry, no limits; mean end-to-end latency against
   round robin that sends at once. They report -11.4 % for their best policy (reinforcement learning
   guided by a rule), -0.5 % for the shortest queue. Their slopes are used (0.32 ms a prompt token,
   33 us a cached token, of a batch of about sixteen); weights are read in 18 ms, an estimate.
2. *llm-d's predicted latency*: best-fit (the least headroom that still meets the limits) against
   the least predicted latency, in the mixed fleet and in the homogeneous one: size-fair goodput@90.

Intervals over seeds. Writes docs/reproductions.md (its section "What it says" is written by hand
and kept). MESS+'s rule is in `training/mess_plus.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.table import reading
from training.evaluate import Runner, policy_named
from training.intervals import Interval, interval, last_at, seed_weights
from training.measures import fair, measure
from training.scenario import Arrivals, Promise, Replicas, Scenario, Source, build, read
from training.traces import Floats

PROFILE = {
    "overhead": 0.002, "weights": 0.018, "per_sequence": 0.0, "per_token": 3.2e-4,
    "per_context": 3.3e-5 / 16.0, "per_attention": 0.0, "chunk": 512, "max_seqs": 64,
    "kv_capacity": 24_000.0,
}  # fmt: skip
"""Of one V100 with a 7B model; 33 us are of a whole batch of about sixteen."""
AT_ONCE = "round_robin, sent at once"
ROUTERS = {
    AT_ONCE: policy_named("round_robin", hold=False, shed_below=0.0),
    "shortest queue, sent at once": policy_named("least_requests", hold=False, shed_below=0.0),
    "round_robin": policy_named("round_robin", shed_below=0.0),
    "predicted": policy_named("predicted", shed_below=0.0),
    "marginal": policy_named("marginal", shed_below=0.0),
    "marginal, shortest work first": policy_named("marginal", shed_below=0.0, alpha_max=8.0),
}
HEADROOM = {
    "predicted": policy_named("predicted"),
    "best_fit": policy_named("best_fit"),
    "best_fit, half margins": policy_named("best_fit", ttft_margin=0.5, tpot_margin=0.5),
    "marginal": policy_named("marginal"),
}
LOADS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.5)
KNEE = {"heterogeneous": 50.0, "homogeneous": 52.0}
"""About what best-fit carries, requests/s."""


def crowded() -> Scenario:
    """Setting 1."""
    return Scenario(
        name="intelligent_router",
        fleet=(Replicas(profile="h100-bf16-14b", count=4, change=PROFILE),),
        workload=(
            Source(
                trace="synthetic",
                options={
                    "prompt_median": 150, "prompt_sigma": 1.0,
                    "output_median": 120, "output_sigma": 0.9,
                },
            ),
        ),
        arrivals=Arrivals(kind="poisson"),
        classes={"all": Promise(sheddable=False, max_wait=1e5)},
        requests=2000,
        warmup=0,
    )  # fmt: skip


def latencies(seeds: Sequence[int], runner: Runner) -> dict[str, Floats]:
    """Mean end-to-end latency, s, by policy, (seeds,)."""
    found: dict[str, list[float]] = {}
    for seed in seeds:
        case = build(crowded(), 20.0, seed)
        for label, policy in ROUTERS.items():
            run, _ = runner.run(case, policy)
            found.setdefault(label, []).append(float(np.nanmean(run.last - run.arrival)))
    return {label: np.array(values) for label, values in found.items()}


def ratio(mine: Floats, base: Floats) -> Interval:
    """Ratio of means with its interval over paired seeds."""
    weights = seed_weights(len(mine), np.random.default_rng(0))
    return interval((weights @ mine) / (weights @ base), len(mine))


def headroom(
    name: str, seeds: Sequence[int], runner: Runner, data: Path | None
) -> dict[str, Floats]:
    """Size-fair attainment by policy, (seeds, loads)."""
    scenario = read(ROOT / "configs" / "scenarios" / f"{name}.yaml")
    found: dict[str, list[list[float]]] = {label: [] for label in HEADROOM}
    for seed in seeds:
        cases = [build(scenario, load * KNEE[name], seed, data=data) for load in LOADS]
        for label, policy in HEADROOM.items():
            runs = [runner.run(case, policy)[0] for case in cases]
            found[label].append(
                [fair(measure(c, r, label)) for c, r in zip(cases, runs, strict=True)]
            )
    return {label: np.array(rows) for label, rows in found.items()}


def document(args: argparse.Namespace) -> list[str]:
    """The page."""
    runner, seeds = Runner(), range(1, args.seeds + 1)
    lines = [
        "# Settings of others",
        "",
        (
            f"Made by `python benchmarks/reproductions.py`: {args.seeds} seeds. Simulation; no "
            "number is a measurement of a GPU."
        ),
        "",
        *reading(args.docs / "reproductions.md"),
        "## Intelligent Router's: mean end-to-end latency, no limits, more than the fleet carries",
        "",
        "| policy | seconds | against round robin sent at once |",
        "| --- | --- | --- |",
    ]
    found = latencies(seeds, runner)
    for label, values in found.items():
        r = ratio(values, found[AT_ONCE])
        change = (
            f"{100 * (r.value - 1):+.1f} % [{100 * (r.low - 1):+.1f}, {100 * (r.high - 1):+.1f}]"
        )
        lines.append(f"| {label} | {values.mean():.1f} | {change} |")
    for name, about in KNEE.items():
        lines += [
            "",
            f"## llm-d's: size-fair goodput@90 in `{name}`",
            "",
            "| policy | requests/s | times the least predicted latency |",
            "| --- | --- | --- |",
        ]
        curves = headroom(name, seeds, runner, args.data)
        weights = seed_weights(args.seeds, np.random.default_rng(0))
        rates = about * np.array(LOADS)
        carried = {k: last_at(rates, weights @ curve, 0.9) for k, curve in curves.items()}
        for label, rate in carried.items():
            r = interval(rate / carried["predicted"], args.seeds)
            lines.append(f"| {label} | {rate[0]:.1f} | {r.value:.2f} [{r.low:.2f}, {r.high:.2f}] |")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Run everything and write the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--data", type=Path, help="folder of the data sets (or SLUICE_DATA)")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args(argv)
    if args.seeds < 2:
        parser.error(f"--seeds must be 2 or more for an interval, not {args.seeds}")
    lines = document(args)
    args.docs.mkdir(exist_ok=True)
    (args.docs / "reproductions.md").write_text("\n".join(lines).rstrip() + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
