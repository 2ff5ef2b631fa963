"""The waiting room of `policies.queue` and the claims of `policies.fleet_state` over arrays, for
the compiled loop: the same order, entry by entry.

What belongs to one request stands in one record. Where the live queue lets lines die in its heaps,
here a request knows its places and leaves them at once. Requests of one lane have one patience, so
the order of their age is that of their arrival: a linked list instead of a heap. `NONE` is -1
(CORE section 3.13). Compiled with the loop and cached there.
"""
# Inside compiled code numba, not mypy, knows the types of array elements.
# mypy: disable-error-code="arg-type, no-any-return, return-value, assignment, call-overload"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from domain.columns import FleetColumns, Floats, Ints, Routes
from policies.queue import AHEAD, LANES

NONE = -1
K_BEST = 8
Records = NDArray[np.void]


def record(**fields: str) -> np.dtype[np.void]:
    """A record of floats (f), integers (i) and flags (b)."""
    kinds = {"f": np.float64, "i": np.int64, "b": np.bool_}
    return np.dtype([(name, kinds[k]) for k, names in fields.items() for name in names.split()])


REQUEST = record(
    # limits, forecasts and times in seconds and tokens; start_by, work, expires: keys of the queue
    f="arrival prompt expected ttft tpot e2e think arrived sent first last start_by work expires "
    "ripe",
    # place in its heaps, neighbours in its lane, the replica it claims
    i="tokens output tie class_id tenant lane session order start_place work_place expiry_place "
    "next_in previous_in claim route slot verdict",
    # feasible: an idle fleet would serve it in time
    b="root queued feasible",
)
"""One request: as it comes, and how it went."""
CLASS = record(f="weight quality patience max_wait", i="rank", b="sheddable")
TENANT = record(f="weight virtual", i="waiting_of")
LANE = record(i="tenant size born head tail")
"""Requests of one tenant and class that wait, oldest at the head; `born` orders lanes by when they
were last made.
"""
TOTAL = record(f="work least_prompt", i="waiting made expiring claims")
"""What waits: seconds of work, least prompt, requests; lanes made; requests that can expire; claims
on windows.
"""


class Room(NamedTuple):
    """The waiting room and its scratch. L lanes, Q places, C classes, T tenants, m replicas."""

    total: Records  # (1,) of TOTAL
    classes: Records  # (C,) of CLASS
    tenants: Records  # (T,) of TENANT
    lanes: Records  # (L,) of LANE
    by_start: Ints  # (L, Q) heaps of requests
    by_work: Ints  # (L, Q)
    by_expiry: Ints  # (Q,)
    claimed: Ints  # (m,) tie of the request that closed the window
    claimant: Ints  # (m,) that request
    claim_until: Floats  # (m,)
    # scratch
    chosen: Ints  # (LANES,) lanes
    cursor: Ints  # (LANES,)
    frontier: Ints
    union: Ints
    late: Ints
    key: Floats


def waiting_room(classes: Records, tenants: Records, places: int, replicas: int) -> Room:
    """An empty room for at most `places` requests; classes and tenants as in their records."""
    lanes, union = np.zeros(len(tenants) * len(classes), LANE), 3 * K_BEST + 4 * LANES
    lanes["tenant"] = np.arange(len(lanes)) // len(classes)
    lanes["head"] = lanes["tail"] = NONE
    total = np.zeros(1, TOTAL)
    total["least_prompt"] = np.inf
    return Room(
        total=total,
        classes=classes,
        tenants=tenants,
        lanes=lanes,
        by_start=np.zeros((len(lanes), places), np.int64),
        by_work=np.zeros((len(lanes), places), np.int64),
        by_expiry=np.zeros(places, np.int64),
        claimed=np.full(replicas, NONE, np.int64),
        claimant=np.full(replicas, NONE, np.int64),
        claim_until=np.full(replicas, np.inf),
        chosen=np.zeros(LANES, np.int64),
        cursor=np.zeros(LANES, np.int64),
        frontier=np.zeros(2 * K_BEST + 4, np.int64),
        union=np.zeros(union, np.int64),
        late=np.zeros(union, np.int64),
        key=np.zeros(union),
    )


# ---- heaps with exact removal

START, WORK, EXPIRY = 0, 1, 2
"""Which of a request's three keys a heap is ordered by."""


