"""Who knows the future does better, and plays only what could be played."""

import numpy as np

from tests.fakes.small_fleet import LiveRunner, small
from training.evaluate import policy_named
from training.lookahead import look_ahead
from training.measures import fair, measure
from training.scenario import build


def test_look_ahead_beats_the_blind_rule_on_average():
    policy = policy_named("marginal")
    gains = []
    for seed in (1, 2, 3):
        case = build(small(), 20.0, seed)
        blind = measure(case, LiveRunner().run(case, policy)[0], "blind")
        best = look_ahead(case, [policy], lambda c, p: LiveRunner().run(c, p)[0])
        assert best.arrivals == blind.arrivals
        gains.append(fair(best) - fair(blind))
    assert np.mean(gains) > 0.01
