"""Controllers: what they hear turns into orders that a fleet can carry out, and nothing else."""

from math import inf
from pathlib import Path

import numpy as np
import pytest

from backends.sim.actions import Bounds, Flip, Reshape, Scale, Stage
from backends.sim.profiles import load_profiles, shipped
from domain.errors import ConfigError
from domain.fleet import ReplicaSpec
from domain.request import InferenceRequest, Slo
from policies.elastic import Layout
from training.elastic import Plans, PoolBounds, Roles, Size, script_for
from training.evaluate import policy_named, run_live
from training.measures import MET
from training.scenario import build, read
from training.virtual import Sight

FOLDER = Path(__file__).parents[2] / "configs" / "scenarios" / "elastic"
PROFILES = load_profiles(shipped())
A100 = PROFILES["a100-bf16-14b"]
H100 = PROFILES["h100-bf16-14b"]
UP, DOWN, DRAINING, STILL = Stage.SERVING, Stage.DOWN, Stage.DRAINING, Stage.STILL


def sight(specs, stages=None, running=None, held=0.0):
    m = len(specs)
    return Sight(
        specs=specs,
        stages=stages or [UP] * m,
        running=np.array(running if running is not None else [0.0] * m, np.float64),
        backlog=np.zeros(m),
        held=held,
    )


def replicas(profile, count, **fields):
    return [ReplicaSpec(name=f"r{k}", variant="v", profile=profile, **fields) for k in range(count)]


def tell(controller, rate, seconds=10.0, at=0.0, prompt=500, output=100, ttft=1.0, tpot=0.05,
         name="standard"):  # fmt: skip
    """Requests of varied lengths (the same ones every time) at a steady rate."""
    rng = np.random.default_rng(0)
    for k in range(int(rate * seconds)):
        slo = Slo(ttft=ttft, tpot=tpot)
        size = float(round(prompt * rng.lognormal(0.0, 0.4)))
        request = InferenceRequest(id=str(k), tenant="t", model="m", prompt_tokens=size, slo=slo,
                                   class_name=name)  # fmt: skip
        controller.arrived(at + k / rate, request, output)


def sides(prefill, total=8):
    return [
        ReplicaSpec(name=f"r{k}", variant="v", profile=A100,
                    phase="prefill" if k < prefill else "decode")
        for k in range(total)
    ]  # fmt: skip


@pytest.mark.parametrize("make", [PoolBounds, Roles, lambda: Size(10.0)])
def test_nothing_is_ordered_before_enough_has_come(make):
    controller = make()
    tell(controller, 1.0)
    assert controller.orders(10.0, sight(sides(4))) == []


def test_the_emptiest_decoder_begins_to_prefill_when_prompts_are_long():
    controller = Roles()
    tell(controller, 12.0, prompt=2000, output=20)
    (order,) = controller.orders(10.0, sight(sides(4), running=[0, 0, 0, 0, 9, 8, 1, 7]))
    assert order == Flip(replica=6, phase="prefill")


def test_roles_stay_where_nothing_is_pressed():
    controller = Roles()
    tell(controller, 2.0, seconds=10.0, prompt=200, output=20)
    assert controller.orders(10.0, sight(sides(4))) == []


def test_the_last_replica_that_serves_a_side_stays():
    controller = Roles()
    tell(controller, 12.0, prompt=2000, output=20)
    stages = [UP] * 5 + [STILL] * 3
    assert controller.orders(10.0, sight(sides(4), stages=stages)) == []


def test_pools_take_bounds_in_order_and_are_not_told_twice():
    controller = PoolBounds()
    specs = replicas(H100, 8)
    tell(controller, 20.0, prompt=300, ttft=0.5, tpot=0.03)
    tell(controller, 4.0, prompt=8000, ttft=3.0, tpot=0.03)
    orders = controller.orders(10.0, sight(specs))
    assert {type(order) for order in orders} == {Bounds}
    bounds = {order.replica: (order.low, order.high) for order in orders}
    pairs = [bounds.get(r, (0.0, inf)) for r in range(8)]
    assert pairs == sorted(pairs)
    assert pairs[0][0] == 0.0
    assert pairs[-1][1] == inf
    assert len(set(pairs)) > 1
    told = [
        ReplicaSpec(name=s.name, variant="v", profile=H100, pool_low=low, pool_high=high)
        for s, (low, high) in zip(specs, pairs, strict=True)
    ]
    again = controller.orders(10.0, sight(told))
    assert len(again) < 8


