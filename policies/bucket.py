"""Quota arithmetic: token buckets, request windows, daily windows, concurrency; no clock, no I/O.

Rules (DESIGN sections 3 and 10, CORE section 3.8):

- A request *reserves* min(what it may cost, the bucket's burst) when it is admitted and *settles*
  the difference when it ends; the difference may be negative, which is a charge.
- A level never rises above the burst and never falls below -burst: a debt larger than that is
  forgiven, so nobody is locked out for longer than 2 x burst / rate.
- Nothing is admitted while a level is not positive. What was refused has cost nothing.
- Over any time T, tokens reserved are at most burst + rate x T + what was refunded.
- At most `requests_per_minute` requests are admitted in *any* 60 s, not only in aligned minutes.
- Clocks that step backwards: a step of up to `STEP` seconds is waited out (no refill until the old
  time is reached again, so jitter between readers grants nothing); a larger one moves the anchor.

The Lua of `gateway/store` computes the same numbers; this file is its oracle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from domain.events import Reason
from domain.request import Quota, QuotaUsage, Tenant
from domain.values import dataclass

STEP = 1.0
"""Backward clock steps up to this many seconds are taken for jitter."""

SLACK = 1e-6
"""Tokens that rounding may cost: a retry after exactly `retry_after` must pass."""

DAY = 86_400.0
"""Length of a daily window, seconds."""

MINUTE = 60.0
"""Length of the request window, seconds, where the limit is a whole number."""

SLOTS = 60
"""Parts a request window is divided into: a request is forgotten at most 1/SLOTS late."""


class Bucket:
    """A token bucket: `rate` tokens per second flow in up to `burst`; `level` is what is there.

    Changed in place by every call that takes `now` (seconds); `at` is the time of `level`.
    """

    __slots__ = ("at", "burst", "level", "rate")

    def __init__(self, rate: float, burst: float, now: float, level: float | None = None) -> None:
        if rate < 0 or burst < 0:
            raise ValueError(f"rate and burst must not be negative, got {rate} and {burst}")
        self.rate = rate
        self.burst = burst
        self.at = now
        self.level = burst if level is None else level

    def refill(self, now: float) -> float:
        """Bring the level up to `now` and return it."""
        elapsed = now - self.at
        if elapsed > 0.0:
            level = self.level + elapsed * self.rate
            self.level = min(level, self.burst)
            self.at = now
        elif elapsed < -STEP:
            self.at = now
        return self.level

    def level_at(self, now: float) -> float:
        """The level at `now`, without changing anything: for people who look."""
        elapsed = now - self.at
        return min(self.level + elapsed * self.rate, self.burst) if elapsed > 0.0 else self.level

    def holds(self, amount: float, now: float) -> bool:
        """Whether `amount` tokens could be reserved now."""
        level = self.refill(now)
        return level >= amount - SLACK and level > 0.0

    def reserve(self, amount: float, now: float) -> bool:
        """Take `amount` tokens; False, and nothing taken, when they are not there."""
        if not self.holds(amount, now):
            return False
        self.level -= amount
        return True

    def settle(self, back: float, now: float) -> None:
        """Give `back` tokens back, or charge for a negative number."""
        level = self.refill(now) + back
        self.level = min(max(level, -self.burst), self.burst)

    def retry_after(self, amount: float, now: float) -> float | None:
        """Seconds until `amount` tokens are there: deficit / refill. None if they never will be."""
        deficit = min(amount, self.burst) - self.refill(now)
        if deficit <= SLACK and self.level > 0.0:
            return 0.0 if amount <= self.burst + SLACK else None
        if self.rate <= 0.0 or amount > self.burst + SLACK:
            return None
        return max(deficit, SLACK) / self.rate

    def rescale(self, rate: float, burst: float, now: float) -> None:
        """Take a new capacity: the filled share stays, so a reload never refills."""
        self.refill(now)
        self.level = self.level * burst / self.burst if self.burst > 0.0 else 0.0
        self.rate = rate
        self.burst = burst


class RequestWindow:
    """At most `per_minute` requests in any 60 s, counted in `SLOTS` slots of a ring.

    A slot is forgotten when the whole of it is older than the window, so the limit is never
    exceeded and a place comes free at most one slot late. Below one per minute, and for fractions,
    the window is stretched instead: 1.5 per minute is one in 40 s.
    """

    __slots__ = ("counts", "limit", "slot", "total", "width")

    def __init__(self, per_minute: float, now: float) -> None:
        self.counts = [0] * (SLOTS + 1)
        self.total = 0
        self.limit = 0
        self.width = 0.0
        self.slot = 0
        self._resize(per_minute)
        self.slot = math.floor(now / self.width)

    def _resize(self, per_minute: float) -> None:
        if per_minute < 0:
            raise ValueError(f"requests_per_minute must not be negative, got {per_minute}")
        self.limit = max(1, int(per_minute)) if per_minute > 0 else 0
        length = MINUTE * self.limit / per_minute if per_minute > 0 else MINUTE
        self.width = length / SLOTS

    def advance(self, now: float) -> int:
        """Forget what is older than the window; return how many requests are in it."""
        slot = math.floor(now / self.width)
        ahead = slot - self.slot
        if ahead > 0:
            counts = self.counts
            size = SLOTS + 1
            if ahead >= size:
                counts[:] = [0] * size
                self.total = 0
            elif self.total:
                for old in range(self.slot + 1, slot + 1):
                    i = old % size
                    self.total -= counts[i]
                    counts[i] = 0
            self.slot = slot
        elif ahead < 0 and -ahead * self.width > STEP + self.width:
            self._shift(slot)
        return self.total

    def count_at(self, now: float) -> int:
        """How many requests are in the window at `now`, without changing anything."""
        size = SLOTS + 1
        ahead = math.floor(now / self.width) - self.slot
        forgotten = range(self.slot + 1, self.slot + 1 + min(max(ahead, 0), size))
        return self.total - sum(self.counts[old % size] for old in forgotten)

    def _shift(self, slot: int) -> None:
        """Move the ring to an earlier slot, each count keeping its age."""
        size = SLOTS + 1
        aged = [self.counts[(self.slot - age) % size] for age in range(size)]
        for age, count in enumerate(aged):
            self.counts[(slot - age) % size] = count
        self.slot = slot

    def holds(self, now: float) -> bool:
        """Whether one more request fits."""
        return self.advance(now) < self.limit

    def take(self) -> None:
        """Count one request in the slot that `holds` moved to."""
        self.counts[self.slot % (SLOTS + 1)] += 1
        self.total += 1

    def revoke(self, at: float, now: float) -> None:
        """Take back a request that was counted at `at` and never sent."""
        self.advance(now)
        size = SLOTS + 1
        slot = min(math.floor(at / self.width), self.slot)
        if self.slot - slot < size and self.counts[slot % size] > 0:
            self.counts[slot % size] -= 1
            self.total -= 1

    def retry_after(self, now: float) -> float | None:
        """Seconds until a place comes free; 0 if one is free, None if none ever will."""
        if self.holds(now):
            return 0.0
        if self.limit == 0:
            return None
        size = SLOTS + 1
        over = self.total - self.limit + 1
        for age in range(size - 1, -1, -1):
            over -= self.counts[(self.slot - age) % size]
            if over <= 0:
                free_at = (self.slot - age + size) * self.width
                return max(free_at - now, 0.0) + SLACK
        return None

    def rescale(self, per_minute: float, now: float) -> None:
        """Take a new limit; what was admitted lately still counts, by its age in slots."""
        self.advance(now)
        self._resize(per_minute)
        self._shift(math.floor(now / self.width))


class DailyWindow:
    """At most `limit` units (tokens or money) between two midnights, `midnight` on `now`'s clock.

    A request counts on the day on which it was admitted; what it used beyond its reservation
    counts on the day on which it ended.
    """

    __slots__ = ("day", "limit", "midnight", "used")

    def __init__(self, limit: float, now: float, midnight: float = 0.0) -> None:
        self.limit = limit
        self.midnight = midnight
        self.used = 0.0
        self.day = math.floor((now - midnight) / DAY)

    def advance(self, now: float) -> float:
        """Start a new day if there is one; return what is used of the present one."""
        day = math.floor((now - self.midnight) / DAY)
        if day > self.day or (day < self.day and self.day * DAY + self.midnight - now > STEP):
            self.used = self.used if day < self.day else 0.0
            self.day = day
        return self.used

    def used_at(self, now: float) -> float:
        """What is used of the day of `now`, without changing anything."""
        return 0.0 if math.floor((now - self.midnight) / DAY) > self.day else self.used

    def holds(self, amount: float, now: float) -> bool:
        """Whether `amount` more units fit and something is left."""
        used = self.advance(now)
        return used + amount <= self.limit + SLACK and used < self.limit

    def take(self, amount: float) -> None:
        """Count `amount` units in the day that `holds` moved to."""
        self.used += amount

    def settle(self, back: float, at: float, now: float) -> None:
        """Give back (or charge, if negative) the difference of a reservation made at `at`."""
        self.advance(now)
        if back < 0.0 or math.floor((at - self.midnight) / DAY) >= self.day:
            self.used = max(self.used - back, 0.0)

    def retry_after(self, now: float) -> float:
        """Seconds until the next midnight."""
        self.advance(now)
        return (self.day + 1) * DAY + self.midnight - now


class Meter:
    """Everything one `Quota` counts. `refusal` looks, `take` takes; both need the same `now`."""

    __slots__ = ("bucket", "cap", "concurrency", "cost", "daily", "prompt", "requests", "running")

    def __init__(self, quota: Quota, now: float, midnight: float = 0.0) -> None:
        self.running = 0
        self.bucket: Bucket | None = None
        self.requests: RequestWindow | None = None
        self.daily: DailyWindow | None = None
        self.cost: DailyWindow | None = None
        self.concurrency: int | None = None
        self.prompt: float | None = None
        self.cap = float("inf")
        self.rescale(quota, now, midnight)

    def rescale(self, quota: Quota, now: float, midnight: float = 0.0) -> None:
        """Take new limits; counts and filled shares are kept, a limit that is new starts full."""
        self.concurrency = quota.concurrency
        self.prompt = quota.max_prompt_tokens
        self._rescale_bucket(quota, now)
        if quota.requests_per_minute is None:
            self.requests = None
        elif self.requests is None:
            self.requests = RequestWindow(quota.requests_per_minute, now)
        else:
            self.requests.rescale(quota.requests_per_minute, now)
        self.daily = _rescaled(self.daily, quota.daily_tokens, now, midnight)
        self.cost = _rescaled(self.cost, quota.daily_cost, now, midnight)
        burst = self.bucket.burst if self.bucket is not None else float("inf")
        self.cap = burst if quota.daily_tokens is None else min(burst, quota.daily_tokens)

    def _rescale_bucket(self, quota: Quota, now: float) -> None:
        if quota.tokens_per_minute is None:
            self.bucket = None
            return
        burst = quota.burst_tokens if quota.burst_tokens is not None else quota.tokens_per_minute
        rate = quota.tokens_per_minute / MINUTE
        if self.bucket is None:
            self.bucket = Bucket(rate, burst, now)
        elif (self.bucket.rate, self.bucket.burst) != (rate, burst):
            self.bucket.rescale(rate, burst, now)

    def refusal(self, prompt: float, tokens: float, cost: float, now: float) -> Reason | None:
        """Why this request does not fit, None if it does. Nothing is counted."""
        if self.prompt is not None and prompt > self.prompt:
            return Reason.PROMPT_LIMIT
        if self.concurrency is not None and self.running >= self.concurrency:
            return Reason.CONCURRENCY
        if self.requests is not None and not self.requests.holds(now):
            return Reason.RATE
        if self.bucket is not None and not self.bucket.holds(tokens, now):
            return Reason.RATE
        if self.daily is not None and not self.daily.holds(tokens, now):
            return Reason.QUOTA
        if self.cost is not None and not self.cost.holds(min(cost, self.cost.limit), now):
            return Reason.QUOTA
        return None

    def retry_after(self, tokens: float, cost: float, now: float) -> float | None:
        """Seconds until every part would take the request; None if time alone will not help."""
        waits: list[float | None] = []
        if self.requests is not None:
            waits.append(self.requests.retry_after(now))
        if self.bucket is not None:
            waits.append(self.bucket.retry_after(tokens, now))
        if self.daily is not None and not self.daily.holds(tokens, now):
            waits.append(self.daily.retry_after(now))
        if self.cost is not None and not self.cost.holds(min(cost, self.cost.limit), now):
            waits.append(self.cost.retry_after(now))
        known = [wait for wait in waits if wait is not None]
        return max(known) if known and len(known) == len(waits) else None

    def take(self, tokens: float, cost: float) -> None:
        """Count a request that `refusal` let pass."""
        self.running += 1
        if self.requests is not None:
            self.requests.take()
        if self.bucket is not None:
            self.bucket.level -= tokens
        if self.daily is not None:
            self.daily.take(tokens)
        if self.cost is not None:
            self.cost.take(min(cost, self.cost.limit))

    def settle(self, back: float, cost_back: float, at: float, now: float) -> None:
        """End a request admitted at `at`: differences in tokens and cost go back or are charged."""
        self.running = max(self.running - 1, 0)
        if self.bucket is not None:
            self.bucket.settle(back, now)
        if self.daily is not None:
            self.daily.settle(back, at, now)
        if self.cost is not None:
            self.cost.settle(cost_back, at, now)


def _rescaled(
    window: DailyWindow | None, limit: float | None, now: float, midnight: float
) -> DailyWindow | None:
    if limit is None:
        return None
    if window is None:
        return DailyWindow(limit, now, midnight)
    window.advance(now)
    window.limit = limit
    return window


class Admission(NamedTuple):
    """What `Account.admit` answered; handed back to `settle` or `revoke` when the request ends.

    `tokens` and `cost` were reserved at `at`. `retry_after` (s) comes with a refusal that time
    cures. `meters` are the counters that took the request: a reload in between changes them in
    place or drops them, and either way nothing is given back twice.
    """

    ok: bool
    tokens: float
    cost: float
    at: float
    reason: Reason | None = None
    retry_after: float | None = None
    meters: tuple[Meter, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a client stands: the figures of the `x-ratelimit-*` headers; None where no limit is.

    Resets are seconds until the limit is whole again.
    """

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests: float | None = None
    limit_tokens: float | None = None
    remaining_tokens: float | None = None
    reset_tokens: float | None = None


