"""Fleet-level decisions: which pools, how many prefill replicas, which parallel layouts, how many.

Pure functions: what came in the last seconds goes in (`Sample`), what the fleet should be comes out
with its reason. Whoever can change a fleet carries it out: in simulation `training.elastic`, live
an operator who reads `/admin/plan`.

All of them ask one model, `pressure`: how long first and later tokens would take on average in a
group of equal replicas that gets a demand, over what was promised. It is the step time of
`domain.fleet.Profile` in equilibrium:

    tpot = 1 / (rho / T(b) + (1 - rho) / t(b))    b = output tokens/s x tpot / replicas
    ttft = own prefill + prefill queued + rate E[s^2] / (2 (1 - rho))

b sequences decode; T(b) is a step that carries a whole prefill chunk as well, rho the share of time
that such steps take, t(b) a step that only decodes, s the prefill of one prompt (Pollaczek and
Khinchine's formula). What a group cannot carry piles up for `HORIZON` seconds.

- *Length pools* (CascadeInfer, arXiv 2512.19179): a dynamic programme over exponential length bins
  chooses bounds and sizes; between its plans bounds move by a part of a bin (`shifted`).
- *Prefill or decode* (Arrow, arXiv 2505.11916): the split of least predicted pressure (`split`).
- *Parallel layouts* (Nitsum, arXiv 2605.05467): GPUs go to the layout that serves most of what is
  unserved per GPU (`layouts`).
- *Scale*: the fewest replicas that stay under `target` at the rate forecast for when a started one
  would be ready (`forecast`, `wanted`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from domain.fleet import Phase, Profile
from policies.config import ElasticConfig

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

HORIZON = 5.0
"""Seconds for which work that a group cannot carry is taken to pile up."""
BUSIEST = 0.95
"""Share of the time beyond which the queueing formula is not asked any more."""
STEEPNESS = 8.0
"""Of the chance to miss a limit around a pressure of 1: 10 % over is missed by two in three."""
BIN = 2.0**0.5
"""Ratio of neighbouring edges of the length bins."""
SHIFT = 2.0**0.25
"""Factor by which a bound moves between two plans: half a bin."""
TINY = 1e-12


class Sample(NamedTuple):
    """Requests of the last seconds, (n,): prompt and expected output in tokens, limits in seconds
    (inf where none).
    """

    prompt: Floats
    output: Floats
    ttft: Floats
    tpot: Floats

    @property
    def length(self) -> Floats:
        """(n,) tokens at the end, prompt and output: what length pools go by."""
        return self.prompt + self.output

    def rows(self, keep: NDArray[np.generic]) -> Sample:
        """Some of them."""
        return Sample(*(column[keep] for column in self))


def sample(rows: Sequence[Sequence[float]]) -> Sample:
    """A sample from rows of prompt, output, TTFT and TPOT limit. An output that is not known (nan)
    is as long as the others are on average, or as the prompt if none is known.
    """
    table = np.array(rows, np.float64).reshape(-1, 4)
    output = table[:, 1]
    known = np.isfinite(output)
    table[~known, 1] = output[known].mean() if known.any() else table[~known, 0]
    return Sample(*np.maximum(table.T, TINY))


class Demand(NamedTuple):
    """What comes to a group per second; arrays of one shape, each a sum over requests, so that
    demands of neighbouring lengths add (`longest` excepted).
    """

    requests: Floats
    prompt: Floats
    square: Floats
    """prompt^2"""
    output: Floats
    context: Floats
    """output x (prompt + output / 2): contexts over the tokens they are read for"""
    longest: Floats
    """tokens of the longest sequence"""
    by_ttft: Floats
    """1 / TTFT limit"""
    prompt_by_ttft: Floats
    by_tpot: Floats

    def times(self, factor: float | Floats) -> Demand:
        """More of the same."""
        more = Demand(*(column * factor for column in self))
        return more._replace(longest=self.longest * np.ones_like(more.longest))

    def at(self, index: slice) -> Demand:
        """Elements of all columns."""
        return Demand(*(c[index] for c in self))


def demand(sample: Sample, seconds: float, group: Ints | None = None, groups: int = 1) -> Demand:
    """(groups,) what came per second, for each number in `group` (n,)."""
    where = np.zeros(len(sample.prompt), np.int64) if group is None else group
    prompt, output = sample.prompt, sample.output

    def total(values: Floats) -> Floats:
        return np.bincount(where, values, groups) / seconds

    longest = np.zeros(groups)
    np.maximum.at(longest, where, sample.length)
    return Demand(
        requests=total(np.ones(len(prompt))),
        prompt=total(prompt),
        square=total(prompt * prompt),
        output=total(output),
        context=total(output * (prompt + output / 2.0)),
        longest=longest,
        by_ttft=total(1.0 / sample.ttft),
        prompt_by_ttft=total(prompt / sample.ttft),
        by_tpot=total(1.0 / sample.tpot),
    )


class Pressure(NamedTuple):
    """Predicted over promised, on average over requests; 0 where nothing comes or is promised."""

    ttft: Floats
    tpot: Floats

    @property
    def worst(self) -> Floats:
        """The larger of the two."""
        return np.maximum(self.ttft, self.tpot)


def pressure(
    demand: Demand,
    profile: Profile,
    replicas: float | Floats,
    phase: Phase = "both",
    queued: float | Floats = 0.0,
) -> Pressure:
    """How pressed a group of equal `replicas` is that does this `phase` of a demand, everything
    broadcast; `queued` prompt tokens wait for it already.
    """
    p = profile
    share = demand.times(1.0 / np.asarray(replicas, np.float64))
    requests = np.maximum(share.requests, TINY)
    size = np.maximum(share.square / np.maximum(share.prompt, TINY), 1.0)  # of a token's prompt
    single = np.minimum(size, p.chunk)
    context = share.context / np.maximum(share.output, TINY)
    spread = p.per_uneven * np.maximum(share.longest - context, 0.0)
    most = np.clip(p.kv_capacity / np.maximum(context, 1.0), 1.0, p.max_seqs)

    def step(batch: Floats, new: float | Floats) -> Floats:
        tokens = batch + new
        memory = p.weights + (p.per_context * context + spread) * batch
        touched = p.experts * tokens / (tokens + p.expert_tokens)
        fixed = p.overhead + p.per_sequence * batch + touched
        compute = p.per_token * tokens + p.per_attention * new * size / 2.0
        seconds: Floats = fixed + np.maximum(memory, compute)
        return seconds

    prefills, decodes = phase != "decode", phase != "prefill"
    batch = np.zeros(np.broadcast(requests, replicas).shape)
    chunks = share.prompt / p.chunk if prefills else np.zeros_like(batch)
    for _ in range(30):
        whole = step(batch, p.chunk)
        busy = chunks * whole
        rho = np.minimum(busy, BUSIEST)
        pace = 1.0 / (rho / whole + (1.0 - rho) / step(batch, 0.0))
        if decodes:
            batch = np.minimum(share.output * pace, most)
    over = np.maximum(share.output * pace / most - 1.0, 0.0) if decodes else np.zeros_like(batch)
    late = HORIZON * over
    own = step(batch, single) / single
    if prefills:
        late = late + HORIZON * np.maximum(busy - BUSIEST, 0.0)
        late = late + own * own * share.square / (2.0 * (1.0 - rho))
        late = late + own * np.asarray(queued) / np.asarray(replicas, np.float64)
    else:
        own = np.zeros_like(own)
    ttft = (late * share.by_ttft + own * share.prompt_by_ttft) / requests
    tpot = pace * (1.0 + over) * share.by_tpot / requests if decodes else np.zeros_like(batch)
    nothing = share.prompt <= 0.0
    return Pressure(np.where(nothing, 0.0, ttft), np.where(nothing, 0.0, tpot))


def missed(pressure: Floats) -> Floats:
    """Share of requests that miss their limits under a pressure, roughly: a logistic around 1."""
    return 1.0 / (1.0 + np.exp(np.minimum(STEEPNESS * (1.0 - pressure), 500.0)))


# ---- length pools


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A pool: the total lengths, in tokens, that `replicas` replicas take."""

    low: float
    high: float
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Pools from short to long and the requests per second that they are expected to miss."""

    bands: tuple[Band, ...]
    misses: float
    reason: str


ONE_POOL_TAX = 0.05
"""Share of its misses by which a plan must beat one with a pool less: pools fragment a fleet."""


def pool_misses(
    bands: Sequence[Band], sample: Sample, seconds: float, profile: Profile
) -> tuple[float, Floats]:
    """(requests/s that these pools are expected to miss, pressure of each)."""
    edges = np.array([band.high for band in bands[:-1]])
    group = np.searchsorted(edges, sample.length, side="right")
    came = demand(sample, seconds, group, len(bands))
    worst = pressure(came, profile, np.array([b.replicas for b in bands], np.float64)).worst
    return float((came.requests * _cost(worst)).sum()), worst


def best_pools(
    sample: Sample, seconds: float, profile: Profile, replicas: int, most: int = 4
) -> Pools:
    """Bounds and sizes of at most `most` pools over equal replicas that are expected to miss least.

    Two nested dynamic programmes: over bounds at the edges of exponential length bins, and for each
    of them over how many replicas the pools so far have. A plan with more pools must be better by
    `ONE_POOL_TAX`.
    """
    least, longest = float(sample.length.min()), float(sample.length.max())
    count = max(ceil(np.log(longest / least) / np.log(BIN)), 1)
    edges = least * BIN ** np.arange(1, count)
    group = np.searchsorted(edges, sample.length, side="right")
    cost = _band_costs(demand(sample, seconds, group, count), profile, replicas)
    parts, misses = best_partition(cost, min(most, replicas, count))
    bands = tuple(
        Band(
            low=0.0 if i == 0 else float(edges[i - 1]),
            high=inf if j == count else float(edges[j - 1]),
            replicas=k,
        )
        for i, j, k in parts
    )
    return Pools(bands=bands, misses=misses, reason=f"{len(bands)} pools miss {misses:.2f}/s")


def _cost(worst: Floats) -> Floats:
    """What a request costs in a pool: its chance to miss, and a little for being nearer to it."""
    return missed(worst) + 0.01 * np.minimum(worst, 10.0)


def _band_costs(bins: Demand, profile: Profile, replicas: int) -> Floats:
    """(B + 1, B + 1, R + 1) cost per second of bins i to j - 1 on k replicas; inf where none."""
    size = len(bins.requests)
    low, high = np.triu_indices(size + 1, 1)
    sums = [np.concatenate([[0.0], np.cumsum(column)]) for column in bins]
    longest = np.zeros((size + 1, size + 1))
    for i in range(size):
        longest[i, i + 1 :] = np.maximum.accumulate(bins.longest[i:])
    columns = [(total[high] - total[low])[:, None] for total in sums]
    columns[bins._fields.index("longest")] = longest[low, high][:, None]
    came = Demand(*columns)
    each = np.arange(1, replicas + 1, dtype=np.float64)[None, :]
    cost = np.full((size + 1, size + 1, replicas + 1), inf)
    cost[low, high, 1:] = came.requests * _cost(pressure(came, profile, each).worst)
    return cost


def best_partition(cost: Floats, most: int) -> tuple[list[tuple[int, int, int]], float]:
    """The cheapest cut of bins 0 to B into at most `most` runs that share all R replicas.

    `cost` (B + 1, B + 1, R + 1): of bins i to j - 1 on k replicas. Returns (i, j, k) of each run
    and the sum; a run more must save `ONE_POOL_TAX`.
    """
    size, replicas = cost.shape[0] - 1, cost.shape[2] - 1
    best = np.full((most + 1, size + 1, replicas + 1), inf)
    best[0, 0, 0] = 0.0
    came_from = np.zeros((most + 1, size + 1, replicas + 1, 2), np.int64)
    for n in range(1, most + 1):
        for j in range(1, size + 1):
            for k in range(1, replicas + 1):
                # (bounds before, replicas before) -> with bins i to j - 1 on the rest
                total = best[n - 1, :j, :k] + cost[:j, j, k:0:-1]
                at = int(np.argmin(total))
                best[n, j, k] = total.flat[at]
                came_from[n, j, k] = divmod(at, k)
    totals = best[1:, size, replicas]
    chosen = 0
    for n in range(1, most):
        if totals[n] < (1.0 - ONE_POOL_TAX) * totals[chosen]:
            chosen = n
    parts = []
    j, k = size, replicas
    for n in range(chosen + 1, 0, -1):
        i, before = came_from[n, j, k].tolist()
        parts.append((i, j, k - before))
        j, k = i, before
    return parts[::-1], float(totals[chosen])


def shifted(bands: Sequence[Band], sample: Sample, seconds: float, profile: Profile) -> Pools:
    """The same pools with bounds moved by half a bin where that is expected to miss less."""
    now = tuple(bands)
    misses, _ = pool_misses(now, sample, seconds, profile)
    moves = []
    for i, (left, right) in enumerate(pairwise(now)):
        for factor in (1.0 / SHIFT, SHIFT):
            bound = left.high * factor
            if not left.low < bound < right.high:
                continue
            moved = (
                *now[:i],
                Band(low=left.low, high=bound, replicas=left.replicas),
                Band(low=bound, high=right.high, replicas=right.replicas),
                *now[i + 2 :],
            )
            moves.append((pool_misses(moved, sample, seconds, profile)[0], bound, moved))
    if not moves or min(moves)[0] >= misses:
        return Pools(bands=now, misses=misses, reason="bounds stay")
    misses, bound, now = min(moves, key=lambda move: move[:2])
    return Pools(bands=now, misses=misses, reason=f"a bound moves to {bound:.0f} tokens")


def pools(
    bands: Sequence[Band],
    sample: Sample,
    seconds: float,
    profile: Profile,
    *,
    most: int = 4,
    margin: float = 0.1,
) -> Pools:
    """The pools to have next: a new plan if it saves more than `margin` of the misses expected of
    the present ones, else those with bounds shifted.
    """
    replicas = sum(band.replicas for band in bands)
    misses, _ = pool_misses(bands, sample, seconds, profile)
    plan = best_pools(sample, seconds, profile, replicas, most)
    if plan.misses < (1.0 - margin) * misses:
        return Pools(
            bands=plan.bands,
            misses=plan.misses,
            reason=f"{plan.reason}, the present ones {misses:.2f}/s",
        )
    return shifted(bands, sample, seconds, profile)


# ---- prefill or decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Replicas that prefill, of all, with the pressure on both sides."""

    prefill: int
    ttft: float
    tpot: float
    reason: str


