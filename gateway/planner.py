"""What the fleet should be, beside what it is: `/admin/plan` and its gauges.

A reader of the decision log: whatever was settled in the last seconds, with the lengths and limits
it had, is what `policies.elastic` plans for, variant by variant. A plan is made in a thread every
so often, never on a request's way, and changes nothing: a fleet belongs to whoever started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from math import inf, isinf
from typing import Any, NamedTuple

import numpy as np

from domain.events import Reason
from domain.fleet import FleetSpec, ReplicaSpec
from domain.outcome import Cause
from domain.request import AUTO
from gateway.decision_log import Record
from gateway.metrics import Gauge
from policies import elastic
from policies.config import ElasticConfig

FEWEST = 20
"""Requests of a variant in the window below which nothing is said about it."""
INTERVALS = 12
"""Parts of the window between which a trend is looked for."""
UNSERVED = frozenset(
    reason.value
    for reason in (
        Reason.OVERLOAD, Reason.QUEUE_FULL, Reason.UNREACHABLE, Reason.EXPIRED, Reason.NO_REPLICA,
        Reason.UPSTREAM,
    )
)  # fmt: skip
"""Why a request is refused that a larger fleet would have served."""
MOST = 20_000
"""Requests kept; of a busier gateway the latest are enough to plan for."""

_log = logging.getLogger(__name__)


class _Seen(NamedTuple):
    """One request: when it came (Unix s), who it is counted for, and what a sample needs."""

    at: float
    variant: str
    row: tuple[float, float, float, float]


class Planner:
    """Plans for a fleet from what a gateway has logged. With `workers` processes on its port, each
    sees its share of the traffic and plans for all of it.
    """

    def __init__(
        self,
        config: ElasticConfig,
        fleet: Callable[[], FleetSpec],
        *,
        workers: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._workers = workers
        self._clock = clock
        self._seen: deque[_Seen] = deque(maxlen=MOST)
        self._advice: dict[str, elastic.Advice] = {}
        self._made_at: float | None = None

    def saw(self, record: Record) -> None:
        """A record of the decision log; what a quota refused is no demand."""
        outcome = record.get("outcome")
        if outcome is None or outcome["cause"] == Cause.REJECTED.value:
            return
        if outcome["cause"] == Cause.SHED.value and outcome["reason"] not in UNSERVED:
            return
        variant = record["variant"] or self._first(record["model"])
        if variant is None:
            return
        slo, predicted = record["slo"], record["predicted"]
        output = float("nan") if predicted is None else float(predicted["length_mean"])
        if outcome["cause"] == Cause.FINISHED.value and outcome["completion_tokens"]:
            output = float(outcome["completion_tokens"])
        row = (
            float(outcome["prompt_tokens"] or record["prompt_tokens"]),
            output,
            inf if slo["ttft"] is None else float(slo["ttft"]),
            inf if slo["tpot"] is None else float(slo["tpot"]),
        )
        self._seen.append(_Seen(record["at"], variant, row))

    def _first(self, model: str) -> str | None:
        """Whom a request is counted for that nobody served."""
        for variant in self._fleet().variants:
            if model in {variant.name, variant.model, AUTO}:
                return variant.name
        return None

    @contextlib.asynccontextmanager
    async def planning(self) -> AsyncIterator[None]:
        """Plan inside the `async with`."""
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self._keep_planning())
            try:
                yield
            finally:
                task.cancel()

    async def _keep_planning(self) -> None:
        while True:
            await asyncio.sleep(self._config.every_ms / 1000)
            try:
                await self.look()
            except Exception:  # noqa: BLE001 - outermost loop of a background task: log
                _log.exception("no plan was made")

    async def look(self) -> None:
        """Make a plan now."""
        now, window = self._clock(), self._config.window_ms / 1000
        while self._seen and self._seen[0].at < now - window:
            self._seen.popleft()
        seen, fleet = list(self._seen), self._fleet()
        self._advice = await asyncio.to_thread(self._advise, seen, fleet, now)
        self._made_at = now

    def _advise(
        self, seen: Sequence[_Seen], fleet: FleetSpec, now: float
    ) -> dict[str, elastic.Advice]:
        config, window = self._config, self._config.window_ms / 1000
        found = {}
        for variant in fleet.variants:
            replicas = [r for r in fleet.replicas if r.variant == variant.name]
            mine = [x for x in seen if x.variant == variant.name and now - window <= x.at <= now]
            if len(mine) < FEWEST or not replicas:
                continue
            span = min(max(now - min(x.at for x in mine), 1.0), window)
            edges = np.linspace(now - span, now, INTERVALS + 1)
            counts = np.histogram([x.at for x in mine], edges)[0] * self._workers
            found[variant.name] = elastic.advise(
                elastic.sample([x.row for x in mine]),
                counts.tolist(),
                config.warm_up_ms / 1000 / (span / INTERVALS),
                span / self._workers,
                replicas[0].profile,
                _bands(replicas),
                config,
            )
        return found

    # ---- what others read

    @property
    def plan(self) -> dict[str, Any]:
        """The last plan, as `/admin/plan` shows it."""
        return {
            "made_at": self._made_at,
            "window_s": self._config.window_ms / 1000,
            "applied": False,
            "variants": [_shown(name, advice) for name, advice in self._advice.items()],
        }

    def gauges(self) -> list[Gauge]:
        """The last plan, for Prometheus; of several workers' plans the largest counts."""

        def of(read: Callable[[elastic.Advice], float]) -> Callable[[], Iterable[Any]]:
            return lambda: [((name,), read(advice)) for name, advice in self._advice.items()]

        def pressures() -> Iterable[tuple[tuple[str, ...], float]]:
            for name, advice in self._advice.items():
                yield (name, "ttft"), advice.ttft
                yield (name, "tpot"), advice.tpot

        def bounds() -> Iterable[tuple[tuple[str, ...], float]]:
            for name, advice in self._advice.items():
                for k, band in enumerate(advice.wanted_bands.bands[:-1]):
                    yield (name, str(k)), band.high

        by_variant = ("variant",)
        return [
            Gauge(
                "sluice_plan_replicas",
                "Replicas that the forecast load wants.",
                by_variant,
                of(lambda a: a.wanted),
                max,
            ),
            Gauge(
                "sluice_plan_growth",
                "Load forecast for when a started replica would serve, over what comes now.",
                by_variant,
                of(lambda a: a.growth),
                max,
            ),
            Gauge(
                "sluice_plan_pressure",
                "Predicted over promised time of the present replicas.",
                ("variant", "limit"),
                pressures,
                max,
            ),
            Gauge(
                "sluice_plan_pool_bound_tokens",
                "Upper bound of a length pool, the shortest pool first.",
                ("variant", "pool"),
                bounds,
                max,
            ),
        ]


