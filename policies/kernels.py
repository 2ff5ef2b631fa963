"""Array functions of the decision core: the only place where a rule about the ledger is written.

The live core and the compiled simulation loop call the same compiled functions, so their decisions
are equal (CORE section 3.1). Inside these functions `NONE` and positional columns are allowed,
nowhere else. Loops and scalars only; no fastmath, no parallel. Counts are whole tokens, so that
sums come back to exactly zero.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import numpy as np
from numba import njit

from domain.columns import (
    HISTORY,
    HISTORY_STEP,
    Bools,
    Draws,
    EstimateColumns,
    FleetColumns,
    Floats,
    Ints,
    Mask,
    RequestColumns,
    Routes,
)
from domain.length import EDGES, QUANTILE_GRID

NONE = -1
STALE = 5.0
"""Seconds after which a reading counts for nothing and the ledger stands alone."""

_EDGES = EDGES.copy()
_LEVELS = QUANTILE_GRID.copy()


# ---- narrow views: a call costs by the arrays it is handed (56 ns each), so the core hands over
# only the columns that are read. The compiled loop passes the whole fleet to the same functions.


class Windows(NamedTuple):
    """The columns that say whether a window has room, (m,) and (m, S)."""

    usable: Bools
    running: Floats
    backlog_tokens: Floats
    kv_used: Floats
    age: Floats
    foreign_running: Floats
    foreign_context: Floats
    foreign_backlog: Floats
    n_streams: Ints
    max_seqs: Floats
    max_context: Floats
    kv_capacity: Floats
    window: Floats
    per_token: Floats
    slot: Ints


class Bookings(NamedTuple):
    """The columns that change when a stream is booked, begins or ends, (m,) and (m, S)."""

    running: Floats
    context: Floats
    backlog_tokens: Floats
    kv_used: Floats
    dispatched: Floats
    n_streams: Ints
    slot: Ints
    first_at: Floats
    tokens: Floats
    prompt: Floats
    uncached: Floats
    expected: Floats
    reserved: Floats
    tpot_limit: Floats
    ttft_deadline: Floats
    e2e_deadline: Floats
    history_at: Floats
    history_running: Floats
    history_context: Floats
    history_next: Ints


class Speeds(NamedTuple):
    """The profile columns that `fastest` reads, (m,)."""

    overhead: Floats
    weights: Floats
    per_sequence: Floats
    per_context: Floats
    per_token: Floats
    per_attention: Floats
    experts: Floats
    expert_tokens: Floats
    chunk: Floats


View = TypeVar("View", Windows, Bookings, Speeds)


def view(kind: type[View], fleet: FleetColumns) -> View:
    """Those columns of the fleet; the same arrays."""
    return kind(*(getattr(fleet, name) for name in kind._fields))


# ---- chance


@njit(cache=True, error_model="numpy")
def mixed(a: int, b: int) -> int:
    """A 63-bit hash of two integers (splitmix64 finaliser; Steele, Lea and Flood, 2014)."""
    z = np.uint64(a) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(b) * np.uint64(0xD1B54A32D192ED03)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.int64(z >> np.uint64(1))  # type: ignore[return-value] # an int under numba


@njit(cache=True, error_model="numpy")
def uniform(seed: int, counter: int, lane: int) -> float:
    """Uniform in [0, 1): a pure function of (seed, counter, lane), so that the generator's state is
    one counter.
    """
    return (mixed(mixed(seed, counter), lane) >> 10) * (1.0 / 9007199254740992.0)


@njit(cache=True, error_model="numpy")
def draw_into(seed: int, counter: int, out: Draws) -> None:
    """Fill (n, c) with uniforms of draw number `counter`."""
    for i in range(out.shape[0]):
        for c in range(out.shape[1]):
            out[i, c] = uniform(seed, counter, 1 + i * out.shape[1] + c)


# ---- length


@njit(cache=True, error_model="numpy")
def length_into(survival: Floats, cap: float, out: Floats) -> tuple[float, float, float]:
    """Quantiles at `QUANTILE_GRID` into out (Q,), under cap tokens; returns (mean, median, P90)
    under the cap.
    """
    bins = _EDGES.shape[0] - 1
    mean = 0.0
    for k in range(bins):
        low, high = _EDGES[k], _EDGES[k + 1]
        if low >= cap:
            break
        top, end = survival[k], survival[k + 1]
        if high > cap:
            end = top + (end - top) * (cap - low) / (high - low)
            high = cap
        mean += (high - low) * 0.5 * (top + end)
    k = 1
    n = _LEVELS.shape[0]
    median = cap
    p90 = cap
    for j in range(n + 2):
        level = _LEVELS[j] if j < n else (0.5 if j == n else 0.9)
        if j >= n:
            k = 1
        while k < bins and 1.0 - survival[k] < level - 1e-12:
            k += 1
        before = 1.0 - survival[k - 1]
        rise = max(1.0 - survival[k] - before, 1e-300)
        part = min(max((level - before) / rise, 0.0), 1.0)
        at = min(_EDGES[k - 1] + part * (_EDGES[k] - _EDGES[k - 1]), cap)
        if j < n:
            out[j] = at
        elif j == n:
            median = at
        else:
            p90 = at
    return mean, median, p90


# ---- ledger


@njit(cache=True, error_model="numpy")
def remember(fleet: FleetColumns | Bookings, r: int, now: float) -> None:
    """Note replica r's own counts for the last two seconds; one sample per `HISTORY_STEP`."""
    last = fleet.history_next[r] - 1
    if last < 0:
        last = HISTORY - 1
    if now - fleet.history_at[r, last] >= HISTORY_STEP:
        last = fleet.history_next[r]
        fleet.history_next[r] = (last + 1) % HISTORY
        fleet.history_at[r, last] = now
    fleet.history_running[r, last] = fleet.running[r]
    fleet.history_context[r, last] = fleet.context[r]


