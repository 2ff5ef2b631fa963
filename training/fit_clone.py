"""Behaviour cloning: a decision log becomes a `linear` policy of eight weights, in the registry.

    python -m training.fit_clone .sluice/decisions.jsonl --name clone [--registry FOLDER]

A conditional logit (McFadden, 1974): P(candidate c is taken) = softmax over the candidates of
w . traits, fitted by Newton steps on the log-likelihood with a small ridge. The last 30 % of it
judge it: how often its first choice is the one that was taken, beside the best single trait. What
is written is an entry of the registry with its card and the ranges of the traits seen, outside of
which best-fit decides. It imitates; it does not improve on what it saw.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from domain.errors import ConfigError
from policies import registry
from policies.config import LinearPolicy
from policies.names import LOGGED
from training.ope import Floats, Log, read

RIDGE = 1e-3
STEPS = 25
LEAST = 200
"""Decisions with a choice below which nothing is fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clone:
    """Weights by trait, and on the last part of the log: the share of decisions in which the clone
    and the best single trait take what was taken; `chance` is what a lot would reach.
    """

    weights: dict[str, float]
    agreement: float
    single: float
    single_trait: str
    chance: float
    decisions: int


def clone(log: Log, held_out: float = 0.3) -> Clone:
    """Fit on the first part of a log, judge on the last.

    Raises: ConfigError with fewer than `LEAST` decisions that had a choice.
    """
    choices = np.flatnonzero(log.there.sum(axis=1) > 1)
    if len(choices) < LEAST:
        raise ConfigError(f"{len(choices)} decisions had a choice; {LEAST} are needed")
    cut = int((1.0 - held_out) * len(choices))
    fit, test = choices[:cut], choices[cut:]
    weights = _newton(log.traits[fit], log.there[fit])
    x, there = log.traits[test], log.there[test]
    singles = {
        (name, sign): _first(x[:, :, k] * sign, there)
        for k, name in enumerate(LOGGED)
        for sign in (1.0, -1.0)
    }
    (name, sign), single = max(singles.items(), key=lambda item: item[1])
    return Clone(
        weights={name: float(w) for name, w in zip(LOGGED, weights, strict=True) if w != 0.0},
        agreement=_first(x @ weights, there),
        single=single,
        single_trait=f"{'most' if sign > 0 else 'least'} {name}",
        chance=float((1.0 / there.sum(axis=1)).mean()),
        decisions=len(choices),
    )


def _first(score: Floats, there: Any) -> float:
    """Share of decisions in which the first choice is candidate 0; what ties for it counts its
    share.
    """
    score = np.where(there, score, -inf)
    best = score == score.max(axis=1, keepdims=True)
    return float((best[:, 0] / best.sum(axis=1)).mean())


def _newton(x: Floats, there: Any) -> Floats:
    """Weights (D,) that make candidate 0 of every decision likeliest; traits are scaled by how much
    they differ between the candidates of a decision.
    """
    count = there.sum(axis=1)
    mean = (x * there[:, :, None]).sum(axis=1) / count[:, None]
    z = np.where(there[:, :, None], x - mean[:, None, :], 0.0)
    scale = np.sqrt((z**2).sum(axis=(0, 1)) / count.sum())
    varies = scale > 1e-9
    z = z[:, :, varies] / scale[varies]
    w = np.zeros(int(varies.sum()))
    n = len(z)

    def loss(v: Floats) -> float:
        score = np.where(there, z @ v, -inf)
        top = score.max(axis=1)
        total = top + np.log(np.exp(score - top[:, None]).sum(axis=1))
        return float((total - score[:, 0]).mean() + RIDGE * (v @ v) / 2.0)

    for _ in range(STEPS):
        score = np.where(there, z @ w, -inf)
        p = np.exp(score - score.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        expected = np.einsum("nk,nkd->nd", p, z)
        slope = (z[:, 0] - expected).mean(axis=0) - RIDGE * w
        bend = np.einsum("nk,nkd,nke->de", p, z, z) / n - expected.T @ expected / n
        step = np.linalg.solve(bend + RIDGE * np.eye(len(w)), slope)
        size, now = 1.0, loss(w)
        while size > 1e-4 and loss(w + size * step) > now:
            size /= 2.0
        w = w + size * step
        if np.abs(size * step).max() < 1e-8:
            break
    weights: Floats = np.zeros(x.shape[2])
    weights[varies] = w / scale[varies]
    return weights


def entry(name: str, log: Log, fitted: Clone, source: str) -> registry.Entry:
    """The clone as an entry of the registry."""
    seen = log.traits[log.there]
    ranges = {
        trait: (float(seen[:, k].min()), float(seen[:, k].max())) for k, trait in enumerate(LOGGED)
    }
    policy = LinearPolicy.model_validate(
        {"kind": "linear", "weights": fitted.weights, "envelope": ranges}
    )
    card = {
        "job": "training.fit_clone",
        "source": source,
        "decisions": fitted.decisions,
        "agreement": fitted.agreement,
        "best single trait": f"{fitted.single_trait}: {fitted.single:.4f}",
        "chance": fitted.chance,
    }
    return registry.entry_of(name, policy, card)


def main() -> None:
    """Read, fit, judge, write."""
    parser = argparse.ArgumentParser(description="clone a decision log into a linear policy")
    parser.add_argument("log", type=Path, nargs="+")
    parser.add_argument("--name", required=True)
    parser.add_argument("--registry", type=Path, default=Path(".sluice/policies"))
    parser.add_argument("--policy", help="learn only from this policy's decisions")
    args = parser.parse_args()
    log = read(args.log, explored_only=False)
    if args.policy:
        mine = log.policy == args.policy
        log = replace(
            log,
            traits=log.traits[mine],
            there=log.there[mine],
            propensity=log.propensity[mine],
            rewards={name: r[mine] for name, r in log.rewards.items()},
            routes=log.routes[mine],
            policy=log.policy[mine],
        )
    fitted = clone(log)
    path = registry.write_entry(
        args.registry, entry(args.name, log, fitted, ", ".join(map(str, args.log)))
    )
    print(
        f"{fitted.decisions} decisions; takes what was taken in {100 * fitted.agreement:.1f} % "
        f"({fitted.single_trait}: {100 * fitted.single:.1f} %, by lot "
        f"{100 * fitted.chance:.1f} %); {path}"
    )


if __name__ == "__main__":
    main()