def split(
    demand: Demand,
    profile: Profile,
    replicas: int,
    prefill: int,
    *,
    queued: float = 0.0,
    margin: float = 0.2,
    calm: float = 0.5,
) -> Split:
    """How many of equal `replicas` should prefill, one more or less than `prefill` at most: nearer
    to the split whose worse side, TTFT or TPOT, is pressed least. The present one stays while it is
    pressed less than `calm`, or within `margin` of that. `queued` prompt tokens wait already. A
    demand of shape (1,).
    """
    n = np.arange(1, replicas, dtype=np.float64)
    first = pressure(demand, profile, n, "prefill", queued).ttft
    later = pressure(demand, profile, replicas - n, "decode")
    worst = np.maximum(first, later.worst)
    best, here = int(np.argmin(worst)) + 1, prefill - 1
    wanted = prefill
    if worst[here] > calm and worst[best - 1] < (1.0 - margin) * worst[here]:
        wanted += 1 if best > prefill else -1
    at = wanted - 1
    return Split(
        prefill=wanted,
        ttft=float(first[at]),
        tpot=float(later.worst[at]),
        reason=f"pressure {worst[here]:.2f} with {prefill} that prefill, {worst[best - 1]:.2f} "
        f"with {best}",
    )


# ---- parallel layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A way to run an engine: its profile over so many GPUs."""

    name: str
    gpus: int
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Engines of each layout, by name, and the share of each tier's demand that they carry."""

    counts: dict[str, int]
    served: tuple[float, ...]
    reason: str


