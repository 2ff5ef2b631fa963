"""The waiting room: deadline order at low load, shortest predicted work as load grows, fair between
tenants.

One lane per (tenant, model and so set of allowed routes, class). In each, two heaps with static
keys: latest useful start, and predicted work. A release looks at the heads of both heaps (K lines
in all, two of each at least) of at most `LANES` lanes, least virtual time first, and ranks their
union with the present weights; so its cost does not depend on how many wait. Lines of entries that
have left stay in the heaps until they surface (their ticket no longer matches) or until they are
the majority.

Ranking key: start_by + alpha * work + fairness * (virtual time - least), seconds; alpha grows with
load (the sliding weight of Niyama), virtual time is predicted work received over weight (virtual
token counter, Sheng et al., OSDI 2024). A request older than its class's ageing bound is ripe: it
comes before all that are not, oldest first, and before everything younger of its own tenant. While
a tenant is `AHEAD` seconds of service before another that waits, its ripe requests wait like the
rest: a flood grows old without pushing others aside.

At most `PARKED` entries that wait for a warm replica are parked beside the lanes until
`warm_until`: every batch holds them besides its K, ranked as if they were in it, so they stand in
nobody's way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest
from math import inf

from policies.ledger import Entry

LANES = 8
PARKED = 8
"""Entries that may wait beside the lanes; all of them are looked at with every batch."""
AHEAD = 1.0
"""Seconds of the whole fleet's service, per unit of weight, by which a tenant whose requests are
ripe may be before the tenant that had least."""
Line = tuple[float, int, int, Entry]
LaneKey = tuple[str, str, str]


@dataclass(slots=True, eq=False)
class _Lane:
    tenant: str
    by_start: list[Line] = field(default_factory=list)
    by_work: list[Line] = field(default_factory=list)
    by_age: list[Line] = field(default_factory=list)
    waiting: int = 0


class WaitingRoom:
    """Held requests. `push`, `remove` and `expired` change it, `candidates` does not (beyond
    dropping dead lines).
    """

    def __init__(self, *, k_best: int, fairness: float, alpha_max: float) -> None:
        self._k = k_best
        self._fairness = fairness
        self._alpha_max = alpha_max
        self._lanes: dict[LaneKey, _Lane] = {}
        self._expiry: list[Line] = []
        self._age: list[Line] = []
        self._virtual: dict[str, float] = {}
        self._waiting_of: dict[str, int] = {}
        self._tickets = 0
        self._ordered: dict[int, Entry] = {}
        self._parked: dict[int, Entry] = {}
        self.work = 0.0
        """Predicted seconds of service that wait."""
        self.least_prompt = inf
        """No waiting prompt has fewer tokens; a lower bound, exact after each time it was empty."""

    def change(self, k_best: int, fairness: float, alpha_max: float) -> None:
        """Rank with other weights from now on."""
        self._k, self._fairness, self._alpha_max = k_best, fairness, alpha_max

    def __len__(self) -> int:
        return len(self._ordered)

    def oldest(self, count: int) -> list[Entry]:
        """The `count` entries whose patience ends, or ended, first."""
        return [line[3] for line in _peek(self._age, count)]

    def ripe(self, count: int, now: float) -> list[Entry]:
        """At most `count` entries past their patience that may claim a replica, oldest first.

        Of a tenant that is `AHEAD` of another that waits, none may.
        """
        if not self._lanes or self.oldest(1)[0].ripe >= now:
            return []
        lanes = self._first_lanes()
        least = min(self._virtual[lane.tenant] for lane in lanes)
        lines = [
            line
            for lane in lanes
            if self._virtual[lane.tenant] - least <= AHEAD
            for line in _peek(lane.by_age, count)
            if line[0] < now
        ]
        return [line[3] for line in nsmallest(count, lines)]

    def _first_lanes(self) -> list[_Lane]:
        """At most `LANES` lanes, least virtual time first where there are more."""
        lanes = list(self._lanes.values())
        if len(lanes) > LANES:
            lanes = nsmallest(LANES, lanes, key=lambda lane: self._virtual[lane.tenant])
        return lanes

    def push(self, entry: Entry) -> None:
        """Add an entry; its state is the caller's to set."""
        self._enter(entry)
        self._join_lane(entry)
        tenant = entry.request.tenant
        if self._waiting_of.get(tenant, 0) == 0:
            # A tenant that comes back does not spend the time it was away (VTC's lift).
            active = [self._virtual[t] for t, n in self._waiting_of.items() if n > 0]
            self._virtual[tenant] = max(self._virtual.get(tenant, 0.0), min(active, default=0.0))
        self._waiting_of[tenant] = self._waiting_of.get(tenant, 0) + 1
        self.work += entry.work
        self.least_prompt = min(self.least_prompt, entry.prompt)

    @property
    def may_park(self) -> bool:
        """Whether another entry may begin to wait beside the lanes."""
        return len(self._parked) < PARKED

    def park(self, entry: Entry) -> None:
        """Set a waiting entry beside the lanes until its `warm_until`."""
        if entry.ticket in self._parked:
            return
        del self._ordered[entry.ticket]
        self._enter(entry)  # under another ticket, so that its lines so far die
        self._leave_lane(entry)
        self._parked[entry.ticket] = entry

    def line_up(self, now: float) -> None:
        """Put parked entries whose wait is over into their lanes."""
        for entry in list(self._parked.values()):
            if entry.warm_until <= now:
                del self._parked[entry.ticket]
                self._join_lane(entry)

    @property
    def next_line_up(self) -> float:
        """When the next parked entry's wait is over, inf if none is parked."""
        return min((entry.warm_until for entry in self._parked.values()), default=inf)

    def _enter(self, entry: Entry) -> None:
        """A new ticket, and lines in what all lanes share."""
        self._tickets += 1
        ticket = entry.ticket = self._tickets
        self._ordered[ticket] = entry
        heappush(self._age, (entry.ripe, entry.order, ticket, entry))
        heappush(self._expiry, (entry.expires, entry.order, ticket, entry))

    def _join_lane(self, entry: Entry) -> None:
        key = (entry.request.tenant, entry.request.model, entry.slo_class.name)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(entry.request.tenant)
        lane.waiting += 1
        heappush(lane.by_start, (entry.start_by, entry.order, entry.ticket, entry))
        heappush(lane.by_work, (entry.work, entry.order, entry.ticket, entry))
        heappush(lane.by_age, (entry.ripe, entry.order, entry.ticket, entry))

    def _leave_lane(self, entry: Entry) -> None:
        """Its lines there are dead already."""
        key = (entry.request.tenant, entry.request.model, entry.slo_class.name)
        lane = self._lanes[key]
        lane.waiting -= 1
        if lane.waiting == 0:
            del self._lanes[key]
        else:
            for heap in (lane.by_start, lane.by_work, lane.by_age):
                _compact(heap, lane.waiting)

    def remove(self, entry: Entry) -> None:
        """Take an entry out; its lines die where they are."""
        if self._ordered.pop(entry.ticket, None) is None:
            return
        parked = self._parked.pop(entry.ticket, None) is not None
        entry.ticket = 0
        self._waiting_of[entry.request.tenant] -= 1
        if self._ordered:
            self.work -= entry.work
        else:
            self.work, self.least_prompt = 0.0, inf
        if not parked:
            self._leave_lane(entry)
        _compact(self._expiry, len(self._ordered))
        _compact(self._age, len(self._ordered))

    def charge(self, entry: Entry, share: float) -> None:
        """Count service given to the entry's tenant; `share` of its work in fleet seconds."""
        tenant = entry.request.tenant
        weight = entry.account.tenant.weight
        self._virtual[tenant] = self._virtual.get(tenant, 0.0) + share * entry.work / weight

    def expired(self, now: float) -> list[Entry]:
        """Entries whose waiting ends by `now`; they stay until removed."""
        found: list[Entry] = []
        while self._expiry and (self._expiry[0][0] <= now or _dead(self._expiry[0])):
            line = heappop(self._expiry)
            if not _dead(line):
                found.append(line[3])
        return found

    @property
    def next_expiry(self) -> float:
        """When the next waiting ends, inf if nothing waits."""
        while self._expiry and _dead(self._expiry[0]):
            heappop(self._expiry)
        return self._expiry[0][0] if self._expiry else inf

    def candidates(self, now: float, load: float) -> list[Entry]:
        """At most K entries, and the parked ones, in the present order; `load` in [0, 1] slides
        from deadline to shortest work.
        """
        if not self._ordered:
            return []
        virtual = self._virtual
        lanes = self._first_lanes()
        share = max(self._k // (2 * max(len(lanes), 1)), 1)
        union: dict[int, Entry] = {}
        for lane in lanes:
            for heap in (lane.by_start, lane.by_work):
                for line in _peek(heap, share):
                    union[line[2]] = line[3]
            if _peek(lane.by_age, 1)[0][0] < now:
                for line in _peek(lane.by_age, max(share, 2)):
                    union[line[2]] = line[3]
        parked = list(self._parked.values())
        tenants = [lane.tenant for lane in lanes] + [entry.request.tenant for entry in parked]
        least = min(virtual[tenant] for tenant in tenants)
        alpha = self._alpha_max * load
        fairness = self._fairness

        def rank(entry: Entry) -> tuple[int, float, float, int]:
            ahead = virtual[entry.request.tenant] - least
            ripe = entry.ripe
            if ripe < now and ahead <= AHEAD:
                return (0, 0.0, ripe, entry.order)
            # What is ripe is due: age beyond that buys nothing from other tenants.
            key = now if ripe < now else max(entry.start_by, now) + alpha * entry.work
            return (1, key + fairness * ahead, ripe, entry.order)

        chosen = sorted(union.values(), key=rank)[: self._k]
        return sorted(chosen + parked, key=rank) if parked else chosen


def _dead(line: Line) -> bool:
    return line[3].ticket != line[2]


def _peek(heap: list[Line], count: int) -> list[Line]:
    """The first `count` live lines, best first, by walking the heap from its root; dead roots are
    dropped.
    """
    while heap and _dead(heap[0]):
        heappop(heap)
    if not heap:
        return []
    live = [heap[0]]
    size = len(heap)
    if count == 1 or size == 1:
        return live
    frontier = [(heap[i], i) for i in (1, 2) if i < size]
    heapify(frontier)
    while frontier and len(live) < count:
        line, at = heappop(frontier)
        if not _dead(line):
            live.append(line)
        for child in (2 * at + 1, 2 * at + 2):
            if child < size:
                heappush(frontier, (heap[child], child))
    return live


def _compact(heap: list[Line], live: int) -> None:
    """Rebuild a heap in which dead lines outnumber the live ones."""
    if len(heap) > 2 * live + 64:
        heap[:] = [line for line in heap if not _dead(line)]
        heapify(heap)