@njit(cache=True, error_model="numpy")
def own_at(fleet: FleetColumns | Bookings, r: int, at: float) -> tuple[float, float]:
    """Own (running, context) of replica r at a past time, from its history; zero before the first
    sample.
    """
    index = fleet.history_next[r]
    for _ in range(HISTORY):
        index -= 1
        if index < 0:
            index = HISTORY - 1
        if fleet.history_at[r, index] <= at:
            if fleet.history_at[r, index] == -np.inf:
                return 0.0, 0.0
            return fleet.history_running[r, index], fleet.history_context[r, index]
    return fleet.history_running[r, index], fleet.history_context[r, index]


@njit(cache=True, error_model="numpy")
def position(fleet: FleetColumns | Bookings, r: int, slot: int) -> int:
    """Column of a stream in replica r's rows, `NONE` if it is not there."""
    for k in range(fleet.n_streams[r]):
        if fleet.slot[r, k] == slot:
            return k
    return NONE


@njit(cache=True, error_model="numpy")
def book(
    fleet: FleetColumns | Bookings,
    r: int,
    p: int,
    slot: int,
    prompt: float,
    uncached: float,
    expected: float,
    tpot_limit: float,
    ttft_deadline: float,
    e2e_deadline: float,
    now: float,
) -> None:
    """Add a stream to decode replica r, and its prefill to replica p. The caller has checked the
    room.
    """
    k = fleet.n_streams[r]
    fleet.n_streams[r] = k + 1
    fleet.slot[r, k] = slot
    fleet.first_at[r, k] = np.inf
    fleet.tokens[r, k] = 0.0
    fleet.prompt[r, k] = prompt
    fleet.uncached[r, k] = uncached
    fleet.expected[r, k] = expected
    fleet.reserved[r, k] = prompt + expected
    fleet.tpot_limit[r, k] = tpot_limit
    fleet.ttft_deadline[r, k] = ttft_deadline
    fleet.e2e_deadline[r, k] = e2e_deadline
    fleet.running[r] += 1.0
    fleet.context[r] += prompt
    fleet.kv_used[r] += prompt + expected
    fleet.backlog_tokens[p] += uncached
    fleet.dispatched[r] += 1.0
    remember(fleet, r, now)


@njit(cache=True, error_model="numpy")
def first_token(fleet: FleetColumns | Bookings, r: int, p: int, slot: int, now: float) -> None:
    """The stream's prefill is over: its prompt leaves the backlog of replica p."""
    k = position(fleet, r, slot)
    if k == NONE or fleet.tokens[r, k] > 0.0:
        return
    fleet.first_at[r, k] = now
    fleet.tokens[r, k] = 1.0
    fleet.context[r] += 1.0
    fleet.backlog_tokens[p] -= fleet.uncached[r, k]
    remember(fleet, r, now)


