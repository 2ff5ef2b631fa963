"""Trying a policy without fear: shadow, canary, and what makes either end by itself.

A `Trial` is a candidate beside the active policy. In shadow it scores the same columns and is only
compared; as a canary it decides for a share of the tenants, chosen by a hash, so that 1 % is part
of 5 % and nobody flips between policies from request to request. `Oversight` decides for a core
that has something to oversee: a trial, or an active policy that was learned. A core without
either has none, and pays nothing.

    per request   its arm                    -> active or candidate scores it
                  traits outside the fit     -> the fallback (best-fit) scores it   (shifted)
                  scores that are no numbers -> the fallback (best-fit) scores it   (fault)
    per trial     faults, shifts, lateness, or attainment worse than the others' -> rolled back

All of it follows from events, so a replay rolls back at the same request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from math import inf
from typing import Literal, Protocol

import numpy as np

from domain.columns import (
    EstimateColumns,
    FleetColumns,
    Floats,
    Mask,
    RequestColumns,
    Routes,
    Scores,
)
from domain.columns import scores as score_columns
from domain.events import Candidate, RolledBack
from domain.native import compiled
from domain.outcome import Outcome
from domain.ports import Scorer
from domain.request import InferenceRequest
from policies import kernels, traits
from policies.ledger import Entry
from policies.options import CoreOptions
from policies.sequential import AttainmentTest

WINDOW = 200
"""Decisions of a candidate over which its shifted requests are counted."""
MEMORY = 1000
"""Decisions after which a late one, or a fault, is forgotten."""


class Why(StrEnum):
    """Why a trial ended by itself."""

    WORSE = "worse"  # attainment below the others'
    LATE = "late"  # decisions beyond their budget
    FAULTY = "faulty"  # scores that are no numbers
    SHIFTED = "shifted"  # inputs outside what it was fitted on


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan:
    """How a candidate is tried.

    `share` of the tenants (or sessions) are canaries. Limits: `late` decisions beyond the budget or
    `faults` of the scores within `MEMORY` decisions, `shifted` share of the last `WINDOW`. For
    `alpha`, `tolerance` and `margin` see `policies.sequential`.
    """

    name: str
    mode: Literal["shadow", "canary"]
    share: float = 0.0
    unit: Literal["tenant", "session"] = "tenant"
    salt: str = ""
    alpha: float = 0.01
    tolerance: float = 0.005
    margin: float = 0.02
    late: int = 3
    faults: int = 3
    shifted: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTrial:
    """A plan with its policy built; `config` is the policy's configuration as JSON."""

    plan: TrialPlan
    config: str
    scorer: Scorer
    options: CoreOptions


@dataclass(slots=True)
class Tally:
    """What a candidate did so far."""

    decisions: int = 0
    same: int = 0
    """Decisions in which shadow and active took the same route."""
    gain: float = 0.0
    """Sum over shadow decisions of P(SLO) on its route minus on the active one's."""
    faults: int = 0
    shifted: int = 0
    late: int = 0