def carried(demand: Demand, profile: Profile, target: float) -> float:
    """The multiple of a demand of shape (1,) that one engine carries with a pressure of at most
    `target`; 0 if a thousandth of it is too much.
    """
    factors = np.geomspace(1e-3, 1e3, 241)
    fits = pressure(Demand(*(c[:1] for c in demand)).times(factors), profile, 1.0).worst <= target
    count = int(np.argmin(fits)) if not fits.all() else len(factors)
    return float(factors[count - 1]) if count else 0.0


def layouts(
    tiers: Demand,
    offers: Sequence[Layout],
    gpus: int,
    *,
    weights: Sequence[float] | None = None,
    target: float = 0.8,
) -> Layouts:
    """Engines for `gpus` GPUs, one at a time to the tier and layout that serve most of what is not
    served yet per GPU, a tier weighing more the less of it is served. `tiers` has shape (tiers,),
    `weights` are of a request. GPUs that nobody needs go to whoever is served with least to spare.
    """
    n = len(tiers.requests)
    alone = np.array(
        [[carried(tiers.at(slice(t, t + 1)), o.profile, target) for o in offers] for t in range(n)]
    )
    size = np.array([offer.gpus for offer in offers], np.float64)
    worth = np.ones(n) if weights is None else np.array(weights, np.float64)
    asked = tiers.requests > 0.0
    served = np.where(asked, 0.0, 1.0)
    counts = dict.fromkeys((offer.name for offer in offers), 0)
    left = gpus
    while True:
        unserved = np.maximum(1.0 - served, 0.0)
        useful = np.minimum(alone, unserved[:, None])
        if not (useful[:, size <= left] > 0.0).any():
            useful = alone / (1.0 + served[:, None])  # all are served, or cannot be
            unserved = np.ones(n)
        gain = (worth * tiers.requests * (1.0 + unserved))[:, None] * useful / size
        gain[:, size > left] = -1.0
        t, o = divmod(int(np.argmax(gain)), len(offers))
        if gain[t, o] < 0.0:
            break
        counts[offers[o].name] += 1
        served[t] += alone[t, o]
        left -= offers[o].gpus
    told = ", ".join(f"{x:.2f}" for x in served)
    return Layouts(
        counts=counts,
        served=tuple(served.tolist()),
        reason=f"tiers are carried {told} times over",
    )


