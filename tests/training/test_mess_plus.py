"""MESS+'s rule on a made-up zoo: the promise is kept, as cheaply as a mix can."""

import numpy as np
import pytest

from training.mess_plus import Scores, run


@pytest.fixture
def zoo():
    """A cheap model that is right in 50 %, a dear one in 80 %, on tasks that tell nothing."""
    rng = np.random.default_rng(1)
    score = (rng.random((4_000, 2)) < np.array([0.5, 0.8])).astype(float)
    return Scores(
        models=("cheap", "dear"), score=score, price=np.array([0.1, 1.0]),
        task=np.zeros(4_000, np.int64),
    )  # fmt: skip


def test_the_promise_is_kept_at_the_price_of_the_mix(zoo):
    """65 % needs half of each: 0.55 of the dear model's cost."""
    found = run(zoo, 0.65 / 0.8, 1, v=5.0)
    assert found.satisfied == pytest.approx(found.alpha, abs=0.012)
    assert found.cost == pytest.approx(0.55, abs=0.06)
    assert found.met_after is not None
    assert found.met_after < 2_500


def test_what_cannot_be_kept_is_no_reason_to_stop(zoo):
    """More than the best model gives: without a cap the dear one is bought for nearly everybody."""
    found = run(zoo, 1.1, 2)
    assert found.mix["dear"] > 0.9
    assert found.met_after is None
