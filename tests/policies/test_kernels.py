"""The array functions of the core: conservation, history, room, chance and choice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from domain.columns import estimate_columns, fleet_columns, request_columns, route_table, scores
from domain.fleet import FleetSpec, Profile, ReplicaSpec, Variant
from domain.length import BINS, QUANTILE_GRID, LengthDistribution
from policies import kernels
from predictors import roofline
from tests.fakes.states import plain_state, random_state

SUMS = ("running", "context", "backlog_tokens", "kv_used")


def idle(m: int = 2, **profile):
    return fleet_columns(
        [ReplicaSpec(name=f"r{i}", variant="v", profile=Profile(**profile)) for i in range(m)]
    )


def book(fleet, r, slot, *, prompt=100.0, expected=50.0, p=None, now=0.0):
    kernels.book(
        fleet, r, r if p is None else p, slot, prompt, prompt, expected, 0.1, np.inf, np.inf, now
    )


# ---- ledger

moves = st.lists(
    st.tuples(st.sampled_from("bbbfpu"), st.integers(0, 5), st.integers(1, 900)), max_size=80
)


@given(moves)
def test_what_is_booked_comes_back_to_exactly_zero(script):
    """Sums equal the sum over streams after every step, and nothing is left after the last
    unbook.
    """
    fleet = idle(3, max_seqs=8)
    open_, slot, now = {}, 0, 0.0
    for op, who, amount in script:
        now += 0.01
        name = list(open_)[who % len(open_)] if open_ else None
        if op == "b" and fleet.n_streams[who % 3] < fleet.slot.shape[1]:
            slot += 1
            r, p = who % 3, (who + amount) % 3
            open_[slot] = (r, p)
            uncached = float(amount // 2)
            kernels.book(fleet, r, p, slot, float(amount), uncached, 7.0, 0.1, np.inf, np.inf, now)
        elif name is not None:
            r, p = open_[name]
            if op == "f":
                kernels.first_token(fleet, r, p, name, now)
            elif op == "p":
                row = np.array([r]), np.array([name]), np.array([amount])
                kernels.progress_many(fleet, *row, now)
            elif op == "u":
                assert kernels.unbook(fleet, *open_.pop(name), name, now)
                assert not kernels.unbook(fleet, r, p, name, now)
        for r in range(3):
            k = slice(0, fleet.n_streams[r])
            assert fleet.running[r] == fleet.n_streams[r]
            assert fleet.context[r] == (fleet.prompt[r, k] + fleet.tokens[r, k]).sum()
            assert fleet.kv_used[r] == fleet.reserved[r, k].sum()
    for name, (r, p) in open_.items():
        kernels.unbook(fleet, r, p, name, now)
    for column in SUMS:
        assert not getattr(fleet, column).any()
    assert (fleet.slot == kernels.NONE).all()


def test_the_first_token_frees_the_backlog_once():
    """A prompt leaves the backlog of its prefill replica with the first token, however often it is
    told.
    """
    fleet = idle()
    book(fleet, 0, 7, prompt=300.0, p=1)
    assert fleet.backlog_tokens.tolist() == [0.0, 300.0]
    for _ in range(2):
        kernels.first_token(fleet, 0, 1, 7, 1.0)
    assert fleet.backlog_tokens.tolist() == [0.0, 0.0]
    assert fleet.context[0] == 301.0
    assert fleet.first_at[0, 0] == 1.0


def test_progress_skips_the_unknown_the_unstarted_and_what_does_not_rise():
    """Counts are taken only from streams that run, and never backwards."""
    fleet = idle()
    book(fleet, 0, 1)
    book(fleet, 0, 2)
    kernels.first_token(fleet, 0, 0, 1, 0.5)
    slots = np.array([1, 2, 3, 1])
    kernels.progress_many(fleet, np.zeros(4, np.int64), slots, np.array([20, 9, 9, 5]), 1.0)
    assert fleet.tokens[0, :2].tolist() == [20.0, 0.0]


def test_own_counts_of_the_past_are_those_of_that_time():
    """`own_at` looks up the last sample at or before a time; zero before the first."""
    fleet = idle()
    for i in range(10):
        book(fleet, 0, i, now=1.0 + i)
    assert kernels.own_at(fleet, 0, 0.5) == (0.0, 0.0)
    for i in range(10):
        assert kernels.own_at(fleet, 0, 1.5 + i) == (i + 1.0, 100.0 * (i + 1))
    assert kernels.own_at(fleet, 1, 5.0) == (0.0, 0.0)


def test_history_spans_two_seconds_whatever_the_rate():
    """With thousands of changes a second the sample of two seconds ago is still there, to within a
    step.
    """
    fleet = idle(1, max_seqs=4096)
    for i in range(4000):
        book(fleet, 0, i, now=i * 1e-3)
    seen, _ = kernels.own_at(fleet, 0, 4.0 - 1.9)
    assert seen == pytest.approx(2100, abs=1 + 1000 * kernels.HISTORY_STEP)


def test_a_reading_counts_only_what_is_not_our_own():
    """Foreign load is max(0, reading - own at the reading's time); the unknown changes nothing."""
    fleet = idle(1, kv_capacity=1000.0)
    book(fleet, 0, 1, now=1.0)
    book(fleet, 0, 2, now=2.0)
    nan = float("nan")
    kernels.merge_reading(fleet, 0, 1.5, 3.0, nan, 0.5)
    assert fleet.foreign_running[0] == 2.0
    assert fleet.foreign_context[0] == 400.0
    kernels.merge_reading(fleet, 0, 2.5, 1.0, 0.0, nan)
    assert fleet.foreign_running[0] == 0.0
    assert fleet.foreign_context[0] == 400.0


def test_an_old_reading_counts_for_nothing():
    """Past `STALE` seconds only the ledger is left."""
    fleet = idle(2)
    fleet.foreign_running[:] = 5.0
    kernels.age_readings(fleet, np.array([0.0, 9.0]), 10.0)
    assert fleet.age.tolist() == [10.0, 1.0]
    assert fleet.foreign_running.tolist() == [0.0, 5.0]


# ---- room


def room(fleet, *, prompt=100.0, expected=50.0, claims=None, routes=None, tie=5):
    m = len(fleet.usable)
    replicas = tuple(ReplicaSpec(name=f"r{i}", variant="v") for i in range(m))
    spec = FleetSpec(replicas=replicas, variants=(Variant(name="v", model="m"),))
    requests, out = request_columns(1), np.zeros((1, m), np.bool_)
    requests.prompt[:], requests.expected[:], requests.tie[:] = prompt, expected, tie
    some = kernels.room_into(
        requests,
        fleet,
        routes or route_table(spec).routes,
        np.ones((1, m), np.bool_),
        np.full(m, kernels.NONE) if claims is None else np.array(claims),
        np.full(m, -np.inf),
        0.0,
        out,
    )
    assert some == out.any()
    return out[0].tolist()


def test_room_ends_with_sequences_tokens_context_and_use():
    """Every limit of a window closes it alone."""
    assert room(idle()) == [True, True]
    fleet = idle(max_seqs=1)
    book(fleet, 0, 1, prompt=0.0)
    assert room(fleet) == [False, True]
    fleet = idle(kv_capacity=240.0)
    book(fleet, 0, 1, prompt=50.0, expected=50.0)
    kernels.first_token(fleet, 0, 0, 1, 0.0)
    assert room(fleet) == [False, True]
    assert room(fleet, expected=40.0) == [True, True]
    assert room(idle(max_context=100)) == [False, False]
    fleet = idle()
    fleet.usable[0] = False
    assert room(fleet) == [False, True]


def test_a_long_prompt_enters_only_an_empty_backlog():
    """The backlog bound holds in seconds; beyond it a prompt may enter when nothing waits."""
    fleet = idle(per_token=1e-4)
    fleet.window[:] = 0.05
    assert room(fleet, prompt=5000.0) == [True, True]
    book(fleet, 0, 1, prompt=400.0)
    assert room(fleet, prompt=100.0) == [True, True]
    assert room(fleet, prompt=101.0) == [False, True]


def test_a_request_too_large_for_the_cache_enters_an_idle_replica():
    """It could never run otherwise."""
    fleet = idle(kv_capacity=120.0)
    assert room(fleet) == [True, True]
    book(fleet, 0, 1, prompt=1.0, expected=1.0)
    assert room(fleet) == [False, True]


def test_a_claimed_window_is_open_to_its_claimant_alone():
    """The oldest request past its patience closes a window for others."""
    assert room(idle(), claims=[77, kernels.NONE]) == [False, True]
    assert room(idle(), claims=[5, kernels.NONE], tie=5) == [True, True]


@given(st.integers(0, 10_000), st.floats(1.0, 4000.0))
def test_a_closed_fleet_has_no_room_for_anybody(seed, prompt):
    """`any_open` never says no where `room_into` says yes: skipping a release loses nothing."""
    state = random_state(seed, n=4, m=4)
    rng = np.random.default_rng(seed)
    fleet = state.fleet
    fleet.window[:] = rng.uniform(0.0, 0.2, 4)
    fleet.max_seqs[:] = rng.integers(1, 6, 4)
    fleet.kv_capacity[:] = rng.uniform(100.0, 6000.0, 4)
    fleet.usable[:] = rng.random(4) < 0.7
    state.requests.prompt[:] = np.maximum(np.ceil(prompt * rng.uniform(1.0, 2.0, 4)), 1.0)
    least = float(state.requests.prompt.min())
    measured = np.full(4, -np.inf)
    some = kernels.room_into(
        state.requests,
        fleet,
        state.routes,
        np.ones_like(state.mask),
        np.full(4, kernels.NONE),
        measured,
        state.now,
        np.zeros_like(state.mask),
    )
    windows = kernels.view(kernels.Windows, fleet)
    assert kernels.any_open(windows, measured, least, state.now) or not some


# ---- length


@given(
    st.lists(st.floats(0.0, 1.0), min_size=BINS, max_size=BINS),
    st.floats(1.0, 200_000.0),
)
def test_length_numbers_are_those_of_the_distribution(hazard, cap):
    """Mean, median, P90 and quantiles under a cap equal `LengthDistribution`'s."""
    length = LengthDistribution.from_hazard(np.array(hazard))
    out = np.zeros(len(QUANTILE_GRID))
    mean, median, p90 = kernels.length_into(length.survival, cap, out)
    assert out == pytest.approx(np.minimum(length.quantiles(QUANTILE_GRID), cap), abs=1e-6)
    assert median == pytest.approx(min(length.quantile(0.5), cap), abs=1e-6)
    assert p90 == pytest.approx(min(length.quantile(0.9), cap), abs=1e-6)
    assert mean <= min(length.mean, cap) + 1e-6
    uncapped, _, _ = kernels.length_into(length.survival, np.inf, out)
    assert uncapped == pytest.approx(length.mean, rel=1e-9)


def test_the_mean_under_a_cap_is_the_integral_of_survival():
    """E[min(L, cap)] by brute force."""
    length = LengthDistribution.lognormal(120.0, 0.8)
    mean, _, _ = kernels.length_into(length.survival, 200.0, np.zeros(len(QUANTILE_GRID)))
    grid = np.linspace(0.0, 200.0, 4001)
    brute = np.trapezoid([length.survives(x) for x in grid], grid)
    assert mean == pytest.approx(brute, rel=1e-4)


# ---- chance and choice


def test_uniforms_are_uniform_and_a_pure_function():
    """Mean, spread and lag-one correlation of 20,000 draws; the same arguments give the same."""
    draws = np.array([kernels.uniform(3, i, 0) for i in range(20_000)])
    assert ((draws >= 0) & (draws < 1)).all()
    assert abs(draws.mean() - 0.5) < 0.01
    assert abs(draws.std() - 12**-0.5) < 0.01
    assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.03
    assert kernels.uniform(3, 17, 0) == draws[17]
    assert kernels.uniform(4, 17, 0) != draws[17]
    out = np.zeros((2, 3))
    kernels.draw_into(3, 17, out)
    assert len(set(out.ravel())) == 6


def test_ties_go_by_hash_so_that_two_gateways_do_not_herd():
    """Among equal scores every route is taken about equally often, and always the same by one
    request.
    """
    even, every = np.zeros(4), np.ones(4, np.bool_)
    taken = [kernels.best_route(even, every, tie) for tie in range(2000)]
    assert kernels.best_route(even, every, 7) == taken[7]
    assert np.bincount(taken, minlength=4) == pytest.approx([500] * 4, rel=0.15)


def test_a_choice_needs_room_and_a_finite_score():
    """No room or -inf everywhere is no choice."""
    some = np.array([1.0, 3.0, 2.0])
    assert kernels.best_route(some, np.array([True, False, True]), 1) == 2
    assert kernels.best_route(some, np.zeros(3, np.bool_), 1) == kernels.NONE
    assert kernels.best_route(np.full(3, -np.inf), np.ones(3, np.bool_), 1) == kernels.NONE


def test_rank_scorers_keep_the_order_and_value_scorers_compare_requests():
    """First fit takes the first request that fits, best pair the best pair, the earlier one on
    ties.
    """
    table = np.array([[-np.inf, -np.inf], [1.0, 2.0], [5.0, 0.0], [5.0, 0.0]])
    every, tie = np.ones((4, 2), np.bool_), np.arange(4)
    assert kernels.first_fit(table, every, tie) == (1, 1)
    assert kernels.best_pair(table, every, tie) == (2, 0)
    assert kernels.first_fit(table[:1], every[:1], tie) == (kernels.NONE, kernels.NONE)
    assert kernels.best_pair(table[:1], every[:1], tie) == (kernels.NONE, kernels.NONE)


@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from([0.0, 0.5, 0.51, 0.9])), min_size=1, max_size=6
    ),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.1, 1.0]),
)
def test_propensities_are_exact_and_sum_to_one(routes, greedy, epsilon):
    """The logged propensity is the share of coins that choose the route; over routes they sum to
    1.
    """
    room, p_slo = (np.array(column) for column in zip(*routes, strict=True))
    greedy %= len(routes)
    if not room[greedy]:
        room[greedy] = True
    share, logged = np.zeros(len(routes)), {}
    picks = (np.arange(60) + 0.5) / 60  # divisible by every count of up to six routes
    for coin, weight in ((0.0, epsilon), (0.999999, 1.0 - epsilon)):
        if weight == 0.0:
            continue
        for pick in picks:
            c, propensity = kernels.explored(room, p_slo, greedy, epsilon, 0.02, coin, pick)
            assert room[c]
            share[c] += weight / len(picks)
            assert logged.setdefault(c, propensity) == propensity
    assert sum(logged.values()) == pytest.approx(1.0)
    for c, propensity in logged.items():
        assert share[c] == pytest.approx(propensity)
        assert c == greedy or p_slo[c] >= p_slo[room].max() - 0.02