@njit(cache=True, error_model="numpy")
def progress_many(
    fleet: FleetColumns | Bookings, replicas: Ints, slots: Ints, tokens: Ints, now: float
) -> None:
    """Counts of many streams at once; unknown slots, and counts that do not rise, are skipped."""
    for j in range(replicas.shape[0]):
        r = replicas[j]
        k = position(fleet, r, slots[j])
        if k != NONE and fleet.tokens[r, k] > 0.0 and tokens[j] > fleet.tokens[r, k]:
            fleet.context[r] += tokens[j] - fleet.tokens[r, k]
            fleet.tokens[r, k] = tokens[j]
            remember(fleet, r, now)


@njit(cache=True, error_model="numpy")
def unbook(fleet: FleetColumns | Bookings, r: int, p: int, slot: int, now: float) -> bool:
    """Take a stream out; what it held is free. False if it was not there."""
    k = position(fleet, r, slot)
    if k == NONE:
        return False
    fleet.running[r] -= 1.0
    fleet.context[r] -= fleet.prompt[r, k] + fleet.tokens[r, k]
    fleet.kv_used[r] -= fleet.reserved[r, k]
    if fleet.tokens[r, k] == 0.0:
        fleet.backlog_tokens[p] -= fleet.uncached[r, k]
    last = fleet.n_streams[r] - 1
    fleet.n_streams[r] = last
    fleet.slot[r, k] = fleet.slot[r, last]
    fleet.first_at[r, k] = fleet.first_at[r, last]
    fleet.tokens[r, k] = fleet.tokens[r, last]
    fleet.prompt[r, k] = fleet.prompt[r, last]
    fleet.uncached[r, k] = fleet.uncached[r, last]
    fleet.expected[r, k] = fleet.expected[r, last]
    fleet.reserved[r, k] = fleet.reserved[r, last]
    fleet.tpot_limit[r, k] = fleet.tpot_limit[r, last]
    fleet.ttft_deadline[r, k] = fleet.ttft_deadline[r, last]
    fleet.e2e_deadline[r, k] = fleet.e2e_deadline[r, last]
    fleet.slot[r, last] = NONE
    remember(fleet, r, now)
    return True


@njit(cache=True, error_model="numpy")
def merge_reading(
    fleet: FleetColumns, r: int, measured_at: float, running: float, waiting: float, kv_share: float
) -> None:
    """What a replica's own metrics show beyond this gateway's counts at that time; nan is unknown.

    foreign = max(0, reading - own at the reading's time): adding the ledger to a reading would
    count own requests twice.
    """
    own_running, own_context = own_at(fleet, r, measured_at)
    if not math.isnan(running):
        seen = running + (0.0 if math.isnan(waiting) else waiting)
        fleet.foreign_running[r] = max(0.0, seen - own_running)
    if not math.isnan(kv_share) and fleet.kv_capacity[r] < np.inf:
        fleet.foreign_context[r] = max(0.0, kv_share * fleet.kv_capacity[r] - own_context)


@njit(cache=True, error_model="numpy")
def age_readings(fleet: FleetColumns | Windows, measured_at: Floats, now: float) -> None:
    """Write each reading's age; one older than `STALE` counts for nothing."""
    for r in range(fleet.age.shape[0]):
        fleet.age[r] = now - measured_at[r]
        if fleet.age[r] > STALE:
            fleet.foreign_running[r] = 0.0
            fleet.foreign_context[r] = 0.0
            fleet.foreign_backlog[r] = 0.0


# ---- room and choice


@njit(cache=True, error_model="numpy")
def any_open(fleet: FleetColumns | Windows, measured_at: Floats, prompt: float, now: float) -> bool:
    """Whether some usable replica's window is open for a prompt of so many tokens.

    With the least prompt that waits: if not, no queued request needs looking at.
    """
    age_readings(fleet, measured_at, now)
    most = fleet.slot.shape[1]
    for r in range(fleet.usable.shape[0]):
        if not fleet.usable[r] or fleet.n_streams[r] >= most:
            continue
        load = fleet.running[r] + fleet.foreign_running[r]
        if load >= fleet.max_seqs[r]:
            continue
        held = fleet.kv_used[r] + fleet.foreign_context[r]
        if load > 0.0 and held + prompt > fleet.kv_capacity[r]:
            continue
        backlog = fleet.backlog_tokens[r] + fleet.foreign_backlog[r]
        if backlog <= 0.0 or (backlog + prompt) * fleet.per_token[r] <= fleet.window[r]:
            return True
    return False


