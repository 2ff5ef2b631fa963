"""The decision core: events in, actions out, time with every event; no I/O, no clock, no ambient
state.

It owns admission, quotas, the queue, the ledger, fleet state, exploration and the policy, and asks
an estimator for predictions. The gateway and the simulator are shells around it: they turn what
happens into events and carry out the actions.

    Arrived --admit--> (no) Shed
                 `---> room? --yes--> book, Commit --Committed--> Send --AttemptEnded--> Settle
                           `--no----> Hold, and the same release routine on every event that may
                           free room

Rules (CORE section 3): looking never changes state; what can change a decision is an event; Commit
before Send; bookings are keyed by (id, attempt) and settle once; a bucket may go into debt but
admits nothing then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite
from typing import Any

import numpy as np

from domain.columns import (
    LOAD_GRID,
    REQUEST_FLOATS,
    Bools,
    FleetColumns,
    Routes,
    estimate_columns,
    fleet_columns,
    request_columns,
    route_table,
    scores,
)
from domain.events import (
    Abort,
    Action,
    Arrived,
    AttemptEnded,
    AvailabilityChanged,
    Candidate,
    ClientGone,
    Commit,
    Committed,
    ConfigReloaded,
    Draining,
    Event,
    FirstToken,
    FleetChanged,
    Hold,
    ModelSwapped,
    Progress,
    Reading,
    Reason,
    ScorerLate,
    Send,
    Settle,
    Shed,
    Tick,
)
from domain.fleet import FleetSpec, ReplicaView
from domain.length import QUANTILE_GRID
from domain.native import compiled
from domain.outcome import Cause, Miss, Outcome, Prediction, Usage, UsageSource, limits_met
from domain.ports import Estimator, Scorer
from domain.request import BLOCK_TOKENS, InferenceRequest, SloClass, Tenant
from policies import kernels
from policies.bucket import Account
from policies.ledger import Attempt, Entry
from policies.prefix_index import PrefixIndex
from policies.queue import WaitingRoom

MIDDLE = len(LOAD_GRID) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreOptions:
    """How the core decides, beside the scorer.

    `shed_below`: a sheddable request whose best P(SLO) falls below is refused with a probability
    that grows from 0 at the threshold to 1 at P = 0. `explore`: share of requests sent to a uniform
    route among those within `explore_within` of the best P(SLO); the top class never is. `hold`
    False sends at once whatever the replicas' windows say. `retry_share` bounds retries to a share
    of what was sent (plus `retry_floor`). `late_penalty` (s) is how long the fallback scorer
    decides after a late decision.
    """

    k_best: int = 8
    hold: bool = True
    shed_below: float = 0.0
    explore: float = 0.0
    explore_within: float = 0.02
    max_attempts: int = 3
    retry_share: float = 0.2
    retry_floor: float = 10.0
    candidates: int = 8
    queue_limit: int = 10_000
    fairness: float = 1.0
    alpha_max: float = 4.0
    late_penalty: float = 10.0
    seed: int = 0


class _Block:
    """Columns for n requests, kept for the life of a fleet."""

    __slots__ = ("allowed", "base", "cached", "draws", "estimates", "requests", "room", "scores")

    def __init__(self, n: int, c: int) -> None:
        self.base = np.zeros((len(REQUEST_FLOATS), n))
        self.requests = request_columns(n, self.base)
        self.cached = False
        self.estimates = estimate_columns(n, c)
        self.scores = scores(n, c)
        self.allowed = np.zeros((n, c), np.bool_)
        self.room = np.zeros((n, c), np.bool_)
        self.draws = np.zeros((n, c))


class _Native:
    """The kernels the core calls, resolved once for the types of its columns."""

    __slots__ = (
        "any_open",
        "best_chance",
        "book",
        "draw",
        "explored",
        "fastest",
        "first_token",
        "foresight",
        "leading",
        "length",
        "merge",
        "progress",
        "room",
        "unbook",
        "uniform",
    )

    def __init__(self, fleet: FleetColumns, routes: Routes) -> None:
        k = kernels
        block = _Block(1, 1)
        row, mask = np.zeros(1), np.zeros(1, np.bool_)
        ids = np.zeros(1, np.int64)
        self.any_open = compiled(k.any_open, fleet, row, 0.0)
        self.best_chance = compiled(k.best_chance, mask, row)
        self.book = compiled(k.book, fleet, 0, 0, 0, *(0.0,) * 7)
        self.draw = compiled(k.draw_into, 0, 0, block.draws)
        self.explored = compiled(k.explored, mask, row, 0, *(0.0,) * 4)
        self.fastest = compiled(k.fastest, fleet, routes, mask, 0.0, 0.0)
        self.first_token = compiled(k.first_token, fleet, 0, 0, 0, 0.0)
        self.leading = compiled(
            k.leading,
            block.scores.route,
            block.room,
            block.estimates,
            0,
            0,
            np.zeros((1, 6)),
        )
        self.foresight = compiled(k.foresight, fleet, block.estimates, 0, 0, 0, 0, row)
        self.length = compiled(k.length_into, row, 0.0, row)
        self.merge = compiled(k.merge_reading, fleet, 0, *(0.0,) * 4)
        self.progress = compiled(k.progress_many, fleet, ids, ids, ids, 0.0)
        self.room = compiled(
            k.room_into, block.requests, fleet, routes, block.allowed, ids, row, 0.0, block.room
        )
        self.unbook = compiled(k.unbook, fleet, 0, 0, 0, 0.0)
        self.uniform = compiled(k.uniform, 0, 0, 0)


class _Ready:
    """A scorer with its kernel and its way of choosing resolved for the core's columns."""

    __slots__ = ("kernel", "params", "pick", "scorer", "version")

    def __init__(self, scorer: Scorer, fleet: FleetColumns, routes: Routes) -> None:
        block = _Block(1, 1)
        self.scorer = scorer
        self.version = scorer.version
        self.params = scorer.params
        self.kernel = compiled(
            scorer.kernel,
            scorer.params,
            block.requests,
            fleet,
            routes,
            block.estimates,
            block.room,
            block.draws,
            0.0,
            block.scores,
        )
        self.pick = compiled(
            kernels.best_pair if scorer.unit == "value" else kernels.first_fit,
            block.scores.route,
            block.room,
            block.requests.tie,
        )