@given(st.integers(0, 10_000), st.integers(1, 8))
def test_leading_lists_the_chosen_and_then_the_best(seed, most):
    """The log's candidates: chosen first, then by score, with what each promised."""
    state = random_state(seed, n=2, m=7, masked=0.8)
    rng = np.random.default_rng(seed)
    if not state.mask[1].any():
        state.mask[1, 0] = True
    out = scores(2, 7)
    out.route[1] = np.where(state.mask[1], rng.integers(0, 4, 7), -np.inf)
    chosen = int(rng.choice(np.flatnonzero(state.mask[1])))
    table = np.zeros((most, 6))
    count = kernels.leading(out.route, state.mask, state.estimates, 1, chosen, table)
    others = sorted(
        (c for c in np.flatnonzero(state.mask[1]) if c != chosen), key=lambda c: -out.route[1, c]
    )
    wanted = [chosen, *others][:most]
    assert table[:count, 0].astype(int).tolist() == wanted
    for row, c in zip(table[:count], wanted, strict=True):
        e = state.estimates
        promised = (
            e.p_slo[1, c],
            np.median(e.ttft[1, c]),
            np.median(e.tpot[1, c]),
            e.quality[1, c],
        )
        assert row[1:].tolist() == [out.route[1, c], *promised]


# ---- time


