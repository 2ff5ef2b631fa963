"""The latency layer in the fleet model: lengths of known quality, latency as the gateway serves it.

`logged` lives through a case and returns what a decision log would hold of it, as columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.sim.fleet import FleetModel
from domain.columns import LOAD_GRID, EstimateColumns, FleetColumns, Mask, RequestColumns, Routes
from domain.fleet import FleetSpec
from domain.length import QUANTILE_GRID
from domain.outcome import Cause, Outcome
from domain.ports import Estimator
from domain.request import InferenceRequest
from policies.config import PolicyConfig
from policies.factory import build_core
from predictors.latency import WIDTH, class_of
from predictors.latency_gbdt import MIDDLE, LatencyGbdt
from predictors.latency_layer import LatencyLayer, p90
from training.informed import InformedEstimator
from training.measures import Run
from training.scenario import Case
from training.traces import Floats, Ints
from training.virtual import VirtualShell


class LearnedLatency(InformedEstimator):
    """Forecast lengths as `InformedEstimator`, latency by the layer that the gateway serves with;
    `model` None records rows and predicts by the roofline.
    """

    def __init__(
        self,
        truth: Ints,
        sigma: float,
        seed: int,
        model: LatencyGbdt | None = None,
        *,
        calibrated: bool = False,
    ) -> None:
        super().__init__(truth, sigma, seed, calibrated=calibrated)
        self.latency = LatencyLayer(model)
        self._prefill: list[int] = []

    def bind(self, fleet: FleetSpec, routes: Routes) -> None:
        """Take the fleet in."""
        super().bind(fleet, routes)
        self.latency.bind(fleet)
        self._prefill = routes.prefill.tolist()

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
        """The roofline's columns, refined."""
        super().fill(requests, fleet, routes, mask, now, out, requests_of)
        self.latency.fill(requests, fleet, routes, mask, self.step_factors, now, out)

    def stepped(self, replicas: Sequence[int], times: Sequence[float]) -> None:
        """When steps ended."""
        self.latency.stepped(replicas, times)

    def basis(self, index: int, route: int) -> tuple[float, ...]:
        """The row of the chosen route."""
        return self.latency.basis(index, route)

    def learn(self, outcome: Outcome) -> None:
        """The layer's part, then the baseline's."""
        if outcome.route is not None:
            self.latency.learn(outcome, self._prefill[outcome.route])
        super().learn(outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyLog:
    """n outcomes in order of arrival. `rows` (n, WIDTH) as `predictors.latency` made them; `ttft`
    (from the decision) and `tpot` (n,) in seconds, NaN where unknown; `tokens` (n,) of output,
    `kind` (n,) the replica's class; `q_ttft`, `q_tpot` (n, 2) predicted median and P90;
    `quantiles_*` (n, U) at the load grid, `lengths` (n, Q) forecast; `p_raw`, `p_slo` (n,); `met`
    (n,) 1, 0 or NaN; `limits` (n, 3): TTFT and E2E left at the decision with TPOT between them, inf
    where none.
    """

    rows: Floats
    ttft: Floats
    tpot: Floats
    tokens: Floats
    kind: NDArray[np.str_]
    q_ttft: Floats
    q_tpot: Floats
    quantiles_ttft: Floats
    quantiles_tpot: Floats
    lengths: Floats
    p_raw: Floats
    p_slo: Floats
    met: Floats
    limits: Floats

    def __len__(self) -> int:
        return len(self.ttft)

    def take(self, keep: NDArray[np.generic]) -> LatencyLog:
        """The rows given by mask or index."""
        return LatencyLog(**{f.name: getattr(self, f.name)[keep] for f in fields(self)})


def joined(logs: list[LatencyLog]) -> LatencyLog:
    """Several logs, one after the other."""
    return LatencyLog(
        **{
            f.name: np.concatenate([getattr(log, f.name) for log in logs])
            for f in fields(LatencyLog)
        }
    )


def logged(
    case: Case, policy: PolicyConfig, model: LatencyGbdt | None = None
) -> tuple[LatencyLog, Run, LearnedLatency]:
    """Live through a case with one gateway; its log, the run and the estimator as it ended."""
    sigma = case.scenario.length_sigma
    estimator = LearnedLatency(case.trace.output, 0.6 if sigma is None else sigma, case.seed, model)
    return lived(case, policy, estimator)


Prepare = Callable[[FleetModel, Case], None]
"""Is shown the fleet model before anything happens."""


def lived(
    case: Case, policy: PolicyConfig, estimator: LearnedLatency, prepare: Prepare | None = None
) -> tuple[LatencyLog, Run, LearnedLatency]:
    """As `logged`, with a given estimator."""
    run, outcomes = live(case, policy, estimator, prepare)
    kinds = [class_of(r.profile) for r in case.fleet.replicas]
    return _columns(outcomes, kinds, estimator), run, estimator


def live(
    case: Case, policy: PolicyConfig, estimator: Estimator, prepare: Prepare | None = None
) -> tuple[Run, list[Outcome]]:
    """A case through the live core with one gateway and this estimator."""
    core = build_core(
        policy.model_copy(update={"seed": case.core_seed(policy.seed)}),
        fleet=case.believed,
        estimator=estimator,
        tenants=case.tenants,
        classes=case.classes,
    )
    shell = VirtualShell(case, [core])
    if prepare is not None:
        prepare(shell.model, case)
    run = shell.run()
    return run, [o for o in shell.outcomes if o is not None]


def _columns(outcomes: list[Outcome], kinds: list[str], estimator: LearnedLatency) -> LatencyLog:
    kept = [
        (o, o.prediction, o.sent)
        for o in outcomes
        if o.prediction is not None and len(o.prediction.basis) == WIDTH and o.sent is not None
    ]
    nan, inf = float("nan"), float("inf")
    limits = []
    for o, _, sent in kept:
        slo, waited = o.request.slo, sent - o.arrived
        limits.append(
            (
                inf if slo.ttft is None else slo.ttft - waited,
                inf if slo.tpot is None else slo.tpot,
                inf if slo.e2e is None else slo.e2e - waited,
            )
        )

    def floats(values: Iterable[Any], width: int | None = None) -> Floats:
        array = np.array(list(values), np.float64)
        return array if width is None else array.reshape(-1, width)

    first = [nan if o.first_token is None else o.first_token - sent for o, _, sent in kept]
    pace = [o.tpot if o.cause is Cause.FINISHED and o.tpot is not None else nan for o, _, _ in kept]
    return LatencyLog(
        rows=floats((p.basis for _, p, _ in kept), WIDTH),
        ttft=floats(first),
        tpot=floats(pace),
        tokens=floats(o.usage.completion for o, _, _ in kept),
        kind=np.array([kinds[o.replica or 0] for o, _, _ in kept], np.str_),
        q_ttft=floats(((p.ttft[MIDDLE], p90(p.ttft)) for _, p, _ in kept), 2),
        q_tpot=floats(((p.tpot[MIDDLE], p90(p.tpot)) for _, p, _ in kept), 2),
        quantiles_ttft=floats((p.ttft for _, p, _ in kept), len(LOAD_GRID)),
        quantiles_tpot=floats((p.tpot for _, p, _ in kept), len(LOAD_GRID)),
        lengths=floats(
            (estimator.length(o.request).quantiles(QUANTILE_GRID) for o, _, _ in kept),
            len(QUANTILE_GRID),
        ),
        p_raw=floats(p.p_raw for _, p, _ in kept),
        p_slo=floats(p.p_slo for _, p, _ in kept),
        met=floats(nan if o.met is None else float(o.met) for o, _, _ in kept),
        limits=floats(limits, 3),
    )
