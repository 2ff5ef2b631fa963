"""Policies on an emulated fleet, over HTTP and in virtual time: whether they rank alike.

    python benchmarks/emulated_policies.py --out .sluice/emulated    # 20 minutes, half a core
    python benchmarks/emulated_policies.py --out .sluice/emulated --report

The eight replicas of `configs/emulated.yaml` run as OpenAI servers, `--dilate` times slower than
their profiles say; `sluice serve` stands in front with one policy, and `sluice replay` sends a
trace through it, half of it interactive. Every model time of the gateway's config (profiles,
limits) is stretched alike, so that policies see the fleet that they would see. Then the same
requests go through the simulator: the same arrivals and lengths, the real decision core with the
same config.

Runs of a round follow each other in random order; every finished run is kept in --out. What is
told is `benchmarks/local_truth.py`'s: noise floors from the repetitions, errors of the simulator,
and for how many pairs of policies that differ by more than noise the order is kept.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.local_policies import replay
from benchmarks.local_truth import Row, judge, order_of, read_run, rows_of, timed, told
from domain.fleet import FleetSpec
from sluice.emulate import emulated
from sluice.settings import Settings, load
from training.evaluate import policy_named, run_live
from training.scenario import Case, Metrics, Promise, Replicas, Scenario, build
from training.traces import trace as trace_of

POLICIES = ("actor", "marginal", "best_fit", "least_requests", "round_robin")
SHAPE = ("--max-prompt", "4000", "--max-output", "300")
MIX = ("--class", "interactive=0.5", "--class", "relaxed=0.5")
EXTRA = ("--length-field", "n_predict", "--timeout", "3600")
TIMES = ("overhead_ms", "weights_ms", "per_sequence_us", "per_context_ns", "per_token_us")
TIMES += ("per_attention_ns",)
LIMITS = ("ttft_ms", "tpot_ms", "e2e_ms")
LIMITED = ("ttft", "tpot", "e2e")


def stretched(source: Path, out: Path, dilate: float) -> tuple[Path, Path]:
    """Configs of the emulated fleet, at its own pace, and of the gateway, at the stretched one, on
    free ports.
    """
    settings = yaml.safe_load(source.read_text())
    settings["default_class"] = "interactive"  # who asks may have that, and any below
    for replica in settings["fleet"]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            replica["url"] = f"http://127.0.0.1:{probe.getsockname()[1]}"
    out.mkdir(parents=True, exist_ok=True)
    fleet, gateway = out / "fleet.yaml", out / "stretched.yaml"
    fleet.write_text(yaml.safe_dump(settings))
    for replica in settings["fleet"]:
        for name in TIMES:
            replica["profile"][name] *= dilate
    for slo_class in settings["classes"].values():
        for name in LIMITS:
            if name in slo_class:
                slo_class[name] *= dilate
    gateway.write_text(yaml.safe_dump(settings))
    return fleet, gateway


@contextmanager
def fleet_of(config: Path, dilate: float) -> Iterator[None]:
    """`sluice emulate` as a child process."""
    command = [sys.executable, "-m", "sluice", "emulate", "-c", str(config), "--json"]
    child = subprocess.Popen(
        [*command, "--dilate", f"{dilate:g}"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        if not child.stdout.readline():
            raise SystemExit(f"the emulated fleet of {config} did not start")
        yield
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(timeout=60)


def promises(settings: Settings) -> dict[str, Promise]:
    """The classes of the gateway's config as a scenario's."""
    found = {}
    for name, config in settings.classes.items():
        c = config.slo_class(name)
        found[name] = Promise(
            rank=c.rank,
            ttft=c.slo.ttft,
            tpot=c.slo.tpot,
            e2e=c.slo.e2e,
            weight=c.weight,
            sheddable=c.sheddable,
            patience=c.patience,
            max_wait=c.max_wait,
        )
    return found


def case_of(settings: Settings, lines: Sequence[Mapping[str, Any]]) -> Case:
    """The requests of a run, in virtual time at the stretched pace."""
    model = next(iter(settings.models))
    specs = [spec for spec, _ in emulated(settings)]
    variants = tuple(c.variant(n, model) for n, c in settings.models[model].variants.items())
    classes = promises(settings)
    scenario = Scenario(
        name="emulated",
        fleet=tuple(Replicas(profile=spec.name) for spec in specs),
        classes=classes,
        metrics=Metrics(every=0.5, delay=0.02),
        requests=len(lines),
        warmup=0,
        length_sigma=None,
    )
    case = build(scenario, 1.0, 0, profiles={spec.name: spec.profile for spec in specs})
    names = tuple(classes)
    trace = trace_of(
        np.array([line["due"] for line in lines]),
        np.array([line["prompt_tokens"] or line["prompt"] for line in lines], dtype=float),
        np.array([line["wanted"] for line in lines]),
    )
    class_id = np.array([names.index(line["class_name"]) for line in lines])
    trace = replace(trace, class_id=class_id, classes=names)
    fleet = FleetSpec(replicas=tuple(specs), variants=variants)
    limits = {
        name: np.array([getattr(c, name) or np.inf for c in classes.values()])[class_id]
        for name in LIMITED
    }
    return replace(case, trace=trace, fleet=fleet, believed=fleet, **limits)


def simulated(case: Case, policy: str) -> list[Row]:
    """What the simulator makes of the case."""
    run = run_live(case, policy_named(policy))
    rows = []
    for i in range(len(case.trace)):
        row: Row = {"index": i, "met": False}
        if np.isfinite(run.last[i]):
            tokens = int(case.trace.output[i])
            row |= timed(
                float(case.trace.arrival[i]), float(run.first[i]), float(run.last[i]), tokens
            )
            bounds = {name: float(getattr(case, name)[i]) for name in LIMITED}
            row["met"] = all(row.get(name, 0.0) <= bound for name, bound in bounds.items())
        rows.append(row)
    return rows


def real(lines: Sequence[Mapping[str, Any]], classes: Mapping[str, Promise]) -> list[Row]:
    """Rows of a run over HTTP, each by its own class."""
    return [rows_of([line], classes[line["class_name"]])[0] for line in lines]


def report(args: argparse.Namespace, out: Path) -> list[str]:
    """Everything that the folder's finished runs say."""
    settings = load(next(out.glob("0-*/gateway.yaml")))  # what a gateway was started with
    classes = promises(settings)
    verdicts, case = [], None
    for policy in args.policies.split(","):
        folders = [out / f"{k}-{policy}" for k in range(args.rounds)]
        runs = [read_run(f) for f in folders if (f / "report.json").exists()]
        if not runs:
            continue
        case = case or case_of(settings, runs[0])
        verdicts.append(
            judge(policy, [real(run, classes) for run in runs], simulated(case, policy))
        )
    if not verdicts:
        raise SystemExit(f"{out} holds no finished run")
    return told(verdicts, order_of(verdicts))


def main(argv: list[str] | None = None) -> int:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "emulated.yaml")
    parser.add_argument("--data", help="folder of the data sets")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=600, help="requests of a run")
    parser.add_argument("--rate", type=float, default=28.0, help="requests per model second")
    parser.add_argument("--dilate", type=float, default=3.0, help="real seconds of a model second")
    parser.add_argument("--trace", default="azure", help="as in benchmarks/local_policies.py")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="only report what is there")
    args = parser.parse_args(argv)
    out: Path = args.out.resolve()
    if not args.report:
        order = random.Random(args.seed)
        fleet, gateway = stretched(args.config, out, args.dilate)
        rate = args.rate / args.dilate
        with fleet_of(fleet, args.dilate):
            for k in range(args.rounds):
                policies = args.policies.split(",")
                order.shuffle(policies)
                for policy in policies:
                    folder = out / f"{k}-{policy}"
                    run = replay(
                        gateway, policy, args.trace, rate, args.count, args.data, folder, MIX,
                        EXTRA, SHAPE,
                    )  # fmt: skip
                    said = f"round {k} {policy}: attainment {run['attainment']:.3f}"
                    print(said, file=sys.stderr, flush=True)
    print("\n".join(report(args, out)))
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    raise SystemExit(main())