@njit(cache=True, error_model="numpy")
def room_into(
    requests: RequestColumns,
    fleet: FleetColumns | Windows,
    routes: Routes,
    allowed: Mask,
    claims: Ints,
    measured_at: Floats,
    now: float,
    room: Mask,
) -> bool:
    """Which (request, route) fit now: the replica's window has room (CORE section 3.9). True if any
    does.

    `allowed` (n, c) are rights and variants; `claims` (m,) holds the tie of the request that closed
    the replica's window for others, `NONE` where nobody did. A prompt beyond the backlog limit may
    enter when the backlog is zero; a request that alone would overflow the KV cache may enter an
    idle replica.
    """
    age_readings(fleet, measured_at, now)
    some = False
    most = fleet.slot.shape[1]
    for i in range(allowed.shape[0]):
        for c in range(allowed.shape[1]):
            room[i, c] = False
            if not allowed[i, c]:
                continue
            d = routes.decode[c]
            p = routes.prefill[c]
            if not (fleet.usable[d] and fleet.usable[p]):
                continue
            if requests.prompt[i] + 1.0 > fleet.max_context[d]:
                continue
            if claims[d] != NONE and claims[d] != requests.tie[i]:
                continue
            load = fleet.running[d] + fleet.foreign_running[d]
            if load >= fleet.max_seqs[d] or fleet.n_streams[d] >= most:
                continue
            need = requests.prompt[i] + requests.expected[i]
            held = fleet.kv_used[d] + fleet.foreign_context[d]
            if load > 0.0 and held + need > fleet.kv_capacity[d]:
                continue
            backlog = fleet.backlog_tokens[p] + fleet.foreign_backlog[p]
            if (
                backlog > 0.0
                and (backlog + requests.prompt[i]) * fleet.per_token[p] > fleet.window[p]
            ):
                continue
            room[i, c] = True
            some = True
    return some


@njit(cache=True, error_model="numpy")
def best_route(scores: Floats, room: Bools, tie: int) -> int:
    """Best route of one request; equal scores go by a hash of (request, route). `NONE` if no score
    is finite.
    """
    best = NONE
    top = -np.inf
    top_hash = 0
    for c in range(room.shape[0]):
        if not room[c] or not scores[c] > -np.inf:
            continue
        if scores[c] > top:
            best, top, top_hash = c, scores[c], mixed(tie, c)
        elif scores[c] == top:
            h = mixed(tie, c)
            if h > top_hash:
                best, top_hash = c, h
    return best


@njit(cache=True, error_model="numpy")
def first_fit(scores: Floats, room: Mask, tie: Ints) -> tuple[int, int]:
    """First request in queue order that fits, and its best route; (NONE, NONE) if none does."""
    for i in range(room.shape[0]):
        c = best_route(scores[i], room[i], tie[i])
        if c != NONE:
            return i, c
    return NONE, NONE


@njit(cache=True, error_model="numpy")
def best_pair(scores: Floats, room: Mask, tie: Ints) -> tuple[int, int]:
    """Best (request, route) over all; equal ones go to the earlier request. Only for scorers whose
    unit is `value`.
    """
    best_i, best_c, top = NONE, NONE, -np.inf
    for i in range(room.shape[0]):
        c = best_route(scores[i], room[i], tie[i])
        if c != NONE and scores[i, c] > top:
            best_i, best_c, top = i, c, scores[i, c]
    return best_i, best_c


@njit(cache=True, error_model="numpy")
def earliest(hold: Floats) -> float:
    """When the first of the requests (n,) that are held back is looked at again; inf if none is."""
    at = np.inf
    for i in range(hold.shape[0]):
        if hold[i] > -np.inf:
            at = min(at, hold[i])
    return at


@njit(cache=True, error_model="numpy")
def best_chance(room: Bools, p_slo: Floats) -> float:
    """The largest P(SLO) among one request's routes with room."""
    best = 0.0
    for c in range(room.shape[0]):
        if room[c] and p_slo[c] > best:
            best = p_slo[c]
    return best


