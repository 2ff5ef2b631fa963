"""What the latency predictor is worth on the fleet model: `sluice train latency --simulate`.

Every replica's constants differ by up to 30 % from what the gateway believes, metrics are half a
second old, prefix caches and preemption are on (`configs/scenarios/latency*.yaml`). Runs to fit on
and runs to test on have other seeds: other constants, other requests. Figures are of predictions
that the core acted on, after the first `WARM_UP` outcomes of each run unless said otherwise:

- MAPE of TTFT (from the decision) and TPOT and P90 coverage, mixed and homogeneous fleet, the
  roofline with its on-line scales beside it;
- a class of GPU that no fit saw: its first outcomes, and those after 500;
- how often the best replica by prediction is the best in truth (the model is copied and lived
  through for every candidate);
- the joint P(all limits): reliability and Brier score, beside the product of the marginals.
"""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from backends.sim.fleet import FleetModel
from domain.columns import EstimateColumns, FleetColumns, Mask, RequestColumns, Routes
from domain.request import InferenceRequest
from predictors.artifact import save
from predictors.joint import Reliability
from predictors.latency_gbdt import MIDDLE, LatencyGbdt
from predictors.latency_layer import LEAST_TOKENS
from training.alone import Alone
from training.dataset import data_folder
from training.evaluate import policy_named
from training.fit_latency import FitConfig, fit
from training.latency_data import LatencyRows, newest_per_class
from training.latency_sim import LatencyLog, LearnedLatency, joined, lived, logged
from training.scenario import Case, build, read
from training.traces import Floats

SCENARIOS = Path(__file__).resolve().parents[1] / "configs" / "scenarios"
WARM_UP = 150
THINK = 0.05
"""Share of the recorded time between a session's requests that is kept: the sessions of hours in
minutes of load."""
RATES = {"latency": 24.0, "latency_homogeneous": 6.0}
"""Sessions begun a second: moderate load."""
QUEUEING = 4.0
"""Times the rate at which replicas queue for themselves: nothing is held, nothing is refused."""
POLICIES = ("best_fit", "least_requests", "power_of_two")
LEFT_OUT = ("a100/dense-14b/bf16", "l40s/dense-14b/int4")
PROBES = 60
"""Decisions whose every candidate is lived through."""
CLOSE = 0.05
"""A replica that is so much slower than the best is as good."""


def case_of(name: str, seed: int, requests: int, data: Path, load: float = 1.0) -> Case:
    """A test bed with one seed: its constants, requests and limits, at `load` times its rate."""
    scenario = read(SCENARIOS / f"{name}.yaml").model_copy(update={"requests": requests})
    case = build(scenario, RATES[name] * load, seed, data=data)
    return replace(case, trace=replace(case.trace, think=case.trace.think * THINK))


def rows_of(log: LatencyLog) -> LatencyRows:
    """What a decision log would hold of it."""
    return LatencyRows(
        rows=log.rows, ttft=log.ttft, tpot=log.tpot, tokens=log.tokens, kind=log.kind
    )


