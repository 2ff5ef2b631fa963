"""Off-policy estimates against a made-up fleet whose truth is known."""

import json

import numpy as np
import pytest

from domain.errors import ConfigError
from policies.names import LOGGED
from sluice.cli import main
from training.ope import LEAST_ESS, Log, collect, evaluate, explored, linear_target, traits_of_line

K = 3
GOOD = np.array([0.9, 0.6, 0.3])
"""P(good) of the three routes at difficulty 0.5."""


def world(n, rng, explore=0.1):
    """Made: n logged decisions: the log's policy takes the largest P(SLO); 10 % uniform."""
    traits = np.zeros((n, K, len(LOGGED)))
    traits[:, :, 0] = 1.0
    traits[:, :, 1] = rng.uniform(0.98, 1.0, (n, K))
    traits[:, :, 2] = GOOD
    hard = rng.random(n)
    truth = np.clip(GOOD - 0.5 * (hard[:, None] - 0.5), 0, 1)
    greedy = traits[:, :, 1].argmax(axis=1)
    explored = rng.random(n) < explore
    taken = np.where(explored, rng.integers(0, K, n), greedy)
    propensity = explore / K + (1 - explore) * (taken == greedy)
    order = np.argsort(np.arange(K)[None, :] != taken[:, None], axis=1, kind="stable")
    rows = np.arange(n)[:, None]
    log = Log(
        traits=traits[rows, order],
        there=np.ones((n, K), bool),
        propensity=propensity,
        rewards={"good": (rng.random(n) < truth[np.arange(n), taken]).astype(float)},
        routes=np.array([["a", "b", "c"]] * n)[rows, order],
        policy=np.full(n, "linear"),
        left_out={},
    )
    return log, truth[rows, order]


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.5, 1.0])
def test_who_parts_on_few_requests_is_refused_or_judged_rightly(share):
    """The target takes the best route for a share of the requests, the log's elsewhere: the whole
    log's weights look well, but few explored lines tell. What is not refused holds the truth as
    often as it says; what is says how many lines there were and what helps.
    """
    rng = np.random.default_rng(int(1000 * share))
    inside = told = 0
    for _ in range(60):
        log, truth = world(10_000, rng, explore=0.03)
        greedy = linear_target(log, {"p_slo": 1.0})
        best = linear_target(log, {"quality": 1.0})
        mark = log.traits[:, :, 1].sum(axis=1)  # of the request, whichever route was taken
        target = np.where(mark <= np.quantile(mark, share), best, greedy)
        mean = truth[np.arange(len(log)), target].mean()
        found = {e.method: e for e in evaluate(log, target, "good", resamples=300)}
        if found["snips"].refused is None:
            told += 1
            inside += found["snips"].low <= mean <= found["snips"].high
        elif found["snips"].ess >= LEAST_ESS:
            assert f"{explored(log, target)} explored lines" in found["snips"].refused
            assert "explore more" in found["snips"].refused
    assert told == 0 if share <= 0.1 else told > 10
    assert inside >= 0.85 * told


def test_who_takes_the_logs_own_routes_needs_no_exploration():
    log, _ = world(4_000, np.random.default_rng(2), explore=0.01)
    found = evaluate(log, linear_target(log, {"p_slo": 1.0}), "good", resamples=100)
    assert all(e.refused is None for e in found)


@pytest.mark.parametrize(("weights", "route"), [({"quality": 1.0}, 0.9), ({"quality": -1.0}, 0.3)])
def test_the_truth_lies_within(weights, route):
    """Every estimator's 95 % interval holds the truth in at least 34 of 40 logs."""
    rng = np.random.default_rng(5)
    inside = dict.fromkeys(("ips", "snips", "dr", "switch"), 0)
    for _ in range(40):
        log, truth = world(4_000, rng)
        target = linear_target(log, weights)
        mean = truth[np.arange(len(log)), target].mean()
        assert mean == pytest.approx(route, abs=0.03)
        for e in evaluate(log, target, "good", resamples=300):
            assert e.refused is None
            assert e.low < e.value < e.high
            inside[e.method] += e.low <= mean <= e.high
    assert all(count >= 34 for count in inside.values()), inside


def test_dr_is_narrower_than_ips():
    """The model takes out what is known of the routes."""
    log, _ = world(6_000, np.random.default_rng(6))
    by = {e.method: e for e in evaluate(log, linear_target(log, {"quality": 1.0}), "good")}
    assert by["dr"].high - by["dr"].low < 0.7 * (by["ips"].high - by["ips"].low)


