"""Fleet-level decisions: monotone, optimal where that can be tried, and right in clear cases."""

from dataclasses import replace
from itertools import combinations
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.fleet import Profile
from policies import elastic
from policies.elastic import Band, Layout, Sample

PROFILE = Profile(
    overhead=0.002, weights=0.011, per_sequence=4e-5, per_context=7.8e-8, per_token=6e-5,
    per_attention=0.0, chunk=1024, max_seqs=256, kv_capacity=214e3,
)  # fmt: skip


def asked(n=400, prompt=800.0, output=150.0, ttft=1.0, tpot=0.03, seed=0) -> Sample:
    """Log-normal lengths under one promise."""
    rng = np.random.default_rng(seed)
    return Sample(
        prompt=np.maximum(prompt * rng.lognormal(0.0, 0.6, n), 1.0).round(),
        output=np.maximum(output * rng.lognormal(0.0, 0.6, n), 1.0).round(),
        ttft=np.full(n, ttft),
        tpot=np.full(n, tpot),
    )


def joined(*parts: Sample) -> Sample:
    return Sample(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


requests = st.builds(
    asked,
    n=st.integers(1, 60),
    prompt=st.floats(10, 8000),
    output=st.floats(1, 1500),
    ttft=st.floats(0.1, 10),
    tpot=st.floats(0.01, 0.2),
    seed=st.integers(0, 5),
)
phases = st.sampled_from(("both", "prefill", "decode"))


# ---- pressure


@given(requests, phases, st.floats(0.2, 60.0))
@settings(deadline=None)
def test_more_replicas_and_less_demand_never_press_more(rows, phase, seconds):
    came = elastic.demand(rows, seconds)
    by_size = elastic.pressure(came, PROFILE, np.arange(1.0, 17.0), phase)
    by_rate = elastic.pressure(came.times(np.geomspace(0.01, 10, 30)), PROFILE, 4.0, phase)
    for found, sign in ((by_size, -1), (by_rate, 1)):
        for side in (found.ttft, found.tpot):
            assert np.isfinite(side).all()
            assert (side >= 0).all()
            assert (sign * np.diff(side) >= -1e-9 * side[:-1]).all()


@given(requests, requests, st.floats(0.5, 60.0))
@settings(deadline=None)
def test_demands_of_groups_add_up_to_that_of_all(one, other, seconds):
    both = joined(one, other)
    group = np.repeat([0, 1], [len(one.prompt), len(other.prompt)])
    parts = elastic.demand(both, seconds, group, 2)
    whole = elastic.demand(both, seconds)
    for name, part, total in zip(whole._fields, parts, whole, strict=True):
        want = part.max() if name == "longest" else part.sum()
        assert want == pytest.approx(total[0])


def test_an_idle_group_takes_what_the_profile_says():
    rows = Sample(*(np.array([x]) for x in (1024.0, 100.0, 1.0, 0.1)))
    found = elastic.pressure(elastic.demand(rows, 1e6), PROFILE, 1.0)
    step = PROFILE.overhead + PROFILE.weights
    assert found.tpot[0] == pytest.approx(step / 0.1, rel=0.01)
    assert found.ttft[0] == pytest.approx(PROFILE.overhead + 1024 * PROFILE.per_token, rel=0.01)


def test_no_demand_and_no_limit_press_nothing():
    none = elastic.demand(asked(5), 1.0, np.zeros(5, np.int64), 2).at(slice(1, 2))
    free = elastic.demand(asked(5, ttft=inf, tpot=inf), 1.0)
    for came in (none, free):
        assert elastic.pressure(came, PROFILE, 1.0).worst[0] == 0.0


def test_an_unknown_output_counts_as_the_mean_of_the_known():
    rows = elastic.sample([[10, 100, 1, 1], [10, float("nan"), 1, 1], [10, 300, 1, 1]])
    assert rows.output[1] == 200


# ---- pools


def every_partition(cost, most):
    """Sums of all cuts into at most `most` runs, by trying them."""
    size, replicas = cost.shape[0] - 1, cost.shape[2] - 1
    found = {}
    for n in range(1, min(most, size, replicas) + 1):
        for bounds in combinations(range(1, size), n - 1):
            edges = (0, *bounds, size)
            for sizes in combinations(range(1, replicas), n - 1):
                parts = np.diff((0, *sizes, replicas))
                total = sum(cost[i, j, k] for i, j, k in zip(edges, edges[1:], parts, strict=False))
                found[n] = min(found.get(n, inf), total)
    return found


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(0, 10_000))
@settings(deadline=None, max_examples=60)
def test_the_partition_is_the_best_of_all(size, replicas, most, seed):
    cost = np.random.default_rng(seed).random((size + 1, size + 1, replicas + 1))
    parts, total = elastic.best_partition(cost, min(most, size, replicas))
    assert [i for i, _, _ in parts] == [0, *(j for _, j, _ in parts[:-1])]
    assert parts[-1][1] == size
    assert sum(k for _, _, k in parts) == replicas
    assert total == pytest.approx(sum(cost[part] for part in parts))
    everything = every_partition(cost, most)
    assert total == pytest.approx(everything[len(parts)])
    assert total <= min(everything.values()) / (1 - elastic.ONE_POOL_TAX) ** 3 + 1e-12


