"""The shell in virtual time: nothing is lost, times are the engine's, the same seed is the same."""

from dataclasses import replace

import numpy as np
import pytest

from backends.sim.actions import Bounds, Costs, Drain, Flip, HandOver, Reshape, Scale, Stage
from domain.events import AvailabilityChanged, FleetChanged
from domain.outcome import Cause, limits_met
from policies.factory import build_core
from tests.backends.sim.naive import Fleet, Job
from training.evaluate import estimator_for, policy_named, run_live, simulate
from training.informed import survival_rows
from training.measures import ABSENT, MET, MISSED
from training.scenario import (
    Arrivals,
    Failure,
    Metrics,
    Promise,
    Replicas,
    Scenario,
    Source,
    build,
)
from training.traces import trace
from training.virtual import Script, VirtualShell, _PrefixBlocks

CLASSES = {
    "fast": Promise(ttft=0.3, ttft_per_token=2e-4, tpot=0.03),
    "slow": Promise(rank=1, ttft=1.0, ttft_per_token=6e-4, tpot=0.1),
}


def scenario(n=400, fleet=None, **fields):
    groups = fleet or (
        Replicas(profile="h100-bf16-14b", count=2),
        Replicas(profile="l40s-int4-14b", count=1),
    )
    return Scenario(name="t", fleet=groups, classes=CLASSES, requests=n, warmup=0, **fields)


def test_one_replica_without_a_queue_is_the_step_by_step_engine():
    """Round robin over one replica, holding nothing: the core adds no delay and loses nothing."""
    plain = scenario(150, fleet=(Replicas(profile="a100-bf16-14b"),))
    case = build(plain, 12.0, 3)
    run = run_live(case, policy_named("round_robin", hold=False))
    engine = Fleet([case.fleet.replicas[0].profile], 64, 0, 0, 1)
    jobs = [
        Job(i, int(p), int(o))
        for i, (p, o) in enumerate(zip(case.trace.prompt, case.trace.output, strict=True))
    ]
    engine.run([(t, "enter", j, 0) for t, j in zip(case.trace.arrival.tolist(), jobs, strict=True)])
    np.testing.assert_allclose(run.first, [j.first for j in jobs], rtol=0, atol=1e-9)
    np.testing.assert_allclose(run.last, [j.finish for j in jobs], rtol=0, atol=1e-9)
    met = (run.ttft <= case.ttft) & ~(run.tpot(case.trace.output) > case.tpot)
    assert np.array_equal(met, run.verdict == MET)


@pytest.mark.parametrize("policy", ["least_requests", "best_fit", "marginal"])
@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_every_request_has_one_outcome(policy, delay):
    case = build(scenario(metrics=Metrics(delay=delay)), 60.0, 5)
    run = run_live(case, policy_named(policy))
    assert set(np.unique(run.verdict)) <= {MET, MISSED}
    sent = np.isfinite(run.sent)
    assert np.all(run.sent[sent] >= run.arrival[sent])
    served = np.isfinite(run.last)
    assert served.sum() > 30
    assert np.all(run.first[served] > run.sent[served])
    assert np.all(run.last[served] >= run.first[served])


def test_the_same_seed_gives_the_same_run_and_another_does_not():
    runs = [simulate(scenario(200), policy_named("best_fit"), 30.0, s)[0] for s in (1, 1, 2)]
    np.testing.assert_array_equal(runs[0].first, runs[1].first)
    assert not np.array_equal(runs[0].first, runs[2].first)


def test_a_dead_replica_loses_its_streams_and_others_take_over():
    dying = scenario(600, failures=(Failure(replica=0, at=0.3, down=4.0, noticed=0.5),))
    case = build(dying, 25.0, 2)
    core_run = run_live(case, policy_named("least_requests"))
    died = case.trace.arrival[0] + 0.3 * case.trace.duration
    inside = (core_run.sent > died + 0.5) & (core_run.sent < died + 4.0)
    assert inside.sum() > 20
    assert not np.any(core_run.replica[inside] == 0)
    after = core_run.sent > died + 4.6
    assert np.any(core_run.replica[after] == 0)
    interrupted = np.isfinite(core_run.first) & ~np.isfinite(core_run.last)
    assert 0 < interrupted.sum() < 60


def test_two_gateways_share_a_fleet():
    case = build(scenario(400, gateways=2), 8.0, 4)
    run = run_live(case, policy_named("best_fit"))
    assert np.isfinite(run.last).sum() > 250
    assert set(run.replica.tolist()) == {0, 1, 2}


