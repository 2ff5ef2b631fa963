"""What a request would see on each replica if nothing else came: the truth behind a prediction.

The replicas are copied as they stand, with constants and state that no gateway sees, the request
enters one of them, and that one is lived through until the request ends. What is left between this
and what then happens is what arrives later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numba import njit

from backends.sim import replica as kernels
from backends.sim.fleet import FleetModel
from backends.sim.replica import FINISHED, FIRST_TOKEN, Floats, Ints, Physics, fire, plan
from domain.columns import EstimateColumns, FleetColumns, Mask, RequestColumns, Routes
from domain.native import compiled
from domain.request import InferenceRequest
from training.informed import InformedEstimator
from training.scenario import Case


@njit(cache=True, error_model="numpy")
def alone(ph: Physics, r: int, job: int, kinds: Ints, jobs: Ints, now: float, out: Floats) -> None:
    """Seconds from now to the first token and to the end of `job`, which replica r was given, into
    out (2,); nan where it never gets there.
    """
    out[0], out[1] = np.nan, np.nan
    if ph.replica[r].stretch == 0:
        plan(ph, r, now)
    while ph.replica[r].end < np.inf:
        at = ph.replica[r].end
        count = fire(ph, r, kinds, jobs)
        for k in range(count):
            if jobs[k] == job and kinds[k] == FIRST_TOKEN:
                out[0] = at - now
            if jobs[k] == job and kinds[k] == FINISHED:
                out[1] = at - now
                return
        plan(ph, r, at)


class Alone:
    """Asks copies of a fleet model that lives through `case`."""

    def __init__(self, case: Case, live: FleetModel) -> None:
        trace = case.trace
        blocks = trace.blocks if len(trace.blocks) else None
        size = trace.block_tokens if blocks is not None else kernels.PAGE
        jobs = len(live.physics.job)
        self._live, self._trace = live, trace
        self._copy = FleetModel(case.fleet.replicas, jobs, blocks=blocks, block_tokens=size)
        room = 2 * max(r.profile.max_seqs for r in case.fleet.replicas)
        self._kinds, self._jobs, self._out = np.zeros(room, int), np.zeros(room, int), np.zeros(2)
        self._native: Callable[..., None] | None = None

    def ask(self, i: int, replicas: Sequence[int], now: float) -> Floats:
        """(TTFT, E2E) in seconds of request i on each of these replicas, (k, 2)."""
        for mine, theirs in zip(self._copy.physics, self._live.physics, strict=True):
            if isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray):
                np.copyto(mine, theirs)
        trace, ph, out = self._trace, self._copy.physics, self._out
        found = np.full((len(replicas), 2), np.nan)
        blocks = int(trace.block_start[i]), int(trace.block_start[i + 1])
        for k, r in enumerate(replicas):
            prompt, output = int(trace.prompt[i]), int(trace.output[i])
            if not self._copy.put(i, prompt, output, r, r, blocks, now):
                continue
            arguments = (ph, r, i, self._kinds, self._jobs, now, out)
            if self._native is None:
                self._native = compiled(alone, *arguments)
            self._native(*arguments)
            found[k] = out
        return found


class ForeseenLatency(InformedEstimator):
    """Forecast lengths as `InformedEstimator`; TTFT and TPOT are what `Alone` finds, for certain.

    No predictor can be better informed of the present; what comes later it does not know either.
    """

    def __init__(self, truth: Ints, sigma: float, seed: int, *, calibrated: bool = False) -> None:
        super().__init__(truth, sigma, seed, calibrated=calibrated)
        self._alone: Alone | None = None

    def attach(self, live: FleetModel, case: Case) -> None:
        """The fleet model that is lived in."""
        self._alone = Alone(case, live)

    def fill(
        self,
        requests: RequestColumns,
        fleet: FleetColumns,
        routes: Routes,
        mask: Mask,
        now: float,
        out: EstimateColumns,
        requests_of: Sequence[InferenceRequest],
    ) -> None:
        """The roofline's columns, with the truth over them."""
        super().fill(requests, fleet, routes, mask, now, out, requests_of)
        if self._alone is None:
            return
        curve = self._reliability.curve
        grid = np.linspace(0.0, 1.0, len(curve))
        for i, request in enumerate(requests_of):
            open_ = np.flatnonzero(mask[i])
            output = float(self._truth[int(request.id)])
            ttft, e2e = self._alone.ask(int(request.id), routes.decode[open_].tolist(), now).T
            known = np.isfinite(e2e)
            at, ttft = open_[known], ttft[known]
            tpot = (e2e[known] - ttft) / max(output - 1.0, 1.0)
            out.ttft[i, at], out.tpot[i, at] = ttft[:, None], tpot[:, None]
            waited = now - requests.arrived[i]
            length = np.maximum(requests.length_q[i] - 1.0, 0.0)
            whole = waited + ttft[:, None] + tpot[:, None] * length <= requests.e2e[i]
            sound = (waited + ttft <= requests.ttft[i]) & (tpot <= requests.tpot[i])
            out.p_raw[i, at] = sound * whole.mean(1)
            out.p_slo[i, at] = np.interp(out.p_raw[i, at], grid, curve)
