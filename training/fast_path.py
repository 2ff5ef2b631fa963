"""The compiled loop: replica physics, the core's array functions and a scorer's kernel in one
function.

What `training.virtual` does with the live core, this does without Python: the same physics, the
same kernels of `policies.kernels`, the same scorer, the same estimates, and the core's queue
written once more over arrays (`training.fast_queue`), so that decisions are equal, request by
request (a test says so). It knows one gateway, no quotas, no retries, no deaths, no learning and
no prefix blocks; `supports` tells whether a case is within that, and callers take the live core
where it is not.

Scorers come in as first-class functions of one signature, so the loop is compiled once for all of
them and cached. What belongs to one request stands in one record: fewer arrays to hand over, and a
few cache lines to read. Functions that take many columns are inlined by numba, since a call copies
the description of every array (kilobytes); arrays are borrowed (`training.borrowed`). `NONE` is -1
(CORE section 3.13).
"""
# Inside compiled code numba, not mypy, knows the types of array elements.
# mypy: disable-error-code="arg-type, no-any-return, return-value, assignment, call-overload"

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import njit, types

from backends.sim import replica as sim
from domain import columns as layout
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
from policies import chains, kernels, overload, prefix_index, queue
from policies.config import PolicyConfig
from policies.factory import build_scorer
from predictors import joint, roofline
from predictors.joint import Reliability, calibrate_into
from predictors.roofline import OnlineScales, roofline_into
from training import borrowed as borrowing
from training import fast_gate, fast_queue, measures, virtual
from training.borrowed import borrowed, inlined
from training.fast_gate import Gate
from training.fast_queue import (
    CLASS,
    K_BEST,
    NONE,
    REQUEST,
    TENANT,
    Records,
    Room,
    candidates,
    expired,
    press_claims,
    push,
    record,
    release_claim,
    remove,
    ripest,
    waiting_room,
)
from training.informed import CHUNK, InformedEstimator
from training.measures import ABSENT, MET, MISSED, Run
from training.scenario import Case
from training.virtual import PULL, tie

fire, plan, reading_into = inlined(sim.fire), inlined(sim.plan), inlined(sim.reading_into)
merge_reading = inlined(kernels.merge_reading)

STATE = record(
    f="now pulled look_at",
    i="choices slots open admitted heard tells serial touched coming sessions newest_session "
    "oldest_session",
)
"""Times of the core's last event and of the last pull of token counts, and counters. `heard`
readings have come to the core, `tells` more are on their way. `look_at` as in the live chooser.
"""
READ = record(f="at", i="serial")
"""When a replica is read next; `serial` orders what is due at the same time."""
TELL = record(f="at measured running waiting share", i="serial replica")
"""A reading on its way to the core."""
COUNTED = record(i="preemptions", b="stale")
"""How far `World.base` of a replica can be trusted: preemptions when it was written, and whether
streams that have begun do not decode.
"""
SESSION = record(i="home newer older")
"""The replica where a session ran last (`NONE`: not remembered), between those sent before and
after it.
"""


class World(NamedTuple):
    """Everything but requests, queue, batch, fleet and physics. n requests, C classes, m replicas,
    c routes.
    """

    state: Records  # (1,) of STATE
    reads: Records  # (m,) of READ; replicas come round in their order
    tells: Records  # a ring of TELL, first come first
    ends: Floats  # (m,) when each replica's stretch ends
    touched: Ints  # (m,) replicas to look at before time goes on, `state.touched` of them
    is_touched: Mask  # (m,)
    base: Floats  # (m, S) tokens of an own stream less those of its replica; -inf: not counted
    counted: Records  # (m,) of COUNTED
    sessions: Records  # of SESSION
    allowed: Mask  # (C, c) routes that reach the quality floor
    length_q: Floats  # (n, Q)
    follower_start: Ints  # (n + 1,) requests that follow this one
    follower: Ints
    coming_at: Floats  # (n,) a heap of followers by when they come
    coming: Ints
    every_route: Mask  # (c,)
    request_of_slot: Ints  # (n + 1,)
    measured_at: Floats  # (m,)


class Beliefs(NamedTuple):
    """The estimator's numbers: scales (5, m), reliability curve, quality (c,)."""

    scales: Floats
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
    sessions: int
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
    expired: Ints  # (Q,)


# ---- choosing and booking (policies.chooser over arrays)


