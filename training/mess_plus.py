"""MESS+'s rule on public scores: the cheapest model that keeps a promised share of good answers.

    python -m training.mess_plus [--data FOLDER] [--seeds 10] [--json]

Six models answer prompts of fourteen tasks (LLMRouter's scores; `llmrouter_scores` in the data
folder). Every request takes argmin V cost - Q s_hat, Q <- Q + alpha - s, with the virtual queue of
`policies.scorers.drift_plus_penalty`; s_hat is a running mean by task and model, corrected by
labels of every model with probability min(1, c / t^(1/4)) (MESS+'s exploration). A request counts
as satisfied by its score, so alpha is a mean score; it is given as a share of the best single
model's, which MESS+'s setting (66 % where the largest model has about 69 %) puts at 0.96.

What MESS+ reports: the promise met after about 1,000 requests, at 1.07 MJ against 2.79 for the
largest model alone and 2.1 for the next best router (NeurIPS 2025; `papers.md` section 2b). Costs
here are prices per token of the data set for equal numbers of tokens: answers' lengths are unknown.
"""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.scorers.drift_plus_penalty import VirtualQueue
from training.dataset import data_folder, read_columns

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

V = 0.2
"""Requests owed that weigh the price of the dearest model: prices differ by 0.8 where scores differ
by 0.06, so the queue must outweigh 13 to 1 before it can buy."""
CAPS = (inf, 10.0)
"""Without a cap, as MESS+ has it, and with the wrapper's."""
EXPLORE = 0.1
"""MESS+'s c."""
PRIOR = 10.0
"""Labels that the prior of a task and model weighs."""
SLACK = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Of n prompts and k models: score (n, k) in [0, 1], price (k,) relative to the dearest, task
    (n,).
    """

    models: tuple[str, ...]
    score: Floats
    price: Floats
    task: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run. Costs are relative to the best single model's. `met_after`: requests after which the
    running mean stays within `SLACK` of the target or above, None if it does not at the end.
    """

    alpha: float
    share: float
    satisfied: float
    last_half: float
    cost: float
    cost_with_labels: float
    met_after: int | None
    mix: dict[str, float]


def load(folder: Path) -> Scores:
    """The data set's kept models and prompts. Raises: ConfigError where it is missing."""
    base = folder / "llmrouter_scores"
    ids, tasks = read_columns(base / "prompts.parquet", "prompt_id", "task")
    prompt, model, score = read_columns(base / "scores.parquet", "prompt_id", "model", "score")
    with (base / "prices.csv").open() as lines:
        prices = {row["model"]: float(row["usd_per_mtok_output"]) for row in csv.DictReader(lines)}
    models = tuple(sorted(set(model)))
    place = {name: i for i, name in enumerate(ids)}
    table = np.full((len(ids), len(models)), np.nan)
    for p, m, s in zip(prompt, model, score, strict=True):
        if p in place:
            table[place[p], models.index(m)] = s
    whole = np.isfinite(table).all(axis=1)
    names = sorted(set(tasks))
    task = np.array([names.index(t) for t in tasks], np.int64)
    price = np.array([prices[m] for m in models])
    return Scores(models=models, score=table[whole], price=price / price.max(), task=task[whole])


def run(data: Scores, share: float, seed: int, *, v: float = V, cap: float = inf) -> Outcome:
    """All prompts once in a random order, promised `share` of the best single model's mean."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(data.score))
    score, task, price = data.score[order], data.task[order], data.price
    best = int(score.mean(axis=0).argmax())
    alpha = share * float(score[:, best].mean())
    n, k = score.shape
    queue = VirtualQueue(alpha, cap)
    total = np.zeros((task.max() + 1, k))
    seen = np.zeros_like(total)
    overall, labels = np.full(k, 0.5), np.full(k, 1.0)
    taken = np.zeros(n, np.int64)
    spent_on_labels = 0.0
    price_now = 0.0
    for t in range(n):
        g = task[t]
        guess = (total[g] + PRIOR * overall / labels) / (seen[g] + PRIOR)
        taken[t] = m = int((price_now * guess - price).argmax())
        if rng.random() < min(1.0, EXPLORE / (t + 1) ** 0.25):
            learned = np.arange(k)
            spent_on_labels += float(price.sum() - price[m])
        else:
            learned = np.array([m])
        total[g, learned] += score[t, learned]
        seen[g, learned] += 1.0
        overall[learned] += score[t, learned]
        labels[learned] += 1.0
        price_now = queue.add(float(score[t, m])) / v
    got = score[np.arange(n), taken]
    running = np.cumsum(got) / np.arange(1, n + 1)
    below = np.flatnonzero(running < alpha - SLACK)
    after = 0 if not len(below) else int(below[-1]) + 1
    alone = price[best] * n
    counts = np.bincount(taken, minlength=k) / n
    return Outcome(
        alpha=alpha,
        share=share,
        satisfied=float(got.mean()),
        last_half=float(got[n // 2 :].mean()),
        cost=float(price[taken].sum() / alone),
        cost_with_labels=float((price[taken].sum() + spent_on_labels) / alone),
        met_after=after if after < n else None,
        mix={name: float(c) for name, c in zip(data.models, counts, strict=True)},
    )


def main() -> None:
    """Run the grid and print it."""
    parser = argparse.ArgumentParser(description="MESS+'s rule on LLMRouter's scores")
    parser.add_argument("--data", help="folder of the data sets (or SLUICE_DATA)")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    data = load(data_folder(args.data))
    grid = (0.90, 0.93, 0.96, 0.98, 1.0)
    runs = {
        (cap, share): [run(data, share, seed, cap=cap) for seed in range(args.seeds)]
        for cap in CAPS
        for share in grid
    }
    if args.json:
        shown = {f"cap {cap:g}, {share}": found for (cap, share), found in runs.items()}
        print(json.dumps({name: [asdict(r) for r in found] for name, found in shown.items()}))
        return
    print(f"{len(data.score)} prompts, {len(data.models)} models; best single: cost 1")
    print("cap   share of best  target  satisfied  last half  cost   with labels  met after (most)")
    for (cap, share), found in runs.items():
        print(f"{cap:<5g} {_row(share, found)}")


def _row(share: float, found: list[Outcome]) -> str:
    def mean(name: str) -> float:
        return float(np.mean([getattr(r, name) for r in found]))

    after: list[Any] = [r.met_after for r in found if r.met_after is not None]
    met = f"{np.median(after):.0f}, {max(after)}" if after else "-"
    return (
        f"{share:<14} {mean('alpha'):.3f}   {mean('satisfied'):.3f}      {mean('last_half'):.3f}"
        f"      {mean('cost'):.3f}  {mean('cost_with_labels'):.3f}        {met}"
        f" ({len(after)} of {len(found)})"
    )


if __name__ == "__main__":
    main()
