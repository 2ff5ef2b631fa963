"""Fitting the length model: own distributions, kernel scores, hazard trees.

The parts of `sluice train length` that other jobs share: `training.length_eval` fits its ceiling
with the same trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from domain.length import BINS, EDGES, LengthDistribution
from predictors.artifact import Artifact
from predictors.features import DENSE_SIZE, MODEL_SIZE, SCHEMA_HASH, model_features
from predictors.length_gbdt import (
    KIND,
    KNOTS,
    OWN_SIZE,
    STRETCHES,
    Kernel,
    exposure,
    forest_arrays,
    kernel_arrays,
    own_features,
    row_size,
    survival_at,
)
from predictors.text import TextEncoder
from predictors.trees import Forest, flatten
from training.dataset import Answers, Split

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FOLDS = 5
PRIOR_COUNT = 5.0
"""Answers that a set's pooled distribution is worth in each model's own, in the fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """Knobs of the fit; defaults chosen on grouped validation prompts, not on the test.

    `rows_per_set` answers are sampled from each set for the trees. `noise` is the ridge on a z
    value's unexplained variance, `width` the kernel's scale.
    """

    seed: int = 0
    landmarks: int = 768
    width: float = 1.4
    noise: float = 0.5
    rows_per_set: int = 8_000
    rounds: int = 160
    leaves: int = 15
    learning_rate: float = 0.08
    threads: int = 1


def own_distributions(answers: Answers, rows: Ints) -> dict[tuple[str, str], LengthDistribution]:
    """Kaplan-Meier distribution per (set, model) from those rows, shrunk to the set's pool."""
    out: dict[tuple[str, str], LengthDistribution] = {}
    bins = np.clip(np.searchsorted(EDGES, answers.tokens), 1, BINS) - 1
    for name in np.unique(answers.dataset[rows]):
        here = rows[answers.dataset[rows] == name]
        pool = _hazard(bins[here], answers.censored[here], np.zeros(BINS), np.zeros(BINS) + 1e-9)
        alive = np.concatenate([[1.0], np.cumprod(1.0 - pool)])[:-1]
        for model in np.unique(answers.model[here]):
            mine = here[answers.model[here] == model]
            hazard = _hazard(
                bins[mine],
                answers.censored[mine],
                PRIOR_COUNT * alive * pool,
                PRIOR_COUNT * alive + 1e-9,
            )
            out[str(name), str(model)] = LengthDistribution.from_hazard(hazard)
    return out


def _hazard(bins: Ints, censored: NDArray[np.bool_], events: Floats, risk: Floats) -> Floats:
    ended = np.bincount(bins[~censored], minlength=BINS)
    left = np.bincount(bins[censored], minlength=BINS)
    gone = ended + left
    # an answer cut inside a bin was at risk for half of it
    at_risk = gone[::-1].cumsum()[::-1] - 0.5 * left
    return np.asarray((events + ended) / (risk + at_risk), np.float64)


def z_values(answers: Answers, own: dict[tuple[str, str], LengthDistribution]) -> Floats:
    """Rank of each answer within its model, as a standard normal value, (n,); NaN without S_m."""
    from scipy.stats import norm

    out = np.full(len(answers), np.nan)
    for (name, model), distribution in own.items():
        rows = (answers.dataset == name) & (answers.model == model)
        rank = 1.0 - survival_at(distribution.survival, answers.tokens[rows] - 0.5)
        out[rows] = norm.ppf(np.clip(rank, 0.005, 0.995))
    return out