@dataclass(slots=True)
class _Choice:
    index: int
    route: int
    propensity: float
    p_best: float


class DecisionCore:
    """The state machine. `handle` takes one event and returns the actions it causes, in order."""

    def __init__(
        self,
        *,
        fleet: FleetSpec,
        estimator: Estimator,
        scorer: Scorer,
        fallback: Scorer,
        tenants: Sequence[Tenant],
        classes: Sequence[SloClass],
        options: CoreOptions,
        now: float = 0.0,
    ) -> None:
        self.options = options
        self.estimator = estimator
        self.open: dict[str, Entry] = {}
        self.queue = WaitingRoom(
            k_best=options.k_best, fairness=options.fairness, alpha_max=options.alpha_max
        )
        self._accounts: dict[str, Account] = {}
        self._classes: dict[str, SloClass] = {}
        self._now = now
        self._leading = np.zeros((max(options.candidates, 1), 6))
        self._foresight = np.zeros(9)
        self._order = 0
        self._slots = 0
        self._counter = 0
        self._sent = 0.0
        self._retries = 0.0
        self._late_until = -inf
        self._draining = False
        self._claims: dict[int, tuple[Entry, float]] = {}
        self.fleet = FleetSpec(replicas=(), variants=())
        self.columns = fleet_columns(())
        self._measured_at = np.zeros(0)
        self._claimed = np.zeros(0, np.int64)
        self._prefix = PrefixIndex(())
        self._set_fleet(fleet)
        self._native = _Native(self.columns, self.routes)
        self._active = _Ready(scorer, self.columns, self.routes)
        self._fallback = _Ready(fallback, self.columns, self.routes)
        self._set_tenants(tenants, classes)
        self._on: dict[type, Callable[[Any], list[Action]]] = {
            Arrived: self._arrived,
            Committed: self._committed,
            FirstToken: self._first_token,
            Progress: self._progress,
            AttemptEnded: self._attempt_ended,
            ClientGone: self._client_gone,
            Reading: self._reading,
            AvailabilityChanged: self._availability_changed,
            FleetChanged: self._fleet_changed,
            ConfigReloaded: self._config_reloaded,
            ModelSwapped: self._nothing,
            ScorerLate: self._scorer_late,
            Tick: self._tick,
            Draining: self._drain,
        }

    # ---- what shells and people see

    def handle(self, event: Event) -> list[Action]:
        """Take one event in and return what follows from it. Time never runs backwards here."""
        self._now = max(self._now, event.at)
        return self._on[type(event)](event)

    @property
    def scorer(self) -> Scorer:
        """The policy in force."""
        return self._active.scorer

    @property
    def wake_at(self) -> float | None:
        """When the core wants a `Tick` at the latest: earliest expiry, patience or end of a
        claim.
        """
        if not self.queue:
            return None
        at = self.queue.next_expiry
        for entry in self.queue.oldest(1):
            ripe = entry.arrived + entry.slo_class.patience
            if entry.claim is None and ripe > self._now:
                at = min(at, ripe)
        for _, until in self._claims.values():
            at = min(at, until)
        for measured in self._measured_at.tolist():
            if self._now < measured + kernels.STALE:
                at = min(at, measured + kernels.STALE)
        return at if isfinite(at) else None

    def replica(self, index: int) -> ReplicaView:
        """One replica's state as a row."""
        return self.columns.replica(index, self.fleet.replicas[index])

    def account(self, tenant: str) -> Account | None:
        """The quotas of a tenant, for headers and the admin API."""
        return self._accounts.get(tenant)

    # ---- arrival

    def _arrived(self, event: Arrived) -> list[Action]:
        request, now = event.request, self._now
        slo_class = self._classes.get(request.class_name) or self._default_class
        allowed = self._by_model.get(request.model)
        if allowed is None:
            return self._refuse(request, Reason.UNKNOWN_MODEL, now)
        account = self._accounts.get(request.tenant)
        if account is None:
            return self._refuse(request, Reason.FORBIDDEN, now)
        rights = account.tenant.models
        if rights is not None and request.model not in rights:
            return self._refuse(request, Reason.FORBIDDEN, now)
        if self._draining:
            return self._refuse(request, Reason.SHUTTING_DOWN, now, retry_after=1.0)
        prompt = float(ceil(request.prompt_tokens))
        if prompt + 1.0 > self._max_context[request.model]:
            return self._refuse(request, Reason.CONTEXT, now)
        if not self._served(allowed):
            return self._refuse(request, Reason.NO_REPLICA, now, retry_after=1.0)
        if len(self.queue) >= self.options.queue_limit:
            return self._refuse(request, Reason.QUEUE_FULL, now, retry_after=self._drain_time())

        entry = self._entry(request, slo_class, account, allowed, prompt, now)
        if not entry.admission.ok:
            reason = entry.admission.reason or Reason.RATE
            return self._refuse(request, reason, now, retry_after=entry.admission.retry_after)
        self.open[request.id] = entry
        if self.queue:
            self.queue.push(entry)
            actions = self._release(now)
            return actions + self._held(entry) if entry.ticket else actions
        return self._place(entry, now)

    def _served(self, allowed: Bools) -> bool:
        """Whether any usable replica serves one of these routes."""
        usable = self.columns.usable
        return any(allowed[c] and usable[r] for c, r in enumerate(self._route_decode))

    def _entry(
        self,
        request: InferenceRequest,
        slo_class: SloClass,
        account: Account,
        allowed: Bools,
        prompt: float,
        now: float,
    ) -> Entry:
        """The request's line: its length forecast, its reservation, and when starting it stops
        being useful.
        """
        cap = request.max_tokens if request.max_tokens is not None else inf
        cap = max(min(cap, self._max_context[request.model] - prompt), 1.0)
        length_q = np.zeros(len(QUANTILE_GRID))
        mean, median, p90 = self._native.length(
            self.estimator.length(request).survival, cap, length_q
        )
        expected = float(max(1, ceil(mean)))
        tokens = prompt + min(p90, cap) * request.choices
        admission = account.admit(
            key=request.key,
            model=request.model,
            prompt=prompt,
            tokens=float(ceil(tokens)),
            cost=self._price[request.model] * tokens,
            now=now,
        )
        ttft, tpot = self._native.fastest(self.columns, self.routes, allowed, prompt, expected)
        slo = request.slo
        limits = (
            slo.ttft if slo.ttft is not None and request.stream else inf,
            slo.tpot if slo.tpot is not None and request.stream else inf,
            slo.e2e if slo.e2e is not None else inf,
        )
        work = ttft + expected * tpot
        start_by = now + min(limits[0] - ttft, limits[2] - work, slo_class.max_wait)
        expires = start_by if slo_class.sheddable else now + slo_class.max_wait
        self._order += 1
        return Entry(
            request=request,
            slo_class=slo_class,
            account=account,
            admission=admission,
            arrived=now,
            order=self._order,
            allowed=allowed,
            prompt=prompt,
            expected=expected,
            median=median,
            p90=p90,
            length_q=length_q,
            start_by=start_by,
            work=work,
            expires=max(expires, now),
            limits=limits,
            row=np.array(
                (
                    prompt,
                    inf if request.max_tokens is None else request.max_tokens,
                    expected,
                    now,
                    *limits,
                    0.0 if slo.quality is None else slo.quality,
                    slo_class.weight,
                )
            ),
        )

    # ---- placing

    def _place(self, entry: Entry, now: float) -> list[Action]:
        """Send one request if there is room and hope, else hold or shed it."""
        choice = self._choose((entry,), now)
        if choice is None:
            self.queue.push(entry)
            return self._held(entry)
        if self._hopeless(entry, choice.p_best):
            return self._shed(entry, Reason.UNREACHABLE, now)
        return self._commit(entry, choice, self._block(1), 0, now)

    def _block(self, n: int) -> _Block:
        block = self._blocks.get(n)
        if block is None:
            block = self._blocks[n] = _Block(n, len(self.routes.decode))
        return block

    def _choose(self, entries: Sequence[Entry], now: float) -> _Choice | None:
        """Score (entries x routes) and choose a pair; None if nothing has room. Changes no state
        but the draw counter.
        """
        n = len(entries)
        block = self._block(n)
        requests, estimates = block.requests, block.estimates
        if block.cached:
            estimates.cached.fill(0.0)
            block.cached = False
        for i, entry in enumerate(entries):
            block.base[:, i] = entry.row
            requests.class_id[i] = entry.slo_class.rank
            requests.tie[i] = entry.request.tie
            requests.length_q[i] = entry.length_q
            block.allowed[i] = entry.allowed
            for route in entry.excluded:
                block.allowed[i, route] = False
            if entry.request.slo.quality is not None:
                self._quality_mask(entry, block.allowed[i])
            if entry.request.blocks:
                self._cached_into(entry, estimates.cached[i])
                block.cached = True
        fleet, routes, native, room = self.columns, self.routes, self._native, block.room
        measured, claimed = self._measured_at, self._claimed
        if not native.room(requests, fleet, routes, block.allowed, claimed, measured, now, room):
            return None
        ready = self._ready(now)
        scorer, options = ready.scorer, self.options
        explore = options.explore > 0.0
        whole = scorer.needs_estimates or options.shed_below > 0.0 or explore
        people = [entry.request for entry in entries]
        if whole:
            self.estimator.fill(requests, fleet, routes, room, now, estimates, people)
        self._counter += 1
        if scorer.random:
            native.draw(options.seed, self._counter, block.draws)
        score = block.scores.route
        score.fill(-inf)
        ready.kernel(
            ready.params,
            requests,
            fleet,
            routes,
            estimates,
            room,
            block.draws,
            now,
            block.scores,
        )
        i, route = ready.pick(score, room, requests.tie)
        if i == kernels.NONE:
            return None
        propensity, p_best = 1.0, 1.0
        if whole:
            p_best = native.best_chance(room[i], estimates.p_slo[i])
        else:
            # Only the chosen route is predicted: for the log, and for the learners.
            only = np.zeros_like(room)
            only[i, route] = True
            self.estimator.fill(requests, fleet, routes, only, now, estimates, people)
        if explore and entries[i].slo_class.rank > 0:
            coin = native.uniform(options.seed, self._counter, -1)
            which = native.uniform(options.seed, self._counter, -2)
            route, propensity = native.explored(
                room[i],
                estimates.p_slo[i],
                route,
                options.explore,
                options.explore_within,
                coin,
                which,
            )
        return _Choice(i, route, propensity, p_best)

    def _ready(self, now: float) -> _Ready:
        """The policy in force, or the fallback for a while after a late decision."""
        return self._active if now >= self._late_until else self._fallback

    def _quality_mask(self, entry: Entry, allowed: Bools) -> None:
        """Close routes whose variant falls short of the floor, unless none reaches it (then the
        best ones stay).
        """
        floor = entry.request.slo.quality or 0.0
        reach = allowed & (self._route_quality >= floor)
        if not reach.any():
            best = self._route_quality[allowed].max(initial=0.0)
            reach = allowed & (self._route_quality >= best)
        allowed[:] = reach

    def _cached_into(self, entry: Entry, out: Any) -> None:
        matched = self._prefix.matched(entry.request.blocks)
        most = max(entry.prompt - 1.0, 0.0)
        for c, p in enumerate(self._route_prefill):
            out[c] = min(matched[p] * BLOCK_TOKENS, most)

    def _hopeless(self, entry: Entry, p_best: float) -> bool:
        """Whether to refuse for want of a chance: probability 1 - p / shed_below below the
        threshold.
        """
        threshold = self.options.shed_below
        if p_best >= threshold or not entry.slo_class.sheddable or entry.attempts > 0:
            return False
        if min(entry.limits) == inf:
            return False
        coin = self._native.uniform(self.options.seed, self._counter, -3)
        return bool(coin >= p_best / threshold)

    def _commit(
        self, entry: Entry, choice: _Choice, block: _Block, row: int, now: float
    ) -> list[Action]:
        """Book the route here and ask the store; `Committed` sends."""
        route = choice.route
        replica, prefill = self._route_decode[route], self._route_prefill[route]
        estimates = block.estimates
        fleet = self.columns
        self._native.foresight(fleet, estimates, row, route, replica, prefill, self._foresight)
        p_slo, p_raw, quality, cached, wait, running, context, backlog, age = (
            self._foresight.tolist()
        )
        prediction = Prediction(
            ttft=tuple(estimates.ttft[row, route].tolist()),
            tpot=tuple(estimates.tpot[row, route].tolist()),
            p_slo=p_slo,
            p_raw=p_raw,
            quality=quality,
            length_mean=entry.expected,
            length_p50=entry.median,
            length_p90=entry.p90,
            cached=cached,
            wait=wait,
            running=running,
            context=context,
            backlog=backlog,
            staleness=age,
        )
        self._slots += 1
        entry.attempts += 1
        ready = self._ready(now)
        attempt = Attempt(
            number=entry.attempts,
            route=route,
            replica=replica,
            prefill=prefill,
            slot=self._slots,
            propensity=choice.propensity,
            prediction=prediction,
            candidates=self._candidates(block, row, route),
            policy=ready.scorer.name,
            version=ready.version,
        )
        self._native.book(
            fleet,
            replica,
            prefill,
            attempt.slot,
            entry.prompt,
            max(entry.prompt - float(int(cached)), 0.0),
            entry.expected,
            entry.limits[1],
            entry.arrived + entry.limits[0],
            entry.arrived + entry.limits[2],
            now,
        )
        entry.attempt = attempt
        entry.state = "committing"
        self._release_claim(entry)
        self.queue.charge(entry, 1.0 / self._size)
        return [
            Commit(
                entry.request.id,
                attempt.number,
                entry.request.tenant,
                route,
                entry.admission.tokens,
            )
        ]

    def _candidates(self, block: _Block, row: int, route: int) -> tuple[Candidate, ...]:
        if self.options.candidates == 0:
            return ()
        table = self._leading
        count = self._native.leading(
            block.scores.route, block.room, block.estimates, row, route, table
        )
        return tuple(Candidate(int(line[0]), *line[1:]) for line in table[:count].tolist())

    def _committed(self, event: Committed) -> list[Action]:
        """The store's answer: send, or undo the booking and choose again or refuse."""
        entry, now = self.open.get(event.id), self._now
        if entry is None:
            return []
        attempt = entry.attempt
        if entry.state == "held" or attempt is None:
            # The answer to a held request's reservation.
            if event.reserved:
                return []
            return self._shed(entry, Reason.RATE, now, retry_after=event.retry_after)
        if attempt.number != event.attempt or entry.state != "committing":
            return []
        if event.reserved and event.booked:
            return [self._send(entry, attempt, now)]
        self._unbook(attempt, now)
        entry.attempt = None
        entry.attempts -= 1
        entry.state = "held"
        if not event.reserved:
            actions = self._shed(entry, Reason.RATE, now, retry_after=event.retry_after)
            return actions + self._release(now)
        entry.refusals += 1
        entry.excluded.append(attempt.route)
        if entry.refusals <= 2 and self._any_route(entry):
            return self._place(entry, now) + self._release(now)
        # Held until the next event: a refusal is momentary, so no route stays excluded.
        entry.excluded.clear()
        entry.refusals = 0
        self.queue.push(entry)
        return self._held(entry)

    def _send(self, entry: Entry, attempt: Attempt, now: float) -> Send:
        entry.state = "sent"
        attempt.sent = now
        if entry.first_sent is None:
            entry.first_sent = now
        self._sent += 1.0
        if entry.request.blocks:
            self._prefix.add(attempt.prefill, entry.request.blocks)
        return Send(
            entry.request.id,
            attempt.number,
            attempt.route,
            attempt.replica,
            attempt.prefill,
            attempt.slot,
            attempt.propensity,
            attempt.policy,
            attempt.version,
            attempt.prediction,
            attempt.candidates,
        )

    # ---- holding

    def _held(self, entry: Entry) -> list[Action]:
        """What follows when a request first waits: its reservation is agreed with the store,
        once.
        """
        if entry.held_once:
            return []
        entry.held_once = True
        request = entry.request
        return [
            Hold(request.id),
            Commit(request.id, 0, request.tenant, None, entry.admission.tokens),
        ]

    def _release(self, now: float) -> list[Action]:
        """Send what fits now, in the present order; shed what waited too long. The one routine for
        every event.
        """
        actions: list[Action] = []
        if not self.queue:
            return actions
        for entry in self.queue.expired(now):
            if entry.slo_class.sheddable or now >= entry.arrived + entry.slo_class.max_wait:
                self.queue.remove(entry)
                actions += self._shed(entry, Reason.EXPIRED, now)
        self._press_claims(now)
        while self.queue and self._native.any_open(self.columns, self._measured_at, now):
            batch = self.queue.candidates(now, self._load())
            progress = False
            while batch:
                choice = self._choose(batch, now)
                if choice is None:
                    break
                entry = batch[choice.index]
                row, block = choice.index, self._block(len(batch))
                self.queue.remove(entry)
                progress = True
                if self._hopeless(entry, choice.p_best):
                    actions += self._shed(entry, Reason.UNREACHABLE, now)
                else:
                    actions += self._commit(entry, choice, block, row, now)
                batch.pop(choice.index)
                if not self._native.any_open(self.columns, self._measured_at, now):
                    return actions
            if batch or not progress:
                break
        return actions

    def _load(self) -> float:
        """How far the order has slid from deadline to shortest work: predicted drain over one
        second, at most 1.
        """
        return min(self.queue.work / self._size, 1.0)

    def _drain_time(self) -> float:
        """Predicted seconds until what waits has been served."""
        usable = max(int(self.columns.usable.sum()), 1)
        return self.queue.work / usable

    def _press_claims(self, now: float) -> None:
        """A request past its patience closes one replica's window for others until it fits (CORE
        section 3.10).
        """
        for replica, (entry, until) in list(self._claims.items()):
            if now >= until or not self.columns.usable[replica]:
                self._release_claim(entry)
        for entry in self.queue.oldest(self._size):
            if now - entry.arrived <= entry.slo_class.patience:
                break
            if entry.claim is not None:
                continue
            free = [
                r
                for c, r in enumerate(self._route_decode)
                if entry.allowed[c] and self.columns.usable[r] and self._claimed[r] == kernels.NONE
            ]
            if not free:
                continue
            replica = min(free, key=lambda r: (float(self.columns.kv_used[r]), r))
            entry.claim = replica
            self._claimed[replica] = entry.request.tie
            self._claims[replica] = (entry, now + entry.slo_class.patience)

    def _release_claim(self, entry: Entry) -> None:
        if entry.claim is not None:
            self._claimed[entry.claim] = kernels.NONE
            self._claims.pop(entry.claim, None)
            entry.claim = None

    # ---- while it runs

    def _first_token(self, event: FirstToken) -> list[Action]:
        entry = self.open.get(event.id)
        if entry is None or entry.attempt is None or entry.attempt.number != event.attempt:
            return []
        attempt = entry.attempt
        if attempt.first_token is None:
            attempt.first_token = self._now
            self._native.first_token(
                self.columns, attempt.replica, attempt.prefill, attempt.slot, self._now
            )
        return self._release(self._now)

    def _progress(self, event: Progress) -> list[Action]:
        if event.slots:
            self._native.progress(
                self.columns,
                np.array(event.replicas, np.int64),
                np.array(event.slots, np.int64),
                np.array(event.tokens, np.int64),
                self._now,
            )
        return []

    def _attempt_ended(self, event: AttemptEnded) -> list[Action]:
        entry, now = self.open.get(event.id), self._now
        if entry is None or entry.attempt is None or entry.attempt.number != event.attempt:
            return []
        attempt = entry.attempt
        self._unbook(attempt, now)
        if self._may_retry(entry, attempt, event.cause):
            self._retries += 1.0
            entry.attempt = None
            entry.state = "held"
            entry.excluded.append(attempt.route)
            if not self._any_route(entry):
                entry.excluded.clear()
            return self._place(entry, now) + self._release(now)
        actions: list[Action] = []
        if attempt.first_token is None and event.cause in (Cause.REFUSED, Cause.TIMEOUT):
            actions.append(Shed(event.id, Reason.UPSTREAM, detail=event.detail))
        actions.append(
            self._settle(
                entry, attempt, event.cause, event.usage, event.last_token, now, event.detail
            )
        )
        return actions + self._release(now)

    def _may_retry(self, entry: Entry, attempt: Attempt, cause: Cause) -> bool:
        """Before the first byte, within the attempts and the retry budget; 4xx is the request's own
        fault.
        """
        if attempt.first_token is not None or cause not in (Cause.REFUSED, Cause.TIMEOUT):
            return False
        if entry.attempts >= self.options.max_attempts or self._draining:
            return False
        budget = self.options.retry_floor + self.options.retry_share * self._sent
        return self._retries < budget

    def _any_route(self, entry: Entry) -> bool:
        """Whether a usable route is left that has not failed this request yet."""
        return any(
            entry.allowed[c] and c not in entry.excluded and self.columns.usable[r]
            for c, r in enumerate(self._route_decode)
        )

    def _client_gone(self, event: ClientGone) -> list[Action]:
        entry, now = self.open.get(event.id), self._now
        if entry is None:
            return []
        actions: list[Action] = []
        attempt = entry.attempt
        if attempt is not None:
            self._unbook(attempt, now)
            if entry.state == "sent":
                actions.append(Abort(event.id, attempt.number))
        self.queue.remove(entry)
        self._release_claim(entry)
        actions.append(
            self._settle(entry, attempt, Cause.CLIENT_GONE, event.usage, now, now, "client gone")
        )
        return actions + self._release(now)

    def _unbook(self, attempt: Attempt, now: float) -> None:
        self._native.unbook(self.columns, attempt.replica, attempt.prefill, attempt.slot, now)

    # ---- endings

    def _refuse(
        self,
        request: InferenceRequest,
        reason: Reason,
        now: float,
        retry_after: float | None = None,
    ) -> list[Action]:
        """Refuse a request that was never admitted; it costs nothing."""
        outcome = Outcome(
            request=request,
            cause=Cause.SHED,
            arrived=now,
            ended=now,
            met=False,
            miss=Miss.ADMISSION,
            reason=reason.value,
        )
        return [
            Shed(request.id, reason, retry_after),
            Settle(request.id, request.tenant, 0.0, 0.0, outcome),
        ]

    def _shed(
        self, entry: Entry, reason: Reason, now: float, retry_after: float | None = None
    ) -> list[Action]:
        """Refuse a request that was admitted but never answered; its reservation goes back."""
        self.queue.remove(entry)
        self._release_claim(entry)
        if retry_after is None:
            retry_after = self._drain_time()
        settle = self._settle(entry, None, Cause.SHED, Usage(), None, now, reason.value)
        return [Shed(entry.request.id, reason, retry_after), settle]

    def _settle(
        self,
        entry: Entry,
        attempt: Attempt | None,
        cause: Cause,
        usage: Usage,
        last_token: float | None,
        now: float,
        reason: str,
    ) -> Settle:
        """End the request, once: give back what was reserved and not used, learn, and say what
        became of it.
        """
        request = entry.request
        del self.open[request.id]
        entry.state = "gone"
        used = 0.0
        if attempt is None or (usage.source is UsageSource.NONE and cause is not Cause.FINISHED):
            entry.account.revoke(entry.admission, now=now)
        else:
            used = (usage.prompt or entry.prompt) + usage.completion
            entry.account.settle(entry.admission, used=used, now=now)
        outcome = Outcome(
            request=request,
            cause=cause,
            arrived=entry.arrived,
            ended=now,
            sent=attempt.sent if attempt is not None else None,
            first_token=attempt.first_token if attempt is not None else None,
            last_token=last_token,
            route=attempt.route if attempt is not None else None,
            replica=attempt.replica if attempt is not None else None,
            variant=self._route_variant[attempt.route] if attempt is not None else None,
            attempts=entry.attempts,
            usage=usage,
            prediction=attempt.prediction if attempt is not None else None,
            propensity=attempt.propensity if attempt is not None else 1.0,
            policy=attempt.policy if attempt is not None else self.scorer.name,
            version=attempt.version if attempt is not None else self._active.version,
            met=True,
            reason=reason,
        )
        outcome = judged(outcome)
        self.estimator.learn(outcome)
        return Settle(request.id, request.tenant, used, entry.admission.tokens - used, outcome)

    # ---- the world around

    def _reading(self, event: Reading) -> list[Action]:
        nan = float("nan")
        if event.measured_at < self._measured_at[event.replica]:
            return []
        self._measured_at[event.replica] = event.measured_at
        self._native.merge(
            self.columns,
            event.replica,
            event.measured_at,
            nan if event.running is None else event.running,
            nan if event.waiting is None else event.waiting,
            nan if event.kv_used is None else event.kv_used,
        )
        return self._release(self._now)

    def _availability_changed(self, event: AvailabilityChanged) -> list[Action]:
        if self.columns.usable[event.replica] and not event.usable:
            self._prefix.clear(event.replica)
        self.columns.usable[event.replica] = event.usable
        return self._release(self._now)

    def _fleet_changed(self, event: FleetChanged) -> list[Action]:
        """Take another fleet: replicas keep their index for life, removed ones drain, waiting
        requests are re-checked.
        """
        wanted = {r.name: r for r in event.fleet.replicas}
        kept = tuple(wanted.pop(r.name, r) for r in self.fleet.replicas)
        names = {r.name for r in event.fleet.replicas}
        removed = [i for i, r in enumerate(self.fleet.replicas) if r.name not in names]
        variants = {v.name: v for v in self.fleet.variants}
        variants |= {v.name: v for v in event.fleet.variants}
        merged = FleetSpec(replicas=(*kept, *wanted.values()), variants=tuple(variants.values()))
        self._set_fleet(merged)
        for i in removed:
            self.columns.usable[i] = False
        actions: list[Action] = []
        for entry in self.queue.oldest(len(self.queue)):
            self.queue.remove(entry)
            allowed = self._by_model.get(entry.request.model)
            if allowed is None:
                actions += self._shed(entry, Reason.UNKNOWN_MODEL, self._now)
                continue
            entry.allowed = allowed
            entry.excluded.clear()
            self.queue.push(entry)
        return actions + self._release(self._now)

    def _config_reloaded(self, event: ConfigReloaded) -> list[Action]:
        self._set_tenants(event.tenants, event.classes)
        return self._release(self._now)

    def _scorer_late(self, event: ScorerLate) -> list[Action]:
        self._late_until = event.at + self.options.late_penalty
        return []

    def _tick(self, _event: Tick) -> list[Action]:
        return self._release(self._now)

    def _drain(self, _event: Draining) -> list[Action]:
        self._draining = True
        actions: list[Action] = []
        for entry in self.queue.oldest(len(self.queue)):
            actions += self._shed(entry, Reason.SHUTTING_DOWN, self._now, retry_after=1.0)
        return actions

    def _nothing(self, _event: Event) -> list[Action]:
        return []

    # ---- set-up

    def _set_fleet(self, fleet: FleetSpec) -> None:
        """Widen the columns to this fleet; replicas so far keep their index and their state."""
        replicas = fleet.replicas
        before = len(self.fleet.replicas)
        columns = fleet_columns(replicas)
        _carry(self.columns, columns, before)
        measured = np.full(len(replicas), -inf)
        measured[:before] = self._measured_at
        claimed = np.full(len(replicas), kernels.NONE, np.int64)
        claimed[:before] = self._claimed
        self.fleet = fleet
        self.columns = columns
        self._size = max(len(replicas), 1)
        self._measured_at = measured
        self._claimed = claimed
        if not self.options.hold:
            columns.window.fill(inf)
            columns.kv_capacity.fill(inf)
            columns.max_seqs.fill(inf)
        table = route_table(fleet)
        self.routes = table.routes
        self._by_model = table.by_model
        self._route_decode: list[int] = table.routes.decode.tolist()
        self._route_prefill: list[int] = table.routes.prefill.tolist()
        self._route_variant: list[int] = table.routes.variant.tolist()
        self._route_quality = np.array(
            [fleet.variants[v].quality for v in self._route_variant], np.float64
        )
        context = [replicas[d].profile.max_context for d in self._route_decode]
        price = [fleet.variants[v].price_per_token for v in self._route_variant]
        self._max_context = {}
        self._price = {}
        for model, mask in table.by_model.items():
            served = np.flatnonzero(mask).tolist()
            self._max_context[model] = float(max((context[c] for c in served), default=0))
            self._price[model] = max((price[c] for c in served), default=0.0)
        self._blocks: dict[int, _Block] = {}
        self._prefix.extend(
            [max(int(r.profile.kv_capacity / BLOCK_TOKENS), 1) for r in replicas[before:]]
        )
        self.estimator.bind(fleet, self.routes)

    def _set_tenants(self, tenants: Sequence[Tenant], classes: Sequence[SloClass]) -> None:
        if not classes:
            raise ValueError("at least one SLO class is needed")
        self._classes = {c.name: c for c in classes}
        self._default_class = self._classes.get("standard", classes[0])
        accounts = {}
        for tenant in tenants:
            account = self._accounts.get(tenant.name)
            if account is None:
                account = Account(tenant, self._now)
            else:
                account.rescale(tenant, self._now)
            accounts[tenant.name] = account
        self._accounts = accounts


