"""The simulator beside a real fleet: two llama.cpp replicas (F16, Q4_0), a trace it has not seen.

    python benchmarks/local_truth.py --out .sluice/local_truth             # about 45 minutes
    python benchmarks/local_truth.py --out .sluice/local_truth --plan      # how long it would take
    python benchmarks/local_truth.py --out .sluice/local_truth --report    # of what is there

Needs the machine for itself. Every finished run is kept in --out; an interrupted job goes on where
it stopped, as `benchmarks/local_policies.py` does, whose runs these are.

1. Calibration: three runs of one trace (everything at once, then 0.6 and 0.9 of that rate, round
   robin). `sluice calibrate log` fits a profile to each replica.
2. The knee of another trace on the real fleet, then `--rounds` runs of each policy at `--load`
   times the knee; policies follow each other in random order within a round.
3. The simulator lives the same requests through: the real decision core with the gateway's own
   config, round the calibrated replicas. Arrivals and lengths are given, as the engines counted
   them; the gateway does not know lengths in either world (`n_predict`).

Noise floor of TTFT, TPOT and E2E: the median over requests of |log(one run / another)|, two real
runs of one policy, the median over all pairs. The simulator's error is the same measure between it
and a real run, the median over runs; the bar is 1.5 floors. Of a policy's attainment the floor is
half the range of its runs; the bar of the simulator is 5 points from their mean. A pair of policies
counts where the means differ by more than both floors; its order must be kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from backends.sim.profiles import read_profiles, write_profiles
from benchmarks.local_policies import UNHURRIED, knee
from benchmarks.local_policies import replay as real_run
from domain.fleet import FleetSpec, Profile, ProfileKey
from gateway.fleet import Place, replica_spec
from sluice.replay import slo_of
from sluice.settings import Settings, load
from training.calibrate_report import decision_logs
from training.evaluate import policy_named, run_live
from training.scenario import Case, Metrics, Promise, Replicas, Scenario, build
from training.traces import trace as trace_of

PAIR = {"full": "f16", "quarter": "q4_0"}
"""Replicas of configs/local.yaml, and their precision."""
POLICIES = ("round_robin", "least_requests", "power_of_two", "lmetric", "best_fit")
LEARN, TEST = "small", "servegen"
"""Traces of the calibration and of the runs: other clients, other lengths."""
LEARN_LOADS = (0.6, 0.9)
"""Shares of what the fleet completes per second when everything is offered at once."""
CLASS = "standard"
EXTRA = ("--length-field", "n_predict")
START = 20.0
"""Seconds that a fresh gateway and fleet take to start and stop."""
MEASURES = ("ttft", "tpot", "e2e")
ERROR_BAR, POINTS_BAR = 1.5, 0.05

Row = dict[str, Any]
"""One request of a run: `index`, `met`, and of `MEASURES` what is known, in seconds."""


# ---- the real fleet


def pair_config(source: Path, out: Path) -> Path:
    """The config of the two replicas, written to the job's folder."""
    settings = yaml.safe_load(source.read_text())
    settings["fleet"] = [r for r in settings["fleet"] if r["name"] in PAIR]
    named = {r["variant"] for r in settings["fleet"]}
    for model in settings["models"].values():
        model["variants"] = {k: v for k, v in model["variants"].items() if k in named}
    out.mkdir(parents=True, exist_ok=True)
    path = out / "pair.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def rows_of(lines: Sequence[Mapping[str, Any]], limits: Promise) -> list[Row]:
    """A real run's requests.jsonl as rows; times from when a request was due."""
    rows = []
    for line in lines:
        row: Row = {"index": line["index"], "met": False}
        finished = line["status"] == 200 and not line["error"] and line["ended"] is not None
        if finished and line["first"] is not None and line["last"] is not None:
            row |= timed(line["due"], line["first"], line["last"], line["tokens"])
            row["met"] = met(row, limits)
        rows.append(row)
    return rows


def timed(due: float, first: float, last: float, tokens: float) -> Row:
    """TTFT, TPOT (of more than one token) and E2E, seconds."""
    row: Row = {"ttft": first - due, "e2e": last - due}
    if tokens > 1:
        row["tpot"] = (last - first) / (tokens - 1)
    return row


