"""Fit the quality model: `sluice train quality`.

    python -m training.fit_quality --data ../shared/data --out quality.npz --report report

Sets: `mmlu_pro` (all runs; the length caps do not matter for correctness), ZeroEval's `gsm`, and
`llmrouter`, whose task scores are taken as they are (0 to 1). Held out by prompt. Reported beside
the base rate per (model, task), which knows the task, a kNN over text embeddings, and the ceiling:
the share of *other* models that were right on the same prompt, fitted in the same way.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictors.artifact import Artifact, save
from predictors.features import DENSE_SIZE, SCHEMA_HASH
from predictors.length_gbdt import Kernel, forest_arrays, kernel_arrays
from predictors.quality import KIND, QualityModel, logit, row_of
from predictors.text import TextEncoder
from predictors.trees import Forest, flatten
from training.dataset import (
    Answers,
    data_folder,
    frame,
    hashed,
    join,
    load_lengths,
    read_columns,
    read_decision_logs,
    texts_of,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

FOLDS = 5
MARGIN = 0.012
MIN_ROWS = 400
"""A model gets a kernel column of its own from so many training answers on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig:
    """Knobs of the fit."""

    seed: int = 0
    landmarks: int = 512
    width: float = 1.4
    noise: float = 1.5
    rows_per_set: int = 20_000
    rounds: int = 150
    leaves: int = 15
    learning_rate: float = 0.08


@dataclass(frozen=True, slots=True)
class Judged:
    """Answers with a score, and the task of each row (its category or benchmark)."""

    answers: Answers
    task: NDArray[np.str_]


def load_quality(folder: Path, sets: Sequence[str] = ("mmlu_pro", "gsm", "llmrouter")) -> Judged:
    """The named sets, all models, scores in [0, 1]."""
    parts, tasks = [], []
    if "mmlu_pro" in sets:
        base = folder / "mmlu_pro_cot"
        ids, categories = read_columns(base / "prompts.parquet", "prompt_id", "category")
        category = dict(zip(ids, categories, strict=True))
        prompt, model, score = read_columns(
            base / "responses.parquet", "prompt_id", "model", "score"
        )
        parts.append(_scored(texts_of(base / "prompts.parquet"), "mmlu_pro", prompt, model, score))
        tasks.append([category[p] for p in parts[-1].prompt_ids[parts[-1].prompt].tolist()])
    if "gsm" in sets:
        parts.append(load_lengths(folder, ["gsm"]))
        tasks.append(["gsm"] * len(parts[-1]))
    if "llmrouter" in sets:
        base = folder / "llmrouter_scores"
        ids, names = read_columns(base / "prompts.parquet", "prompt_id", "task")
        name = dict(zip(ids, names, strict=True))
        prompt, model, score = read_columns(base / "scores.parquet", "prompt_id", "model", "score")
        parts.append(_scored(texts_of(base / "prompts.parquet"), "llmrouter", prompt, model, score))
        tasks.append([name[p] for p in parts[-1].prompt_ids[parts[-1].prompt].tolist()])
    answers = join(parts)
    known = np.isfinite(answers.score)
    return Judged(answers.take(known), np.concatenate([np.array(t) for t in tasks])[known])


def load_judged_logs(paths: Sequence[Path]) -> Judged:
    """Answers of decision logs that clients gave feedback on; a model is the variant here."""
    answers = read_decision_logs(paths, by="variant")
    answers = answers.take(np.isfinite(answers.score))
    return Judged(answers, np.full(len(answers), "log", dtype="<U16"))


def both(parts: Sequence[Judged]) -> Judged:
    """Several sources as one."""
    return Judged(join(p.answers for p in parts), np.concatenate([p.task for p in parts]))


def _scored(
    texts: dict[str, str],
    name: str,
    prompt: Sequence[str],
    model: Sequence[str],
    score: Sequence[float],
) -> Answers:
    n = len(prompt)
    return frame(texts, [name] * n, prompt, model, [1.0] * n, np.zeros(n, bool), score)


