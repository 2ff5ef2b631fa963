"""The registry: entries are data and checked; stages go up one by one and come down at once."""

import json

import pytest

from domain.errors import ConfigError
from policies import registry
from policies.config import ActorPolicy, BestFitPolicy, LinearPolicy
from policies.factory import build_scorer, resolved

GENTLE = LinearPolicy(kind="linear", weights={"p_slo": 1.0, "cost": -0.1})


@pytest.fixture
def folder(tmp_path):
    for name in ("old", "new"):
        registry.write_entry(tmp_path, registry.entry_of(name, GENTLE, {"note": name}))
    return tmp_path


def test_an_entry_comes_back_as_it_was(folder):
    entry = registry.read_entry(folder, "new")
    assert entry.policy == GENTLE
    assert entry.card == {"note": "new"}
    assert registry.names(folder) == ["new", "old"]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"p_slo": 1.0', '"p_slo": NaN', "weights.p_slo"),
        ('"p_slo": 1.0', '"p_slo": 1e300', "weights.p_slo"),
        ('"p_slo": 1.0', '"p_slo": 0.9', "hash"),
        ('"linear"', '"pickle"', "policy"),
        ('"new"', '"other"', "rename|hash"),
        ('"format": 1', '"format": 2', "format"),
        ("}", "", "damaged"),
    ],
)
def test_a_bad_entry_is_refused_with_the_reason(folder, old, new, why):
    path = folder / "entries" / "new.json"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(registry.EntryError, match=why):
        registry.read_entry(folder, "new")


def test_unknown_and_hostile_names(folder):
    with pytest.raises(registry.EntryError, match="known: new, old"):
        registry.read_entry(folder, "newer")
    for name in ("../state", "", "a/b", "x" * 65):
        with pytest.raises(registry.EntryError, match="name"):
            registry.read_entry(folder, name)
        with pytest.raises(registry.EntryError, match="name"):
            registry.entry_of(name, GENTLE)


def test_stages_one_by_one_and_back(folder):
    """Shadow, 1, 5, 25, 100 %, active; rolling back a trial, then the active one."""

    def change(f, *args):
        return registry.change_state(folder, lambda s: f(s, *args))

    with pytest.raises(ConfigError, match="nothing is tried"):
        change(registry.promoted, 1.0)
    assert change(registry.shadowed, "new", 1.0).share is None
    shares = [change(registry.promoted, 2.0).share for _ in range(4)]
    assert shares == [0.01, 0.05, 0.25, 1.0]
    state = change(registry.promoted, 3.0)
    assert (state.active, state.trial, state.previous) == ("new", None, (None,))
    change(registry.shadowed, "old", 4.0)
    assert change(registry.promoted, 5.0, 0.4).share == 0.4
    state = change(registry.rolled_back, 6.0)
    assert (state.active, state.trial) == ("new", None)
    state = change(registry.rolled_back, 7.0, "why")
    assert (state.active, state.previous) == (None, ())
    assert state.history[-1].detail == "why"
    with pytest.raises(ConfigError, match="nothing to go back to"):
        change(registry.rolled_back, 8.0)
    assert registry.read_state(folder) == state


def test_the_plan_names_the_state_it_came_from(folder):
    """A rollback told late ends its own trial, never the one that was begun after it."""
    state = registry.change_state(folder, lambda s: registry.shadowed(s, "new", 1.0))
    assert registry.trial_json(folder, registry.Registry()) == ""
    plan = json.loads(registry.trial_json(folder, state))
    assert (plan["name"], plan["mode"]) == ("new#1", "shadow")
    state = registry.change_state(folder, lambda s: registry.promoted(s, 2.0))
    assert json.loads(registry.trial_json(folder, state))["share"] == 0.01
    same = registry.change_state(folder, lambda s: registry.ended(s, "new#1", 3.0, "worse"))
    assert same.trial == "new"
    over = registry.change_state(folder, lambda s: registry.ended(s, "new#2", 3.0, "worse"))
    assert over.trial is None
    assert over.history[-1].verb == "rolled back"


def test_a_damaged_state_is_said(folder):
    (folder / "state.json").write_text("{")
    with pytest.raises(registry.EntryError, match="remove it"):
        registry.read_state(folder)


def test_a_probe_lets_sound_policies_pass():
    """Whatever gives numbers; weights that overflow have been refused before."""
    registry.probe(BestFitPolicy())


def test_what_is_shipped_is_sound_and_one_line_makes_it_decide():
    """`policy: {kind: actor}` is the entry that comes with the package, options given beside it
    kept; the event log gets its weights.
    """
    entry = registry.read_entry(registry.SHIPPED, "actor")
    registry.probe(entry.policy)
    assert entry.card["command"].startswith("sluice train policy")
    plain = resolved(ActorPolicy(kind="actor", queue_limit=7))
    assert plain.queue_limit == 7
    assert plain.weights == entry.policy.weights
    assert plain.shed_below == entry.policy.shed_below
    shipped = build_scorer(entry.policy)
    assert build_scorer(ActorPolicy(kind="actor")).version == shipped.version