def met(row: Row, limits: Promise) -> bool:
    """Whether an answered request met all its limits."""
    bounds = {"ttft": limits.ttft, "tpot": limits.tpot, "e2e": limits.e2e}
    return all(b is None or row.get(name, 0.0) <= b for name, b in bounds.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Profile and delay of tokens (s) of each replica."""

    profiles: dict[str, Profile]
    delays: dict[str, float]


def calibrate(config: Path, args: argparse.Namespace, out: Path) -> None:
    """Fit profiles to the decision logs of the calibration runs, once."""
    if (out / "delays.json").exists():
        return
    logs = calibration_runs(config, args, out)
    shipped, delays = {}, {}
    for name, precision in PAIR.items():
        key = ProfileKey(
            gpu="cpu-1-thread", engine="llamacpp", model="smollm2-135m", precision=precision
        )
        outcome = decision_logs(logs, key=key, only=name)
        say(outcome.text())
        profile = outcome.profiles[0]
        shipped[name] = (profile.profile, profile.residuals)
        delays[name] = outcome.figures[f"{name} delay"]
    write_profiles(
        out / "profiles.yaml", source="this machine", licence="Apache-2.0", profiles=shipped
    )
    (out / "delays.json").write_text(json.dumps(delays))


def calibrated(out: Path) -> Calibrated:
    """What `calibrate` has kept."""
    if not (out / "delays.json").exists():
        raise SystemExit(f"{out} holds no calibration; run without --report")
    delays = json.loads((out / "delays.json").read_text())
    return Calibrated(profiles=read_profiles(out / "profiles.yaml"), delays=delays)


def calibration_runs(config: Path, args: argparse.Namespace, out: Path) -> list[Path]:
    """Decision logs of the calibration trace at three loads."""
    folder = out / "calibrate-flood"
    flood = one(config, args, folder, "round_robin", LEARN, 1000.0, args.learn, UNHURRIED)
    folders = [folder]
    for part in LEARN_LOADS:
        folder = out / f"calibrate-{part}"
        rate = part * args.learn / flood["makespan"]
        one(config, args, folder, "round_robin", LEARN, rate, args.learn, UNHURRIED)
        folders.append(folder)
    return [folder / "decisions.jsonl" for folder in folders]


def one(
    config: Path,
    args: argparse.Namespace,
    out: Path,
    policy: str,
    trace: str,
    rate: float,
    count: int,
    promise: Sequence[str],
) -> dict[str, Any]:
    """A real run, or what was kept of it."""
    return real_run(config, policy, trace, rate, count, args.data, out, promise, EXTRA)


def promised(args: argparse.Namespace) -> list[str]:
    """Class and limits of the runs, as arguments of `sluice replay`."""
    return ["--class", CLASS, *(["--slo", args.slo] if args.slo else [])]


def read_run(folder: Path) -> list[dict[str, Any]]:
    """Requests of a finished run; `cached`: prompt tokens that the engine had, where it said so."""
    lines = [json.loads(x) for x in (folder / "requests.jsonl").read_text().splitlines()]
    decided = (json.loads(x) for x in (folder / "decisions.jsonl").read_text().splitlines())
    cached = {d["id"]: d["outcome"].get("cached_tokens") for d in decided if d["outcome"]["sent"]}
    return [line | {"cached": cached.get(line["request_id"])} for line in lines]


# ---- the same in virtual time


def promise_of(settings: Settings, slo: str | None) -> Promise:
    """The class that the runs ask for, with its limits or those of `--slo`."""
    known = settings.classes[CLASS].slo_class(CLASS)
    limits = known.slo if slo is None else slo_of(slo)
    return Promise(
        rank=known.rank,
        ttft=limits.ttft,
        tpot=limits.tpot,
        e2e=limits.e2e,
        weight=known.weight,
        sheddable=known.sheddable,
        patience=known.patience,
        max_wait=known.max_wait,
    )


def believed(settings: Settings) -> FleetSpec:
    """The fleet as the gateway's config describes it; slots and context as the engines tell."""
    model = next(iter(settings.models))
    variants = tuple(c.variant(n, model) for n, c in settings.models[model].variants.items())
    named = {v.name: v for v in variants}
    replicas = []
    for r in settings.local_replicas:
        spec = replica_spec(Place(config=r, url="", engine="llamacpp"), None, named[r.variant])
        profile = replace(
            spec.profile,
            max_seqs=r.slots,
            max_context=r.context,
            kv_capacity=float(r.slots * r.context),
        )
        replicas.append(replace(spec, profile=profile))
    return FleetSpec(replicas=tuple(replicas), variants=variants)


def case_of(
    settings: Settings,
    limits: Promise,
    found: Calibrated,
    runs: Sequence[Sequence[Mapping[str, Any]]],
) -> Case:
    """The requests of the real runs, in virtual time: when they were due, prompts as the engines
    counted them, answers as long as they were asked to be.

    All prompts begin with one template, which the engines find in their caches (24 of 38 tokens of
    a short prompt): a profile's times are of what is computed, so that is what the simulator has.
    """
    first = runs[0]
    shared = median([line["cached"] for run in runs for line in run if line["cached"]] or [0.0])
    counted = [
        median([run[i]["prompt_tokens"] for run in runs if run[i]["prompt_tokens"]] or [0.0])
        for i in range(len(first))
    ]
    prompt = [
        max((c or line["prompt"]) - shared, 1.0) for c, line in zip(counted, first, strict=True)
    ]
    trace = trace_of(
        np.array([line["due"] for line in first]),
        np.round(prompt),
        np.array([line["wanted"] for line in first]),
    )
    scenario = Scenario(
        name="local",
        fleet=tuple(Replicas(profile=name) for name in PAIR),
        classes={CLASS: limits},
        metrics=Metrics(every=0.5, delay=0.02),
        requests=len(first),
        warmup=0,
        length_sigma=None,
    )
    case = build(scenario, 1.0, 0, profiles=found.profiles)
    fleet = believed(settings)
    truth = []
    for spec in fleet.replicas:
        known, engine = found.profiles[spec.name], spec.profile
        profile = replace(
            known,
            max_seqs=engine.max_seqs,
            max_context=engine.max_context,
            kv_capacity=engine.kv_capacity,
        )
        truth.append(replace(spec, profile=profile))
    return replace(
        case,
        trace=replace(trace, classes=(CLASS,)),
        fleet=replace(fleet, replicas=tuple(truth)),
        believed=fleet,
        ttft=np.full(len(first), limits.ttft if limits.ttft is not None else np.inf),
        tpot=np.full(len(first), limits.tpot if limits.tpot is not None else np.inf),
        e2e=np.full(len(first), limits.e2e if limits.e2e is not None else np.inf),
    )


def simulated(case: Case, policy: str, found: Calibrated) -> list[Row]:
    """What the simulator makes of the case, tokens delayed as they were while it was fitted. The
    policy draws with the seed that the gateway's does.
    """
    run = run_live(case, policy_named(policy))
    limits = case.scenario.classes[CLASS]
    delays = [found.delays[r.name] for r in case.fleet.replicas]
    rows = []
    for i in range(len(case.trace)):
        row: Row = {"index": i, "met": False}
        if np.isfinite(run.last[i]):
            delay = delays[run.replica[i]]
            first, last = float(run.first[i]) + delay, float(run.last[i]) + delay
            row |= timed(float(case.trace.arrival[i]), first, last, int(case.trace.output[i]))
            row["met"] = met(row, limits)
        rows.append(row)
    return rows


# ---- what it comes to


def apart(a: Sequence[Row], b: Sequence[Row], name: str) -> float:
    """Median |log ratio| of a measure over the requests that have it in both runs."""
    known = [(x[name], y[name]) for x, y in zip(a, b, strict=True) if name in x and name in y]
    if not known:
        return float("nan")
    first, second = np.maximum(np.array(known), 1e-6).T
    return float(np.median(np.abs(np.log(first / second))))


def share(run: Sequence[Row]) -> float:
    """Attainment."""
    return mean(float(row["met"]) for row in run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One policy: real attainment (mean, half its range), the simulator's, and of each measure
    (noise floor, error).
    """

    policy: str
    runs: int
    real: float
    floor: float
    simulator: float
    measures: dict[str, tuple[float, float]]

    def multiple(self, name: str) -> float:
        """The error of a measure in noise floors."""
        floor, error = self.measures[name]
        return error / max(floor, 1e-9)

    @property
    def good(self) -> bool:
        """Whether every bar is kept."""
        near = abs(self.simulator - self.real) <= POINTS_BAR
        return near and all(self.multiple(name) <= ERROR_BAR for name in self.measures)


def judge(policy: str, real: Sequence[Sequence[Row]], simulator: Sequence[Row]) -> Verdict:
    """A policy's real runs and the simulator's."""
    met_ = [share(run) for run in real]
    measures = {}
    for name in MEASURES:
        floor = median([apart(a, b, name) for a, b in combinations(real, 2)] or [float("nan")])
        error = median([apart(simulator, run, name) for run in real])
        measures[name] = (floor, error)
    return Verdict(
        policy=policy,
        runs=len(real),
        real=mean(met_),
        floor=(max(met_) - min(met_)) / 2,
        simulator=share(simulator),
        measures=measures,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Pairs of policies whose attainment differs by more than noise, and those kept in order."""

    pairs: int
    differ: int
    kept: int
    broken: tuple[str, ...]


def order_of(verdicts: Sequence[Verdict]) -> Order:
    """The ranking by attainment."""
    differ, broken = 0, []
    pairs = list(combinations(verdicts, 2))
    for a, b in pairs:
        gap = a.real - b.real
        if abs(gap) <= max(a.floor, b.floor):
            continue
        differ += 1
        if gap * (a.simulator - b.simulator) <= 0:
            broken.append(f"{a.policy} / {b.policy}")
    return Order(pairs=len(pairs), differ=differ, kept=differ - len(broken), broken=tuple(broken))


def told(verdicts: Sequence[Verdict], order: Order) -> list[str]:
    """The tables, as Markdown."""
    lines = [
        "| policy | runs | attainment: real | simulator | "
        + " | ".join(f"{name.upper()}: floor, error (x)" for name in MEASURES)
        + " | bars |",
        "|---|---|---|---|" + "---|" * len(MEASURES) + "---|",
    ]
    for v in verdicts:
        cells = " | ".join(
            f"{100 * v.measures[name][0]:.1f} %, {100 * v.measures[name][1]:.1f} % "
            f"({v.multiple(name):.2f})"
            for name in MEASURES
        )
        lines.append(
            f"| {v.policy} | {v.runs} | {v.real:.3f} ± {v.floor:.3f} | {v.simulator:.3f} | {cells} "
            f"| {'kept' if v.good else 'missed'} |"
        )
    lines += [
        "",
        f"Of {order.pairs} pairs of policies {order.differ} differ by more than noise; the "
        f"simulator keeps the order of {order.kept}"
        + (f", not of {', '.join(order.broken)}." if order.broken else "."),
    ]
    return lines


def report(args: argparse.Namespace, out: Path) -> list[str]:
    """Everything that the folder's finished runs say."""
    found = calibrated(out)
    lines: dict[str, list[list[dict[str, Any]]]] = {}
    for policy in args.policies.split(","):
        folders = [out / f"{k}-{policy}" for k in range(args.rounds)]
        lines[policy] = [read_run(f) for f in folders if (f / "report.json").exists()]
    every = [run for runs in lines.values() for run in runs]
    if not every:
        raise SystemExit(f"{out} holds no finished run")
    settings = load(next(out.glob("0-*/gateway.yaml")))  # what a gateway was started with
    limits = promise_of(settings, args.slo)
    case = case_of(settings, limits, found, every)
    verdicts = []
    for policy, runs in lines.items():
        if not runs:
            continue
        real = [rows_of(run, limits) for run in runs]
        verdicts.append(judge(policy, real, simulated(case, policy, found)))
    return told(verdicts, order_of(verdicts))


def left(args: argparse.Namespace, out: Path, rate: float | None) -> float:
    """Seconds that the missing runs take; before the knee is known, at a guess of 1 request/s."""
    guess: float = rate or 1.0 * args.load

    def missing(folder: str) -> bool:
        return not (out / folder / "report.json").exists()

    calibration = sum(missing(f"calibrate-{k}") for k in ("flood", *LEARN_LOADS))
    seconds: float = calibration * (args.learn * args.load / guess + START)
    if rate is None:
        seconds += 5 * (args.knee_count / guess + START)
    runs = [f"{k}-{p}" for k in range(args.rounds) for p in args.policies.split(",")]
    seconds += sum(map(missing, runs)) * (args.count / guess + START)
    return seconds


def say(line: str) -> None:
    """One line of progress."""
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run what is missing, then print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "local.yaml")
    parser.add_argument("--data", help="folder of the data sets")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=300, help="requests of a run")
    parser.add_argument("--load", type=float, default=1.2, help="times the knee")
    parser.add_argument("--rate", type=float, help="requests/s, instead of a multiple of the knee")
    parser.add_argument("--learn", type=int, default=200, help="requests of a calibration run")
    parser.add_argument("--slo", help="limits in place of the class's, as in `sluice replay --slo`")
    parser.add_argument("--start", type=float, default=1.1, help="first knee run, of the flood's")
    parser.add_argument("--knee-count", type=int, default=300, help="requests of a knee run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", action="store_true", help="only say how long it takes")
    parser.add_argument("--report", action="store_true", help="only report what is there")
    args = parser.parse_args(argv)
    out: Path = args.out.resolve()
    config = pair_config(args.config, out)
    kept = out / "rate.json"
    if args.rate is not None:
        kept.write_text(json.dumps(args.rate))
    rate = json.loads(kept.read_text()) if kept.exists() else None
    say(f"about {left(args, out, rate) / 60:.0f} minutes to go")
    if args.plan:
        return 0
    if not args.report:
        calibrate(config, args, out)
        if rate is None:
            found = knee(
                config, TEST, args.data, out, args.knee_count, promised(args), EXTRA, args.start
            )
            rate = args.load * found
            kept.write_text(json.dumps(rate))
        say(f"{rate:.3f} requests/s; about {left(args, out, rate) / 60:.0f} minutes to go")
        order = random.Random(args.seed)
        for k in range(args.rounds):
            policies = args.policies.split(",")
            order.shuffle(policies)
            for policy in policies:
                folder = out / f"{k}-{policy}"
                run = one(config, args, folder, policy, TEST, rate, args.count, promised(args))
                say(f"round {k} {policy}: attainment {run['attainment']:.3f}")
    print("\n".join(report(args, out)))
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    raise SystemExit(main())
