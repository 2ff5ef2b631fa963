"""Changes of a fleet: what stands still, what goes on, and when it serves again."""

from dataclasses import replace
from math import inf

import pytest

from backends.sim.actions import (
    Bounds,
    Costs,
    Drain,
    FleetActions,
    Flip,
    HandOver,
    Notice,
    Reshape,
    Scale,
    Stage,
)
from backends.sim.fleet import FleetModel, Happening
from domain.fleet import Profile, ReplicaSpec

PROFILE = Profile(overhead=0.0, weights=0.01, per_sequence=0.0, per_context=0.0, max_seqs=8)
SPECS = [ReplicaSpec(name=f"r{k}", variant="v", profile=PROFILE) for k in range(3)]
COSTS = Costs(warm_up=30.0, flip=2.0)


@pytest.fixture
def model():
    return FleetModel(SPECS, 20)


@pytest.fixture
def actions(model):
    return FleetActions(model, SPECS, COSTS, down=(2,))


def put(model, job, replica, now, output=100):
    taken = model.put(job, 50, output, replica, replica, (0, 0), now)
    model.settle(now)
    return taken


def run_out(model, actions=None, until=inf):
    """Live to the end, or to a time: (when, what, job) and what gateways heard, by time."""
    told, heard = [], []
    while True:
        at, r = model.next_at()
        due = actions.due_at if actions else inf
        now = min(at, due)
        if now == inf or now > until:
            return told, heard
        if at == now:
            told += [(now, kind, job) for kind, job in model.happen(r)]
        model.settle(now)
        heard += [(now, n) for n in (actions.settle(now) if actions else [])]


def ends(told):
    return {job: at for at, kind, job in told if kind is Happening.FINISHED}


def test_a_draining_replica_ends_what_it_has_and_goes_down(model, actions):
    assert put(model, 0, 0, 0.0)
    notices = actions.order(Drain(replica=0), 0.1)
    assert notices == [Notice(replica=0, spec=SPECS[0], usable=False)]
    assert actions.stage(0) is Stage.DRAINING
    told, heard = run_out(model, actions)
    assert ends(told)[0] == pytest.approx(1.0)
    assert (actions.stage(0), heard) == (Stage.DOWN, [])
    assert not put(model, 1, 0, 2.0)


def test_a_started_replica_serves_after_its_warm_up(model, actions):
    assert not put(model, 0, 2, 0.0)
    assert actions.order(Scale(replica=2, up=True), 5.0) == []
    assert not put(model, 0, 2, 20.0)
    assert actions.due_at == 35.0
    _, heard = run_out(model, actions)
    assert heard == [(35.0, Notice(replica=2, spec=SPECS[2], usable=True))]
    assert put(model, 0, 2, 35.0)
    assert actions.still_seconds(2) == 30.0


def test_a_flip_waits_for_the_last_stream(model, actions):
    put(model, 0, 1, 0.0)
    actions.order(Flip(replica=1, phase="prefill"), 0.2)
    told, heard = run_out(model, actions)
    ((at, notice),) = heard
    assert at == pytest.approx(ends(told)[0] + 2.0)
    assert (notice.spec.phase, notice.usable) == ("prefill", True)


def test_an_idle_replica_changes_at_once(model, actions):
    notices = actions.order(Flip(replica=1, phase="decode"), 1.0)
    assert [n.usable for n in notices] == [False]
    assert actions.due_at == 3.0


def test_another_layout_is_another_speed(model, actions):
    """Twice the GPUs, half the time for the weights; the restart costs its warm-up."""
    put(model, 0, 0, 0.0)
    before = ends(run_out(model)[0])[0]
    doubled = replace(PROFILE, weights=0.005, kv_capacity=400_000.0)
    actions.order(Reshape(replica=0, profile=doubled), 10.0)
    ((at, notice),) = run_out(model, actions)[1]
    assert (at, notice.spec.profile) == (40.0, doubled)
    put(model, 1, 0, 50.0)
    assert ends(run_out(model)[0])[1] - 50.0 == pytest.approx(before / 2)
    assert model.physics.replica["free"][0] == model.physics.replica["pages"][0] == 25_000
    with pytest.raises(ValueError, match="at most 8"):
        actions.order(Reshape(replica=0, profile=replace(PROFILE, max_seqs=9)), 60.0)


def test_a_stream_that_is_handed_over_goes_on_where_it_stopped(model, actions):
    """It loses the step that runs and the time its KV moves, no token."""
    put(model, 0, 0, 0.0)
    before, _ = run_out(model, until=0.3)
    actions.order(Drain(replica=0), 0.3)
    actions.order(HandOver(job=0, to=1), 0.305)
    told = before + run_out(model, actions)[0]
    link = (50 + 30) * model.physics.move_per_token + model.physics.move_latency
    assert ends(told)[0] == pytest.approx(1.0 + link)
    assert [kind for _, kind, _ in told] == [Happening.FIRST_TOKEN, Happening.FINISHED]
    assert actions.stage(0) is Stage.DOWN
    assert model.physics.replica["free"][1] == model.physics.replica["pages"][1]
    with pytest.raises(ValueError, match="does not decode"):
        actions.order(HandOver(job=0, to=1), 2.0)


def test_a_replica_that_something_is_on_its_way_to_is_not_empty(model, actions):
    put(model, 0, 0, 0.0)
    model.happen(model.next_at()[1])
    model.settle(0.01)
    actions.order(HandOver(job=0, to=1), 0.015)
    model.happen(model.next_at()[1])
    assert model.empty(0)
    assert not model.empty(1)
    actions.order(Drain(replica=1), 0.021)
    assert actions.stage(1) is Stage.DRAINING
    assert ends(run_out(model, actions)[0]) != {}
    assert actions.stage(1) is Stage.DOWN


def test_bounds_of_a_pool_hold_at_once_and_outlive_a_change(model, actions):
    (notice,) = actions.order(Bounds(replica=1, low=100.0, high=900.0), 0.0)
    assert (notice.spec.pool_low, notice.spec.pool_high, notice.usable) == (100.0, 900.0, True)
    put(model, 0, 1, 0.0)
    actions.order(Flip(replica=1, phase="decode"), 0.1)
    actions.order(Bounds(replica=1, low=200.0, high=800.0), 0.2)
    ((_, notice),) = run_out(model, actions)[1]
    assert (notice.spec.phase, notice.spec.pool_low) == ("decode", 200.0)


def test_orders_out_of_turn_are_refused(actions):
    with pytest.raises(ValueError, match="serving, not down"):
        actions.order(Scale(replica=0, up=True), 0.0)
    with pytest.raises(ValueError, match="down, not serving"):
        actions.order(Drain(replica=2), 0.0)
    with pytest.raises(ValueError, match="negative"):
        Costs(warm_up=-1.0)


def test_a_replica_that_is_down_may_be_started_as_another_one(model, actions):
    fast = replace(PROFILE, weights=0.005)
    assert actions.order(Reshape(replica=2, profile=fast), 1.0) == []
    assert actions.stage(2) is Stage.STILL
    assert actions.due_at == 31.0
    (notice,) = actions.settle(31.0)
    assert notice.usable
    assert notice.spec.profile == fast
    assert put(model, 0, 2, 31.0)
    assert ends(run_out(model)[0])[0] < 31.0 + 1.0


def test_what_a_replica_becomes_is_known_while_it_drains(model, actions):
    put(model, 0, 1, 0.0)
    actions.order(Flip(replica=1, phase="prefill"), 0.1)
    assert actions.stage(1) is Stage.DRAINING
    assert actions.spec(1).phase == "prefill"
