"""Fit the latency model: `sluice train latency`.

    python -m training.fit_latency --logs .sluice/decisions.jsonl --out latency.npz
    python -m training.fit_latency --simulate --data ../shared/data --report report

Trees learn log(actual / base) of TTFT and TPOT from the rows that the gateway logged, on a window
stratified by class of replica; the newest fifth is held out. The artifact is written only if the
fit beats the roofline on it (exit 1 otherwise): a gateway runs this as a background process, with
`--window`, and goes on with what it has. `--simulate` fits on the fleet model, whose constants are
off from the roofline's, and writes the figures (`training.latency_report`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from domain.columns import LOAD_GRID
from domain.errors import ConfigError
from predictors.artifact import Artifact, save
from predictors.latency import BASE_TTFT, COUNT, FEATURES, ROOF_TPOT, ROOF_TTFT, SCHEMA_HASH
from predictors.latency_gbdt import KIND, LEAST_SPREAD, LatencyGbdt, trees_arrays
from predictors.latency_layer import LEAST_TOKENS
from predictors.trees import Forest, flatten, predict
from training.latency_data import LatencyRows, load_window, newest_per_class, read_logs

Floats = NDArray[np.float64]
DONE, NOT_BETTER, BAD_INPUT = 0, 1, 2
LEAST_ROWS = 200
"""Outcomes below which nothing is fitted."""
MOST_ERROR = 2.0
"""|log(actual / base)| is cut here for the fit: a stall is no lesson about pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """Size of the forests: numbers of trees, of at most `leaves` leaves."""

    centre: int = 120
    spread: int = 30
    leaves: int = 31
    rate: float = 0.08
    seed: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job: 0 the artifact was written, 1 it would not beat the roofline, 2 bad input."""
    parser = argparse.ArgumentParser(prog="sluice train latency", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--logs", nargs="+", type=Path, help="decision logs, JSON lines")
    source.add_argument("--window", type=Path, help="a gateway's window of outcomes (.npz)")
    source.add_argument("--simulate", action="store_true", help="fit on the fleet model, and test")
    parser.add_argument("--out", type=Path, default=Path("latency.npz"))
    parser.add_argument("--report", type=Path, help="folder for report.json and report.html")
    parser.add_argument("--data", help="folder of the public data sets (default: SLUICE_DATA)")
    parser.add_argument("--per-class", type=int, default=6000, help="newest outcomes of each class")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=6, help="simulated runs to fit on")
    parser.add_argument("--requests", type=int, default=2500, help="requests of each")
    parser.add_argument("--nice", type=int, default=0, help="give way to others by so much")
    args = parser.parse_args(argv)
    if args.nice:
        os.nice(args.nice)
    if args.simulate:
        from training.latency_report import run

        return run(args, FitConfig(seed=args.seed))
    try:
        frame = read_logs(args.logs) if args.logs else load_window(args.window)
        frame = newest_per_class(frame, args.per_class)
        artifact, report = job(frame, FitConfig(seed=args.seed), "decision log")
    except ConfigError as exc:
        print(exc, file=sys.stderr)
        return BAD_INPUT
    if args.report:
        args.report.mkdir(parents=True, exist_ok=True)
        (args.report / "report.json").write_text(json.dumps(report, indent=1))
    if artifact is None:
        print("the fit does not beat the roofline on the newest outcomes; nothing written")
        return NOT_BETTER
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save(artifact, args.out)
    print(json.dumps({"out": str(args.out), "version": artifact.version, **report}, indent=1))
    return DONE


def job(
    frame: LatencyRows, config: FitConfig, source: str
) -> tuple[Artifact | None, dict[str, Any]]:
    """Fit on the older four fifths of each class, test on the rest, and fit on all if that is
    better than the roofline; the artifact (None if not) and the figures.

    Raises: ConfigError for fewer than `LEAST_ROWS` outcomes.
    """
    if len(frame) < LEAST_ROWS:
        raise ConfigError(f"{len(frame)} outcomes with latency rows; a fit needs {LEAST_ROWS}")
    late = np.zeros(len(frame), bool)
    for kind in np.unique(frame.kind):
        at = np.flatnonzero(frame.kind == kind)
        late[at[len(at) - len(at) // 5 :]] = True
    trial = fit(frame.take(~late), config, source)
    report = {"held_out": scored(LatencyGbdt(trial), frame.take(late))}
    better = all(e["mape"] <= e["mape_roofline"] for e in report["held_out"]["all"].values())
    return (fit(frame, config, source, report) if better else None), report


def fit(
    frame: LatencyRows, config: FitConfig, source: str, report: dict[str, Any] | None = None
) -> Artifact:
    """The artifact of a frame. Deterministic for a seed."""
    forests: dict[str, Forest] = {}
    z = np.zeros((2, len(LOAD_GRID)))
    health: dict[str, float] = {}
    for which, name in enumerate(("ttft", "tpot")):
        known, error = errors(frame, which)
        x, y = frame.rows[known, :COUNT], np.clip(error[known], -MOST_ERROR, MOST_ERROR)
        weight = _balanced(frame.kind[known])
        # every fourth block of 50 outcomes is kept for the spread: neighbours share a queue
        aside = (np.arange(len(y)) // 50) % 4 == 3
        centre = _forest(x[~aside], y[~aside], weight[~aside], "regression_l1", config, centre=True)
        left = y[aside] - predict(centre, x[aside])
        spread = _forest(
            x[aside], np.log(np.abs(left) + LEAST_SPREAD), weight[aside], "l2", config, centre=False
        )
        scale = np.exp(predict(spread, x[aside]))
        z[which] = np.quantile(left / scale, LOAD_GRID) if len(left) else 0.0
        forests[f"{name}_at"], forests[f"{name}_spread"] = centre, spread
        health[f"{name}_rows"] = float(len(y))
        health[f"{name}_left"] = float(np.abs(left).mean()) if len(left) else 0.0
    coupling = health["coupling"] = coupled(frame, forests)
    x = frame.rows[:, :COUNT]
    low, high = x.min(0), x.max(0)
    margin = 0.1 * (high - low) + 1e-6
    card = {
        "source": source,
        "outcomes": len(frame),
        "classes": {str(k): int((frame.kind == k).sum()) for k in np.unique(frame.kind)},
        "features": list(FEATURES),
        "trees": {"centre": config.centre, "spread": config.spread, "leaves": config.leaves},
        "health": health,
        "lightgbm": _lightgbm().__version__,
        "scores": report or {},
    }
    arrays = trees_arrays(forests, np.sort(z, axis=1), low - margin, high + margin, coupling)
    return Artifact(kind=KIND, arrays=arrays, schema=SCHEMA_HASH, card=card)


def coupled(frame: LatencyRows, forests: dict[str, Forest]) -> float:
    """Correlation of the ranks of what is left of TTFT and TPOT of one request, at least 0."""
    (has_ttft, ttft), (has_tpot, tpot) = errors(frame, 0), errors(frame, 1)
    both = has_ttft & has_tpot
    if both.sum() < LEAST_ROWS:
        return 1.0
    x = frame.rows[both, :COUNT]
    ranks = [
        np.argsort(np.argsort(error[both] - predict(forests[f"{name}_at"], x)))
        for name, error in (("ttft", ttft), ("tpot", tpot))
    ]
    return float(np.clip(np.corrcoef(ranks[0], ranks[1])[0, 1], 0.0, 1.0))


def errors(frame: LatencyRows, which: int) -> tuple[NDArray[np.bool_], Floats]:
    """Rows whose TTFT (0) or TPOT (1) is known, and log(actual / base) of all rows, (n,)."""
    actual = (frame.ttft, frame.tpot)[which]
    base = frame.rows[:, (BASE_TTFT, ROOF_TPOT)[which]]
    known = np.isfinite(actual) & (actual > 0.0) & (base > 0.0)
    if which == 1:
        known &= frame.tokens >= LEAST_TOKENS
    with np.errstate(divide="ignore", invalid="ignore"):
        return known, np.log(actual / base)


def predicted(model: LatencyGbdt, frame: LatencyRows, which: int) -> tuple[Floats, Floats]:
    """Median and P90 (s) of TTFT (0) or TPOT (1) by the model alone, each (n,)."""
    heads = np.array([model.heads(row) for row in frame.rows]).reshape(-1, 4)
    base = frame.rows[:, (BASE_TTFT, ROOF_TPOT)[which]]
    mu, s = heads[:, 2 * which], heads[:, 2 * which + 1]
    z = model.trees.z[which]
    z90 = np.interp(0.9, LOAD_GRID, z)
    return base * np.exp(mu + s * z[len(z) // 2]), base * np.exp(mu + s * z90)


def scored(model: LatencyGbdt, frame: LatencyRows) -> dict[str, dict[str, Any]]:
    """MAPE, median error and P90 coverage of both times, of all rows and by class; the roofline's
    MAPE beside it.
    """
    found: dict[str, dict[str, Any]] = {}
    for which, name in enumerate(("ttft", "tpot")):
        known, _ = errors(frame, which)
        if not known.any():
            continue
        actual = (frame.ttft, frame.tpot)[which]
        median, bound = predicted(model, frame, which)
        roof = frame.rows[:, (ROOF_TTFT, ROOF_TPOT)[which]]
        for kind in ("all", *np.unique(frame.kind[known]).tolist()):
            mine = known if kind == "all" else known & (frame.kind == kind)
            entry = found.setdefault(kind, {})
            entry[name] = {
                "n": int(mine.sum()),
                "mape": float(np.abs(median / actual - 1.0)[mine].mean()),
                "median_ape": float(np.median(np.abs(median / actual - 1.0)[mine])),
                "mape_roofline": float(np.abs(roof / actual - 1.0)[mine].mean()),
                "coverage_p90": float((actual <= bound)[mine].mean()),
            }
    return found


def _balanced(kind: NDArray[np.str_]) -> Floats:
    """Weights that halve the lead of the larger classes: 1 / sqrt(rows of the class)."""
    names, back, counts = np.unique(kind, return_inverse=True, return_counts=True)
    weight: Floats = (len(kind) / (len(names) * counts))[back] ** 0.5 if len(kind) else np.ones(0)
    return weight


def _forest(
    x: Floats, y: Floats, weight: Floats, objective: str, config: FitConfig, *, centre: bool
) -> Forest:
    """Boosted trees as flat arrays; one leaf of the mean where there is too little to split."""
    trees = config.centre if centre else config.spread
    if len(y) < 60:
        value = 0.0 if not len(y) else float(np.median(y))
        one = np.zeros(1, np.int32)
        return Forest(one, one - 1, np.array([value]), one, one, np.zeros(1, np.uint8))
    params = {
        "objective": objective,
        "num_leaves": config.leaves if centre else max(config.leaves // 3, 4),
        "learning_rate": config.rate,
        "min_data_in_leaf": max(10, min(30, len(y) // 40)) if centre else max(20, len(y) // 50),
        "feature_fraction": 0.7,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "num_threads": 1,
        "seed": config.seed,
        "deterministic": True,
        "verbose": -1,
    }
    lgb = _lightgbm()
    return flatten(lgb.train(params, lgb.Dataset(x, y, weight=weight), trees))


def _lightgbm() -> Any:
    import lightgbm

    return lightgbm


if __name__ == "__main__":
    sys.exit(main())
