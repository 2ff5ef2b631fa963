"""Which replica holds which prompt prefix, and ran which session: an approximate mirror of the
engines' prefix caches.

Blocks are chained hashes, so a block implies all before it. Each replica's blocks are kept in
least-recently-sent order up to its capacity; one table maps a block to a bit mask of replicas, so a
lookup costs one step per block, not per replica.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

SESSIONS = 50_000
"""Sessions remembered, the least recently sent forgotten first."""


class PrefixIndex:
    """Blocks sent to each replica lately; `capacity` is in blocks a replica, (m,)."""

    def __init__(self, capacity: Sequence[int]) -> None:
        self._capacity = list(capacity)
        self._recent: list[OrderedDict[int, None]] = [OrderedDict() for _ in capacity]
        self._holders: dict[int, int] = {}
        self._restarts = [0] * len(self._recent)
        self._sessions: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()

    def matched(self, blocks: tuple[int, ...]) -> list[int]:
        """Leading blocks that each replica holds, (m,)."""
        m = len(self._recent)
        found = [0] * m
        alive = (1 << m) - 1
        count = 0
        for block in blocks:
            holders = self._holders.get(block, 0) & alive
            lost = alive & ~holders
            while lost:
                low = lost & -lost
                found[low.bit_length() - 1] = count
                lost ^= low
            alive = holders
            if not alive:
                return found
            count += 1
        while alive:
            low = alive & -alive
            found[low.bit_length() - 1] = count
            alive ^= low
        return found

    def add(self, replica: int, blocks: tuple[int, ...]) -> None:
        """The replica was sent a prompt with these blocks; the oldest others fall out."""
        recent, bit = self._recent[replica], 1 << replica
        for block in blocks:
            if block in recent:
                recent.move_to_end(block)
            else:
                recent[block] = None
                self._holders[block] = self._holders.get(block, 0) | bit
        while len(recent) > self._capacity[replica]:
            self._drop(replica, recent.popitem(last=False)[0])

    def join(self, tenant: str, session: str, replica: int) -> None:
        """The tenant's session ran on this replica last."""
        key = (tenant, session)
        self._sessions[key] = replica, self._restarts[replica]
        self._sessions.move_to_end(key)
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)

    def home(self, tenant: str, session: str) -> int | None:
        """The replica where the session ran last, unless it has restarted since."""
        replica, restarts = self._sessions.get((tenant, session), (None, 0))
        if replica is None or restarts != self._restarts[replica]:
            return None
        return replica

    def clear(self, replica: int) -> None:
        """The replica restarted: it holds nothing."""
        self._restarts[replica] += 1
        for block in self._recent[replica]:
            self._drop(replica, block)
        self._recent[replica].clear()

    def extend(self, capacity: Sequence[int]) -> None:
        """More replicas joined, with these capacities."""
        self._capacity += capacity
        self._recent += [OrderedDict() for _ in capacity]
        self._restarts += [0] * len(capacity)

    def _drop(self, replica: int, block: int) -> None:
        left = self._holders[block] & ~(1 << replica)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]
