"""The latency model is fitted again while the gateway serves: in another process, swapped in one
step.

    outcomes --> window (newest of every class) --> fit in a child --> artifact --> one event

The child (`training.fit_latency --window`) holds the newest fifth out and writes nothing unless it
beats the roofline there. What it wrote is read and checked off the loop; then `ModelSwapped` hands
it to the core, so that a recorded run swaps at the same moment. A fit that fails leaves everything
as it is. A drift alarm asks for a fit at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domain.ports import Estimator
from gateway.metrics import Gauge
from predictors.artifact import ArtifactError
from predictors.config import LearnedConfig
from predictors.latency_layer import LatencyLayer
from predictors.learned import LearnedEstimator

if TYPE_CHECKING:
    from gateway.app import Gateway
    from gateway.shell import Shell

PER_CLASS = 4000
"""Newest outcomes kept of every class of replica."""
CLASSES = 64
"""Classes kept at most; the one that was quiet for longest goes first."""
EVERY = 2.0
"""Seconds between two looks at whether a fit is due."""
PATIENCE = 600.0
"""Seconds a fit may take."""
ROOT = Path(__file__).resolve().parents[1]
_log = logging.getLogger("sluice")


class Window:
    """The newest outcomes of every class, in bounded memory."""

    def __init__(self, per_class: int = PER_CLASS) -> None:
        self._per_class = per_class
        self._of: dict[str, deque[tuple[Any, ...]]] = {}
        self.fresh = 0
        """Outcomes since the last fit."""

    def saw(self, record: dict[str, Any]) -> None:
        """Take a decision-log record in, if it tells about latency."""
        from training.latency_data import row_of

        row = row_of(record)
        if row is None:
            return
        kind = row[4]
        rows = self._of.pop(kind, None)
        if rows is None:
            rows = deque(maxlen=self._per_class)
        rows.append(row)
        self._of[kind] = rows
        self.fresh += 1
        if len(self._of) > CLASSES:
            del self._of[next(iter(self._of))]

    def rows(self) -> list[tuple[Any, ...]]:
        """All of them, class by class, each oldest first."""
        return [row for rows in self._of.values() for row in rows]


class Refitter:
    """Fits when `every` seconds are over, or a class is alarmed, and `least` outcomes are new."""

    def __init__(
        self,
        shell: Shell,
        layer: LatencyLayer,
        window: Window,
        *,
        every: float,
        least: int,
        folder: Path,
    ) -> None:
        self._shell = shell
        self._layer = layer
        self._window = window
        self._every = every
        self._least = least
        self._folder = folder
        self._alarmed: tuple[str, ...] = ()
        self.results = {"swapped": 0, "not_better": 0, "failed": 0}

    async def run(self) -> None:
        """Look every so often, for ever."""
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(min(EVERY, self._every))
            alarmed = self._layer.alarmed
            due = loop.time() - last >= self._every or set(alarmed) - set(self._alarmed)
            if due and self._window.fresh >= self._least:
                self._alarmed = alarmed
                await self.fit()
                last = loop.time()

    async def fit(self) -> str:
        """Fit on the window in a child and swap; which of `results` it was. Never raises."""
        try:
            result = await self._fit()
        except (OSError, TimeoutError, ArtifactError):
            _log.exception("the latency model was not fitted again; the old one serves on")
            result = "failed"
        self.results[result] += 1
        return result

    async def _fit(self) -> str:
        from training.latency_data import frame_of, save_window

        window, out = self._folder / "window.npz", self._folder / "latency.npz"
        rows = self._window.rows()
        self._window.fresh = 0
        await asyncio.to_thread(lambda: save_window(frame_of(rows), window))
        out.unlink(missing_ok=True)
        code, said = await run_child(
            "-m", "training.fit_latency", "--window", str(window), "--out", str(out), "--nice", "10"
        )
        if code == 1:
            return "not_better"
        if code != 0:
            _log.error("the fit of the latency model ended with %d: %s", code, said[-500:])
            return "failed"
        data = await asyncio.to_thread(out.read_bytes)
        version = await asyncio.to_thread(self._layer.prepare, data)
        self._shell.swap_model(version, data)
        _log.info("latency model %s is in force, from %d outcomes", version, len(rows))
        return "swapped"


async def run_child(*arguments: str) -> tuple[int, str]:
    """Run this Python with these arguments to its end: exit code and standard error.

    Raises: TimeoutError after `PATIENCE` seconds; the child is ended then, and on cancellation.
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            _, said = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return child.returncode or 0, said.decode("utf-8", "replace")


@contextlib.asynccontextmanager
async def learning(
    gateway: Gateway, estimator: Estimator, config: LearnedConfig
) -> AsyncIterator[Refitter | None]:
    """Metrics of the learned latency, and its refits where the config wants them."""
    if not isinstance(estimator, LearnedEstimator):
        yield None
        return
    layer = estimator.latency
    window = Window()
    with tempfile.TemporaryDirectory(prefix="sluice-fit-") as folder:
        refitter = Refitter(
            gateway.shell,
            layer,
            window,
            every=config.refit_minutes * 60.0,
            least=config.refit_least,
            folder=Path(folder),
        )
        gateway.metrics.gauges.extend(gauges(layer, refitter))
        if not config.refit_minutes:
            yield refitter
            return
        gateway.log.readers.append(window.saw)
        running = asyncio.ensure_future(refitter.run())
        try:
            yield refitter
        finally:
            gateway.log.readers.remove(window.saw)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


def gauges(layer: LatencyLayer, refitter: Refitter) -> list[Gauge]:
    """Error, coverage and alarm by class of replica; refits by result; the model in force."""

    def by_class(which: str) -> Iterator[tuple[tuple[str, str], float]]:
        for name, watch in layer.classes.items():
            for i, time in enumerate(("ttft", "tpot")):
                yield (name, time), getattr(watch, which)[i]

    labels = ("replica_class", "time")
    return [
        Gauge(
            "sluice_latency_error_ratio",
            "Running mean of |predicted / actual - 1|.",
            labels,
            lambda: by_class("error"),
            max,
        ),
        Gauge(
            "sluice_latency_p90_coverage",
            "Running share of outcomes below the predicted P90.",
            labels,
            lambda: by_class("coverage"),
            min,
        ),
        Gauge(
            "sluice_latency_alarmed",
            "1 where the roofline stands in for the learned latency.",
            ("replica_class",),
            lambda: [((n,), float(w.detector.alarmed)) for n, w in layer.classes.items()],
            max,
        ),
        Gauge(
            "sluice_latency_refits",
            "Fits of the latency model by result.",
            ("result",),
            lambda: [((name,), float(count)) for name, count in refitter.results.items()],
        ),
        Gauge(
            "sluice_latency_model_info",
            "1 for the latency model in force.",
            ("version",),
            lambda: [((layer.version,), 1.0)],
            max,
        ),
    ]
