"""Rate headers in the forms that SDK users parse."""

import pytest

from domain.request import Quota, Tenant
from gateway.limit_headers import duration, limit_headers
from policies.bucket import Account, Standing


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0201, "21ms"),
        (0.9995, "1000ms"),
        (1.0, "1s"),
        (59.1, "1m0s"),
        (360.0, "6m0s"),
        (3725.0, "1h2m5s"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_no_limits_no_headers():
    assert limit_headers(Standing()) == b""


def test_headers_follow_the_account_and_looking_changes_nothing():
    tenant = Tenant(
        name="t", quota=Quota(requests_per_minute=10, tokens_per_minute=600, burst_tokens=100)
    )
    account = Account(tenant, now=0.0)
    account.admit(key=None, model="m", prompt=40.0, tokens=40.0, now=0.0)
    before = account.usage(0.0)
    lines = limit_headers(account.standing(key=None, model="m", now=1.0)).decode().splitlines()
    assert lines == [
        "x-ratelimit-limit-requests: 10",
        "x-ratelimit-remaining-requests: 9",
        "x-ratelimit-reset-requests: 1m1s",
        "x-ratelimit-limit-tokens: 100",
        "x-ratelimit-remaining-tokens: 70",
        "x-ratelimit-reset-tokens: 3s",
    ]
    assert account.meter("tenant").bucket.level == before["tenant"].level
