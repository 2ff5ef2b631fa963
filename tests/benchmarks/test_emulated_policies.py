"""The emulated fleet's two configs: one pace for the engines, another for the gateway."""

import pytest

from benchmarks.emulated_policies import ROOT, case_of, promises, stretched
from sluice.emulate import emulated
from sluice.settings import load

LINES = [
    {"due": 0.5 * i, "prompt": 100, "prompt_tokens": 120.0, "wanted": 20, "class_name": name}
    for i, name in enumerate(["interactive", "relaxed", "interactive"])
]


@pytest.fixture
def configs(tmp_path):
    fleet, gateway = stretched(ROOT / "configs" / "emulated.yaml", tmp_path, 3.0)
    return load(fleet), load(gateway)


def test_the_gateway_sees_the_fleet_and_its_promises_slowed_down_alike(configs):
    """Every time of every profile, every limit; the ports are the same on both sides."""
    own, slowed = configs
    for (engine, _), (seen, _) in zip(emulated(own), emulated(slowed), strict=True):
        assert engine.url == seen.url
        for name in ("overhead", "weights", "per_sequence", "per_context", "per_token"):
            mine, theirs = getattr(engine.profile, name), getattr(seen.profile, name)
            assert theirs == pytest.approx(3.0 * mine)
        assert engine.profile.kv_capacity == seen.profile.kv_capacity
    for name, promise in promises(slowed).items():
        assert promise.ttft == pytest.approx(3.0 * promises(own)[name].ttft)
        assert promise.tpot == pytest.approx(3.0 * promises(own)[name].tpot)


def test_the_simulator_has_each_request_with_its_own_promise(configs):
    case = case_of(configs[1], LINES)
    names = [case.trace.classes[k] for k in case.trace.class_id]
    assert names == ["interactive", "relaxed", "interactive"]
    assert case.tpot.tolist() == pytest.approx([0.09, 0.3, 0.09])
    assert case.trace.prompt.tolist() == [120, 120, 120]
