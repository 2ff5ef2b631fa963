"""What a learned policy sees: bounded, without identities, and right where it can be reckoned."""

import numpy as np
import pytest

from domain.columns import (
    Routes,
    estimate_columns,
    fleet_columns,
    request_columns,
)
from domain.fleet import Profile, ReplicaSpec
from policies import encoding, kernels
from policies.encoding import REQUEST_FEATURES, ROUTE_FEATURES, SCHEMA, C, R

PLAIN = Profile(overhead=0.0, weights=0.01, per_sequence=0.001, per_context=0.0, per_attention=0.0)


def of(row, name):
    names = REQUEST_FEATURES if len(row) == R else ROUTE_FEATURES
    return float(row[names.index(name)])


def setting(m=3, **limits):
    """One request, m idle replicas that do both phases."""
    specs = [ReplicaSpec(name=str(k), variant="v", profile=PLAIN) for k in range(m)]
    fleet, requests = fleet_columns(specs, 8), request_columns(1)
    requests.prompt[0], requests.expected[0] = 500.0, 100.0
    requests.length_q[0] = np.arange(1, 9) * 20.0
    for name, value in limits.items():
        getattr(requests, name)[0] = value
    plain = np.arange(m)
    routes = Routes(decode=plain, prefill=plain, variant=np.zeros(m, np.int64), price=np.ones(m))
    return requests, fleet, routes, estimate_columns(1, m)


def row_of(setting, c=0, *, room=True, now=0.0):
    out = np.full(C, np.nan, np.float32)
    encoding.encode_route(*setting, 0, c, True, room, now, out)
    return out


def test_an_absent_limit_is_one_and_a_used_up_one_is_nothing_left():
    requests, *_ = setting(ttft=0.5)
    out = np.full(R, np.nan, np.float32)
    encoding.encode_request(requests, 0, np.array([True, False]), 8.0, 0.5, out)
    assert of(out, "ttft") == pytest.approx(0.5)
    assert of(out, "ttft_left") == 0.0
    assert of(out, "tpot") == of(out, "e2e") == of(out, "e2e_left") == 1.0
    assert (of(out, "waiting"), of(out, "open")) == (0.5, 0.5)
    assert np.all(np.diff(out[-8:]) > 0)


def test_streams_that_would_miss_their_pace_are_counted():
    """Two of four limited streams miss 12.5 ms a token if a fifth joins; one of them does now."""
    some = setting()
    fleet = some[1]
    for slot in range(5):
        limit = (0.0125, 0.5, 0.0155, 0.02, np.inf)[slot]
        kernels.book(fleet, 0, 0, slot, 100.0, 100.0, 50.0, limit, np.inf, np.inf, 0.0)
        kernels.first_token(fleet, 0, 0, slot, 0.0)
    row = row_of(some)
    assert of(row, "decoding") == 1.0
    assert of(row, "late_alone") == pytest.approx(1 / 4)  # 15 ms a step beside 12.5
    assert of(row, "late_joined") == pytest.approx(2 / 4)  # 16 ms, and the joiner's prefill
    assert 0.5 < of(row, "tightest") <= 1.0
    assert of(row_of(some, 1), "own_running") == 0.0


def test_predictions_stand_only_where_there_is_room():
    some = setting(ttft=0.4, tpot=0.05)
    estimates = some[3]
    estimates.ttft[0, :, :], estimates.tpot[0, :, :] = 0.2, 0.05
    estimates.p_slo[0] = 0.75
    assert of(row_of(some), "p_slo") == 0.75
    assert of(row_of(some), "ttft") == pytest.approx(1 / 3)
    assert of(row_of(some), "tpot") == pytest.approx(0.5)
    assert of(row_of(some), "e2e") == 0.0
    assert of(row_of(some, now=0.4), "ttft") == 1.0
    closed = row_of(some, room=False)
    assert not closed[ROUTE_FEATURES.index("quality") :].any()
    assert of(closed, "allowed") == 1.0


def test_everything_is_bounded_and_permuting_replicas_permutes_rows():
    rng = np.random.default_rng(1)
    some = setting(6, ttft=0.3, e2e=4.0)
    requests, fleet, routes, estimates = some
    for slot in range(20):
        r = int(rng.integers(0, 6))
        limit = rng.choice([0.005, 0.03, np.inf])
        if fleet.n_streams[r] < 8:
            kernels.book(fleet, r, r, slot, 300.0, 300.0, 80.0, limit, 1.0, np.inf, 0.1)
    fleet.foreign_running[:] = rng.integers(0, 50, 6)
    fleet.age[:3] = 0.2
    estimates.ttft[:] = rng.exponential(1.0, estimates.ttft.shape)
    estimates.tpot[:] = rng.exponential(0.1, estimates.tpot.shape)
    rows = [row_of(some, c, now=5.0) for c in range(6)]
    assert all(np.all((row >= 0.0) & (row <= 1.0)) for row in rows)
    order = rng.permutation(6)
    moved = {k: np.ascontiguousarray(v[:, order]) for k, v in estimates._asdict().items()}
    turned = requests, fleet, routes._replace(decode=order, prefill=order), type(estimates)(**moved)
    for c in range(6):
        np.testing.assert_array_equal(row_of(turned, c, now=5.0), rows[order[c]])


def test_the_schema_tells_one_order_of_features_from_another():
    assert len(SCHEMA) == 8
    assert (len(set(REQUEST_FEATURES)), len(set(ROUTE_FEATURES))) == (R, C)
