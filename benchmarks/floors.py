"""Quality floors that change while requests come: a step, a drift, a cycle; and a vain one.

    python benchmarks/floors.py --data DIR            about four CPU-minutes

Recorded scores of several models on the same prompts (mmlu_pro, gsm, llmrouter of the data folder);
the quality model is fitted on seven tenths of the prompts, floors are measured on the rest. Every
request takes the model that minimises cost - lambda x predicted quality; lambda follows the floor
of the moment. A tenth of the answers is rated. Held is a window of 500 requests whose mean score is
at most one standard error below its mean floor; PROTEUS reports 77 to 86 % of windows held.

    ours          learned quality; the price that would have met this floor on the requests just
                  seen (no truth needed), then the virtual queue
    ours, queue   the queue alone, which has to fill first
    knn           as ours, with the mean score of the 30 nearest prompts
    base rates    as ours, with each model's mean score
    MESS+         its rule: queue of what was delivered (all answers rated), running means by model
    best single   the cheapest one model that meets the highest floor
    oracle        true scores known: cheapest choices that meet the mean floor of each hundred

Costs are per request, best single 1; a policy's cost counts only beside its quality. Last, the vain
floor (`training.recovery`): others after a thousand requests of a promise that nobody can keep.
Writes docs/floors.md (its section "What it says" is written by hand and kept).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.table import reading
from policies.scorers.drift_plus_penalty import VirtualQueue
from predictors.quality import QualityModel
from predictors.text import TextEncoder
from training import recovery
from training.dataset import data_folder
from training.fit_quality import QualityConfig, Tables, fit, held_out, load_quality, tables_of
from training.traces import Floats

SETS = ("mmlu_pro", "gsm", "llmrouter")
LOW, HIGH = 0.85, 0.97
"""Floors, as shares of the best single model's mean score."""
WINDOW, EVERY = 500, 50
RATED = 0.1
SEEN = 300
"""Requests just seen on which the price is found, and how often it is."""
MARGIN = 1.0
"""Standard errors of a window by which more than the floor is aimed at: a mean that is on the floor
is a standard error below it in one window of six. This and the next two were chosen on made-up
scores (tests/benchmarks/test_floors.py), not on what is reported."""
V = 25.0
"""Requests owed that change the price by its unit."""
BELIEF = 150.0
"""Rated answers that the predictions weigh."""


def step(n: int) -> Floats:
    """Low, high, low again: thirds."""
    t = np.arange(n) * 3 // n
    return np.where(t == 1, HIGH, LOW)


def drift(n: int) -> Floats:
    """From low to high in a straight line."""
    return np.linspace(LOW, HIGH, n)


def cycle(n: int) -> Floats:
    """Two whole waves."""
    wave = np.sin(np.arange(n) * 4.0 * math.pi / n)
    return 0.5 * (LOW + HIGH) + 0.5 * (HIGH - LOW) * wave


SCHEDULES: Mapping[str, Callable[[int], Floats]] = {"step": step, "drift": drift, "cycle": cycle}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Mean score, mean floor, cost over the best single model's, share of windows held."""

    quality: float
    floor: float
    cost: float
    held: float


def chosen(lamda: float, predicted: Floats, cost: Floats) -> np.ndarray:
    """Models (n,) that minimise cost - lambda x predicted."""
    picks: np.ndarray = np.argmin(cost - lamda * predicted, axis=1)
    return picks


def price_of(floor: float, predicted: Floats, cost: Floats) -> float:
    """The least lambda at which the choices' mean prediction reaches the floor, by bisection."""
    low, high = 0.0, 1e3
    rows = np.arange(len(predicted))
    for _ in range(30):
        middle = 0.5 * (low + high)
        if predicted[rows, chosen(middle, predicted, cost)].mean() >= floor:
            high = middle
        else:
            low = middle
    return high


