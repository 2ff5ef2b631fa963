"""How good a length model is, beside trivial predictors and the ceiling.

Everything is prequential: each answer is predicted from what was known before it, then observed.
Own distribution: what `running` keeps, and the baseline to beat. Ceiling: the same hazard trees
fed with the mean rank of the *other* models' answers to the same prompt, which no predictor that
reads only the prompt can be expected to reach.
"""

from __future__ import annotations

import html
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from domain.length import BINS, EDGES, LengthDistribution
from domain.outcome import Cause, Outcome, Usage, UsageSource
from domain.ports import Estimator
from domain.request import InferenceRequest
from predictors.align import ScoreAlign
from predictors.conformal import RollingConformal
from predictors.length_gbdt import OWN_SIZE, STRETCHES, LengthGbdt, own_features, reshape, z_of
from predictors.trees import predict
from training.dataset import Answers, Split, hashed
from training.hazard import FitConfig, fit_forest, own_distributions, z_values

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

TARGET = 0.9
LEVELS = np.array([0.1, 0.25, 0.5, 0.75, 0.9])
AGES = (32.0, 128.0, 512.0)
PRIOR_WEIGHT = 20.0
HALF_LIFE = 500.0


class OwnStream:
    """A model's own distribution as it goes: decaying counts over a prior distribution."""

    def __init__(self, prior: LengthDistribution) -> None:
        self._prior = -np.diff(prior.survival)
        self._counts = np.zeros(BINS)
        self._now: LengthDistribution | None = None

    @property
    def distribution(self) -> LengthDistribution:
        """S_m at present."""
        if self._now is None:
            self._now = LengthDistribution.from_counts(self._counts + PRIOR_WEIGHT * self._prior)
        return self._now

    def observe(self, tokens: float, censored: bool) -> None:
        """Take one answer in; a cut one spreads over the bins beyond in present proportions."""
        k = min(int(np.searchsorted(EDGES, tokens)), BINS) - 1
        self._counts *= 0.5 ** (1.0 / HALF_LIFE)
        if censored:
            beyond = (self._counts + PRIOR_WEIGHT * self._prior)[k:] + 1e-9
            self._counts[k:] += beyond / beyond.sum()
        else:
            self._counts[k] += 1.0
        self._now = None


def crps(survival: Floats, tokens: Floats, censored: Bools, edges: Floats = EDGES) -> Floats:
    """Continuous ranked probability score, (n,), of survivals (n, BINS + 1), in the unit of
    `edges`; for a censored answer the part below the cut.

    Source: Gneiting and Raftery, "Strictly proper scoring rules", JASA 2007.
    """
    x = np.clip(tokens, edges[0], edges[-1])[:, None]
    low, high = edges[:-1], edges[1:]
    below, above = 1.0 - survival[:, :-1], 1.0 - survival[:, 1:]
    share = np.clip((x - low) / np.maximum(high - low, 1e-300), 0.0, 1.0)
    cut = below + share * (above - below)
    left = share * (high - low) * (below**2 + below * cut + cut**2) / 3.0
    gone, still = 1.0 - cut, 1.0 - above
    right = (1.0 - share) * (high - low) * (gone**2 + gone * still + still**2) / 3.0
    total: Floats = left.sum(1) + np.where(censored, 0.0, right.sum(1))
    return total


def pinball(quantiles: Floats, levels: Floats, value: Floats) -> Floats:
    """Mean quantile loss over the levels, (n,), of quantiles (n, Q) for values (n,).

    Source: Koenker and Bassett, "Regression Quantiles", 1978.
    """
    gap = value[:, None] - quantiles
    loss: Floats = np.maximum(levels * gap, (levels - 1.0) * gap).mean(1)
    return loss


def horizon(answers: Answers, rows: Ints) -> float:
    """Where a set's runs were cut, tokens: no forecast is judged beyond it; inf if none was."""
    name = answers.dataset[rows[0]]
    cut = answers.tokens[(answers.dataset == name) & answers.censored]
    return float(cut.min()) if len(cut) else float("inf")


class Run(NamedTuple):
    """One pass over a set's answers in a fixed order: `rows` (n,), survivals (n, BINS + 1) of the
    model and of the own distribution, ranks F(L) (n,), conformal levels (n,), outcomes of the
    model seen before (n,).
    """

    rows: Ints
    ours: Floats
    own: Floats
    rank: Floats
    level: Floats
    seen: Ints