@lru_cache(maxsize=4096)
def lot(salt: str, unit: str) -> float:
    """A uniform number in [0, 1) of a tenant or session: below the share it is a canary."""
    digest = blake2b(f"{salt}|{unit}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


class Trial:
    """One candidate, its plan and what became of it."""

    def __init__(self, plan: TrialPlan, scorer: Scorer, options: CoreOptions) -> None:
        self.plan = plan
        self.scorer = scorer
        self.options = options
        self.tally = Tally()
        self.test = AttainmentTest(plan.alpha, plan.tolerance, plan.margin)
        self.late_until = -inf
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._shifted = 0
        self._lates: deque[int] = deque(maxlen=plan.late)
        self._faults: deque[int] = deque(maxlen=plan.faults)

    def takes(self, request: InferenceRequest) -> bool:
        """Whether the candidate decides for this request."""
        plan = self.plan
        if plan.mode == "shadow" or plan.share <= 0.0:
            return False
        if plan.share >= 1.0:
            return True
        unit = request.tenant
        if plan.unit == "session":
            unit = f"{unit}|{request.session if request.session is not None else request.id}"
        return lot(plan.salt, unit) < plan.share

    def decided(self, *, shifted: bool, fault: bool) -> None:
        """The candidate was asked once."""
        if len(self._recent) == WINDOW:
            self._shifted -= self._recent[0]
        self._recent.append(shifted)
        self._shifted += shifted
        self.tally.decisions += 1
        self.tally.shifted += shifted
        if fault:
            self.tally.faults += 1
            self._faults.append(self.tally.decisions)

    def late(self, until: float) -> None:
        """A decision of the candidate was late: the fallback decides for it until then."""
        self.tally.late += 1
        self._lates.append(self.tally.decisions)
        self.late_until = until

    def _often(self, when: deque[int]) -> bool:
        """Whether as many as the plan allows happened within `MEMORY` decisions."""
        full = len(when) == when.maxlen
        return full and self.tally.decisions - when[0] <= MEMORY

    def verdict(self) -> Why | None:
        """Why the trial has to end, if it has to."""
        plan = self.plan
        if self._often(self._faults):
            return Why.FAULTY
        if self._often(self._lates):
            return Why.LATE
        if len(self._recent) >= WINDOW // 2 and self._shifted > plan.shifted * len(self._recent):
            return Why.SHIFTED
        if self.test.alarm:
            return Why.WORSE
        return None

    def rolled_back(self, why: Why) -> RolledBack:
        """The action that ends it."""
        tally, test = self.tally, self.test
        if why is Why.WORSE:
            detail = (
                f"attainment {test.candidate_met / max(test.candidate, 1):.4f} of {test.candidate}"
                f" against {test.control_met / max(test.control, 1):.4f} of {test.control};"
                f" evidence {test.evidence:.3g}"
            )
        else:
            detail = (
                f"{tally.faults} faults, {tally.late} late, {tally.shifted} shifted of"
                f" {tally.decisions} decisions"
            )
        return RolledBack(self.plan.name, why.value, detail)


class Resolved(Protocol):
    """A policy as the chooser holds it: its kernel compiled for the core's columns."""

    scorer: Scorer
    kernel: Callable[..., None]
    params: Floats
    version: str


class Block(Protocol):
    """The chooser's columns for n requests."""

    requests: RequestColumns
    estimates: EstimateColumns
    room: Mask
    draws: Floats
    scores: Scores


@dataclass(slots=True)
class Judgement:
    """Which policy took which request where; `shadow` is what the candidate would have done."""

    policy: Resolved
    index: int
    route: int
    shadow: Candidate | None = None


@dataclass(slots=True)
class GuardTally:
    """Requests that the fallback decided instead of the learned active one."""

    shifted: int = 0
    faults: int = 0


class Oversight:
    """Decides for a core with a trial or with a learned active policy.

    `active`, `candidate` and `fallback` are the chooser's; the rest are the core's columns.
    """

    def __init__(
        self,
        active: Resolved,
        fallback: Resolved,
        candidate: Resolved | None,
        trial: Trial | None,
        block: Block,
        fleet: FleetColumns,
        routes: Routes,
    ) -> None:
        self.trial = trial
        self.guarded = GuardTally()
        self.random = active.scorer.random or (trial is not None and trial.scorer.random)
        self._active = active
        self._fallback = fallback
        self._candidate = candidate if candidate is not None else active
        self._candidate_decided = False
        self._spare: dict[tuple[int, ...], tuple[Scores, Mask]] = {}
        row, room = np.zeros(1), np.zeros(1, np.bool_)
        pair = np.zeros((1, 1)), np.zeros((1, 1), np.bool_), np.zeros(1, np.int64)
        self._sound = compiled(traits.sound, row, room)
        self._best = compiled(kernels.best_route, row, room, 0)
        self._first_fit = compiled(kernels.first_fit, *pair)
        self._best_pair = compiled(kernels.best_pair, *pair)
        self._outside = compiled(
            traits.outside,
            np.zeros((2, traits.COUNT)),
            block.requests,
            fleet,
            routes,
            block.estimates,
            room,
            0,
            0.0,
        )

    def takes(self, request: InferenceRequest) -> bool:
        """Whether this request is a canary."""
        return self.trial is not None and self.trial.takes(request)

    def options(self, request: InferenceRequest, options: CoreOptions) -> CoreOptions:
        """The options of the policy whose request this is."""
        trial = self.trial
        return trial.options if trial is not None and trial.takes(request) else options

    def decide(
        self,
        entries: Sequence[Entry],
        block: Block,
        fleet: FleetColumns,
        routes: Routes,
        now: float,
        *,
        late: bool,
    ) -> Judgement:
        """Score every request by the policy it belongs to and pick a pair; `kernels.NONE` as index
        if nothing can be chosen. `block` are the chooser's columns, scores still at -inf.
        """
        trial, room, n = self.trial, block.room, len(entries)
        mine = [self._active] * n
        if trial is not None and trial.plan.mode == "canary":
            mine = [self._candidate if trial.takes(e.request) else self._active for e in entries]
        benched = trial is not None and now < trial.late_until
        policies = [
            self._fallback if late or (benched and policy is self._candidate) else policy
            for policy in mine
        ]
        shifted, faults = [False] * n, [False] * n
        for i, policy in enumerate(policies):
            if self._strays(policy, block, fleet, routes, i, now):
                policies[i], shifted[i] = self._fallback, True
        self._score(policies, block, fleet, routes, now)
        score, hold = block.scores.route, block.scores.hold
        for i, policy in enumerate(policies):
            watched = policy.scorer.envelope is not None or policy is not self._active
            if watched and policy is not self._fallback and room[i].any():
                faults[i] = not (traits.held(score[i], hold[i]) or self._sound(score[i], room[i]))
        if any(faults):
            for i in np.flatnonzero(faults).tolist():
                score[i], policies[i] = -np.inf, self._fallback
                block.scores.shed[i] = -np.inf
            again = [self._fallback if fault else None for fault in faults]
            self._score(again, block, fleet, routes, now)
        by_value = all(policy.scorer.unit == "value" for policy in policies)
        pick = self._best_pair if by_value else self._first_fit
        index, route = pick(score, room, block.requests.tie)
        shadowing = trial is not None and trial.plan.mode == "shadow" and not late and not benched
        self._candidate_decided = shadowing or (
            (self._candidate is not self._active)
            and any(policy is self._candidate for policy in policies)
        )
        judgement = Judgement(self._active, index, route)
        if index == kernels.NONE:
            return judgement
        judgement.policy = policies[index]
        if trial is not None and mine[index] is self._candidate:
            if not late and not benched:
                trial.decided(shifted=shifted[index], fault=faults[index])
        else:
            self.guarded.shifted += shifted[index]
            self.guarded.faults += faults[index]
        if trial is not None and shadowing:
            judgement.shadow = self._shadowed(trial, block, fleet, routes, now, index, route)
        return judgement

    def _strays(
        self,
        policy: Resolved,
        block: Block,
        fleet: FleetColumns,
        routes: Routes,
        i: int,
        now: float,
    ) -> bool:
        """Whether the request lies outside what a learned policy was fitted on."""
        return policy.scorer.envelope is not None and self._is_outside(
            policy, block, fleet, routes, i, now
        )

    def _is_outside(
        self,
        policy: Resolved,
        block: Block,
        fleet: FleetColumns,
        routes: Routes,
        i: int,
        now: float,
    ) -> bool:
        return bool(
            self._outside(
                policy.scorer.envelope,
                block.requests,
                fleet,
                routes,
                block.estimates,
                block.room[i],
                i,
                now,
            )
        )

    def _score(
        self,
        policies: Sequence[Resolved | None],
        block: Block,
        fleet: FleetColumns,
        routes: Routes,
        now: float,
    ) -> None:
        """Each policy scores its own rows; None leaves a row alone."""
        for policy in dict.fromkeys(p for p in policies if p is not None):
            mask = block.room
            if any(p is not policy for p in policies):
                rows = np.array([p is policy for p in policies])
                mask = block.room & rows[:, None]
            policy.kernel(
                policy.params,
                block.requests,
                fleet,
                routes,
                block.estimates,
                mask,
                block.draws,
                now,
                block.scores,
            )

    def _shadowed(
        self,
        trial: Trial,
        block: Block,
        fleet: FleetColumns,
        routes: Routes,
        now: float,
        i: int,
        route: int,
    ) -> Candidate | None:
        """What the candidate would have done with the request that was decided."""
        policy, shape = self._candidate, block.room.shape
        if shape not in self._spare:
            self._spare[shape] = score_columns(*shape), np.zeros(shape, np.bool_)
        out, mask = self._spare[shape]
        out.route.fill(-np.inf)
        out.hold.fill(-np.inf)
        mask.fill(False)
        mask[i] = block.room[i]
        if self._strays(policy, block, fleet, routes, i, now):
            trial.decided(shifted=True, fault=False)
            return None
        policy.kernel(
            policy.params,
            block.requests,
            fleet,
            routes,
            block.estimates,
            mask,
            block.draws,
            now,
            out,
        )
        row: Floats = out.route[i]
        if traits.held(row, out.hold[i]):
            trial.decided(shifted=False, fault=False)
            return None
        if not self._sound(row, mask[i]):
            trial.decided(shifted=False, fault=True)
            return None
        trial.decided(shifted=False, fault=False)
        other = self._best(row, mask[i], block.requests.tie[i])
        estimates, middle = block.estimates, block.estimates.ttft.shape[2] // 2
        trial.tally.same += other == route
        trial.tally.gain += estimates.p_slo.item(i, other) - estimates.p_slo.item(i, route)
        return Candidate(
            int(other),
            row.item(other),
            estimates.p_slo.item(i, other),
            estimates.ttft.item(i, other, middle),
            estimates.tpot.item(i, other, middle),
            estimates.quality.item(i, other),
        )

    def late(self, until: float) -> bool:
        """A decision was late. Whether the trial is to blame: then only it pauses, until then."""
        if self.trial is None or not self._candidate_decided:
            return False
        self.trial.late(until)
        return True

    def settled(self, outcome: Outcome, rank: int) -> None:
        """A request has ended: it counts for its side of the trial, whoever decided it in the
        end.
        """
        trial = self.trial
        if trial is None or outcome.met is None or trial.plan.mode != "canary":
            return
        trial.test.observe(rank, candidate=trial.takes(outcome.request), met=outcome.met)


@dataclass(slots=True)
class TrialStatus:
    """A trial for people: plan, tally and test in plain values."""

    name: str
    mode: str
    share: float
    policy: str
    version: str
    decisions: int
    same: int
    gain: float
    faults: int
    shifted: int
    late: int
    candidate: int
    candidate_met: int
    control: int
    control_met: int
    evidence: float
    safe: bool


def status_of(trial: Trial) -> TrialStatus:
    """How a trial stands."""
    tally, test, plan = trial.tally, trial.test, trial.plan
    return TrialStatus(
        name=plan.name,
        mode=plan.mode,
        share=plan.share,
        policy=trial.scorer.name,
        version=trial.scorer.version,
        decisions=tally.decisions,
        same=tally.same,
        gain=tally.gain,
        faults=tally.faults,
        shifted=tally.shifted,
        late=tally.late,
        candidate=test.candidate,
        candidate_met=test.candidate_met,
        control=test.control,
        control_met=test.control_met,
        evidence=test.evidence,
        safe=test.safe,
    )