def test_calls_of_a_session_follow_each_other():
    """A follow-up comes its think time after the answer; after a failed call none comes."""
    case = build(scenario(3), 1.0, 1)
    chain = trace(
        np.array([0.0, 0.1, 0.2]),
        np.array([100, 200, 300]),
        np.array([10, 10, 10]),
        session=np.zeros(3, np.int64),
        follows=np.array([0, 0, 1]),
        think=np.array([0.0, 2.0, 3.0]),
        tenants=("default",),
    )
    case = _with_trace(case, chain)
    run = run_live(case, policy_named("least_requests"))
    assert run.arrival[1] == pytest.approx(run.last[0] + 2.0)
    assert run.arrival[2] == pytest.approx(run.last[1] + 3.0)
    long = trace(
        np.array([0.0, 0.1]), np.array([10**6, 10]), np.array([5, 5]),
        session=np.zeros(2, np.int64), follows=np.array([0, 0]), think=np.array([0.0, 1.0]),
    )  # fmt: skip
    refused = run_live(_with_trace(case, long), policy_named("least_requests"))
    assert refused.verdict.tolist() == [MISSED, ABSENT]


def _with_trace(case, other):
    other = replace(other, classes=case.trace.classes)
    n = len(other)
    return replace(
        case, trace=other, ttft=np.full(n, 1.0), tpot=np.full(n, 1.0), e2e=np.full(n, np.inf)
    )


def test_split_prefill_and_decode_serve_through_pairs():
    pair = (
        Replicas(profile="h100-bf16-14b", phase="prefill"),
        Replicas(profile="h100-bf16-14b", phase="decode"),
    )
    case = build(scenario(120, fleet=pair), 10.0, 6)
    run = run_live(case, policy_named("round_robin", hold=False))
    assert np.isfinite(run.last).all()
    assert np.all(run.busy > 0)
    assert (
        run.tpot(case.trace.output)[case.trace.output > 50].max() < 0.05
    )  # prefill never stalls it


def test_prefix_blocks_of_the_gateway_follow_the_trace():
    rows = [[0, 1], [0, 2]]
    coarse = trace(np.arange(2.0), np.array([1024, 900]), np.array([1, 1]), blocks=rows,
                   block_tokens=512)  # fmt: skip
    a, b = _PrefixBlocks(coarse).of(0), _PrefixBlocks(coarse).of(1)
    assert (len(a), len(b)) == (16, 14)
    assert a[:8] == b[:8]
    assert not set(a[8:]) & set(b[8:])
    fine = trace(np.arange(2.0), np.array([128, 100]), np.array([1, 1]),
                 blocks=[[0, 1, 2, 3], [0, 1, 5, 6]], block_tokens=32)  # fmt: skip
    assert _PrefixBlocks(fine).of(0) == (1, 3)
    assert _PrefixBlocks(fine).of(1) == (1,)


def test_forecasts_are_calibrated():
    """The true length lies under the forecast's P90 nine times in ten."""
    rng = np.random.default_rng(1)
    truth = np.clip(rng.lognormal(5, 1, 4000), 1, 50_000).astype(np.int64)
    rows = survival_rows(truth, 0.6, rng)
    assert np.all(np.diff(rows, axis=1) <= 1e-12)
    from domain.length import LengthDistribution

    p90 = np.array([LengthDistribution(row).quantile(0.9) for row in rows])
    assert (truth <= p90).mean() == pytest.approx(0.9, abs=0.03)


def test_outcomes_are_judged_as_limits_say():
    case = build(scenario(300), 60.0, 8)
    core = build_core(
        policy_named("least_requests"),
        fleet=case.believed,
        estimator=estimator_for(case),
        tenants=case.tenants,
        classes=case.classes,
    )
    shell = VirtualShell(case, [core])
    run = shell.run()
    finished = [o for o in shell.outcomes if o.cause is Cause.FINISHED]
    assert len(finished) > 200
    for outcome in finished:
        assert limits_met(outcome) == (run.verdict[int(outcome.request.id)] == MET)


