"""Plans of a gateway: from what it has logged, variant by variant, and only told."""

import asyncio

import pytest

from domain.fleet import FleetSpec, Profile, ReplicaSpec, Variant
from gateway.planner import Planner
from policies.config import ElasticConfig

FAST = Profile(overhead=0.002, weights=0.011, per_token=6e-5)
FLEET = FleetSpec(
    replicas=(
        ReplicaSpec(name="a", variant="big", profile=FAST),
        ReplicaSpec(name="b", variant="big", profile=FAST),
        ReplicaSpec(name="c", variant="small", profile=FAST),
    ),
    variants=(Variant(name="big", model="m"), Variant(name="small", model="m")),
)
NOW = 1_000_000.0


def record(at, variant="big", cause="finished", prompt=2000, output=100, ttft=1.0, reason=""):
    return {
        "at": at,
        "model": "m",
        "variant": variant,
        "prompt_tokens": prompt,
        "slo": {"ttft": ttft, "tpot": 0.05, "e2e": None, "quality": None},
        "predicted": {"length_mean": float(output)},
        "outcome": {
            "cause": cause,
            "reason": reason,
            "prompt_tokens": prompt,
            "completion_tokens": output if cause == "finished" else 0,
        },
    }


def planned(records, workers=1, **config):
    planner = Planner(ElasticConfig(**config), lambda: FLEET, workers=workers, clock=lambda: NOW)
    for one in records:
        planner.saw(one)
    asyncio.run(planner.look())
    return planner


def steady(rate, seconds=100.0, **fields):
    return [record(NOW - seconds + k / rate, **fields) for k in range(int(rate * seconds))]


def replicas(planner):
    return {v["variant"]: v["replicas"] for v in planner.plan["variants"]}


def test_a_plan_wants_more_replicas_for_more_load_and_says_why():
    few, many = (replicas(planned(steady(rate)))["big"] for rate in (2.0, 20.0))
    assert few["now"] == many["now"] == 2
    assert few["wanted"] == 1
    assert many["wanted"] > 3
    assert f"{many['wanted']} are pressed" in many["reason"]


def test_a_variant_nobody_asked_for_is_not_planned_for():
    assert set(replicas(planned(steady(2.0)))) == {"big"}
    assert planned([]).plan["variants"] == []
    assert planned([]).plan["applied"] is False


def test_load_that_grows_is_met_before_it_comes():
    grown = [record(NOW - 100 * (1 - (k / 600) ** 0.5)) for k in range(600)]
    plan = planned(grown).plan["variants"][0]
    assert plan["growth"] > 1.5
    assert plan["replicas"]["wanted"] > replicas(planned(steady(6.0)))["big"]["wanted"]
    assert planned(steady(6.0)).plan["variants"][0]["growth"] == pytest.approx(1.0, abs=0.1)


def test_what_was_shed_is_demand_and_what_a_quota_refused_is_not():
    shed = steady(20.0, variant=None, cause="shed", reason="expired")
    refused = steady(20.0, variant=None, cause="shed", reason="rate")
    wrong = steady(20.0, cause="rejected")
    assert (
        replicas(planned(shed))["big"]["wanted"] == replicas(planned(steady(20.0)))["big"]["wanted"]
    )
    assert planned(refused + wrong).plan["variants"] == []


def test_each_of_several_workers_plans_for_all_traffic():
    alone = replicas(planned(steady(20.0)))["big"]["wanted"]
    assert replicas(planned(steady(5.0), workers=4))["big"]["wanted"] == alone


def test_what_is_older_than_the_window_is_forgotten():
    old = [record(NOW - 500 + k / 20) for k in range(2000)]
    assert planned(old).plan["variants"] == []


def test_pools_are_told_where_two_kinds_disturb_each_other():
    mixed = steady(12.0, prompt=300, ttft=0.5) + steady(3.0, prompt=7000, ttft=3.0)
    pools = planned(sorted(mixed, key=lambda r: r["at"])).plan["variants"][0]["pools"]
    assert pools["now"] == [{"low_tokens": 0.0, "high_tokens": None, "replicas": 2}]
    assert len(pools["wanted"]) == 2
    assert pools["wanted"][-1]["high_tokens"] is None
    assert pools["missed_per_s_then"] < pools["missed_per_s_now"]


def test_gauges_tell_the_same():
    planner = planned(steady(20.0))
    read = {gauge.name: dict(gauge.read()) for gauge in planner.gauges()}
    plan = planner.plan["variants"][0]
    assert read["sluice_plan_replicas"] == {("big",): plan["replicas"]["wanted"]}
    assert read["sluice_plan_pressure"]["big", "ttft"] == plan["pressure"]["ttft"]
    assert set(read["sluice_plan_growth"]) == {("big",)}