@njit(cache=True, error_model="numpy")
def explored(
    room: Bools, p_slo: Floats, greedy: int, epsilon: float, within: float, coin: float, pick: float
) -> tuple[int, float]:
    """Greedy route, or with probability epsilon a uniform one among routes nearly as good; with its
    exact propensity.

    Nearly as good: P(SLO) within `within` of the best. `coin` and `pick` are uniforms.
    """
    best = -1.0
    for c in range(room.shape[0]):
        if room[c] and p_slo[c] > best:
            best = p_slo[c]
    count = 0
    inside = False
    for c in range(room.shape[0]):
        if room[c] and p_slo[c] >= best - within:
            count += 1
            inside |= c == greedy
    chosen = greedy
    if coin < epsilon:
        wanted = min(int(pick * count), count - 1)
        for c in range(room.shape[0]):
            if room[c] and p_slo[c] >= best - within:
                if wanted == 0:
                    chosen = c
                    break
                wanted -= 1
    propensity = 0.0
    if chosen == greedy:
        propensity += 1.0 - epsilon
    if chosen != greedy or inside:
        propensity += epsilon / count
    return chosen, propensity


@njit(cache=True, error_model="numpy")
def leading(
    scores: Floats, room: Mask, estimates: EstimateColumns, i: int, chosen: int, out: Floats
) -> int:
    """The chosen route of request i and then the best others into out (k, 6); returns how many.

    A row is (route, score, P(SLO), median TTFT, median TPOT, quality), for the decision log. Equal
    scores stand in the order of their routes.
    """
    middle = estimates.ttft.shape[2] // 2
    most = out.shape[0]
    out[0, 0], out[0, 1] = chosen, scores[i, chosen]
    count = 1
    for c in range(room.shape[1]):
        score = scores[i, c]
        if c == chosen or not room[i, c] or not score > -np.inf:
            continue
        if count == most and (most == 1 or not score > out[most - 1, 1]):
            continue
        at = min(count, most - 1)
        count = min(count + 1, most)
        while at > 1 and score > out[at - 1, 1]:
            out[at, 0], out[at, 1] = out[at - 1, 0], out[at - 1, 1]
            at -= 1
        out[at, 0], out[at, 1] = c, score
    for k in range(count):
        c = int(out[k, 0])
        out[k, 2] = estimates.p_slo[i, c]
        out[k, 3] = estimates.ttft[i, c, middle]
        out[k, 4] = estimates.tpot[i, c, middle]
        out[k, 5] = estimates.quality[i, c]
    return count


@njit(cache=True, error_model="numpy")
def step_time(
    fleet: FleetColumns, r: int, batch: float, context: float, prefill: float, cached: float
) -> float:
    """Seconds of one engine step of replica r by its profile (`domain.fleet.Profile`).

    `prefill` new tokens after `cached` ones, beside `batch` sequences with `context` resident
    tokens.
    """
    tokens = batch + prefill
    memory = fleet.weights[r] + fleet.per_context[r] * context
    compute = fleet.per_token[r] * tokens
    compute += fleet.per_attention[r] * prefill * (cached + prefill / 2.0)
    fixed = fleet.overhead[r] + fleet.per_sequence[r] * batch
    fixed += fleet.experts[r] * tokens / (tokens + fleet.expert_tokens[r])
    step: float = fixed + max(memory, compute)
    return step


# ---- waiting for a warm replica


@njit(cache=True, error_model="numpy")
def prefill_seconds(fleet: FleetColumns | Speeds, p: int, prompt: float, cached: float) -> float:
    """Seconds that idle replica p needs for the rest of a prompt of which it holds `cached` tokens,
    by its profile.
    """
    new = max(prompt - cached, 1.0)
    steps = math.ceil(new / fleet.chunk[p])
    compute = fleet.per_token[p] * new + fleet.per_attention[p] * new * (cached + new / 2.0)
    fixed = fleet.overhead[p] + fleet.experts[p] * new / (new + steps * fleet.expert_tokens[p])
    seconds: float = steps * fixed + max(steps * fleet.weights[p], compute)
    return seconds