def test_step_time_is_one_formula_in_both_packages():
    """Policies and predictors may not import each other; their step times must agree."""
    state = random_state(3)
    rng = np.random.default_rng(0)
    for _ in range(50):
        r, *load = int(rng.integers(0, 5)), *rng.uniform(0, 3000, 4)
        ours = kernels.step_time(state.fleet, r, *load)
        assert ours == roofline.step_time(state.fleet, r, *load)


def test_the_fastest_is_what_an_idle_replica_would_give():
    """Least TTFT and TPOT over the allowed routes equal the roofline's on an idle fleet."""
    state = plain_state(3, prompt=1500.0, expected=80.0)
    state.fleet.per_token[:] = 1e-4, 2e-4, 3e-4
    state.fleet.weights[:] = 0.03, 0.01, 0.02
    state.fleet.experts[:] = 0.0, 0.02, 0.04
    state.fleet.expert_tokens[:] = 1.0, 5.0, 40.0
    speeds = kernels.view(kernels.Speeds, state.fleet)
    decode, prefill = state.routes.decode, state.routes.prefill

    def fastest(*allowed):
        return kernels.fastest(speeds, decode, prefill, np.array(allowed), 1500.0, 80.0)

    for r in range(3):
        ttft, tpot = fastest(*(c == r for c in range(3)))
        assert ttft == pytest.approx(roofline.prefill_time(state.fleet, r, 1500.0, 0.0), rel=0.02)
        step = roofline.step_time(state.fleet, r, 1.0, 1540.0, 0.0, 0.0)
        assert tpot == pytest.approx(step, rel=1e-9)
    alone = [fastest(*(c == r for c in range(3))) for r in range(3)]
    assert fastest(True, True, True) == (min(a[0] for a in alone), min(a[1] for a in alone))
    assert fastest(False, False, False) == (np.inf, np.inf)


def test_best_chance_looks_at_room_only():
    """A closed route's chance does not count."""
    p_slo = estimate_columns(1, 3).p_slo[0]
    p_slo[:] = 0.2, 0.9, 0.4
    assert kernels.best_chance(np.array([True, False, True]), p_slo) == 0.4
    assert kernels.best_chance(np.zeros(3, np.bool_), p_slo) == 0.0