def base_rates(judged: Judged, rows: Ints, *, by_task: bool) -> dict[tuple[str, ...], float]:
    """Mean score per (set, model) or (set, model, task), shrunk by five answers to the set's."""
    answers = judged.answers
    sums: dict[tuple[str, ...], list[float]] = {}
    pools: dict[str, list[float]] = {}
    for row in rows.tolist():
        key: tuple[str, ...] = (str(answers.dataset[row]), str(answers.model[row]))
        key = (*key, str(judged.task[row])) if by_task else key
        sums.setdefault(key, []).append(float(answers.score[row]))
        pools.setdefault(key[0], []).append(float(answers.score[row]))
    pool = {name: float(np.mean(values)) for name, values in pools.items()}
    return {
        key: (sum(values) + 5.0 * pool[key[0]]) / (len(values) + 5.0)
        for key, values in sums.items()
    }


def fit_kernel(
    answers: Answers, rows: Ints, base: Floats, embedding: Floats, config: QualityConfig
) -> tuple[Kernel, Floats, list[str]]:
    """Kernel regressions of (score - base rate): one over all models, one per well-known model.

    Returns the kernel, out-of-fold scores (p, 1 + models) and the model names.
    """
    rng = np.random.default_rng(config.seed)
    prompts, back = np.unique(answers.prompt[rows], return_inverse=True)
    gap = answers.score[rows] - base
    count = np.bincount(back).astype(np.float64)
    first = np.zeros(len(prompts), np.int64)
    first[back] = rows
    sets = answers.dataset[first]
    share = np.array([1.0 / (sets == name).sum() for name in sets])
    dense: Floats = answers.vectors[prompts][:, :DENSE_SIZE]
    mean = np.asarray(np.average(dense, axis=0, weights=share))
    std = np.sqrt(np.average((dense - mean) ** 2, axis=0, weights=share)) + 1e-3
    kernel = Kernel(mean, np.asarray(std), np.zeros((0, 0)), np.zeros((0, 0)), config.width)
    position = kernel.position(dense, embedding[prompts])
    chosen = rng.choice(
        len(prompts), min(config.landmarks, len(prompts)), False, share / share.sum()
    )
    kernel = kernel._replace(landmarks=position[chosen])
    phi = kernel.phi(position)
    prior = kernel.phi(kernel.landmarks) + 1e-6 * np.eye(len(chosen))
    _, group = np.unique(answers.prompt_ids[prompts], return_inverse=True)
    fold = rng.permutation(group.max() + 1)[group] % FOLDS

    names, counts = np.unique(answers.model[rows], return_counts=True)
    known = [str(n) for n, c in zip(names, counts, strict=True) if c >= MIN_ROWS]
    targets = np.full((len(prompts), 1 + len(known)), np.nan)
    targets[:, 0] = np.bincount(back, gap) / count
    for i, name in enumerate(known):
        mine = answers.model[rows] == name
        targets[back[mine], i + 1] = gap[mine]
    weight = np.ones(targets.shape) / (0.25 * config.noise)
    weight[:, 0] = 1.0 / (0.02 * config.noise + 0.15 / count)

    def solve(mask: Bools) -> Floats:
        alpha = np.zeros((len(chosen), targets.shape[1]))
        grams: dict[bytes, Floats] = {}
        for column in range(targets.shape[1]):
            use = mask & np.isfinite(targets[:, column])
            w = weight[use, column]
            key = use.tobytes() + w.tobytes()
            if key not in grams:
                grams[key] = np.linalg.inv(phi[use].T @ (w[:, None] * phi[use]) + prior)
            alpha[:, column] = grams[key] @ (phi[use].T @ (w * targets[use, column]))
        return alpha

    out = np.full((len(answers.vectors), targets.shape[1]), np.nan)
    for k in range(FOLDS):
        out[prompts[fold == k]] = phi[fold == k] @ solve(fold != k)
    return kernel._replace(alpha=solve(np.ones(len(prompts), bool))), out, known


