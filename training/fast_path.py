"""The compiled loop: replica physics, the core's array functions and a scorer's kernel in one
function.

What `training.virtual` does with the live core, this does without Python: the same physics, the
same kernels of `policies.kernels`, the same scorer, the same estimates, and the core's queue
written once more over arrays, so that decisions are equal, request by request (a test says so). It
knows one gateway, no quotas, no retries, no deaths, no learning and no prefix blocks; `supports`
tells whether a case is within that, and callers take the live core where it is not.

Scorers come in as first-class functions of one signature, so the loop is compiled once for all of
them and cached. What belongs to one request stands in one record: fewer arrays to hand over, and
one cache line or two to read. `NONE` is -1 (CORE section 3.13).
"""
# Inside compiled code numba, not mypy, knows the types of array elements.
# mypy: disable-error-code="arg-type, no-any-return, return-value, assignment, call-overload"

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from backends.sim import replica as sim
from domain.columns import (
    REQUEST_FLOATS,
    Draws,
    EstimateColumns,
    FleetColumns,
    Floats,
    Ints,
    Mask,
    RequestColumns,
    Routes,
    Scores,
    estimate_columns,
    fleet_columns,
    request_columns,
    route_table,
    scores,
)
from domain.length import QUANTILE_GRID
from policies import kernels
from policies.config import PolicyConfig
from policies.factory import build_scorer
from policies.queue import LANES
from predictors.joint import Reliability, calibrate_into
from predictors.roofline import roofline_into
from training.informed import CHUNK, InformedEstimator
from training.measures import ABSENT, MET, MISSED, Run
from training.scenario import Case
from training.virtual import PULL, tie

NONE = -1
K_BEST = 8
READ, TELL = 0, 1
Records = NDArray[np.void]


def _record(**fields: str) -> np.dtype[np.void]:
    """A record of floats (f), integers (i) and flags (b)."""
    kinds = {"f": np.float64, "i": np.int64, "b": np.bool_}
    return np.dtype([(name, kinds[k]) for k, names in fields.items() for name in names.split()])


REQUEST = _record(
    # limits, forecasts and times in seconds and tokens; start_by, work, expires: keys of the queue
    f="arrival prompt expected ttft tpot e2e think arrived sent first last start_by work expires",
    # place in its heaps, neighbours in order of coming, the replica it claims
    i="tokens output tie class_id tenant order start_place work_place expiry_place next_in "
    "previous_in claim route slot verdict",
    b="root queued",
)
"""One request: as it comes, and how it went."""
CLASS = _record(f="weight quality patience max_wait", i="rank", b="sheddable")
TENANT = _record(f="weight virtual", i="waiting_of")
LANE = _record(i="size born")
"""Requests of one tenant and class that wait; `born` orders lanes by when they were last made."""
STATE = _record(
    f="work least_prompt now",
    i="waiting made expiring oldest newest choices slots open admitted timers serial",
)
"""The counters: what waits (seconds of work, least prompt, requests, ends of their order), the
core's (choices made, slots given, requests open and admitted), the timers', and the time of the
core's last event.
"""
TIMER = _record(f="at measured running waiting share", i="serial kind replica")


class World(NamedTuple):
    """Everything but requests, batch, fleet and physics. L lanes, Q places, n requests, C classes,
    T tenants, m replicas, c routes.
    """

    state: Records  # (1,) of STATE
    classes: Records  # (C,) of CLASS
    tenants: Records  # (T,) of TENANT
    lanes: Records  # (L,) of LANE
    timers: Records  # a heap of TIMER by (at, serial)
    by_start: Ints  # (L, Q) heaps of requests
    by_work: Ints  # (L, Q)
    by_expiry: Ints  # (Q,)
    allowed: Mask  # (C, c) routes that reach the quality floor
    length_q: Floats  # (n, Q)
    follower_start: Ints  # (n + 1,) requests that follow this one
    follower: Ints
    request_of_slot: Ints  # (n + 1,)
    claimed: Ints  # (m,) tie of the request that closed the window
    claimant: Ints  # (m,) that request
    claim_until: Floats  # (m,)
    measured_at: Floats  # (m,)


class Beliefs(NamedTuple):
    """The estimator's numbers: scales and spread (m,), reliability curve, quality (c,)."""

    prefill_scale: Floats
    decode_scale: Floats
    spread: Floats
    curve: Floats
    quality: Floats


class Rules(NamedTuple):
    """The core's options, and how the monitor polls; seconds."""

    shed_below: float
    explore: float
    within: float
    queue_limit: int
    fairness: float
    alpha_max: float
    seed: int
    estimates: bool
    draws: bool
    by_value: bool
    every: float
    delay: float


class Batch(NamedTuple):
    """Room for K candidates, and scratch."""

    requests: RequestColumns
    estimates: EstimateColumns
    allowed: Mask
    room: Mask
    draws: Draws
    scores: Scores
    who: Ints
    union: Ints
    late: Ints
    key: Floats
    frontier: Ints
    expired: Ints  # (Q,)


# ---- heaps with exact removal

START, WORK, EXPIRY = 0, 1, 2
"""Which of a request's three keys a heap is ordered by."""


