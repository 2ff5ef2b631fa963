"""The fleets of `training.fleet_env`, compiled: one call takes an action for each and runs each on
to its next decision.

A fleet is a number of modelled replicas (`backends.sim.replica`), gateways that each book what they
sent with the core's own functions (`policies.kernels`) and hear of the rest through late readings,
and a list of requests drawn at reset. Events at one instant happen in the order of the virtual
shell: replicas, readings, waiting that ends, arrivals. Every array has the fleets along its first
axis; `at` gives one fleet's part. `NONE` is -1 (CORE section 3.13).
"""
# Inside compiled code numba, not mypy, knows the types of array elements.
# mypy: disable-error-code="arg-type, no-any-return, return-value, assignment, call-overload"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from backends.sim import replica as sim
from domain.columns import (
    EstimateColumns,
    FleetColumns,
    Floats,
    Ints,
    Mask,
    RequestColumns,
    Routes,
)
from policies import encoding, kernels
from predictors import roofline
from training.borrowed import at, borrowed, inlined, prefetch
from training.fast_queue import Records, record

fire, plan, reading_into = inlined(sim.fire), inlined(sim.plan), inlined(sim.reading_into)
merge_reading, roofline_into = inlined(kernels.merge_reading), inlined(roofline.roofline_into)
encode_request, encode_route = inlined(encoding.encode_request), inlined(encoding.encode_route)

NONE = -1
QUEUE = 64
"""Requests a gateway holds at most."""
OFFERS = 4
"""Waiting requests that one event at the fleet makes a gateway ask about again, at most."""
PULL = 0.02
"""Seconds after which a gateway counts its streams' tokens again before a decision."""

REQUEST = record(
    f="arrival prompt expected ttft tpot e2e quality weight credit until sent first",
    i="tokens output gateway rank tie replica",
    b="waits",
)
"""One request: as drawn, what meeting its limits earns, the latest useful start, and how it went.
"""
STATE = record(
    f="now decided delay every",
    i="replicas gateways requests coming asking reads tells settled decisions limit woken offer "
    "offers",
)
"""Counters of one fleet. `asking`: the request to decide on; `woken`: bits of the gateways that
shall look at what waits; `offer`: place in that queue; `limit`: decisions after which an episode
is cut off."""


class Fleets(NamedTuple):
    """F fleets of at most M replicas, G gateways and n requests; P readings on their way."""

    state: Records  # (F, 1) of STATE
    requests: Records  # (F, n) of REQUEST
    length_q: Floats  # (F, n, Q)
    quality: Floats  # (F, M)
    columns: FleetColumns  # (F, G, M) and (F, G, M, S)
    physics: sim.Physics  # (F, ...)
    measured_at: Floats  # (F, G, M)
    pulled: Floats  # (F, G)
    queue: Ints  # (F, G, QUEUE) by latest useful start
    queued: Ints  # (F, G)
    dirty: Ints  # (F, M) replicas that something entered or left
    readings: Floats  # (F, P, 4): measured at, running, waiting, share
    mask: NDArray[np.int8]  # (F, M + 2) actions that the decision allows


class Scratch(NamedTuple):
    """One decision's columns, shared by all fleets: n = 1, c = M."""

    requests: RequestColumns
    estimates: EstimateColumns
    allowed: Mask
    room: Mask
    claims: Ints  # (M,) NONE
    scales: Floats  # (5, M)
    routes: Routes
    kinds: Ints
    jobs: Ints


class Results(NamedTuple):
    """What the environment gives back, (F, ...)."""

    request: NDArray[np.float32]  # (F, R)
    routes: NDArray[np.float32]  # (F, M, C)
    mask: NDArray[np.int8]  # (F, M + 2)
    reward: Floats
    elapsed: Floats  # s since the fleet's last decision
    now: Floats  # s since the fleet's start
    met: Ints  # requests settled since then: all limits met
    missed: Ints  # not all of them, the refused ones among them
    refused: Ints
    first_met: Ints  # of those, what belonged to the first class
    first_missed: Ints
    terminated: Mask
    truncated: Mask


