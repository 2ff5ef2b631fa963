"""From the cells of a comparison to its table: read-offs, ratios, intervals, rank stability.

Seeds are pooled before a rate is read off: the curve of a policy is the mean over seeds, the worst
slice is taken of mean slices, and resamples draw seeds for all policies at once (paired).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from training.compare import BASELINES, Cell, Outcome, Plan
from training.intervals import Interval, interval, last_at, rank_agreement, seed_weights
from training.measures import SLICE_SLACK, Report
from training.traces import Floats
from training.workers import Knee

TARGETS = (0.9, 0.99)
WEIGHTS = ("1", "5", "10")
MAIN_WEIGHT = "5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The rate carried at a target: requests/s, and as a ratio to the scenario's best classic
    heuristic. `beyond`: the grid ended before the policy did. `gap`: a lower rate of the grid fails
    although this one passes.
    """

    rate: Interval
    ratio: Interval
    beyond: bool
    gap: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy in one scenario. Curves are (loads,) means over seeds; `at_knee` holds the other
    measures at the load nearest to 1 (seconds, shares, per good request).
    """

    policy: str
    live: bool
    fair: tuple[float, ...]
    plain: tuple[float, ...]
    fair_goodput: Mapping[str, Goodput]
    plain_goodput: Mapping[str, Goodput]
    by_weight: Mapping[str, float]
    """Size-fair goodput@90 for w = 1, 5, 10, requests/s."""
    difference: tuple[Interval, ...]
    """Size-fair attainment minus the best classic heuristic's, at every load."""
    worst_slice: str
    """Name of the slice met least at the load nearest to 1."""
    at_knee: Mapping[str, float]
    slices: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One scenario: the grid, its rows in order of size-fair goodput@90, yardsticks, stability.

    `baseline` is the best classic heuristic on these very seeds. Yardsticks map names to size-fair
    or work-weighted attainment (loads,), nan where not worked out; `stability` maps names to
    Kendall's tau between two orders of the policies.
    """

    scenario: str
    about: str
    knee: Knee
    loads: tuple[float, ...]
    rates: tuple[float, ...]
    seeds: int
    arrivals: int
    baseline: str
    rows: tuple[Row, ...]
    yardsticks: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    yard_goodput: Mapping[str, float] = field(default_factory=dict)
    stability: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All scenarios; `stability` between scenarios: Kendall's tau of each with the first."""

    blocks: tuple[Block, ...]
    stability: Mapping[str, float] = field(default_factory=dict)

    def ranked(self) -> Table:
        """The same blocks with the agreement of their orders worked out."""
        return Table(blocks=self.blocks, stability=_between(self.blocks))


def summarise(plan: Plan, outcome: Outcome) -> Table:
    """The table of a finished comparison."""
    blocks = []
    for scenario in plan.scenarios:
        cells = [c for c in outcome.cells if c.scenario == scenario.name]
        yards = [y for y in outcome.yardsticks if y.scenario == scenario.name]
        curves = {
            e.label: _Curves.of([c for c in cells if c.policy == e.label]) for e in plan.entrants
        }
        kinds = {e.label: e.policy.kind for e in plan.entrants}
        block = _block(scenario.about, outcome.knees[scenario.name], cells, curves, kinds)
        found: dict[str, list[tuple[float, float | None]]] = {
            "look-ahead": [(y.load, _fair_of(y.look_ahead)) for y in yards],
            "LP ceiling by work": [(y.load, y.by_work) for y in yards],
            "LP ceiling plain": [(y.load, y.plain) for y in yards],
        }
        blocks.append(_with_yardsticks(block, found) if yards else block)
    return Table(blocks=tuple(blocks)).ranked()


def against(
    outcome: Outcome, scenario: str, label: str, base: str, target: float
) -> tuple[Interval, Interval]:
    """Size-fair goodput at a target of one policy in a scenario (requests/s), and its ratio to
    another's; nan where that carries nothing.
    """
    mine, theirs = (
        _Curves.of([c for c in outcome.cells if (c.scenario, c.policy) == (scenario, name)])
        for name in (label, base)
    )
    seeds = len(mine.plain)
    weights = seed_weights(seeds, np.random.default_rng(0))
    one, other = (last_at(c.rates, c.fair(weights), target) for c in (mine, theirs))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(other > 0, one / other, np.nan)
    rate = interval(one, seeds)
    if np.isnan(ratio).any():
        return rate, Interval(value=float(ratio[0]), low=float("nan"), high=float("nan"))
    return rate, interval(ratio, seeds)


