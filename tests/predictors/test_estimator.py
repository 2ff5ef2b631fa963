"""The baseline estimator: its parts joined, what it learns from, and what it leaves alone."""

from dataclasses import replace

import numpy as np
import pytest

from domain.columns import LOAD_GRID, estimate_columns
from domain.outcome import Cause, Outcome, Prediction, Usage, UsageSource
from domain.request import InferenceRequest
from predictors.estimator import BaselineEstimator
from tests.fakes.shells import small_fleet
from tests.fakes.states import State, plain_state, random_spec, random_state

MIDDLE = len(LOAD_GRID) // 2
REQUEST = InferenceRequest(id="q", tenant="t", model="m", prompt_tokens=100.0)


def bound(state: State, spec=None) -> BaselineEstimator:
    estimator = BaselineEstimator()
    m = len(state.fleet.usable)
    estimator.bind(spec or random_spec(np.random.default_rng(0), m), state.routes)
    return estimator


def fill(estimator: BaselineEstimator, state: State):
    out = estimate_columns(*state.mask.shape)
    out.cached[:] = state.estimates.cached
    people = [REQUEST] * len(state.requests.prompt)
    estimator.fill(state.requests, state.fleet, state.routes, state.mask, state.now, out, people)
    return out


def outcome(**kwargs) -> Outcome:
    """A finished, streamed request of 100 tokens: TTFT 0.4 s and TPOT 0.02 s, predicted half."""
    flat = len(LOAD_GRID)
    base = {
        "request": REQUEST,
        "cause": Cause.FINISHED,
        "arrived": 0.0,
        "sent": 0.0,
        "first_token": 0.4,
        "last_token": 0.4 + 99 * 0.02,
        "ended": 3.0,
        "route": 0,
        "replica": 0,
        "usage": Usage(prompt=100, completion=100, source=UsageSource.ENGINE),
        "prediction": Prediction(ttft=(0.2,) * flat, tpot=(0.01,) * flat, p_slo=0.9, p_raw=0.9),
        "met": True,
    }
    return Outcome(**(base | kwargs))


def test_it_writes_only_where_the_mask_is_set():
    """Everything finite inside, untouched outside; the cache column is an input."""
    for seed in range(5):
        state = random_state(seed)
        out = fill(bound(state), state)
        for name in ("wait", "p_slo", "p_raw", "quality", "ttft", "tpot"):
            column = getattr(out, name)
            assert np.isfinite(column).all()
            assert not column[~state.mask].any()
        assert (out.ttft[state.mask] > 0).all()
        assert np.array_equal(out.cached, state.estimates.cached)


def test_parts_are_learned_from_what_was_thought():
    """The place of the first answer token, and the answer after so much thinking; nothing for a
    model that was never seen to think.
    """
    estimator = bound(random_state(3))
    asked = outcome().request
    usage = Usage(prompt=100, completion=100, thinking=0, source=UsageSource.ENGINE)
    estimator.learn(outcome(usage=usage))
    assert estimator.thinking(asked) is None
    assert estimator.answering(asked, 10.0) is None
    usage = Usage(prompt=100, completion=100, thinking=80, source=UsageSource.ENGINE)
    for _ in range(200):
        estimator.learn(outcome(usage=usage))
    assert estimator.thinking(asked).quantile(0.5) == pytest.approx(81, rel=0.15)
    assert estimator.answering(asked, 80.0).quantile(0.5) == pytest.approx(20, rel=0.15)


def test_looking_changes_nothing():
    """Filling twice gives the same, and no input is written."""
    state = random_state(3)
    estimator = bound(state)
    before = [a.copy() for a in state.arrays()]
    one, two = fill(estimator, state), fill(estimator, state)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(before, state.arrays(), strict=True))


def test_quality_is_the_variants_prior():
    """A route is as good as its variant is said to be."""
    state = random_state(2, masked=1.0)
    spec = random_spec(np.random.default_rng(0), 5)
    quality = fill(bound(state, spec), state).quality
    assert quality[0].tolist() == [spec.variants[v].quality for v in state.routes.variant]