def fit_kernel(
    answers: Answers, rows: Ints, z: Floats, embedding: Floats, config: FitConfig
) -> tuple[Kernel, Floats]:
    """Kernel ridge regression of the prompt's mean z; with out-of-fold scores (p, 1) of the
    prompts in `rows`.

    A prompt counts by how sure its mean is and so that every set weighs alike.
    """
    rng = np.random.default_rng(config.seed)
    prompts, back = np.unique(answers.prompt[rows], return_inverse=True)
    count = np.bincount(back).astype(np.float64)
    target = np.bincount(back, z[rows]) / count
    first = np.zeros(len(prompts), np.int64)
    first[back] = rows
    sets = answers.dataset[first]
    dense: Floats = answers.vectors[prompts][:, :DENSE_SIZE]
    share = np.array([1.0 / (sets == name).sum() for name in sets])
    mean = np.average(dense, axis=0, weights=share)
    std = np.sqrt(np.average((dense - mean) ** 2, axis=0, weights=share)) + 1e-3
    kernel = Kernel(
        np.asarray(mean), np.asarray(std), np.zeros((0, 0)), np.zeros((0, 0)), config.width
    )
    position = kernel.position(dense, embedding[prompts])
    chosen = landmarks(sets, config.landmarks, rng)
    kernel = kernel._replace(landmarks=position[chosen])
    phi = kernel.phi(position)
    weight = np.minimum(1.0, 1500.0 * share) / (config.noise + 1.0 / count)
    prior = kernel.phi(kernel.landmarks) + 1e-6 * np.eye(len(chosen))
    # the same prompt text falls into one fold, whatever the set
    _, group = np.unique(answers.prompt_ids[prompts], return_inverse=True)
    fold = rng.permutation(group.max() + 1)[group] % FOLDS

    def solve(mask: NDArray[np.bool_]) -> Floats:
        w = weight[mask, None]
        gram = phi[mask].T @ (w * phi[mask]) + prior
        return np.asarray(np.linalg.solve(gram, phi[mask].T @ (w[:, 0] * target[mask])))

    out = np.full((len(answers.vectors), 1), np.nan)
    for k in range(FOLDS):
        out[prompts[fold == k], 0] = phi[fold == k] @ solve(fold != k)
    return kernel._replace(alpha=solve(np.ones(len(prompts), bool))[:, None]), out


def landmarks(sets: NDArray[np.str_], count: int, rng: np.random.Generator) -> Ints:
    """Prompts at random, evenly from the sets; what small sets leave goes to the large ones."""
    names = np.unique(sets)
    chosen: list[int] = []
    for i, name in enumerate(sorted(names, key=lambda name: int((sets == name).sum()))):
        here = np.flatnonzero(sets == name)
        room = (count - len(chosen)) // (len(names) - i)
        chosen.extend(rng.permutation(here)[:room].tolist())
    return np.array(chosen)


def tree_rows(
    answers: Answers,
    rows: Ints,
    scores: Floats,
    own: dict[tuple[str, str], LengthDistribution],
) -> Floats:
    """Inputs of the trees without k, (n, row_size - 1), of these answers."""
    out = np.empty((len(rows), row_size(scores.shape[1]) - 1))
    prompt = answers.prompt[rows]
    out[:, :DENSE_SIZE] = answers.vectors[prompt][:, :DENSE_SIZE]
    at = DENSE_SIZE + scores.shape[1]
    out[:, DENSE_SIZE:at] = scores[prompt]
    out[:, at : at + MODEL_SIZE] = [model_features(str(m)) for m in answers.model[rows]]
    at += MODEL_SIZE
    keys = list(zip(answers.dataset[rows].tolist(), answers.model[rows].tolist(), strict=True))
    shapes = {key: own_features(own[key]) for key in set(keys)}
    out[:, at : at + OWN_SIZE] = [shapes[key] for key in keys]
    return out


