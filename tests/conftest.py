"""Test-wide rules: under REQUIRE_ALL=1 nothing may be skipped."""

import os
from collections.abc import Generator
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from sluice.kernel_cache import drop_stale

# A shared machine may be slow for reasons that no test can know; correctness is what is checked.
settings.register_profile("sluice", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sluice")

drop_stale()  # an edited kernel is tested, not what was compiled before

R = TypeVar("R", pytest.TestReport, pytest.CollectReport)

REQUIRE_ALL = os.environ.get("REQUIRE_ALL") == "1"


def _fail_if_skipped(report: R) -> R:
    """Turn a skip into a failure that still names its reason; expected failures pass through."""
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped under REQUIRE_ALL=1: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _fail_if_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _fail_if_skipped((yield))