def test_the_logging_policy_itself_is_its_own_mean():
    """Weights near one: the estimate is the log's mean, and nearly every line counts."""
    log, _ = world(3_000, np.random.default_rng(7), explore=0.05)
    by = {e.method: e for e in evaluate(log, linear_target(log, {"p_slo": 1.0}), "good")}
    assert by["snips"].value == pytest.approx(log.rewards["good"].mean(), abs=0.01)
    assert by["ips"].ess > 0.9 * len(log)


def test_thin_evidence_is_refused():
    """Too few explored lines that the target agrees with: no number is offered as evidence."""
    log, _ = world(3_000, np.random.default_rng(8), explore=0.01)
    found = evaluate(log, linear_target(log, {"quality": -1.0}), "good")
    assert all("effective sample size" in e.refused for e in found)


def test_routes_that_were_never_explored_are_noticed():
    """Weights that do not average to one: the target goes where the log cannot follow."""
    rng = np.random.default_rng(9)
    log, _ = world(6_000, rng)
    target = linear_target(log, {"quality": 1.0})
    never = log.routes[np.arange(len(log)), target] == "a"
    elsewhere = never & (target != 0)  # as if only half of those lines had been kept
    keep = ~((target == 0) & (rng.random(len(log)) < 0.5))
    assert elsewhere.any()
    thin = Log(
        traits=log.traits[keep], there=log.there[keep], propensity=log.propensity[keep],
        rewards={"good": log.rewards["good"][keep]}, routes=log.routes[keep],
        policy=log.policy[keep], left_out={},
    )  # fmt: skip
    found = evaluate(thin, linear_target(thin, {"quality": 1.0}), "good")
    assert all("never explored" in e.refused for e in found)


def line(i, *, propensity=1.0, policy="best_fit", cls="standard", attempts=1, met=True, **fields):
    """A decision-log line with two candidates."""
    candidate = {"score": 1.0, "ttft": 0.5, "tpot": 0.02}
    return {
        "id": f"q{i}", "version": "v", "class": cls, "policy": policy, "attempts": attempts,
        "propensity": propensity, "stream": True, "route": "a", "replica": "a",
        "prompt_tokens": 100,
        "slo": {"ttft": 1.0, "tpot": None, "e2e": None, "quality": None},
        "candidates": [
            candidate | {"route": "a", "p_slo": 0.9, "quality": 0.8},
            candidate | {"route": "b", "p_slo": 0.8, "quality": 0.9},
        ],
        "predicted": {"length_mean": 11.0, "quality": 0.8},
        "outcome": {
            "sent": 0.1, "met": met, "e2e": 1.0, "prompt_tokens": 100, "completion_tokens": 20,
        },
    } | fields  # fmt: skip


def test_lines_that_cannot_be_used_are_counted():
    """Retries, the top class, random policies, what was never sent."""
    lines = [
        line(0, propensity=0.005), line(1), line(2, cls="top"), line(3, policy="random"),
        line(4, attempts=2), line(5, route=None), line(6, met=None),
    ]  # fmt: skip
    log = collect(lines, {"a": 2.0})
    assert len(log) == 2
    assert log.left_out == {"not sent": 2, "retried": 1, "random policy": 1, "never explored": 1}
    assert log.rewards["cost"].tolist() == pytest.approx([2.0 * 0.2, 2.0 * 0.2])


def test_traits_of_a_line():
    """As the kernel computes them: TTFT from arrival, shares of limits, logarithms."""
    x = dict(zip(LOGGED, traits_of_line(line(0))[1], strict=True))
    assert x == pytest.approx(
        {"one": 1, "p_slo": 0.8, "quality": 0.9, "ttft_share": 0.6, "tpot_share": 0, "e2e_share": 0,
         "ttft": np.log(1.6), "e2e": np.log(1.8)}
    )  # fmt: skip


def test_what_the_log_does_not_hold_is_said():
    log, _ = world(10, np.random.default_rng(1))
    with pytest.raises(ConfigError, match="simulator"):
        linear_target(log, {"running": -1.0})
    with pytest.raises(ConfigError, match="no reward"):
        evaluate(log, linear_target(log, {}), "joy")


def test_the_command(tmp_path, capsys):
    """Refusal is exit code 1 and says why; latency brings its warning."""
    path = tmp_path / "decisions.jsonl"
    lines = [line(i, propensity=0.005 if i % 9 == 0 else 0.995) for i in range(50)]
    path.write_text("\n".join(map(json.dumps, lines)))
    argv = ["evaluate-log", str(path), "--weight", "quality=1", "--reward", "met", "--json"]
    assert main(argv) == 1
    shown = json.loads(capsys.readouterr().out)
    assert {e["method"] for e in shown["estimates"]} == {"ips", "snips", "dr", "switch"}
    assert "below 100" in shown["estimates"][0]["refused"]
    assert "interferes" in shown["caveat"]
    assert main(["evaluate-log", str(tmp_path / "none"), "--weight", "p_slo=1"]) == 2
