"""Fitting a profile to measured steps: the constants of `domain.fleet.Profile`'s step time.

The fit minimises a robust loss of log(predicted / measured), so that a step of 2 ms and one of 2 s
weigh the same; the constants are fitted as logarithms and so cannot be negative. A family is
everything measured for one key (GPU, engine, model, precision, layout). What a fit is worth is told
on *shapes* it has not seen: a shape (batch, context, new tokens) is left out of every family by one
draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from domain.errors import ConfigError
from domain.fleet import Profile, ProfileKey

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ROBUST = 0.07
"""Log error from which on the loss grows linearly: past the bar's median, a step is an outlier."""
MEDIAN_BAR, P90_BAR, FAMILIES_BAR = 0.07, 0.20, 0.85
"""A family is good where median and 90th percentile of its relative error on left-out shapes are
within the first two; a set of tables where that share of its families is."""
LEAST = 8
"""Fewest steps a fit is made of: as many as there are constants."""
_FLOOR, _CEILING = -46.0, 14.0
"""Bounds on the logs: 1e-20 s is no time at all, 1e6 tokens as good as never."""


class Steps(NamedTuple):
    """Measured forward steps, (n,) each: what `Profile`'s formula reads, and how long they took."""

    batch: Floats  # decoding sequences
    context: Floats  # their resident tokens, summed
    prefill: Floats  # new prompt tokens
    pairs: Floats  # sum of new * (cached + new / 2)
    seconds: Floats


def take(steps: Steps, chosen: Bools) -> Steps:
    """The chosen steps."""
    return Steps(*(column[chosen] for column in steps))


class Constants(NamedTuple):
    """The fitted part of a profile, in its units."""

    overhead: float
    weights: float
    per_sequence: float
    per_context: float
    per_token: float
    per_attention: float
    experts: float
    expert_tokens: float


def step_seconds(constants: Constants | Profile, steps: Steps) -> Floats:
    """Seconds of each step by the formula of `domain.fleet.Profile`."""
    c = constants
    tokens = steps.batch + steps.prefill
    memory = c.weights + c.per_context * steps.context
    compute = c.per_token * tokens + c.per_attention * steps.pairs
    touched = c.experts * tokens / (tokens + c.expert_tokens)
    out: Floats = c.overhead + c.per_sequence * steps.batch + touched + np.maximum(memory, compute)
    return out


def _residual(logs: Floats, steps: Steps) -> tuple[Floats, Floats]:
    """log(predicted / measured) (n,) and its derivatives by the logs of the constants (n, 8)."""
    c = Constants(*np.exp(logs).tolist())
    tokens = steps.batch + steps.prefill
    memory = c.weights + c.per_context * steps.context
    compute = c.per_token * tokens + c.per_attention * steps.pairs
    share = tokens / (tokens + c.expert_tokens)
    bound = memory >= compute
    seconds = (
        c.overhead
        + c.per_sequence * steps.batch
        + c.experts * share
        + np.where(bound, memory, compute)
    )
    slopes = np.stack(
        [
            np.full(len(tokens), c.overhead),
            c.weights * bound,
            c.per_sequence * steps.batch,
            c.per_context * steps.context * bound,
            c.per_token * tokens * ~bound,
            c.per_attention * steps.pairs * ~bound,
            c.experts * share,
            -c.experts * share * c.expert_tokens / (tokens + c.expert_tokens),
        ],
        axis=1,
    )
    return np.log(seconds / steps.seconds), slopes / seconds[:, None]


def fit_steps(
    steps: Steps, *, experts: bool = True, start: Constants | None = None, where: str = "the table"
) -> Constants:
    """The constants that fit the steps best; `experts` False leaves that term out.

    A constant that no step depends on comes out as 0. Starts from several splits of the shortest
    step into its parts, or from `start` alone; deterministic.
    Raises: ConfigError naming `where` for too few steps, or ones that are no positive finite time.
    """
    if len(steps.seconds) < LEAST:
        raise ConfigError(f"{where}: {len(steps.seconds)} steps; a fit needs at least {LEAST}")
    for name, column in zip(Steps._fields, steps, strict=True):
        bad = np.flatnonzero(~np.isfinite(column) | (column < 0))
        if len(bad):
            raise ConfigError(f"{where}: {name} of step {bad[0]} is {column[bad[0]]}; 0 or more")
    if not np.all(steps.seconds > 0):
        raise ConfigError(f"{where}: step {int(np.argmin(steps.seconds))} took no time")
    free = np.array(
        [True, True]
        + [bool(np.any(c > 0)) for c in (steps.batch, steps.context)]
        + [True, bool(np.any(steps.pairs > 0)), experts, experts]
    )
    starts = _starts(steps, experts=experts) if start is None else [start]
    best: tuple[float, Floats] | None = None
    for guess in starts:
        cost, logs = _descend(np.log(np.maximum(guess, 1e-20)), steps, free)
        if best is None or cost < best[0]:
            best = cost, logs
    assert best is not None
    found = Constants(*np.exp(best[1]).tolist())
    told = Constants(*np.where(free & (np.array(found) > 1e-15), found, 0.0).tolist())
    return told._replace(
        per_token=max(told.per_token, 1e-12),
        expert_tokens=max(told.expert_tokens, 1e-6) if experts else 1.0,
    )


