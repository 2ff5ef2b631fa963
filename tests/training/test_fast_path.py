"""The compiled loop and the live core decide alike, request by request, for every scorer."""

from dataclasses import replace

import numpy as np
import pytest

from domain.errors import ConfigError
from domain.units import Seconds
from tests.fakes.networks import layers_of
from training.evaluate import policy_named, run_live
from training.fast_path import CompiledLoop, supports
from training.measures import ABSENT, MET
from training.scenario import Failure, Metrics, Promise, Replicas, Scenario, build

pytestmark = pytest.mark.slow

SCORERS = (
    "random", "round_robin", "weighted_round_robin", "least_requests", "least_tokens",
    "power_of_two", "lmetric", "pools", "best_fit", "prefix_affinity", "sticky", "predicted",
    "just_enough", "marginal", "actor", "network",
)  # fmt: skip
DEFAULTS = {
    "actor": {
        "weights": {"tpot_used": {"one": -0.4, "tight": 0.5}, "slow": {"tight": -0.3}},
        "hold_more": {"chance": 0.3, "pressure": -0.4, "waited": 0.2},
    },
    "network": {"layers": layers_of(4, seed=5, bias=[-0.3, 0.2]), "reach": 0.5},
}
"""Weights that place, hold and refuse otherwise than the rule."""


@pytest.fixture(scope="module")
def loop():
    return CompiledLoop()


def scenario(groups, n=1500, **fields):
    fleet = tuple(
        Replicas(profile=name, count=groups * k)
        for name, k in (
            ("h100-bf16-14b", 3), ("h100-fp8-14b", 2), ("a100-bf16-14b", 2), ("l40s-int4-14b", 1))
    )  # fmt: skip
    classes = {
        "fast": Promise(ttft=0.3, ttft_per_token=2e-4, tpot=0.03),
        "slow": Promise(rank=1, ttft=1.0, ttft_per_token=6e-4, tpot=0.1),
        "batch": Promise(rank=2, share=0.3, e2e=20.0, sheddable=False, max_wait=60, patience=1.0),
    }
    base = {"tenants": {"a": 3.0, "b": 1.0}, "requests": n}
    return Scenario(name="t", fleet=fleet, classes=classes, **(base | fields))


def policy_of(kind, **options):
    """A policy; without early refusal unless it asks for it."""
    return policy_named(kind, **({"overload_target": 0.0} | DEFAULTS.get(kind, {}) | options))


def assert_alike(loop, case, policy):
    fast = loop.run(case, policy)
    slow = run_live(case, policy, learning=False)
    np.testing.assert_array_equal(np.isnan(fast.sent), np.isnan(slow.sent))
    sent = np.isfinite(fast.sent)
    np.testing.assert_array_equal(fast.replica[sent], slow.replica[sent])
    for name in ("arrival", "sent", "first", "last", "verdict"):
        np.testing.assert_array_equal(getattr(fast, name), getattr(slow, name), err_msg=name)
    return fast


@pytest.mark.parametrize("kind", SCORERS)
@pytest.mark.parametrize(("groups", "rate"), [(1, 40.0), (1, 70.0), (8, 320.0)])
def test_every_scorer_decides_alike(loop, kind, groups, rate):
    """Below and past the knee, at 8 and at 64 replicas."""
    case = build(scenario(groups), rate, 3)
    run = assert_alike(loop, case, policy_of(kind, seed=5))
    assert len(np.unique(run.replica)) > 2


@pytest.mark.parametrize(
    "options",
    [
        {"explore": 0.2},
        {"shed_below": 0.6},
        {"shed_below": 0.6, "hold_until": 0.3},
        {"fairness": 5.0, "alpha_max": 0.5},
    ],
)
def test_options_of_the_core_act_alike(loop, options):
    case = build(scenario(1), 80.0, 4)
    run = assert_alike(loop, case, policy_of("marginal", **options))
    assert np.isnan(run.sent).sum() > 20


@pytest.mark.parametrize("tenants", [{"a": 3.0, "b": 1.0}, {"flood": 9.0, "x": 1.0, "y": 0.5}])
@pytest.mark.parametrize("kind", ["best_fit", "least_requests"])
def test_early_refusal_acts_alike(loop, kind, tenants):
    """Past the knee: by class, by fair share, with kept times."""
    case = build(scenario(1, tenants=tenants), 110.0, 5)
    run = assert_alike(loop, case, policy_of(kind, overload_target=0.05, shed_below=0.3))
    open_gate = loop.run(case, policy_of(kind, shed_below=0.3))
    assert np.isnan(run.sent).sum() > np.isnan(open_gate.sent).sum() + 20