def _carry(old: Any, new: Any, count: int) -> None:
    """Copy the state of replicas that keep their index into wider columns."""
    state = (
        "usable running context backlog_tokens kv_used dispatched age foreign_running "
        "foreign_context foreign_backlog n_streams history_at history_running history_context "
        "history_next"
    )
    for name in state.split():
        getattr(new, name)[:count] = getattr(old, name)
    grid = (
        "slot first_at tokens prompt uncached expected reserved tpot_limit ttft_deadline "
        "e2e_deadline"
    )
    for name in grid.split():
        source, target = getattr(old, name), getattr(new, name)
        width = min(source.shape[1], target.shape[1])
        target[:count, :width] = source[:, :width]


def judged(outcome: Outcome) -> Outcome:
    """The outcome, drafted as met, with `met` and the part to blame put right (DESIGN section 11).

    A client's cancel leaves the denominator if no limit had been missed by then; a request the
    engine refused as invalid does so too. Blame: the queue if the wait alone explains the miss, the
    prediction if the request was sent although it was expected to be met, admission if it was sent
    without hope, the engine if it failed.
    """
    match outcome.cause:
        case Cause.FINISHED:
            return (
                outcome
                if limits_met(outcome)
                else replace(outcome, met=False, miss=_blame(outcome))
            )
        case Cause.REJECTED:
            return replace(outcome, met=None)
        case Cause.CLIENT_GONE:
            if _missed_by_now(outcome):
                return replace(outcome, met=False, miss=_blame(outcome))
            return replace(outcome, met=None, miss=Miss.CLIENT)
        case Cause.SHED:
            queued = outcome.reason == Reason.EXPIRED.value
            return replace(outcome, met=False, miss=Miss.QUEUE if queued else Miss.ADMISSION)
        case _:
            return replace(outcome, met=False, miss=Miss.ENGINE)


def _missed_by_now(outcome: Outcome) -> bool:
    slo = outcome.request.slo
    if slo.e2e is not None and outcome.e2e > slo.e2e:
        return True
    if not outcome.request.stream:
        return False
    if slo.ttft is not None:
        late = outcome.ttft if outcome.ttft is not None else outcome.e2e
        if late > slo.ttft:
            return True
    return slo.tpot is not None and outcome.tpot is not None and outcome.tpot > slo.tpot


def _blame(outcome: Outcome) -> Miss:
    slo = outcome.request.slo
    waited = (outcome.sent if outcome.sent is not None else outcome.ended) - outcome.arrived
    over = 0.0
    if slo.e2e is not None:
        over = max(over, outcome.e2e - slo.e2e)
    if slo.ttft is not None and outcome.request.stream:
        late = outcome.ttft if outcome.ttft is not None else outcome.e2e
        over = max(over, late - slo.ttft)
    if over > 0 and waited >= over:
        return Miss.QUEUE
    if outcome.prediction is not None and outcome.prediction.p_slo >= 0.5:
        return Miss.PREDICTION
    return Miss.ADMISSION
