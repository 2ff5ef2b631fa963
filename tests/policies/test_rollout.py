"""Shadow, canary and guard rails in the real core: who decides, when it ends, and that nothing is
lost.
"""

import json
import random

import numpy as np
import pytest

from domain.events import Arrived, AttemptEnded, FirstToken, PolicyChanged, RolledBack, TrialChanged
from domain.events import ScorerLate as Late
from domain.outcome import Cause, Usage, UsageSource
from domain.request import Slo, Tenant
from gateway.event_log import EventLog, read, replay
from policies.names import TRAITS
from policies.rollout import Why, lot
from tests.fakes.shells import CLASSES, Shell, make_core, request, small_fleet

COUNTED = Usage(prompt=100.0, completion=8.0, source=UsageSource.COUNTED)
TENANTS = tuple(Tenant(name=f"t{k}") for k in range(40))
LINEAR = {"kind": "linear", "weights": {"p_slo": 1.0}, "shed_below": 0.0}


def plan(policy=None, **options) -> str:
    base = {"name": "new", "policy": policy or LINEAR, "mode": "canary", "share": 0.25}
    return json.dumps(base | options)


class World(Shell):
    """Requests one after another; each ends before the next but one, late or in time."""

    def __init__(self, core, seed=1):
        super().__init__(core)
        self.now, self.count, self.chance = 0.0, 0, random.Random(seed)
        self.actions, self.rollbacks, self.who, self.tenant_of = [], [], {}, {}
        self.late_when = lambda send: False

    def tell(self, event):
        seen = super().tell(event)
        self.rollbacks += [a for a in seen if isinstance(a, RolledBack)]
        return seen

    def one(self, miss=lambda send: 0.0, **fields):
        """One request from arrival to its end; its Send."""
        self.now += 0.01
        self.count += 1
        name = f"q{self.count}"
        tenant = fields.pop("tenant", f"t{self.count % len(TENANTS)}")
        self.tenant_of[name] = tenant
        slo = Slo(ttft=5.0)
        ask = request(name, tenant=tenant, slo=slo, tie=self.chance.getrandbits(31), **fields)
        self.tell(Arrived(self.now, ask))
        send = self.sends[name]
        self.who[name] = send.policy
        if self.late_when(send):
            self.tell(Late(self.now, 0.08))
        late = self.chance.random() < miss(send)
        first = self.now + (30.0 if late else 0.001)
        self.tell(FirstToken(first, name, send.attempt))
        self.now = first
        self.tell(AttemptEnded(self.now, name, send.attempt, Cause.FINISHED, COUNTED, self.now))
        return send

    def whole(self):
        """Every request was settled once and nothing is left."""
        assert set(self.settled) == self.arrived
        self.assert_empty()
        return True


def world(kind="best_fit", **options):
    return World(make_core(kind, tenants=TENANTS, shed_below=0.0, overload_target=0.0, **options))


def test_canaries_are_the_same_tenants_and_nested():
    """A tenant is decided by one policy; a larger share keeps those it had."""
    chosen = {}
    for share in (0.05, 0.25, 0.6):
        w = world()
        w.tell(TrialChanged(0.0, plan(share=share)))
        for _ in range(120):
            w.one()
        by = {}
        for name, policy in w.who.items():
            by.setdefault(w.tenant_of[name], set()).add(policy)
        assert all(len(v) == 1 for v in by.values())
        chosen[share] = {t for t, v in by.items() if v == {"linear"}}
        assert chosen[share] == {t.name for t in TENANTS if lot("", t.name) < share}
        assert w.whole()
    assert chosen[0.05] <= chosen[0.25] < chosen[0.6]


def test_shadow_changes_nothing():
    """With a policy in shadow every action but the note of it is what it was without."""
    plain, shadowed = world(), world()
    shadowed.tell(TrialChanged(0.0, plan({"kind": "least_requests"}, mode="shadow")))
    for _ in range(60):
        a, b = plain.one(), shadowed.one()
        assert b.shadow is not None
        assert (a.route, a.propensity, a.policy, a.prediction) == (
            b.route, b.propensity, b.policy, b.prediction,
        )  # fmt: skip
    tally = shadowed.core.trial.tally
    assert tally.decisions == 60
    assert 0 < tally.same < 60
    assert shadowed.whole()


