"""The search finds a better place within its budget, the same for everybody."""

import pytest

from domain.errors import ConfigError
from training.evaluate import policy_named
from training.tune import KNOBS, Knob, knobs, tune


@pytest.mark.parametrize("kind", sorted(KNOBS))
def test_every_knob_is_an_option_inside_its_range(kind):
    for knob in knobs(kind):
        for share in (0.0, 0.3, 1.0):
            assert knob.share(knob.at(share)) == pytest.approx(share)
        policy_named(kind, **{knob.name: knob.at(1.3)})


def test_a_knob_folds_back_into_its_range():
    knob = Knob(name="x", low=1.0, high=3.0)
    assert [knob.at(u) for u in (-0.25, 1.25, 2.0)] == [1.5, 2.5, 1.0]


def test_the_search_finds_the_hill_and_spends_its_budget():
    asked = []

    def score(kind, options):
        asked.append(kind)
        shed, margin = options.get("shed_below", 0.05), options.get("margin", 0.8)
        return 10.0 - (shed - 0.3) ** 2 - (margin - 0.4) ** 2

    found = tune("just_enough", score, evaluations=80)
    assert found.options["margin"] == pytest.approx(0.4, abs=0.1)
    assert found.score > found.default_score
    assert 80 <= len(asked) <= 90


def test_what_has_no_knobs_is_refused():
    with pytest.raises(ConfigError, match="round_robin"):
        knobs("round_robin")