def run(
    model: LengthGbdt,
    answers: Answers,
    rows: Ints,
    priors: dict[str, LengthDistribution],
    warm: dict[str, Ints],
    *,
    tokens: Floats | None = None,
    seed: int = 0,
    shuffle: bool = True,
) -> Run:
    """Predict, then observe, every row of one set. `priors` gives S_m of a model before its first
    answer, `warm` the training rows it had. `tokens` (n of answers) replaces the lengths (an
    injected shift).
    """
    rng = np.random.default_rng(seed)
    lengths = answers.tokens if tokens is None else tokens
    order = rng.permutation(rows) if shuffle else rows
    streams: dict[str, OwnStream] = {}
    conformal, align = RollingConformal(target=TARGET), ScoreAlign()
    ours = np.empty((len(order), BINS + 1))
    own = np.empty((len(order), BINS + 1))
    rank, level = np.empty(len(order)), np.empty(len(order))
    seen = np.zeros(len(order), np.int64)
    counts: dict[str, int] = defaultdict(int)
    scores: dict[int, Floats | None] = {}
    for i, row in enumerate(order.tolist()):
        name = str(answers.model[row])
        stream = streams.get(name)
        if stream is None:
            stream = streams[name] = OwnStream(priors[name])
            for past in rng.permutation(warm.get(name, np.zeros(0, np.int64))).tolist():
                stream.observe(float(answers.tokens[past]), bool(answers.censored[past]))
        known = stream.distribution
        prompt = int(answers.prompt[row])
        if prompt not in scores:
            vector = answers.vectors[prompt]
            scores[prompt] = model.scores(vector) if model.knows(vector) else None
        found = scores[prompt]
        forecast = known
        if found is not None:
            aligned = np.array([align("", float(found[0]))])
            forecast = model.forecast(answers.vectors[prompt], aligned, name, known)
        ours[i], own[i] = forecast.survival, known.survival
        rank[i] = 1.0 - forecast.survives(float(lengths[row]))
        level[i] = conformal.level(name, "")
        seen[i] = counts[name]
        counts[name] += 1
        cut = bool(answers.censored[row])
        conformal.observe(name, "", float(rank[i]), censored=cut)
        if found is not None:
            align.observe("", float(found[0]), z_of(known, float(lengths[row])))
        stream.observe(float(lengths[row]), cut)
    return Run(order, ours, own, rank, level, seen)


def medians(survival: Floats) -> Floats:
    """Median tokens of survivals (n, BINS + 1), (n,)."""
    return np.array([LengthDistribution(s).quantile(0.5) for s in survival])


def tau_within(answers: Answers, rows: Ints, score: Floats) -> float:
    """Kendall's tau-b between score and length, within each model, averaged over models."""
    from scipy.stats import kendalltau

    found = []
    for name in np.unique(answers.model[rows]):
        mine = answers.model[rows] == name
        if mine.sum() >= 20:
            found.append(kendalltau(score[mine], answers.tokens[rows][mine]).statistic)
    return float(np.nanmean(found)) if found else float("nan")


