"""The local share of a quota: its sum over gateways, its floor, and what it starts from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domain.request import Quota, Tenant
from gateway.store.quota_wire import Paths
from gateway.store.share import Traffic, alone, part
from policies.bucket import RequestWindow


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40))
def test_the_parts_add_up_to_at_most_one_and_a_half(weights):
    """The overspend of a rate is at most 50 %, and nobody gets less than 1/N."""
    total = sum(weights) or 1.0
    parts = [part(len(weights), weight / total) for weight in weights]
    assert sum(parts) <= 1.5 + 1e-9
    assert min(parts) >= 1.0 / len(weights) - 1e-12


@given(st.integers(1, 10), st.floats(0.0, 1.0))
def test_below_sixty_per_cent_the_part_carries_the_traffic(gateways, share):
    assert part(gateways, share) >= 0.6 * share - 1e-12


def test_a_share_follows_the_last_minute():
    traffic = Traffic()
    assert traffic.share() == 0.0
    total = 0.0
    for second in range(60):
        total += 400.0
        traffic.note(100.0, total, float(second))
    assert traffic.share() == pytest.approx(0.25, abs=0.02)
    for second in range(60, 130):
        total += 200.0
        traffic.note(200.0, total, float(second))
    assert traffic.share() == pytest.approx(1.0, abs=0.02)


def test_a_store_that_came_back_empty_starts_the_share_anew():
    traffic = Traffic()
    for second in range(30):
        traffic.note(100.0, 1000.0 * second + 1000.0, float(second))
    traffic.note(100.0, 100.0, 31.0)
    assert traffic.share() == 1.0


def test_an_account_alone_holds_its_part_of_what_is_left():
    tenant = Tenant(
        name="t",
        quota=Quota(
            tokens_per_minute=600.0,
            burst_tokens=1000.0,
            requests_per_minute=8.0,
            concurrency=3,
            daily_tokens=5000.0,
        ),
    )
    paths = Paths("s", tenant)
    path = paths.path(None, "m")
    path.seen[0].level, path.seen[0].used, path.seen[0].at = 300.0, 4000.0, 0.0
    window = RequestWindow(8.0, 0.0)
    for _ in range(3):
        assert window.holds(5.0)
        window.take()
    account = alone(tenant, 0.5, paths.all_seen, {"tenant": window}, 10.0, 0.0)
    meter = account.meter("tenant")
    assert meter.bucket is not None
    assert (meter.bucket.rate, meter.bucket.burst) == (5.0, 500.0)
    assert meter.bucket.level == pytest.approx(200.0)  # half of 300 + 10 s x 10/s
    assert meter.concurrency == 2
    assert meter.daily is not None
    assert meter.daily.limit == pytest.approx(500.0)
    asked = {"key": None, "model": "m", "prompt": 1.0, "tokens": 1.0, "now": 10.0}
    assert account.admit(**asked).ok  # the fourth of 8 x 0.5 requests in this minute
    assert not account.admit(**asked).ok
    assert window.total == 3