@given(requests, st.floats(1.0, 60.0), st.integers(1, 8))
@settings(deadline=None, max_examples=30)
def test_pools_cover_all_lengths_and_use_every_replica(rows, seconds, replicas):
    found = elastic.best_pools(rows, seconds, PROFILE, replicas)
    assert found.bands[0].low == 0.0
    assert found.bands[-1].high == inf
    assert all(a.high == b.low for a, b in zip(found.bands, found.bands[1:], strict=False))
    assert sum(b.replicas for b in found.bands) == replicas
    misses, _ = elastic.pool_misses(found.bands, rows, seconds, PROFILE)
    assert misses == pytest.approx(found.misses, rel=1e-6, abs=1e-9)


def test_long_documents_get_a_pool_of_their_own_where_steps_wait_for_the_longest():
    uneven = replace(PROFILE, per_uneven=1.5e-8)
    rows = joined(asked(1800, 400, 150, 0.6), asked(300, 9000, 150, 3.2, seed=1))
    found = elastic.best_pools(rows, 70.0, uneven, 8)
    one, _ = elastic.pool_misses([Band(low=0, high=inf, replicas=8)], rows, 70.0, uneven)
    assert len(found.bands) > 1
    assert found.misses < 0.5 * one


def test_equal_lengths_make_one_pool():
    rows = Sample(*(np.full(200, x) for x in (400.0, 100.0, 1.0, 0.05)))
    assert len(elastic.best_pools(rows, 20.0, PROFILE, 8).bands) == 1


@given(requests, requests, st.floats(1.0, 30.0))
@settings(deadline=None, max_examples=30)
def test_what_comes_next_is_never_expected_to_miss_more(before, now, seconds):
    bands = elastic.best_pools(before, seconds, PROFILE, 6).bands
    misses, _ = elastic.pool_misses(bands, now, seconds, PROFILE)
    found = elastic.pools(bands, now, seconds, PROFILE)
    assert found.misses <= misses + 1e-9
    assert elastic.pool_misses(found.bands, now, seconds, PROFILE)[0] == pytest.approx(
        found.misses, abs=1e-9
    )


def test_a_bound_moves_towards_the_pool_that_is_pressed_less():
    rows = asked(3000, 400, 150)
    low, high = (
        elastic.shifted(
            [Band(low=0, high=bound, replicas=4), Band(low=bound, high=inf, replicas=4)],
            rows,
            30.0,
            PROFILE,
        ).bands[0].high
        for bound in (150.0, 3000.0)
    )  # fmt: skip
    assert low > 150.0
    assert high < 3000.0


# ---- prefill or decode


