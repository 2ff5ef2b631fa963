"""Fixtures of the integration tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def local_cache(pytestconfig: pytest.Config) -> Path:
    """Model files and perplexities of the local fleet, kept between runs; names follow content."""
    return pytestconfig.cache.mkdir("local-fleet")