def inputs_of(
    answers: Answers,
    rows: Ints,
    scores: Floats,
    names: Sequence[str],
    base: Floats,
) -> Floats:
    """Inputs of the trees, (n, ROW_SIZE)."""
    column = {name: i + 1 for i, name in enumerate(names)}
    out = []
    for row, rate in zip(rows.tolist(), base.tolist(), strict=True):
        model, prompt = str(answers.model[row]), int(answers.prompt[row])
        own = float(scores[prompt, column[model]]) if model in column else float("nan")
        difficulty = float(scores[prompt, 0])
        vector = answers.vectors[prompt]
        out.append(row_of(vector, difficulty, own, model, rate))
    return np.array(out)


def fit_forest(
    inputs: Floats, score: Floats, base: Floats, group: Ints, config: QualityConfig
) -> tuple[Forest, dict[str, float], Floats]:
    """Log-odds trees on top of the base rate; rounds and out-of-fold raw scores by prompt folds."""
    import lightgbm

    offset = np.array([logit(rate) for rate in base])
    fold = np.random.default_rng(config.seed).permutation(group.max() + 1)[group] % 3
    parameters = {
        "objective": "cross_entropy",
        "num_leaves": config.leaves,
        "learning_rate": config.learning_rate,
        "min_data_in_leaf": 200,
        "feature_fraction": 0.5,
        "bagging_fraction": 0.7,
        "bagging_freq": 1,
        "lambda_l2": 20.0,
        "max_bin": 63,
        "boost_from_average": False,
        "num_threads": 1,
        "seed": config.seed,
        "deterministic": True,
        "force_row_wise": True,
        "verbose": -1,
    }

    def data(mask: Bools) -> Any:
        return lightgbm.Dataset(inputs[mask], score[mask], init_score=offset[mask])

    raw = np.zeros(len(score))
    rounds = []
    for k in range(3):
        held = fold == k
        train = data(~held)
        test = lightgbm.Dataset(inputs[held], score[held], init_score=offset[held], reference=train)
        trial = lightgbm.train(
            parameters,
            train,
            config.rounds,
            valid_sets=[test],
            callbacks=[lightgbm.early_stopping(20, verbose=False)],
        )
        rounds.append(trial.best_iteration)
        raw[held] = offset[held] + trial.predict(inputs[held], raw_score=True)
    count = max(int(np.mean(rounds)), 1)
    final = lightgbm.train(parameters, data(np.ones(len(score), bool)), count)
    return flatten(final), {"rounds": float(count)}, raw


def calibration(raw: Floats, score: Floats) -> tuple[Floats, Floats]:
    """Isotonic curve from raw log odds to probability, thinned to at most 65 points."""
    from sklearn.isotonic import IsotonicRegression

    curve = IsotonicRegression(y_min=0.002, y_max=0.998, out_of_bounds="clip").fit(raw, score)
    grid = np.unique(np.quantile(raw, np.linspace(0.0, 1.0, 65)))
    return grid, np.maximum.accumulate(curve.predict(grid))


def fit(
    judged: Judged, train: Ints, text: TextEncoder, config: QualityConfig
) -> tuple[Artifact, dict[str, float]]:
    """Artifact and health numbers."""
    answers = judged.answers
    rates = base_rates(judged, train, by_task=False)
    rng = np.random.default_rng(config.seed)
    embedding = text.embed_many(answers.vectors)
    base = np.array([rates[key] for key in _keys(answers, train)])
    kernel, scores, names = fit_kernel(answers, train, base, embedding, config)
    chosen = np.concatenate(
        [
            rng.permutation(np.flatnonzero(answers.dataset[train] == name))[: config.rows_per_set]
            for name in np.unique(answers.dataset[train])
        ]
    )
    rows, rate = train[chosen], base[chosen]
    inputs = inputs_of(answers, rows, scores, names, rate)
    hidden = rng.random(len(rows)) < 0.15  # what an unknown model looks like
    inputs[hidden, -1] = np.nan
    forest, health, raw = fit_forest(
        inputs, answers.score[rows], rate, answers.prompt[rows], config
    )
    start, end = calibration(raw, answers.score[rows])
    arrays = {
        **text.arrays("text_"),
        **kernel_arrays(kernel),
        **forest_arrays(forest),
        "calibration_from": start,
        "calibration_to": end,
    }
    card = {
        "text": text.version,
        "models": names,
        "rates": {"|".join(k): v for k, v in rates.items()},
    }
    return Artifact(kind=KIND, schema=SCHEMA_HASH, arrays=arrays, card=card), health