def others(answers: Answers, rows: Ints, z: Floats) -> Floats:
    """Mean z of the other models on the same prompt, (n,); NaN where there is none."""
    prompt = answers.prompt[rows]
    good = np.isfinite(z)
    size = int(answers.prompt.max()) + 1
    count = np.bincount(prompt[good], minlength=size)[prompt] - good
    total = np.bincount(prompt[good], z[good], minlength=size)[prompt] - np.where(good, z, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Floats = np.where(count > 0, total / count, np.nan)
    return mean


def evaluate(
    model: LengthGbdt, answers: Answers, parts: Split, *, most: int = 6_000, seed: int = 0
) -> dict[str, Any]:
    """The report: one entry per set, and the reliability of the pooled ranks.

    Whole models are taken from each set until it has `most` test answers.
    """
    sets = {}
    ranks = []
    for name in np.unique(answers.dataset):
        entry, pooled = evaluate_set(model, answers, parts, str(name), most, seed)
        sets[str(name)] = entry
        ranks.append(pooled)
    pooled_ranks = np.concatenate(ranks)
    share = [float((pooled_ranks <= q).mean()) for q in np.arange(0.05, 1.0, 0.05)]
    return {"sets": sets, "reliability": share}


def evaluate_set(
    model: LengthGbdt, answers: Answers, parts: Split, name: str, most: int, seed: int
) -> tuple[dict[str, Any], Floats]:
    """Scores of one set and the ranks of its test answers."""
    here = answers.dataset == name
    train = np.flatnonzero(parts.train & here)
    test = np.flatnonzero(parts.test & here)
    unseen = np.flatnonzero(parts.unseen & here)
    everything = np.concatenate([test, unseen])
    test, unseen = _whole_models(answers, test, most), _whole_models(answers, unseen, most // 4)
    trained = own_distributions(answers, train) if len(train) else {}
    pool = _pool(trained)
    warm = {str(m): train[answers.model[train] == m] for m in np.unique(answers.model[train])}
    both = np.concatenate([test, unseen])
    priors = {str(m): pool for m in np.unique(answers.model[both])}
    result = run(model, answers, test, priors, warm, seed=seed)
    entry = scores_of(answers, result)
    entry["coverage"] = coverage(answers, result)
    entry["remaining"] = remaining(answers, result, seed)
    ceiling = others(answers, everything, _z(answers, everything, trained))
    by_row = dict(zip(everything.tolist(), ceiling.tolist(), strict=True))
    entry["tau_ceiling"] = _ratio_part(answers, test, np.array([by_row[r] for r in test.tolist()]))
    entry["tau_share"] = entry["tau"] / entry["tau_ceiling"]
    entry |= _ceiling_crps(answers, train, trained, result, by_row)
    if len(unseen):
        entry["unseen"] = unseen_scores(answers, run(model, answers, unseen, priors, {}, seed=seed))
        entry["out_of_the_box"] = out_of_the_box(model, answers, unseen, name)
    entry["shift"] = shift_recovery(model, answers, test, priors, warm, seed)
    return entry, result.rank


def _whole_models(answers: Answers, rows: Ints, most: int) -> Ints:
    """Rows of some models, all of each, about `most` in all; the choice depends on names only."""
    if len(rows) <= most:
        return rows
    names, counts = np.unique(answers.model[rows], return_counts=True)
    order = np.argsort(hashed(names, "whole models"))
    taken = np.searchsorted(np.cumsum(counts[order]), most, side="right")
    return rows[np.isin(answers.model[rows], names[order][: max(int(taken), 1)])]


def _pool(trained: dict[tuple[str, str], LengthDistribution]) -> LengthDistribution:
    if not trained:
        return LengthDistribution.lognormal(150.0, 1.1)
    return LengthDistribution(np.mean([d.survival for d in trained.values()], axis=0))


def _z(answers: Answers, rows: Ints, trained: dict[tuple[str, str], LengthDistribution]) -> Floats:
    """Ranks of rows as z, by their trained S_m or else by the test answers' own ranks."""
    own = dict(trained)
    for name in np.unique(answers.model[rows]):
        mine = rows[answers.model[rows] == name]
        key = (str(answers.dataset[mine[0]]), str(name))
        if key not in own:
            own |= own_distributions(answers, mine)
    return z_values(answers, own)[rows]


def _ratio_part(answers: Answers, rows: Ints, score: Floats) -> float:
    good = np.isfinite(score)
    return tau_within(answers, rows[good], score[good])


def scores_of(answers: Answers, result: Run) -> dict[str, Any]:
    """Rank and CRPS of one run; gains are over the own distribution."""
    rows = result.rows
    tokens, cut = answers.tokens[rows], answers.censored[rows]
    edges = np.minimum(EDGES, horizon(answers, rows))
    log_edges = np.log1p(edges)
    ours, own = crps(result.ours, tokens, cut, edges), crps(result.own, tokens, cut, edges)
    log_ours = crps(result.ours, np.log1p(tokens), cut, log_edges)
    log_own = crps(result.own, np.log1p(tokens), cut, log_edges)
    worse = []
    for name in np.unique(answers.model[rows]):
        mine = answers.model[rows] == name
        if mine.sum() >= 20 and ours[mine].mean() > own[mine].mean():
            worse.append(str(name))
    median = medians(result.ours)
    return {
        "answers": len(rows),
        "models": len(np.unique(answers.model[rows])),
        "tau": tau_within(answers, rows, median),
        "mae": float(np.abs(median - tokens)[~cut].mean()),
        "mae_own": float(np.abs(medians(result.own) - tokens)[~cut].mean()),
        "crps": float(ours.mean()),
        "crps_own": float(own.mean()),
        "crps_gain": float(1.0 - ours.mean() / own.mean()),
        "log_crps_gain": float(1.0 - log_ours.mean() / log_own.mean()),
        "models_worse_than_own": worse,
    }


def _ceiling_crps(
    answers: Answers,
    train: Ints,
    trained: dict[tuple[str, str], LengthDistribution],
    result: Run,
    ceiling: dict[int, float],
) -> dict[str, Any]:
    """CRPS gain of the ceiling's own hazard trees, on the rows where a ceiling exists."""
    nothing: dict[str, Any] = {"crps_gain_ceiling": None, "crps_share": None}
    if len(train) < 500:
        return nothing
    rng = np.random.default_rng(0)
    sample = rng.permutation(train)[:6_000]
    score = others(answers, train, z_values(answers, trained)[train])
    by_row = dict(zip(train.tolist(), score.tolist(), strict=True))
    score = np.array([by_row[row] for row in sample.tolist()])
    sample, score = sample[np.isfinite(score)], score[np.isfinite(score)]
    if len(sample) < 500:
        return nothing
    inputs = np.empty((len(sample), 1 + OWN_SIZE))
    inputs[:, 0] = score
    shapes = {key: own_features(d) for key, d in trained.items()}
    keys = zip(answers.dataset[sample].tolist(), answers.model[sample].tolist(), strict=True)
    inputs[:, 1:] = [shapes[key] for key in keys]
    forest, _ = fit_forest(answers, sample, inputs, trained, FitConfig())
    known = np.array([np.isfinite(ceiling[row]) for row in result.rows.tolist()])
    rows = result.rows[known]
    test = np.empty((len(rows), 2 + OWN_SIZE))
    test[:, 0] = [ceiling[row] for row in rows.tolist()]
    owns = [LengthDistribution(s) for s in result.own[known]]
    test[:, 1:-1] = [own_features(d) for d in owns]
    factors = np.empty((len(rows), STRETCHES))
    for k in range(STRETCHES):
        test[:, -1] = k
        factors[:, k] = np.exp(np.clip(predict(forest, test), -4.0, 4.0))
    survival = np.array([reshape(d, f).survival for d, f in zip(owns, factors, strict=True)])
    tokens, cut = answers.tokens[rows], answers.censored[rows]
    edges = np.minimum(EDGES, horizon(answers, rows))
    best = crps(survival, tokens, cut, edges).mean()
    ours = crps(result.ours[known], tokens, cut, edges).mean()
    own = crps(result.own[known], tokens, cut, edges).mean()
    log_edges = np.log1p(edges)
    logs = [
        crps(s, np.log1p(tokens), cut, log_edges).mean()
        for s in (survival, result.ours[known], result.own[known])
    ]
    return {
        "crps_gain_ceiling": float(1.0 - best / own),
        "crps_share": float((own - ours) / (own - best)),
        "log_crps_share": float((logs[2] - logs[1]) / (logs[2] - logs[0])),
    }


def coverage(answers: Answers, result: Run) -> dict[str, Any]:
    """Share of answers at or below the conformal P90, and how many models a test rejects.

    The first tenth of the stream is left out. Per model: two-sided 1 % test under a beta-binomial
    that allows for 100 calibration outcomes, and a plain binomial beside it.
    """
    from scipy.stats import betabinom, binom

    start = len(result.rows) // 10
    # an answer cut below the bound is neither inside nor outside
    unknown = answers.censored[result.rows] & (result.rank <= result.level)
    use = (np.arange(len(result.rows)) >= start) & ~unknown
    inside = result.rank <= result.level
    calibration, tested, rejected, plain = 100, 0, 0, 0
    for name in np.unique(answers.model[result.rows]):
        mine = use & (answers.model[result.rows] == name)
        n, hits = int(mine.sum()), int(inside[mine].sum())
        if n < 30:
            continue
        tested += 1
        law = betabinom(n, TARGET * (calibration + 1), (1 - TARGET) * (calibration + 1))
        rejected += bool(min(law.cdf(hits), law.sf(hits - 1)) < 0.005)
        simple = binom(n, TARGET)
        plain += bool(min(simple.cdf(hits), simple.sf(hits - 1)) < 0.005)
    return {
        "pooled": float(inside[use].mean()),
        "without_conformal": float((result.rank <= TARGET)[use].mean()),
        "models": tested,
        "rejected": rejected,
        "rejected_plain_binomial": plain,
    }


def remaining(answers: Answers, result: Run, seed: int) -> dict[str, Any]:
    """Pinball loss of what is left at fixed ages, among answers still running; what is left ends
    where the set's runs were cut, for forecasts and answers alike.
    """
    rng = np.random.default_rng(seed)
    end = horizon(answers, result.rows)
    out: dict[str, Any] = {}
    for age in AGES:
        alive = np.flatnonzero(answers.tokens[result.rows] > age)
        alive = rng.permutation(alive)[:1500]
        if len(alive) < 30:
            continue
        left = np.minimum(answers.tokens[result.rows[alive]], end) - age
        ours, own, arrival = (np.empty((len(alive), len(LEVELS))) for _ in range(3))
        for j, i in enumerate(alive.tolist()):
            forecast = LengthDistribution(result.ours[i])
            ours[j] = forecast.remaining(age).quantiles(LEVELS)
            own[j] = LengthDistribution(result.own[i]).remaining(age).quantiles(LEVELS)
            arrival[j] = np.maximum(forecast.quantiles(LEVELS) - age, 0.0)
        loss, base, cut = (
            pinball(np.minimum(q, end - age), LEVELS, left).mean() for q in (ours, own, arrival)
        )
        out[f"{age:.0f}"] = {
            "answers": len(alive),
            "pinball": float(loss),
            "own": float(base),
            "arrival_truncated": float(cut),
            "gain": float(1.0 - loss / base),
        }
    return out


def unseen_scores(answers: Answers, result: Run) -> dict[str, Any]:
    """Models never trained on: CRPS gain and rank by outcomes seen before."""
    out: dict[str, Any] = {"models": len(np.unique(answers.model[result.rows]))}
    for label, low, high in (("0-19", 0, 20), ("20-199", 20, 200), ("200+", 200, 10**9)):
        mine = (result.seen >= low) & (result.seen < high)
        if mine.sum() < 20:
            continue
        rows = result.rows[mine]
        edges = np.minimum(EDGES, horizon(answers, rows))
        tokens, cut = answers.tokens[rows], answers.censored[rows]
        ours = crps(result.ours[mine], tokens, cut, edges)
        own = crps(result.own[mine], tokens, cut, edges)
        out[label] = {
            "crps_gain": float(1.0 - ours.mean() / own.mean()),
            "answers": int(mine.sum()),
        }
    out["tau"] = tau_within(answers, result.rows, medians(result.ours))
    return out


def as_served(
    estimator: Estimator, answers: Answers, rows: Ints, *, name: str, seed: int = 0
) -> tuple[Floats, Ints]:
    """Survivals (n, BINS + 1) that an estimator serves for these rows in a random order, from its
    first outcome on, with the rows in that order. All are traffic of one tenant called `name`.
    """
    order = np.random.default_rng(seed).permutation(rows)
    served = np.empty((len(order), BINS + 1))
    for i, row in enumerate(order.tolist()):
        request = InferenceRequest(
            id=str(i),
            tenant=name,
            model=str(answers.model[row]),
            prompt_tokens=1.0,
            features=tuple(answers.vectors[answers.prompt[row]].tolist()),
        )
        served[i] = estimator.length(request).survival
        cut = bool(answers.censored[row])
        usage = Usage(completion=float(answers.tokens[row]), source=UsageSource.ENGINE)
        cause = Cause.CLIENT_GONE if cut else Cause.FINISHED
        end = Outcome(request=request, cause=cause, arrived=0.0, ended=1.0, usage=usage)
        estimator.learn(end)
    return served, order


STAGES = ((0, 20), (20, 200), (200, 10**9))
"""Outcomes of a model before: first, later, at last."""


def out_of_the_box(
    model: LengthGbdt, answers: Answers, rows: Ints, name: str, seed: int = 0
) -> dict[str, Any]:
    """A gateway that starts with this fit, beside one that starts with running lengths only, on
    models that the fit never saw: CRPS gain by outcomes of the model before, its standard error
    over pairs, and models on which it was worse (one-sided 1 % test).
    """
    from predictors.estimator import BaselineEstimator
    from predictors.learned import LearnedEstimator

    served, order = as_served(LearnedEstimator(model), answers, rows, name=name, seed=seed)
    base, _ = as_served(BaselineEstimator(), answers, rows, name=name, seed=seed)
    edges = np.minimum(EDGES, horizon(answers, rows))
    tokens, cut = answers.tokens[order], answers.censored[order]
    ours, own = crps(served, tokens, cut, edges), crps(base, tokens, cut, edges)
    models = answers.model[order]
    before = np.zeros(len(order), np.int64)
    for each in np.unique(models):
        before[models == each] = np.arange((models == each).sum())
    out: dict[str, Any] = {}
    for low, high in STAGES:
        here = (before >= low) & (before < high)
        if here.sum() < 20:
            continue
        gap = own[here] - ours[here]
        worse = []
        for each in np.unique(models[here]):
            mine = gap[models[here] == each]
            error = mine.std(ddof=1) / np.sqrt(len(mine)) if len(mine) >= 15 else np.inf
            if mine.mean() < -2.33 * error:
                worse.append(str(each))
        out[f"{low}+"] = {
            "answers": int(here.sum()),
            "models": len(np.unique(models[here])),
            "gain": float(gap.mean() / own[here].mean()),
            "error": float(gap.std(ddof=1) / np.sqrt(here.sum()) / own[here].mean()),
            "worse": worse,
        }
    return out


def shift_recovery(
    model: LengthGbdt,
    answers: Answers,
    test: Ints,
    priors: dict[str, LengthDistribution],
    warm: dict[str, Ints],
    seed: int,
    factor: float = 1.6,
) -> dict[str, Any]:
    """Every answer becomes `factor` times longer at one moment; P90 coverage after it, per model.

    Reported: mean coverage of outcomes 0-99, 100-199, 200-299 after the shift, and the share of
    models whose outcomes 200-299 are back at 87 % (allowing two standard errors of 100 outcomes).
    """
    rng = np.random.default_rng(seed)
    inside: list[Bools] = []
    for name in list(warm)[:5]:
        mine = rng.permutation(test[answers.model[test] == name])
        if len(mine) < 100:
            continue
        # a long stream: the test answers again and again, shifted from the 200th on
        stream = rng.choice(mine, 500)
        numbered = answers.take(stream)
        tokens = numbered.tokens.copy()
        tokens[200:] *= factor
        result = run(
            model,
            numbered,
            np.arange(500),
            priors,
            {},
            tokens=tokens,
            shuffle=False,
        )
        inside.append((result.rank <= result.level)[200:])
    if not inside:
        return {}
    table = np.array(inside, np.float64)
    thirds = table.reshape(len(table), 3, 100).mean(2)
    slack = 2.0 * np.sqrt(0.9 * 0.1 / 100.0)
    return {
        "models": len(table),
        "coverage_by_hundred": thirds.mean(0).tolist(),
        "recovered": float((thirds[:, 2] >= 0.87 - slack).mean()),
    }


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """`report.json` and a page with the tables and the reliability curve."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    columns = (
        "answers",
        "models",
        "tau",
        "tau_ceiling",
        "tau_share",
        "crps_own",
        "crps",
        "crps_gain",
        "crps_gain_ceiling",
        "crps_share",
    )
    lines = ["<tr><th>set</th>" + "".join(f"<th>{c}</th>" for c in columns) + "<th>P90</th></tr>"]
    for name, entry in report["sets"].items():
        cells = "".join(f"<td>{_cell(entry.get(c))}</td>" for c in columns)
        covered = _cell(entry["coverage"]["pooled"])
        lines.append(f"<tr><th>{html.escape(name)}</th>{cells}<td>{covered}</td></tr>")
    points = " ".join(
        f"{20 + 300 * q:.0f},{320 - 300 * share:.0f}"
        for q, share in zip(np.arange(0.05, 1.0, 0.05), report["reliability"], strict=True)
    )
    page = f"""<!doctype html><meta charset="utf-8"><title>Length model</title>
<style>body{{font:15px system-ui;margin:2em;max-width:70em}}
td,th{{padding:.2em .7em;text-align:right}}tr+tr{{border-top:1px solid #ccc}}
table{{border-collapse:collapse}}pre{{white-space:pre-wrap}}</style>
<h1>Length model</h1>
<p>tau: Kendall's tau within a model; ceiling: the other models' lengths on the same prompt. crps in
tokens; gain over the model's own running distribution.</p>
<table>{"".join(lines)}</table>
<h2>Reliability</h2><p>Share of answers at or below the predicted quantile (before the conformal
correction).</p>
<svg width="340" height="340" role="img" aria-label="reliability curve"><path d="M20 320L320 20"
stroke="#bbb"/><polyline points="{points}" fill="none" stroke="#06c" stroke-width="2"/></svg>
<h2>Everything</h2><pre>{html.escape(json.dumps(report, indent=1))}</pre>
"""
    (folder / "report.html").write_text(page)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else html.escape(str(value))