def arranged(
    present: Sequence[int], counts: dict[str, int], offers: Sequence[Layout], gpus: int
) -> list[int]:
    """Where engines stand: (gpus,) index of the layout of the engine that begins at a GPU, -1 where
    none begins. Engines of g GPUs begin at multiples of g; the largest are placed first, where such
    a one stands already if possible, else where most GPUs' engines would have to change anyway.
    """
    found = [-1] * gpus
    taken = [False] * gpus
    for o in sorted(range(len(offers)), key=lambda k: -offers[k].gpus):
        width = offers[o].gpus
        places = [s for s in range(0, gpus - width + 1, width) if not any(taken[s : s + width])]
        places.sort(key=lambda s: (present[s] != o, s))
        for start in places[: counts.get(offers[o].name, 0)]:
            found[start] = o
            taken[start : start + width] = [True] * width
    return found


# ---- scale


def forecast(
    counts: Sequence[float], ahead: float, *, level: float = 0.5, trend: float = 0.3
) -> float:
    """What comes per interval `ahead` intervals from now: Holt's linear trend over past intervals,
    damped, never below 0.

    Source: Gardner and McKenzie, "Forecasting trends in time series", 1985 (damping 0.9).
    """
    damping = 0.9
    if not len(counts):
        return 0.0
    here, slope = float(counts[0]), 0.0
    for count in counts[1:]:
        before = here
        here = level * count + (1.0 - level) * (here + damping * slope)
        slope = trend * (here - before) + (1.0 - trend) * damping * slope
    steps: float = damping * (1.0 - damping**ahead) / (1.0 - damping)
    return max(here + steps * slope, 0.0)