def _keys(answers: Answers, rows: Ints) -> list[tuple[str, str]]:
    return list(zip(answers.dataset[rows].tolist(), answers.model[rows].tolist(), strict=True))


# ---- evaluation


def evaluate(
    model: QualityModel, judged: Judged, train: Ints, test: Ints, text: TextEncoder, folder: Path
) -> dict[str, Any]:
    """Brier skill, AUC and routing per set, beside base rates, kNN and the ceiling."""
    answers = judged.answers
    rates = base_rates(judged, train, by_task=False)
    task_rates = base_rates(judged, train, by_task=True)
    embedding = text.embed_many(answers.vectors)
    report = {}
    for name in np.unique(answers.dataset):
        rows = test[answers.dataset[test] == name]
        rows = rows[[key in rates for key in _keys(answers, rows)]]
        known = train[answers.dataset[train] == name]
        score = answers.score[rows]
        ours = predictions(model, answers, rows, rates)
        plain = np.array([rates[key] for key in _keys(answers, rows)])
        by_task = np.array(
            [
                task_rates.get((*key, task), rates[key])
                for key, task in zip(_keys(answers, rows), judged.task[rows].tolist(), strict=True)
            ]
        )
        near = knn(answers, known, rows, embedding, plain)
        best = ceiling(judged, known, rows, task_rates, rates)
        worth = {"ours": ours, "knn": near, "base": plain, "task_base": by_task, "ceiling": best}
        reference = float(np.mean((by_task - score) ** 2))
        report[str(name)] = {
            "answers": len(rows),
            "models": len(np.unique(answers.model[rows])),
            "brier_task_base": reference,
            "skill": {
                k: 1.0 - float(np.mean((p - score) ** 2)) / reference for k, p in worth.items()
            },
            "auc": {k: auc(p, score) for k, p in worth.items()},
            "auc_within_model": {
                k: within(answers, rows, p, score) for k, p in worth.items() if k != "base"
            },
            "reliability": reliability(ours, score),
            "routing": routing(answers, rows, ours, near, plain, folder),
        }
    return report


def predictions(
    model: QualityModel, answers: Answers, rows: Ints, rates: Mapping[tuple[str, ...], float]
) -> Floats:
    """P(good) of test rows; kernel scores once per prompt."""
    out = np.empty(len(rows))
    cache: dict[int, Floats] = {}
    for i, row in enumerate(rows.tolist()):
        prompt, name = int(answers.prompt[row]), str(answers.model[row])
        if prompt not in cache:
            cache[prompt] = model.scores(answers.vectors[prompt])
        prior = rates[str(answers.dataset[row]), name]
        shift = model.shift(answers.vectors[prompt], cache[prompt], name, prior)
        out[i] = model.calibrate(logit(prior) + shift)
    return out


