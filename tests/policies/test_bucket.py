"""Quota arithmetic: promises of `policies.bucket`, checked over random histories."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domain.events import Reason
from domain.request import Quota, Tenant
from policies.bucket import MINUTE, SLACK, SLOTS, STEP, Account, Bucket, RequestWindow

amounts = st.floats(0.0, 2000.0)
gaps = st.floats(0.0, 90.0)
steps_back = st.sampled_from([0.0, 0.0, 0.0, 0.3, STEP, 5.0, 3600.0])


def account(now=0.0, keys=None, models=None, **quota):
    tenant = Tenant(
        name="t", quota=Quota(**quota), key_quotas=keys or {}, model_quotas=models or {}
    )
    return Account(tenant, now)


def admit(target, now, tokens=10.0, prompt=5.0, key=None, model="m", cost=0.0):
    return target.admit(key=key, model=model, prompt=prompt, tokens=tokens, now=now, cost=cost)


@given(st.lists(st.tuples(gaps, steps_back, amounts), max_size=60))
def test_reserved_tokens_never_exceed_burst_plus_refill(history):
    """Sum of reservations <= burst + rate x time, whatever the clock does; each step back beyond
    `STEP` counts as time that was given twice.
    """
    bucket = Bucket(rate=20.0, burst=600.0, now=0.0)
    now, reserved, lived = 0.0, 0.0, 0.0
    for gap, back, amount in history:
        now += gap
        lived += gap
        if bucket.reserve(amount, now):
            reserved += amount
        assert -SLACK <= bucket.level <= bucket.burst
        assert reserved <= 600.0 + 20.0 * lived + SLACK * (len(history) + 1)
        now -= back


@given(st.lists(st.tuples(gaps, amounts, amounts), min_size=1, max_size=40))
def test_what_is_reserved_and_settled_is_conserved(history):
    """With refill off, the level is the burst less what was used, down to the floor."""
    bucket = Bucket(rate=0.0, burst=600.0, now=0.0)
    now, expected = 0.0, 600.0
    for gap, amount, used in history:
        now += gap
        if bucket.reserve(amount, now):
            bucket.settle(amount - used, now)
            expected = min(max(expected - amount + amount - used, -600.0), 600.0)
        assert bucket.level == pytest.approx(expected, abs=1e-6)


@given(st.floats(-600.0, 600.0), st.floats(0.1, 600.0), st.floats(0.5, 50.0))
def test_a_retry_after_the_stated_time_passes_and_one_before_it_does_not(level, amount, rate):
    bucket = Bucket(rate=rate, burst=600.0, now=0.0, level=level)
    wait = bucket.retry_after(amount, 0.0)
    assert wait is not None
    if wait > 1e-3:
        assert not bucket.holds(amount, wait * 0.99 - 1e-4)
    assert bucket.holds(amount, wait * (1 + 1e-9))


def test_nothing_is_admitted_until_a_debt_is_repaid():
    bucket = Bucket(rate=10.0, burst=100.0, now=0.0)
    assert bucket.reserve(100.0, 0.0)
    bucket.settle(-1000.0, 0.0)
    assert bucket.level == -100.0  # the floor
    assert not bucket.reserve(0.0, 5.0)
    assert bucket.retry_after(1.0, 5.0) == pytest.approx(5.1)
    assert bucket.reserve(1.0, 10.2)


def test_what_never_fits_has_no_retry_after():
    bucket = Bucket(rate=10.0, burst=100.0, now=0.0)
    assert bucket.retry_after(101.0, 0.0) is None
    assert Bucket(rate=0.0, burst=100.0, now=0.0, level=0.0).retry_after(1.0, 0.0) is None


@given(st.floats(-100.0, 100.0), st.floats(1.0, 1e4))
def test_a_reload_keeps_the_filled_share(level, burst):
    """There and back again changes nothing; a larger bucket is as full as the old one."""
    bucket = Bucket(rate=10.0, burst=100.0, now=0.0, level=level)
    bucket.rescale(1.0, burst, 0.0)
    assert bucket.level / burst == pytest.approx(level / 100.0)
    bucket.rescale(10.0, 100.0, 0.0)
    assert bucket.level == pytest.approx(level)


@given(
    st.floats(0.4, 40.0),
    st.lists(st.tuples(st.floats(0.0, 40.0), st.booleans()), max_size=150),
)
def test_at_most_the_limit_in_any_sixty_seconds(per_minute, history):
    """The sliding bound holds between any two requests, revoked ones aside."""
    window = RequestWindow(per_minute, 0.0)
    limit = max(1, int(per_minute))
    length = MINUTE * limit / per_minute
    now, admitted = 0.0, []
    for gap, revoked in history:
        now += gap
        if window.holds(now):
            window.take()
            if revoked:
                window.revoke(now, now)
            else:
                admitted.append(now)
        recent = [at for at in admitted if at > now - length]
        assert len(recent) <= limit
        assert window.advance(now) >= len(recent)


@given(st.floats(0.4, 40.0), st.lists(st.floats(0.0, 20.0), min_size=1, max_size=80))
def test_a_place_comes_free_when_it_was_promised(per_minute, gaps_between):
    window = RequestWindow(per_minute, 0.0)
    now = 0.0
    for gap in gaps_between:
        now += gap
        wait = window.retry_after(now)
        assert wait is not None
        assert wait <= MINUTE * max(1.0, 1.0 / per_minute) * (1 + 1.0 / SLOTS) + 1e-5
        if wait > 1e-3:
            assert not window.holds(now + wait - 1e-3)
        now += wait
        assert window.holds(now)
        window.take()


@pytest.mark.parametrize("back", [0.5, 30.0, 86_400.0])
def test_a_clock_that_steps_back_forgets_no_request(back):
    window = RequestWindow(2.0, 1000.0)
    for _ in range(2):
        assert window.holds(1000.0)
        window.take()
    assert not window.holds(1000.0 - back)
    assert not window.holds(1058.0 - back)
    assert window.holds(1062.1 if back <= STEP else 1062.1 - back)


def test_the_first_request_of_a_small_key_passes():
    """The reservation is capped by the burst, so an unknown answer length locks nobody out."""
    target = account(tokens_per_minute=60.0, burst_tokens=50.0)
    first = admit(target, 0.0, tokens=4096.0)
    assert first.ok
    assert first.tokens == 50.0
    target.settle(first, used=30.0, now=0.0)
    second = admit(target, 0.0, tokens=4096.0)
    assert second.reason is Reason.RATE
    assert second.retry_after == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("quota", "reason"),
    [
        ({"tokens_per_minute": 60.0, "burst_tokens": 5.0}, Reason.RATE),
        ({"requests_per_minute": 1.0}, Reason.RATE),
        ({"concurrency": 1}, Reason.CONCURRENCY),
        ({"max_prompt_tokens": 4}, Reason.PROMPT_LIMIT),
        ({"daily_tokens": 6.0}, Reason.QUOTA),
        ({"daily_cost": 1.0}, Reason.QUOTA),
    ],
)
@pytest.mark.parametrize("place", ["own", "key", "model"])
def test_a_refusal_by_one_part_charges_none(quota, reason, place):
    roomy = {
        "requests_per_minute": 100.0,
        "tokens_per_minute": 6000.0,
        "burst_tokens": 100.0,
        "concurrency": 50,
        "daily_tokens": 1000.0,
        "daily_cost": 100.0,
    }
    quotas = {"own": roomy, "key": roomy, "model": roomy}
    quotas[place] = {**roomy, **quota}
    target = account(
        **quotas["own"], keys={"k": Quota(**quotas["key"])}, models={"m": Quota(**quotas["model"])}
    )
    if reason is not Reason.PROMPT_LIMIT:
        assert admit(target, 0.0, key="k", tokens=5.0, cost=0.9).ok
    before = target.usage(0.0)
    for _ in range(20):
        refused = admit(target, 0.0, key="k", tokens=5.0, cost=0.9)
        assert refused.reason is reason
        assert refused.meters == ()
    assert target.usage(0.0) == before


def test_a_revoked_request_has_cost_nothing():
    target = account(
        tokens_per_minute=60.0, requests_per_minute=3.0, concurrency=2, daily_tokens=1e3
    )
    before = target.usage(0.0)
    held = admit(target, 0.0)
    assert target.usage(0.0) != before
    target.revoke(held, now=0.0)
    assert target.usage(0.0) == before


def test_other_keys_and_models_are_not_held_to_a_keys_quota():
    target = account(keys={"small": Quota(concurrency=1)}, models={"big": Quota(concurrency=1)})
    assert admit(target, 0.0, key="small").ok
    assert not admit(target, 0.0, key="small").ok
    assert admit(target, 0.0, key="other").ok
    assert admit(target, 0.0, key="other", model="big").ok
    assert not admit(target, 0.0, key="other", model="big").ok
    assert admit(target, 0.0, key=None, model="unheard").ok


def test_a_day_ends_at_midnight_and_old_reservations_stay_on_their_day():
    target = Account(Tenant(name="t", quota=Quota(daily_tokens=100.0)), now=90.0, midnight=100.0)
    night = admit(target, 99.0, tokens=80.0)
    assert admit(target, 99.0, tokens=80.0).retry_after == pytest.approx(1.0)
    fresh = admit(target, 101.0, tokens=80.0)
    assert fresh.ok
    target.settle(night, used=10.0, now=102.0)  # its refund belongs to a day that is over
    assert target.usage(102.0)["tenant"].used_today == 80.0
    target.settle(fresh, used=90.0, now=103.0)
    assert target.usage(103.0)["tenant"].used_today == 90.0


@given(
    st.lists(
        st.tuples(gaps, steps_back, amounts, st.floats(0.0, 3000.0), st.sampled_from("abc")),
        max_size=60,
    )
)
def test_when_everything_ended_nothing_is_left(history):
    """Over random histories of admissions, ends, revocations and clock steps no count stays and
    what was used beyond burst + refill is at most what was under-reserved.
    """
    target = account(
        tokens_per_minute=1200.0,
        burst_tokens=600.0,
        requests_per_minute=30.0,
        concurrency=4,
        daily_tokens=1e6,
        keys={"a": Quota(concurrency=2)},
    )
    now, open_ = 0.0, []
    for i, (gap, back, tokens, used, key) in enumerate(history):
        now += gap
        held = admit(target, now, tokens=tokens, key=key)
        if held.ok:
            open_.append((held, used))
        now -= back
        if open_ and i % 3:
            held, spent = open_.pop(0)
            if i % 3 == 1:
                target.settle(held, used=spent, now=now)
            else:
                target.revoke(held, now=now)
        assert 0 <= target.usage(now)["tenant"].running == len(open_) <= 4
    for held, used in open_:
        target.settle(held, used=used, now=now)
    assert all(meter.running == 0 for meter in target.usage(now).values())
    assert target.usage(now + 7200.0)["tenant"].level == 600.0
    assert target.usage(now + 7200.0)["tenant"].requests_in_window == 0


def test_a_reload_matches_by_name_and_never_refills():
    target = account(tokens_per_minute=60.0, burst_tokens=100.0, keys={"k": Quota(concurrency=1)})
    held = admit(target, 0.0, tokens=75.0, key="k")
    same = target.tenant
    target.rescale(same, 0.0)
    assert target.usage(0.0)["tenant"].level == 25.0
    assert not admit(target, 0.0, tokens=1.0, key="k").ok
    larger = Tenant(
        name="t",
        quota=Quota(tokens_per_minute=600.0, burst_tokens=1000.0, concurrency=9),
        key_quotas={"new": Quota(concurrency=1)},
    )
    target.rescale(larger, 0.0)
    assert target.usage(0.0)["tenant"].level == 250.0
    assert admit(target, 0.0, tokens=1.0, key="new").ok
    target.settle(held, used=75.0, now=0.0)
    assert target.usage(0.0)["tenant"].running == 1
    assert target.usage(0.0)["key:new"].running == 1


def test_standing_reports_the_tightest_limit():
    target = account(
        tokens_per_minute=600.0,
        burst_tokens=1000.0,
        requests_per_minute=10.0,
        keys={"k": Quota(tokens_per_minute=60.0, burst_tokens=100.0)},
    )
    admit(target, 0.0, tokens=40.0, key="k")
    standing = target.standing(key="k", model="m", now=0.0)
    assert (standing.limit_tokens, standing.remaining_tokens) == (100.0, 60.0)
    assert standing.reset_tokens == pytest.approx(40.0)
    assert (standing.limit_requests, standing.remaining_requests) == (10, 9)
    free = account().standing(key=None, model="m", now=0.0)
    assert free.limit_tokens is None
    assert free.limit_requests is None


def test_limits_below_zero_are_refused():
    with pytest.raises(ValueError, match="negative"):
        Bucket(rate=-1.0, burst=1.0, now=0.0)
    with pytest.raises(ValueError, match="negative"):
        RequestWindow(-1.0, 0.0)
    assert RequestWindow(0.0, 0.0).retry_after(0.0) is None
    assert math.isinf(account()._own.cap)


@given(
    st.lists(st.tuples(st.floats(-100.0, 90_000.0), st.floats(0.0, 50.0)), max_size=20),
    st.floats(-100.0, 200_000.0),
)
def test_looking_changes_nothing(history, look):
    """Usage tells what an admission at that time would see, and leaves every counter as it was."""
    quota = Quota(
        tokens_per_minute=600.0,
        burst_tokens=300.0,
        requests_per_minute=9.0,
        daily_tokens=5_000.0,
        daily_cost=50.0,
    )
    seen, blind = (Account(Tenant(name="t", quota=quota), 0.0) for _ in range(2))
    now = 0.0
    for gap, tokens in history:
        now += gap
        facts = {"key": None, "model": "m", "prompt": 0.0, "tokens": tokens, "cost": 1.0}
        seen.usage(now + look)
        one, other = seen.admit(now=now, **facts), blind.admit(now=now, **facts)
        assert (one.ok, one.reason, one.retry_after) == (other.ok, other.reason, other.retry_after)
        assert seen.usage(now) == blind.usage(now)
