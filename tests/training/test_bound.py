"""The relaxation is above what any policy does, and below everything where a fleet is swamped."""

import numpy as np
import pytest

from tests.fakes.small_fleet import LiveRunner, small
from training.bound import ceiling
from training.evaluate import policy_named
from training.measures import measure, settled, work_of
from training.scenario import build

POLICIES = ("round_robin", "least_requests", "best_fit", "marginal")


def ceilings(case):
    counted = settled(case).astype(float)
    return ceiling(case, np.ones(len(case.trace)), counted), ceiling(
        case, work_of(case, 5.0), counted
    )


@pytest.mark.parametrize("rate", [4.0, 16.0, 60.0])
def test_no_policy_is_above_the_ceiling(rate):
    for seed in (1, 2):
        case = build(small(), rate, seed)
        plain, by_work = ceilings(case)
        for kind in POLICIES:
            run, _ = LiveRunner().run(case, policy_named(kind))
            report = measure(case, run, kind)
            assert report.attainment <= plain + 1e-9
            assert report.by_work["5"] <= by_work + 1e-9


def test_the_ceiling_falls_when_the_fleet_is_swamped():
    calm, swamped = build(small(), 1.0, 1), build(small(requests=1000), 1e4, 1)
    assert ceilings(calm)[1] > 0.98
    assert max(ceilings(swamped)) < 0.8


def test_a_request_that_no_idle_replica_serves_in_time_is_lost():
    classes = {"fast": small().classes["fast"].model_copy(update={"tpot": 0.001})}
    case = build(small(classes=classes), 1.0, 1)
    counted = settled(case)
    longer = case.trace.output[counted] > 1
    assert ceilings(case)[0] == pytest.approx(1.0 - longer.mean())


def test_without_limits_it_does_not_apply():
    from training.scenario import Promise

    case = build(small(classes={"any": Promise()}), 1.0, 1)
    assert ceilings(case) == (None, None)


def test_a_load_that_goes_on_leaves_no_time_afterwards():
    case = build(small(), 40.0, 1)
    worth, counted = np.ones(len(case.trace)), settled(case).astype(float)
    once = ceiling(case, worth, counted)
    for_ever = ceiling(case, worth, counted, stationary=True)
    assert 0.1 < for_ever < once <= 1.0