@njit(error_model="numpy")
def before(rows: Records, which: int, a: int, b: int) -> bool:
    """Whether request a comes before b."""
    if which == START:
        x, y = rows[a].start_by, rows[b].start_by
    elif which == WORK:
        x, y = rows[a].work, rows[b].work
    else:
        x, y = rows[a].expires, rows[b].expires
    return x < y or (x == y and rows[a].order < rows[b].order)


@njit(error_model="numpy")
def put(rows: Records, which: int, heap: Ints, i: int, a: int) -> None:
    """Request a stands at place i of the heap."""
    heap[i] = a
    if which == START:
        rows[a].start_place = i
    elif which == WORK:
        rows[a].work_place = i
    else:
        rows[a].expiry_place = i


@njit(error_model="numpy")
def place_in(rows: Records, which: int, a: int) -> int:
    """Place of request a in a heap of that kind."""
    if which == START:
        return rows[a].start_place
    if which == WORK:
        return rows[a].work_place
    return rows[a].expiry_place


@njit(error_model="numpy")
def rise(rows: Records, which: int, heap: Ints, i: int) -> None:
    """Restore the heap upwards from i."""
    a = heap[i]
    while i > 0:
        p = (i - 1) // 2
        if not before(rows, which, a, heap[p]):
            break
        put(rows, which, heap, i, heap[p])
        i = p
    put(rows, which, heap, i, a)


@njit(error_model="numpy")
def sink(rows: Records, which: int, heap: Ints, n: int, i: int) -> None:
    """Restore the heap of n downwards from i."""
    a = heap[i]
    while True:
        c = 2 * i + 1
        if c >= n:
            break
        if c + 1 < n and before(rows, which, heap[c + 1], heap[c]):
            c += 1
        if not before(rows, which, heap[c], a):
            break
        put(rows, which, heap, i, heap[c])
        i = c
    put(rows, which, heap, i, a)


@njit(error_model="numpy")
def take_out(rows: Records, which: int, heap: Ints, n: int, a: int) -> None:
    """Remove request a from the heap of n."""
    i = place_in(rows, which, a)
    last = heap[n - 1]
    if last != a:
        heap[i] = last
        sink(rows, which, heap, n - 1, i)
        rise(rows, which, heap, place_in(rows, which, last))
    if which == START:
        rows[a].start_place = NONE
    elif which == WORK:
        rows[a].work_place = NONE
    else:
        rows[a].expiry_place = NONE


@njit(error_model="numpy")
def gather(union: Ints, found: int, i: int) -> int:
    """Append request i to the first `found` of union unless it is there; how many it holds."""
    for k in range(found):
        if union[k] == i:
            return found
    union[found] = i
    return found + 1


@njit(error_model="numpy")
def add_first(
    rows: Records, which: int, heap: Ints, n: int, count: int, frontier: Ints, out: Ints, found: int
) -> int:
    """Gather the `count` first requests of a heap of n; returns how many out holds."""
    frontier[0] = 0
    width = 1
    for _ in range(min(count, n)):
        best = 0
        for k in range(1, width):
            if before(rows, which, heap[frontier[k]], heap[frontier[best]]):
                best = k
        at = frontier[best]
        frontier[best] = frontier[width - 1]
        width -= 1
        found = gather(out, found, heap[at])
        for c in (2 * at + 1, 2 * at + 2):
            if c < n:
                frontier[width] = c
                width += 1
    return found


# ---- the waiting room


@njit(error_model="numpy")
def push(rows: Records, q: Room, i: int) -> None:
    """Add request i; one that is put back must have been removed last."""
    lane = rows[i].lane
    n = q.lanes[lane].size
    if n == 0:
        q.total[0].made += 1
        q.lanes[lane].born = q.total[0].made
    q.by_start[lane, n] = i
    rise(rows, START, q.by_start[lane], n)
    q.by_work[lane, n] = i
    rise(rows, WORK, q.by_work[lane], n)
    q.lanes[lane].size = n + 1
    e = q.total[0].expiring
    q.by_expiry[e] = i
    rise(rows, EXPIRY, q.by_expiry, e)
    q.total[0].expiring = e + 1
    older = q.lanes[lane].tail
    if older != NONE and rows[older].order > rows[i].order:
        older = rows[i].previous_in  # put back: its neighbours are those it left
    younger = q.lanes[lane].head if older == NONE else rows[older].next_in
    link(rows, q, lane, older, i)
    link(rows, q, lane, i, younger)
    t = rows[i].tenant
    if q.tenants[t].waiting_of == 0:
        least, some = 0.0, False
        for k in range(q.tenants.shape[0]):
            if q.tenants[k].waiting_of > 0 and (not some or q.tenants[k].virtual < least):
                least, some = q.tenants[k].virtual, True
        q.tenants[t].virtual = max(q.tenants[t].virtual, least)
    q.tenants[t].waiting_of += 1
    rows[i].queued = True
    q.total[0].waiting += 1
    q.total[0].work += rows[i].work
    q.total[0].least_prompt = min(q.total[0].least_prompt, rows[i].prompt)