def test_a_scenario_with_recorded_arrivals_keeps_its_sessions():
    from training.trace_sources import default_data

    if not default_data().is_dir():
        pytest.skip("no data sets; set SLUICE_DATA")
    agents = scenario(
        200, workload=(Source(trace="agents", max_prompt=8000),), arrivals=Arrivals(kind="source")
    )
    case = build(agents, 5.0, 3)
    assert (~case.trace.roots).sum() > 100
    run = run_live(case, policy_named("sticky"))
    later = np.flatnonzero(~case.trace.roots & (run.verdict != ABSENT))
    before = case.trace.follows[later]
    np.testing.assert_allclose(run.arrival[later], run.last[before] + case.trace.think[later])
    assert run.cached[later].sum() > 0.3 * case.trace.prompt[later].sum()


# ---- a fleet that is changed while it serves

SCRIPTED = Costs(warm_up=3.0, flip=1.0)


def scripted(orders, case=None, policy="least_requests", **options):
    """The run, what gateway 0 heard of the fleet, and the shell."""
    case = build(scenario(500), 30.0, 7) if case is None else case
    core = build_core(
        policy_named(policy), fleet=case.believed, estimator=estimator_for(case),
        tenants=case.tenants, classes=case.classes,
    )  # fmt: skip
    heard = []

    def listen(event, _actions):
        if isinstance(event, (FleetChanged, AvailabilityChanged)):
            heard.append(event)

    script = Script(orders=tuple(orders), costs=SCRIPTED, **options)
    shell = VirtualShell(case, [core], listen, script)
    return shell.run(), heard, shell


def on(run, replica):
    """When requests were sent to a replica."""
    return np.sort(run.sent[np.isfinite(run.sent) & (run.replica == replica)])


def test_a_drained_replica_gets_nothing_more_and_loses_nothing():
    run, _, shell = scripted([(5.0, Drain(replica=0))])
    assert np.isfinite(run.last[np.isfinite(run.sent)]).all()
    assert on(run, 0).max() <= 5.0
    assert on(run, 1).max() > 12.0
    assert shell.actions.stage(0) is Stage.DOWN


def test_a_replica_is_started_when_told_and_serves_after_its_warm_up():
    run, heard, shell = scripted([(6.0, Scale(replica=1, up=True))], down=(1,))
    assert on(run, 1).min() >= 9.0
    assert on(run, 1).min() < 10.0
    assert [(e.at, e.usable) for e in heard] == [(0.0, False), (9.0, True)]
    assert shell.actions.still_seconds(1) == 3.0


def test_a_restarted_replica_is_another_one_for_physics_and_gateway():
    """Twice as fast: its answers are, and the gateway expects it."""
    case = build(scenario(500, fleet=(Replicas(profile="a100-bf16-14b", count=2),)), 12.0, 7)
    fast = replace(
        case.fleet.replicas[0].profile,
        **{n: getattr(case.fleet.replicas[0].profile, n) / 2 for n in
           ("overhead", "weights", "per_sequence", "per_context", "per_token")},
    )  # fmt: skip
    run, heard, _ = scripted([(5.0, Reshape(replica=0, profile=fast))], case)
    changed = [e for e in heard if isinstance(e, FleetChanged)]
    assert [e.fleet.replicas[0].profile for e in changed] == [fast]
    again = changed[0].at
    assert again > 8.0
    tpot = run.tpot(case.trace.output)
    served = np.isfinite(tpot) & (run.replica == 0)
    assert np.median(tpot[served & (run.sent > again)]) < 0.7 * np.median(
        tpot[served & (run.sent < 5.0)]
    )


def test_constants_that_a_gateway_believes_outlive_a_flip():
    case = build(scenario(500, constants_error=0.3), 20.0, 7)
    _, heard, _ = scripted([(4.0, Flip(replica=2, phase="prefill"))], case)
    (changed,) = (e for e in heard if isinstance(e, FleetChanged))
    assert changed.fleet.replicas[2].phase == "prefill"
    assert changed.fleet.replicas[2].profile == case.believed.replicas[2].profile
    assert changed.fleet.replicas[:2] == case.believed.replicas[:2]


def test_bounds_of_a_pool_reach_the_gateway_at_once():
    _, heard, _ = scripted([(4.0, Bounds(replica=1, low=10.0, high=90.0))], policy="pools")
    (changed,) = (e for e in heard if isinstance(e, FleetChanged))
    assert (changed.at, changed.fleet.replicas[1].pool_high) == (4.0, 90.0)


