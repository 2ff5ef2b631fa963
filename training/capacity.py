"""What a fleet carries, what stops it first, and what to add for a target rate.

A rate is carried at X % if size-fair attainment (DESIGN section 11), the mean over seeds, is at
least X there. Found by doubling and halving, then bisection to a step of `STEP`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from backends.sim.profiles import load_profiles, shipped
from domain.errors import ConfigError
from domain.fleet import Profile
from policies.config import PolicyConfig
from training.bound import ceiling
from training.evaluate import Runner
from training.measures import MISSED, Report, Run, fair, measure, settled, work_of
from training.scenario import Case, Pools, Replicas, Scenario, build

STEP = 1.05
LADDER = 40
"""Most steps up or down; 40 doublings are more than any fleet's range."""
TARGETS = (0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The rate (requests/s) carried at a target, the measures at a rate just above it, and what the
    misses there are: shares of misses by limit, `refused` for those never sent, and `binds`, the
    limit missed most. `kv` is the share of runs' requests preempted for want of KV pages.
    """

    target: float
    rate: float
    over: float
    attainment: float
    misses: Mapping[str, float]
    binds: str
    kv: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """Replicas to add by profile, their price a busy second, and the attainment they reach."""

    counts: Mapping[str, int]
    price: float
    attainment: float
    tried: int


class Planner:
    """Asks the simulator about one scenario under one policy, always on the same seeds."""

    def __init__(
        self,
        scenario: Scenario,
        policy: PolicyConfig,
        *,
        seeds: Sequence[int],
        data: Path | None = None,
        profiles: Path | None = None,
        runner: Runner | None = None,
    ) -> None:
        self._scenario = scenario
        self._policy = policy
        self._seeds = tuple(seeds)
        self._pools = Pools(data)
        self._profiles = load_profiles(shipped() if profiles is None else profiles)
        self._runner = Runner() if runner is None else runner
        self._known: dict[str, list[tuple[Case, Run, Report]]] = {}

    def carried(self, target: float) -> Carried:
        """The rate carried at `target`, and what binds 10 % above it."""
        rate = last_rate(lambda r: self._attainment(self._scenario.fleet, r) >= target)
        over = 1.1 * rate if rate > 0 else 1.0
        runs = self._runs(self._scenario.fleet, over)
        misses = _misses(runs)
        requests = sum(len(case.trace) for case, _, _ in runs)
        return Carried(
            target=target,
            rate=rate,
            over=over,
            attainment=self._attainment(self._scenario.fleet, over),
            misses=misses,
            binds=max(misses, key=misses.__getitem__),
            kv=sum(run.preemptions for _, run, _ in runs) / requests,
        )

    def cheapest(
        self, rate: float, target: float, offer: Sequence[str], most: int
    ) -> Addition | None:
        """The cheapest replicas to add, of the profiles on `offer` and at most `most`, so that
        `rate` is carried at `target`; None if nothing of that size does.

        Sets are tried from the cheapest up (price per second of a busy replica); a set is passed
        over if the linear relaxation says that no policy could do it. The first that passes is the
        cheapest, as far as the simulator and its seeds can tell.
        Raises: ConfigError for an unknown profile.
        """
        for name in offer:
            if name not in self._profiles:
                known = ", ".join(sorted(self._profiles))
                raise ConfigError(f"unknown profile {name!r}; known: {known}")
        prices = [self._profiles[name].price for name in offer]
        tried = 0
        for counts in by_price(prices, most):
            fleet = (*self._scenario.fleet, *self._added(offer, counts))
            if not self._possible(fleet, rate, target):
                continue
            tried += 1
            attainment = self._attainment(fleet, rate)
            if attainment >= target:
                return Addition(
                    counts={n: c for n, c in zip(offer, counts, strict=True) if c},
                    price=float(np.dot(prices, counts)),
                    attainment=attainment,
                    tried=tried,
                )
        return None

    def _added(self, offer: Sequence[str], counts: Sequence[int]) -> list[Replicas]:
        """Groups of new replicas; each is the variant that the fleet runs on that profile, else the
        first of the fleet.
        """
        variants = {g.profile: g.variant for g in reversed(self._scenario.fleet)}
        other = self._scenario.fleet[0].variant
        return [
            Replicas(profile=name, count=count, variant=variants.get(name, other))
            for name, count in zip(offer, counts, strict=True)
            if count
        ]

    def _possible(self, fleet: tuple[Replicas, ...], rate: float, target: float) -> bool:
        case = self._case(fleet, rate, self._seeds[0])
        top = ceiling(case, work_of(case, 5.0), settled(case).astype(np.float64))
        return top is None or top >= target

    def _attainment(self, fleet: tuple[Replicas, ...], rate: float) -> float:
        return float(np.mean([fair(report) for _, _, report in self._runs(fleet, rate)]))

    def _case(self, fleet: tuple[Replicas, ...], rate: float, seed: int) -> Case:
        scenario = self._scenario.model_copy(update={"fleet": fleet})
        return build(scenario, rate, seed, profiles=self._profiles, pools=self._pools)

    def _runs(self, fleet: tuple[Replicas, ...], rate: float) -> list[tuple[Case, Run, Report]]:
        key = f"{rate} {[group.model_dump_json() for group in fleet]}"
        if key not in self._known:
            found = []
            for seed in self._seeds:
                case = self._case(fleet, rate, seed)
                run, _ = self._runner.run(case, self._policy)
                found.append((case, run, measure(case, run, self._policy.kind)))
            self._known = {key: found}  # the last one is asked for again; all would fill the memory
        return self._known[key]


def last_rate(carries: Callable[[float], bool]) -> float:
    """The largest rate that `carries`, to a factor of `STEP`, if all lower ones do; 0 if none of a
    millionth and more does.
    """
    low, high = 1.0, 2.0
    if carries(low):
        for _ in range(LADDER):
            if not carries(high):
                break
            low, high = high, 2.0 * high
    else:
        for _ in range(20):
            low, high = low / 2.0, low
            if carries(low):
                break
        else:
            return 0.0
    while high / low > STEP:
        middle = (low * high) ** 0.5
        if carries(middle):
            low = middle
        else:
            high = middle
    return low


def by_price(prices: Sequence[float], most: int) -> list[tuple[int, ...]]:
    """Counts of each kind, 0 to `most` in all, cheapest first (fewest replicas at equal price)."""
    heap: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, (0,) * len(prices))]
    seen = {heap[0][2]}
    found = []
    while heap:
        price, size, counts = heappop(heap)
        found.append(counts)
        if size == most:
            continue
        for k, one in enumerate(prices):
            more = (*counts[:k], counts[k] + 1, *counts[k + 1 :])
            if more not in seen:
                seen.add(more)
                heappush(heap, (price + one, size + 1, more))
    return found


def offered(scenario: Scenario, profiles: Mapping[str, Profile]) -> list[str]:
    """Profiles of the scenario's own fleet that can be bought again."""
    return list(dict.fromkeys(g.profile for g in scenario.fleet if g.profile in profiles))


def _misses(runs: Sequence[tuple[Case, Run, Report]]) -> dict[str, float]:
    """Shares of the misses by the limit that was missed first: never sent, TTFT, TPOT, E2E, or cut
    off before the end; all 0 if nothing was missed.
    """
    found = dict.fromkeys(("refused", "ttft", "tpot", "e2e", "cut off"), 0.0)
    for case, run, _ in runs:
        missed = settled(case) & (run.verdict == MISSED)
        sent = np.isfinite(run.sent)
        with np.errstate(invalid="ignore"):
            late = run.ttft > case.ttft
            slow = run.tpot(case.trace.output) > case.tpot
            long = run.last - run.arrival > case.e2e
        ended = np.isfinite(run.last)
        rest = missed.copy()
        for name, how in (
            ("refused", ~sent), ("ttft", late), ("cut off", ~ended), ("tpot", slow), ("e2e", long),
        ):  # fmt: skip
            found[name] += float((rest & how).sum())
            rest &= ~how
    total = sum(found.values())
    return {name: count / total if total else 0.0 for name, count in found.items()}
