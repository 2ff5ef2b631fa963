"""How far the latency predictor can be trusted: another policy, what cannot be known, new fleets.

    python benchmarks/latency.py --data DIR            about five CPU-minutes
    python benchmarks/latency.py --data DIR --steps 1  one step alone

1. *On-policy*: fitted on what one policy routed, asked while another routes, and the other way
   round. Every decision is checked against the truth (`training.alone`).
2. *What cannot be known*: the same error with less and with more known: no phase of steps, tokens
   heard late, as it is served, true constants; and the truth about the present, which what comes
   later still moves.
3. *Fleets nobody has seen*: the artifact that could ship (`training.latency_worlds`) beside the
   roofline with its on-line scales.

Each is kept in --out when it is finished. Writes docs/latency.md (its section "What it says" is
written by hand and kept).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.table import reading
from domain.columns import EstimateColumns, FleetColumns, Mask, RequestColumns, Routes
from domain.request import InferenceRequest
from policies.config import PolicyConfig
from predictors.latency_gbdt import LatencyGbdt
from training import latency_worlds
from training.dataset import data_folder
from training.evaluate import policy_named
from training.fit_latency import FitConfig, fit
from training.latency_data import joined
from training.latency_report import WARM_UP, Probing, case_of, rows_of
from training.latency_sim import LearnedLatency, lived
from training.scenario import Case
from training.traces import Floats

ON_POLICY = ("least_requests", "best_fit")
"""One that looks at no prediction, and one that follows them."""
BEDS = ("latency", "latency_homogeneous")
FIT_SEEDS = (200, 201, 202)
LOADS = (1.0, 2.0, 3.0)


class Hearing:
    """Hears of tokens `late` s late on average (exponential), None: never."""

    def __init__(self, *args: Any, late: float | None = 0.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self._hearing = late
        self._rng = np.random.default_rng(0)

    def stepped(self, replicas: Sequence[int], times: Sequence[float]) -> None:
        """When steps ended, as far as that is heard."""
        if self._hearing is not None:
            heard = np.array(times) + self._rng.exponential(self._hearing, len(times))
            super().stepped(replicas, heard.tolist())  # type: ignore[misc]


class Recording(Hearing, LearnedLatency):
    """Leaves rows to fit on."""


class Watching(Hearing, Probing):
    """Checks every decision."""

    def __init__(self, *args: Any, late: float | None = 0.0) -> None:
        super().__init__(*args, late=late, every=1, most=10**9)
        self.at: dict[int, dict[int, float]] = {}

    def fill(
        self,
        requests: RequestColumns,
        fleet: FleetColumns,
        routes: Routes,
        mask: Mask,
        now: float,
        out: EstimateColumns,
        requests_of: Sequence[InferenceRequest],
    ) -> None:
        """As it is, with the truth of every candidate noted."""
        count = len(self.found)
        super().fill(requests, fleet, routes, mask, now, out, requests_of)
        if len(self.found) > count:
            replicas = routes.decode[np.flatnonzero(mask[0])].tolist()
            truth = self.found[-1]["true_ttft"].tolist()
            # of a request that was held, the last look counts
            self.at[int(requests_of[0].id)] = dict(zip(replicas, truth, strict=True))


def fitted(
    bed: str,
    data: Path,
    requests: int,
    policy: PolicyConfig,
    *,
    late: float | None = 0.0,
    exact: bool = False,
) -> LatencyGbdt:
    """Trees from runs of a bed under a policy; `exact`: the gateway's constants are the truth."""
    logs = []
    for seed, load in zip(FIT_SEEDS, LOADS, strict=True):
        case = known(case_of(bed, seed, requests, data, load), exact=exact)
        estimator = Recording(case.trace.output, 0.6, case.seed, late=late)
        logs.append(rows_of(lived(case, policy, estimator)[0]))
    return LatencyGbdt(fit(joined(logs), FitConfig(), f"{bed} under {policy.kind}"))


def known(case: Case, *, exact: bool) -> Case:
    """The case, or the one whose constants the gateway knows."""
    return replace(case, believed=case.fleet) if exact else case