def routed(
    truth: Floats, predicted: Floats, cost: Floats, floor: Floats, seed: int, *, ahead: bool
) -> np.ndarray:
    """Choices (n,) of the rule. What a choice delivers is its prediction plus the mean surplus of
    the rated answers: choosing by a prediction picks its flattering errors. `ahead`: the price
    starts from what the last requests say.
    """
    rng = np.random.default_rng([seed, 1])
    n = len(truth)
    spread = truth.std(axis=0).mean() / math.sqrt(WINDOW)
    aim = np.minimum(floor + MARGIN * spread, 1.0)
    owed, surplus, rated, price = 0.0, 0.0, BELIEF, 0.0
    picks = np.zeros(n, np.int64)
    last = math.nan
    for i in range(n):
        correction = surplus / rated
        if ahead and i >= 20 and (i % 50 == 0 or abs(aim[i] - last) > 0.005):
            recent = slice(max(i - SEEN, 0), i)
            price = price_of(aim[i] - correction, predicted[recent], cost[recent])
            last = aim[i]
        lamda = max(price + owed / V, 0.0)
        picks[i] = m = int(np.argmin(cost[i] - lamda * predicted[i]))
        owed += aim[i] - (predicted[i, m] + correction)
        owed = min(max(owed, -V if ahead else 0.0), 1e3)
        if rng.random() < RATED:
            surplus += truth[i, m] - predicted[i, m]
            rated += 1.0
    return picks


def mess_plus(truth: Floats, cost: Floats, floor: Floats, seed: int) -> np.ndarray:
    """MESS+'s rule with running means by model and every answer rated; labels of all models with
    probability min(1, 0.1 / t^(1/4)).
    """
    rng = np.random.default_rng([seed, 2])
    n, k = truth.shape
    queue = VirtualQueue(0.0, math.inf)
    total, seen = np.full(k, 5.0), np.full(k, 10.0)
    picks, lamda = np.zeros(n, np.int64), 0.0
    for t in range(n):
        picks[t] = m = int(np.argmin(cost[t] - lamda * total / seen))
        learned = np.arange(k) if rng.random() < 0.1 / (t + 1) ** 0.25 else np.array([m])
        total[learned] += truth[t, learned]
        seen[learned] += 1.0
        queue.target = float(floor[t])
        lamda = queue.add(float(truth[t, m])) / 0.2
    return picks


def oracle(truth: Floats, cost: Floats, floor: Floats) -> np.ndarray:
    """Cheapest choices that meet the mean floor of each hundred, true scores known."""
    picks = np.zeros(len(truth), np.int64)
    for low in range(0, len(truth), 100):
        part = slice(low, low + 100)
        lamda = price_of(float(floor[part].mean()), truth[part], cost[part])
        picks[part] = chosen(lamda, truth[part], cost[part])
    return picks


def result(truth: Floats, cost: Floats, floor: Floats, picks: np.ndarray, unit: float) -> Result:
    """What choices come to; `unit`: the cost of the best single model."""
    rows = np.arange(len(truth))
    got = truth[rows, picks]
    held = []
    for low in range(0, max(len(got) - WINDOW, 0) + 1, EVERY):
        part = got[low : low + WINDOW]
        error = part.std() / math.sqrt(len(part))
        held.append(part.mean() >= floor[low : low + WINDOW].mean() - error)
    return Result(
        quality=float(got.mean()),
        floor=float(floor.mean()),
        cost=float(cost[rows, picks].mean() / unit),
        held=float(np.mean(held)),
    )