@njit(error_model="numpy")
def _leave(x: Fleets, g: int, place: int) -> None:
    """Take what stands at this place out of gateway g's queue."""
    x.requests[x.queue[g, place]].waits = False
    n = x.queued[g] - 1
    x.queued[g] = n
    for k in range(place, n):
        x.queue[g, k] = x.queue[g, k + 1]


@njit(error_model="numpy")
def _wait(x: Fleets, g: int, i: int) -> None:
    """Request i waits at gateway g; the queue has room."""
    k = x.queued[g]
    x.queued[g] = k + 1
    until = x.requests[i].until
    while k > 0 and x.requests[x.queue[g, k - 1]].until > until:
        x.queue[g, k] = x.queue[g, k - 1]
        k -= 1
    x.queue[g, k] = i
    x.requests[i].waits = True


@njit(error_model="numpy", inline="always")
def _pull(x: Fleets, fl: FleetColumns, g: int, now: float) -> None:
    """Whole tokens of gateway g's streams, unless it counted them a moment ago."""
    if now - x.pulled[g] < PULL:
        return
    x.pulled[g] = now
    for r in range(x.state[0].replicas):
        if fl.n_streams[r] == 0 or x.physics.replica[r].n_decode == 0:
            continue
        done = x.physics.replica[r].steps + sim.tokens_done(x.physics, r, now)
        some = False
        for k in range(fl.n_streams[r]):
            j = fl.slot[r, k]
            if x.physics.job[j].state != sim.DECODING or not fl.tokens[r, k] > 0.0:
                continue
            count = float(x.physics.job[j].generated + done - x.physics.job[j].joined)
            if count > fl.tokens[r, k]:
                fl.context[r] += count - fl.tokens[r, k]
                fl.tokens[r, k] = count
                some = True
        if some:
            kernels.remember(fl, r, now)


@njit(error_model="numpy", inline="always")
def look(x: Fleets, sc: Scratch, fl: FleetColumns, g: int, i: int) -> bool:
    """Whether some replica has room for request i; its row is written."""
    rq, now = sc.requests, x.state[0].now
    rq.prompt[0] = x.requests[i].prompt
    rq.expected[0] = x.requests[i].expected
    rq.arrived[0] = x.requests[i].arrival
    rq.ttft[0] = x.requests[i].ttft
    rq.tpot[0] = x.requests[i].tpot
    rq.e2e[0] = x.requests[i].e2e
    rq.quality[0] = x.requests[i].quality
    rq.weight[0] = x.requests[i].weight
    rq.class_id[0] = x.requests[i].rank
    rq.tie[0] = x.requests[i].tie
    rq.length_q[0] = x.length_q[i]
    floor, best, m = x.requests[i].quality, 0.0, x.state[0].replicas
    for c in range(m):
        best = max(best, x.quality[c])
    floor = min(floor, best)
    for c in range(sc.allowed.shape[1]):
        sc.allowed[0, c] = c < m and x.quality[c] >= floor
    return kernels.room_into(
        rq, fl, sc.routes, sc.allowed, sc.claims, at(x.measured_at, g), now, sc.room
    )


@njit(error_model="numpy", inline="always")
def _ask(x: Fleets, sc: Scratch, out: Results, fl: FleetColumns, f: int, g: int, i: int) -> None:
    """Write the decision on request i, which `look` has looked at."""
    now, m = x.state[0].now, x.state[0].replicas
    es = sc.estimates
    # the streams of hundreds of fleets do not fit into the cache: without this, a third is waiting
    for r in range(m):
        if fl.n_streams[r] > 0:
            prefetch(fl.tokens, r, 0)
            prefetch(fl.first_at, r, 0)
            prefetch(fl.expected, r, 0)
            prefetch(fl.tpot_limit, r, 0)
    roofline_into(sc.requests, fl, sc.routes, sc.room, sc.scales, now, es)
    x.state[0].asking = i
    x.state[0].decisions += 1
    room = sc.room[0, :m]
    encode_request(sc.requests, 0, room, float(x.queued[g]), now, out.request[f])
    for c in range(m):
        if sc.room[0, c]:
            es.p_slo[0, c] = es.p_raw[0, c]
            es.quality[0, c] = x.quality[c]
        encode_route(
            sc.requests, fl, sc.routes, es, 0, c, sc.allowed[0, c], sc.room[0, c], now,
            out.routes[f, c],
        )  # fmt: skip
        x.mask[c] = sc.room[0, c]
    most = sc.allowed.shape[1]
    for c in range(m, most):
        out.routes[f, c, :] = 0.0
        x.mask[c] = 0
    queued = x.requests[i].waits or x.queued[g] < QUEUE
    x.mask[most] = queued and now < x.requests[i].until
    x.mask[most + 1] = 1
    out.mask[f] = x.mask
    out.elapsed[f] = now - x.state[0].decided
    out.now[f] = now
    x.state[0].decided = now
    out.truncated[f] = x.state[0].decisions > x.state[0].limit


