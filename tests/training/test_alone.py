"""What a request would see alone is what it sees where nothing else comes."""

import numpy as np
import pytest

from training.alone import Alone, ForeseenLatency
from training.evaluate import policy_named
from training.latency_sim import live
from training.scenario import Arrivals, Promise, Replicas, Scenario, build


class Noting(ForeseenLatency):
    """Notes what it foresaw for every request, on every replica."""

    def __init__(self, *args):
        super().__init__(*args)
        self.said = {}

    def fill(self, requests, fleet, routes, mask, now, out, requests_of):
        super().fill(requests, fleet, routes, mask, now, out, requests_of)
        for i, request in enumerate(requests_of):
            self.said[int(request.id)] = out.ttft[i, :, 0].copy(), out.tpot[i, :, 0].copy()


def case(rate, n=60):
    scenario = Scenario(
        name="t",
        fleet=(
            Replicas(profile="h100-bf16-14b", count=1),
            Replicas(profile="l40s-int4-14b", count=2),
        ),
        classes={"fast": Promise(ttft=0.5, tpot=0.1)},
        arrivals=Arrivals(kind="poisson"),
        constants_error=0.3,
        requests=n,
        warmup=0,
    )
    return build(scenario, rate, 3)


def foreseen(rate, policy):
    bed = case(rate)
    estimator = Noting(bed.trace.output, 0.3, bed.seed)
    return bed, live(bed, policy, estimator, prepare=estimator.attach)[0], estimator.said


def chosen(run, said):
    """TTFT and TPOT foreseen on the replica that each request went to."""
    pairs = [(said[i][0][r], said[i][1][r]) for i, r in enumerate(run.replica.tolist())]
    return np.array(pairs).T


def test_what_is_foreseen_happens_where_requests_do_not_meet():
    """A request every few minutes, constants off for the gateway: the truth to a nanosecond."""
    bed, run, said = foreseen(0.005, policy_named("round_robin", hold=False, shed_below=0.0))
    ttft, tpot = chosen(run, said)
    np.testing.assert_allclose(run.first - run.sent, ttft, rtol=0, atol=1e-9)
    several = bed.trace.output > 1
    np.testing.assert_allclose(run.tpot(bed.trace.output)[several], tpot[several], atol=1e-9)


def test_what_comes_later_only_delays():
    """Under load the truth about the present is a lower bound for nearly every first token."""
    _, run, said = foreseen(25.0, policy_named("round_robin", hold=False, shed_below=0.0))
    later = run.first - run.sent - chosen(run, said)[0]
    assert np.quantile(later, 0.05) >= -1e-9
    assert later.max() > 0.0


def test_asking_changes_nothing():
    bed = case(10.0)
    runs = []
    for ask in (False, True):
        estimator = Noting(bed.trace.output, 0.3, bed.seed)
        policy = policy_named("round_robin", hold=False)
        runs.append(live(bed, policy, estimator, prepare=estimator.attach if ask else None)[0])
    np.testing.assert_array_equal(runs[0].last, runs[1].last)


def test_a_request_that_fits_nowhere_has_no_time():
    bed = case(1.0)

    def ask(model, _):
        model.kill(0, 0.0)
        found = Alone(bed, model).ask(0, [0, 1], 0.0)
        assert np.isnan(found[0]).all()
        assert found[1, 0] > 0.0
        model.revive(0)

    live(bed, policy_named("round_robin"), Noting(bed.trace.output, 0.3, 3), prepare=ask)


@pytest.mark.parametrize("sigma", [0.0, 0.6])
def test_certain_limits_make_certain_probabilities(sigma):
    """TTFT and TPOT are known, so P(SLO) without an E2E limit is 0 or 1 before calibration."""
    bed = case(5.0, 30)
    estimator = ForeseenLatency(bed.trace.output, sigma, bed.seed)
    seen = []
    fill = estimator.fill

    def noting(requests, fleet, routes, mask, now, out, requests_of):
        fill(requests, fleet, routes, mask, now, out, requests_of)
        seen.append(out.p_raw[0, mask[0]].copy())

    estimator.fill = noting
    live(bed, policy_named("best_fit"), estimator, prepare=estimator.attach)
    assert set(np.concatenate(seen).tolist()) <= {0.0, 1.0}