@njit(error_model="numpy")
def link(rows: Records, q: Room, lane: int, a: int, b: int) -> None:
    """In the lane, b stands right after a; either may be an end of it, `NONE`."""
    if a == NONE:
        q.lanes[lane].head = b
    else:
        rows[a].next_in = b
    if b == NONE:
        q.lanes[lane].tail = a
    else:
        rows[b].previous_in = a


@njit(error_model="numpy")
def remove(rows: Records, q: Room, i: int) -> None:
    """Take request i out if it waits."""
    if not rows[i].queued:
        return
    rows[i].queued = False
    lane = rows[i].lane
    n = q.lanes[lane].size
    take_out(rows, START, q.by_start[lane], n, i)
    take_out(rows, WORK, q.by_work[lane], n, i)
    q.lanes[lane].size = n - 1
    if rows[i].expiry_place != NONE:
        take_out(rows, EXPIRY, q.by_expiry, q.total[0].expiring, i)
        q.total[0].expiring -= 1
    link(rows, q, lane, rows[i].previous_in, rows[i].next_in)
    q.tenants[rows[i].tenant].waiting_of -= 1
    q.total[0].waiting -= 1
    if q.total[0].waiting > 0:
        q.total[0].work -= rows[i].work
    else:
        q.total[0].work = 0.0
        q.total[0].least_prompt = np.inf


@njit(error_model="numpy")
def expired(rows: Records, q: Room, now: float, out: Ints) -> int:
    """Requests whose waiting ends by `now` into out; they stay until removed. Returns how many."""
    n = 0
    while q.total[0].expiring > 0 and rows[q.by_expiry[0]].expires <= now:
        out[n] = q.by_expiry[0]
        take_out(rows, EXPIRY, q.by_expiry, q.total[0].expiring, out[n])
        q.total[0].expiring -= 1
        n += 1
    return n


@njit(error_model="numpy")
def riper(rows: Records, a: int, b: int) -> bool:
    """Whether a's patience ends before b's; `NONE` comes last."""
    if a == NONE:
        return False
    if b == NONE:
        return True
    x, y = rows[a].ripe, rows[b].ripe
    return x < y or (x == y and rows[a].order < rows[b].order)


@njit(error_model="numpy")
def ripest(rows: Records, q: Room) -> int:
    """The request whose patience ends, or ended, first; `NONE` if nothing waits."""
    best = np.int64(NONE)
    for lane in range(q.lanes.shape[0]):
        if riper(rows, q.lanes[lane].head, best):
            best = q.lanes[lane].head
    return best


@njit(error_model="numpy")
def first_lanes(q: Room) -> int:
    """At most `LANES` lanes into `q.chosen`, least virtual time first where there are more."""
    found = 0
    for lane in range(q.lanes.shape[0]):
        if q.lanes[lane].size == 0:
            continue
        virtual, at = q.tenants[q.lanes[lane].tenant].virtual, found
        while at > 0:
            other = q.chosen[at - 1]
            v = q.tenants[q.lanes[other].tenant].virtual
            if v < virtual or (v == virtual and q.lanes[other].born < q.lanes[lane].born):
                break
            if at < LANES:
                q.chosen[at] = other
            at -= 1
        if at < LANES:
            q.chosen[at] = lane
            found = min(found + 1, LANES)
    return found