@njit(error_model="numpy", inline="always")
def _missed(x: Fleets, out: Results, f: int, i: int) -> None:
    """Request i settles without its limits met."""
    x.state[0].settled += 1
    out.missed[f] += 1
    if x.requests[i].rank == 0:
        out.first_missed[f] += 1


@njit(error_model="numpy", inline="always")
def _act(x: Fleets, out: Results, f: int, action: int) -> None:
    """Do what was decided on the request asked about: a replica, hold (M), or refuse (M + 1)."""
    i, now, most = x.state[0].asking, x.state[0].now, x.mask.shape[0] - 2
    g = x.requests[i].gateway
    x.state[0].asking = NONE
    if action < 0 or action >= most + 2 or x.mask[action] == 0:
        action = most if x.mask[most] else most + 1
    if action == most:
        if x.requests[i].waits:
            x.state[0].offer += 1
        else:
            _wait(x, g, i)
        return
    if x.requests[i].waits:
        _leave(x, g, x.state[0].offer)
    if action == most + 1:
        _missed(x, out, f, i)
        out.refused[f] += 1
        return
    fl, arrival = at(x.columns, g), x.requests[i].arrival
    kernels.book(
        fl, action, action, i, x.requests[i].prompt, x.requests[i].prompt, x.requests[i].expected,
        x.requests[i].tpot, arrival + x.requests[i].ttft, arrival + x.requests[i].e2e, now,
    )  # fmt: skip
    x.requests[i].replica = action
    x.requests[i].sent = now
    sim.set_job(x.physics, i, x.requests[i].tokens, x.requests[i].output, sim.NONE, 0, 0)
    sim.enter(x.physics, action, i, now)
    x.dirty[action] = 1


@njit(error_model="numpy", inline="always")
def _happened(x: Fleets, out: Results, f: int, kind: int, i: int) -> None:
    """Request i gave its first token, or its last: then it settles, and its reward is due."""
    now, g, r = x.state[0].now, x.requests[i].gateway, x.requests[i].replica
    fl = at(x.columns, g)
    if x.queued[g] > 0:
        x.state[0].woken |= 1 << g
    if kind == sim.FIRST_TOKEN:
        x.requests[i].first = now
        kernels.first_token(fl, r, r, i, now)
        return
    kernels.unbook(fl, r, r, i, now)
    pace = 0.0
    if x.requests[i].output > 1:
        pace = (now - x.requests[i].first) / (x.requests[i].output - 1)
    met = x.requests[i].first - x.requests[i].arrival <= x.requests[i].ttft
    met = met and pace <= x.requests[i].tpot
    met = met and now - x.requests[i].arrival <= x.requests[i].e2e
    if not met:
        _missed(x, out, f, i)
        return
    x.state[0].settled += 1
    out.reward[f] += x.requests[i].credit
    out.met[f] += 1
    if x.requests[i].rank == 0:
        out.first_met[f] += 1