class Account:
    """All quotas of one tenant: its own, one per API key, one per model. One decision over all.

    A refusal by any of them charges none.
    """

    __slots__ = ("_keys", "_midnight", "_models", "_own", "_paths", "tenant")

    def __init__(self, tenant: Tenant, now: float, midnight: float = 0.0) -> None:
        self.tenant = tenant
        self._midnight = midnight
        self._own = Meter(tenant.quota, now, midnight)
        self._keys = {k: Meter(q, now, midnight) for k, q in tenant.key_quotas.items()}
        self._models = {m: Meter(q, now, midnight) for m, q in tenant.model_quotas.items()}
        self._paths: dict[tuple[str | None, str], tuple[tuple[Meter, ...], float]] = {}

    def _path(self, key: str | None, model: str) -> tuple[tuple[Meter, ...], float]:
        """The meters a request of this key and model runs through, and their smallest cap."""
        found = [self._own, self._keys.get(key) if key else None, self._models.get(model)]
        meters = tuple(meter for meter in found if meter is not None)
        path = (meters, min(meter.cap for meter in meters))
        if model in self._models or key in self._keys or len(self._paths) < 1024:
            self._paths[key, model] = path
        return path

    def admit(
        self,
        *,
        key: str | None,
        model: str,
        prompt: float,
        tokens: float,
        now: float,
        cost: float = 0.0,
    ) -> Admission:
        """Reserve min(`tokens`, every burst) and count the request, or say why not.

        `tokens` is min(prompt + P90 of the answer, prompt + max_tokens); `cost` its expected price.
        """
        path = self._paths.get((key, model))
        meters, cap = path if path is not None else self._path(key, model)
        tokens = min(tokens, cap)
        for meter in meters:
            reason = meter.refusal(prompt, tokens, cost, now)
            if reason is not None:
                wait = None if reason is Reason.PROMPT_LIMIT else _wait(meters, tokens, cost, now)
                return Admission(False, 0.0, 0.0, now, reason, wait)
        for meter in meters:
            meter.take(tokens, cost)
        return Admission(True, tokens, cost, now, None, None, meters)

    def adopt(
        self, *, key: str | None, model: str, tokens: float, cost: float, at: float
    ) -> Admission:
        """Count as running a request that was reserved elsewhere at `at`: it is charged nothing
        here, but its end gives back here.
        """
        meters, _ = self._path(key, model)
        for meter in meters:
            meter.running += 1
        return Admission(True, tokens, cost, at, None, None, meters)

    def settle(
        self, admission: Admission, *, used: float, now: float, cost: float | None = None
    ) -> None:
        """End an admitted request, once: it used `used` tokens and cost `cost` (None: as
        reserved).
        """
        back = admission.tokens - used
        cost_back = 0.0 if cost is None else admission.cost - cost
        for meter in admission.meters:
            meter.settle(back, cost_back, admission.at, now)

    def revoke(self, admission: Admission, *, now: float) -> None:
        """Undo an admission whose request was never sent: it has cost nothing, not even a
        request.
        """
        for meter in admission.meters:
            meter.settle(admission.tokens, admission.cost, admission.at, now)
            if meter.requests is not None:
                meter.requests.revoke(admission.at, now)

    def rescale(self, tenant: Tenant, now: float) -> None:
        """Take the quotas of a reloaded config; meters are matched by key and model name."""
        self.tenant = tenant
        self._own.rescale(tenant.quota, now, self._midnight)
        self._keys = self._matched(self._keys, tenant.key_quotas, now)
        self._models = self._matched(self._models, tenant.model_quotas, now)
        self._paths.clear()

    def _matched(
        self, old: dict[str, Meter], quotas: Mapping[str, Quota], now: float
    ) -> dict[str, Meter]:
        meters = {}
        for name, quota in quotas.items():
            meter = old.get(name)
            if meter is None:
                meter = Meter(quota, now, self._midnight)
            else:
                meter.rescale(quota, now, self._midnight)
            meters[name] = meter
        return meters

    def meter(self, name: str) -> Meter:
        """One meter by its name in `usage`."""
        kind, _, rest = name.partition(":")
        return {"tenant": {"": self._own}, "key": self._keys, "model": self._models}[kind][rest]

    def standing(self, *, key: str | None, model: str, now: float) -> Standing:
        """The tightest of this client's request and token limits."""
        path = self._paths.get((key, model))
        meters, _ = path if path is not None else self._path(key, model)
        bucket, window = None, None
        level = 0.0
        for meter in meters:
            own, requests = meter.bucket, meter.requests
            if own is not None:
                left_here = own.level_at(now)
                if bucket is None or left_here < level:
                    bucket, level = own, left_here
            if requests is not None:
                left = requests.limit - requests.advance(now)
                if window is None or left < window.limit - window.total:
                    window = requests
        rate = bucket.rate if bucket is not None else 0.0
        return Standing(
            limit_requests=window.limit if window else None,
            remaining_requests=max(window.limit - window.total, 0) if window else None,
            reset_requests=window.width * (SLOTS + 1) if window and window.total else 0.0,
            limit_tokens=bucket.burst if bucket else None,
            remaining_tokens=max(level, 0.0) if bucket else None,
            reset_tokens=(bucket.burst - level) / rate if bucket and rate > 0 else None,
        )

    def usage(self, now: float) -> dict[str, QuotaUsage]:
        """What each meter has counted: `tenant`, `key:NAME`, `model:NAME`."""
        named = {"tenant": self._own}
        named |= {f"key:{name}": meter for name, meter in self._keys.items()}
        named |= {f"model:{name}": meter for name, meter in self._models.items()}
        return {name: _usage(meter, now) for name, meter in named.items()}


def _wait(meters: tuple[Meter, ...], tokens: float, cost: float, now: float) -> float | None:
    """The longest of the meters' waits; None where time alone will not help."""
    waits = [wait for meter in meters if (wait := meter.retry_after(tokens, cost, now)) is not None]
    return max(waits, default=0.0) or None


def _usage(meter: Meter, now: float) -> QuotaUsage:
    return QuotaUsage(
        running=meter.running,
        requests_in_window=meter.requests.count_at(now) if meter.requests else None,
        level=meter.bucket.level_at(now) if meter.bucket else None,
        burst=meter.bucket.burst if meter.bucket else None,
        used_today=meter.daily.used_at(now) if meter.daily else None,
        cost_today=meter.cost.used_at(now) if meter.cost else None,
    )