def wanted(
    demand: Demand,
    profile: Profile,
    most: int,
    *,
    target: float = 0.8,
    phase: Phase = "both",
    queued: float = 0.0,
) -> int:
    """The fewest equal replicas with a pressure of at most `target` under a demand of shape (1,);
    `most` if none have.
    """
    n = np.arange(1, most + 1, dtype=np.float64)
    fits = pressure(demand, profile, n, phase, queued).worst <= target
    return int(np.argmax(fits)) + 1 if fits.any() else most


# ---- all of it, for somebody who decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What equal replicas should be, beside what they are, and why."""

    requests: float
    """per second"""
    growth: float
    """What is forecast over what comes now, for when a replica started now would serve."""
    ttft: float
    tpot: float
    replicas: int
    wanted: int
    why_wanted: str
    bands: tuple[Band, ...]
    misses: float
    """Requests per second that the present pools are expected to miss."""
    wanted_bands: Pools


def advise(
    rows: Sample,
    counts: Sequence[float],
    ahead: float,
    seconds: float,
    profile: Profile,
    bands: Sequence[Band],
    config: ElasticConfig,
) -> Advice:
    """Advice about equal replicas that stand in these pools, for what came to them in the last
    `seconds`: `counts` of it by interval, of which a started replica takes `ahead` to serve.
    """
    replicas = sum(band.replicas for band in bands)
    came = demand(rows, seconds)
    recent = max(float(np.mean(counts)), TINY)
    growth = max(forecast(counts, ahead) / recent, 1.0)
    number = wanted(came.times(growth), profile, config.most_replicas, target=config.target)
    now = pressure(came, profile, float(replicas))
    then = pressure(came.times(growth), profile, float(number)).worst
    misses, _ = pool_misses(bands, rows, seconds, profile)
    return Advice(
        requests=float(came.requests[0]),
        growth=growth,
        ttft=float(now.ttft[0]),
        tpot=float(now.tpot[0]),
        replicas=replicas,
        wanted=number,
        why_wanted=f"{number} are pressed {then[0]:.2f} by {growth:.2f} times what comes now, at "
        f"most {config.target:g} is wanted",
        bands=tuple(bands),
        misses=misses,
        wanted_bands=pools(
            bands, rows, seconds, profile, most=config.most_pools, margin=config.margin
        ),
    )