@njit(cache=True, error_model="numpy")
def opens_in(fleet: FleetColumns, d: int, p: int, prompt: float, need: float) -> float:
    """Predicted seconds until the windows of replicas d (decode) and p (prefill) have room for a
    prompt and `need` KV tokens; inf if own streams alone cannot make it.

    The backlog drains at p's profile; of own streams those expected to end first end, until seats
    and KV cache suffice: tokens left, at least one, times the present step.
    """
    backlog = fleet.backlog_tokens[p] + fleet.foreign_backlog[p]
    wait = 0.0
    if backlog > 0.0:
        over = (backlog + prompt) * fleet.per_token[p] - fleet.window[p]
        wait = max(0.0, min(over, backlog * fleet.per_token[p]))
    load = fleet.running[d] + fleet.foreign_running[d]
    seats = max(load - fleet.max_seqs[d], float(fleet.n_streams[d] - fleet.slot.shape[1])) + 1.0
    context = fleet.context[d] + fleet.foreign_context[d]
    memory = fleet.kv_used[d] + fleet.foreign_context[d] + need - fleet.kv_capacity[d]
    if seats <= 0.0 and memory <= 0.0:
        return wait
    pace = step_time(fleet, d, load, context, 0.0, 0.0)
    before = -1.0
    while True:
        soonest, seats_free, memory_free = np.inf, 0.0, 0.0
        for k in range(fleet.n_streams[d]):
            left = max(fleet.expected[d, k] - fleet.tokens[d, k], 1.0) * pace
            if fleet.tokens[d, k] == 0.0:
                left += backlog * fleet.per_token[p]
            if left > before and left < soonest:
                soonest, seats_free, memory_free = left, 0.0, 0.0
            if left == soonest:
                seats_free += 1.0
                memory_free += fleet.reserved[d, k]
        if soonest == np.inf:
            return soonest
        seats -= seats_free
        memory -= memory_free
        if seats <= 0.0 and memory <= 0.0:
            return max(wait, soonest)
        before = soonest


@njit(cache=True, error_model="numpy")
def warm_into(
    requests: RequestColumns,
    fleet: FleetColumns,
    routes: Routes,
    cached: Mask,
    allowed: Mask,
    claims: Ints,
    room: Mask,
    i: int,
    least: float,
    end: float,
    now: float,
    until: Floats,
) -> bool:
    """Routes without room that are worth request i's wait, opened in `room`; True if any is.

    until (c,) is when the wait for such a route ends at the latest, else -inf. Worth it: against
    the least prefill among routes with room it saves at least `least` seconds, and the predicted
    wait is shorter than what it saves and over before `end`.
    """
    some = False
    prompt = requests.prompt[i]
    cold = np.inf
    for c in range(until.shape[0]):
        until[c] = -np.inf
        if room[i, c]:
            cold = min(cold, prefill_seconds(fleet, routes.prefill[c], prompt, cached[i, c]))
    if cold == np.inf:
        return some
    for c in range(until.shape[0]):
        d, p = routes.decode[c], routes.prefill[c]
        if room[i, c] or not allowed[i, c] or cached[i, c] <= 0.0:
            continue
        if not (fleet.usable[d] and fleet.usable[p]) or prompt + 1.0 > fleet.max_context[d]:
            continue
        if claims[d] != NONE and claims[d] != requests.tie[i]:
            continue
        saved = cold - prefill_seconds(fleet, p, prompt, cached[i, c])
        if saved < least:
            continue
        last = min(now + saved, end)
        if now + opens_in(fleet, d, p, prompt, prompt + requests.expected[i]) < last:
            until[c] = last
            some = True
    for c in range(until.shape[0]):
        if until[c] > -np.inf:
            room[i, c] = True
    return some


@njit(cache=True, error_model="numpy")
def fastest(
    fleet: Speeds, decode: Ints, prefill: Ints, allowed: Bools, prompt: float, expected: float
) -> tuple[float, float]:
    """Least (TTFT, TPOT) in seconds that any allowed, idle replica could give; inf if none is
    allowed.
    """
    ttft, tpot = np.inf, np.inf
    for c in range(allowed.shape[0]):
        if not allowed[c]:
            continue
        d, p = decode[c], prefill[c]
        steps = math.ceil(max(prompt, 1.0) / fleet.chunk[p])
        compute = prompt * fleet.per_token[p] + fleet.per_attention[p] * prompt * prompt / 2.0
        fixed = fleet.overhead[p]
        fixed += fleet.experts[p] * prompt / (prompt + steps * fleet.expert_tokens[p])
        t = steps * fixed + max(steps * fleet.weights[p], compute)
        pace = fleet.overhead[d] + fleet.per_sequence[d]
        pace += fleet.experts[d] / (1.0 + fleet.expert_tokens[d])
        pace += max(
            fleet.weights[d] + fleet.per_context[d] * (prompt + expected / 2.0), fleet.per_token[d]
        )
        ttft = min(ttft, t)
        tpot = min(tpot, pace)
    return ttft, tpot
