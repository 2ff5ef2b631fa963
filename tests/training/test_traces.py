"""Transformations of traces keep what they promise to keep."""

import numpy as np
import pytest

from training.traces import (
    at_rate,
    between,
    burst,
    diurnal,
    drift,
    drifting,
    gamma_arrivals,
    merged,
    poisson,
    renewal_window,
    resampled,
    rows,
    scaled,
    sessions_at,
    shaped,
    synthetic,
    time_split,
    trace,
    with_classes,
    with_tenants,
)


def cv(at):
    gaps = np.diff(at)
    return gaps.std() / gaps.mean()


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@pytest.fixture
def chain():
    """Two sessions of two calls that share a prefix of one block, out of order in time."""
    return trace(
        np.array([0.0, 4.0, 1.0, 3.0]),
        np.array([100, 130, 40, 90]),
        np.array([5, 6, 7, 8]),
        session=np.array([0, 0, 1, 1]),
        follows=np.array([0, 0, 2, 2]),
        think=np.array([0.0, 2.0, 0.0, 1.0]),
        blocks=[[0, 1], [0, 1, 2], [3], [3, 4]],
        block_tokens=64,
    )


def test_a_trace_sorts_its_rows_and_their_references(chain):
    assert chain.arrival.tolist() == [0.0, 1.0, 3.0, 4.0]
    assert chain.follows.tolist() == [0, 1, 1, 0]
    assert [chain.blocks_of(i).tolist() for i in range(4)] == [[0, 1], [3], [3, 4], [0, 1, 2]]


def test_columns_that_do_not_fit_are_refused(chain):
    from dataclasses import replace

    with pytest.raises(ValueError, match="column prompt"):
        replace(chain, prompt=chain.prompt[:2])
    with pytest.raises(ValueError, match="back in time"):
        replace(chain, arrival=chain.arrival[::-1].copy())
    with pytest.raises(ValueError, match="earlier"):
        replace(chain, follows=np.array([0, 3, 2, 3]))


def test_rows_cut_from_their_predecessor_become_roots(chain):
    cut = rows(chain, np.array([False, True, True, True]))
    assert cut.follows.tolist() == [0, 0, 2]
    assert [cut.blocks_of(i).tolist() for i in range(3)] == [[3], [3, 4], [0, 1, 2]]
    assert between(chain, 1.0, 4.0).arrival.tolist() == [0.0, 2.0]


def test_a_time_split_loses_nothing(rng):
    whole = synthetic(100, 5.0, rng)
    first, rest = time_split(whole, 0.7)
    assert len(first) == 70
    assert np.concatenate([first.prompt, rest.prompt]).tolist() == whole.prompt.tolist()


def test_merging_keeps_totals_and_keeps_strangers_apart(chain, rng):
    other = with_tenants(synthetic(50, 10.0, rng), {"flood": 1.0}, rng)
    both = merged([chain, other])
    assert both.prompt.sum() == chain.prompt.sum() + other.prompt.sum()
    assert len(np.unique(both.session)) == 2 + 50
    assert (~both.roots).sum() == 2
    assert both.tenants == ("default", "flood")
    assert (both.tenant_id == 1).sum() == 50


def test_scaled_lengths_obey_divisor_minimum_and_caps(chain):
    small = scaled(chain, divide=16, minimum=8, max_prompt=7)
    assert small.prompt.tolist() == [7, 7, 7, 7]
    assert small.output.tolist() == [5, 7, 8, 6]
    assert small.block_tokens == 4.0
    plain = scaled(chain, max_output=6)
    assert plain.output.tolist() == [5, 6, 6, 6]
    assert plain.prompt.tolist() == chain.prompt.tolist()


def test_scaling_by_sixteen_divides_long_prompts_and_their_blocks(rng):
    whole = trace(np.arange(3.0), np.array([1600, 16, 3]), np.array([160, 160, 2]),
                  blocks=[[0, 1, 2, 3], [4], [5]], block_tokens=512)  # fmt: skip
    small = scaled(whole, divide=16)
    assert small.prompt.tolist() == [100, 8, 3]
    assert small.output.tolist() == [10, 10, 2]
    assert small.block_tokens == 32
    assert [len(small.blocks_of(i)) for i in range(3)] == [4, 1, 1]