def _bands(replicas: Sequence[ReplicaSpec]) -> list[elastic.Band]:
    """The pools that these replicas stand in, the shortest first."""
    counts: dict[tuple[float, float], int] = {}
    for spec in replicas:
        bounds = (spec.pool_low, spec.pool_high)
        counts[bounds] = counts.get(bounds, 0) + 1
    return [
        elastic.Band(low=low, high=high, replicas=n) for (low, high), n in sorted(counts.items())
    ]


def _shown(variant: str, advice: elastic.Advice) -> dict[str, Any]:
    return {
        "variant": variant,
        "requests_per_s": advice.requests,
        "growth": advice.growth,
        "pressure": {"ttft": advice.ttft, "tpot": advice.tpot},
        "replicas": {
            "now": advice.replicas,
            "wanted": advice.wanted,
            "reason": advice.why_wanted,
        },
        "pools": {
            "now": [_band(band) for band in advice.bands],
            "wanted": [_band(band) for band in advice.wanted_bands.bands],
            "missed_per_s_now": advice.misses,
            "missed_per_s_then": advice.wanted_bands.misses,
            "reason": advice.wanted_bands.reason,
        },
    }


def _band(band: elastic.Band) -> dict[str, Any]:
    high = None if isinf(band.high) else band.high
    return {"low_tokens": band.low, "high_tokens": high, "replicas": band.replicas}
