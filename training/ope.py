"""What another policy would have done, from a decision log: off-policy estimates with intervals.

Every line holds the chosen route's probability (`propensity`) and what was known of the candidates.
A target policy is weighed by how often exploration took the route that it would have taken. Four
estimators, since each fails differently:

    IPS     mean of w r, w = target / logged probability: unbiased, wide
    SNIPS   sum of w r / sum of w: narrower, slightly biased
    DR      a model of r for the target's route, put right by w (r - model): IPS's honesty, narrow
            where the model is good
    SWITCH  DR without the corrections whose w is beyond a threshold, chosen for the least sum of
            variance and worst squared bias; its interval does not hold that bias

Intervals are percentiles of a bootstrap over blocks of consecutive requests, since neighbours share
their load. An estimate is refused below an effective sample size of 100, where the weights do not
average to one (then the target takes routes that exploration never took), and where the target
parts from the log on requests of which too few explored lines tell: a policy that differs on one
request in thirty has an effective sample size near the whole log's, and rests on three lines.

What no weighting repairs: a route's latency depends on what else was sent there, so another policy
would have met another queue. Estimates of latency and of met limits carry that warning
(`interferes`); for them replay the trace in the simulator, or switch policies back and forth live.

Sources: Horvitz and Thompson, 1952 (IPS); Swaminathan and Joachims, 2015 (SNIPS); Dudik, Langford
and Li, "Doubly robust policy evaluation and learning", 2011; Wang, Agarwal and Dudik, "Optimal and
adaptive off-policy evaluation in contextual bandits", 2017 (SWITCH); Kong, 1992 (effective sample
size); Kunsch, 1989 (blocks).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from domain.errors import ConfigError
from policies.names import LOGGED, MOST_SHARE, TRAITS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Record = Mapping[str, Any]

RANDOM = frozenset({"random", "power_of_two", "bandit"})
"""Policies that read the draws: their propensity is conditional on them and cannot be used."""
INTERFERES = frozenset({"met", "ttft", "e2e"})
"""Rewards that depend on what else was sent to the route."""
LEAST_ESS = 100.0
LEAST_EXPLORED = 30
"""Lines of an explored route that the target would have taken; with fewer a bootstrap does not see
how far off they may be. Chosen on made-up logs, not on those that docs/ope.md reports."""
BLOCKS = 400
OUTPUT_WEIGHT = 5.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Log:
    """n decisions that can be used, at most K candidates each.

    `traits` (n, K, len(LOGGED)); `there` (n, K) where there is a candidate; `chosen` (n,) its place
    (0: the logs put it first); `propensity` (n,); `rewards` by name, (n,); `routes` (n, K) names,
    `policy` (n,) who decided.
    `left_out` counts lines by why they cannot be used.
    """

    traits: Floats
    there: Bools
    propensity: Floats
    rewards: Mapping[str, Floats]
    routes: NDArray[np.str_]
    policy: NDArray[np.str_]
    left_out: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.propensity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One estimator's answer for one reward, 95 % interval; or why there is none."""

    reward: str
    method: str
    value: float
    low: float
    high: float
    ess: float
    mean_weight: float
    requests: int
    refused: str | None = None
    interferes: bool = False


def read(
    paths: Iterable[Path],
    prices: Mapping[str, float] | None = None,
    *,
    explored_only: bool = True,
) -> Log:
    """The usable decisions of decision-log files. Raises: ConfigError for a line that is none."""

    def records() -> Iterable[Record]:
        for path in paths:
            with path.open() as lines:
                for number, line in enumerate(lines, 1):
                    try:
                        yield json.loads(line)
                    except ValueError as exc:
                        raise ConfigError(f"{path}:{number}: no decision record ({exc})") from exc

    return collect(records(), prices, explored_only=explored_only)


def collect(
    records: Iterable[Record],
    prices: Mapping[str, float] | None = None,
    *,
    explored_only: bool = True,
) -> Log:
    """The usable decisions among records of the decision log.

    `prices` by replica, per 1,000 tokens of work (prompt + 5 x output), add the reward `cost`; a
    record may bring rewards of its own under `rewards`. Left out: what was never sent or says
    nothing, retries, policies that read the draws, and (`explored_only`) classes that were never
    explored on.
    """
    rows, left_out = [], {"not sent": 0, "retried": 0, "random policy": 0, "never explored": 0}
    explored: set[tuple[str, str]] = set()
    for record in records:
        if "feedback_to" in record:
            continue
        outcome = record["outcome"]
        if record["route"] is None or not record["candidates"] or outcome["met"] is None:
            left_out["not sent"] += 1
        elif record["attempts"] > 1:
            left_out["retried"] += 1
        elif record["policy"] in RANDOM:
            left_out["random policy"] += 1
        else:
            rows.append(record)
            if record["propensity"] < 1.0:
                explored.add((record["version"], record["class"]))
    kept = rows
    if explored_only:
        kept = [r for r in rows if (r["version"], r["class"]) in explored]
    left_out["never explored"] = len(rows) - len(kept)
    most = max((len(r["candidates"]) for r in kept), default=1)
    n = len(kept)
    traits, there = np.zeros((n, most, len(LOGGED))), np.zeros((n, most), np.bool_)
    routes = np.full((n, most), "", dtype=object)
    for i, record in enumerate(kept):
        count = len(record["candidates"])
        traits[i, :count] = traits_of_line(record)
        there[i, :count] = True
        routes[i, :count] = [c["route"] for c in record["candidates"]]
    return Log(
        traits=traits,
        there=there,
        propensity=np.array([r["propensity"] for r in kept], np.float64),
        rewards=_rewards(kept, prices),
        routes=routes.astype(np.str_),
        policy=np.array([r["policy"] for r in kept], np.str_),
        left_out={why: count for why, count in left_out.items() if count},
    )


