"""Quotas as the Lua verbs take them: one msgpack array per meter, made once per path."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from domain.request import Quota, Tenant
from policies.bucket import MINUTE, SLOTS

_NONE = -1.0

encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class Seen:
    """What a gateway last saw of one meter: its level at `at` (the gateway's clock), the day's
    tokens and cost. `rate` and `burst` are the bucket's, 0 where there is none.
    """

    rate: float
    burst: float
    level: float = 0.0
    used: float = 0.0
    cost: float = 0.0
    at: float | None = None

    def hint(self, now: float) -> tuple[float, float, float, int]:
        """(level refilled until now, used today, spent today, 1 if anything was ever seen).

        The level is not cut at the burst: what a full bucket turned away during an outage covers
        what was spent during it.
        """
        if self.at is None:
            return (0.0, 0.0, 0.0, 0)
        level = self.level + max(now - self.at, 0.0) * self.rate
        return (level, self.used, self.cost, 1)


@dataclass(frozen=True, slots=True)
class Path:
    """The meters that a request of one (tenant, key, model) runs through.

    `names` as in `Account.usage`; `wire` is the msgpack of their quotas, `quotas` the same as
    values; `cap` the most that a reservation can ask for.
    """

    keys: tuple[bytes, bytes, bytes]
    names: tuple[str, ...]
    quotas: tuple[tuple[str | float, ...], ...]
    wire: bytes
    cap: float
    seen: tuple[Seen, ...] = field(repr=False)

    @property
    def limited(self) -> bool:
        """Whether any meter has a limit at all; otherwise there is nothing to agree on."""
        return any(value != _NONE for quota in self.quotas for value in quota[1:])


def tenant_keys(prefix: str, tenant: str) -> tuple[bytes, bytes, bytes]:
    """The three keys of a tenant; one hash tag, so that a cluster keeps them together."""
    base = f"{prefix}:{{{tenant}}}:"
    return (f"{base}meters".encode(), f"{base}held".encode(), f"{base}leases".encode())


def wired(name: str, quota: Quota) -> tuple[str | float, ...]:
    """One quota: (name, rate, burst, requests, slot width, concurrency, daily tokens, daily
    cost).
    """
    rate, burst = rate_and_burst(quota)
    requests, width = _NONE, _NONE
    per_minute = quota.requests_per_minute
    if per_minute is not None:
        requests = float(max(1, int(per_minute)) if per_minute > 0 else 0)
        width = (MINUTE * requests / per_minute if per_minute > 0 else MINUTE) / SLOTS
    return (
        name,
        rate,
        burst,
        requests,
        width,
        _or_none(quota.concurrency),
        _or_none(quota.daily_tokens),
        _or_none(quota.daily_cost),
    )


def rate_and_burst(quota: Quota) -> tuple[float, float]:
    """Tokens per second and depth of the bucket; (-1, -1) where there is none."""
    if quota.tokens_per_minute is None:
        return (_NONE, _NONE)
    burst = quota.burst_tokens if quota.burst_tokens is not None else quota.tokens_per_minute
    return (quota.tokens_per_minute / MINUTE, burst)


def all_quotas(tenant: Tenant) -> dict[str, Quota]:
    """Every quota of a tenant by its name in `Account.usage`."""
    quotas = {"tenant": tenant.quota}
    quotas |= {f"key:{key}": quota for key, quota in tenant.key_quotas.items()}
    quotas |= {f"model:{model}": quota for model, quota in tenant.model_quotas.items()}
    return quotas


def _or_none(value: float | None) -> float:
    return _NONE if value is None else float(value)


class Paths:
    """Paths of one tenant, made when first asked for."""

    def __init__(self, prefix: str, tenant: Tenant) -> None:
        self.tenant = tenant
        self._keys = tenant_keys(prefix, tenant.name)
        self._seen: dict[str, Seen] = {}
        self._paths: dict[tuple[str | None, str | None], Path] = {}

    def path(self, key: str | None, model: str) -> Path:
        """The path of a request; keys and models without a quota of their own share one."""
        tenant = self.tenant
        known = (
            key if key in tenant.key_quotas else None,
            model if model in tenant.model_quotas else None,
        )
        path = self._paths.get(known)
        if path is None:
            path = self._paths[known] = self._made(*known)
        return path

    def _made(self, key: str | None, model: str | None) -> Path:
        named = {"tenant": self.tenant.quota}
        if key is not None:
            named[f"key:{key}"] = self.tenant.key_quotas[key]
        if model is not None:
            named[f"model:{model}"] = self.tenant.model_quotas[model]
        quotas = tuple(wired(name, quota) for name, quota in named.items())
        caps = [float(q[i]) for q in quotas for i in (2, 6) if q[i] != _NONE]
        return Path(
            keys=self._keys,
            names=tuple(named),
            quotas=quotas,
            wire=encode(quotas),
            cap=min(caps, default=float("inf")),
            seen=tuple(self.seen(name, quota) for name, quota in named.items()),
        )

    def seen(self, name: str, quota: Quota) -> Seen:
        """What was last seen of a meter, shared by all paths through it."""
        rate, burst = rate_and_burst(quota)
        seen = self._seen.get(name)
        if seen is None:
            seen = self._seen[name] = Seen(max(rate, 0.0), max(burst, 0.0))
        else:
            seen.rate, seen.burst = max(rate, 0.0), max(burst, 0.0)
        return seen

    @property
    def all_seen(self) -> dict[str, Seen]:
        """What was last seen of every meter that a request ran through."""
        return self._seen

    def reload(self, tenant: Tenant) -> None:
        """Take the tenant's new quotas; what was seen of a meter is kept by its name."""
        self.tenant = tenant
        self._paths.clear()