def watched(
    bed: str,
    data: Path,
    requests: int,
    policy: PolicyConfig,
    model: LatencyGbdt | None,
    seeds: Sequence[int],
    *,
    late: float | None = 0.0,
    exact: bool = False,
) -> dict[str, float]:
    """Errors, coverage and hits of a model while a policy routes, over test seeds."""
    ttft: list[float] = []
    tpot: list[float] = []
    covered: list[float] = []
    floor: list[float] = []
    hit: dict[str, list[float]] = {"ttft": [], "e2e": [], "near": []}
    for seed in seeds:
        case = known(case_of(bed, seed, requests, data), exact=exact)
        watch = Watching(case.trace.output, 0.6, case.seed, model, late=late)
        log, run, _ = lived(case, policy, watch, prepare=watch.attach)
        rest = log.take(np.arange(len(log)) >= WARM_UP)
        ttft += errors(rest.q_ttft[:, 0], rest.ttft)
        covered += (rest.ttft <= rest.q_ttft[:, 1])[np.isfinite(rest.ttft)].tolist()
        tpot += errors(rest.q_tpot[:, 0], np.where(rest.tokens >= 4, rest.tpot, np.nan))
        for i, truth in list(watch.at.items())[WARM_UP:]:
            actual = float(run.first[i] - run.sent[i])
            said = truth.get(int(run.replica[i]), np.nan)
            if actual > 0 and np.isfinite(said):
                floor.append(abs(said / actual - 1.0))
        for f in watch.found[WARM_UP:]:
            pick = int(np.argmin(f["ttft"]))
            hit["ttft"].append(pick == int(np.argmin(f["true_ttft"])))
            hit["near"].append(f["true_ttft"][pick] <= 1.05 * f["true_ttft"].min())
            hit["e2e"].append(int(np.argmin(f["e2e"])) == int(np.argmin(f["true_e2e"])))
    n = len(hit["ttft"])
    return {
        "ttft": float(np.mean(ttft)),
        "tpot": float(np.mean(tpot)),
        "coverage": float(np.mean(covered)),
        "floor": float(np.mean(floor)) if floor else float("nan"),
        "decisions": n,
        **{f"hit_{name}": float(np.mean(values)) if n else 0.0 for name, values in hit.items()},
    }


def errors(said: Floats, actual: Floats) -> list[float]:
    """|said / actual - 1| where the truth is known."""
    good = np.isfinite(actual) & (actual > 0)
    found: list[float] = np.abs(said[good] / actual[good] - 1.0).tolist()
    return found


# ---- steps


def on_policy(args: argparse.Namespace, data: Path) -> dict[str, Any]:
    """Fitted under each policy, asked under each."""
    rules = {name: policy_named(name, hold=False) for name in ON_POLICY}
    models = {name: fitted("latency", data, args.requests, rule) for name, rule in rules.items()}
    return {
        f"{routed}|{origin}": watched(
            "latency", data, args.requests, rules[routed], model, args.seeds
        )
        for routed in rules
        for origin, model in (*models.items(), ("roofline", None))
    }


def knowable(args: argparse.Namespace, data: Path) -> dict[str, Any]:
    """Less and more known, on both beds."""
    rule = policy_named("best_fit")
    found: dict[str, Any] = {}
    for bed in BEDS:
        found[f"{bed}|roofline"] = watched(bed, data, args.requests, rule, None, args.seeds)
        for name, late, exact in (
            ("no phase of steps", None, False),
            ("tokens heard 2 ms late", 0.002, False),
            ("as served", 0.0, False),
            ("true constants", 0.0, True),
        ):
            model = fitted(bed, data, args.requests, rule, late=late, exact=exact)
            found[f"{bed}|{name}"] = watched(
                bed, data, args.requests, rule, model, args.seeds, late=late, exact=exact
            )
            print(bed, name, json.dumps(found[f"{bed}|{name}"]), flush=True)
    return found


def new_fleets(args: argparse.Namespace, data: Path) -> dict[str, Any]:
    """The job of the artifact that could ship, with its verdict."""
    report = args.out / "worlds.json"
    where = ["--data", str(data), "--work", str(args.out / "worlds")]
    latency_worlds.main([*where, "--report", str(report), "--out", str(args.artifact)])
    found: dict[str, Any] = json.loads(report.read_text())
    return found


STEPS: Mapping[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "1": on_policy,
    "2": knowable,
    "3": new_fleets,
}


