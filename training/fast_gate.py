"""`policies.overload.Gate` and `policies.chains.Chains` over arrays, for the compiled loop: the
same sums in the same order, so that the same requests are refused early and the same limits cut.

What a client would be told, a time to come back, is kept too, since a kept time lets the same
session pass later. `NONE` is -1 (CORE section 3.13). Compiled with the loop and cached there.
"""
# Inside compiled code numba, not mypy, knows the types of array elements.
# mypy: disable-error-code="arg-type, no-any-return, return-value, assignment, call-overload"

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from domain.columns import Floats, Ints
from domain.request import SloClass, Tenant
from policies import chains, overload
from training.fast_queue import NONE, Records, record

KEPT = record(f="at", i="older newer", b="known")
"""One key of a memory that forgets the one unused longest, and what it remembers."""
ENDS = record(i="oldest newest count most")

PRESSURE = record(f="target integral updated level capacity sent sent_at", i="steps")
OF_CLASS = record(
    f="shortfall shortfall_at decisions decisions_at admitted admitted_at kept_until chain",
    i="step",
)
"""`step` and `chain` as the live gate and chains have them; `NONE` and inf where there is none."""
OF_TENANT = record(f="offered offered_at weight work", i="rank", b="offers worked over")
"""`rank`: place among the names; `offers`, `worked`: offered and work are known."""


class Memory(NamedTuple):
    """Keys by how lately they were used, at most `most` of them."""

    kept: Records  # of KEPT
    ends: Records  # (1,) of ENDS


class Gate(NamedTuple):
    """C classes, T tenants; keys of tickets and chains are session x C + class."""

    pressure: Records  # (1,) of PRESSURE
    classes: Records  # (C,) of OF_CLASS
    tenants: Records  # (T,) of OF_TENANT
    tickets: Memory
    chains: Memory
    order: Ints  # (T,) scratch
    rates: Floats  # (T,) scratch


def memory(keys: int, most: int) -> Memory:
    """An empty memory for so many different keys."""
    ends = np.zeros(1, ENDS)
    ends["oldest"] = ends["newest"] = NONE
    ends["most"] = most
    return Memory(np.zeros(keys, KEPT), ends)


def gate(
    target: float, classes: Sequence[SloClass], tenants: Sequence[Tenant], sessions: int
) -> Gate:
    """An open gate; `target` 0 switches it off. Chains are cut wherever a class has a deadline."""
    pressure = np.zeros(1, PRESSURE)
    ladder = sorted((c for c in classes if c.sheddable), key=lambda c: (-c.rank, c.name))
    pressure["target"], pressure["steps"] = target, len(ladder)
    rows = np.zeros(len(classes), OF_CLASS)
    rows["step"] = [ladder.index(c) if c.sheddable else NONE for c in classes]
    rows["chain"] = [np.inf if c.chain is None else c.chain for c in classes]
    people = np.zeros(len(tenants), OF_TENANT)
    people["rank"] = np.argsort(np.argsort([t.name for t in tenants]))
    keys = sessions * len(classes)
    chained = any(c.chain is not None for c in classes)
    return Gate(
        pressure=pressure,
        classes=rows,
        tenants=people,
        tickets=memory(keys if target > 0.0 else 0, overload.TICKETS),
        chains=memory(keys if chained else 0, chains.SESSIONS),
        order=np.zeros(len(tenants), np.int64),
        rates=np.zeros(len(tenants)),
    )


# ---- memories


@njit(error_model="numpy")
def forget(m: Memory, k: int) -> None:
    """Key k is not known any more."""
    older, newer = m.kept[k].older, m.kept[k].newer
    if older == NONE:
        m.ends[0].oldest = newer
    else:
        m.kept[older].newer = newer
    if newer == NONE:
        m.ends[0].newest = older
    else:
        m.kept[newer].older = older
    m.kept[k].known = False
    m.ends[0].count -= 1


