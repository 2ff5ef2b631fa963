"""The roofline: monotone in everything that costs time, and scales that converge to the truth."""

import math

import numpy as np
import pytest

from domain.columns import LOAD_GRID
from predictors.roofline import (
    FIXED,
    PREFILL,
    SLOPE,
    OnlineScales,
    prefill_time,
    roofline_into,
    step_time,
)
from tests.fakes.states import plain_state, random_state


def predict(state, *, prefill=1.0, decode=1.0, spread=0.35):
    """The estimates of a state with the same scales everywhere."""
    m = len(state.fleet.usable)
    roofline_into(
        state.requests,
        state.fleet,
        state.routes,
        state.mask,
        np.array([[prefill], [decode], [decode], [spread], [spread]]) * np.ones(m),
        state.now,
        state.estimates,
    )
    return state.estimates


def test_a_step_is_the_larger_of_memory_and_compute():
    """One step by hand, on both sides of the ridge."""
    state = plain_state(
        1,
        overhead=0.001,
        weights=0.01,
        per_sequence=1e-5,
        per_context=1e-7,
        per_token=1e-4,
        per_attention=1e-9,
        experts=0.03,
        expert_tokens=12.0,
    )
    memory = step_time(state.fleet, 0, 4.0, 10_000.0, 0.0, 0.0)
    assert memory == pytest.approx(0.001 + 4e-5 + 0.03 * 4 / 16 + 0.01 + 1e-3)
    compute = step_time(state.fleet, 0, 4.0, 0.0, 500.0, 200.0)
    touched = 0.03 * 504 / 516
    assert compute == pytest.approx(0.001 + 4e-5 + touched + 1e-4 * 504 + 1e-9 * 500 * 450)


def test_prefill_is_cut_into_chunks():
    """More chunks, more reads of the weights; nothing to prefill takes no time."""
    state = plain_state(1, chunk=256, per_token=1e-9, per_attention=0.0, per_context=0.0)
    one, four = (prefill_time(state.fleet, 0, n, 0.0) for n in (256.0, 1024.0))
    assert four == pytest.approx(4 * one)
    assert prefill_time(state.fleet, 0, 0.0, 0.0) == 0.0


@pytest.mark.parametrize("column", ["running", "context", "backlog_tokens", "foreign_running"])
def test_more_load_is_never_faster(column):
    """TTFT and TPOT rise, and P(SLO) falls, with every kind of load."""
    for seed in range(10):
        state = random_state(seed, masked=1.0)
        before = [a.copy() for a in predict(state)]
        getattr(state.fleet, column)[:] += 700.0
        after = predict(state)
        names = after._fields
        for name in ("ttft", "tpot", "wait"):
            assert (getattr(after, name) >= before[names.index(name)] - 1e-12).all()
        assert (after.p_raw <= before[names.index("p_raw")]).all()
        moved = "ttft" if column == "backlog_tokens" else "tpot"
        assert (getattr(after, moved) > before[names.index(moved)]).any()


def test_a_cached_prefix_saves_its_prefill():
    """The more is cached, the sooner the first token."""
    state = plain_state(2, prompt=2000.0)
    state.estimates.cached[0, 1] = 1800.0
    ttft = predict(state).ttft[0]
    assert (ttft[1] < 0.5 * ttft[0]).all()


def test_quantiles_rise_together_with_one_latent_load():
    """TTFT(u) and TPOT(u) are both increasing, around the median of the prediction."""
    estimates = predict(plain_state(1), spread=0.5)
    assert (np.diff(estimates.ttft[0, 0]) > 0).all()
    assert (np.diff(estimates.tpot[0, 0]) > 0).all()
    flat = predict(plain_state(1), spread=0.0)
    middle = len(LOAD_GRID) // 2
    assert flat.ttft[0, 0] == pytest.approx(np.full(len(LOAD_GRID), estimates.ttft[0, 0, middle]))


def test_the_joint_probability_is_the_share_of_the_grid_that_meets_all_limits():
    """P(SLO) against a Monte-Carlo free count over (u, L) by hand."""
    for seed in range(10):
        state = random_state(seed, masked=1.0)
        e, q = predict(state), state.requests
        for i, c in np.ndindex(state.mask.shape):
            ttft = (state.now - q.arrived[i]) + e.ttft[i, c][:, None]
            tpot = e.tpot[i, c][:, None]
            e2e = ttft + np.maximum(q.length_q[i][None, :] - 1, 0) * tpot
            met = (ttft <= q.ttft[i]) & (tpot <= q.tpot[i]) & (e2e <= q.e2e[i])
            assert e.p_raw[i, c] == pytest.approx(met.mean())


def test_no_limits_are_always_met_and_impossible_ones_never():
    """P is 1 without limits and 0 under an impossible one."""
    state = plain_state(1)
    assert predict(state).p_raw[0, 0] == 1.0
    state.requests.ttft[:] = 1e-6
    assert predict(state).p_raw[0, 0] == 0.0


def test_scales_converge_to_a_replica_that_is_slower_than_its_profile():
    """A replica 1.8 times slower in prefill, 0.6 in a step alone and 3 in what a batch adds is
    learned from noisy outcomes, and only that replica.
    """
    rng = np.random.default_rng(1)
    scales = OnlineScales(np.full(2, 0.5))
    for _ in range(400):
        noise = rng.normal(0.0, 0.1, 2)
        scales.learn_ttft(0, scales.rows[PREFILL, 0], 1.8 * math.exp(noise[0]))
        alone, shared = 0.02, 0.001 * rng.integers(0, 16)
        predicted = scales.rows[FIXED, 0] * alone + scales.rows[SLOPE, 0] * shared
        actual = (0.6 * alone + 3.0 * shared) * math.exp(noise[1])
        scales.learn_tpot(0, alone, shared, predicted, actual)
    learned = scales.rows[:, 0]
    assert learned == pytest.approx([1.8, 0.6, 3.0, 0.1, 0.1], rel=0.2, abs=0.03)
    assert scales.rows[:, 1].tolist() == [1.0, 1.0, 1.0, 0.5, 0.5]


def test_ten_outcomes_bring_the_pace_within_a_fifth():
    """A replica four times slower than its profile is not believed for long."""
    scales = OnlineScales(np.full(1, 0.35))
    for _ in range(10):
        scales.learn_tpot(0, 0.02, 0.01, 0.03, 0.12)
    pace = scales.rows[FIXED, 0] * 0.02 + scales.rows[SLOPE, 0] * 0.01
    assert pace == pytest.approx(0.12, rel=0.2)


def test_one_outlier_does_not_turn_a_scale_over():
    """A thousandfold outlier moves a settled scale by a sixth at most."""
    scales = OnlineScales(np.full(1, 0.3))
    for _ in range(50):
        scales.learn_ttft(0, 1.0, 1.0)
        scales.learn_tpot(0, 1.0, 0.5, 1.5, 1.5)
    scales.learn_ttft(0, 1.0, 1000.0)
    scales.learn_tpot(0, 1.0, 0.5, 1.5, 1000.0)
    assert (scales.rows[:3, 0] < 1.17).all()


def test_nonsense_times_are_ignored():
    """Zero or negative seconds teach nothing."""
    scales = OnlineScales(np.full(1, 0.3))
    before = scales.rows.copy()
    for predicted, actual in ((0.0, 1.0), (1.0, 0.0), (1.0, -1.0)):
        scales.learn_ttft(0, predicted, actual)
        scales.learn_tpot(0, 1.0, 0.0, predicted, actual)
    assert np.array_equal(before, scales.rows)
