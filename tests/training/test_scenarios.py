"""Every shipped scenario and profile loads; bad ones are named."""

from pathlib import Path

import pytest

from backends.sim.profiles import load_profiles, shipped
from domain.errors import ConfigError
from training.scenario import Promise, Replicas, Scenario, build, read

FOLDER = Path(__file__).parents[2] / "configs" / "scenarios"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_scenarios_load(path):
    scenario = read(path)
    assert scenario.name == path.stem
    assert {group.profile for group in scenario.fleet} <= set(load_profiles(shipped()))


def test_unknown_profiles_and_fields_are_named(tmp_path):
    bad = Scenario(name="x", fleet=(Replicas(profile="b300"),), classes={"a": Promise()})
    with pytest.raises(ConfigError, match="unknown profile 'b300'"):
        build(bad, 1.0, 1)
    path = tmp_path / "s.yaml"
    path.write_text("name: x\nflete: []\n")
    with pytest.raises(ConfigError, match="flete"):
        read(path)


def test_wrong_constants_are_only_believed():
    wrong = Scenario(
        name="x", fleet=(Replicas(profile="h100-bf16-14b", count=3),), classes={"a": Promise()},
        requests=10, constants_error=0.3,
    )  # fmt: skip
    case = build(wrong, 1.0, 1)
    true, thought = case.fleet.replicas[0].profile, case.believed.replicas[0].profile
    assert true.weights != thought.weights
    assert 0.7 <= thought.weights / true.weights <= 1.3
    assert true.kv_capacity == thought.kv_capacity


def test_a_profile_file_needs_its_source(tmp_path):
    (tmp_path / "p.yaml").write_text("profiles: {}\n")
    with pytest.raises(ConfigError, match="source"):
        load_profiles(tmp_path)