def test_the_log_replays(tmp_path):
    """Trial, rollback and all: a fresh core fed the same events gives the same actions."""
    w = world()
    w.tell(TrialChanged(0.0, plan()))
    for _ in range(250):
        w.one(miss=lambda send: 0.9 if send.policy == "linear" else 0.0)
    assert [r.reason for r in w.rollbacks] == [Why.WORSE]
    w.tell(TrialChanged(w.now, plan({"kind": "bandit"}, share=0.5)))
    w.tell(PolicyChanged(w.now, json.dumps({"kind": "bandit"})))
    for _ in range(100):
        w.one()
    with EventLog(tmp_path / "events.bin", {}) as log:
        for event, actions in w.log:
            log.append(event, actions)
    fresh = make_core("best_fit", tenants=TENANTS, shed_below=0.0, overload_target=0.0)
    result = replay(read(tmp_path / "events.bin"), fresh.handle)
    assert result.differs_at is None
    assert result.events == len(w.log)


def test_a_disastrous_canary_is_rolled_back_within_hundreds():
    w = world()
    w.tell(TrialChanged(0.0, plan()))
    while not w.rollbacks and w.count < 600:
        w.one(miss=lambda send: 0.9 if send.policy == "linear" else 0.02)
    assert w.rollbacks[0].reason == Why.WORSE
    assert sum(p == "linear" for p in w.who.values()) <= 60
    for _ in range(60):
        assert w.one().policy == "best_fit"
    assert w.whole()


def test_scores_that_are_no_numbers_never_decide():
    """Weights that overflow: the default policy decides, and after three the trial is over."""
    w = world()
    huge = dict.fromkeys(TRAITS, 1000000.0)
    w.tell(TrialChanged(0.0, plan({"kind": "linear", "weights": huge}, share=1.0)))
    w.core.trial.scorer.params[:] = np.nan
    sends = [w.one() for _ in range(5)]
    assert {s.policy for s in sends} == {"best_fit"}
    assert [r.reason for r in w.rollbacks] == [Why.FAULTY]
    assert sum(len(a) and isinstance(a[-1], RolledBack) for _, a in w.log[:20]) == 1
    assert w.whole()


def test_an_active_policy_with_poisoned_weights_never_decides():
    """The same without a trial: request by request, and counted."""
    w = world("linear", envelope={"one": (1.0, 1.0)})
    assert w.one().policy == "linear"
    w.core.scorer.params[3] = np.nan
    assert {w.one().policy for _ in range(10)} == {"best_fit"}
    assert w.core.guarded.faults == 10
    assert w.whole()


PATIENT = {"kind": "actor", "weights": {}, "hold_above": 0.0, "shed_below": 0.0}
"""Waits while anybody could lose by it."""


def begin(w, name):
    """A request arrives; whether it was sent."""
    w.now += 0.01
    w.tell(Arrived(w.now, request(name, tenant="t1", slo=Slo(ttft=5.0, tpot=0.05))))
    return name in w.sends


def end(w, name):
    """Its only token comes."""
    w.tell(FirstToken(w.now, name, w.sends[name].attempt))
    w.tell(AttemptEnded(w.now, name, w.sends[name].attempt, Cause.FINISHED, COUNTED, w.now))


def test_to_hold_a_request_back_is_no_fault():
    """A learned policy may prefer to wait: the default does not step in, and the wait ends."""
    options = {k: v for k, v in PATIENT.items() if k not in {"kind", "shed_below"}}
    w = world("actor", fleet=small_fleet(1), envelope={"ttft": (0.0, 1e3)}, **options)
    assert begin(w, "a")
    assert not begin(w, "b")
    end(w, "a")
    assert w.sends["b"].policy == "actor"
    end(w, "b")
    assert w.core.guarded.faults == 0
    assert w.whole()


def test_a_shadow_that_would_hold_back_is_no_fault():
    """It is counted as a decision, with no route to show."""
    w = world(fleet=small_fleet(1))
    w.tell(TrialChanged(0.0, plan(PATIENT, mode="shadow")))
    assert begin(w, "a")
    assert begin(w, "b")
    assert (w.sends["a"].shadow is None, w.sends["b"].shadow is None) == (False, True)
    assert (w.core.trial.tally.decisions, w.core.trial.tally.faults) == (2, 0)
    end(w, "a")
    end(w, "b")
    assert w.whole()