def test_a_slow_replica_is_learned_and_others_are_not():
    """Outcomes twice as slow as predicted raise that replica's TTFT and TPOT alone."""
    state = plain_state(2)
    estimator = bound(state)
    before = fill(estimator, state)
    for _ in range(30):
        estimator.learn(outcome())
    after = fill(estimator, state)
    for name in ("ttft", "tpot"):
        ratio = getattr(after, name)[0, :, MIDDLE] / getattr(before, name)[0, :, MIDDLE]
        assert ratio[0] > 1.9
        assert ratio[1] == 1.0


def test_missed_promises_lower_the_probability():
    """Requests sent at P = 1 that miss bring P(SLO) down; the raw number stays."""
    state = plain_state(1)
    estimator = bound(state)
    certain = outcome().prediction._replace(p_raw=1.0)
    for _ in range(60):
        estimator.learn(outcome(met=False, prediction=certain, first_token=None))
    out = fill(estimator, state)
    assert out.p_raw[0, 0] == 1.0
    assert out.p_slo[0, 0] < 0.5


def test_lengths_come_from_finished_answers_with_a_count():
    """Counted answers teach, cut ones as censored, broken and uncounted ones not."""
    estimator = bound(plain_state(1))
    prior = estimator.length(REQUEST).mean
    estimator.learn(outcome(cause=Cause.INTERRUPTED))
    estimator.learn(outcome(usage=Usage(completion=100)))
    assert estimator.length(REQUEST).mean == prior
    for _ in range(200):
        estimator.learn(outcome())
    assert estimator.length(REQUEST).quantile(0.5) == pytest.approx(100, rel=0.15)
    limited = replace(REQUEST, model="cut", max_tokens=100.0)
    for _ in range(200):
        estimator.learn(outcome(request=limited))
    assert estimator.length(limited).survives(100.0) > 0.3


def test_several_choices_teach_neither_length_nor_pace():
    """Of `n` answers vLLM counts all tokens, llama.cpp those of one: neither can be divided."""
    state = plain_state(1)
    estimator = bound(state)
    before = fill(estimator, state)
    prior = estimator.length(REQUEST).mean
    four = replace(REQUEST, choices=4, max_tokens=100.0)
    for _ in range(200):
        estimator.learn(outcome(request=four))
    assert estimator.length(REQUEST).mean == prior
    after = fill(estimator, state)
    assert np.array_equal(before.tpot, after.tpot)
    assert not np.array_equal(before.ttft, after.ttft)


def test_what_was_never_sent_or_never_streamed_teaches_no_latency():
    """Refusals, cancels before a token and plain JSON answers leave the scales alone."""
    state = plain_state(1)
    estimator = bound(state)
    before = fill(estimator, state)
    plain = replace(REQUEST, stream=False)
    for kwargs in (
        {"cause": Cause.SHED, "sent": None, "replica": None, "prediction": None},
        {"cause": Cause.CLIENT_GONE, "first_token": None, "last_token": None, "met": None},
        {"request": plain},
    ):
        estimator.learn(outcome(**kwargs))
    after = fill(estimator, state)
    assert np.array_equal(before.ttft, after.ttft)
    assert np.array_equal(before.tpot, after.tpot)


def test_a_fleet_change_keeps_what_was_learned_by_name():
    """A replica that stays, at another index, keeps its scales; a new one starts at its profile."""
    estimator = BaselineEstimator()
    fleet = small_fleet(2)
    state = plain_state(2)
    estimator.bind(fleet, state.routes)
    for _ in range(30):
        estimator.learn(outcome(replica=1))
    learned = estimator._scales.rows[0, 1]
    assert learned > 1.5
    wider = small_fleet(3)
    turned = type(wider)(replicas=wider.replicas[::-1], variants=wider.variants)
    estimator.bind(turned, plain_state(3).routes)
    assert estimator._scales.rows[0].tolist() == [1.0, learned, 1.0]