@njit(error_model="numpy", inline="always")
def fill_row(b: Batch, rows: Records, q: Room, w: World, rt: Routes, k: int, i: int) -> None:
    """Write request i into row k of the batch."""
    cls = rows[i].class_id
    rq = b.requests
    rq.prompt[k] = rows[i].prompt
    rq.expected[k] = rows[i].expected
    rq.arrived[k] = rows[i].arrived
    rq.ttft[k] = rows[i].ttft
    rq.tpot[k] = rows[i].tpot
    rq.e2e[k] = rows[i].e2e
    rq.quality[k] = q.classes[cls].quality
    rq.weight[k] = q.classes[cls].weight
    rq.class_id[k] = q.classes[cls].rank
    rq.tie[k] = rows[i].tie
    rq.length_q[k] = w.length_q[i]
    b.allowed[k] = w.allowed[cls]
    home = w.sessions[rows[i].session].home
    for c in range(rt.prefill.shape[0]):
        b.estimates.sticky[k, c] = 1.0 if rt.prefill[c] == home else 0.0


@njit(error_model="numpy", inline="always")
def rows_between(
    b: Batch, low: int, high: int
) -> tuple[RequestColumns, EstimateColumns, Mask, Mask, Draws, Scores]:
    """The batch's rows from low to before high."""
    r, e, s = b.requests, b.estimates, b.scores
    rq = RequestColumns(
        r.prompt[low:high], r.max_tokens[low:high], r.expected[low:high], r.length_q[low:high],
        r.arrived[low:high], r.ttft[low:high], r.tpot[low:high], r.e2e[low:high],
        r.quality[low:high], r.class_id[low:high], r.weight[low:high], r.tie[low:high],
    )  # fmt: skip
    es = EstimateColumns(
        e.cached[low:high], e.sticky[low:high], e.wait[low:high], e.p_slo[low:high],
        e.p_raw[low:high], e.quality[low:high], e.ttft[low:high], e.tpot[low:high],
    )  # fmt: skip
    sc = Scores(s.route[low:high], s.hold[low:high], s.shed[low:high])
    return rq, es, b.allowed[low:high], b.room[low:high], b.draws[low:high], sc


@njit(error_model="numpy", inline="always")
def choose(
    kernel: Any,
    params: Floats,
    b: Batch,
    rows: Records,
    q: Room,
    w: World,
    fl: FleetColumns,
    rt: Routes,
    be: Beliefs,
    rules: Rules,
    n: int,
    now: float,
) -> tuple[int, int, bool, float]:
    """(index among b.who, route, whether to refuse for want of hope, best P(SLO)); (NONE, NONE,
    False, 0) if nothing has room.

    A scorer whose unit is not `value` is asked request by request, up to the first that fits: a
    row's scores depend on that row alone (the scorers' contract).
    """
    step = n if rules.by_value else 1
    routes = rt.decode.shape[0]
    looked, look_at = False, np.inf
    w.state[0].look_at = np.inf
    for low in range(0, n, step):
        for k in range(low, low + step):
            fill_row(b, rows, q, w, rt, k, b.who[k])
        rq, es, allowed, room, draws, sc = rows_between(b, low, low + step)
        if not kernels.room_into(rq, fl, rt, allowed, q.claimed, w.measured_at, now, room):
            continue
        if rules.estimates:
            roofline_into(rq, fl, rt, room, be.scales, now, es)
            calibrate_into(be.curve, room, es.p_raw, es.p_slo)
            for k in range(step):
                for c in range(routes):
                    if room[k, c]:
                        es.quality[k, c] = be.quality[c]
        if not looked:
            looked = True
            w.state[0].choices += 1
        if rules.draws:
            for k in range(step):
                for c in range(routes):
                    lane = 1 + (low + k) * routes + c
                    draws[k, c] = kernels.uniform(rules.seed, w.state[0].choices, lane)
        sc.route[:] = -np.inf
        sc.hold[:] = -np.inf
        sc.shed[:] = -np.inf
        kernel(params, rq, fl, rt, es, room, draws, now, sc)
        if rules.by_value:
            k, c = kernels.best_pair(sc.route, room, rq.tie)
        else:
            k, c = kernels.first_fit(sc.route, room, rq.tie)
        if k == NONE:
            look_at = min(look_at, kernels.earliest(sc.hold))
            continue
        who = b.who[low + k]
        cls = rows[who].class_id
        chance = kernels.best_chance(room[k], es.p_slo[k]) if rules.estimates else 1.0
        refused = sc.shed[k] > sc.route[k, c]
        if rules.explore > 0.0 and q.classes[cls].rank > 0:
            c, _ = kernels.explored(
                room[k],
                es.p_slo[k],
                c,
                rules.explore,
                rules.within,
                kernels.uniform(rules.seed, w.state[0].choices, -1),
                kernels.uniform(rules.seed, w.state[0].choices, -2),
            )
        hopeless = False
        limited = min(rows[who].ttft, rows[who].tpot, rows[who].e2e) < np.inf
        if (refused or chance < rules.shed_below) and q.classes[cls].sheddable and limited:
            coin = kernels.uniform(rules.seed, w.state[0].choices, -3)
            hopeless = refused or coin >= chance / rules.shed_below
        return low + k, c, hopeless, chance
    w.state[0].look_at = look_at
    return NONE, NONE, False, 0.0