def knn(
    answers: Answers, known: Ints, rows: Ints, embedding: Floats, prior: Floats, k: int = 30
) -> Floats:
    """Mean score of the model on the k nearest training prompts, ten answers' worth of its base
    rate mixed in.
    """
    prompts, back = np.unique(answers.prompt[known], return_inverse=True)
    names = np.unique(answers.model)
    place = {str(n): i for i, n in enumerate(names)}
    table = np.full((len(prompts), len(names)), np.nan)
    table[back, [place[str(m)] for m in answers.model[known]]] = answers.score[known]
    asked, where = np.unique(answers.prompt[rows], return_inverse=True)
    near = np.argsort(-(embedding[asked] @ embedding[prompts].T), axis=1)[:, :k]
    columns = np.array([place[str(m)] for m in answers.model[rows]])
    values = table[near[where], columns[:, None]]
    seen = np.isfinite(values).sum(1)
    mean: Floats = (np.nansum(values, axis=1) + 10.0 * prior) / (seen + 10.0)
    return mean


def ceiling(
    judged: Judged,
    known: Ints,
    rows: Ints,
    task_rates: Mapping[tuple[str, ...], float],
    rates: Mapping[tuple[str, ...], float],
) -> Floats:
    """Logistic fit of base rate and the other models' mean surplus on the same prompt."""
    from sklearn.linear_model import LogisticRegression

    answers = judged.answers

    def design(which: Ints) -> Floats:
        keys = _keys(answers, which)
        base = np.array(
            [
                task_rates.get((*key, task), rates.get(key, 0.5))
                for key, task in zip(keys, judged.task[which].tolist(), strict=True)
            ]
        )
        gap = answers.score[which] - base
        prompt = answers.prompt[which]
        count = np.bincount(prompt)[prompt] - 1
        others = (np.bincount(prompt, gap)[prompt] - gap) / np.maximum(count, 1)
        return np.stack([np.array([logit(b) for b in base]), others], axis=1)

    x, y = design(known), answers.score[known]
    # scores between 0 and 1 enter as weighted halves
    fitted = LogisticRegression(C=10.0).fit(
        np.concatenate([x, x]),
        np.concatenate([np.ones(len(y)), np.zeros(len(y))]),
        sample_weight=np.concatenate([y, 1.0 - y]),
    )
    return np.asarray(fitted.predict_proba(design(rows))[:, 1])


def auc(probability: Floats, score: Floats) -> float:
    """Area under the ROC curve of score >= 0.5."""
    from scipy.stats import rankdata

    good = score >= 0.5
    n, m = int(good.sum()), int((~good).sum())
    if n == 0 or m == 0:
        return float("nan")
    return float((rankdata(probability)[good].sum() - n * (n + 1) / 2) / (n * m))


def within(answers: Answers, rows: Ints, probability: Floats, score: Floats) -> float:
    """Mean AUC inside each model."""
    names = np.unique(answers.model[rows])
    masks = [answers.model[rows] == name for name in names]
    return float(np.nanmean([auc(probability[m], score[m]) for m in masks]))


