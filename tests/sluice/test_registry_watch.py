"""A gateway follows its registry, and tells it of rollbacks."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from domain.events import RolledBack
from policies import registry
from policies.config import BestFitPolicy, ClassicPolicy
from sluice.rollout import RegistryWatch

LEAST = ClassicPolicy(kind="least_requests")


class FakeShell:
    """What the watch does to a shell, noted."""

    def __init__(self):
        self.rolled_back = None
        self.policies, self.plans = [], []

    def change_policy(self, policy):
        self.policies.append(json.loads(policy)["kind"])

    def change_trial(self, plan):
        self.plans.append(json.loads(plan)["name"] if plan else "")


@pytest.fixture
def watched(tmp_path):
    registry.write_entry(tmp_path, registry.entry_of("least", LEAST))
    shell = FakeShell()
    gateway = SimpleNamespace(shell=shell, metrics=SimpleNamespace(gauges=[]))
    warmed = []
    watch = RegistryWatch(tmp_path, gateway, BestFitPolicy, warmed.append)
    return SimpleNamespace(folder=tmp_path, shell=shell, watch=watch, warmed=warmed)


def change(watched, f, *args):
    registry.change_state(watched.folder, lambda s: f(s, *args))
    asyncio.run(watched.watch.look())


def test_it_follows_from_shadow_to_active_and_back(watched):
    asyncio.run(watched.watch.look())
    assert watched.shell.plans == watched.shell.policies == []
    change(watched, registry.shadowed, "least", 1.0)
    change(watched, registry.promoted, 2.0)
    assert watched.shell.plans == ["least#1", "least#2"]
    change(watched, registry.promoted, 3.0, 1.0)
    change(watched, registry.promoted, 4.0)
    assert watched.shell.plans[-1] == ""
    assert watched.shell.policies == ["least_requests"]
    change(watched, registry.rolled_back, 5.0)
    assert watched.shell.policies == ["least_requests", "best_fit"]
    assert LEAST in watched.warmed
    assert not watched.watch.alarm


def test_a_rollback_is_told_to_everybody_and_not_tried_again(watched):
    change(watched, registry.shadowed, "least", 1.0)
    change(watched, registry.promoted, 2.0)
    watched.shell.rolled_back(RolledBack("least#2", "worse", "attainment"))
    state = registry.read_state(watched.folder)
    assert state.trial is None
    assert state.history[-1].detail == "worse: attainment"
    asyncio.run(watched.watch.look())
    assert watched.shell.plans == ["least#1", "least#2", ""]


def test_a_bad_entry_never_reaches_the_core(watched):
    """The old policy goes on, and the alarm is on until it is put right."""
    change(watched, registry.shadowed, "least", 1.0)
    path = watched.folder / "entries" / "least.json"
    good = path.read_text()
    path.write_text(good.replace('"least_requests"', '"random"'))
    change(watched, registry.promoted, 2.0)
    assert watched.watch.alarm
    assert watched.shell.plans == ["least#1"]
    path.write_text(good)
    asyncio.run(watched.watch.look())
    assert not watched.watch.alarm
    assert watched.shell.plans == ["least#1", "least#2"]
