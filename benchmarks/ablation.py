"""What better predictions buy: length and latency forecasts of three kinds, in goodput.

    python benchmarks/ablation.py --data DIR --jobs 2      about 16 CPU-minutes

Lengths: `constant` (the workload's own distribution, the same for every request), `learned`
(forecasts that rank lengths as well as the length model does on chat it was never fitted to),
`exact`. Traces have no prompts to read, so the learned forecast is drawn at that quality: it keeps
its promise (calibrated), and is wrong as often as the model's. Latency: `roofline` with its on-line
scales, `learned` (trees fitted on other seeds of the scenario, as the gateway serves them), `exact`
(the simulator asked what would happen to this request on each replica if nothing else came).

Every variant meets the same requests: a mixed fleet whose constants are off by up to 30 %, and long
answers. Size-fair goodput@90 with intervals over seeds, as ratios to learned lengths with the
roofline. Finished runs are kept in --out. Writes docs/ablation.md (its section "What it says" is
written by hand and kept).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.table import reading
from predictors.artifact import save
from predictors.latency_gbdt import LatencyGbdt
from training.alone import ForeseenLatency
from training.dataset import data_folder
from training.evaluate import policy_named
from training.fit_latency import FitConfig, fit
from training.informed import InformedEstimator, sigma_of
from training.intervals import Interval, interval, last_at, seed_weights
from training.latency_data import joined
from training.latency_report import rows_of
from training.latency_sim import LearnedLatency, live, logged
from training.measures import fair, measure
from training.scenario import Case, build, read
from training.traces import Floats

TAU = 0.3
"""Kendall's tau within a model of the length model on chat (predictors/README.md)."""
VARIANTS = (
    ("constant", "roofline"),
    ("learned", "roofline"),
    ("exact", "roofline"),
    ("learned", "learned"),
    ("learned", "exact"),
    ("exact", "exact"),
)
"""(lengths, latency)."""
BASE = VARIANTS[1]
POLICIES = {
    "marginal": policy_named("marginal"),
    "marginal, no holding": policy_named("marginal", hold_until=0.0),
    "best_fit 0.5": policy_named("best_fit", ttft_margin=0.5, tpot_margin=0.5),
}
RATES = {"wrong_constants": 48.0, "reasoning": 11.0}
"""Scenarios, and about what best-fit carries there, requests/s."""
LOADS = (0.6, 0.8, 1.0, 1.2, 1.4, 1.7)
FIT_SEEDS, FIT_LOADS = (200, 201, 202), (0.6, 0.9, 1.2)
TARGET = 0.9

Key = tuple[str, str, str, str, int, float]
"""Bed, policy, lengths, latency, seed, load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Every variant and policy on the requests of one (bed, seed, load)."""

    bed: str
    seed: int
    load: float
    keys: tuple[Key, ...]


def case_of(bed: str, seed: int, requests: int, data: Path, load: float) -> Case:
    """A scenario with one seed at `load` times its rate."""
    scenario = read(ROOT / "configs" / "scenarios" / f"{bed}.yaml")
    scenario = scenario.model_copy(update={"requests": requests})
    return build(scenario, RATES[bed] * load, seed, data=data)


def estimator_of(
    case: Case, lengths: str, latency: str, model: LatencyGbdt | None
) -> InformedEstimator:
    """The forecasts of a variant. `model`: the trees of `learned` latency."""
    truth = case.trace.output
    sigma = {"constant": math.inf, "learned": sigma_of(TAU, truth), "exact": 0.0}[lengths]
    match latency:
        case "roofline":
            return InformedEstimator(truth, sigma, case.seed, calibrated=True)
        case "learned":
            return LearnedLatency(truth, sigma, case.seed, model, calibrated=True)
        case _:
            return ForeseenLatency(truth, sigma, case.seed, calibrated=True)


def attainment(case: Case, policy: str, lengths: str, latency: str, model: LatencyGbdt) -> float:
    """Size-fair attainment of a variant in a case."""
    estimator = estimator_of(case, lengths, latency, model)
    attach = estimator.attach if isinstance(estimator, ForeseenLatency) else None
    run, _ = live(case, POLICIES[policy], estimator, attach)
    return fair(measure(case, run, policy))


def answered(task: Task, data: Path, requests: int, trees: Mapping[str, Path]) -> list[float]:
    """A task's attainments."""
    case = case_of(task.bed, task.seed, requests, data, task.load)
    model = LatencyGbdt.load(trees[task.bed])
    return [
        attainment(case, policy, lengths, latency, model)
        for _, policy, lengths, latency, _, _ in task.keys
    ]


