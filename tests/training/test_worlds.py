"""Worlds drawn for training: same seed same world, within what was asked."""

import numpy as np
import pytest

from backends.sim.profiles import load_profiles, shipped
from training.scenario import Pools, Promise, Replicas, Scenario
from training.worlds import TIMES, Ranges, case_of, draw

TEMPLATE = Scenario(
    name="t",
    fleet=(
        Replicas(profile="h100-bf16-14b", count=3, variant="full"),
        Replicas(profile="a100-bf16-14b", count=2, variant="full"),
        Replicas(profile="l40s-int4-14b", variant="int4"),
    ),
    variants={"full": {"quality": 0.9}, "int4": {"quality": 0.8}},
    classes={"fast": Promise(tpot=0.03), "slow": Promise(rank=1), "batch": Promise(rank=2)},
)


def worlds(count=60, **fields):
    ranges = Ranges(**fields)
    return [draw(TEMPLATE, ranges, np.random.default_rng(k)) for k in range(count)]


def test_same_generator_same_world():
    assert worlds(5) == worlds(5)


def test_everything_is_drawn_within_its_range():
    """Fleets of the sizes asked for in which no variant is missing; delays, forecasts, shares."""
    drawn = worlds(plain=0.0, gateways=0.2)
    assert {sum(g.count for g in w.scenario.fleet) for w in drawn} == {4, 8}
    assert all({g.variant for g in w.scenario.fleet} == {"full", "int4"} for w in drawn)
    assert all(0.0 <= w.scenario.metrics.delay <= 1.0 for w in drawn)
    assert all(0.1 <= w.scenario.length_sigma <= 1.0 for w in drawn)
    assert {w.scenario.gateways for w in drawn} == {1, 2}
    medians = [w.scenario.workload[0].options["output_median"] for w in drawn]
    assert 40.0 <= min(medians) < 100.0
    assert 500.0 < max(medians) <= 1000.0
    for world in drawn:
        shares = [c.share for c in world.scenario.classes.values()]
        assert sum(shares) == pytest.approx(1.0)
        assert 0.25 <= shares[0] <= 0.75


def test_nothing_is_drawn_where_all_is_plain():
    plain = worlds(5, plain=1.0, gateways=0.0)
    kept = {"requests", "warmup"}
    assert all(
        w.scenario.model_dump(exclude=kept) == TEMPLATE.model_dump(exclude=kept) for w in plain
    )
    assert all(w.skew is None for w in plain)


def test_beliefs_are_off_by_the_factors_and_stay_with_the_world():
    """True over believed lies in the range; another seed of requests, the same beliefs."""
    world = next(w for w in worlds(requests=50) if w.skew is not None)
    profiles, pools = load_profiles(shipped()), Pools()
    one, other = (case_of(world, 10.0, seed, pools, profiles) for seed in (1, 2))
    assert one.believed == other.believed
    low, high = world.constants
    for true, believed in zip(one.fleet.replicas, one.believed.replicas, strict=True):
        for name in TIMES:
            actual, thought = getattr(true.profile, name), getattr(believed.profile, name)
            assert low * thought * (1 - 1e-9) <= actual <= high * thought * (1 + 1e-9)
