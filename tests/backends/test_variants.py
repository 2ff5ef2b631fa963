"""Naming of the local model files."""

from pathlib import Path

import pytest

from backends import variants
from domain.errors import ConfigError


def test_an_unknown_variant_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown variant 'q5'; known: f16, q8_0, q4_0"):
        variants.variant_paths(["f16", "q5"], tmp_path)


def test_the_cache_follows_xdg(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert variants.default_cache() == Path("/somewhere/sluice")


@pytest.mark.parametrize("precision", variants.PRECISIONS.values(), ids=lambda each: each.name)
def test_every_description_says_that_the_weights_came_from_q4_1(precision):
    assert "re-encoded from Q4_1" in precision.description