@njit(error_model="numpy")
def keep(m: Memory, k: int, at: float) -> None:
    """Key k is the one used last, and remembers `at`."""
    if m.kept[k].known:
        forget(m, k)
    last = m.ends[0].newest
    m.kept[k].at = at
    m.kept[k].known = True
    m.kept[k].older, m.kept[k].newer = last, NONE
    if last == NONE:
        m.ends[0].oldest = k
    else:
        m.kept[last].newer = k
    m.ends[0].newest = k
    m.ends[0].count += 1
    if m.ends[0].count > m.ends[0].most:
        forget(m, m.ends[0].oldest)


# ---- the gate


@njit(error_model="numpy")
def faded(total: float, at: float, now: float, memory: float) -> float:
    """What is left of a sum that was `total` at a time."""
    return total * math.exp(-max(now - at, 0.0) / memory)


@njit(error_model="numpy")
def update(g: Gate, now: float) -> None:
    """Move the level, at most every `overload.EVERY` seconds."""
    p = g.pressure[0]
    elapsed = now - p.updated
    if elapsed < overload.EVERY:
        return
    p.updated = now
    worst = 0.0
    for c in range(g.classes.shape[0]):
        known = g.classes[c]
        seen = faded(known.decisions, known.decisions_at, now, overload.MEMORY) + overload.PRIOR
        height = 0.0 if known.step == NONE else (known.step + 1.0) / p.steps
        short = faded(known.shortfall, known.shortfall_at, now, overload.MEMORY)
        worst = max(worst, (1.0 + height) * short / seen)
    over = worst - p.target
    most = 2.0 * p.steps
    step = overload.KI * min(max(over / p.target, -1.0), 1.0) * min(elapsed, 1.0)
    p.integral = min(max(p.integral + step, 0.0), most)
    p.level = min(p.integral + overload.KP * max(over, 0.0), most)
    p.capacity *= math.exp(-min(elapsed, overload.CAPACITY_MEMORY) / overload.CAPACITY_MEMORY)
    sent = faded(p.sent, p.sent_at, now, overload.RATE_MEMORY) / overload.RATE_MEMORY
    p.capacity = max(p.capacity, sent)
    if p.level > 0.0:
        share_out(g, now)


@njit(error_model="numpy")
def share_out(g: Gate, now: float) -> None:
    """Which tenants offer more than their max-min fair share of what is being sent."""
    n = 0
    for t in range(g.tenants.shape[0]):
        g.tenants[t].over = False
        if not g.tenants[t].offers:
            continue
        left = faded(g.tenants[t].offered, g.tenants[t].offered_at, now, overload.RATE_MEMORY)
        rate = left / overload.RATE_MEMORY
        at = n
        while at > 0:
            other = g.order[at - 1]
            if g.rates[other] < rate or (
                g.rates[other] == rate and g.tenants[other].rank < g.tenants[t].rank
            ):
                break
            g.order[at] = other
            at -= 1
        g.order[at] = t
        g.rates[t] = rate
        n += 1
    room, weight = g.pressure[0].capacity, 0.0
    for k in range(n):
        weight += g.tenants[g.order[k]].weight
        g.tenants[g.order[k]].over = True
    for k in range(n):
        t = g.order[k]
        if g.rates[t] * weight > room or weight <= 0.0:
            break
        g.tenants[t].over = False
        room -= g.rates[t] * g.tenants[t].weight
        weight -= g.tenants[t].weight
    for k in range(n):
        t = g.order[k]
        if faded(g.tenants[t].offered, g.tenants[t].offered_at, now, overload.RATE_MEMORY) < 1e-6:
            g.tenants[t].offers = False
            g.tenants[t].worked = False


@njit(error_model="numpy")
def offer(g: Gate, t: int, weight: float, work: float, now: float) -> None:
    """Tenant t asked for `work` seconds of service, refused or not."""
    x = g.tenants[t]
    if not x.offers:
        x.offers = True
        x.offered, x.offered_at = 0.0, 0.0
    x.offered = faded(x.offered, x.offered_at, now, overload.RATE_MEMORY) + work / weight
    x.offered_at = now
    x.weight = weight


