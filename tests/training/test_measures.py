"""Measures against a case small enough to count by hand."""

from dataclasses import replace

import numpy as np
import pytest

from training.evaluate import Scan, climb, falling
from training.measures import ABSENT, MET, MISSED, OUT, Run, measure
from training.scenario import Promise, Replicas, Scenario, build


def case_of(n, **fields):
    scenario = Scenario(
        name="tiny",
        fleet=(Replicas(profile="h100-bf16-14b", count=2),),
        classes={"only": Promise(ttft=1.0)},
        requests=n,
        warmup=0,
        **fields,
    )
    return build(scenario, 10.0, 1)


def run_of(case, verdict, **fields):
    n = len(verdict)
    base = {
        "arrival": np.arange(n) * 1.0,
        "sent": np.arange(n) * 1.0,
        "first": np.arange(n) + 0.5,
        "last": np.arange(n) + 1.5,
        "replica": np.zeros(n, np.int64),
        "cached": np.zeros(n, np.int64),
        "verdict": np.array(verdict, np.int8),
        "busy": np.array([10.0, 0.0]),
    }
    return Run(**(base | fields))


def with_lengths(case, prompt, output):
    trace = replace(case.trace, prompt=np.array(prompt), output=np.array(output))
    return replace(case, trace=trace)


def test_attainment_counts_all_arrivals_but_those_out_and_absent():
    case = with_lengths(case_of(5), [100] * 5, [3] * 5)
    report = measure(case, run_of(case, [MET, MISSED, OUT, ABSENT, MET]), "p")
    assert report.arrivals == 3
    assert report.attainment == pytest.approx(2 / 3)
    assert report.goodput == pytest.approx(2 / 4)  # over four seconds of arrivals


def test_work_weighs_prompt_and_output():
    case = with_lengths(case_of(2), [100, 1000], [20, 100])
    report = measure(case, run_of(case, [MET, MISSED]), "p")
    assert report.by_work["5"] == pytest.approx(200 / (200 + 1500))
    assert report.by_work["1"] == pytest.approx(120 / (120 + 1100))
    assert report.attainment == 0.5


def test_times_shares_and_costs():
    case = with_lengths(case_of(4), [10, 10, 10, 10], [1, 2, 11, 11])
    replica = np.array([0, 0, 0, 1])
    report = measure(case, run_of(case, [MET] * 4, replica=replica), "p")
    assert report.ttft["p50"] == pytest.approx(0.5)
    # 1 s over 1, 10 and 10 tokens after the first; the single token has no pace
    assert report.tpot["mean"] == pytest.approx((1.0 + 0.1 + 0.1) / 3)
    assert report.largest_share == 0.75
    assert report.jain == pytest.approx(1.0)
    assert report.cost_per_good == pytest.approx(10.0 * 2.5 / 4)
    assert report.joules_per_good == pytest.approx(10.0 * 700 / 4)


def test_shed_and_lost_are_told_apart():
    case = with_lengths(case_of(4), [10] * 4, [5] * 4)
    sent = np.array([np.nan, 1.0, 2.0, 3.0])
    last = np.array([np.nan, np.nan, 3.5, 4.5])
    report = measure(case, run_of(case, [MISSED, MISSED, MET, MET], sent=sent, last=last), "p")
    assert (report.shed, report.lost) == (0.25, 0.25)


def test_slices_need_enough_arrivals():
    n = 1300
    case = case_of(n)
    verdict = np.where(np.arange(n) % 10 == 0, MISSED, MET)
    report = measure(case, run_of(case, verdict), "p")
    assert set(report.slices) == {
        *(f"prompt q{k}" for k in range(1, 5)), "class only", "tenant default",
    }  # fmt: skip
    long = case.trace.prompt > np.quantile(case.trace.prompt, 0.75)
    unfair = measure(case, run_of(case, np.where(long, MISSED, MET)), "p")
    assert unfair.worst_slice == pytest.approx(0.0, abs=0.02)
    assert not unfair.fair_at(0.5)
    assert report.fair_at(0.85)
    small = measure(case_of(200), run_of(case_of(200), [MET] * 200), "p")
    assert small.slices == {}


def test_the_last_rate_is_read_off_the_isotonic_fit():
    assert falling(np.array([0.9, 0.95, 0.8])).tolist() == pytest.approx([0.925, 0.925, 0.8])
    scan = Scan(rates=(10.0, 20.0, 30.0), attainment=(0.99, 0.95, 0.75))
    assert scan.last_at(0.9) == pytest.approx(22.5)
    assert scan.last_at(0.995) == 0.0
    assert scan.last_at(0.5) == 30.0


@pytest.mark.parametrize("start", [9.0, 40.0, 200.0])
def test_the_best_rules_knee_is_found_from_below_and_from_above(start):
    """It loses a point a request/s beyond 40, the other beyond 20."""
    found = climb(lambda rate: [1.0 - 0.01 * max(rate - free, 0.0) for free in (40.0, 20.0)], start)
    assert found.reached
    assert found.rates[0] == pytest.approx(50.0, abs=0.5)
    assert found.rates[1] < found.rates[0]


def test_a_fleet_that_never_meets_the_target_has_a_knee_too():
    """Up to where the best there is has lost some of it; a rule far below that has none."""
    found = climb(lambda rate: [0.85 - 0.01 * max(rate - 20.0, 0.0), 0.5], 10.0)
    assert not found.reached
    assert 20.0 < found.rates[0] <= 30.0
    assert found.rates[1] == 0.0