def main(argv: list[str] | None = None) -> int:
    """Run what is missing and write the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--data", help="folder of the public data sets (default: SLUICE_DATA)")
    parser.add_argument("--out", type=Path, default=Path("latency-out"))
    parser.add_argument(
        "--artifact", type=Path, default=ROOT / "predictors" / "artifacts" / "latency.npz"
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    data = data_folder(args.data)
    found: dict[str, Any] = {}
    for step, work in STEPS.items():
        path = args.out / f"step-{step}.json"
        if step in args.steps and not path.exists():
            path.write_text(json.dumps(work(args, data), indent=1))
        if path.exists():
            found[step] = json.loads(path.read_text())
    args.docs.mkdir(exist_ok=True)
    (args.docs / "latency.md").write_text("\n".join(document(args, found)).rstrip() + "\n")
    return 0


def document(args: argparse.Namespace, found: Mapping[str, Any]) -> list[str]:
    """The page."""
    lines = [
        "# The latency predictor",
        "",
        (
            f"Made by `python benchmarks/latency.py`: {args.requests} requests a run, test seeds "
            f"{', '.join(map(str, args.seeds))}, on the fleet model of `configs/scenarios/latency*"
            ".yaml`: constants off by up to 30 %, readings 0.5 s old, prefix caches and preemption "
            "on. MAPE, coverage of the TTFT's P90, and how often the best replica by prediction is "
            "the best in truth. No number is a measurement of a GPU."
        ),
        "",
        *reading(args.docs / "latency.md"),
    ]
    head = "TTFT | TPOT | P90 covered | best by TTFT | within 5 % | best by E2E | decisions |"
    rule = "| --- | --- | --- | --- | --- | --- | --- |"
    if "1" in found:
        lines += ["## Another policy than the one it was fitted under", ""]
        lines += [f"| routed by | fitted under | {head}", "| --- | --- " + rule]
        for key, row in found["1"].items():
            routed, origin = key.split("|")
            lines.append(f"| {routed} | {origin} | {cells(row)}")
        lines.append("")
    if "2" in found:
        lines += ["## What cannot be known", ""]
        lines += [f"| fleet | known | {head}", "| --- | --- " + rule]
        for key, row in found["2"].items():
            bed, name = key.split("|")
            lines.append(f"| {bed} | {name} | {cells(row)}")
            if name == "as served":
                later = f"{100 * row['floor']:.1f} %"
                lines.append(f"| {bed} | the truth about the present | {later} | | | | | | |")
        lines.append("")
    if "3" in found:
        verdict = found["3"]["verdict"]
        lines += ["## Fleets nobody has seen", ""]
        lines += [
            (
                "Fitted on drawn fleets; mean absolute error over the roofline's with on-line "
                "scales, from the first request on (readings 0.5 s old, constants off by up to "
                "30 %, two seeds and loads each)."
            ),
            "",
            "| fleet | TTFT | TPOT |",
            "| --- | --- | --- |",
        ]
        for name, ratio in verdict["ttft"]["fleets"].items():
            lines.append(f"| {name} | {ratio:.2f} | {verdict['tpot']['fleets'][name]:.2f} |")
        whole = [
            f"{verdict[t]['ratio']:.2f} [{verdict[t]['interval'][0]:.2f},"
            f" {verdict[t]['interval'][1]:.2f}]"
            for t in ("ttft", "tpot")
        ]
        lines += [f"| all | {' | '.join(whole)} |", ""]
    return lines


def cells(row: Mapping[str, float]) -> str:
    """One row's figures."""
    told_of = f"{100 * row['ttft']:.1f} % | {100 * row['tpot']:.1f} %"
    told_of += f" | {100 * row['coverage']:.1f} % |"
    if not row["decisions"]:
        return f"{told_of} – | – | – | 0 |"
    spread = 100 * (row["hit_ttft"] * (1 - row["hit_ttft"]) / row["decisions"]) ** 0.5
    return (
        f"{told_of} {100 * row['hit_ttft']:.1f} ± {spread:.1f} % | {100 * row['hit_near']:.1f} % |"
        f" {100 * row['hit_e2e']:.1f} % | {row['decisions']:.0f} |"
    )


if __name__ == "__main__":
    raise SystemExit(main())