def traits_of_line(record: Record) -> Floats:
    """The logged traits of a line's candidates (k, len(LOGGED)), as `policies.traits` computes
    them.
    """
    found = record["candidates"]
    p_slo, quality, ttft, tpot = (
        np.array([c[name] for c in found], np.float64)
        for name in ("p_slo", "quality", "ttft", "tpot")
    )
    ttft = ttft + record["outcome"]["sent"]
    e2e = ttft + max(record["predicted"]["length_mean"] - 1.0, 0.0) * tpot
    slo, stream = record["slo"], record["stream"]
    limits = [
        slo["ttft"] if slo["ttft"] is not None and stream else inf,
        slo["tpot"] if slo["tpot"] is not None and stream else inf,
        slo["e2e"] if slo["e2e"] is not None else inf,
    ]
    shares = [
        np.minimum(value / limit, MOST_SHARE)
        for value, limit in zip((ttft, tpot, e2e), limits, strict=True)
    ]
    rows = [np.ones(len(found)), p_slo, quality, *shares, np.log1p(ttft), np.log1p(e2e)]
    return np.stack(rows, axis=1)


def _rewards(kept: Sequence[Record], prices: Mapping[str, float] | None) -> dict[str, Floats]:
    def column(value: Any) -> Floats:
        return np.array([value(r) for r in kept], np.float64)

    rewards = {
        "met": column(lambda r: float(r["outcome"]["met"])),
        "quality": column(lambda r: r["predicted"]["quality"]),
        "e2e": column(lambda r: r["outcome"]["e2e"]),
    }
    if prices is not None:
        missing = {r["replica"] for r in kept} - set(prices)
        if missing:
            raise ConfigError(f"no price for {', '.join(sorted(missing))}")
        rewards["cost"] = column(lambda r: prices[r["replica"]] * _work(r) / 1000.0)
    own = {name for r in kept for name in r.get("rewards", ())}
    for name in sorted(own):
        rewards[name] = column(lambda r, name=name: r["rewards"][name])
    return rewards


def _work(record: Record) -> float:
    outcome = record["outcome"]
    prompt = outcome["prompt_tokens"] or record["prompt_tokens"]
    return float(prompt + OUTPUT_WEIGHT * outcome["completion_tokens"])


def linear_target(log: Log, weights: Mapping[str, float], within: float = 2.0) -> Ints:
    """The place of the candidate that the `linear` policy with these weights takes, (n,).

    Raises: ConfigError for a trait that the log does not hold of every candidate.
    """
    unknown = set(weights) - set(LOGGED)
    if unknown & set(TRAITS):
        raise ConfigError(
            f"{', '.join(sorted(unknown))}: logged of the chosen route only; compare such a policy "
            "in the simulator (sluice simulate), or run it in shadow"
        )
    if unknown:
        raise ConfigError(f"unknown trait {sorted(unknown)}; known: {', '.join(LOGGED)}")
    vector = np.array([weights.get(name, 0.0) for name in LOGGED])
    score = np.where(log.there, log.traits @ vector, -inf)
    p_slo = np.where(log.there, log.traits[:, :, 1], -inf)
    near = p_slo >= p_slo.max(axis=1, keepdims=True) - within
    taken: Ints = np.where(near, score, -inf).argmax(axis=1)
    return taken


