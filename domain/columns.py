"""Columns: C-contiguous arrays that compiled kernels take as they are (CORE section 1).

n requests, m replicas, c routes, S own streams a replica, U load quantiles, Q length quantiles.
float64, int64 or bool. Absent limits are inf. Everything in seconds and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from domain.fleet import FleetSpec, ReplicaSpec, ReplicaView
from domain.length import QUANTILE_GRID

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Mask = NDArray[np.bool_]
Draws = NDArray[np.float64]
Params = NDArray[np.float64]

LOAD_GRID: Floats = (np.arange(7) + 0.5) / 7
"""Levels, (U,), of the latent load quantile that drives TTFT and TPOT together."""
LOAD_GRID.setflags(write=False)

HISTORY = 128
"""Samples of own counts kept a replica, one per `HISTORY_STEP` at most."""
HISTORY_STEP = 2.0 / HISTORY
"""Seconds between two samples, so that `HISTORY` of them span two seconds (CORE section 3.11)."""


class RequestColumns(NamedTuple):
    """n requests. `expected` is the mean output, `length_q` its quantiles at `QUANTILE_GRID`; both
    under `max_tokens`.
    """

    prompt: Floats  # (n,) tokens
    max_tokens: Floats  # (n,) tokens, inf where absent
    expected: Floats  # (n,) tokens
    length_q: Floats  # (n, Q) tokens
    arrived: Floats  # (n,) s
    ttft: Floats  # (n,) s from arrival
    tpot: Floats  # (n,) s per token
    e2e: Floats  # (n,) s from arrival
    quality: Floats  # (n,) floor in [0, 1]; 0 where absent
    class_id: Ints  # (n,) rank of the class, 0 is the top
    weight: Floats  # (n,) what one met request is worth
    tie: Ints  # (n,) hash of the request id


class FleetColumns(NamedTuple):
    """m replicas: profile, limits, load and own streams. Load = own + foreign; own streams are
    exact.

    `running`, `context`, `backlog_tokens` and `kv_used` are this gateway's own; `foreign_*` is what
    a reading showed beyond them. `backlog_tokens` counts prompt tokens sent whose first token has
    not been seen; `kv_used` is the room reserved (prompt + expected output), `context` what is
    resident now.
    """

    # profile, (m,)
    overhead: Floats  # s
    weights: Floats  # s
    per_sequence: Floats  # s
    per_context: Floats  # s / token
    per_token: Floats  # s / token
    per_attention: Floats  # s / token^2
    experts: Floats  # s
    expert_tokens: Floats  # tokens of a step
    chunk: Floats  # tokens
    uncertainty: Floats  # sd of log(actual / predicted)
    price: Floats  # per second busy
    speed: Floats  # relative weight for weighted policies
    # limits, (m,)
    max_seqs: Floats
    kv_capacity: Floats  # tokens
    max_context: Floats  # tokens a sequence
    window: Floats  # s of prefill backlog
    pool_low: Floats  # tokens
    pool_high: Floats  # tokens
    # state, (m,)
    usable: Bools
    running: Floats
    context: Floats  # tokens
    backlog_tokens: Floats
    kv_used: Floats  # tokens
    dispatched: Floats  # requests sent since the start
    age: Floats  # s since the last reading was measured, inf before the first
    foreign_running: Floats
    foreign_context: Floats
    foreign_backlog: Floats  # tokens
    # own streams, (m,) and (m, S)
    n_streams: Ints
    slot: Ints
    first_at: Floats  # s; inf before the first token
    tokens: Floats
    prompt: Floats
    uncached: Floats  # prompt tokens that the backlog holds for this stream
    expected: Floats
    reserved: Floats  # kv tokens reserved
    tpot_limit: Floats  # s / token
    ttft_deadline: Floats  # s, absolute
    e2e_deadline: Floats  # s, absolute
    # own counts of the last two seconds, (m, HISTORY)
    history_at: Floats
    history_running: Floats
    history_context: Floats
    history_next: Ints  # (m,)

    def replica(self, i: int, spec: ReplicaSpec) -> ReplicaView:
        """Row i, for people and tests."""
        return ReplicaView(
            name=spec.name,
            variant=spec.variant,
            usable=bool(self.usable[i]),
            running=float(self.running[i]),
            context=float(self.context[i]),
            backlog_tokens=float(self.backlog_tokens[i]),
            kv_used=float(self.kv_used[i]),
            dispatched=float(self.dispatched[i]),
            foreign_running=float(self.foreign_running[i]),
            foreign_context=float(self.foreign_context[i]),
            own_streams=int(self.n_streams[i]),
            age=float(self.age[i]),
        )


class Routes(NamedTuple):
    """c routes. A choice is a route: one replica, or a prefill/decode pair, and a variant."""

    decode: Ints  # (c,) replica index
    prefill: Ints  # (c,) replica index; equal to decode unless split
    variant: Ints  # (c,) index into FleetSpec.variants
    price: Floats  # (c,) per second busy


class EstimateColumns(NamedTuple):
    """What an estimator predicts per (request, route); only where the mask is set."""

    cached: Floats  # (n, c) prompt tokens found in the prefix cache
    sticky: Floats  # (n, c) 1 where the session ran before
    wait: Floats  # (n, c) s before prefill starts
    p_slo: Floats  # (n, c) P(all limits met), calibrated
    p_raw: Floats  # (n, c) the same before calibration
    quality: Floats  # (n, c) P(answer good enough)
    ttft: Floats  # (n, c, U) s from now on
    tpot: Floats  # (n, c, U) s per token


class Scores(NamedTuple):
    """Written by a scorer: higher is better, -inf outside the mask and where never to go.

    A request that is held back has -inf on every route, and in `hold` when it is to be looked at
    again whatever happens until then, in s; -inf where none is. One whose best route scores less
    than its `shed` is refused, where its class may be; -inf where the scorer has no say in that.
    """

    route: Floats  # (n, c)
    hold: Floats  # (n,)
    shed: Floats  # (n,)


class RouteTable(NamedTuple):
    """Routes and the masks that models put on them."""

    routes: Routes
    by_model: dict[str, Bools]
    """For each model name, and `auto`, the (c,) mask of routes that serve it."""


REQUEST_FLOATS = (
    "prompt",
    "max_tokens",
    "expected",
    "arrived",
    "ttft",
    "tpot",
    "e2e",
    "quality",
    "weight",
)
"""The one-dimensional float columns of a request, in the order of `request_row`."""


def request_columns(n: int, base: Floats | None = None) -> RequestColumns:
    """Columns for n requests, limits absent, everything else zero.

    `base`, (len(REQUEST_FLOATS), n), holds the float columns as its rows when given, so that one
    assignment `base[:, i] = row` writes a request.
    """
    base = np.zeros((len(REQUEST_FLOATS), n)) if base is None else base
    base[1], base[4:7], base[8] = np.inf, np.inf, 1.0
    return RequestColumns(
        prompt=base[0],
        max_tokens=base[1],
        expected=base[2],
        length_q=np.zeros((n, len(QUANTILE_GRID))),
        arrived=base[3],
        ttft=base[4],
        tpot=base[5],
        e2e=base[6],
        quality=base[7],
        class_id=np.zeros(n, np.int64),
        weight=base[8],
        tie=np.zeros(n, np.int64),
    )


def estimate_columns(n: int, c: int) -> EstimateColumns:
    """Columns of predictions for n requests and c routes, all zero."""
    u = len(LOAD_GRID)
    return EstimateColumns(
        cached=np.zeros((n, c)),
        sticky=np.zeros((n, c)),
        wait=np.zeros((n, c)),
        p_slo=np.zeros((n, c)),
        p_raw=np.zeros((n, c)),
        quality=np.zeros((n, c)),
        ttft=np.zeros((n, c, u)),
        tpot=np.zeros((n, c, u)),
    )


def scores(n: int, c: int) -> Scores:
    """Scores for n requests and c routes, all -inf."""
    return Scores(
        route=np.full((n, c), -np.inf), hold=np.full(n, -np.inf), shed=np.full(n, -np.inf)
    )


def fleet_columns(replicas: Sequence[ReplicaSpec], streams: int | None = None) -> FleetColumns:
    """Columns of idle replicas; S own streams a replica, by default as many as the largest
    `max_seqs`.
    """
    m = len(replicas)
    profiles = [r.profile for r in replicas]
    room = streams if streams is not None else max((p.max_seqs for p in profiles), default=1)

    def of(values: Sequence[float]) -> Floats:
        return np.array(values, dtype=np.float64)

    def zeros() -> Floats:
        return np.zeros(m)

    def grid(fill: float = 0.0) -> Floats:
        return np.full((m, room), fill)

    return FleetColumns(
        overhead=of([p.overhead for p in profiles]),
        weights=of([p.weights for p in profiles]),
        per_sequence=of([p.per_sequence for p in profiles]),
        per_context=of([p.per_context for p in profiles]),
        per_token=of([p.per_token for p in profiles]),
        per_attention=of([p.per_attention for p in profiles]),
        experts=of([p.experts for p in profiles]),
        expert_tokens=of([p.expert_tokens for p in profiles]),
        chunk=of([p.chunk for p in profiles]),
        uncertainty=of([p.uncertainty for p in profiles]),
        price=of([p.price for p in profiles]),
        speed=of([r.weight for r in replicas]),
        max_seqs=of([p.max_seqs for p in profiles]),
        kv_capacity=of([p.kv_capacity for p in profiles]),
        max_context=of([p.max_context for p in profiles]),
        window=of([r.window for r in replicas]),
        pool_low=of([r.pool_low for r in replicas]),
        pool_high=of([r.pool_high for r in replicas]),
        usable=np.ones(m, np.bool_),
        running=zeros(),
        context=zeros(),
        backlog_tokens=zeros(),
        kv_used=zeros(),
        dispatched=zeros(),
        age=np.full(m, np.inf),
        foreign_running=zeros(),
        foreign_context=zeros(),
        foreign_backlog=zeros(),
        n_streams=np.zeros(m, np.int64),
        slot=np.full((m, room), -1, np.int64),
        first_at=grid(np.inf),
        tokens=grid(),
        prompt=grid(),
        uncached=grid(),
        expected=grid(),
        reserved=grid(),
        tpot_limit=grid(np.inf),
        ttft_deadline=grid(np.inf),
        e2e_deadline=grid(np.inf),
        history_at=np.full((m, HISTORY), -np.inf),
        history_running=np.zeros((m, HISTORY)),
        history_context=np.zeros((m, HISTORY)),
        history_next=np.zeros(m, np.int64),
    )


def route_table(fleet: FleetSpec) -> RouteTable:
    """Routes of a fleet: each replica that does both phases, and each prefill/decode pair of one
    variant.

    A route's price is the sum of its replicas' prices.
    """
    from domain.request import AUTO

    variants = [v.name for v in fleet.variants]
    pairs: list[tuple[int, int]] = []
    for d, decode in enumerate(fleet.replicas):
        if decode.phase == "both":
            pairs.append((d, d))
        elif decode.phase == "decode":
            pairs += [
                (d, p)
                for p, prefill in enumerate(fleet.replicas)
                if prefill.phase == "prefill" and prefill.variant == decode.variant
            ]
    price = [
        fleet.replicas[d].profile.price + (fleet.replicas[p].profile.price if p != d else 0.0)
        for d, p in pairs
    ]
    variant = [variants.index(fleet.replicas[d].variant) for d, _ in pairs]
    routes = Routes(
        decode=np.array([d for d, _ in pairs], np.int64),
        prefill=np.array([p for _, p in pairs], np.int64),
        variant=np.array(variant, np.int64),
        price=np.array(price, np.float64),
    )
    by_model = {
        model: np.array([fleet.variants[v].model == model for v in variant], np.bool_)
        for model in fleet.models
    }
    # A variant's own name asks for exactly that variant.
    for index, name in enumerate(variants):
        by_model.setdefault(name, np.array([v == index for v in variant], np.bool_))
    by_model[AUTO] = np.ones(len(pairs), np.bool_)
    return RouteTable(routes, by_model)