@njit(error_model="numpy")
def promise(g: Gate, c: int, key: int, now: float) -> None:
    """Keep a time for a refused request of class c."""
    x = g.classes[c]
    rate = faded(x.admitted, x.admitted_at, now, overload.RATE_MEMORY) / overload.RATE_MEMORY
    rate = max(overload.KEPT_SHARE * rate, 1.0 / overload.LATEST)
    due = max(x.kept_until, now + overload.SOONEST) + 1.0 / rate
    if due - now > overload.LATEST:
        return
    x.kept_until = due
    keep(g.tickets, key, due)


@njit(error_model="numpy", forceinline=True)
def refused(g: Gate, c: int, t: int, key: int, tie: int, weight: float, now: float) -> bool:
    """Whether a request of class c and tenant t is refused at its arrival."""
    p = g.pressure[0]
    if p.target <= 0.0:
        return False
    update(g, now)
    if p.level <= 0.0 and g.tickets.ends[0].count == 0:
        return False
    if g.tickets.kept[key].known and now >= g.tickets.kept[key].at:
        forget(g.tickets, key)
        if now <= g.tickets.kept[key].at + overload.VALID:
            return False
    step = g.classes[c].step
    if step == NONE:
        return False
    if not g.tenants[t].over:
        step += p.steps
    chance = ((tie * 0x9E3779B1) & 0xFFFFFFFF) / 4294967296.0
    if chance >= min(max(p.level - step, 0.0), 1.0):
        return False
    offer(g, t, weight, g.tenants[t].work if g.tenants[t].worked else 1.0, now)
    promise(g, c, key, now)
    return True


@njit(error_model="numpy")
def admitted(g: Gate, c: int, t: int, weight: float, work: float, now: float) -> None:
    """A request of `work` predicted seconds of service passed."""
    if g.pressure[0].target <= 0.0:
        return
    offer(g, t, weight, work, now)
    x, y = g.tenants[t], g.classes[c]
    before = x.work if x.worked else work
    x.work = work + 0.9 * (before - work)
    x.worked = True
    y.admitted = faded(y.admitted, y.admitted_at, now, overload.RATE_MEMORY) + 1.0
    y.admitted_at = now


@njit(error_model="numpy")
def decided(g: Gate, c: int, chance: float, work: float, now: float) -> None:
    """A request was sent (or given up: work 0) with this P(SLO) on its best route."""
    p, x = g.pressure[0], g.classes[c]
    if p.target <= 0.0:
        return
    x.shortfall = faded(x.shortfall, x.shortfall_at, now, overload.MEMORY) + (1.0 - chance)
    x.shortfall_at = now
    x.decisions = faded(x.decisions, x.decisions_at, now, overload.MEMORY) + 1.0
    x.decisions_at = now
    if work > 0.0:
        p.sent = faded(p.sent, p.sent_at, now, overload.RATE_MEMORY) + work
        p.sent_at = now


@njit(error_model="numpy")
def given_up(g: Gate, c: int, key: int, now: float) -> None:
    """A request that had passed is refused after all: a time is kept for it."""
    if g.pressure[0].level > 0.0:
        promise(g, c, key, now)


# ---- chains


@njit(error_model="numpy", forceinline=True)
def left_of_chain(g: Gate, c: int, key: int, limit: float, now: float) -> float:
    """The end-to-end limit of a step, cut to what its chain has left, in seconds."""
    budget = g.classes[c].chain
    if budget == np.inf:
        return limit
    began = now
    if g.chains.kept[key].known and now - g.chains.kept[key].at <= 2.0 * budget:
        began = g.chains.kept[key].at
    keep(g.chains, key, began)
    return min(limit, max(began + budget - now, chains.LEAST))