def compared(
    data: Tables, schedule: Callable[[int], Floats], seeds: int
) -> dict[str, list[Result]]:
    """Every rule on the prompts in `seeds` orders."""
    found: dict[str, list[Result]] = {}
    for seed in range(seeds):
        order = np.random.default_rng([seed, 0]).permutation(len(data.truth))
        order = np.concatenate([order] * max(1, -(-3000 // len(order))))  # long enough to change
        truth, cost = data.truth[order], data.cost[order] / data.cost.mean()
        means = data.truth.mean(axis=0)
        floor = schedule(len(order)) * means.max()
        able = np.flatnonzero(means >= floor.max())
        single = int(able[data.cost.mean(axis=0)[able].argmin()])
        unit = float(cost[:, single].mean())
        tables = {name: table[order] for name, table in data.predicted.items()}
        picks = {
            "ours": routed(truth, tables["ours"], cost, floor, seed, ahead=True),
            "ours, queue alone": routed(truth, tables["ours"], cost, floor, seed, ahead=False),
            "knn": routed(truth, tables["knn"], cost, floor, seed, ahead=True),
            "base rates": routed(truth, tables["base"], cost, floor, seed, ahead=True),
            "MESS+": mess_plus(truth, cost, floor, seed),
            "best single": np.full(len(order), single),
            "oracle": oracle(truth, cost, floor),
        }
        for name, choice in picks.items():
            found.setdefault(name, []).append(result(truth, cost, floor, choice, unit))
    return found


def document(
    args: argparse.Namespace, found: Mapping[str, Mapping[str, Mapping[str, Sequence[Result]]]]
) -> list[str]:
    """The page."""
    lines = [
        "# Floors that change at run time",
        "",
        (
            f"Made by `python benchmarks/floors.py`: prompts that the quality model was not fitted "
            f"on, in {args.seeds} random orders each; floors between {LOW:g} and {HIGH:g} of the "
            "best single model's mean score. Costs are the data set's prices (billions of "
            "parameters where it has none) times tokens."
        ),
        "",
        *reading(args.docs / "floors.md"),
    ]
    for name, schedules in found.items():
        lines += [
            f"## {name}",
            "",
            "| floor | rule | windows held | least of the orders | mean score (floor) | cost |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for schedule, rules in schedules.items():
            for rule, results in rules.items():
                held = [100 * r.held for r in results]
                lines.append(
                    f"| {schedule} | {rule} | {np.mean(held):.1f} % | {min(held):.1f} % | "
                    f"{np.mean([r.quality for r in results]):.3f} ({results[0].floor:.3f}) | "
                    f"{np.mean([r.cost for r in results]):.2f} |"
                )
        lines.append("")
    lines += ["## After a floor that nobody can keep", "", *vain(args.seeds), ""]
    return lines


def vain(seeds: int) -> list[str]:
    """Attainment of the others before, during and after, by policy."""
    lines = [
        "Attainment of the other class, % (`python -m training.recovery`):",
        "",
        "| policy | before | during | first 200 after | next 200 |",
        "| --- | --- | --- | --- | --- |",
    ]
    cases = [recovery.demand(seed) for seed in range(1, seeds + 1)]
    for name, policy in recovery.policies().items():
        runs = [recovery.run(case, policy) for case in cases]
        cells = [
            f"{100 * np.mean([getattr(r, part) for r in runs]):.1f}"
            for part in ("before", "during", "first", "second")
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Fit, route, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--data", help="folder of the public data sets (default: SLUICE_DATA)")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args(argv)
    folder = data_folder(args.data)
    judged = load_quality(folder, args.sets)
    train, test = held_out(judged)
    text = TextEncoder.packaged()
    model = QualityModel(fit(judged, train, text, QualityConfig())[0])
    found = {}
    for name, data in tables_of(model, judged, train, test, text, folder).items():
        found[name] = {k: compared(data, schedule, args.seeds) for k, schedule in SCHEDULES.items()}
        print(name, {k: {r: round(np.mean([x.held for x in v]), 3) for r, v in rules.items()}
                     for k, rules in found[name].items()}, flush=True)  # fmt: skip
    args.docs.mkdir(exist_ok=True)
    (args.docs / "floors.md").write_text("\n".join(document(args, found)).rstrip() + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