def reliability(probability: Floats, score: Floats) -> list[list[float]]:
    """Mean prediction, mean score and count in ten bins of prediction."""
    bins = np.clip((probability * 10).astype(int), 0, 9)
    return [
        [
            float(probability[bins == b].mean()),
            float(score[bins == b].mean()),
            int((bins == b).sum()),
        ]
        for b in range(10)
        if (bins == b).any()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Of n prompts that every one of k models answered: true and predicted scores, cost, (n, k).
    `predicted`: ours, knn and base (each model's mean).

    Cost model: dollars per million tokens of the router's price list times (prompt + 200 tokens);
    where a set has no prices, billions of parameters from the model's name (models without a size
    are left out).
    """

    models: Sequence[str]
    truth: Floats
    predicted: Mapping[str, Floats]
    cost: Floats


def held_out(judged: Judged) -> tuple[Ints, Ints]:
    """Rows of seven tenths of the prompts, to fit on, and of the others, by the prompts' hashes."""
    held = hashed(judged.answers.prompt_ids, "sluice-1|prompt")[judged.answers.prompt] < 0.3
    return np.flatnonzero(~held), np.flatnonzero(held)


def tables_of(
    model: QualityModel, judged: Judged, train: Ints, test: Ints, text: TextEncoder, folder: Path
) -> dict[str, Tables]:
    """The test prompts of every set whose models have a cost, by set."""
    answers = judged.answers
    rates = base_rates(judged, train, by_task=False)
    embedding = text.embed_many(answers.vectors)
    found = {}
    for name in np.unique(answers.dataset):
        rows = test[answers.dataset[test] == name]
        rows = rows[[key in rates for key in _keys(answers, rows)]]
        known = train[answers.dataset[train] == name]
        plain = np.array([rates[key] for key in _keys(answers, rows)])
        ours = predictions(model, answers, rows, rates)
        near = knn(answers, known, rows, embedding, plain)
        tables = _tables(answers, rows, ours, near, plain, folder)
        if tables is not None:
            found[str(name)] = tables
    return found


def routing(
    answers: Answers, rows: Ints, ours: Floats, near: Floats, plain: Floats, folder: Path
) -> dict[str, Any]:
    """Cheapest choice under a quality floor, against the best single model and the oracle."""
    tables = _tables(answers, rows, ours, near, plain, folder)
    if tables is None:
        return {}
    truth, cost = tables.truth, tables.cost
    single = int(truth.mean(0).argmax())
    top = float(truth[:, single].mean())
    out: dict[str, Any] = {
        "prompts": len(truth),
        "models": tables.models,
        "best_single": {
            "model": tables.models[single],
            "quality": top,
            "cost": float(cost[:, single].mean()),
        },
        "oracle": _oracle(truth, cost),
        "floors": {},
    }
    for share in (0.85, 0.95, 1.0):
        floor = share * top
        entry = {
            label: floor_run(truth, table, cost, floor) for label, table in tables.predicted.items()
        }
        out["floors"][f"{floor:.3f}"] = entry
    return out


def _tables(
    answers: Answers, rows: Ints, ours: Floats, near: Floats, plain: Floats, folder: Path
) -> Tables | None:
    """None where fewer than three models have a cost."""
    names = [str(n) for n in np.unique(answers.model[rows])]
    price = prices(folder, names)
    names = [n for n in names if n in price]
    if len(names) < 3:
        return None
    prompts, where = np.unique(answers.prompt[rows], return_inverse=True)
    shape = (len(prompts), len(names))
    place = {n: i for i, n in enumerate(names)}
    keep = np.array([str(m) in place for m in answers.model[rows]])
    at = (where[keep], np.array([place[str(m)] for m in answers.model[rows][keep]]))
    tables = []
    for values in (answers.score[rows], ours, near, plain):
        table = np.full(shape, np.nan)
        table[at] = values[keep]
        tables.append(table)
    full = np.all(np.isfinite(tables[0]), axis=1)
    truth, *predicted = (table[full] for table in tables)
    tokens = np.expm1(answers.vectors[prompts[full], 0]) / 4.0 + 200.0
    cost = tokens[:, None] * np.array([price[n] for n in names]) / 1000.0
    labels = ("ours", "knn", "base")
    return Tables(
        models=names,
        truth=truth,
        predicted=dict(zip(labels, predicted, strict=True)),
        cost=cost,
    )


def prices(folder: Path, names: Sequence[str]) -> dict[str, float]:
    """Cost per token by price list, else by size in the name."""
    import csv
    import math

    from predictors.features import model_features

    listed = {}
    path = folder / "llmrouter_scores" / "prices.csv"
    if path.is_file():
        with path.open() as lines:
            listed = {r["model"]: float(r["usd_per_mtok_output"]) for r in csv.DictReader(lines)}
    if all(name in listed for name in names):
        return {name: listed[name] for name in names}
    sizes = {name: math.exp(model_features(name)[0]) for name in names}
    return {name: size for name, size in sizes.items() if math.isfinite(size)}


def floor_run(
    truth: Floats, predicted: Floats, cost: Floats, floor: float, *, feedback: float = 0.1
) -> dict[str, float]:
    """Route in order with a virtual queue for the floor; a share `feedback` of answers is rated.

    Q grows by (floor - expected quality of the choice); the choice minimises cost - Q * quality
    (drift plus penalty, Neely 2010). Choosing by a prediction picks its flattering errors, so the
    expectation is the prediction plus the mean surplus of the rated answers; `MARGIN` above the
    floor allows for the noise of both. Windows of 500: floor held within one standard error.
    """
    rng = np.random.default_rng(0)
    scale = cost.mean()
    queue, got, spent = 10.0, [], []
    surplus, rated = 0.0, 100.0
    for i in rng.permutation(len(truth)).tolist():
        choice = int(np.argmin(cost[i] / scale - queue * predicted[i]))
        expected = predicted[i, choice] + surplus / rated
        queue = max(0.0, queue + 2.0 * (floor + MARGIN - expected))
        if rng.random() < feedback:
            surplus += truth[i, choice] - predicted[i, choice]
            rated += 1.0
        got.append(truth[i, choice])
        spent.append(cost[i, choice])
    quality = np.array(got)
    held = []
    for start in range(0, max(len(quality) - 500, 0) + 1, 50):
        window = quality[start : start + 500]
        held.append(window.mean() >= floor - window.std() / np.sqrt(len(window)))
    return {
        "floor": floor,
        "quality": float(quality.mean()),
        "cost": float(np.mean(spent)),
        "windows_held": float(np.mean(held)),
    }


def _oracle(truth: Floats, cost: Floats) -> dict[str, float]:
    """The cheapest model among those that score best on each prompt."""
    best = truth.max(1, keepdims=True)
    masked = np.where(truth >= best - 1e-9, cost, np.inf)
    choice = masked.argmin(1)
    at = np.arange(len(truth))
    return {"quality": float(truth[at, choice].mean()), "cost": float(cost[at, choice].mean())}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; 0 when the artifact was written."""
    parser = argparse.ArgumentParser(prog="sluice train quality", description=__doc__)
    parser.add_argument("--data", help="folder of the public data sets (default: SLUICE_DATA)")
    parser.add_argument("--sets", nargs="*", default=["mmlu_pro", "gsm", "llmrouter"])
    parser.add_argument(
        "--logs", nargs="*", type=Path, default=[], help="decision logs with feedback, JSON lines"
    )
    parser.add_argument("--out", type=Path, default=Path("quality.npz"))
    parser.add_argument("--report", type=Path, help="folder for report.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-test", action="store_true", help="train on every prompt")
    args = parser.parse_args(argv)
    started = time.perf_counter()
    folder = data_folder(args.data)
    parts = [load_quality(folder, args.sets)] if args.sets else []
    if args.logs:
        parts.append(load_judged_logs(args.logs))
    if not any(len(part.answers) for part in parts):
        print("no judged answers: name sets, or logs with feedback in them", file=sys.stderr)
        return 2
    judged = both(parts)
    train, test = held_out(judged)
    if args.no_test:
        train, test = np.arange(len(judged.answers)), np.zeros(0, np.int64)
    text = TextEncoder.packaged()
    artifact, health = fit(judged, train, text, QualityConfig(seed=args.seed))
    report = {}
    if len(test):
        report = evaluate(QualityModel(artifact), judged, train, test, text, folder)
    card = {
        **artifact.card,
        "sources": sorted(np.unique(judged.answers.dataset).tolist()),
        "answers": len(train),
        "health": health,
        "quantised_priors": "PRECISION_LOSS of predictors/quality.py: literature, not measured",
        "scores": {n: {"skill": e["skill"], "auc": e["auc"]} for n, e in report.items()},
        "seconds": round(time.perf_counter() - started, 1),
    }
    artifact = Artifact(kind=KIND, schema=SCHEMA_HASH, arrays=artifact.arrays, card=card)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save(artifact, args.out)
    if args.report:
        args.report.mkdir(parents=True, exist_ok=True)
        (args.report / "report.json").write_text(
            json.dumps({"card": card, "sets": report}, indent=1)
        )
    print(json.dumps({"out": str(args.out), "version": artifact.version, "sets": report}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