def fit_forest(
    answers: Answers,
    rows: Ints,
    inputs: Floats,
    own: dict[tuple[str, str], LengthDistribution],
    config: FitConfig,
) -> tuple[Forest, dict[str, float]]:
    """Piecewise-exponential hazard by Poisson boosting; rounds chosen on held-out prompts."""
    import lightgbm

    spent, event = _exposures(answers, rows, own)
    who, k = np.nonzero(spent > 1e-9)
    x = np.hstack([inputs[who], k[:, None].astype(np.float64)])
    y = event[who, k]
    offset = np.log(spent[who, k])
    valid = np.random.default_rng(config.seed).random(answers.prompt.max() + 1) < 0.2
    held = valid[answers.prompt[rows]][who]
    parameters = {
        "objective": "poisson",
        "num_leaves": config.leaves,
        "learning_rate": config.learning_rate,
        "min_data_in_leaf": 300,
        "feature_fraction": 0.4 if x.shape[1] > DENSE_SIZE else 1.0,
        "bagging_fraction": 0.7,
        "bagging_freq": 1,
        "lambda_l2": 20.0,
        "max_bin": 63,
        "boost_from_average": False,
        "poisson_max_delta_step": 0.7,
        "num_threads": config.threads,
        "seed": config.seed,
        "deterministic": True,
        "force_row_wise": True,
        "verbose": -1,
    }

    def data(mask: NDArray[np.bool_]) -> Any:
        return lightgbm.Dataset(x[mask], y[mask], init_score=offset[mask], free_raw_data=False)

    history: dict[str, Any] = {}
    train = data(~held)
    trial = lightgbm.train(
        parameters,
        train,
        config.rounds,
        valid_sets=[lightgbm.Dataset(x[held], y[held], init_score=offset[held], reference=train)],
        callbacks=[
            lightgbm.early_stopping(25, verbose=False),
            lightgbm.record_evaluation(history),
        ],
    )
    rounds = max(trial.best_iteration, 1)
    final = lightgbm.train(parameters, data(np.ones(len(x), bool)), rounds)
    curve = history["valid_0"]["poisson"]
    return flatten(final), {
        "rounds": float(rounds),
        "valid_first": float(curve[0]),
        "valid_best": float(min(curve)),
    }


def _exposures(
    answers: Answers, rows: Ints, own: dict[tuple[str, str], LengthDistribution]
) -> tuple[Floats, Floats]:
    """Time at risk and events per answer and stretch, both (n, K)."""
    survival = np.ones(len(rows))
    keys = np.array(
        [f"{d}\x00{m}" for d, m in zip(answers.dataset[rows], answers.model[rows], strict=True)]
    )
    for key in np.unique(keys):
        name, model = key.split("\x00")
        mask = keys == key
        survival[mask] = survival_at(own[name, model].survival, answers.tokens[rows][mask] - 0.5)
    spent = exposure(survival)
    event = np.zeros_like(spent)
    v = -np.log(np.maximum(survival, 1e-12))
    last = np.clip(np.searchsorted(KNOTS, v, side="left") - 1, 0, STRETCHES - 1)
    ended = ~answers.censored[rows]
    event[np.flatnonzero(ended), last[ended]] = 1.0
    return spent, event


def fit(
    answers: Answers, parts: Split, text: TextEncoder, config: FitConfig
) -> tuple[Artifact, dict[str, Any]]:
    """Artifact and health numbers of a fit on the training rows."""
    rng = np.random.default_rng(config.seed)
    rows = np.flatnonzero(parts.train)
    embedding = text.embed_many(answers.vectors)
    own = own_distributions(answers, rows)
    z = z_values(answers, own)
    kernel, scores = fit_kernel(answers, rows, z, embedding, config)
    chosen = np.concatenate(
        [
            rng.permutation(rows[answers.dataset[rows] == name])[: config.rows_per_set]
            for name in np.unique(answers.dataset[rows])
        ]
    )
    inputs = tree_rows(answers, chosen, scores, own)
    forest, health = fit_forest(answers, chosen, inputs, own, config)
    dense = answers.vectors[np.unique(answers.prompt[rows]), :DENSE_SIZE]
    low, high = np.quantile(dense, [0.001, 0.999], axis=0)
    margin = 0.5 * (high - low) + 1.0
    arrays = {
        **text.arrays("text_"),
        **kernel_arrays(kernel),
        **forest_arrays(forest),
        "range_low": low - margin,
        "range_high": high + margin,
    }
    card = {"text": text.version}
    return Artifact(kind=KIND, arrays=arrays, schema=SCHEMA_HASH, card=card), health