@njit(error_model="numpy", inline="always")
def shed(rows: Records, q: Room, w: World, g: Gate, i: int, now: float) -> None:
    """Request i, which does not wait, is refused after it was admitted."""
    release_claim(rows, q, i)
    fast_gate.given_up(g, rows[i].class_id, chain_of(rows, q, i), now)
    rows[i].verdict = MISSED
    w.state[0].open -= 1


@njit(error_model="numpy")
def chain_of(rows: Records, q: Room, i: int) -> int:
    """Key of request i's session and class."""
    return rows[i].session * q.classes.shape[0] + rows[i].class_id


@njit(error_model="numpy", forceinline=True)
def join_session(w: World, s: int, replica: int, most: int) -> None:
    """Session s ran on this replica last; beyond `most`, the one unused longest is forgotten."""
    state, sessions = w.state, w.sessions
    if sessions[s].home == NONE:
        state[0].sessions += 1
    else:
        forget_session(w, s)
    sessions[s].home = replica
    sessions[s].older, sessions[s].newer = state[0].newest_session, NONE
    if state[0].newest_session == NONE:
        state[0].oldest_session = s
    else:
        sessions[state[0].newest_session].newer = s
    state[0].newest_session = s
    if state[0].sessions > most:
        state[0].sessions -= 1
        forget_session(w, state[0].oldest_session)


@njit(error_model="numpy")
def forget_session(w: World, s: int) -> None:
    """Take session s out of the order of sending; it has no home any more."""
    older, newer = w.sessions[s].older, w.sessions[s].newer
    if older == NONE:
        w.state[0].oldest_session = newer
    else:
        w.sessions[older].newer = newer
    if newer == NONE:
        w.state[0].newest_session = older
    else:
        w.sessions[newer].older = older
    w.sessions[s].home = NONE


