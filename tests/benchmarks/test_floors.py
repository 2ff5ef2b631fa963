"""Routing under floors that change: the price, the rule, the oracle, on scores that are made up."""

import numpy as np
import pytest

from benchmarks.floors import SCHEDULES, chosen, oracle, price_of, result, routed


@pytest.fixture
def scores():
    """4,000 prompts, a cheap, a middling and a dear model; predictions that know half of it."""
    rng = np.random.default_rng(3)
    hard = rng.random((4000, 1))
    chance = np.clip(np.array([0.75, 0.85, 0.95]) - hard * np.array([0.6, 0.4, 0.1]), 0.0, 1.0)
    truth = (rng.random(chance.shape) < chance).astype(float)
    cost = np.array([0.1, 0.4, 1.0]) * rng.uniform(0.5, 1.5, (4000, 1))
    return truth, chance, cost


def test_the_price_is_the_least_that_reaches_the_floor(scores):
    _, predicted, cost = scores
    rows = np.arange(len(cost))
    for floor in (0.5, 0.7, 0.85):
        price = price_of(floor, predicted, cost)
        assert predicted[rows, chosen(price, predicted, cost)].mean() >= floor
        cheaper = predicted[rows, chosen(0.98 * price, predicted, cost)].mean()
        assert price < 1e-3 or cheaper < floor


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_the_price_ahead_holds_more_windows_than_the_queue_alone(scores, schedule):
    """Of floors that change, over orders; at less than the dearest model's cost."""
    held = {True: 0.0, False: 0.0}
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(len(scores[0]))
        truth, predicted, cost = (table[order] for table in scores)
        floor = SCHEDULES[schedule](len(truth)) * truth.mean(axis=0).max()
        for ahead in held:
            picks = routed(truth, predicted, cost, floor, seed, ahead=ahead)
            found = result(truth, cost, floor, picks, cost[:, 2].mean())
            held[ahead] += found.held / 4
            assert found.cost < 0.9
    assert held[True] > 0.93
    assert held[True] > held[False]


def test_the_oracle_is_cheaper_at_the_same_floor(scores):
    truth, predicted, cost = scores
    floor = np.full(len(truth), 0.8)
    best = result(truth, cost, floor, oracle(truth, cost, floor), 1.0)
    ours = result(truth, cost, floor, routed(truth, predicted, cost, floor, 0, ahead=True), 1.0)
    assert best.held == 1.0
    assert best.cost < ours.cost