def test_shifted_inputs_are_the_default_policys():
    """Outside the ranges of the fit the default decides; when half is outside the trial ends."""
    inside = {"kind": "linear", "envelope": {"cost": (0.0, 0.1)}, "slack": 0.0}
    w = world()
    w.tell(TrialChanged(0.0, plan(inside, share=1.0)))
    assert w.one().policy == "linear"
    assert w.one(prompt_tokens=3000.0).policy == "best_fit"
    for _ in range(98):
        w.one()
    assert not w.rollbacks
    asked = 0
    while not w.rollbacks:
        asked += 1
        assert w.one(prompt_tokens=3000.0).policy == "best_fit"
    assert w.rollbacks[0].reason == Why.SHIFTED
    assert asked <= 200
    assert w.whole()


def test_a_slow_candidate_is_benched_and_then_gone():
    """Each late decision hands its requests to the default for ten seconds; the third ends it. The
    active policy is not blamed.
    """
    w = world("least_requests")
    w.tell(TrialChanged(0.0, plan(share=1.0)))
    w.late_when = lambda send: send.policy == "linear"
    for _ in range(40):
        w.one()
        w.now += 2.0
    assert [r.reason for r in w.rollbacks] == [Why.LATE]
    assert sum(p == "linear" for p in w.who.values()) == 3
    assert w.one().policy == "least_requests"
    assert w.whole()


def test_a_canary_brings_its_own_options():
    """Shedding and exploration follow the policy whose request it is."""
    w = world()
    w.tell(TrialChanged(0.0, plan(LINEAR | {"explore": 1.0, "explore_within": 1.0}, share=0.5)))
    ranks = {c.name: c.rank for c in CLASSES}
    assert ranks["standard"] > 0
    for _ in range(60):
        send = w.one()
        assert (send.propensity < 1.0) == (send.policy == "linear")
    assert w.whole()


def test_mixed_queues_are_scored_by_their_own():
    """A full fleet releases canaries and others from one queue; all of them end."""
    core = make_core(
        "best_fit", small_fleet(2, max_seqs=1), TENANTS, shed_below=0.0, overload_target=0.0
    )
    w = World(core)
    w.tell(TrialChanged(0.0, plan({"kind": "marginal", "shed_below": 0.0}, share=0.5)))
    for k in range(30):
        w.tell(Arrived(0.001 * k, request(f"q{k}", tenant=f"t{k}", class_name="batch")))
    now, seen = 1.0, set()
    while core.open:
        now += 0.1
        send = next(iter(w.sends.values()))
        seen.add(send.policy)
        w.tell(AttemptEnded(now, send.id, send.attempt, Cause.FINISHED, COUNTED, now))
    assert seen == {"best_fit", "marginal"}
    assert w.whole()


def test_what_a_bandit_learned_stays_with_it():
    """It learns in shadow, in trial and when active; a second start of the same goes on."""
    w = world()
    config = json.dumps({"kind": "bandit"})
    w.tell(TrialChanged(0.0, plan({"kind": "bandit"}, mode="shadow")))
    before = w.core.trial.scorer.params.copy()
    for _ in range(20):
        w.one()
    learned = w.core.trial.scorer
    assert not np.array_equal(before, learned.params)
    w.tell(TrialChanged(w.now, ""))
    assert w.core.trial is None
    text = json.loads(plan({"kind": "bandit"}))["policy"]
    assert text == {"kind": "bandit"}
    w.tell(TrialChanged(w.now, plan({"kind": "bandit"}, share=1.0)))
    assert w.core.trial.scorer is learned
    w.tell(PolicyChanged(w.now, config))
    w.one()
    assert w.whole()


@pytest.mark.parametrize(
    "bad", ['{"name": "x"}', plan({"kind": "linear", "weights": {"p_slo": 1e9}})]
)
def test_a_bad_plan_is_refused(bad):
    """Weights beyond reason, or nothing to try."""
    w = world()
    with pytest.raises(ValueError, match=r"policy|weights"):
        w.tell(TrialChanged(0.0, bad))
    assert w.core.trial is None
