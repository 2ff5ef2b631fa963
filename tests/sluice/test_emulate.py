"""`sluice emulate` reads the gateway's own file."""

from pathlib import Path

import pytest

from domain.errors import ConfigError
from sluice.emulate import emulated
from sluice.settings import load

CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_shipped_fleet_is_emulated_at_its_own_speeds():
    found = emulated(load(CONFIGS / "emulated.yaml"))
    assert len(found) == 8
    spec, model = found[0]
    assert (spec.name, model) == ("h100-bf16-0", "chat-14b")
    assert spec.profile.weights == pytest.approx(0.011)
    assert spec.profile.chunk == 1024


def test_only_one_of_them():
    found = emulated(load(CONFIGS / "emulated.yaml"), ["a100-bf16-1"])
    assert [spec.name for spec, _ in found] == ["a100-bf16-1"]


def test_a_replica_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="a200"):
        emulated(load(CONFIGS / "emulated.yaml"), ["a200"])


def test_a_file_without_url_replicas_here_has_nothing_to_emulate():
    with pytest.raises(ConfigError, match="nothing to emulate"):
        emulated(load(CONFIGS / "local.yaml"))