def evaluate(
    log: Log,
    target: Ints,
    reward: str,
    *,
    switch: float | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> list[Estimate]:
    """All four estimates of the mean reward under a policy that takes `target` (n,). `switch` is
    SWITCH's threshold; None chooses it.

    Raises: ConfigError for a reward that the log does not hold.
    """
    if reward not in log.rewards:
        raise ConfigError(f"no reward {reward!r}; known: {', '.join(sorted(log.rewards))}")
    n, r = len(log), log.rewards[reward]
    if n == 0:
        return [_refusal(reward, m, "no usable decision in the log") for m in _METHODS]
    w = (target == 0) / log.propensity
    total = float(w.sum())
    ess = total**2 / float((w**2).sum()) if total else 0.0
    spread = float(w.std() / np.sqrt(n))
    mean = float(w.mean())
    refused = None
    if ess < LEAST_ESS:
        refused = f"evidence is thin: effective sample size {ess:.0f} is below {LEAST_ESS:.0f}"
    elif parted(log, target) and explored(log, target) < LEAST_EXPLORED:
        refused = (
            f"evidence is thin: the policies part on {parted(log, target)} of {n} requests, of "
            f"which {explored(log, target)} explored lines tell, fewer than {LEAST_EXPLORED}; log "
            "more requests or explore more"
        )
    elif abs(mean - 1.0) > 0.05 + 3.0 * spread:
        refused = (
            f"weights average to {mean:.2f}, not 1: the target takes routes that were never "
            "explored, or that the log leaves out"
        )
    model = _model(log, r)
    if not total:
        return [_refusal(reward, m, refused or "the target agrees with no line") for m in _METHODS]
    rows = np.arange(n)
    there, here = model[rows, target], model[:, 0]
    bound = _threshold(w, there, r - here, r) if switch is None else switch
    terms = {
        "ips": (w * r, np.ones(n)),
        "snips": (w * r, w),
        "dr": (there + w * (r - here), np.ones(n)),
        "switch": (there + np.where(w <= bound, w, 0.0) * (r - here), np.ones(n)),
    }
    rng = np.random.default_rng(seed)
    blocks = min(n, BLOCKS)
    edges = np.linspace(0, n, blocks + 1).astype(np.int64)[:-1]
    drawn = rng.multinomial(blocks, np.full(blocks, 1.0 / blocks), resamples)
    estimates = []
    for method, (top, bottom) in terms.items():
        tops, bottoms = np.add.reduceat(top, edges), np.add.reduceat(bottom, edges)
        with np.errstate(invalid="ignore", divide="ignore"):
            again = (drawn @ tops) / (drawn @ bottoms)
        low, high = np.nanquantile(again, [0.025, 0.975]) if np.isfinite(again).any() else (0, 0)
        estimates.append(
            Estimate(
                reward=reward,
                method=method,
                value=float(tops.sum() / bottoms.sum()) if bottoms.sum() else float("nan"),
                low=float(low),
                high=float(high),
                ess=ess,
                mean_weight=mean,
                requests=n,
                refused=refused,
                interferes=reward in INTERFERES,
            )
        )
    return estimates


_METHODS = ("ips", "snips", "dr", "switch")


def explored(log: Log, target: Ints) -> int:
    """Lines in which exploration took another route than the log's policy, and the target's."""
    return int(((target == 0) & (log.propensity < 0.5)).sum())


def parted(log: Log, target: Ints) -> int:
    """Lines in which the target takes another route than the log's policy, as far as they show it:
    where exploration decided, one that the target takes as well.
    """
    return int(((target != 0) & (log.propensity >= 0.5)).sum()) + explored(log, target)


def _refusal(reward: str, method: str, why: str) -> Estimate:
    nan = float("nan")
    return Estimate(
        reward=reward, method=method, value=nan, low=nan, high=nan, ess=0.0, mean_weight=nan,
        requests=0, refused=why, interferes=reward in INTERFERES,
    )  # fmt: skip


def _threshold(w: Floats, there: Floats, residual: Floats, r: Floats) -> float:
    """The bound on w with the least variance + (bias bound)^2; the bias of leaving corrections out
    is at most the reward's range times the target's share of what is left out (Wang et al.).
    """
    n, extent = len(w), float(np.ptp(r))
    best, least = inf, inf
    for bound in [*np.unique(np.quantile(w[w > 0], np.linspace(0, 1, 9))).tolist(), inf]:
        kept = w <= bound
        variance = float((there + np.where(kept, w, 0.0) * residual).var()) / n
        bias = extent * float(np.where(kept, 0.0, w).mean())
        if variance + bias**2 < least:
            best, least = bound, variance + bias**2
    return best


def _model(log: Log, r: Floats) -> Floats:
    """What ridge regression on the traits expects of every candidate, (n, K); each half of the log
    is predicted by a fit on the other.
    """
    n, most, d = log.traits.shape
    out = np.zeros((n, most))
    fold = np.arange(n) * 10 // max(n, 1) % 2  # ten stretches of time, in turn
    for side in (0, 1):
        fit, use = fold != side, fold == side
        x = log.traits[fit, 0]
        if not len(x):
            continue
        mean, scale = x.mean(axis=0), x.std(axis=0)
        scale = np.where(scale > 1e-12, scale, inf)  # constants weigh nothing beside the mean
        z = (x - mean) / scale
        theta = np.linalg.solve(z.T @ z + np.eye(d), z.T @ (r[fit] - r[fit].mean()))
        out[use] = r[fit].mean() + ((log.traits[use] - mean) / scale) @ theta
    return out