ONE, TWO = "l40s-vllm-qwen3-8b-bfloat16-tp1", "l40s-vllm-qwen3-8b-bfloat16-tp2"
OFFERS = [
    Layout(name=ONE, gpus=1, profile=PROFILES[ONE]),
    Layout(name=TWO, gpus=2, profile=PROFILES[TWO]),
]


def test_engines_make_room_before_another_starts():
    """Two GPUs alone become a pair: first they drain, then the pair starts; and not both pairs at
    once where half of the GPUs is the most.
    """
    controller = Plans(OFFERS, classes=["tight"], patience=1)
    tell(controller, 15.0, prompt=300, output=220, tpot=0.022, name="tight")
    specs = replicas(PROFILES[ONE], 4)
    first = controller.orders(10.0, sight(specs))
    assert first == [Scale(replica=0, up=False), Scale(replica=1, up=False)]
    draining = [DRAINING, DOWN, UP, UP]
    assert controller.orders(10.0, sight(specs, stages=draining)) == []
    empty = controller.orders(10.0, sight(specs, stages=[DOWN, DOWN, UP, UP]))
    assert empty[0] == Reshape(replica=0, profile=PROFILES[TWO])


def test_a_plan_must_be_wanted_twice():
    controller = Plans(OFFERS, classes=["tight"])
    tell(controller, 15.0, prompt=300, output=220, tpot=0.022, name="tight")
    specs = replicas(PROFILES[ONE], 4)
    assert controller.orders(10.0, sight(specs)) == []
    assert controller.orders(10.0, sight(specs)) != []


def test_a_pair_is_parted_into_two():
    controller = Plans(OFFERS, classes=["relaxed"], patience=1)
    tell(controller, 10.0, prompt=3000, output=50, ttft=4.0, tpot=0.15, name="relaxed")
    specs = [
        ReplicaSpec(name=f"r{k}", variant="v", profile=PROFILES[TWO if k == 0 else ONE])
        for k in range(2)
    ]
    drained = controller.orders(10.0, sight(specs, stages=[UP, DOWN]))
    assert drained == [Scale(replica=0, up=False)]
    started = controller.orders(10.0, sight(specs, stages=[DOWN, DOWN]))
    assert started == [Reshape(replica=r, profile=PROFILES[ONE]) for r in (0, 1)]


def test_replicas_start_ahead_of_a_rise_and_go_one_by_one():
    specs = replicas(H100, 6)
    stages = [UP] * 2 + [DOWN] * 4

    def orders(foresee):
        controller = Size(30.0, foresee=foresee)
        found = []
        for k in range(1, 9):
            tell(controller, 2.0 * k, seconds=5.0, at=5.0 * (k - 1), prompt=2000)
            found = controller.orders(5.0 * k, sight(specs, stages=stages))
        return found

    ahead, by_now = orders(foresee=True), orders(foresee=False)
    assert all(order.up for order in ahead)
    assert len(ahead) > len(by_now)
    calm = Size(30.0, slack=2)
    tell(calm, 3.0, seconds=15.0, prompt=100)
    running = [3, 1, 2, 5, 5, 5]
    assert calm.orders(15.0, sight(specs, running=running)) == []
    assert calm.orders(15.0, sight(specs, running=running)) == [Scale(replica=1, up=False)]


CASES = [("roles", "roles", 40.0), ("layouts", "layouts", 20.0), ("pools", "pools", 20.0)]


@pytest.mark.parametrize(("name", "kind", "rate"), CASES)
def test_a_fleet_that_changes_loses_nothing(name, kind, rate):
    """The scenarios of docs/elastic.md, shortened: orders are given, whatever was sent ends."""
    case = build(read(FOLDER / f"{name}.yaml").model_copy(update={"requests": 300}), rate, 1)
    script = script_for(case, kind)
    given = []
    orders = script.controller.orders

    def noted(now, seen):
        found = orders(now, seen)
        given.extend(found)
        return found

    script.controller.orders = noted
    policy = policy_named("pools" if kind == "pools" else "marginal")
    run = run_live(case, policy, learning=False, script=script)
    assert given != []
    sent = np.isfinite(run.sent)
    assert np.isfinite(run.last[sent]).all()
    assert (run.verdict == MET).mean() > 0.5


def test_an_unknown_controller_is_named():
    case = build(read(FOLDER / "roles.yaml").model_copy(update={"requests": 10}), 10.0, 1)
    with pytest.raises(ConfigError, match="unknown controller 'rolls'; known: pools, roles"):
        script_for(case, "rolls")