@njit(error_model="numpy")
def candidates(rows: Records, q: Room, fairness: float, alpha: float, now: float, out: Ints) -> int:
    """At most K requests in the present order into out; returns how many. `alpha` is the weight of
    work at the present load.
    """
    lanes = first_lanes(q)
    if lanes == 0:
        return 0
    share = max(K_BEST // (2 * lanes), 1)
    least = q.tenants[q.lanes[q.chosen[0]].tenant].virtual
    found = 0
    for k in range(lanes):
        lane = q.chosen[k]
        n = q.lanes[lane].size
        found = add_first(rows, START, q.by_start[lane], n, share, q.frontier, q.union, found)
        found = add_first(rows, WORK, q.by_work[lane], n, share, q.frontier, q.union, found)
        i = q.lanes[lane].head
        if rows[i].ripe < now:
            for _ in range(max(share, 2)):
                if i == NONE:
                    break
                found = gather(q.union, found, i)
                i = rows[i].next_in
    for k in range(found):
        i = q.union[k]
        ahead = q.tenants[rows[i].tenant].virtual - least
        ripe = rows[i].ripe < now
        late, key = 1, now
        if ripe and ahead <= AHEAD:
            late, key = 0, 0.0
        else:
            if not ripe:
                key = max(rows[i].start_by, now) + alpha * rows[i].work
            key += fairness * ahead
        at = k
        while at > 0:
            j = out[at - 1]
            if q.late[at - 1] < late:
                break
            if q.late[at - 1] == late and (
                q.key[at - 1] < key or (q.key[at - 1] == key and riper(rows, j, i))
            ):
                break
            out[at], q.late[at], q.key[at] = j, q.late[at - 1], q.key[at - 1]
            at -= 1
        out[at], q.late[at], q.key[at] = i, late, key
    return min(found, K_BEST)


# ---- claims on windows


@njit(error_model="numpy")
def release_claim(rows: Records, q: Room, i: int) -> None:
    """Request i claims nothing any more."""
    r = rows[i].claim
    if r != NONE:
        q.claimed[r] = NONE
        q.claimant[r] = NONE
        q.claim_until[r] = np.inf
        q.total[0].claims -= 1
        rows[i].claim = NONE


@njit(error_model="numpy")
def least_held(q: Room, fl: FleetColumns, rt: Routes) -> int:
    """The usable replica without a claim that has reserved least, `NONE` if there is none."""
    best = np.int64(NONE)
    for c in range(rt.decode.shape[0]):
        r = rt.decode[c]
        if not fl.usable[r] or q.claimed[r] != NONE:
            continue
        if (
            best == NONE
            or fl.kv_used[r] < fl.kv_used[best]
            or (fl.kv_used[r] == fl.kv_used[best] and r < best)
        ):
            best = r
    return best


@njit(error_model="numpy")
def press_claims(rows: Records, q: Room, fl: FleetColumns, rt: Routes, now: float) -> None:
    """Requests past their patience each close one replica's window for others, oldest first, at
    most as many as there are replicas; of a tenant that is `AHEAD`, none may.
    """
    m = q.claimant.shape[0]
    for r in range(m):
        if q.claimant[r] != NONE and (now >= q.claim_until[r] or not fl.usable[r]):
            release_claim(rows, q, q.claimant[r])
    first = ripest(rows, q)
    if first == NONE or rows[first].ripe >= now:
        return
    best = least_held(q, fl, rt)
    lanes = first_lanes(q)
    least = q.tenants[q.lanes[q.chosen[0]].tenant].virtual
    for k in range(lanes):
        q.cursor[k] = q.lanes[q.chosen[k]].head
        if q.tenants[q.lanes[q.chosen[k]].tenant].virtual - least > AHEAD:
            q.cursor[k] = NONE
    for _ in range(m):
        if best == NONE:
            return
        at = 0
        for k in range(1, lanes):
            if riper(rows, q.cursor[k], q.cursor[at]):
                at = k
        i = q.cursor[at]
        if i == NONE or rows[i].ripe >= now:
            return
        q.cursor[at] = rows[i].next_in
        patience = q.classes[rows[i].class_id].patience
        if now - rows[i].arrived <= patience:
            return
        if rows[i].claim == NONE:
            rows[i].claim = best
            q.claimed[best] = rows[i].tie
            q.claimant[best] = i
            q.claim_until[best] = now + patience
            q.total[0].claims += 1
            best = least_held(q, fl, rt)
