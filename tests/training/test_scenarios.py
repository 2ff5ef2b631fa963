"""Every shipped scenario and profile loads; bad ones are named."""

from pathlib import Path

import numpy as np
import pytest

from backends.sim.profiles import load_profiles, shipped
from domain.errors import ConfigError
from training.evaluate import policy_named, run_live
from training.measures import measure
from training.scenario import Pools, Promise, Replicas, Scenario, Source, build, read
from training.trace_sources import default_data

DATA = default_data()
FOLDER = Path(__file__).parents[2] / "configs" / "scenarios"


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.yaml")), ids=lambda p: p.stem)
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


@pytest.fixture(scope="module")
def pools():
    return Pools(DATA)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no data sets at {DATA}; set SLUICE_DATA")
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_scenarios_run(path, pools):
    """Three hundred requests at a rate that every fleet carries."""
    scenario = read(path).model_copy(update={"requests": 300})
    case = build(scenario, 4.0, 1, pools=pools)
    assert 300 <= len(case.trace) < 400
    run = run_live(case, policy_named("least_requests"))
    report = measure(case, run, "least_requests")
    assert report.attainment > 0.5
    assert report.arrivals > 150


def test_a_base_is_taken_section_by_section(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "name: a\nfleet: [{profile: h100-bf16-14b}]\nclasses: {x: {ttft: 1}, y: {ttft: 2}}\n"
        "metrics: {every: 0.2}\n"
    )
    (tmp_path / "b.yaml").write_text("name: b\nbase: a.yaml\nclasses: {x: {ttft: 3}}\n")
    scenario = read(tmp_path / "b.yaml")
    assert list(scenario.classes) == ["x"]
    assert (scenario.metrics.every, scenario.classes["x"].ttft) == (0.2, 3)
    (tmp_path / "c.yaml").write_text("name: c\nbase: c.yaml\n")
    with pytest.raises(ConfigError, match="leads back"):
        read(tmp_path / "c.yaml")
    (tmp_path / "d.yaml").write_text("name: d\nbase: none.yaml\n")
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        read(tmp_path / "d.yaml")


def test_a_source_may_belong_to_a_tenant():
    scenario = Scenario(
        name="x", fleet=(Replicas(profile="h100-bf16-14b"),), classes={"a": Promise()},
        workload=(Source(tenant="one"), Source(tenant="two", share=3.0)), requests=400,
    )  # fmt: skip
    trace = build(scenario, 5.0, 1).trace
    shares = {name: (trace.tenant_id == k).mean() for k, name in enumerate(trace.tenants)}
    assert shares["two"] == pytest.approx(0.75)


def two_sources(**fields):
    return Scenario(
        name="x",
        fleet=(Replicas(profile="h100-bf16-14b"),),
        workload=(
            Source(share=1, when="early", promise="b", options={"prompt_median": 100}),
            Source(share=3, when="late", options={"prompt_median": 4000}),
        ),
        classes={"a": Promise(ttft=1.0), "b": Promise(ttft=2.0), "c": Promise(ttft=3.0)},
        requests=2000,
        **fields,
    )


def test_a_source_may_come_first_or_last_and_have_a_class_of_its_own():
    case = build(two_sources(), 10.0, 1)
    short = case.ttft == 2.0
    named = np.array(case.trace.classes)[case.trace.class_id] == "b"
    half = case.trace.duration / 2
    early, late = case.trace.arrival[case.trace.prompt < 300], case.trace.arrival[~short]
    assert np.array_equal(short, named)
    assert np.median(early) < 0.8 * half
    assert np.median(late) > 1.1 * half
    assert set(case.ttft[~short]) >= {1.0, 3.0}
    assert case.trace.rate == pytest.approx(10.0, rel=0.15)


def test_a_source_whose_class_is_not_there_is_named():
    bad = two_sources()
    bad = bad.model_copy(update={"classes": {"a": Promise()}})
    with pytest.raises(ConfigError, match="unknown promise 'b'; known: a"):
        build(bad, 1.0, 1)