@njit(cache=True, error_model="numpy")
def before(rows: Records, which: int, a: int, b: int) -> bool:
    """Whether request a comes before b."""
    if which == START:
        x, y = rows[a].start_by, rows[b].start_by
    elif which == WORK:
        x, y = rows[a].work, rows[b].work
    else:
        x, y = rows[a].expires, rows[b].expires
    return x < y or (x == y and rows[a].order < rows[b].order)


@njit(cache=True, error_model="numpy")
def put(rows: Records, which: int, heap: Ints, i: int, a: int) -> None:
    """Request a stands at place i of the heap."""
    heap[i] = a
    if which == START:
        rows[a].start_place = i
    elif which == WORK:
        rows[a].work_place = i
    else:
        rows[a].expiry_place = i


@njit(cache=True, error_model="numpy")
def place_in(rows: Records, which: int, a: int) -> int:
    """Place of request a in a heap of that kind."""
    if which == START:
        return rows[a].start_place
    if which == WORK:
        return rows[a].work_place
    return rows[a].expiry_place


@njit(cache=True, error_model="numpy")
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


@njit(cache=True, error_model="numpy")
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


@njit(cache=True, error_model="numpy")
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


@njit(cache=True, error_model="numpy")
def add_smallest(
    rows: Records, which: int, heap: Ints, n: int, count: int, frontier: Ints, out: Ints, found: int
) -> int:
    """Append the `count` first requests of a heap of n to out unless they are there; returns how
    many out holds.
    """
    if n == 0:
        return found
    frontier[0] = 0
    width = 1
    while width > 0 and count > 0:
        best = 0
        for k in range(1, width):
            if before(rows, which, heap[frontier[k]], heap[frontier[best]]):
                best = k
        at = frontier[best]
        frontier[best] = frontier[width - 1]
        width -= 1
        seen = False
        for k in range(found):
            if out[k] == heap[at]:
                seen = True
                break
        if not seen:
            out[found] = heap[at]
            found += 1
        count -= 1
        for c in (2 * at + 1, 2 * at + 2):
            if c < n:
                frontier[width] = c
                width += 1
    return found


# ---- the waiting room (policies.queue over arrays)


@njit(cache=True, error_model="numpy")
def push(rows: Records, w: World, lane: int, i: int) -> None:
    """Add request i."""
    n = w.lanes[lane].size
    if n == 0:
        w.state[0].made += 1
        w.lanes[lane].born = w.state[0].made
    w.by_start[lane, n] = i
    rise(rows, START, w.by_start[lane], n)
    w.by_work[lane, n] = i
    rise(rows, WORK, w.by_work[lane], n)
    w.lanes[lane].size = n + 1
    e = w.state[0].expiring
    w.by_expiry[e] = i
    rise(rows, EXPIRY, w.by_expiry, e)
    w.state[0].expiring = e + 1
    t = rows[i].tenant
    if w.tenants[t].waiting_of == 0:
        least, some = 0.0, False
        for k in range(w.tenants.shape[0]):
            if w.tenants[k].waiting_of > 0 and (not some or w.tenants[k].virtual < least):
                least, some = w.tenants[k].virtual, True
        w.tenants[t].virtual = max(w.tenants[t].virtual, least)
    w.tenants[t].waiting_of += 1
    rows[i].queued = True
    rows[i].previous_in = w.state[0].newest
    rows[i].next_in = NONE
    if w.state[0].newest == NONE:
        w.state[0].oldest = i
    else:
        rows[w.state[0].newest].next_in = i
    w.state[0].newest = i
    w.state[0].waiting += 1
    w.state[0].work += rows[i].work
    w.state[0].least_prompt = min(w.state[0].least_prompt, rows[i].prompt)


@njit(cache=True, error_model="numpy")
def remove(rows: Records, w: World, lane: int, i: int) -> None:
    """Take request i out."""
    if not rows[i].queued:
        return
    rows[i].queued = False
    n = w.lanes[lane].size
    take_out(rows, START, w.by_start[lane], n, i)
    take_out(rows, WORK, w.by_work[lane], n, i)
    w.lanes[lane].size = n - 1
    if rows[i].expiry_place != NONE:
        take_out(rows, EXPIRY, w.by_expiry, w.state[0].expiring, i)
        w.state[0].expiring -= 1
    w.tenants[rows[i].tenant].waiting_of -= 1
    a, b = rows[i].previous_in, rows[i].next_in
    if a == NONE:
        w.state[0].oldest = b
    else:
        rows[a].next_in = b
    if b == NONE:
        w.state[0].newest = a
    else:
        rows[b].previous_in = a
    w.state[0].waiting -= 1
    if w.state[0].waiting > 0:
        w.state[0].work -= rows[i].work
    else:
        w.state[0].work = 0.0
        w.state[0].least_prompt = np.inf


@njit(cache=True, error_model="numpy")
def release_claim(rows: Records, w: World, i: int) -> None:
    """Request i claims nothing any more."""
    r = rows[i].claim
    if r != NONE:
        w.claimed[r] = NONE
        w.claimant[r] = NONE
        w.claim_until[r] = np.inf
        rows[i].claim = NONE


