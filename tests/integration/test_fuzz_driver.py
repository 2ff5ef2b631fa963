"""The fuzz driver itself, briefly; the long run is `python -m tests.benchmarks.fuzz`."""

import pytest

from tests.benchmarks import fuzz


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_a_thousand_inputs(target):
    counts, _, failure = fuzz.run(1000, 3, None, [target])
    assert failure is None
    assert counts == {target: 1000}


def test_a_crash_is_reported(monkeypatch):
    """A driver that sees nothing would pass too."""
    monkeypatch.setitem(fuzz.TARGETS, "request", lambda rng: 1 / (rng.random() < 0.9))
    _, _, failure = fuzz.run(1000, 3, None, ["request"])
    assert isinstance(failure[2], ZeroDivisionError)