def _fair_of(report: Report) -> float:
    return min(report.by_work[MAIN_WEIGHT], report.worst_slice + SLICE_SLACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curves:
    """One policy's cells as arrays: (seeds, loads), by weight, and (seeds, loads, slices)."""

    loads: tuple[float, ...]
    rates: Floats
    plain: Floats
    by_work: Mapping[str, Floats]
    slices: Floats
    names: tuple[str, ...]
    cells: Sequence[Cell]

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> _Curves:
        loads = tuple(sorted({c.load for c in cells}))
        seeds = sorted({c.seed for c in cells})
        at = {(c.seed, c.load): c.report for c in cells}
        names = tuple(
            sorted(set.intersection(*(set(r.slices) for r in at.values())) if at else set())
        )

        def grid(pick: Any) -> Floats:
            return np.array([[pick(at[s, x]) for x in loads] for s in seeds])

        return cls(
            loads=loads,
            rates=np.array([at[seeds[0], x].rate for x in loads]),
            plain=grid(lambda r: r.attainment),
            by_work={w: grid(lambda r, w=w: r.by_work[w]) for w in WEIGHTS},
            slices=np.array(
                [[[at[s, x].slices[k] for k in names] for x in loads] for s in seeds]
            ).reshape(len(seeds), len(loads), len(names)),
            names=names,
            cells=cells,
        )

    def fair(self, weights: Floats, w: str = MAIN_WEIGHT) -> Floats:
        """(B, loads) size-fair attainment under (B, seeds) shares of seeds."""
        by_work: Floats = weights @ self.by_work[w]
        if not self.names:
            return by_work
        worst = np.einsum("bs,slk->blk", weights, self.slices).min(axis=2)
        both: Floats = np.minimum(by_work, worst + SLICE_SLACK)
        return both


def _block(
    about: str,
    knee: Knee,
    cells: Sequence[Cell],
    curves: Mapping[str, _Curves],
    kinds: Mapping[str, str],
) -> Block:
    one = next(iter(curves.values()))
    seeds = len({c.seed for c in cells})
    weights = seed_weights(seeds, np.random.default_rng(0))
    fair = {label: c.fair(weights) for label, c in curves.items()}
    carried = {
        (label, target): last_at(one.rates, fair[label], target)
        for label in curves
        for target in TARGETS
    }
    classic = [label for label in curves if kinds[label] in BASELINES] or list(curves)
    baseline = max(classic, key=lambda label: (carried[label, 0.9][0], fair[label][0].mean()))
    rows = []
    for label, c in curves.items():
        plain = weights @ c.plain
        base_plain = weights @ curves[baseline].plain
        near = int(np.argmin(np.abs(np.array(c.loads) - 1.0)))
        rows.append(
            Row(
                policy=label,
                live=any(cell.live for cell in c.cells),
                fair=tuple(fair[label][0].tolist()),
                plain=tuple(plain[0].tolist()),
                fair_goodput={
                    f"{t:g}": _goodput(
                        one.rates, fair[label], carried[label, t], carried[baseline, t], t, seeds
                    )
                    for t in TARGETS
                },
                plain_goodput={
                    f"{t:g}": _goodput(
                        one.rates,
                        plain,
                        last_at(one.rates, plain, t),
                        last_at(one.rates, base_plain, t),
                        t,
                        seeds,
                    )
                    for t in TARGETS
                },
                by_weight={
                    w: float(last_at(one.rates, c.fair(weights[:1], w), 0.9)[0]) for w in WEIGHTS
                },
                difference=tuple(
                    interval((fair[label] - fair[baseline])[:, k], seeds)
                    for k in range(len(c.loads))
                ),
                worst_slice=_worst(c, near),
                at_knee={"fair": float(fair[label][0][near]), **_at(c, near)},
                slices=dict(zip(c.names, c.slices[:, near].mean(axis=0).tolist(), strict=True)),
            )
        )
    rows.sort(key=lambda r: (r.fair_goodput["0.9"].rate.value, sum(r.fair)), reverse=True)
    return Block(
        scenario=cells[0].scenario,
        about=about,
        knee=knee,
        loads=one.loads,
        rates=tuple(one.rates.tolist()),
        seeds=seeds,
        arrivals=round(float(np.mean([c.report.arrivals for c in cells]))),
        baseline=baseline,
        rows=tuple(rows),
        stability=_stability(one.rates, curves, seeds),
    )


def _goodput(
    rates: Floats, curve: Floats, carried: Floats, base: Floats, target: float, seeds: int
) -> Goodput:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(base > 0, carried / base, np.nan)
    undefined = bool(np.isnan(ratio).any())
    failed = (curve[0] < target) & (rates < carried[0])
    return Goodput(
        rate=interval(carried, seeds),
        ratio=Interval(value=float(ratio[0]), low=float("nan"), high=float("nan"))
        if undefined
        else interval(ratio, seeds),
        beyond=bool(carried[0] >= rates[-1]),
        gap=bool(failed.any()),
    )


def _worst(c: _Curves, load: int) -> str:
    if not c.names:
        return ""
    return c.names[int(c.slices[:, load].mean(axis=0).argmin())]


def _at(c: _Curves, load: int) -> dict[str, float]:
    """Means over seeds of what stands beside the headline, at one load."""
    reports = [cell.report for cell in c.cells if cell.load == c.loads[load]]
    found = {
        f"{name}_{q}": float(np.mean([getattr(r, name)[q] for r in reports]))
        for name in ("ttft", "tpot")
        for q in ("p50", "p99")
    }
    for name in (
        "shed", "lost", "largest_share", "jain", "cost_per_good", "joules_per_good",
        "cached_share", "preemptions", "microseconds_per_decision", "requests_per_cpu_second",
    ):  # fmt: skip
        found[name] = float(np.mean([getattr(r, name) for r in reports]))
    return found


def _stability(rates: Floats, curves: Mapping[str, _Curves], seeds: int) -> dict[str, float]:
    """Kendall's tau of the order by size-fair goodput@90 (then by mean attainment): between odd and
    even seeds, and between w = 5 and the others.
    """
    if len(curves) < 3:
        return {}

    def scores(weights: Floats, w: str = MAIN_WEIGHT) -> Floats:
        fair = [c.fair(weights[None, :], w) for c in curves.values()]
        return np.array([last_at(rates, f, 0.9)[0] + 1e-3 * f.mean() for f in fair])

    every = np.full(seeds, 1.0 / seeds)
    found = {
        f"w = {w} against 5": rank_agreement(scores(every), scores(every, w)) for w in ("1", "10")
    }
    if seeds >= 2:
        odd = (np.arange(seeds) % 2 == 0).astype(np.float64)
        even = 1.0 - odd
        found["odd against even seeds"] = rank_agreement(
            scores(odd / odd.sum()), scores(even / even.sum())
        )
    return found


def _between(blocks: Sequence[Block]) -> dict[str, float]:
    if not blocks or len(blocks[0].rows) < 3:
        return {}
    first = {r.policy: r.fair_goodput["0.9"].rate.value for r in blocks[0].rows}
    found = {}
    for block in blocks[1:]:
        mine = {r.policy: r.fair_goodput["0.9"].rate.value for r in block.rows}
        names = [name for name in first if name in mine]
        found[block.scenario] = rank_agreement(
            np.array([first[n] for n in names]), np.array([mine[n] for n in names])
        )
    return found


def _with_yardsticks(
    block: Block, found: Mapping[str, Sequence[tuple[float, float | None]]]
) -> Block:
    curves: dict[str, tuple[float, ...]] = {}
    carried: dict[str, float] = {}
    for name, pairs in found.items():
        means = []
        for load in block.loads:
            values = [v for x, v in pairs if x == load and v is not None]
            means.append(float(np.mean(values)) if values else float("nan"))
        if np.isnan(means).all():
            continue
        curves[name] = tuple(means)
        known = np.flatnonzero(np.isfinite(means))
        if len(known) > 1:
            rates = np.array(block.rates)[known]
            carried[name] = float(last_at(rates, np.array(means)[None, known], 0.9)[0])
    return Block(
        **{name: getattr(block, name) for name in Block.__dataclass_fields__}
        | {"yardsticks": curves, "yard_goodput": carried}
    )


def table_json(table: Table) -> dict[str, Any]:
    """The table as plain values; nan becomes None."""
    clean: dict[str, Any] = _clean(asdict(table))
    return clean


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(v) for v in value]
    if isinstance(value, float):
        return None if np.isnan(value) else float(f"{value:.5g}")
    return value