def test_a_stream_that_is_handed_over_ends_once():
    case = build(scenario(3, fleet=(Replicas(profile="h100-bf16-14b", count=2),)), 1.0, 1)
    long = trace(np.array([0.0, 0.1, 2.0]), np.full(3, 100), np.array([400, 400, 5]))
    case = replace(_with_trace(case, long), e2e=np.full(3, 100.0))
    before = run_live(case, policy_named("round_robin"))
    to = 1 - int(before.replica[0])
    run, _, _ = scripted([(1.5, HandOver(job=0, to=to))], case, "round_robin")
    np.testing.assert_array_equal(run.first[:2], before.first[:2])
    assert np.isfinite(run.last).all()
    assert run.last[0] > before.last[0]
    assert run.busy[to] > before.busy[to]


def test_who_runs_while_routes_are_numbered_anew_is_settled_where_it_ran():
    """A replica that stops decoding takes its routes out of the table; what another one decodes
    ends as ever, and the outcome names where that was.
    """
    pairs = (
        Replicas(profile="h100-bf16-14b", count=1, phase="prefill"),
        Replicas(profile="h100-bf16-14b", count=3, phase="decode"),
    )
    case = build(scenario(300, fleet=pairs), 20.0, 7)
    orders = [(3.0, Flip(replica=1, phase="prefill")), (6.0, Flip(replica=2, phase="prefill"))]
    run, heard, shell = scripted(orders, case)
    assert sum(isinstance(e, FleetChanged) for e in heard) == 2
    served = np.isfinite(run.sent)
    assert served.sum() > 250
    assert np.isfinite(run.last[served]).all()
    assert (run.replica[run.sent > 6.0] == 3).all()
    assert {o.variant for o in shell.outcomes if o.sent is not None} == {0}


def test_a_replica_does_not_change_sides_before_all_it_shall_decode_has_come():
    """A long prompt is still being computed elsewhere when its decoding replica is told to flip."""
    pairs = (
        Replicas(profile="h100-bf16-14b", phase="prefill"),
        Replicas(profile="h100-bf16-14b", count=2, phase="decode"),
    )
    case = build(scenario(2, fleet=pairs), 1.0, 1)
    long = trace(np.array([0.0, 0.01]), np.array([8000, 8000]), np.array([20, 20]))
    case = replace(_with_trace(case, long), ttft=np.full(2, 9.0))
    to = int(scripted([], case, "round_robin")[0].replica[1])
    order = (0.6, Flip(replica=to, phase="prefill"))
    run, _, _ = scripted([order], case, "round_robin")
    assert run.replica[1] == to
    assert np.isfinite(run.last).all()


class Recorder:
    """A controller that notes what it sees and drains a replica once."""

    every = 2.0

    def __init__(self):
        self.came, self.seen = [], []

    def arrived(self, now, request, expected):
        self.came.append((now, request.prompt_tokens, expected))

    def orders(self, now, sight):
        self.seen.append((now, sight))
        return [Drain(replica=0)] if len(self.seen) == 3 else []


def test_a_controller_hears_of_arrivals_and_its_orders_are_carried_out():
    case = build(scenario(500), 30.0, 7)
    controller = Recorder()
    run, _, shell = scripted([], case, controller=controller)
    assert [at for at, _ in controller.seen[:3]] == [2.0, 4.0, 6.0]
    assert [at for at, _, _ in controller.came] == run.arrival.tolist()
    assert all(expected > 0 for _, _, expected in controller.came)
    assert on(run, 0).max() <= 6.0
    assert shell.actions.stage(0) is Stage.DOWN
    stages = [sight.stages[0] for _, sight in controller.seen]
    assert stages[2] is Stage.SERVING
    assert stages[-1] is Stage.DOWN
    assert max(sight.running.sum() for _, sight in controller.seen) > 3


def test_an_order_out_of_turn_is_an_error():
    with pytest.raises(ValueError, match="serving, not down"):
        scripted([(1.0, Scale(replica=0, up=True))])
    with pytest.raises(ValueError, match="not on its way"):
        scripted([(0.0, HandOver(job=400, to=1))])


def test_what_died_while_it_was_changed_comes_back_by_the_change_alone():
    dying = scenario(500, failures=(Failure(replica=0, at=0.3, down=1.0, noticed=0.1),))
    case = build(dying, 30.0, 7)
    died = 0.3 * case.trace.duration + case.trace.arrival[0]
    run, _, shell = scripted([(died - 0.1, Drain(replica=0))], case)
    assert shell.actions.stage(0) is Stage.DOWN
    assert on(run, 0).max() < died