def test_the_split_follows_the_work():
    """Long prompts want prefill, long answers decode; step by step, and then it stays."""
    for rows, seconds, more in (
        (asked(400, 1700, 25), 12.0, True),
        (asked(400, 200, 400, tpot=0.03), 7.0, False),
    ):
        came, at = elastic.demand(rows, seconds), 4
        for _ in range(8):
            found = elastic.split(came, PROFILE, 8, at, calm=0.0)
            assert abs(found.prefill - at) <= 1
            at = found.prefill
        assert 1 <= at <= 7
        assert (at > 4) == more
        assert elastic.split(came, PROFILE, 8, at, calm=0.0).prefill == at


def test_a_split_that_is_not_pressed_stays():
    came = elastic.demand(asked(10, 1700, 25), 60.0)
    assert elastic.split(came, PROFILE, 8, 2).prefill == 2


def test_a_queue_calls_for_prefill():
    came = elastic.demand(asked(400, 300, 100), 20.0)
    assert elastic.split(came, PROFILE, 8, 2, calm=0.9).prefill == 2
    assert elastic.split(came, PROFILE, 8, 2, calm=0.9, queued=200_000.0).prefill == 3


# ---- layouts

ALONE = Layout(name="one", gpus=1, profile=PROFILE)
PAIR = Layout(name="two", gpus=2, profile=replace(PROFILE, weights=0.006, per_token=5e-5))
"""Reads little faster, decodes twice as fast."""
READING = asked(300, 3000, 30, ttft=3.0, tpot=0.2)
CHAT = asked(300, 200, 200, ttft=1.0, tpot=0.012, seed=1)
"""At a pace that one GPU cannot keep."""


def tiers(reading: float, chat: float) -> elastic.Demand:
    rows = joined(READING, CHAT)
    group = np.repeat([0, 1], [300, 300])
    came = elastic.demand(rows, 1.0, group, 2)
    return came.times(np.array([reading, chat]) / 300.0)


def test_gpus_go_to_the_layout_that_serves_the_tier():
    assert elastic.layouts(tiers(20.0, 0.0), [ALONE, PAIR], 8).counts == {"one": 8, "two": 0}
    assert elastic.layouts(tiers(0.0, 20.0), [ALONE, PAIR], 8).counts == {"one": 0, "two": 4}
    mixed = elastic.layouts(tiers(8.0, 8.0), [ALONE, PAIR], 8)
    assert mixed.counts["one"] > 0
    assert mixed.counts["two"] > 0


@given(st.floats(0.0, 50.0), st.floats(0.0, 50.0), st.integers(0, 4))
@settings(deadline=None, max_examples=40)
def test_every_gpu_is_used_and_engines_stand_side_by_side(reading, chat, pairs):
    found = elastic.layouts(tiers(reading, chat), [ALONE, PAIR], 8)
    assert found.counts["one"] + 2 * found.counts["two"] == 8
    present = [1, -1] * pairs + [0] * (8 - 2 * pairs)
    placed = elastic.arranged(present, found.counts, [ALONE, PAIR], 8)
    used = [gpu for s, o in enumerate(placed) if o >= 0 for gpu in range(s, s + (1, 2)[o])]
    assert used == list(range(8))
    stay = sum(a == b == 1 for a, b in zip(placed, present, strict=True))
    assert stay == min(pairs, found.counts["two"])


# ---- scale


def test_a_trend_is_followed_and_a_level_kept():
    assert elastic.forecast([10.0] * 20, 12) == pytest.approx(10.0)
    assert elastic.forecast([10.0 + k for k in range(20)], 3) > 30.0
    assert elastic.forecast([20.0 - k for k in range(20)], 50) >= 0.0
    assert elastic.forecast([], 5) == 0.0


@given(requests, st.floats(0.5, 60.0))
@settings(deadline=None)
def test_the_wanted_number_is_the_fewest_that_does(rows, seconds):
    came = elastic.demand(rows, seconds)
    n = elastic.wanted(came, PROFILE, 12)
    worst = elastic.pressure(came, PROFILE, np.arange(1.0, 13.0)).worst
    assert 1 <= n <= 12
    assert n == 12 or worst[n - 1] <= 0.8
    assert n == 1 or worst[n - 2] > 0.8