def test_another_rate_keeps_burstiness(rng):
    whole = synthetic(2000, 3.0, rng, cv=3.0)
    fast = at_rate(whole, 30.0)
    assert fast.rate == pytest.approx(30.0)
    assert cv(fast.arrival) == pytest.approx(cv(whole.arrival))


def test_arrival_streams_have_their_rate_and_variation(rng):
    assert cv(poisson(20_000, 5.0, rng)) == pytest.approx(1.0, abs=0.05)
    at = gamma_arrivals(40_000, 5.0, 2.0, rng)
    assert cv(at) == pytest.approx(2.0, rel=0.06)
    assert len(at) / at[-1] == pytest.approx(5.0, rel=0.06)


@pytest.mark.parametrize(("family", "shape"), [("Gamma", 0.3), ("Weibull", 0.5), ("Gamma", 2.0)])
def test_windows_of_a_renewal_stream_expect_their_rate(family, shape, rng):
    """Short windows too: the stream is stationary from its first second."""
    count = [len(renewal_window(family, shape, 0.5, 10.0, rng)) for _ in range(4000)]
    error = np.std(count) / np.sqrt(len(count))
    assert abs(np.mean(count) - 5.0) < 4 * error


def test_a_shape_moves_arrivals_to_its_peak(rng):
    flat = synthetic(20_000, 10.0, rng, cv=1.0)
    day = shaped(flat, diurnal(depth=0.8))
    share = np.histogram(day.arrival, bins=4, range=(day.arrival[0], day.arrival[-1]))[0]
    assert share[1] > 3 * share[0]
    assert day.rate == pytest.approx(flat.rate)
    ramp = shaped(flat, drift(0.5, 1.5))
    half = (ramp.arrival < ramp.arrival[0] + ramp.duration / 2).mean()
    assert half == pytest.approx(0.375, abs=0.02)  # mean of 0.5 + u over u in [0, 0.5]
    spike = shaped(flat, burst(0.5, 0.1, 4.0))
    middle = np.abs((spike.arrival - spike.arrival[0]) / spike.duration - 0.5) < 0.05
    assert middle.mean() == pytest.approx(0.4 / 1.3, abs=0.02)


def test_lengths_drift_from_one_source_to_another(rng):
    short = synthetic(4000, 10.0, rng, prompt_median=50, prompt_sigma=0.2)
    long = synthetic(500, 10.0, rng, prompt_median=5000, prompt_sigma=0.2)
    mix = drifting(short, long, rng)
    tenth = len(mix) // 10
    assert (mix.prompt[:tenth] > 1000).mean() < 0.12
    assert (mix.prompt[-tenth:] > 1000).mean() > 0.88


def test_classes_and_tenants_follow_their_shares_by_session(chain, rng):
    many = synthetic(20_000, 10.0, rng)
    mixed = with_classes(many, {"interactive": 1, "relaxed": 3}, rng)
    assert mixed.classes == ("interactive", "relaxed")
    assert (mixed.class_id == 0).mean() == pytest.approx(0.25, abs=0.02)
    held = with_tenants(chain, {"a": 1, "b": 1}, rng)
    assert held.tenant_id[0] == held.tenant_id[3]


def test_the_same_seed_gives_the_same_trace():
    a, b = (synthetic(100, 2.0, np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(a.arrival, b.arrival)
    c = resampled(a, a.arrival, np.random.default_rng(1))
    assert set(c.prompt.tolist()) <= set(a.prompt.tolist())


def test_sessions_are_drawn_whole_and_start_at_the_rate(chain, rng):
    many = sessions_at(chain, 2000, 5.0, rng)
    assert len(many) == 2000
    assert many.roots.sum() == 1000
    assert many.rate == pytest.approx(5.0, rel=0.1)
    after = np.flatnonzero(~many.roots)
    assert (many.session[after] == many.session[many.follows[after]]).all()
    assert sorted(set(many.think[after])) == [1.0, 2.0]
    # a session taken again shares blocks within itself only
    shared = [set(many.blocks_of(i)) & set(many.blocks_of(many.follows[i])) for i in after]
    assert all(shared)
    first = [many.blocks_of(i)[0] for i in np.flatnonzero(many.roots)]
    assert len(set(first)) == 1000