@njit(cache=True, error_model="numpy")
def press_claims(rows: Records, w: World, fl: FleetColumns, rt: Routes, now: float) -> None:
    """Requests past their patience each close one replica's window for others."""
    m = w.claimant.shape[0]
    for r in range(m):
        if w.claimant[r] != NONE and (now >= w.claim_until[r] or not fl.usable[r]):
            release_claim(rows, w, w.claimant[r])
    i = w.state[0].oldest
    for _ in range(m):
        if i == NONE or now - rows[i].arrived <= w.classes[rows[i].class_id].patience:
            break
        if rows[i].claim == NONE:
            best = NONE
            for c in range(rt.decode.shape[0]):
                r = rt.decode[c]
                if not fl.usable[r] or w.claimed[r] != NONE:
                    continue
                if (
                    best == NONE
                    or fl.kv_used[r] < fl.kv_used[best]
                    or (fl.kv_used[r] == fl.kv_used[best] and r < best)
                ):
                    best = r
            if best != NONE:
                rows[i].claim = best
                w.claimed[best] = rows[i].tie
                w.claimant[best] = i
                w.claim_until[best] = now + w.classes[rows[i].class_id].patience
        i = rows[i].next_in


@njit(cache=True, error_model="numpy")
def candidates(rows: Records, w: World, b: Batch, rules: Rules, replicas: int, now: float) -> int:
    """At most K requests in the present order into b.who; returns how many."""
    lanes = w.lanes.shape[0]
    classes = w.classes.shape[0]
    live = 0
    for lane in range(lanes):
        if w.lanes[lane].size > 0:
            live += 1
    chosen = min(live, LANES)
    share = max(K_BEST // (2 * chosen), 1)
    found = 0
    least = np.inf
    last_virtual, last_born = -np.inf, np.int64(-1)
    for _ in range(chosen):
        # the next lane by (virtual time, age), all of them if there are few
        best = NONE
        for lane in range(lanes):
            if w.lanes[lane].size == 0:
                continue
            v, born = w.tenants[lane // classes].virtual, w.lanes[lane].born
            if v < last_virtual or (v == last_virtual and born <= last_born):
                continue
            if (
                best == NONE
                or v < w.tenants[best // classes].virtual
                or (v == w.tenants[best // classes].virtual and born < w.lanes[best].born)
            ):
                best = lane
        last_virtual, last_born = w.tenants[best // classes].virtual, w.lanes[best].born
        least = min(least, last_virtual)
        n = w.lanes[best].size
        found = add_smallest(rows, START, w.by_start[best], n, share, b.frontier, b.union, found)
        found = add_smallest(rows, WORK, w.by_work[best], n, share, b.frontier, b.union, found)
    oldest = w.state[0].oldest
    seen = False
    for k in range(found):
        if b.union[k] == oldest:
            seen = True
    if not seen:
        b.union[found] = oldest
        found += 1
    alpha = rules.alpha_max * min(w.state[0].work / replicas, 1.0)
    count = 0
    for k in range(found):
        i = b.union[k]
        late, key = 1, 0.0
        if now - rows[i].arrived > w.classes[rows[i].class_id].patience:
            late = 0
        else:
            key = rows[i].start_by + alpha * rows[i].work
            key += rules.fairness * (w.tenants[rows[i].tenant].virtual - least)
        at = count
        while at > 0:
            j = b.who[at - 1]
            if b.late[at - 1] < late:
                break
            if b.late[at - 1] == late and (
                b.key[at - 1] < key or (b.key[at - 1] == key and rows[j].order < rows[i].order)
            ):
                break
            b.who[at], b.late[at], b.key[at] = j, b.late[at - 1], b.key[at - 1]
            at -= 1
        b.who[at], b.late[at], b.key[at] = i, late, key
        count += 1
    return min(count, K_BEST)


# ---- choosing and booking (policies.chooser over arrays)


@njit(cache=True, error_model="numpy")
def fill_row(b: Batch, rows: Records, w: World, k: int, i: int) -> None:
    """Write request i into row k of the batch."""
    cls = rows[i].class_id
    rq = b.requests
    rq.prompt[k] = rows[i].prompt
    rq.expected[k] = rows[i].expected
    rq.arrived[k] = rows[i].arrived
    rq.ttft[k] = rows[i].ttft
    rq.tpot[k] = rows[i].tpot
    rq.e2e[k] = rows[i].e2e
    rq.quality[k] = w.classes[cls].quality
    rq.weight[k] = w.classes[cls].weight
    rq.class_id[k] = w.classes[cls].rank
    rq.tie[k] = rows[i].tie
    rq.length_q[k] = w.length_q[i]
    b.allowed[k] = w.allowed[cls]


@njit(cache=True, error_model="numpy")
def first_rows(
    b: Batch, n: int
) -> tuple[RequestColumns, EstimateColumns, Mask, Mask, Draws, Scores]:
    """The batch's first n rows."""
    r, e, s = b.requests, b.estimates, b.scores
    rq = RequestColumns(
        r.prompt[:n], r.max_tokens[:n], r.expected[:n], r.length_q[:n], r.arrived[:n], r.ttft[:n],
        r.tpot[:n], r.e2e[:n], r.quality[:n], r.class_id[:n], r.weight[:n], r.tie[:n],
    )  # fmt: skip
    es = EstimateColumns(
        e.cached[:n], e.sticky[:n], e.wait[:n], e.p_slo[:n], e.p_raw[:n], e.quality[:n],
        e.ttft[:n], e.tpot[:n],
    )  # fmt: skip
    sc = Scores(s.route[:n], s.hold[:n], s.shed[:n])
    return rq, es, b.allowed[:n], b.room[:n], b.draws[:n], sc


@njit(cache=True, error_model="numpy")
def choose(
    kernel: Any,
    params: Floats,
    b: Batch,
    rows: Records,
    w: World,
    fl: FleetColumns,
    rt: Routes,
    be: Beliefs,
    rules: Rules,
    n: int,
    now: float,
) -> tuple[int, int, bool]:
    """(index among b.who, route, whether to refuse for want of hope); (NONE, NONE, False) if
    nothing has room.
    """
    for k in range(n):
        fill_row(b, rows, w, k, b.who[k])
    rq, es, allowed, room, draws, sc = first_rows(b, n)
    if not kernels.room_into(rq, fl, rt, allowed, w.claimed, w.measured_at, now, room):
        return NONE, NONE, False
    if rules.estimates:
        roofline_into(rq, fl, rt, room, be.prefill_scale, be.decode_scale, be.spread, now, es)
        calibrate_into(be.curve, room, es.p_raw, es.p_slo)
        for k in range(n):
            for c in range(room.shape[1]):
                if room[k, c]:
                    es.quality[k, c] = be.quality[c]
    w.state[0].choices += 1
    if rules.draws:
        kernels.draw_into(rules.seed, w.state[0].choices, draws)
    sc.route[:] = -np.inf
    kernel(params, rq, fl, rt, es, room, draws, now, sc)
    if rules.by_value:
        i, c = kernels.best_pair(sc.route, room, rq.tie)
    else:
        i, c = kernels.first_fit(sc.route, room, rq.tie)
    if i == NONE:
        return NONE, NONE, False
    who = b.who[i]
    cls = rows[who].class_id
    chance = kernels.best_chance(room[i], es.p_slo[i]) if rules.estimates else 1.0
    if rules.explore > 0.0 and w.classes[cls].rank > 0:
        c, _ = kernels.explored(
            room[i],
            es.p_slo[i],
            c,
            rules.explore,
            rules.within,
            kernels.uniform(rules.seed, w.state[0].choices, -1),
            kernels.uniform(rules.seed, w.state[0].choices, -2),
        )
    hopeless = False
    limited = min(rows[who].ttft, rows[who].tpot, rows[who].e2e) < np.inf
    if chance < rules.shed_below and w.classes[cls].sheddable and limited:
        hopeless = kernels.uniform(rules.seed, w.state[0].choices, -3) >= chance / rules.shed_below
    return i, c, hopeless


@njit(cache=True, error_model="numpy")
def shed(rows: Records, w: World, classes: int, i: int) -> None:
    """Request i is refused after it was admitted."""
    remove(rows, w, rows[i].tenant * classes + rows[i].class_id, i)
    release_claim(rows, w, i)
    rows[i].verdict = MISSED
    w.state[0].open -= 1


@njit(cache=True, error_model="numpy")
def commit(
    rows: Records,
    w: World,
    fl: FleetColumns,
    rt: Routes,
    ph: sim.Physics,
    dirty: Ints,
    i: int,
    c: int,
    now: float,
) -> None:
    """Book route c for request i and send it."""
    d, p = rt.decode[c], rt.prefill[c]
    w.state[0].slots += 1
    slot = w.state[0].slots
    kernels.book(
        fl,
        d,
        p,
        slot,
        rows[i].prompt,
        rows[i].prompt,
        rows[i].expected,
        rows[i].tpot,
        rows[i].arrived + rows[i].ttft,
        rows[i].arrived + rows[i].e2e,
        now,
    )
    release_claim(rows, w, i)
    t = rows[i].tenant
    w.tenants[t].virtual += 1.0 / fl.running.shape[0] * rows[i].work / w.tenants[t].weight
    rows[i].sent = now
    rows[i].route = c
    rows[i].slot = slot
    w.request_of_slot[slot] = i
    sim.set_job(ph, i, rows[i].tokens, rows[i].output, NONE if p == d else d, 0, 0)
    sim.enter(ph, p, i, now)
    dirty[p] = 1


@njit(cache=True, error_model="numpy")
def release(
    kernel: Any,
    params: Floats,
    b: Batch,
    rows: Records,
    w: World,
    fl: FleetColumns,
    win: kernels.Windows,
    rt: Routes,
    be: Beliefs,
    rules: Rules,
    ph: sim.Physics,
    dirty: Ints,
    now: float,
) -> None:
    """Send what fits now, in the present order; shed what waited too long."""
    if w.state[0].waiting == 0:
        return
    classes, m = w.classes.shape[0], fl.running.shape[0]
    n = 0
    while w.state[0].expiring > 0 and rows[w.by_expiry[0]].expires <= now:
        i = w.by_expiry[0]
        take_out(rows, EXPIRY, w.by_expiry, w.state[0].expiring, i)
        w.state[0].expiring -= 1
        b.expired[n] = i
        n += 1
    for k in range(n):
        i = b.expired[k]
        lane = rows[i].tenant * classes + rows[i].class_id
        last = rows[i].arrived + w.classes[rows[i].class_id].max_wait
        remove(rows, w, lane, i)
        if w.classes[rows[i].class_id].sheddable or now >= last:
            shed(rows, w, classes, i)
        else:
            rows[i].start_by = last
            rows[i].expires = last
            push(rows, w, lane, i)
    press_claims(rows, w, fl, rt, now)
    while w.state[0].waiting > 0 and kernels.any_open(
        win, w.measured_at, w.state[0].least_prompt, now
    ):
        n = candidates(rows, w, b, rules, m, now)
        progress = False
        while n > 0 and kernels.any_open(win, w.measured_at, w.state[0].least_prompt, now):
            k, c, hopeless = choose(kernel, params, b, rows, w, fl, rt, be, rules, n, now)
            if k == NONE:
                break
            progress = True
            i = b.who[k]
            for j in range(k, n - 1):
                b.who[j] = b.who[j + 1]
            n -= 1
            remove(rows, w, rows[i].tenant * classes + rows[i].class_id, i)
            if hopeless:
                shed(rows, w, classes, i)
            else:
                commit(rows, w, fl, rt, ph, dirty, i, c, now)
        if n > 0 or not progress:
            break


@njit(cache=True, error_model="numpy")
def pull(fl: FleetColumns, w: World, ph: sim.Physics, now: float) -> None:
    """Whole tokens of every decoding stream, as `kernels.progress_many` would write them."""
    for r in range(fl.n_streams.shape[0]):
        if fl.n_streams[r] == 0 or ph.replica[r].n_decode == 0:
            continue
        done = ph.replica[r].steps + sim.steps_done(ph, r, now)
        some = False
        for k in range(fl.n_streams[r]):
            j = w.request_of_slot[fl.slot[r, k]]
            if ph.job[j].state != sim.DECODING or not fl.tokens[r, k] > 0.0:
                continue
            count = float(ph.job[j].generated + done - ph.job[j].joined)
            if count > fl.tokens[r, k]:
                fl.context[r] += count - fl.tokens[r, k]
                fl.tokens[r, k] = count
                some = True
        if some:
            kernels.remember(fl, r, now)


# ---- timers


@njit(cache=True, error_model="numpy")
def later(w: World, at: float, kind: int, r: int, load: Floats) -> None:
    """Add a timer; `load` (4,) goes with it: measured at, running, waiting, share."""
    w.state[0].serial += 1
    i = w.state[0].timers
    w.state[0].timers += 1
    while i > 0:
        p = (i - 1) // 2
        if w.timers[p].at <= at:
            break
        w.timers[i] = w.timers[p]
        i = p
    timer = w.timers[i]
    timer.at = at
    timer.serial = w.state[0].serial
    timer.kind = kind
    timer.replica = r
    timer.measured = load[0]
    timer.running = load[1]
    timer.waiting = load[2]
    timer.share = load[3]


@njit(cache=True, error_model="numpy")
def sooner(w: World, a: int, b: int) -> bool:
    """Whether timer a goes off before b."""
    return w.timers[a].at < w.timers[b].at or (
        w.timers[a].at == w.timers[b].at and w.timers[a].serial < w.timers[b].serial
    )


@njit(cache=True, error_model="numpy")
def pop_timer(w: World) -> None:
    """Drop the first timer."""
    n = w.state[0].timers - 1
    w.state[0].timers = n
    i = 0
    while True:
        c = 2 * i + 1
        if c >= n:
            break
        if c + 1 < n and sooner(w, c + 1, c):
            c += 1
        if sooner(w, n, c):
            break
        w.timers[i] = w.timers[c]
        i = c
    w.timers[i] = w.timers[n]


# ---- the loop


def _loop(
    kernel: Any,
    params: Floats,
    b: Batch,
    rows: Records,
    w: World,
    fl: FleetColumns,
    win: kernels.Windows,
    speeds: kernels.Speeds,
    rt: Routes,
    be: Beliefs,
    rules: Rules,
    ph: sim.Physics,
) -> int:
    """Live through the load; returns how many requests were left open, which must be 0."""
    n, m, classes = rows.shape[0], fl.running.shape[0], w.classes.shape[0]
    width = 2 * ph.heap_job.shape[1]
    kinds, jobs = np.zeros(width, np.int64), np.zeros(width, np.int64)
    dirty = np.zeros(m, np.int64)
    load = np.zeros(4)
    every_route = np.ones(rt.decode.shape[0], np.bool_)
    follow_at, follow, n_follow = np.zeros(n), np.zeros(n, np.int64), 0
    pulled = -np.inf
    root = 0
    while root < n and not rows[root].root:
        root += 1
    for r in range(m):
        later(w, rules.every * r / m, READ, r, load)
    while True:
        at, r = sim.next_event(ph)
        arrival = rows[root].arrival if root < n else np.inf
        from_heap = n_follow > 0 and (
            follow_at[0] < arrival or (follow_at[0] == arrival and follow[0] < root)
        )
        if from_heap:
            arrival = follow_at[0]
        if arrival == np.inf and w.state[0].open == 0 and at == np.inf:
            break
        wake = np.inf
        if w.state[0].waiting > 0:
            wake = rows[w.by_expiry[0]].expires if w.state[0].expiring > 0 else np.inf
            ripe = (
                rows[w.state[0].oldest].arrived
                + w.classes[rows[w.state[0].oldest].class_id].patience
            )
            if rows[w.state[0].oldest].claim == NONE and ripe > w.state[0].now:
                wake = min(wake, ripe)
            for k in range(m):
                if w.claimant[k] != NONE:
                    wake = min(wake, w.claim_until[k])
                if w.state[0].now < w.measured_at[k] + kernels.STALE:
                    wake = min(wake, w.measured_at[k] + kernels.STALE)
        timer = w.timers[0].at
        now = min(at, timer, wake, arrival)
        if at == now:
            if r == NONE:
                sim.deliver(ph, kinds, jobs)
                dirty[ph.job[jobs[0]].where] = 1
            else:
                count = sim.fire(ph, r, kinds, jobs)
                dirty[r] = 1
                for k in range(count):
                    i = jobs[k]
                    if w.state[0].waiting > 0 and now - pulled >= PULL:
                        pulled = now
                        pull(fl, w, ph, now)
                    w.state[0].now = now
                    c = rows[i].route
                    d, p = rt.decode[c], rt.prefill[c]
                    if kinds[k] == sim.FIRST_TOKEN:
                        rows[i].first = now
                        kernels.first_token(fl, d, p, rows[i].slot, now)
                    else:
                        rows[i].last = now
                        kernels.unbook(fl, d, p, rows[i].slot, now)
                        pace = 0.0
                        if rows[i].output > 1:
                            pace = (now - rows[i].first) / (rows[i].output - 1)
                        met = (
                            rows[i].first - rows[i].arrived <= rows[i].ttft and pace <= rows[i].tpot
                        )
                        met = met and now - rows[i].arrived <= rows[i].e2e
                        rows[i].verdict = MET if met else MISSED
                        w.state[0].open -= 1
                        for f in range(w.follower_start[i], w.follower_start[i + 1]):
                            j = w.follower[f]
                            when = now + rows[j].think
                            s = n_follow
                            n_follow += 1
                            while s > 0:
                                u = (s - 1) // 2
                                if follow_at[u] < when or (follow_at[u] == when and follow[u] < j):
                                    break
                                follow_at[s], follow[s] = follow_at[u], follow[u]
                                s = u
                            follow_at[s], follow[s] = when, j
                    if w.state[0].waiting > 0:
                        release(kernel, params, b, rows, w, fl, win, rt, be, rules, ph, dirty, now)
        elif timer == now:
            kind, r = w.timers[0].kind, w.timers[0].replica
            load[0], load[1] = w.timers[0].measured, w.timers[0].running
            load[2], load[3] = w.timers[0].waiting, w.timers[0].share
            pop_timer(w)
            if kind == READ:
                sim.reading_into(ph, r, now, load[1:])
                load[0] = now
                later(w, now + rules.delay, TELL, r, load)
                later(w, now + rules.every, READ, r, load)
            else:
                if w.state[0].waiting > 0 and now - pulled >= PULL:
                    pulled = now
                    pull(fl, w, ph, now)
                w.state[0].now = now
                if load[0] >= w.measured_at[r]:
                    w.measured_at[r] = load[0]
                    kernels.merge_reading(fl, r, load[0], load[1], load[2], load[3])
                    if w.state[0].waiting > 0:
                        release(kernel, params, b, rows, w, fl, win, rt, be, rules, ph, dirty, now)
        elif wake == now:
            if now - pulled >= PULL:
                pulled = now
                pull(fl, w, ph, now)
            w.state[0].now = now
            release(kernel, params, b, rows, w, fl, win, rt, be, rules, ph, dirty, now)
        else:
            if from_heap:
                i = follow[0]
                n_follow -= 1
                la, lf = follow_at[n_follow], follow[n_follow]
                s = 0
                while True:
                    u = 2 * s + 1
                    if u >= n_follow:
                        break
                    if u + 1 < n_follow and (
                        follow_at[u + 1] < follow_at[u]
                        or (follow_at[u + 1] == follow_at[u] and follow[u + 1] < follow[u])
                    ):
                        u += 1
                    if la < follow_at[u] or (la == follow_at[u] and lf < follow[u]):
                        break
                    follow_at[s], follow[s] = follow_at[u], follow[u]
                    s = u
                follow_at[s], follow[s] = la, lf
            else:
                i = root
                root += 1
                while root < n and not rows[root].root:
                    root += 1
            rows[i].arrived = now
            w.state[0].open += 1
            if now - pulled >= PULL:
                pulled = now
                pull(fl, w, ph, now)
            w.state[0].now = now
            if w.state[0].waiting >= rules.queue_limit:
                rows[i].verdict = MISSED
                w.state[0].open -= 1
                continue
            cls = rows[i].class_id
            ttft, tpot = kernels.fastest(
                speeds, rt.decode, rt.prefill, every_route, rows[i].prompt, rows[i].expected
            )
            rows[i].work = ttft + rows[i].expected * tpot
            start_by = now + min(
                rows[i].ttft - ttft, rows[i].e2e - rows[i].work, w.classes[cls].max_wait
            )
            rows[i].start_by = start_by
            rows[i].expires = max(start_by, now)
            w.state[0].admitted += 1
            rows[i].order = w.state[0].admitted
            if w.state[0].waiting > 0:
                push(rows, w, rows[i].tenant * classes + cls, i)
                release(kernel, params, b, rows, w, fl, win, rt, be, rules, ph, dirty, now)
            else:
                b.who[0] = i
                k, c, hopeless = choose(kernel, params, b, rows, w, fl, rt, be, rules, 1, now)
                if k == NONE:
                    push(rows, w, rows[i].tenant * classes + cls, i)
                elif hopeless:
                    shed(rows, w, classes, i)
                else:
                    commit(rows, w, fl, rt, ph, dirty, i, c, now)
        for k in range(m):
            if dirty[k] != 0:
                dirty[k] = 0
                if ph.replica[k].stretch == 0:
                    sim.plan(ph, k, now)
    return w.state[0].open + w.state[0].waiting


@njit(cache=True, error_model="numpy")
def forecast(survival: Floats, cap: Floats, length_q: Floats, expected: Floats) -> None:
    """Quantiles (n, Q) and whole expected tokens (n,) of forecasts (n, BINS + 1) under caps."""
    for i in range(survival.shape[0]):
        mean, _, _ = kernels.length_into(survival[i], cap[i], length_q[i])
        expected[i] = max(1.0, np.ceil(mean))


# ---- from a case to columns


def supports(case: Case, policy: PolicyConfig) -> bool:
    """Whether the loop knows everything that this case and policy need."""
    scenario, trace = case.scenario, case.trace
    profiles = [r.profile for r in case.fleet.replicas]
    most = (trace.prompt + trace.output).max(initial=0)
    return (
        scenario.gateways == 1
        and not scenario.failures
        and scenario.length_sigma is not None
        and not len(trace.blocks)
        and policy.hold
        and policy.overload_target == 0.0
        and bool(most <= min(min(p.max_context, p.kv_capacity - sim.PAGE) for p in profiles))
    )


def _requests(case: Case) -> tuple[Records, Floats]:
    """(n,) records and (n, Q) length quantiles of a case's requests."""
    trace, n = case.trace, len(case.trace)
    assert case.scenario.length_sigma is not None
    estimator = InformedEstimator(trace.output, case.scenario.length_sigma, case.seed)
    rows, length_q = np.zeros(n, REQUEST), np.zeros((n, len(QUANTILE_GRID)))
    expected = np.zeros(n)
    most = float(max(r.profile.max_context for r in case.believed.replicas))
    cap = np.maximum(most - trace.prompt, 1.0)
    for chunk in range(-(-n // CHUNK)):
        part = slice(chunk * CHUNK, min((chunk + 1) * CHUNK, n))
        forecast(estimator.rows(chunk), cap[part], length_q[part], expected[part])
    rows["expected"] = expected
    rows["arrival"], rows["think"], rows["root"] = trace.arrival, trace.think, trace.roots
    rows["prompt"] = rows["tokens"] = trace.prompt
    rows["output"] = trace.output
    rows["ttft"], rows["tpot"], rows["e2e"] = case.ttft, case.tpot, case.e2e
    rows["class_id"], rows["tenant"] = trace.class_id, trace.tenant_id
    rows["tie"] = [tie(case.seed, i) for i in range(n)]
    rows["verdict"] = ABSENT
    for name in ("sent", "first", "last"):
        rows[name] = np.nan
    for name in ("start_place", "work_place", "expiry_place", "next_in", "previous_in", "claim"):
        rows[name] = NONE
    return rows, length_q


def _world(case: Case, policy: PolicyConfig, routes: Routes, length_q: Floats) -> World:
    trace, n, m = case.trace, len(case.trace), len(case.fleet.replicas)
    classes, tenants = np.zeros(len(case.classes), CLASS), np.zeros(len(case.tenants), TENANT)
    quality = np.array([case.fleet.variants[v].quality for v in routes.variant.tolist()])
    allowed = np.ones((len(classes), len(quality)), np.bool_)
    for k, c in enumerate(case.classes):
        floor = c.slo.quality
        classes[k] = (
            c.weight, 0.0 if floor is None else floor, c.patience, c.max_wait, c.rank, c.sheddable,
        )  # fmt: skip
        if floor is not None:
            reach = quality >= floor
            allowed[k] = reach if reach.any() else quality >= quality.max(initial=0.0)
    tenants["weight"] = [t.weight for t in case.tenants]
    follows = np.flatnonzero(~trace.roots)
    follower = follows[np.argsort(trace.follows[follows], kind="stable")]
    counts = np.bincount(trace.follows[follows], minlength=n)
    places = min(policy.queue_limit, n) + 1
    lanes = len(classes) * len(tenants)
    metrics = case.scenario.metrics
    state = np.zeros(1, STATE)
    state["least_prompt"], state["now"] = np.inf, -np.inf
    state["oldest"] = state["newest"] = NONE
    return World(
        state=state,
        classes=classes,
        tenants=tenants,
        lanes=np.zeros(lanes, LANE),
        timers=np.zeros(m * (4 + ceil(metrics.delay / metrics.every)) + 8, TIMER),
        by_start=np.zeros((lanes, places), np.int64),
        by_work=np.zeros((lanes, places), np.int64),
        by_expiry=np.zeros(places, np.int64),
        allowed=allowed,
        length_q=length_q,
        follower_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        follower=follower.astype(np.int64),
        request_of_slot=np.zeros(n + 1, np.int64),
        claimed=np.full(m, NONE, np.int64),
        claimant=np.full(m, NONE, np.int64),
        claim_until=np.full(m, np.inf),
        measured_at=np.full(m, -np.inf),
    )


def _batch(c: int, places: int) -> Batch:
    k, union = K_BEST, 2 * LANES + K_BEST + 2
    return Batch(
        requests=request_columns(k, np.zeros((len(REQUEST_FLOATS), k))),
        estimates=estimate_columns(k, c),
        allowed=np.zeros((k, c), np.bool_),
        room=np.zeros((k, c), np.bool_),
        draws=np.zeros((k, c)),
        scores=scores(k, c),
        who=np.zeros(union, np.int64),
        union=np.zeros(union, np.int64),
        late=np.zeros(union, np.int64),
        key=np.zeros(union),
        frontier=np.zeros(2 * K_BEST + 4, np.int64),
        expired=np.zeros(places, np.int64),
    )


class CompiledLoop:
    """The loop, compiled (or loaded from the cache) for the types of this project's columns.

    The first `run` takes a minute or two when nothing is cached; any number may follow.
    """

    def __init__(self) -> None:
        self._ready: Callable[..., int] | None = None

    def run(self, case: Case, policy: PolicyConfig) -> Run:
        """A case through the compiled loop.

        Raises: ValueError for one it does not support; RuntimeError if a request is left without an
        outcome.
        """
        if not supports(case, policy):
            raise ValueError(f"the compiled loop does not know all that {case.scenario.name} needs")
        scorer = build_scorer(policy)
        fleet, routes = fleet_columns(case.believed.replicas), route_table(case.believed).routes
        rows, length_q = _requests(case)
        world = _world(case, policy, routes, length_q)
        m, metrics = len(case.fleet.replicas), case.scenario.metrics
        quality = [case.fleet.variants[v].quality for v in routes.variant.tolist()]
        ph = sim.physics(case.fleet.replicas, len(rows))
        columns = (
            _batch(len(routes.decode), len(world.by_expiry)),
            rows,
            world,
            fleet,
            kernels.Windows(*(getattr(fleet, f) for f in kernels.Windows._fields)),
            kernels.Speeds(*(getattr(fleet, f) for f in kernels.Speeds._fields)),
            routes,
            Beliefs(
                prefill_scale=np.ones(m),
                decode_scale=np.ones(m),
                spread=fleet.uncertainty.copy(),
                curve=Reliability().curve,
                quality=np.array(quality, np.float64),
            ),
            Rules(
                shed_below=float(policy.shed_below),
                explore=float(policy.explore),
                within=float(policy.explore_within),
                queue_limit=int(policy.queue_limit),
                fairness=float(policy.fairness),
                alpha_max=float(policy.alpha_max),
                seed=case.core_seed(policy.seed),
                estimates=bool(
                    scorer.needs_estimates or policy.shed_below > 0 or policy.explore > 0
                ),
                draws=bool(scorer.random),
                by_value=scorer.unit == "value",
                every=float(metrics.every),
                delay=float(metrics.delay),
            ),
            ph,
        )
        ready = self._compiled(scorer.kernel, columns)
        began = time.process_time()
        left = ready(scorer.kernel, scorer.params, *columns)
        seconds = time.process_time() - began
        if left:
            raise RuntimeError(f"{left} requests were lost on the way")
        return Run(
            arrival=np.where(rows["verdict"] == ABSENT, case.trace.arrival, rows["arrived"]),
            sent=rows["sent"].copy(),
            first=rows["first"].copy(),
            last=rows["last"].copy(),
            replica=np.where(np.isfinite(rows["sent"]), routes.decode[rows["route"]], 0),
            cached=np.zeros(len(rows), np.int64),
            verdict=rows["verdict"].astype(np.int8),
            busy=ph.replica["busy"].copy(),
            preemptions=int(ph.replica["preemptions"].sum()),
            seconds=seconds,
        )

    def _compiled(self, kernel: Any, columns: tuple[Any, ...]) -> Callable[..., int]:
        kind: Callable[[Any], Any] = numba.typeof
        b, _, _, fleet, _, _, routes, *_ = columns
        row = np.zeros(1)
        inputs = (row, b.requests, fleet, routes, b.estimates, b.room, b.draws, 0.0, b.scores)
        call = tuple(kind(x) for x in inputs)
        kernel.compile(call)
        if self._ready is None:
            function = types.FunctionType(types.none(*call))
            signature = (function, kind(row), *(kind(c) for c in columns))
            self._ready = njit(signature, cache=True, error_model="numpy")(_loop)
        return self._ready