def finished(args: argparse.Namespace, data: Path, keys: Sequence[Key]) -> dict[Key, float]:
    """Attainment by key; what --out does not hold yet is run."""
    kept = args.out / "runs.jsonl"
    known: dict[Key, float] = {}
    if kept.exists():
        for line in kept.read_text().splitlines():
            *key, value = json.loads(line)
            known[tuple(key)] = value  # type: ignore[index]
    groups: dict[tuple[str, int, float], list[Key]] = {}
    for key in keys:
        if key not in known:
            groups.setdefault((key[0], key[4], key[5]), []).append(key)
    tasks = [
        Task(bed=bed, seed=seed, load=load, keys=tuple(some))
        for (bed, seed, load), some in sorted(groups.items(), key=lambda item: item[0][1])
    ]
    trees = {bed: trees_of(args, data, bed) for bed in {task.bed for task in tasks}}
    with kept.open("a") as file:
        for done, (task, values) in enumerate(run(args, data, tasks, trees), 1):
            for key, value in zip(task.keys, values, strict=True):
                known[key] = value
                file.write(json.dumps([*key, value]) + "\n")
            file.flush()
            print(f"{done} of {len(tasks)}: {task.bed}, seed {task.seed}", flush=True)
    return known


def run(
    args: argparse.Namespace, data: Path, tasks: Sequence[Task], trees: Mapping[str, Path]
) -> Iterator[tuple[Task, list[float]]]:
    """Tasks with their results, as they come."""
    with mp.get_context("spawn").Pool(args.jobs) as pool:
        pending = [
            (task, pool.apply_async(answered, (task, data, args.requests, trees))) for task in tasks
        ]
        for task, result in pending:
            yield task, result.get()


def trees_of(args: argparse.Namespace, data: Path, bed: str) -> Path:
    """The file of the latency trees for a scenario, fitted under the rule on seeds of their own."""
    path: Path = args.out / f"trees-{bed}.npz"
    if not path.exists():
        logs = [
            logged(case_of(bed, seed, args.requests, data, load), POLICIES["marginal"])[0]
            for seed, load in zip(FIT_SEEDS, FIT_LOADS, strict=True)
        ]
        save(fit(joined([rows_of(log) for log in logs]), FitConfig(), bed), path)
    return path


def carried(known: Mapping[Key, float], args: argparse.Namespace, bed: str, policy: str) -> Floats:
    """(variants, seeds, loads) attainment."""
    return np.array(
        [
            [
                [known[bed, policy, *variant, seed, load] for load in args.loads]
                for seed in args.seeds
            ]
            for variant in VARIANTS
        ]
    )


def ratios(curves: Floats, rates: Floats, seeds: int) -> tuple[float, list[Interval]]:
    """Requests/s of the base at the target, and every variant's ratio to it."""
    weights = seed_weights(seeds, np.random.default_rng(0))
    rate = [last_at(rates, weights @ curve, TARGET) for curve in curves]
    base = rate[VARIANTS.index(BASE)]
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(base[0]), [interval(mine / base, seeds) for mine in rate]


def document(args: argparse.Namespace, known: Mapping[Key, float]) -> list[str]:
    """The page."""
    lines = [
        "# What better predictions buy",
        "",
        (
            f"Made by `python benchmarks/ablation.py`: {len(args.seeds)} seeds of {args.requests} "
            "requests a case, through the live core. Simulation on "
            "`configs/profiles/estimated.yaml`; no number is a measurement of a GPU."
        ),
        "",
        *reading(args.docs / "ablation.md"),
    ]
    heads = " | ".join(f"{a} lengths, {b} latency" for a, b in VARIANTS)
    for bed, about in RATES.items():
        rates = about * np.array(args.loads)
        lines += [f"## {bed}: size-fair goodput@90, times learned lengths with the roofline", ""]
        lines += [f"| policy | that, requests/s | {heads} |", "| --- " * (len(VARIANTS) + 2) + "|"]
        spread = []
        for policy in POLICIES:
            curves = carried(known, args, bed, policy)
            base, found = ratios(curves, rates, len(args.seeds))
            cells = " | ".join(f"{r.value:.2f} [{r.low:.2f}, {r.high:.2f}]" for r in found)
            lines.append(f"| {policy} | {base:.1f} | {cells} |")
            means = 100 * curves.mean(axis=1)
            for variant, row in zip(VARIANTS, means, strict=True):
                values = " | ".join(f"{x:.1f}" for x in row)
                spread.append(f"| {policy} | {variant[0]} | {variant[1]} | {values} |")
        loads = " | ".join(f"{x:.1f}/s" for x in rates)
        lines += ["", "Size-fair attainment, %:", ""]
        lines += [f"| policy | lengths | latency | {loads} |", "| --- " * (3 + len(rates)) + "|"]
        lines += [*spread, ""]
    return lines


def main(argv: list[str] | None = None) -> int:
    """Run what is missing and write the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--data", help="folder of the public data sets (default: SLUICE_DATA)")
    parser.add_argument("--out", type=Path, default=Path("ablation-out"))
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    keys = [
        (bed, policy, *variant, seed, load)
        for bed in RATES
        for policy in POLICIES
        for variant in VARIANTS
        for seed in args.seeds
        for load in args.loads
    ]
    known = finished(args, data_folder(args.data), keys)
    args.docs.mkdir(exist_ok=True)
    (args.docs / "ablation.md").write_text("\n".join(document(args, known)).rstrip() + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