@njit(error_model="numpy", inline="always")
def commit(
    rows: Records,
    q: Room,
    w: World,
    fl: FleetColumns,
    rt: Routes,
    rules: Rules,
    ph: sim.Physics,
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
    w.base[d, fl.n_streams[d] - 1] = -np.inf
    release_claim(rows, q, i)
    t = rows[i].tenant
    q.tenants[t].virtual += 1.0 / fl.running.shape[0] * rows[i].work / q.tenants[t].weight
    rows[i].sent = now
    rows[i].route = c
    rows[i].slot = slot
    w.request_of_slot[slot] = i
    join_session(w, rows[i].session, p, rules.sessions)
    sim.set_job(ph, i, rows[i].tokens, rows[i].output, NONE if p == d else d, 0, 0)
    sim.enter(ph, p, i, now)
    touch(w, p)


@njit(error_model="numpy")
def touch(w: World, r: int) -> None:
    """Replica r got or did something."""
    if not w.is_touched[r]:
        w.is_touched[r] = True
        w.touched[w.state[0].touched] = r
        w.state[0].touched += 1


@njit(error_model="numpy", inline="always")
def release(
    kernel: Any,
    params: Floats,
    b: Batch,
    rows: Records,
    q: Room,
    w: World,
    g: Gate,
    fl: FleetColumns,
    win: kernels.Windows,
    rt: Routes,
    be: Beliefs,
    rules: Rules,
    ph: sim.Physics,
    fresh: int,
    now: float,
) -> None:
    """Send what fits now, in the present order; shed what waited too long. A `fresh` request that
    came while nobody waited is looked at alone, and waits where nothing has room.
    """
    n, alone = np.int64(0), fresh != NONE
    if alone:
        b.who[0] = fresh
        n = np.int64(1)
    else:
        w.state[0].look_at = np.inf
        if q.total[0].expiring > 0 and rows[q.by_expiry[0]].expires <= now:
            let_go(rows, q, w, g, b.expired, now)
        first = ripest(rows, q)
        if q.total[0].claims > 0 or (first != NONE and rows[first].ripe < now):
            press_claims(rows, q, fl, rt, now)
    while True:
        if not alone:
            if q.total[0].waiting == 0 or not kernels.any_open(
                win, w.measured_at, q.total[0].least_prompt, now
            ):
                break
            load = min(q.total[0].work / fl.running.shape[0], 1.0)
            n = candidates(rows, q, rules.fairness, rules.alpha_max * load, now, b.who)
        progress = False
        while n > 0 and (
            alone or kernels.any_open(win, w.measured_at, q.total[0].least_prompt, now)
        ):
            k, c, hopeless, chance = choose(
                kernel, params, b, rows, q, w, fl, rt, be, rules, n, now
            )
            if k == NONE:
                if alone:
                    push(rows, q, fresh)
                break
            progress = True
            i = b.who[k]
            for j in range(k, n - 1):
                b.who[j] = b.who[j + 1]
            n -= 1
            if not alone:
                remove(rows, q, i)
            if rows[i].feasible:
                fast_gate.decided(g, rows[i].class_id, chance, rows[i].work, now)
            if hopeless:
                shed(rows, q, w, g, i, now)
            else:
                commit(rows, q, w, fl, rt, rules, ph, i, c, now)
        if alone or n > 0 or not progress:
            break


@njit(error_model="numpy")
def let_go(rows: Records, q: Room, w: World, g: Gate, gone: Ints, now: float) -> None:
    """Requests whose waiting ends now are shed, or held on to the end of their class's patience."""
    for k in range(expired(rows, q, now, gone)):
        i = gone[k]
        last = rows[i].arrived + q.classes[rows[i].class_id].max_wait
        remove(rows, q, i)
        if rows[i].feasible:
            fast_gate.decided(g, rows[i].class_id, 0.0, 0.0, now)
        if q.classes[rows[i].class_id].sheddable or now >= last:
            shed(rows, q, w, g, i, now)
        else:
            rows[i].start_by = last
            rows[i].expires = last
            push(rows, q, i)


@njit(error_model="numpy")
def pull(fl: FleetColumns, w: World, ph: sim.Physics, now: float) -> None:
    """Whole tokens of every decoding stream, as `kernels.progress_many` would write them, unless
    they were pulled a moment ago.

    Streams of a replica advance together, so what differs between them stays (`World.base`).
    """
    if now - w.state[0].pulled < PULL:
        return
    w.state[0].pulled = now
    for r in range(fl.n_streams.shape[0]):
        if fl.n_streams[r] == 0 or ph.replica[r].n_decode == 0:
            continue
        done = float(ph.replica[r].steps + sim.tokens_done(ph, r, now))
        if w.counted[r].stale or w.counted[r].preemptions != ph.replica[r].preemptions:
            rebase(fl, w, ph, r)
        more = 0.0
        for k in range(fl.n_streams[r]):
            count = w.base[r, k] + done
            if count > fl.tokens[r, k]:
                more += count - fl.tokens[r, k]
                fl.tokens[r, k] = count
        if more > 0.0:
            fl.context[r] += more
            kernels.remember(fl, r, now)


@njit(error_model="numpy")
def rebase(fl: FleetColumns, w: World, ph: sim.Physics, r: int) -> None:
    """Write anew which streams of replica r decode, and from where they count."""
    w.counted[r].preemptions = ph.replica[r].preemptions
    w.counted[r].stale = False
    for k in range(fl.n_streams[r]):
        w.base[r, k] = -np.inf
        if not fl.tokens[r, k] > 0.0:
            continue
        j = w.request_of_slot[fl.slot[r, k]]
        if ph.job[j].state == sim.DECODING:
            w.base[r, k] = float(ph.job[j].generated - ph.job[j].joined)
        else:
            w.counted[r].stale = True


# ---- readings


@njit(error_model="numpy", inline="always")
def read(w: World, ph: sim.Physics, r: int, rules: Rules, load: Floats) -> None:
    """Replica r shows its metrics; the core hears of them later, and they are read again."""
    now = w.reads[r].at
    reading_into(ph, r, now, load)
    state = w.state
    tell = w.tells[(state[0].heard + state[0].tells) % w.tells.shape[0]]
    state[0].serial += 2
    state[0].tells += 1
    tell.at, tell.serial, tell.replica = now + rules.delay, state[0].serial - 1, r
    tell.measured, tell.running, tell.waiting, tell.share = now, load[0], load[1], load[2]
    w.reads[r].at, w.reads[r].serial = now + rules.every, state[0].serial


# ---- requests that follow others


@njit(error_model="numpy")
def earlier(w: World, a: int, b: int) -> bool:
    """Whether the follower at place a of the heap comes before the one at b."""
    x, y = w.coming_at[a], w.coming_at[b]
    return x < y or (x == y and w.coming[a] < w.coming[b])


@njit(error_model="numpy")
def swap(w: World, a: int, b: int) -> None:
    """Let two followers change places."""
    w.coming_at[a], w.coming_at[b] = w.coming_at[b], w.coming_at[a]
    w.coming[a], w.coming[b] = w.coming[b], w.coming[a]


@njit(error_model="numpy")
def follow(w: World, at: float, i: int) -> None:
    """Request i comes then."""
    s = w.state[0].coming
    w.state[0].coming = s + 1
    w.coming_at[s], w.coming[s] = at, i
    while s > 0 and earlier(w, s, (s - 1) // 2):
        swap(w, s, (s - 1) // 2)
        s = (s - 1) // 2


@njit(error_model="numpy")
def pop_follower(w: World) -> int:
    """The follower that comes first, taken out."""
    first = w.coming[0]
    n = w.state[0].coming - 1
    w.state[0].coming = n
    w.coming_at[0], w.coming[0] = w.coming_at[n], w.coming[n]
    s = 0
    while 2 * s + 1 < n:
        u = 2 * s + 1
        if u + 1 < n and earlier(w, u + 1, u):
            u += 1
        if not earlier(w, u, s):
            break
        swap(w, u, s)
        s = u
    return first


# ---- the loop


@njit(error_model="numpy", inline="always")
def hear(q: Room, w: World, fl: FleetColumns, ph: sim.Physics, now: float) -> None:
    """The core hears of something: counts are pulled first if anybody waits."""
    if q.total[0].waiting > 0:
        pull(fl, w, ph, now)
    w.state[0].now = now


@njit(error_model="numpy", inline="always")
def wake_at(rows: Records, q: Room, w: World) -> float:
    """When the core wants to be woken: earliest expiry, patience, end of a claim or of a hold, or
    staleness.
    """
    at = np.inf
    if w.state[0].look_at > w.state[0].now:
        at = w.state[0].look_at
    if q.total[0].expiring > 0:
        at = min(at, rows[q.by_expiry[0]].expires)
    i = ripest(rows, q)
    if rows[i].claim == NONE and rows[i].ripe > w.state[0].now:
        at = min(at, rows[i].ripe)
    for r in range(w.measured_at.shape[0]):
        at = min(at, q.claim_until[r])
        if w.state[0].now < w.measured_at[r] + kernels.STALE:
            at = min(at, w.measured_at[r] + kernels.STALE)
    return at


@njit(error_model="numpy", inline="always")
def ended(
    rows: Records, w: World, fl: FleetColumns, rt: Routes, kinds: Ints, jobs: Ints, events: int
) -> None:
    """Counts of streams that have finished stand still until the core hears of their ends."""
    for e in range(events):
        if kinds[e] != sim.FIRST_TOKEN:
            i = jobs[e]
            d = rt.decode[rows[i].route]
            w.base[d, kernels.position(fl, d, rows[i].slot)] = -np.inf


@njit(error_model="numpy", inline="always")
def happened(
    rows: Records,
    w: World,
    fl: FleetColumns,
    rt: Routes,
    ph: sim.Physics,
    kind: int,
    i: int,
    now: float,
) -> None:
    """Request i gave its first token, or its last."""
    d, p = rt.decode[rows[i].route], rt.prefill[rows[i].route]
    k = kernels.position(fl, d, rows[i].slot)
    if kind == sim.FIRST_TOKEN:
        rows[i].first = now
        kernels.first_token(fl, d, p, rows[i].slot, now)
        if ph.job[i].state == sim.DECODING:
            w.base[d, k] = float(ph.job[i].generated - ph.job[i].joined)
        elif ph.job[i].state == sim.MOVING:
            w.counted[d].stale = True
        return
    rows[i].last = now
    w.base[d, k] = w.base[d, fl.n_streams[d] - 1]
    kernels.unbook(fl, d, p, rows[i].slot, now)
    pace = 0.0
    if rows[i].output > 1:
        pace = (now - rows[i].first) / (rows[i].output - 1)
    met = rows[i].first - rows[i].arrived <= rows[i].ttft and pace <= rows[i].tpot
    met = met and now - rows[i].arrived <= rows[i].e2e
    rows[i].verdict = MET if met else MISSED
    w.state[0].open -= 1
    for f in range(w.follower_start[i], w.follower_start[i + 1]):
        follow(w, now + rows[w.follower[f]].think, w.follower[f])


@njit(error_model="numpy", inline="always")
def admit(rows: Records, q: Room, w: World, speeds: kernels.Speeds, rt: Routes, i: int) -> None:
    """Fill in what the queue wants to know of a request that has arrived."""
    now, cls = rows[i].arrived, rows[i].class_id
    ttft, tpot = kernels.fastest(
        speeds, rt.decode, rt.prefill, w.every_route, rows[i].prompt, rows[i].expected
    )
    rows[i].work = ttft + rows[i].expected * tpot
    rows[i].feasible = (
        ttft <= overload.FEASIBLE * rows[i].ttft
        and tpot <= overload.FEASIBLE * rows[i].tpot
        and rows[i].work <= overload.FEASIBLE * rows[i].e2e
    )
    useful = min(rows[i].ttft - ttft, rows[i].e2e - rows[i].work, q.classes[cls].max_wait)
    rows[i].start_by = now + useful
    rows[i].expires = max(rows[i].start_by, now)
    rows[i].ripe = now + q.classes[cls].patience
    w.state[0].admitted += 1
    rows[i].order = w.state[0].admitted


@njit(error_model="numpy")
def _live(
    kernel: Any,
    params: Floats,
    b: Batch,
    rows: Records,
    q: Room,
    w: World,
    g: Gate,
    fl: FleetColumns,
    win: kernels.Windows,
    speeds: kernels.Speeds,
    rt: Routes,
    be: Beliefs,
    rules: Rules,
    ph: sim.Physics,
) -> int:
    """Live through the load; returns how many requests were left open, which must be 0."""
    params, b, rows, q, w = borrowed(params), borrowed(b), borrowed(rows), borrowed(q), borrowed(w)
    g = borrowed(g)
    fl, win, speeds, rt = borrowed(fl), borrowed(win), borrowed(speeds), borrowed(rt)
    be, ph = borrowed(be), borrowed(ph)
    n, m = rows.shape[0], fl.running.shape[0]
    width = 2 * ph.heap_job.shape[1]
    kinds, jobs = np.zeros(width, np.int64), np.zeros(width, np.int64)
    event, events = 0, 0
    load = np.zeros(3)
    now = -np.inf
    reader, place, ring = np.int64(0), np.int64(0), w.tells.shape[0]
    root = 0
    while root < n and not rows[root].root:
        root += 1
    for r in range(m):
        w.reads[r].at, w.reads[r].serial = rules.every * r / m, r
    w.state[0].serial = m
    while True:
        look = False  # whether the core looks for what may be sent
        fresh = np.int64(NONE)  # the request that came, if it need not wait for others
        if event < events:
            hear(q, w, fl, ph, now)
            happened(rows, w, fl, rt, ph, kinds[event], jobs[event], now)
            event += 1
            look = True
        else:
            at, r = w.ends[0], np.int64(0)
            for k in range(1, m):
                if w.ends[k] < at:
                    at, r = w.ends[k], np.int64(k)
            moving = ph.n_moving[0]
            if moving > 0 and ph.ready_at[moving - 1] < at:
                at, r = ph.ready_at[moving - 1], np.int64(NONE)
            arrival = rows[root].arrival if root < n else np.inf
            follows = w.state[0].coming > 0 and (
                w.coming_at[0] < arrival or (w.coming_at[0] == arrival and w.coming[0] < root)
            )
            if follows:
                arrival = w.coming_at[0]
            if arrival == np.inf and w.state[0].open == 0 and at == np.inf:
                break
            timer, told = w.reads[reader].at, False
            if w.state[0].tells > 0 and w.tells[place].at <= timer:
                told = w.tells[place].at < timer or w.tells[place].serial < w.reads[reader].serial
                timer = w.tells[place].at
            wake = wake_at(rows, q, w) if q.total[0].waiting > 0 else np.inf
            now = min(at, timer, wake, arrival)
            if at == now:
                event, events = 0, 0
                if r == NONE:
                    sim.deliver(ph, kinds, jobs)
                    touch(w, ph.job[jobs[0]].where)
                else:
                    events = fire(ph, r, kinds, jobs)
                    ended(rows, w, fl, rt, kinds, jobs, events)
                    touch(w, r)
            elif timer == now:
                if told:
                    hear(q, w, fl, ph, now)
                    tell = w.tells[place]
                    place = place + 1 if place + 1 < ring else np.int64(0)
                    w.state[0].tells -= 1
                    w.state[0].heard += 1
                    if tell.measured >= w.measured_at[tell.replica]:
                        w.measured_at[tell.replica] = tell.measured
                        merge_reading(
                            fl, tell.replica, tell.measured, tell.running, tell.waiting, tell.share
                        )
                        look = True
                else:
                    read(w, ph, reader, rules, load)
                    reader = reader + 1 if reader + 1 < m else np.int64(0)
            elif wake == now:
                hear(q, w, fl, ph, now)
                look = True
            else:
                if follows:
                    i = pop_follower(w)
                else:
                    i = root
                    root += 1
                    while root < n and not rows[root].root:
                        root += 1
                pull(fl, w, ph, now)
                w.state[0].now = now
                rows[i].arrived = now
                if q.total[0].waiting >= rules.queue_limit:
                    rows[i].verdict = MISSED
                    continue
                cls, t, chain = rows[i].class_id, rows[i].tenant, chain_of(rows, q, i)
                rows[i].e2e = fast_gate.left_of_chain(g, cls, chain, rows[i].e2e, now)
                if fast_gate.refused(g, cls, t, chain, rows[i].tie, q.tenants[t].weight, now):
                    rows[i].verdict = MISSED
                    continue
                w.state[0].open += 1
                admit(rows, q, w, speeds, rt, i)
                fast_gate.admitted(g, cls, t, q.tenants[t].weight, rows[i].work, now)
                if q.total[0].waiting > 0:
                    push(rows, q, i)
                    look = True
                else:
                    fresh = i
        if fresh != NONE or (look and q.total[0].waiting > 0):
            release(kernel, params, b, rows, q, w, g, fl, win, rt, be, rules, ph, fresh, now)
        if event == events:
            for k in range(w.state[0].touched):
                r = w.touched[k]
                w.is_touched[r] = False
                if ph.replica[r].stretch == 0:
                    plan(ph, r, now)
                w.ends[r] = ph.replica[r].end
            w.state[0].touched = 0
    return w.state[0].open + q.total[0].waiting


@njit(error_model="numpy")
def forecast(survival: Floats, cap: Floats, length_q: Floats, expected: Floats) -> None:
    """Quantiles (n, Q) and whole expected tokens (n,) of forecasts (n, BINS + 1) under caps."""
    for i in range(survival.shape[0]):
        mean, _, _ = kernels.length_into(survival[i], cap[i], length_q[i])
        expected[i] = max(1.0, np.ceil(mean))


def _loop(stamp: int) -> Callable[..., int]:
    """The loop, to be compiled and cached as a whole for this state of its sources.

    Numba's cache knows a function by its own file and what it closes over, not by what it calls.
    """

    def loop(
        kernel: Any,
        params: Floats,
        b: Batch,
        rows: Records,
        q: Room,
        w: World,
        g: Gate,
        fl: FleetColumns,
        win: kernels.Windows,
        speeds: kernels.Speeds,
        rt: Routes,
        be: Beliefs,
        rules: Rules,
        ph: sim.Physics,
    ) -> int:
        _ = stamp
        return _live(kernel, params, b, rows, q, w, g, fl, win, speeds, rt, be, rules, ph)

    return loop


def _stamp() -> int:
    """A hash of the sources, beside this one, whose code and constants the loop is made of."""
    modules = (
        sim, layout, kernels, queue, overload, chains, joint, roofline, borrowing, fast_queue,
        fast_gate, measures, virtual,
    )  # fmt: skip
    value = 0
    for module in modules:
        value = zlib.crc32(Path(str(module.__file__)).read_bytes(), value)
    return value


# ---- from a case to columns


def supports(case: Case, policy: PolicyConfig) -> bool:
    """Whether the loop knows everything that this case and policy need; it knows no scorer that
    learns while it serves, or that a fallback watches over.
    """
    scorer = build_scorer(policy)
    scenario, trace = case.scenario, case.trace
    profiles = [r.profile for r in case.fleet.replicas]
    most = (trace.prompt + trace.output).max(initial=0)
    return (
        scenario.gateways == 1
        and not scenario.failures
        and scenario.length_sigma is not None
        and not len(trace.blocks)
        and policy.hold
        and scorer.learner is None
        and scorer.envelope is None
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
    rows["lane"] = trace.tenant_id * len(case.classes) + trace.class_id
    owned = np.stack([trace.tenant_id, trace.session])
    rows["session"] = np.unique(owned, axis=1, return_inverse=True)[1].reshape(n)
    rows["tie"] = [tie(case.seed, i) for i in range(n)]
    rows["verdict"] = ABSENT
    for name in ("sent", "first", "last"):
        rows[name] = np.nan
    for name in ("start_place", "work_place", "expiry_place", "next_in", "previous_in", "claim"):
        rows[name] = NONE
    return rows, length_q


def _room(case: Case, policy: PolicyConfig) -> Room:
    """The empty queue of a case: its classes, tenants and as many places as may be needed."""
    classes, tenants = np.zeros(len(case.classes), CLASS), np.zeros(len(case.tenants), TENANT)
    for k, c in enumerate(case.classes):
        floor = c.slo.quality
        classes[k] = (
            c.weight, 0.0 if floor is None else floor, c.patience, c.max_wait, c.rank, c.sheddable,
        )  # fmt: skip
    tenants["weight"] = [t.weight for t in case.tenants]
    places = min(policy.queue_limit, len(case.trace)) + 1
    return waiting_room(classes, tenants, places, len(case.fleet.replicas))


def _world(case: Case, routes: Routes, sessions: int, length_q: Floats) -> World:
    trace, n, m = case.trace, len(case.trace), len(case.fleet.replicas)
    quality = np.array([case.fleet.variants[v].quality for v in routes.variant.tolist()])
    allowed = np.ones((len(case.classes), len(quality)), np.bool_)
    for k, c in enumerate(case.classes):
        if c.slo.quality is not None:
            reach = quality >= c.slo.quality
            allowed[k] = reach if reach.any() else quality >= quality.max(initial=0.0)
    follows = np.flatnonzero(~trace.roots)
    follower = follows[np.argsort(trace.follows[follows], kind="stable")]
    counts = np.bincount(trace.follows[follows], minlength=n)
    metrics = case.scenario.metrics
    state, homes = np.zeros(1, STATE), np.zeros(sessions, SESSION)
    state["now"] = state["pulled"] = -np.inf
    state["newest_session"] = state["oldest_session"] = homes["home"] = NONE
    return World(
        state=state,
        reads=np.zeros(m, READ),
        tells=np.zeros(m * (2 + ceil(metrics.delay / metrics.every)), TELL),
        ends=np.full(m, np.inf),
        touched=np.zeros(m, np.int64),
        is_touched=np.zeros(m, np.bool_),
        base=np.full((m, max(r.profile.max_seqs for r in case.believed.replicas)), -np.inf),
        counted=np.zeros(m, COUNTED),
        sessions=homes,
        allowed=allowed,
        length_q=length_q,
        follower_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        follower=follower.astype(np.int64),
        coming_at=np.zeros(n),
        coming=np.zeros(n, np.int64),
        every_route=np.ones(len(quality), np.bool_),
        request_of_slot=np.zeros(n + 1, np.int64),
        measured_at=np.full(m, -np.inf),
    )


def _batch(c: int, who: int, places: int) -> Batch:
    k = K_BEST
    return Batch(
        requests=request_columns(k, np.zeros((len(REQUEST_FLOATS), k))),
        estimates=estimate_columns(k, c),
        allowed=np.zeros((k, c), np.bool_),
        room=np.zeros((k, c), np.bool_),
        draws=np.zeros((k, c)),
        scores=scores(k, c),
        who=np.zeros(who, np.int64),
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
        room = _room(case, policy)
        sessions = int(rows["session"].max(initial=-1)) + 1
        world = _world(case, routes, sessions, length_q)
        metrics = case.scenario.metrics
        quality = [case.fleet.variants[v].quality for v in routes.variant.tolist()]
        ph = sim.physics(case.fleet.replicas, len(rows))
        columns = (
            _batch(len(routes.decode), len(room.union), len(room.by_expiry)),
            rows,
            room,
            world,
            fast_gate.gate(float(policy.overload_target), case.classes, case.tenants, sessions),
            fleet,
            kernels.view(kernels.Windows, fleet),
            kernels.view(kernels.Speeds, fleet),
            routes,
            Beliefs(
                scales=OnlineScales(fleet.uncertainty).rows,
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
                sessions=int(prefix_index.SESSIONS),
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
        b, _, _, _, _, fleet, _, _, routes, *_ = columns
        row = np.zeros(1)
        inputs = (row, b.requests, fleet, routes, b.estimates, b.room, b.draws, 0.0, b.scores)
        call = tuple(kind(x) for x in inputs)
        kernel.compile(call)
        if self._ready is None:
            function = types.FunctionType(types.none(*call))
            signature = (function, kind(row), *(kind(c) for c in columns))
            self._ready = njit(signature, cache=True, error_model="numpy")(_loop(_stamp()))
        return self._ready
