"""Rates are found, sets come cheapest first, and what is bought is enough and not more."""

import pytest

from domain.errors import ConfigError
from tests.fakes.small_fleet import LiveRunner, small
from training.capacity import Planner, by_price, last_rate
from training.evaluate import policy_named


@pytest.mark.parametrize("true", [0.013, 0.9, 1.0, 47.0, 900.0])
def test_the_last_rate_is_found(true):
    assert 0.95 * true <= last_rate(lambda rate: rate <= true) <= true


def test_nothing_carried_is_zero():
    assert last_rate(lambda _rate: False) == 0.0


def test_sets_come_in_order_of_price():
    sets = by_price([2.5, 0.8], 3)
    prices = [2.5 * a + 0.8 * b for a, b in sets]
    assert prices == sorted(prices)
    assert len(set(sets)) == len(sets) == 10  # all with a + b <= 3


def planner():
    policy = policy_named("least_requests")
    return Planner(small(requests=120), policy, seeds=(1,), runner=LiveRunner())


def test_what_is_bought_carries_the_rate_and_the_fleet_alone_does_not():
    ask = planner()
    carried = ask.carried(0.9)
    assert carried.attainment < 0.9  # just above the rate
    assert sum(carried.misses.values()) == pytest.approx(1.0)
    assert ask.cheapest(0.8 * carried.rate, 0.9, ["h100-bf16-14b"], 2).counts == {}
    found = ask.cheapest(1.8 * carried.rate, 0.9, ["h100-bf16-14b", "l40s-int4-14b"], 3)
    assert found.counts
    assert found.attainment >= 0.9
    assert ask.cheapest(1e5, 0.9, ["h100-bf16-14b"], 2) is None


def test_unknown_profiles_are_named():
    with pytest.raises(ConfigError, match="b300"):
        planner().cheapest(1.0, 0.9, ["b300"], 1)
