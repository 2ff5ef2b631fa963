"""Routers of others work in front of the emulator: it answers what they ask of an engine."""

import os
from pathlib import Path

import pytest

from benchmarks.emulator import ROUTERS, router_binary, through_router

pytestmark = pytest.mark.integration

FOLDER = os.environ.get("SLUICE_ROUTERS")


@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_serves_whole_answers_from_emulated_replicas(name, policy):
    binary = router_binary(name, Path(FOLDER) if FOLDER else None)
    if binary is None:
        pytest.skip(f"{name} is neither on PATH nor in $SLUICE_ROUTERS")
    routed = through_router(name, binary, policy, requests=8)
    assert routed.works, routed