def run(args: argparse.Namespace, config: FitConfig) -> int:
    """Simulate, fit, test, write: the job behind `--simulate`; 0."""
    data = data_folder(args.data)
    logs = []
    for seed in range(args.seeds):
        name = "latency_homogeneous" if seed % 4 == 3 else "latency"
        load = (1.0, 2.0, 3.0)[seed % 3]
        policy = policy_named(POLICIES[seed % len(POLICIES)], hold=seed % 2 == 0)
        log, _, _ = logged(case_of(name, 100 + seed, args.requests, data, load), policy)
        logs.append(log)
        print(f"run {seed + 1} of {args.seeds}: {len(log)} outcomes", flush=True)
    frame = newest_per_class(rows_of(joined(logs)), args.per_class)
    report: dict[str, Any] = {}
    artifact = fit(frame, config, "fleet model: sharegpt and agents lengths")
    model = LatencyGbdt(artifact)
    for name in RATES:
        report[name] = tested(name, args.seed, args.requests, data, model)
        _say(name, report[name])
    report["queueing"] = queueing(args.seed, args.requests, data, model)
    _say("queueing", report["queueing"])
    for kind in LEFT_OUT:
        without = LatencyGbdt(fit(frame.take(frame.kind != kind), config, "without " + kind))
        log, _, _ = logged(
            case_of("latency", args.seed, args.requests * 5 // 2, data),
            policy_named("best_fit"),
            without,
        )
        report[f"without {kind}"] = unseen(log.take(log.kind == kind))
        _say(f"without {kind}", report[f"without {kind}"])
    artifact = fit(frame, config, "fleet model: sharegpt and agents lengths", report)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save(artifact, args.out)
    if args.report:
        write(args.report, {"card": dict(artifact.card), **report})
    print(json.dumps({"out": str(args.out), "version": artifact.version}))
    return 0


def tested(name: str, seed: int, requests: int, data: Path, model: LatencyGbdt) -> dict[str, Any]:
    """Every figure of one test bed with this model in force, and the roofline's without it."""
    case = case_of(name, seed, requests, data)
    policy = policy_named("best_fit")
    probe = Probing(case.trace.output, 0.6, case.seed, model)
    log, run_, _ = lived(case, policy, probe, prepare=probe.attach)
    plain, _, _ = logged(case, policy)
    steady = log.take(np.arange(len(log)) >= WARM_UP)
    busy = run_.busy / float(np.nanmax(run_.last) - case.trace.arrival[0])
    return {
        "outcomes": len(steady),
        "preemptions": run_.preemptions,
        "busy": [round(float(b), 3) for b in busy],
        "cached_share": float(run_.cached.sum() / case.trace.prompt.sum()),
        "learned": accuracy(steady),
        "roofline": accuracy(plain.take(np.arange(len(plain)) >= WARM_UP)),
        "best_replica": probe.hits(),
        "p_slo": probability(steady),
        "p_slo_roofline": probability(plain.take(np.arange(len(plain)) >= WARM_UP)),
    }


def queueing(seed: int, requests: int, data: Path, model: LatencyGbdt) -> dict[str, Any]:
    """P(all limits) where replicas queue for themselves."""
    case = case_of("latency", seed, requests, data, QUEUEING)
    policy = policy_named("best_fit", hold=False, shed_below=0.0, overload_target=0.0)
    found: dict[str, Any] = {}
    for source, used in (("learned", model), ("roofline", None)):
        log, run_, _ = logged(case, policy, used)
        steady = log.take(np.arange(len(log)) >= WARM_UP)
        found[source] = {
            "preemptions": run_.preemptions,
            "accuracy": accuracy(steady),
            "p_slo": probability(steady),
        }
    return found


def accuracy(log: LatencyLog) -> dict[str, Any]:
    """MAPE, median error and P90 coverage of TTFT and TPOT, of all and by class."""
    found: dict[str, Any] = {}
    for name, actual, said in (("ttft", log.ttft, log.q_ttft), ("tpot", log.tpot, log.q_tpot)):
        known = np.isfinite(actual) & (actual > 0)
        if name == "tpot":
            known &= log.tokens >= LEAST_TOKENS
        error = np.abs(said[:, 0] / actual - 1.0)
        for kind in ("all", *np.unique(log.kind[known]).tolist()):
            mine = known if kind == "all" else known & (log.kind == kind)
            found.setdefault(name, {})[kind] = {
                "n": int(mine.sum()),
                "mape": round(float(error[mine].mean()), 4),
                "median_ape": round(float(np.median(error[mine])), 4),
                "coverage_p90": round(float((actual <= said[:, 1])[mine].mean()), 4),
            }
    return found


def unseen(log: LatencyLog) -> dict[str, Any]:
    """MAPE on a class that the fit did not see: its first 100 outcomes, and those after 500."""
    found: dict[str, Any] = {"outcomes": len(log)}
    for name, rows in (("first_100", log.take(np.arange(len(log)) < 100)),
                       ("after_500", log.take(np.arange(len(log)) >= 500))):  # fmt: skip
        if len(rows):
            figures = accuracy(rows)
            found[name] = {time: figures[time]["all"]["mape"] for time in figures}
    return found


def probability(log: LatencyLog) -> dict[str, Any]:
    """Brier score and reliability of P(all limits), joint and as the product of the marginals, raw
    and after the same running calibration; only requests that carry a limit.
    """
    bounded = np.isfinite(log.met) & np.isfinite(log.limits).any(1)
    log = log.take(bounded)
    met, product = log.met, product_of_marginals(log)
    base = float(met.mean()) if len(met) else 0.0
    found: dict[str, Any] = {
        "n": len(met),
        "met": round(base, 4),
        "brier_base_rate": round(base * (1.0 - base), 5),
    }
    for name, p in (
        ("joint_raw", log.p_raw),
        ("joint", calibrated(log.p_raw, met)),
        ("product_raw", product),
        ("product", calibrated(product, met)),
        ("acted_on", log.p_slo),
    ):
        found[name] = {
            "brier": round(float(((p - met) ** 2).mean()), 5) if len(met) else None,
            "reliability": reliability(p, met),
        }
    return found


def product_of_marginals(log: LatencyLog) -> Floats:
    """P(TTFT) * P(TPOT) * P(E2E) on the same grids as the joint, (n,)."""
    ttft, tpot, e2e = log.limits.T
    first = (log.quantiles_ttft <= ttft[:, None]).mean(1)
    pace = (log.quantiles_tpot <= tpot[:, None]).mean(1)
    length = np.maximum(log.lengths - 1.0, 0.0)
    whole = log.quantiles_ttft[:, :, None] + log.quantiles_tpot[:, :, None] * length[:, None, :]
    product: Floats = first * pace * (whole <= e2e[:, None, None]).mean((1, 2))
    return product


def calibrated(p: Floats, met: Floats) -> Floats:
    """Each probability by the curve that the outcomes before it had made."""
    curve = Reliability()
    found = np.zeros(len(p))
    grid = np.linspace(0.0, 1.0, len(curve.curve))
    for i, (raw, good) in enumerate(zip(p.tolist(), met.tolist(), strict=True)):
        found[i] = np.interp(raw, grid, curve.curve)
        curve.observe(raw, met=good > 0.5)
    return found


def reliability(p: Floats, met: Floats, bins: int = 10) -> list[dict[str, float]]:
    """Mean probability, share met and count in each tenth of [0, 1] that holds anything."""
    at = np.minimum((p * bins).astype(int), bins - 1)
    return [
        {
            "p": round(float(p[at == k].mean()), 4),
            "met": round(float(met[at == k].mean()), 4),
            "n": int((at == k).sum()),
        }
        for k in range(bins)
        if (at == k).any()
    ]


class Probing(LearnedLatency):
    """Lives through every candidate of some decisions alone, and notes whether the best by
    prediction was the best in truth.
    """

    def __init__(self, *args: Any, every: int = 23, most: int = PROBES) -> None:
        super().__init__(*args)
        self._every, self._most = every, most
        self._calls = 0
        self._alone: Alone | None = None
        self.found: list[dict[str, Floats]] = []

    def attach(self, model: FleetModel, case: Case) -> None:
        """The fleet model that is lived in."""
        self._alone = Alone(case, model)

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
        """As it is, and now and then the truth beside it."""
        super().fill(requests, fleet, routes, mask, now, out, requests_of)
        if len(requests_of) != 1 or mask[0].sum() < 3 or self._alone is None:
            return
        self._calls += 1
        if self._calls % self._every or len(self.found) >= self._most:
            return
        i, candidates = int(requests_of[0].id), np.flatnonzero(mask[0])
        truth = self._alone.ask(i, routes.decode[candidates].tolist(), now)
        if not np.isfinite(truth).all():
            raise RuntimeError("a probed request never ended")
        ttft = out.ttft[0, candidates, MIDDLE]
        said = ttft + (self._truth[i] - 1.0) * out.tpot[0, candidates, MIDDLE]
        self.found.append(
            {"ttft": ttft.copy(), "e2e": said, "true_ttft": truth[:, 0], "true_e2e": truth[:, 1]}
        )

    def hits(self) -> dict[str, Any]:
        """Share of decisions whose best by prediction was the best in truth, strictly and within
        `CLOSE`; chance beside it.
        """
        found: dict[str, Any] = {"decisions": len(self.found)}
        if not self.found:
            return found
        found["chance"] = round(float(np.mean([1.0 / len(f["ttft"]) for f in self.found])), 3)
        for name in ("ttft", "e2e"):
            strict, near = [], []
            for f in self.found:
                pick, truth = int(np.argmin(f[name])), f[f"true_{name}"]
                strict.append(pick == int(np.argmin(truth)))
                near.append(truth[pick] <= (1.0 + CLOSE) * truth.min())
            found[name] = {
                "hit": round(float(np.mean(strict)), 3),
                "within_5_percent": round(float(np.mean(near)), 3),
            }
        return found


def _say(name: str, figures: dict[str, Any]) -> None:
    print(f"{name}: {json.dumps(figures)}", flush=True)


def write(folder: Path, report: dict[str, Any]) -> None:
    """`report.json` and a page with the figures and the reliability curves."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    lines = []
    curves = []
    for name in RATES:
        entry = report[name]
        for source in ("roofline", "learned"):
            for time in ("ttft", "tpot"):
                cells = entry[source][time]["all"]
                lines.append(
                    f"<tr><th>{html.escape(name)} {source} {time}</th><td>{cells['n']}</td>"
                    f"<td>{100 * cells['mape']:.1f} %</td><td>{100 * cells['median_ape']:.1f} %"
                    f"</td><td>{100 * cells['coverage_p90']:.1f} %</td></tr>"
                )
        points = " ".join(
            f"{20 + 300 * b['p']:.0f},{320 - 300 * b['met']:.0f}"
            for b in entry["p_slo"]["joint"]["reliability"]
        )
        curves.append(
            f"<figure><svg width=340 height=340><path d='M20 320L320 20' stroke=#aaa />"
            f"<polyline points='{points}' fill=none stroke=#06c stroke-width=2 /></svg>"
            f"<figcaption>{html.escape(name)}: P(all limits) against the share met; Brier"
            f" {entry['p_slo']['joint']['brier']}, product of marginals"
            f" {entry['p_slo']['product']['brier']}</figcaption></figure>"
        )
    style = "body{font:15px system-ui;margin:2em;max-width:70em}td,th{padding:.2em .7em}"
    (folder / "report.html").write_text(
        f"<!doctype html><meta charset=utf-8><title>Latency model</title><style>{style}</style>"
        "<h1>Latency model</h1><table><tr><th></th><th>n</th><th>MAPE</th><th>median</th>"
        f"<th>P90 coverage</th></tr>{''.join(lines)}</table>{''.join(curves)}"
        f"<pre>{html.escape(json.dumps(report, indent=1))}</pre>"
    )
