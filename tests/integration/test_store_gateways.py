"""Gateway processes that share a store: limits hold, a killed one leaves nothing, an outage hurts
nobody below the limit.
"""

import contextlib
import os
import signal
import time
from dataclasses import replace

import msgspec
import pytest

from gateway.store.quota_wire import tenant_keys
from tests.fakes.scripted_gateway import Plan
from tests.fakes.store_fleet import (
    most_at_once,
    most_in_window,
    run_gateways,
    sleep_until,
    worst_token_excess,
)
from tests.fakes.store_server import StoreServer

# Each gateway compiles or loads its kernels first, which takes seconds.
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(280)]

FOUR = [Plan(name=f"g{i}", url=None, clients=16, duration=5.0, cancelled=0.1) for i in range(4)]


@pytest.fixture
def server():
    with StoreServer() as running:
        yield running


def running_and_leases(server, after):
    """Open requests by the tenant's meter, and leases that still run `after` seconds from now."""
    keys = tenant_keys("sluice", "t0")
    with contextlib.closing(server.client()) as client:
        meters = [
            msgspec.msgpack.decode(packed)
            for name, packed in client.hgetall(keys[0]).items()
            if name != b"epoch"
        ]
        held = client.hgetall(keys[1])
        ends = dict(client.zrange(keys[2], 0, -1, withscores=True))
    open_ = [id_ for id_, packed in held.items() if msgspec.msgpack.decode(packed)[0] == 0]
    return max(m[4] for m in meters), [id_ for id_ in open_ if ends[id_] > time.time() + after]


def test_request_limits_hold_over_four_gateways_and_refusals_cost_nothing(server):
    plans = [replace(p, url=server.url, quota={"requests_per_minute": 100.0}) for p in FOUR]
    run = run_gateways(plans)
    admitted = [s.admitted for s in run.admitted]
    assert most_in_window(admitted) <= 100 + len(plans)
    # Far more was refused than admitted, and all the places were still used.
    assert len(run.refused) > 3 * len(admitted)
    assert len(admitted) >= 100
    assert all(s.retry_after is not None and s.retry_after > 0 for s in run.refused)


def test_tokens_stay_within_burst_refill_and_repaid_under_reservation(server):
    quota = {"tokens_per_minute": 60_000.0, "burst_tokens": 5_000.0}
    run = run_gateways([replace(p, url=server.url, quota=quota) for p in FOUR])
    assert worst_token_excess(run, 5_000.0, 1_000.0) <= 0
    used = sum(s.used for s in run.admitted if s.admitted > run.started)
    assert used > 0.8 * (5_000.0 + 1_000.0 * 5.0)


def test_no_replica_gets_more_than_its_slots(server):
    plans = [replace(p, url=server.url, replicas=2, max_seqs=6) for p in FOUR]
    run = run_gateways(plans)
    assert max(most_at_once(run).values()) <= 6
    assert sum(g["counts"]["refused_bookings"] for g in run.gateways) > 0
    assert run.refused == []


def test_a_killed_gateways_requests_are_gone_after_one_lease(server):
    """By kill -9, in the middle of its streams; the others go on."""
    lease = 1.5
    quota = {"concurrency": 500.0, "tokens_per_minute": 6e6}
    plans = [
        replace(p, url=server.url, quota=quota, lease=lease, tpot=0.01, replicas=4)
        for p in FOUR[:3]
    ]
    before = []

    def meanwhile(pids):
        start = time.time()
        sleep_until(start + 2.0)
        os.kill(pids[0], signal.SIGKILL)
        before.append(running_and_leases(server, after=0.0)[0])
        sleep_until(start + 2.0 + lease)

    run = run_gateways(plans, meanwhile)
    assert len(run.gateways) == 2
    assert before[0] > 10
    sleep_until(time.time() + lease)
    assert running_and_leases(server, after=0.0)[1] == []
    assert all(g["left"] == 0 for g in run.gateways)


def test_an_outage_below_the_limit_is_not_felt_and_is_signalled(server):
    """No refusal at 55 % of the token limit, through a kill and an empty restart."""
    quota = {"tokens_per_minute": 60_000.0, "burst_tokens": 4_000.0, "requests_per_minute": 600.0}
    rate = 0.55 * 1000.0 / 124.0 / 4
    plans = [
        replace(p, url=server.url, quota=quota, rate=rate, duration=9.0, cancelled=0.0)
        for p in FOUR
    ]
    times = []

    def meanwhile(_):
        start = time.time()
        sleep_until(start + 3.0)
        server.kill()
        times.append(time.time())
        sleep_until(start + 6.0)
        server.start()
        times.append(time.time())

    run = run_gateways(plans, meanwhile)
    assert run.refused == []
    killed, back = times
    for gateway in run.gateways:
        signals = [(at, away) for at, away in gateway["signals"] if at > killed - 0.1]
        assert [away for _, away in signals] == [True, False]
        assert signals[0][0] - killed < 1.0
        assert -0.1 < signals[1][0] - back < 2.0


def test_an_outage_under_a_flood_overspends_at_most_half(server):
    quota = {"tokens_per_minute": 60_000.0, "burst_tokens": 4_000.0}
    plans = [replace(p, url=server.url, quota=quota, duration=9.0) for p in FOUR]
    times = []

    def meanwhile(_):
        start = time.time()
        sleep_until(start + 3.0)
        server.kill()
        times.append(time.time())
        sleep_until(start + 6.0)
        server.start()
        times.append(time.time())

    run = run_gateways(plans, meanwhile)
    killed, back = times
    away = sum(s.used for s in run.admitted if killed < s.admitted < back)
    under = sum(max(s.used - s.reserved, 0.0) for s in run.admitted)
    assert away <= 1.5 * (4_000.0 + 1_000.0 * (back - killed)) + under
    in_all = sum(s.used for s in run.admitted if s.admitted > run.started)
    assert in_all <= 1.5 * (4_000.0 + 1_000.0 * 9.0) + under
    assert {s.reason for s in run.refused} == {"rate"}