@njit(error_model="numpy", inline="always")
def _next(x: Fleets, sc: Scratch, out: Results, f: int) -> int:
    """Let the next event happen; the request that arrived with it, or NONE."""
    st = x.state[0]
    when, r = np.inf, np.int64(NONE)
    for k in range(st.replicas):
        if x.physics.replica[k].end < when:
            when, r = x.physics.replica[k].end, np.int64(k)
    arrival = x.requests[st.coming].arrival if st.coming < st.requests else np.inf
    read = st.every * st.reads / st.replicas
    told = st.every * st.tells / st.replicas + st.delay
    expiry, late = np.inf, np.int64(NONE)
    for g in range(st.gateways):
        if x.queued[g] > 0 and x.requests[x.queue[g, 0]].until < expiry:
            expiry, late = x.requests[x.queue[g, 0]].until, np.int64(g)
    now = min(when, arrival, read, told, expiry)
    x.state[0].now = now
    if when == now:
        count = fire(x.physics, r, sc.kinds, sc.jobs)
        x.dirty[r] = 1
        for e in range(count):
            _happened(x, out, f, sc.kinds[e], sc.jobs[e])
    elif told == now and st.tells < st.reads:
        who, place = st.tells % st.replicas, st.tells % x.readings.shape[0]
        x.state[0].tells += 1
        load = x.readings[place]
        for g in range(st.gateways):
            x.measured_at[g, who] = load[0]
            merge_reading(at(x.columns, g), who, load[0], load[1], load[2], load[3])
            if x.queued[g] > 0:
                x.state[0].woken |= 1 << g
    elif read == now:
        who, place = st.reads % st.replicas, st.reads % x.readings.shape[0]
        x.state[0].reads += 1
        x.readings[place, 0] = now
        reading_into(x.physics, who, now, x.readings[place, 1:])
    elif expiry == now:
        gone = x.queue[late, 0]
        _leave(x, late, 0)
        _missed(x, out, f, gone)
    else:
        x.state[0].coming += 1
        return st.coming - 1
    return np.int64(NONE)


@njit(error_model="numpy", inline="always")
def _run(x: Fleets, sc: Scratch, out: Results, f: int, action: int) -> None:
    """Act, and run fleet f on to its next decision or to the end of its last request."""
    out.reward[f] = 0.0
    out.met[f] = out.missed[f] = out.refused[f] = 0
    out.first_met[f] = out.first_missed[f] = 0
    out.terminated[f] = out.truncated[f] = False
    if x.state[0].asking != NONE:
        _act(x, out, f, action)
    arrived = np.int64(NONE)
    while True:
        asked, gateway = np.int64(NONE), np.int64(0)
        if arrived != NONE:
            asked, gateway, arrived = arrived, x.requests[arrived].gateway, np.int64(NONE)
            fl = at(x.columns, gateway)
            _pull(x, fl, gateway, x.state[0].now)
            look(x, sc, fl, gateway, asked)
        while asked == NONE and x.state[0].woken != 0:
            while (x.state[0].woken >> gateway) & 1 == 0:
                gateway += 1
            fl = at(x.columns, gateway)
            if x.state[0].offer == 0 and x.queued[gateway] > 0:
                _pull(x, fl, gateway, x.state[0].now)
            while x.state[0].offer < x.queued[gateway] and x.state[0].offers < OFFERS:
                i = x.queue[gateway, x.state[0].offer]
                if look(x, sc, fl, gateway, i):
                    asked = i
                    x.state[0].offers += 1
                    break
                x.state[0].offer += 1
            if asked == NONE:
                x.state[0].woken &= ~(1 << gateway)
                x.state[0].offer = 0
                x.state[0].offers = 0
        if asked != NONE:
            _ask(x, sc, out, at(x.columns, gateway), f, gateway, asked)
            return
        for r in range(x.state[0].replicas):
            if x.dirty[r] != 0:
                x.dirty[r] = 0
                if x.physics.replica[r].stretch == 0:
                    plan(x.physics, r, x.state[0].now)
        if x.state[0].settled == x.state[0].requests:
            break
        arrived = _next(x, sc, out, f)
    out.terminated[f] = True
    out.request[f, :] = 0.0
    out.routes[f, :, :] = 0.0
    out.mask[f, :] = 0
    out.mask[f, out.mask.shape[1] - 1] = 1
    out.elapsed[f] = x.state[0].now - x.state[0].decided
    out.now[f] = x.state[0].now


@njit(cache=True, error_model="numpy")
def step_all(fleets: Fleets, scratch: Scratch, actions: Ints, out: Results) -> None:
    """Take actions (F,) and run every fleet on to its next decision; writes `out`."""
    fleets, scratch, out = borrowed(fleets), borrowed(scratch), borrowed(out)
    for f in range(actions.shape[0]):
        _run(at(fleets, f), scratch, out, f, actions[f])
