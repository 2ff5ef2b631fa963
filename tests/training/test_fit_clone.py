"""Cloning gives back the rule that made the log."""

import numpy as np
import pytest

from domain.errors import ConfigError
from policies.names import LOGGED
from training.fit_clone import clone, entry
from training.ope import Log


def log_of(n, weights, rng, noise=0.0):
    """Decisions of a linear rule over five candidates, some of them absent."""
    traits = rng.random((n, 5, len(LOGGED)))
    traits[:, :, 0] = 1.0
    there = rng.random((n, 5)) < 0.9
    there[:, 0] = True
    score = np.where(there, traits @ weights + noise * rng.gumbel(size=(n, 5)), -np.inf)
    order = np.argsort(-score, axis=1, kind="stable")
    rows = np.arange(n)[:, None]
    return Log(
        traits=traits[rows, order], there=there[rows, order], propensity=np.ones(n), rewards={},
        routes=np.full((n, 5), "r"), policy=np.full(n, "p"), left_out={},
    )  # fmt: skip


def test_the_rule_comes_back():
    """Direction of the weights, and what it takes on decisions it has not seen."""
    wanted = np.array([0.0, 3.0, 1.0, 0.0, -2.0, 0.0, 0.0, -1.0])
    fitted = clone(log_of(3_000, wanted, np.random.default_rng(1)))
    got = np.array([fitted.weights.get(name, 0.0) for name in LOGGED])
    assert got @ wanted / np.linalg.norm(got) / np.linalg.norm(wanted) > 0.995
    assert fitted.agreement > 0.97
    assert fitted.agreement > fitted.single + 0.2
    assert fitted.chance == pytest.approx(0.22, abs=0.03)


def test_noisy_choices_give_weights_in_units_of_the_noise():
    """With Gumbel noise of scale 1 the logit's weights are the rule's own."""
    wanted = np.array([0.0, 3.0, 0.0, 0.0, -2.0, 0.0, 0.0, 0.0])
    fitted = clone(log_of(12_000, wanted, np.random.default_rng(2), noise=1.0))
    assert fitted.weights["p_slo"] == pytest.approx(3.0, abs=0.3)
    assert fitted.weights["tpot_share"] == pytest.approx(-2.0, abs=0.3)


def test_the_entry_holds_ranges_and_a_card():
    log = log_of(600, np.array([0.0, 1.0, 0, 0, 0, 0, 0, 0]), np.random.default_rng(3))
    made = entry("clone", log, clone(log), "a log")
    assert made.policy.kind == "linear"
    assert made.policy.envelope["p_slo"] == pytest.approx((0.0, 1.0), abs=0.01)
    assert made.card["decisions"] == 600
    assert made.policy.weights["p_slo"] > 10 * abs(made.policy.weights.get("quality", 0.0))


def test_too_little_is_refused():
    with pytest.raises(ConfigError, match="200"):
        clone(log_of(50, np.ones(8), np.random.default_rng(4)))
