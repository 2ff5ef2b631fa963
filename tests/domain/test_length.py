"""Length distributions: survival stays a survival function whatever is asked of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from domain.errors import ShapeError
from domain.length import BINS, EDGES, LengthDistribution

hazards = st.lists(st.floats(0.0, 1.0), min_size=BINS, max_size=BINS).map(np.array)


@given(hazards, st.floats(0.0, 20_000.0))
def test_remaining_is_what_survives(hazard, age):
    """P(remaining > x | age) equals P(L > age + x) / P(L > age) at the bin edges."""
    whole = LengthDistribution.from_hazard(hazard)
    alive = whole.survives(age)
    left = whole.remaining(age)
    assert left.survives(0.0) == pytest.approx(1.0)
    if alive > 1e-6:
        for edge in EDGES[age < EDGES][::7]:
            assert left.survives(edge - age) == pytest.approx(
                whole.survives(edge) / alive, abs=1e-9
            )


@given(hazards)
def test_quantiles_rise_and_match_survival(hazard):
    """Quantiles never fall as the level rises, and the mean lies inside the support."""
    d = LengthDistribution.from_hazard(hazard)
    q = d.quantiles(np.linspace(0.01, 0.99, 25))
    assert np.all(np.diff(q) >= 0)
    assert 0 <= d.mean <= EDGES[-1]
    for level in (0.1, 0.5, 0.9):
        assert d.survives(d.quantile(level)) <= 1 - level + 1e-9


@given(hazards, st.integers(1, 5_000))
def test_cap_leaves_nothing_beyond_its_bin(hazard, limit):
    """Under max_tokens nothing survives past the bin that holds it, and nothing changes before."""
    d = LengthDistribution.from_hazard(hazard)
    capped = d.capped(limit)
    k = int(np.searchsorted(EDGES, limit))
    assert capped.survives(float(EDGES[k])) == 0.0
    assert np.array_equal(capped.survival[: max(k, 1)], d.survival[: max(k, 1)])


def test_wrong_shape_is_refused():
    """A survival of another grid is a bug that says so."""
    with pytest.raises(ShapeError, match="must be"):
        LengthDistribution(np.ones(3))


def test_lognormal_median_is_the_median():
    """The prior's parameter is its median."""
    assert LengthDistribution.lognormal(200, 0.9).quantile(0.5) == pytest.approx(200, rel=0.03)
