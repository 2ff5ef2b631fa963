"""Read-offs of the table from cells with known curves."""

import numpy as np
import pytest

from tests.fakes.small_fleet import small
from training.compare import Cell, Outcome, Plan, entrants
from training.measures import Report
from training.report import markdown, terminal
from training.table import summarise
from training.workers import Knee, Yardstick

LOADS = (0.5, 1.0, 1.5, 2.0)
QUANTILES = {"mean": 0.1, "p50": 0.1, "p90": 0.2, "p99": 0.3}


def report(policy, load, seed, attainment, worst):
    return Report(
        scenario="small", policy=policy, rate=10.0 * load, seed=seed, arrivals=2000,
        attainment=attainment + 0.02, by_work=dict.fromkeys(("1", "5", "10"), attainment),
        goodput=1.0, size_fair_goodput=1.0, slices={"prompt q1": 1.0, "prompt q4": worst},
        worst_slice=worst, ttft=QUANTILES, tpot=QUANTILES, shed=0.0, lost=0.0, largest_share=0.3,
        jain=1.0, cost_per_good=1.0, joules_per_good=1.0, preemptions=0, cached_share=0.0,
        requests_per_cpu_second=1.0, microseconds_per_decision=1.0,
    )  # fmt: skip


def table(curves, seeds=6, noise=0.0, worst=1.0, yards=()):
    """Curves map policies to attainment at `LOADS`; noise is shared by the policies of a seed."""
    rng = np.random.default_rng(3)
    shift = rng.normal(0.0, noise, seeds)
    shift -= shift.mean()
    cells = [
        Cell(
            scenario="small", policy=name, load=load, seed=s, live=False,
            report=report(name, load, s, value + shift[s], worst),
        )
        for name, curve in curves.items()
        for load, value in zip(LOADS, curve, strict=True)
        for s in range(seeds)
    ]  # fmt: skip
    plan = Plan(scenarios=(small(),), entrants=tuple(entrants(curves)), loads=LOADS)
    knee = Knee(rate=10.0, policy="best_fit", reached=True)
    return summarise(plan, Outcome(knees={"small": knee}, cells=cells, yardsticks=yards)).blocks[0]


CURVES = {
    "best_fit": (0.98, 0.92, 0.82, 0.60),
    "round_robin": (0.93, 0.80, 0.70, 0.50),
    "marginal": (0.99, 0.96, 0.88, 0.70),
}


def row(block, name):
    return next(r for r in block.rows if r.policy == name)


def test_rates_ratios_and_the_baseline():
    block = table(CURVES)
    assert [r.policy for r in block.rows] == ["marginal", "best_fit", "round_robin"]
    assert block.baseline == "best_fit"
    assert row(block, "best_fit").fair_goodput["0.9"].rate.value == pytest.approx(11.0)
    assert row(block, "marginal").fair_goodput["0.9"].ratio.value == pytest.approx(13.75 / 11.0)
    assert row(block, "marginal").plain_goodput["0.9"].rate.value == pytest.approx(15.0)


def test_intervals_of_ratios_are_narrower_than_of_rates():
    block = table(CURVES, noise=0.02)
    found = row(block, "marginal").fair_goodput["0.9"]
    assert found.ratio.low > 1.0
    assert (found.ratio.high - found.ratio.low) / found.ratio.value < (
        found.rate.high - found.rate.low
    ) / found.rate.value
    assert row(block, "marginal").difference[2].low == pytest.approx(0.06)


def test_a_starved_slice_costs_the_rate():
    block = table(CURVES, worst=0.8)
    assert row(block, "marginal").fair_goodput["0.9"].rate.value == 0.0
    assert row(block, "marginal").plain_goodput["0.9"].rate.value > 0.0
    assert row(block, "marginal").worst_slice == "prompt q4"


def test_gaps_and_ends_of_the_grid_are_told():
    block = table({"best_fit": (0.95, 0.88, 0.94, 0.92), "lmetric": (0.99, 0.98, 0.97, 0.95)})
    assert row(block, "best_fit").fair_goodput["0.9"].gap
    assert row(block, "lmetric").fair_goodput["0.9"].beyond
    assert not row(block, "lmetric").fair_goodput["0.9"].gap


def test_equal_orders_are_stable():
    assert set(table(CURVES, noise=0.01).stability.values()) == {1.0}


def test_it_is_printed_whole():
    yards = [
        Yardstick(scenario="small", load=x, seed=1, plain=1.0, by_work=0.95,
                  look_ahead=report("look-ahead", x, 1, 0.97, 0.97))
        for x in LOADS
    ]  # fmt: skip
    block = table(CURVES, yards=yards)
    assert block.yardsticks["LP ceiling by work"] == pytest.approx((0.95,) * 4)
    from training.table import Table

    for text in (terminal(Table(blocks=(block,), stability={})),
                 markdown(Table(blocks=(block,), stability={}))):  # fmt: skip
        for word in ("marginal", "best_fit", "look-ahead @90: >20.0/s", "11.0 [11.0, 11.0]"):
            assert word in text
