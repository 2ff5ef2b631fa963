"""Who knows the future does better, and plays only what could be played."""

import numpy as np
import pytest

from tests.fakes.small_fleet import LiveRunner, small
from training.evaluate import policy_named
from training.lookahead import look_ahead
from training.measures import fair, measure
from training.scenario import build


@pytest.mark.parametrize(("options", "least"), [({}, 0.0), ({"hold_until": 0.0}, 0.02)])
def test_look_ahead_beats_the_blind_rule_on_average(options, least):
    """A rule that holds nobody back by much; never does it worse than either."""
    policy = policy_named("marginal", **options)
    gains = []
    for seed in (1, 2, 3):
        case = build(small(), 20.0, seed)
        blind = measure(case, LiveRunner().run(case, policy)[0], "blind")
        best = look_ahead(case, [policy], lambda c, p: LiveRunner().run(c, p)[0])
        assert best.arrivals == blind.arrivals
        gains.append(fair(best) - fair(blind))
    assert min(gains) >= 0.0
    assert np.mean(gains) > least
