"""What one gateway may let pass on its own while the shared store is away. Pure; time is passed in.

With N gateways, of which this one had the share s of a tenant's tokens in the last minute, its part
of every quota is

    1/N + s/2   (at most 1)

Over all gateways that adds up to 1.5, so a tenant overspends its rate by at most half; each keeps
at least 1/N; and a tenant below 60 % of its limit is not refused anywhere as long as its traffic
keeps its spread and N <= 10 (0.6 s <= 1/N + s/2). A bucket starts at that part of the level last
seen, and requests of the last minute count. (1.5 x s, at least 1/N each, would add up to
1.5 + (N-1)/N.)
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Mapping

from domain.request import Quota, Tenant
from gateway.store.quota_wire import Seen
from policies.bucket import Account, RequestWindow

HORIZON = 60.0
"""Seconds of traffic by which a share is measured."""

SAMPLE = 5.0
"""Seconds between two samples of it."""


class Traffic:
    """Tokens of one tenant in the last minute, here and everywhere."""

    def __init__(self) -> None:
        self._own = 0.0
        self._total = 0.0
        self._samples: deque[tuple[float, float, float]] = deque()

    def note(self, tokens: float, total: float, now: float) -> None:
        """This gateway reserved `tokens`; the store counts `total` tokens of the tenant so far."""
        if total < self._total:  # another store, or one that came back empty
            self._samples.clear()
            self._own = 0.0
        self._own += tokens
        self._total = total
        if not self._samples:
            self._samples.append((now, self._own - tokens, total - tokens))
        elif now - self._samples[-1][0] >= SAMPLE:
            self._samples.append((now, self._own, total))
        while len(self._samples) > 1 and self._samples[1][0] <= now - HORIZON:
            self._samples.popleft()

    def share(self) -> float:
        """This gateway's part of the tenant's tokens, in [0, 1]; 0 where there were none."""
        if not self._samples:
            return 0.0
        _, own, total = self._samples[0]
        if self._total <= total:
            return 0.0
        return min(max((self._own - own) / (self._total - total), 0.0), 1.0)


def part(gateways: int, share: float) -> float:
    """The part of every quota that one of `gateways` may spend alone."""
    return min(1.0, 1.0 / max(gateways, 1) + 0.5 * share)


def alone(
    tenant: Tenant,
    factor: float,
    seen: Mapping[str, Seen],
    windows: Mapping[str, RequestWindow],
    now: float,
    midnight: float,
) -> Account:
    """An account over `factor` of the tenant's quotas, at `factor` of the levels last seen.

    `seen` and `windows` (requests that this gateway let pass) go by the names of `Account.usage`.
    """

    def scaled(name: str, quota: Quota) -> Quota:
        used, cost = (seen[name].used, seen[name].cost) if name in seen else (0.0, 0.0)
        return Quota(
            requests_per_minute=_times(quota.requests_per_minute, factor),
            tokens_per_minute=_times(quota.tokens_per_minute, factor),
            burst_tokens=_times(quota.burst_tokens, factor),
            concurrency=_ceiling(quota.concurrency, factor),
            daily_tokens=_left(quota.daily_tokens, used, factor),
            daily_cost=_left(quota.daily_cost, cost, factor),
        )

    account = Account(
        Tenant(
            name=tenant.name,
            quota=scaled("tenant", tenant.quota),
            key_quotas={k: scaled(f"key:{k}", q) for k, q in tenant.key_quotas.items()},
            model_quotas={m: scaled(f"model:{m}", q) for m, q in tenant.model_quotas.items()},
        ),
        now,
        midnight,
    )
    for name in account.usage(now):
        meter = account.meter(name)
        if meter.bucket is not None and name in seen and seen[name].at is not None:
            level, _, _, _ = seen[name].hint(now)
            meter.bucket.level = min(level * factor, meter.bucket.burst)
        if meter.requests is not None and name in windows:
            per_minute = meter.requests.limit / meter.requests.width
            meter.requests = copy.deepcopy(windows[name])
            meter.requests.rescale(per_minute, now)
    return account


def _times(limit: float | None, factor: float) -> float | None:
    return None if limit is None else limit * factor


def _ceiling(limit: int | None, factor: float) -> int | None:
    return None if limit is None else math.ceil(limit * factor)


def _left(limit: float | None, used: float, factor: float) -> float | None:
    return None if limit is None else max(limit - used, 0.0) * factor
