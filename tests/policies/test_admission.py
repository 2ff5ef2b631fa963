"""Admission through the core: what a quota refuses, and when it opens again."""

from domain.events import Arrived, Commit, Committed, Reason, Send, Shed
from domain.request import Quota, SloClass, Tenant
from policies.config import ClassicPolicy
from policies.factory import build_core
from predictors.estimator import BaselineEstimator
from tests.fakes.shells import request, small_fleet


def test_daily_quotas_begin_anew_at_utc_midnight_and_not_with_the_clock():
    """The core's clock starts anywhere; here midnight is at 1,000 s."""
    core = build_core(
        ClassicPolicy(kind="least_requests"),
        fleet=small_fleet(),
        estimator=BaselineEstimator(),
        tenants=[Tenant(name="t", quota=Quota(daily_tokens=200.0))],
        classes=[SloClass(name="standard")],
        now=900.0,
        midnight=1000.0,
    )

    def answers(id_, at):
        actions = core.handle(Arrived(at, request(id_)))
        return actions + [
            sent
            for action in actions
            if isinstance(action, Commit)
            for sent in core.handle(Committed(at, action.id, action.attempt))
        ]

    assert isinstance(answers("a", 900.0)[-1], Send)
    shed = next(a for a in answers("b", 910.0) if isinstance(a, Shed))
    assert shed.reason is Reason.QUOTA
    assert shed.retry_after == 90.0
    assert isinstance(answers("c", 1001.0)[-1], Send)