def _starts(steps: Steps, *, experts: bool) -> list[Constants]:
    """Guesses: the largest steps tell the slopes, the shortest what is fixed."""
    least = float(steps.seconds.min())
    tokens = steps.batch + steps.prefill
    most = int(np.argmax(tokens))
    per_token = 0.7 * float(steps.seconds[most] / tokens[most])
    pairs = int(np.argmax(steps.pairs))
    attention = 0.3 * float(steps.seconds[pairs] / max(steps.pairs[pairs], 1.0))
    far = int(np.argmax(steps.context))
    slope = max(float(steps.seconds[far]) - least, 1e-9) / max(float(steps.context[far]), 1.0)
    splits = [(0.1, 0.0, 1.0), (0.5, 0.0, 1.0)]
    if experts:
        splits = [(0.5, 0.5, 100.0), (0.5, 3.0, 20.0), (0.3, 10.0, 50.0), (0.3, 1.0, 1000.0)]
    return [
        Constants(
            share * least,
            (1 - share) * least,
            1e-5,
            slope,
            per_token,
            attention,
            read * least,
            half,
        )
        for share, read, half in splits
    ]


def _descend(logs: Floats, steps: Steps, free: Bools) -> tuple[float, Floats]:
    """(cost, logs) of the minimum that robust least squares finds from here over the free ones."""
    from scipy.optimize import least_squares

    fixed = np.where(free, logs, _FLOOR)
    fixed[-1] = logs[-1]

    def whole(part: Floats) -> Floats:
        out = fixed.copy()
        out[free] = part
        return out

    found = least_squares(
        lambda part: _residual(whole(part), steps)[0],
        np.clip(logs[free], _FLOOR, _CEILING),
        jac=lambda part: _residual(whole(part), steps)[1][:, free],
        bounds=(_FLOOR - 1e-6, _CEILING + 1e-6),
        loss="soft_l1",
        f_scale=ROBUST,
        max_nfev=80,
    )
    return float(found.cost), whole(found.x)


# ---- left-out shapes


def left_out(shapes: Iterable[Sequence[float]], seed: int, share: float) -> Bools:
    """Which shapes a fit may not see: a fixed draw by the hash of shape and seed, so that one shape
    is left out of every family at once.
    """
    limit = int(share * 2**32)
    out = []
    for shape in shapes:
        word = ",".join(f"{x:g}" for x in (seed, *shape)).encode()
        out.append(int.from_bytes(blake2b(word, digest_size=4).digest(), "big") < limit)
    return np.array(out, np.bool_)


class Residual(NamedTuple):
    """Relative errors |predicted / measured - 1| over some steps."""

    median: float
    p90: float
    steps: int

    @property
    def good(self) -> bool:
        """Whether it is within the bar."""
        return self.median <= MEDIAN_BAR and self.p90 <= P90_BAR


def residual(predicted: Floats, measured: Floats) -> Residual:
    """How far predictions are off. Raises: ValueError for no steps."""
    if not len(measured):
        raise ValueError("no steps to compare")
    error = np.abs(predicted / measured - 1.0)
    return Residual(float(np.median(error)), float(np.quantile(error, 0.9)), len(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Steps of one key, the shape of each (n, any), and what is known of the replica's limits."""

    name: str
    key: ProfileKey
    steps: Steps
    shapes: Floats
    experts: bool = True
    limits: dict[str, float] = field(default_factory=dict)
    """Fields of `Profile` that steps do not tell: kv_capacity, max_context, power, ..."""
    known: dict[str, float] = field(default_factory=dict)
    """Constants that these steps cannot tell, by physics instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A family's profile from all its steps; `unseen` is the error on left-out shapes of a fit that
    never saw them.
    """

    name: str
    profile: Profile
    unseen: Residual
    seen: Residual


def fit_family(family: Family, *, seed: int = 1, share: float = 0.25) -> Fitted:
    """Fit without the left-out shapes, judge on them, then fit all for the profile.

    Raises: ConfigError naming the family where steps are too few or bad.
    """
    out = left_out(family.shapes.tolist(), seed, share)
    if not out.any() or out.all():
        raise ConfigError(f"{family.name}: {share:.0%} of its shapes are none or all of them")
    part = fit_steps(take(family.steps, ~out), experts=family.experts, where=family.name)
    hidden = take(family.steps, out)
    unseen = residual(step_seconds(part, hidden), hidden.seconds)
    every = fit_steps(family.steps, experts=family.experts, start=part, where=family.name)
    seen = residual(step_seconds(every, family.steps), family.steps.seconds)
    profile = as_profile(every, family.key, {**family.limits, **family.known}, unseen)
    return Fitted(name=family.name, profile=profile, unseen=unseen, seen=seen)


def as_profile(
    constants: Constants, key: ProfileKey, others: dict[str, float], unseen: Residual
) -> Profile:
    """A profile of fitted constants; `others` win. Its uncertainty is the spread of log errors that
    the left-out steps showed, at least 5 %.
    """
    whole = {"chunk", "max_seqs", "max_context"}
    fields = {**constants._asdict(), **others}
    fields.setdefault("uncertainty", max(0.05, math.log1p(unseen.p90) / 1.645))
    return Profile(key=key, **{k: int(v) if k in whole else float(v) for k, v in fields.items()})  # type: ignore[arg-type]


def fit_families(
    families: Sequence[Family],
    *,
    seed: int = 1,
    share: float = 0.25,
    progress: Callable[[Sequence[Family]], Iterable[Family]] = iter,
) -> list[Fitted]:
    """Every family, fitted; `progress` wraps the loop."""
    return [fit_family(family, seed=seed, share=share) for family in progress(families)]
