"""Workloads as columns: when requests come, how long they are, who sends them, what they share.

A `Trace` is one frozen value; every transformation gives another. The files are read by
`training.trace_sources`; nothing here needs more than numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_PER_REQUEST = (
    "arrival", "prompt", "output", "class_id", "tenant_id", "session", "follows", "think",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """n requests in order of arrival.

    `arrival` in seconds from the start; a request with a predecessor (`follows[i] != i`) comes
    `think[i]` seconds after that one has ended, and its `arrival` is only what the source recorded.
    `prompt` and `output` in tokens. `class_id` and `tenant_id` index `classes` and `tenants`;
    requests of one session share a `session` number. Request i's prompt begins with the blocks
    `blocks[block_start[i]:block_start[i + 1]]` of `block_tokens` tokens each (the last may be
    partial); equal numbers mean equal prefixes up to and including that block.
    Raises: ValueError where the columns do not fit together.
    """

    arrival: Floats
    prompt: Ints
    output: Ints
    class_id: Ints
    tenant_id: Ints
    session: Ints
    follows: Ints
    think: Floats
    block_start: Ints
    blocks: Ints
    block_tokens: float = 512.0
    classes: tuple[str, ...] = ("standard",)
    tenants: tuple[str, ...] = ("default",)

    def __post_init__(self) -> None:
        n = len(self.arrival)
        for name in _PER_REQUEST:
            column = getattr(self, name)
            if column.shape != (n,):
                raise ValueError(f"column {name} must have shape ({n},), not {column.shape}")
        if self.block_start.shape != (n + 1,) or self.block_start[-1] != len(self.blocks):
            raise ValueError("block_start must have n + 1 entries and end at len(blocks)")
        if n and np.any(np.diff(self.arrival) < 0):
            raise ValueError("arrivals must not go back in time")
        if n and (self.prompt.min() < 1 or self.output.min() < 1):
            raise ValueError("every request needs at least one prompt and one output token")
        if np.any(self.follows > np.arange(n)):
            raise ValueError("a request may only follow an earlier one")
        for name in (*_PER_REQUEST, "block_start", "blocks"):
            getattr(self, name).setflags(write=False)

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def duration(self) -> float:
        """Seconds from the first to the last arrival."""
        return float(self.arrival[-1] - self.arrival[0]) if len(self) else 0.0

    @property
    def rate(self) -> float:
        """Mean arrivals per second."""
        return (len(self) - 1) / self.duration if self.duration > 0 else 0.0

    @property
    def roots(self) -> NDArray[np.bool_]:
        """(n,) requests that wait for no other."""
        return np.equal(self.follows, np.arange(len(self)))

    def blocks_of(self, i: int) -> Ints:
        """Prefix blocks of request i."""
        return self.blocks[self.block_start[i] : self.block_start[i + 1]]


def trace(
    arrival: Floats,
    prompt: NDArray[np.generic],
    output: NDArray[np.generic],
    *,
    session: Ints | None = None,
    tenant_id: Ints | None = None,
    tenants: tuple[str, ...] = ("default",),
    follows: Ints | None = None,
    think: Floats | None = None,
    blocks: Sequence[Sequence[int]] | None = None,
    block_tokens: float = 512.0,
) -> Trace:
    """A trace from its columns, sorted by arrival; lengths below one token count as one.

    What is left out means: one class, one tenant, every request its own session, nothing shared.
    `follows` indexes the rows as given.
    """
    n = len(arrival)
    order = np.argsort(arrival, kind="stable")
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)
    rows = [[] if blocks is None else list(blocks[i]) for i in order]
    return Trace(
        arrival=np.asarray(arrival, np.float64)[order],
        prompt=np.maximum(np.asarray(prompt)[order].astype(np.int64), 1),
        output=np.maximum(np.asarray(output)[order].astype(np.int64), 1),
        class_id=np.zeros(n, np.int64),
        tenant_id=np.zeros(n, np.int64) if tenant_id is None else tenant_id[order].astype(np.int64),
        session=np.arange(n) if session is None else session[order].astype(np.int64),
        follows=np.arange(n) if follows is None else place[follows[order]],
        think=np.zeros(n) if think is None else np.asarray(think, np.float64)[order],
        block_start=np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64),
        blocks=np.array([b for row in rows for b in row], np.int64),
        block_tokens=block_tokens,
        tenants=tenants,
    )


_from_columns = trace  # where a parameter is called `trace`


# ---- choosing and joining rows


def rows(trace: Trace, keep: NDArray[np.generic]) -> Trace:
    """The rows `keep` (mask or ascending indices); one whose predecessor is left out becomes a
    root.
    """
    index = np.flatnonzero(keep) if keep.dtype == np.bool_ else keep.astype(np.int64)
    place = np.full(len(trace), -1, np.int64)
    place[index] = np.arange(len(index))
    follows = place[trace.follows[index]]
    sizes = np.diff(trace.block_start)[index]
    return replace(
        trace,
        **{name: getattr(trace, name)[index] for name in _PER_REQUEST if name != "follows"},
        follows=np.where(follows < 0, np.arange(len(index)), follows),
        block_start=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        blocks=np.concatenate([trace.blocks_of(i) for i in index] or [trace.blocks[:0]]),
    )


def between(trace: Trace, start: float, end: float) -> Trace:
    """Arrivals in [start, end) seconds, with `start` as the new zero."""
    cut = rows(trace, (trace.arrival >= start) & (trace.arrival < end))
    return replace(cut, arrival=cut.arrival - start)


def time_split(trace: Trace, share: float) -> tuple[Trace, Trace]:
    """First `share` of the rows by time, and the rest; a session that spans the cut is in both."""
    cut = round(share * len(trace))
    first, rest = rows(trace, np.arange(cut)), rows(trace, np.arange(cut, len(trace)))
    return first, replace(rest, arrival=rest.arrival - (rest.arrival[0] if len(rest) else 0.0))


def merged(traces: Sequence[Trace]) -> Trace:
    """All requests of several traces on one clock; sessions, tenants and blocks stay apart.

    Classes and tenants are joined by name. Raises: ValueError if block sizes differ where blocks
    exist.
    """
    sizes = {t.block_tokens for t in traces if len(t.blocks)}
    if len(sizes) > 1:
        raise ValueError(f"traces with prefix blocks of different sizes cannot be merged: {sizes}")
    classes = tuple(dict.fromkeys(c for t in traces for c in t.classes))
    tenants = tuple(dict.fromkeys(c for t in traces for c in t.tenants))
    first = np.cumsum([0, *(len(t) for t in traces)])
    sessions = np.cumsum([0, *(int(t.session.max(initial=-1)) + 1 for t in traces)])
    hashes = np.cumsum([0, *(int(t.blocks.max(initial=-1)) + 1 for t in traces)])
    order = np.argsort(np.concatenate([t.arrival for t in traces]), kind="stable")

    def joined(columns: list[NDArray[np.generic]]) -> NDArray[np.generic]:
        return np.concatenate(columns)[order]

    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    block_rows = [t.blocks_of(i) + hashes[k] for k, t in enumerate(traces) for i in range(len(t))]
    class_maps = [np.array([classes.index(c) for c in t.classes], np.int64) for t in traces]
    tenant_maps = [np.array([tenants.index(c) for c in t.tenants], np.int64) for t in traces]
    return Trace(
        arrival=joined([t.arrival for t in traces]),  # type: ignore[arg-type]
        prompt=joined([t.prompt for t in traces]),  # type: ignore[arg-type]
        output=joined([t.output for t in traces]),  # type: ignore[arg-type]
        class_id=joined([c[t.class_id] for t, c in zip(traces, class_maps, strict=True)]),  # type: ignore[arg-type]
        tenant_id=joined([c[t.tenant_id] for t, c in zip(traces, tenant_maps, strict=True)]),  # type: ignore[arg-type]
        session=joined([t.session + sessions[k] for k, t in enumerate(traces)]),  # type: ignore[arg-type]
        follows=place[joined([t.follows + first[k] for k, t in enumerate(traces)])],
        think=joined([t.think for t in traces]),  # type: ignore[arg-type]
        block_start=np.concatenate([[0], np.cumsum([len(block_rows[i]) for i in order])]).astype(
            np.int64
        ),
        blocks=np.concatenate([block_rows[i] for i in order] or [np.zeros(0, np.int64)]),
        block_tokens=sizes.pop() if sizes else 512.0,
        classes=classes,
        tenants=tenants,
    )


# ---- lengths


def scaled(
    trace: Trace,
    *,
    divide: float = 1.0,
    minimum: int = 8,
    max_prompt: int | None = None,
    max_output: int | None = None,
) -> Trace:
    """Lengths over `divide`, at least `minimum` where that cuts, at most the caps (tokens).

    Prefix blocks shrink by the same factor and end with the prompt. `divide` 1 leaves short
    requests as they are.
    """

    def length(tokens: Ints, cap: int | None) -> Ints:
        floor = np.minimum(tokens, minimum) if divide > 1 else np.ones_like(tokens)
        out = np.maximum(np.round(tokens / divide).astype(np.int64), floor)
        return np.maximum(out if cap is None else np.minimum(out, cap), 1)

    prompt = length(trace.prompt, max_prompt)
    size = trace.block_tokens / divide
    covered = np.minimum(np.diff(trace.block_start), np.ceil(prompt / size).astype(np.int64))
    inside = np.concatenate(
        [np.arange(s, s + k) for s, k in zip(trace.block_start[:-1], covered, strict=True)]
        or [np.zeros(0, np.int64)]
    ).astype(np.int64)
    return replace(
        trace,
        prompt=prompt,
        output=length(trace.output, max_output),
        block_tokens=size,
        block_start=np.concatenate([[0], np.cumsum(covered)]).astype(np.int64),
        blocks=trace.blocks[inside],
    )


def resampled(trace: Trace, arrival: Floats, rng: np.random.Generator) -> Trace:
    """Lengths, class and tenant of rows drawn with replacement, at other arrival times (s).

    Sessions and shared prefixes are dropped: rows drawn twice would share what was never shared.
    """
    n = len(arrival)
    pick = rng.integers(0, len(trace), n)
    return Trace(
        arrival=np.sort(np.asarray(arrival, np.float64)),
        prompt=trace.prompt[pick],
        output=trace.output[pick],
        class_id=trace.class_id[pick],
        tenant_id=trace.tenant_id[pick],
        session=np.arange(n),
        follows=np.arange(n),
        think=np.zeros(n),
        block_start=np.zeros(n + 1, np.int64),
        blocks=np.zeros(0, np.int64),
        block_tokens=trace.block_tokens,
        classes=trace.classes,
        tenants=trace.tenants,
    )


# ---- arrivals


def at_rate(trace: Trace, rate: float) -> Trace:
    """The same requests at `rate` per second: time is stretched, so burstiness (CV) is kept.

    Think times inside a session are the user's or the tool's and stay.
    """
    if not rate > 0 or trace.duration == 0:
        raise ValueError(f"rate must be above 0 requests/s on a trace that lasts, not {rate}")
    start = trace.arrival[0] if len(trace) else 0.0
    return replace(trace, arrival=(trace.arrival - start) * (trace.rate / rate))


def poisson(n: int, rate: float, rng: np.random.Generator) -> Floats:
    """(n,) arrival times in seconds of a Poisson stream."""
    return np.cumsum(rng.exponential(1.0 / rate, n))


def gamma_arrivals(n: int, rate: float, cv: float, rng: np.random.Generator) -> Floats:
    """(n,) arrival times of a renewal stream with gamma gaps of that coefficient of variation."""
    shape = 1.0 / cv**2
    return np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), n))


def renewal_window(
    family: str, shape: float, rate: float, seconds: float, rng: np.random.Generator
) -> Floats:
    """Arrivals in [0, seconds) of a stationary renewal stream of gamma or Weibull gaps with mean
    1/rate.

    The first gap is the residual of a length-biased one, so that a window of any length expects
    rate * seconds arrivals (Cox, "Renewal theory", 1962). Raises: ValueError for another family.
    """
    from math import gamma as gamma_function

    count = int(rate * seconds * 1.5) + 16
    if family == "Gamma":
        scale = 1.0 / (rate * shape)
        first = rng.gamma(shape + 1.0, scale)

        def draw(n: int) -> Floats:
            return rng.gamma(shape, scale, n)
    elif family == "Weibull":
        scale = 1.0 / (rate * gamma_function(1.0 + 1.0 / shape))
        first = scale * rng.gamma(1.0 + 1.0 / shape) ** (1.0 / shape)

        def draw(n: int) -> Floats:
            return scale * rng.weibull(shape, n)
    else:
        raise ValueError(f"unknown family of gaps {family!r}; known: Gamma, Weibull")
    at = np.array([first * rng.random()])
    while at[-1] < seconds:
        at = np.concatenate([at, at[-1] + np.cumsum(draw(count))])
    return at[at < seconds]


def shaped(trace: Trace, intensity: Callable[[Floats], Floats], grid: int = 4096) -> Trace:
    """Arrivals moved so that their rate follows `intensity` (share of the duration in [0, 1] to a
    relative rate above 0); number, order, duration and local burstiness stay.
    """
    u = np.linspace(0.0, 1.0, grid)
    mass = np.concatenate([[0.0], np.cumsum(intensity(0.5 * (u[1:] + u[:-1])))])
    start, span = trace.arrival[0], trace.duration
    share = (trace.arrival - start) / (span or 1.0)
    return replace(trace, arrival=start + span * np.interp(share, mass / mass[-1], u))


def diurnal(periods: float = 1.0, depth: float = 0.7) -> Callable[[Floats], Floats]:
    """A sine of `periods` days over the trace, from 1 - depth to 1 + depth."""
    return lambda u: 1.0 - depth * np.cos(2.0 * np.pi * periods * u)


def drift(start: float = 0.5, end: float = 1.5) -> Callable[[Floats], Floats]:
    """A rate that moves from `start` to `end` times the mean, linearly."""
    return lambda u: start + (end - start) * u


def early(depth: float = 0.9) -> Callable[[Floats], Floats]:
    """A rate that falls from 1 + depth to 1 - depth times the mean along half a cosine."""
    return lambda u: 1.0 + depth * np.cos(np.pi * u)


def late(depth: float = 0.9) -> Callable[[Floats], Floats]:
    """`early` the other way round: together they keep the rate."""
    return lambda u: 1.0 - depth * np.cos(np.pi * u)


def burst(at: float = 0.5, width: float = 0.1, factor: float = 4.0) -> Callable[[Floats], Floats]:
    """`factor` times the rate in a window of `width` around `at` (shares of the duration)."""
    return lambda u: np.where(np.abs(u - at) <= width / 2.0, factor, 1.0)


def drifting(before: Trace, after: Trace, rng: np.random.Generator) -> Trace:
    """`before`'s arrivals whose lengths turn from those of `before` into those of `after`, with a
    probability that rises from 0 to 1 over the trace.
    """
    share = (before.arrival - before.arrival[0]) / (before.duration or 1.0)
    late = rng.random(len(before)) < share
    other = resampled(after, before.arrival, rng)
    plain = resampled(before, before.arrival, rng)
    return replace(
        plain,
        prompt=np.where(late, other.prompt, plain.prompt),
        output=np.where(late, other.output, plain.output),
    )


def sessions_at(trace: Trace, n: int, rate: float, rng: np.random.Generator) -> Trace:
    """`n` requests or a few more: whole sessions in random order, started as a Poisson stream so
    that requests come at `rate` (1/s) where answers take no time.

    Once every session was taken they are taken again; a repeat shares no prefix with the first.
    """
    order = np.argsort(trace.session, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(trace.session[order]) != 0])
    groups = np.split(order, starts[1:])
    picked: list[Ints] = []
    total = 0
    while total < n:
        for k in rng.permutation(len(groups)).tolist():
            picked.append(groups[k])
            total += len(groups[k])
            if total >= n:
                break
    index = np.concatenate(picked)
    sizes = np.array([len(group) for group in picked])
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    begin = poisson(len(picked), rate * len(picked) / total, rng)
    local = [np.searchsorted(group, trace.follows[group]) for group in picked]
    spread = int(trace.blocks.max(initial=-1)) + 1
    round_of = np.repeat(np.arange(len(picked)) // len(groups), sizes)
    since = [trace.arrival[group] - trace.arrival[group[0]] for group in picked]
    return _from_columns(
        np.repeat(begin, sizes) + np.concatenate(since),
        trace.prompt[index],
        trace.output[index],
        session=np.repeat(np.arange(len(picked)), sizes),
        follows=first + np.concatenate(local),
        think=trace.think[index],
        blocks=[
            (trace.blocks_of(i) + spread * int(again)).tolist()
            for i, again in zip(index.tolist(), round_of, strict=True)
        ],
        block_tokens=trace.block_tokens,
    )


# ---- who sends


def _by_session(trace: Trace, shares: Mapping[str, float], rng: np.random.Generator) -> Ints:
    """(n,) index drawn once a session with probabilities in proportion to `shares`."""
    weight = np.array(list(shares.values()), np.float64)
    _, session = np.unique(trace.session, return_inverse=True)
    drawn = rng.choice(len(weight), size=int(session.max(initial=-1)) + 1, p=weight / weight.sum())
    return np.asarray(drawn[session], np.int64)


def with_classes(trace: Trace, shares: Mapping[str, float], rng: np.random.Generator) -> Trace:
    """Classes drawn in these proportions; a session keeps its class."""
    return replace(trace, class_id=_by_session(trace, shares, rng), classes=tuple(shares))


def with_tenants(trace: Trace, shares: Mapping[str, float], rng: np.random.Generator) -> Trace:
    """Tenants drawn in these proportions; a session keeps its tenant."""
    return replace(trace, tenant_id=_by_session(trace, shares, rng), tenants=tuple(shares))


def synthetic(
    n: int,
    rate: float,
    rng: np.random.Generator,
    *,
    cv: float = 2.0,
    prompt_median: float = 735.0,
    prompt_sigma: float = 1.2,
    output_median: float = 74.0,
    output_sigma: float = 1.1,
    max_prompt: int = 8000,
    max_output: int = 1500,
) -> Trace:
    """A stand-in that needs no data: gamma arrivals, log-normal lengths (tokens) under caps.

    The defaults have about the medians of the rate-weighted m-large lengths of ServeGen.
    """
    prompt = np.clip(rng.lognormal(np.log(prompt_median), prompt_sigma, n), 8, max_prompt)
    output = np.clip(rng.lognormal(np.log(output_median), output_sigma, n), 1, max_output)
    return trace(gamma_arrivals(n, rate, cv, rng), prompt.round(), output.round())
