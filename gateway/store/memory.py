"""The store of a single gateway: the core's own view is complete, so it is always agreed with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from domain.events import Commit, Committed, Settle
from domain.ports import Store
from domain.request import QuotaUsage, Tenant


class MemoryStore:
    """Answers at once and keeps nothing; the path through the core is the shared store's."""

    @property
    def degraded(self) -> bool:
        """Never: there is nothing to lose touch with."""
        return False

    def commit(self, action: Commit, now: float) -> Committed:
        """Reserved and booked."""
        return Committed(now, action.id, action.attempt)

    def settle(self, action: Settle, now: float) -> None:
        """Nothing to give back: the core's accounts have done it."""

    def reload(self, tenants: Mapping[str, Tenant]) -> None:
        """Nothing to take: the core's accounts have done it."""

    async def usage(self, tenants: Sequence[str]) -> Mapping[str, Mapping[str, QuotaUsage]] | None:
        """Nobody else counts: the core's accounts say it all."""
        del tenants
        return None


_conforms: type[Store] = MemoryStore
