"""Choosing a route: columns filled, room and estimates asked for, the scorer's kernel called, a
pair picked.

Looking changes nothing but the draw counter. Scorers never sample: uniforms are drawn here, a pure
function of (seed, counter), and the propensity of what was chosen is exact for every scorer that
does not read the draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from domain.columns import (
    REQUEST_FLOATS,
    FleetColumns,
    Routes,
    estimate_columns,
    request_columns,
    scores,
)
from domain.events import Candidate
from domain.native import compiled
from domain.outcome import Prediction
from domain.ports import Estimator, Scorer
from policies import kernels
from policies.fleet_state import FleetState
from policies.ledger import Entry
from policies.options import CoreOptions
from policies.rollout import Oversight, Resolved, Trial


class _Block:
    """Columns for n requests, kept for the life of a fleet."""

    __slots__ = (
        "allowed",
        "base",
        "cached",
        "draws",
        "estimates",
        "requests",
        "room",
        "scores",
        "sticky",
        "until",
    )

    def __init__(self, n: int, c: int) -> None:
        self.base = np.zeros((len(REQUEST_FLOATS), n))
        self.requests = request_columns(n, self.base)
        self.cached = False
        self.sticky = False
        self.estimates = estimate_columns(n, c)
        self.scores = scores(n, c)
        self.allowed = np.zeros((n, c), np.bool_)
        self.room = np.zeros((n, c), np.bool_)
        self.draws = np.zeros((n, c))
        self.until = np.full((n, c), -inf)


class _Policy:
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
class Choice:
    """The `index`-th of the requests that were looked at takes `route`; `p_best` is its best P(SLO)
    anywhere. With `wait_until` the route is full and warm: better wait for it, until then at most.
    `refused`: the policy would rather not serve it.
    """

    index: int
    route: int
    propensity: float
    p_best: float
    policy: str
    version: str
    prediction: Prediction
    candidates: tuple[Candidate, ...]
    wait_until: float | None = None
    shadow: Candidate | None = None
    refused: bool = False


class Chooser:
    """The policy in force, its fallback, and the columns they are asked through."""

    def __init__(
        self,
        state: FleetState,
        estimator: Estimator,
        scorer: Scorer,
        fallback: Scorer,
        options: CoreOptions,
    ) -> None:
        self._state = state
        self._estimator = estimator
        self._options = options
        self._counter = 0
        self._late_until = -inf
        self.look_at = inf
        """When what was last held back is to be looked at again; inf if nothing was."""
        self._blocks: dict[int, _Block] = {}
        self._leading = np.zeros((max(options.candidates, 1), 6))
        columns, routes = state.columns, state.routes
        self._policy = _Policy(scorer, columns, routes)
        self._fallback = _Policy(fallback, columns, routes)
        self.oversight: Oversight | None = None
        self._oversee(None)
        b = _Block(1, 1)
        row, mask, ids = np.zeros(1), np.zeros(1, np.bool_), np.zeros(1, np.int64)
        self._room = compiled(
            kernels.room_into, b.requests, state.windows, routes, b.allowed, ids, row, 0.0, b.room
        )
        self._warm_into = compiled(
            kernels.warm_into,
            b.requests,
            columns,
            routes,
            b.estimates.cached,
            b.allowed,
            ids,
            b.room,
            0,
            0.0,
            0.0,
            0.0,
            row,
        )
        self._draw = compiled(kernels.draw_into, 0, 0, b.draws)
        self._uniform = compiled(kernels.uniform, 0, 0, 0)
        self._best_chance = compiled(kernels.best_chance, mask, row)
        self._earliest = compiled(kernels.earliest, row)
        self._explored = compiled(kernels.explored, mask, row, 0, *(0.0,) * 4)
        self._leading_into = compiled(
            kernels.leading, b.scores.route, b.room, b.estimates, 0, 0, np.zeros((1, 6))
        )

    @property
    def scorer(self) -> Scorer:
        """The policy in force."""
        return self._policy.scorer

    @property
    def version(self) -> str:
        """Its version."""
        return self._policy.version

    def fall_back(self, until: float) -> None:
        """Let the fallback decide until then."""
        self._late_until = until

    def change(self, scorer: Scorer, options: CoreOptions) -> None:
        """Let another scorer decide from now on; the counter of draws goes on."""
        if options.candidates != self._options.candidates:
            self._leading = np.zeros((max(options.candidates, 1), 6))
        self._options = options
        self._policy = _Policy(scorer, self._state.columns, self._state.routes)
        self._oversee(self.trial)

    @property
    def trial(self) -> Trial | None:
        """What is tried beside the policy in force."""
        return None if self.oversight is None else self.oversight.trial

    def attempt(self, trial: Trial | None) -> None:
        """Try another policy beside the one in force, or none any more."""
        self._oversee(trial)

    def _oversee(self, trial: Trial | None) -> None:
        """There is oversight only where there is something to oversee."""
        if trial is None and self._policy.scorer.envelope is None:
            self.oversight = None
            return
        columns, routes = self._state.columns, self._state.routes
        candidate = None if trial is None else _Policy(trial.scorer, columns, routes)
        block = _Block(1, 1)
        self.oversight = Oversight(
            self._policy, self._fallback, candidate, trial, block, columns, routes
        )

    def rebind(self) -> None:
        """The fleet changed: its routes have other columns."""
        self._blocks.clear()

    def choose(
        self, entries: Sequence[Entry], now: float, *, may_wait: bool = False
    ) -> Choice | None:
        """Score (entries x routes) and pick a pair; None if nothing has room.

        Full routes that are worth a request's wait are scored beside those with room; unless
        `may_wait`, only for requests whose wait has begun.
        """
        state, options = self._state, self._options
        self.look_at = inf
        block = self._filled(entries)
        requests, estimates, room = block.requests, block.estimates, block.room
        fleet, routes = state.columns, state.routes
        if not self._room(
            requests,
            state.windows,
            routes,
            block.allowed,
            state.claimed,
            state.measured_at,
            now,
            room,
        ):
            return None
        waits = (
            options.warm_wait
            and block.cached
            and self._widened(block, entries, now, may_wait=may_wait)
        )
        own = self._policy if now >= self._late_until else self._fallback
        policy: Resolved = own
        scorer = own.scorer
        oversight = self.oversight
        explore = options.explore > 0.0
        whole = (
            scorer.needs_estimates or options.shed_below > 0.0 or explore or oversight is not None
        )
        people = [entry.request for entry in entries]
        if whole:
            self._estimator.fill(requests, fleet, routes, room, now, estimates, people)
        self._counter += 1
        if scorer.random or (oversight is not None and oversight.random):
            self._draw(options.seed, self._counter, block.draws)
        score = block.scores.route
        score.fill(-inf)
        block.scores.hold.fill(-inf)
        block.scores.shed.fill(-inf)
        shadow = None
        if oversight is None:
            own.kernel(
                own.params,
                requests,
                fleet,
                routes,
                estimates,
                room,
                block.draws,
                now,
                block.scores,
            )
            i, route = own.pick(score, room, requests.tie)
        else:
            late = now < self._late_until
            judged = oversight.decide(entries, block, fleet, routes, now, late=late)
            i, route, shadow = judged.index, judged.route, judged.shadow
            policy, scorer = judged.policy, judged.policy.scorer
            options = oversight.options(people[i], options)
            explore = options.explore > 0.0
        if i == kernels.NONE:
            self.look_at = self._earliest(block.scores.hold)
            return None
        refused = block.scores.shed.item(i) > score.item(i, route)
        wait_until = None
        if waits:
            if block.until[i, route] > -inf:
                wait_until = block.until.item(i, route)
            else:
                room[i] &= block.until[i] == -inf
        propensity, p_best = 1.0, 1.0
        if whole:
            p_best = self._best_chance(room[i], estimates.p_slo[i])
        else:
            # Only the chosen route is predicted: for the log, and for the learners.
            only = np.zeros_like(room)
            only[i, route] = True
            self._estimator.fill(requests, fleet, routes, only, now, estimates, people)
        if explore and wait_until is None and entries[i].slo_class.rank > 0:
            route, propensity = self._explored(
                room[i],
                estimates.p_slo[i],
                route,
                options.explore,
                options.explore_within,
                self._uniform(options.seed, self._counter, -1),
                self._uniform(options.seed, self._counter, -2),
            )
        return Choice(
            i,
            route,
            propensity,
            p_best,
            scorer.name,
            policy.version,
            self._prediction(block, i, route, entries[i]),
            self._candidates(block, i, route),
            wait_until,
            shadow,
            refused,
        )

    def _widened(
        self, block: _Block, entries: Sequence[Entry], now: float, *, may_wait: bool
    ) -> bool:
        """Open full routes that are worth waiting for, with the end of the wait; True if any is.

        A wait ends with its first bound, with the use of starting, and with the entry's patience.
        """
        state, some = self._state, False
        for i, entry in enumerate(entries):
            block.until[i] = -inf
            end = min(entry.warm_until, entry.start_by, entry.ripe)
            began = entry.warm_until < inf
            if entry.request.blocks and now < end and (began or may_wait):
                some |= self._warm_into(
                    block.requests,
                    state.columns,
                    state.routes,
                    block.estimates.cached,
                    block.allowed,
                    state.claimed,
                    block.room,
                    i,
                    self._options.warm_wait_min,
                    end,
                    now,
                    block.until[i],
                )
        return some

    def hopeless(self, entry: Entry, choice: Choice) -> bool:
        """Whether to refuse: what the policy would rather not serve; and for want of a chance, with
        probability 1 - p / shed_below below the threshold.
        """
        options = self._options
        if self.oversight is not None:
            options = self.oversight.options(entry.request, options)
        threshold = options.shed_below
        if choice.p_best >= threshold and not choice.refused:
            return False
        if not entry.slo_class.sheddable or entry.attempts > 0 or min(entry.limits) == inf:
            return False
        return choice.refused or bool(
            self._uniform(self._options.seed, self._counter, -3) >= choice.p_best / threshold
        )

    def _filled(self, entries: Sequence[Entry]) -> _Block:
        """The columns of so many requests, with these in them."""
        n = len(entries)
        block = self._blocks.get(n)
        if block is None:
            block = self._blocks[n] = _Block(n, len(self._state.decode))
        requests, cached = block.requests, block.estimates.cached
        if block.cached:
            cached.fill(0.0)
            block.cached = False
        if block.sticky:
            block.estimates.sticky.fill(0.0)
            block.sticky = False
        for i, entry in enumerate(entries):
            block.base[:, i] = entry.row
            requests.class_id[i] = entry.slo_class.rank
            requests.tie[i] = entry.request.tie
            requests.length_q[i] = entry.length_q
            allowed = block.allowed[i]
            allowed[:] = entry.allowed
            for route in entry.excluded:
                allowed[route] = False
            if entry.request.slo.quality is not None:
                self._state.floor_into(entry.request.slo.quality, allowed)
            if entry.request.blocks:
                self._state.cached_into(entry, cached[i])
                block.cached = True
            session = entry.request.session
            if session is not None:
                self._state.sticky_into(entry.request.tenant, session, block.estimates.sticky[i])
                block.sticky = True
        return block

    def _prediction(self, block: _Block, i: int, route: int, entry: Entry) -> Prediction:
        """What was predicted, and the state of the route's replicas it was predicted from."""
        fleet, estimates = self._state.columns, block.estimates
        r, p = self._state.decode[route], self._state.prefill[route]
        return Prediction(
            ttft=tuple(estimates.ttft[i, route].tolist()),
            tpot=tuple(estimates.tpot[i, route].tolist()),
            p_slo=estimates.p_slo.item(i, route),
            p_raw=estimates.p_raw.item(i, route),
            quality=estimates.quality.item(i, route),
            length_mean=entry.expected,
            length_p50=entry.median,
            length_p90=entry.p90,
            cached=estimates.cached.item(i, route),
            wait=estimates.wait.item(i, route),
            running=fleet.running.item(r) + fleet.foreign_running.item(r),
            context=fleet.context.item(r) + fleet.foreign_context.item(r),
            backlog=fleet.backlog_tokens.item(p) + fleet.foreign_backlog.item(p),
            staleness=fleet.age.item(r),
            basis=self._estimator.basis(i, route),
            thinking_p50=entry.thinking,
        )

    def _candidates(self, block: _Block, i: int, route: int) -> tuple[Candidate, ...]:
        """The chosen route and the best others, for the decision log."""
        if self._options.candidates == 0:
            return ()
        table = self._leading
        count = self._leading_into(block.scores.route, block.room, block.estimates, i, route, table)
        return tuple(
            [
                Candidate(int(c), score, p_slo, ttft, tpot, quality)
                for c, score, p_slo, ttft, tpot, quality in table[:count].tolist()
            ]
        )