def test_kept_times_act_alike(loop, monkeypatch):
    """Sessions of several requests, more of them than tickets."""
    monkeypatch.setattr("policies.overload.TICKETS", 15)
    case = build(scenario(1), 130.0, 6)
    n = len(case.trace)
    case = replace(case, trace=replace(case.trace, session=np.arange(n) % 60))
    assert_alike(loop, case, policy_of("best_fit", overload_target=0.02))


@pytest.mark.parametrize("remembered", [10_000, 25])
def test_deadlines_of_chains_act_alike(loop, monkeypatch, remembered):
    monkeypatch.setattr("policies.chains.SESSIONS", remembered)
    monkeypatch.setattr("policies.chains.Chains.__init__.__defaults__", (remembered,))
    case = build(scenario(1, n=600), 60.0, 8)
    trace = replace(case.trace, session=np.arange(600) % 80)
    chained = tuple(replace(c, chain=Seconds(6.0 + 4.0 * c.rank)) for c in case.classes)
    case = replace(case, trace=trace, classes=chained)
    run = assert_alike(loop, case, policy_of("predicted", shed_below=0.5))
    free = loop.run(replace(case, classes=build(scenario(1, n=5), 1.0, 8).classes),
                    policy_of("predicted", shed_below=0.5))  # fmt: skip
    assert (run.verdict == MET).sum() < (free.verdict == MET).sum()


@pytest.mark.parametrize("delay", [0.2, 0.5, 1.0])
def test_late_readings_act_alike(loop, delay):
    case = build(scenario(1, metrics=Metrics(delay=delay)), 60.0, 6)
    assert_alike(loop, case, policy_of("best_fit"))


def test_many_tenants_act_alike(loop):
    """More lanes than a release looks at."""
    tenants = {f"t{k}": 1.0 / (k + 1) for k in range(12)}
    case = build(scenario(1, tenants=tenants), 90.0, 7)
    assert_alike(loop, case, policy_of("least_requests"))


@pytest.mark.parametrize("kind", ["least_requests", "marginal"])
def test_a_flood_that_grows_old_acts_alike(loop, kind):
    """Ripe requests of a tenant far ahead wait like the rest; others claim windows."""
    aged = {
        "fast": Promise(ttft=0.5, tpot=0.05, patience=0.3, sheddable=False, max_wait=8.0),
        "slow": Promise(rank=1, ttft=3.0, tpot=0.1, patience=0.5),
        "batch": Promise(rank=2, e2e=30.0, sheddable=False, max_wait=40.0, patience=2.0),
    }
    flood = scenario(1, tenants={"flood": 8.0, "calm": 1.0}).model_copy(update={"classes": aged})
    case = build(flood, 90.0, 10)
    run = assert_alike(loop, case, policy_of(kind))
    assert np.nanmax(run.sent - run.arrival) > 2.0


@pytest.mark.parametrize("remembered", [50_000, 40])
def test_sessions_act_alike(loop, monkeypatch, remembered):
    """Steps of a session follow one another, and stick to a replica while it is remembered."""
    monkeypatch.setattr("policies.prefix_index.SESSIONS", remembered)
    case = build(scenario(1, n=600), 400.0, 8)
    n = len(case.trace)
    root = np.arange(n) // 3 * 3
    follows = np.where(np.arange(n) == root, root, np.arange(n) - 1)
    think = np.where(follows == np.arange(n), 0.0, 0.3)
    trace = replace(case.trace, follows=follows, think=think, session=root)
    case = replace(case, trace=trace)
    run = assert_alike(loop, case, policy_of("sticky", shed_below=0.3))
    assert (run.verdict == ABSENT).sum() > 0


def test_split_fleets_act_alike(loop):
    pair = (
        Replicas(profile="h100-bf16-14b", phase="prefill", count=2),
        Replicas(profile="a100-bf16-14b", phase="decode", count=3),
    )
    case = build(scenario(1).model_copy(update={"fleet": pair}), 15.0, 9)
    assert_alike(loop, case, policy_of("round_robin"))


def test_what_it_does_not_know_it_refuses(loop):
    calm = build(scenario(1, n=50), 10.0, 1)
    dying = build(scenario(1, n=50, failures=(Failure(replica=0, at=0.5),)), 10.0, 1)
    assert supports(calm, policy_of("best_fit"))
    assert not supports(dying, policy_of("best_fit"))
    with pytest.raises(ValueError, match="does not know"):
        loop.run(dying, policy_of("best_fit"))
    with pytest.raises(ConfigError):
        policy_named("nonsense")
