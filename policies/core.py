"""The decision core: events in, actions out, time with every event; no I/O, no clock, no ambient
state.

It owns admission, quotas, the queue, the ledger, fleet state, exploration and the policy, and asks
an estimator for predictions. The gateway and the simulator are shells around it: they turn what
happens into events and carry out the actions.

    Arrived --admit--> (no) Shed
                 `---> room? --yes--> book, Commit --Committed--> Send --AttemptEnded--> Settle
                           `--no----> Hold; every event that may free room runs the same release

Rules (CORE section 3): looking never changes state; what can change a decision is an event; Commit
before Send; bookings are keyed by (id, attempt) and settle once; a bucket may go into debt but
admits nothing then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, inf, isfinite
from typing import Any

import numpy as np

from domain.columns import FleetColumns, Routes
from domain.events import (
    Abort,
    Action,
    AnswerBegan,
    Arrived,
    AttemptEnded,
    AvailabilityChanged,
    ClientGone,
    Commit,
    Committed,
    ConfigReloaded,
    Draining,
    Event,
    FeedbackGiven,
    FirstToken,
    FleetChanged,
    ForeignLoad,
    Hold,
    ModelSwapped,
    PolicyChanged,
    Progress,
    Reading,
    Reason,
    ScorerLate,
    Send,
    Settle,
    Shed,
    Tick,
    TrialChanged,
)
from domain.fleet import FleetSpec, ReplicaView
from domain.outcome import Cause, Miss, Outcome, Usage, UsageSource
from domain.ports import Estimator, Lesson, OnlineLearner, Scorer
from domain.request import InferenceRequest, SloClass, Tenant
from policies.admission import AdmissionControl, Refusal
from policies.bucket import Account
from policies.chooser import Choice, Chooser
from policies.fleet_state import FleetState
from policies.judge import judged
from policies.ledger import Attempt, Entry
from policies.options import CoreOptions
from policies.queue import WaitingRoom
from policies.rollout import GuardTally, PlannedTrial, Trial
from policies.traits import traits_of


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
        midnight: float = 0.0,
        policies: Callable[[str], tuple[Scorer, CoreOptions]] | None = None,
        policy: str = "",
        trials: Callable[[str], PlannedTrial] | None = None,
    ) -> None:
        self.options = options
        self.estimator = estimator
        self.open: dict[str, Entry] = {}
        self.queue = WaitingRoom(
            k_best=options.k_best, fairness=options.fairness, alpha_max=options.alpha_max
        )
        self.state = FleetState(fleet, hold=options.hold)
        estimator.bind(fleet, self.state.routes)
        self.admission = AdmissionControl(
            self.state, estimator, tenants, classes, now, options.overload_target, midnight
        )
        self._chooser = Chooser(self.state, estimator, scorer, fallback, options)
        self._now = now
        self._slots = 0
        self._sent = 0.0
        self._retries = 0.0
        self._draining = False
        self._policies = policies
        self._trials = trials
        self._known = {policy: scorer}
        self._learners: tuple[OnlineLearner, ...] = ()
        self._take_learners()
        self._on: dict[type, Callable[[Any], list[Action]]] = {
            Arrived: self._arrived,
            Committed: self._committed,
            FirstToken: self._first_token,
            Progress: self._progress,
            AnswerBegan: self._answer_began,
            AttemptEnded: self._attempt_ended,
            ClientGone: self._client_gone,
            Reading: self._reading,
            ForeignLoad: self._foreign_load,
            AvailabilityChanged: self._availability_changed,
            FleetChanged: self._fleet_changed,
            ConfigReloaded: self._config_reloaded,
            ModelSwapped: self._model_swapped,
            ScorerLate: self._scorer_late,
            PolicyChanged: self._policy_changed,
            TrialChanged: self._trial_changed,
            FeedbackGiven: self._feedback_given,
            Tick: self._tick,
            Draining: self._drain,
        }

    # ---- what shells and people see

    def handle(self, event: Event) -> list[Action]:
        """Take one event in and return what follows from it. Time never runs backwards here."""
        self._now = max(self._now, event.at)
        actions = self._on[type(event)](event)
        if self._chooser.oversight is not None:
            actions += self._verdict()
        return actions

    @property
    def fleet(self) -> FleetSpec:
        """The fleet in force; replicas that left keep their index while they drain."""
        return self.state.spec

    @property
    def columns(self) -> FleetColumns:
        """Load and own streams of every replica."""
        return self.state.columns

    @property
    def routes(self) -> Routes:
        """What a route index means."""
        return self.state.routes

    @property
    def scorer(self) -> Scorer:
        """The policy in force."""
        return self._chooser.scorer

    @property
    def trial(self) -> Trial | None:
        """What is tried beside it."""
        return self._chooser.trial

    @property
    def guarded(self) -> GuardTally | None:
        """Requests that the fallback decided for a learned one; None where none is."""
        return None if self._chooser.oversight is None else self._chooser.oversight.guarded

    @property
    def wake_at(self) -> float | None:
        """When the core wants a `Tick` at the latest: earliest expiry, patience, end of a claim,
        of a warm wait or of a hold, or staleness.
        """
        if not self.queue:
            return None
        at = min(self.queue.next_expiry, self.queue.next_line_up)
        at = min(at, self.state.next_change(self._now))
        if self._chooser.look_at > self._now:
            at = min(at, self._chooser.look_at)
        for entry in self.queue.oldest(1):
            if entry.claim is None and entry.ripe > self._now:
                at = min(at, entry.ripe)
        return at if isfinite(at) else None

    def replica(self, index: int) -> ReplicaView:
        """One replica's state as a row."""
        return self.state.replica(index)

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names of the tenants in force."""
        return self.admission.tenants

    def account(self, tenant: str) -> Account | None:
        """The quotas of a tenant, for headers and the admin API."""
        return self.admission.account(tenant)

    # ---- arrival

    def _arrived(self, event: Arrived) -> list[Action]:
        request, now = event.request, self._now
        if self._draining:
            return self._refuse(request, Refusal(Reason.SHUTTING_DOWN, 1.0), now)
        if len(self.queue) >= self.options.queue_limit:
            return self._refuse(request, Refusal(Reason.QUEUE_FULL, self._drain_time()), now)
        entry = self.admission.admit(request, now)
        if isinstance(entry, Refusal):
            return self._refuse(request, entry, now)
        self.open[request.id] = entry
        if self.queue:
            self.queue.push(entry)
            actions = self._release(now)
            return actions + self._held(entry) if entry.ticket else actions
        return self._place(entry, now)

    # ---- placing

    def _place(self, entry: Entry, now: float) -> list[Action]:
        """Send one request if there is room and hope, else hold or shed it."""
        choice = self._chooser.choose((entry,), now, may_wait=self.queue.may_park)
        if choice is None or choice.wait_until is not None:
            self.queue.push(entry)
            if choice is not None:
                self._park(entry, choice)
            return self._held(entry)
        return self._decided(entry, choice, now)

    def _decided(self, entry: Entry, choice: Choice, now: float) -> list[Action]:
        """Refuse the request for want of hope, or commit it to the chosen route."""
        if entry.feasible:
            self.admission.gate.decided(entry.slo_class.name, choice.p_best, entry.work, now)
        if self._chooser.hopeless(entry, choice):
            return self._shed(entry, Reason.UNREACHABLE, now)
        return self._commit(entry, choice, now)

    def _commit(self, entry: Entry, choice: Choice, now: float) -> list[Action]:
        """Book the route here and ask the store; `Committed` sends."""
        self._slots += 1
        entry.attempts += 1
        attempt = Attempt(
            number=entry.attempts,
            route=choice.route,
            replica=self.state.decode[choice.route],
            prefill=self.state.prefill[choice.route],
            slot=self._slots,
            propensity=choice.propensity,
            prediction=choice.prediction,
            candidates=choice.candidates,
            policy=choice.policy,
            version=choice.version,
            shadow=choice.shadow,
        )
        self.state.book(entry, attempt, now)
        entry.attempt = attempt
        entry.state = "committing"
        self.state.release_claim(entry)
        self.queue.charge(entry, 1.0 / self.state.size)
        first = attempt.number == 1 and not entry.held_once
        return [self._ask(entry, attempt, entry.admission.tokens if first else 0.0)]

    def _ask(self, entry: Entry, attempt: Attempt | None, tokens: float) -> Commit:
        """What the store is to reserve, and to book where there is an attempt."""
        request = entry.request
        if attempt is None:
            route, replica, prefill, room, backlog = None, None, None, 0.0, 0.0
        else:
            route, replica, prefill = attempt.route, attempt.replica, attempt.prefill
            room = entry.prompt + entry.expected
            backlog = max(entry.prompt - float(int(attempt.prediction.cached)), 0.0)
        return Commit(
            request.id,
            0 if attempt is None else attempt.number,
            request.tenant,
            route,
            tokens,
            request.key,
            request.model,
            entry.admission.cost,
            replica,
            prefill,
            room,
            backlog,
        )

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
        self.state.unbook(attempt, now)
        entry.attempt = None
        entry.attempts -= 1
        entry.state = "held"
        if not event.reserved:
            actions = self._shed(entry, Reason.RATE, now, retry_after=event.retry_after)
            return actions + self._release(now)
        entry.refusals += 1
        entry.exclude(attempt.route)
        if entry.refusals <= 2 and self.state.served(entry.allowed, entry.excluded):
            return self._place(entry, now) + self._release(now)
        # Held until the next event: a refusal is momentary, so no route stays excluded.
        entry.excluded.clear()
        entry.refusals = 0
        self.queue.push(entry)
        return self._held(entry)

    def _send(self, entry: Entry, attempt: Attempt, now: float) -> Send:
        entry.state = "sent"
        attempt.sent = now
        self._sent += 1.0
        self.state.sent(attempt, entry.request)
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
            attempt.shadow,
        )

    # ---- holding

    def _park(self, entry: Entry, choice: Choice) -> None:
        """Let a queued request wait for the full, warm replica it was given; the first bound
        stands.
        """
        if entry.warm_until == inf and choice.wait_until is not None:
            entry.warm_until = choice.wait_until
        self.queue.park(entry)

    def _held(self, entry: Entry) -> list[Action]:
        """What follows when a request first waits: its reservation is agreed with the store,
        once.
        """
        if entry.held_once:
            return []
        entry.held_once = True
        return [Hold(entry.request.id), self._ask(entry, None, entry.admission.tokens)]

    def _release(self, now: float) -> list[Action]:
        """Send what fits now, in the present order; shed what waited too long. The one routine for
        every event.
        """
        actions: list[Action] = []
        if not self.queue:
            return actions
        self._chooser.look_at = inf
        for entry in self.queue.expired(now):
            last = entry.arrived + entry.slo_class.max_wait
            self.queue.remove(entry)
            if entry.feasible:
                self.admission.gate.decided(entry.slo_class.name, 0.0, 0.0, now)
            if entry.slo_class.sheddable or now >= last:
                actions += self._shed(entry, Reason.EXPIRED, now)
            else:
                # Too late to be of use, but never refused: held on, behind all that can still be
                # met.
                entry.start_by = entry.expires = last
                self.queue.push(entry)
        self.queue.line_up(now)
        self.state.press_claims(self.queue.ripe(self.state.size, now), now)
        while self.queue and self.state.any_open(self.queue.least_prompt, now):
            batch = self.queue.candidates(now, self._load())
            progress = False
            while batch and self.state.any_open(self.queue.least_prompt, now):
                choice = self._chooser.choose(batch, now, may_wait=self.queue.may_park)
                if choice is None:
                    break
                entry = batch.pop(choice.index)
                if choice.wait_until is not None:
                    self._park(entry, choice)
                    continue
                progress = True
                self.queue.remove(entry)
                actions += self._decided(entry, choice, now)
            if batch or not progress:
                break
        return actions

    def _load(self) -> float:
        """How far the order has slid from deadline to shortest work: predicted drain over one
        second, at most 1.
        """
        return min(self.queue.work / self.state.size, 1.0)

    def _drain_time(self) -> float:
        """Predicted seconds until what waits has been sent, at the present pace."""
        return self.admission.gate.drain(self.queue.work, self._now)

    # ---- while it runs

    def _first_token(self, event: FirstToken) -> list[Action]:
        entry = self.open.get(event.id)
        if entry is None or entry.attempt is None or entry.attempt.number != event.attempt:
            return []
        attempt = entry.attempt
        if attempt.first_token is None:
            attempt.first_token = self._now
            self.state.first_token(attempt, self._now)
        return self._release(self._now)

    def _progress(self, event: Progress) -> list[Action]:
        if event.slots:
            self.state.progress(event, self._now)
        if event.last:
            self.estimator.stepped(event.replicas, event.last)
        return []

    def _answer_began(self, event: AnswerBegan) -> list[Action]:
        """Thinking is over: what is left is an answer of the length that such thinking brings."""
        entry = self.open.get(event.id)
        if entry is None or entry.attempt is None or entry.attempt.number != event.attempt:
            return []
        answer = self.estimator.answering(entry.request, event.thought)
        if answer is None:
            return []
        cap = entry.request.max_tokens
        whole = event.thought + answer.mean
        expected = float(max(ceil(whole if cap is None else min(whole, cap)), 1))
        self.state.revise(entry.attempt, entry.prompt, expected)
        return []

    def _attempt_ended(self, event: AttemptEnded) -> list[Action]:
        entry, now = self.open.get(event.id), self._now
        if entry is None or entry.attempt is None or entry.attempt.number != event.attempt:
            return []
        attempt = entry.attempt
        self.state.unbook(attempt, now)
        if self._may_retry(entry, attempt, event.cause):
            self._retries += 1.0
            entry.attempt = None
            entry.state = "held"
            entry.exclude(attempt.route)
            if not self.state.served(entry.allowed, entry.excluded):
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

    def _client_gone(self, event: ClientGone) -> list[Action]:
        entry, now = self.open.get(event.id), self._now
        if entry is None:
            return []
        actions: list[Action] = []
        attempt = entry.attempt
        if attempt is not None:
            self.state.unbook(attempt, now)
            if entry.state == "sent":
                actions.append(Abort(event.id, attempt.number))
        self.queue.remove(entry)
        self.state.release_claim(entry)
        actions.append(
            self._settle(entry, attempt, Cause.CLIENT_GONE, event.usage, now, now, "client gone")
        )
        return actions + self._release(now)

    # ---- endings

    def _refuse(self, request: InferenceRequest, refusal: Refusal, now: float) -> list[Action]:
        """Refuse a request that was never admitted; it costs nothing."""
        outcome = Outcome(
            request=request,
            cause=Cause.SHED,
            arrived=now,
            ended=now,
            met=False,
            miss=Miss.ADMISSION,
            reason=refusal.reason.value,
        )
        return [
            Shed(request.id, refusal.reason, refusal.retry_after),
            Settle(request.id, request.tenant, 0.0, 0.0, outcome),
        ]

    def _shed(
        self, entry: Entry, reason: Reason, now: float, retry_after: float | None = None
    ) -> list[Action]:
        """Refuse a request that was admitted but never answered; its reservation goes back."""
        self.queue.remove(entry)
        self.state.release_claim(entry)
        if retry_after is None:
            kept = self.admission.gate.come_back(entry.request, entry.slo_class, now)
            retry_after = max(self._drain_time(), kept)
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
            variant=self.state.variant_of[attempt.replica] if attempt is not None else None,
            attempts=entry.attempts,
            usage=usage,
            prediction=attempt.prediction if attempt is not None else None,
            propensity=attempt.propensity if attempt is not None else 1.0,
            policy=attempt.policy if attempt is not None else self.scorer.name,
            version=attempt.version if attempt is not None else self._chooser.version,
            met=True,
            reason=reason,
        )
        outcome = judged(outcome)
        self.estimator.learn(outcome)
        if self._learners:
            self._learn(outcome, entry)
        if self._chooser.oversight is not None:
            self._chooser.oversight.settled(outcome, entry.slo_class.rank)
        return Settle(request.id, request.tenant, used, entry.admission.tokens - used, outcome)

    # ---- the world around

    def _reading(self, event: Reading) -> list[Action]:
        return self._release(self._now) if self.state.read(event) else []

    def _foreign_load(self, event: ForeignLoad) -> list[Action]:
        self.state.foreign(event)
        return self._release(self._now)

    def _availability_changed(self, event: AvailabilityChanged) -> list[Action]:
        self.state.set_usable(event.replica, event.usable)
        return self._release(self._now)

    def _fleet_changed(self, event: FleetChanged) -> list[Action]:
        """Take another fleet; requests that wait are re-checked against it. Routes are numbered
        anew: what runs keeps its replicas, and the number that they have now.
        """
        self.state.change(event.fleet)
        pairs = zip(self.state.decode, self.state.prefill, strict=True)
        number = {pair: c for c, pair in enumerate(pairs)}
        self.estimator.bind(self.state.spec, self.state.routes)
        self._chooser.rebind()
        nowhere = np.zeros(len(self.state.decode), np.bool_)
        actions: list[Action] = []
        for entry in list(self.open.values()):
            allowed = self.state.by_model.get(entry.request.model)
            entry.excluded.clear()
            entry.allowed = nowhere if allowed is None else allowed
            if entry.attempt is not None:
                attempt = entry.attempt
                attempt.route = number.get((attempt.replica, attempt.prefill))
            if entry.ticket:
                self.queue.remove(entry)
                if allowed is None:
                    actions += self._shed(entry, Reason.UNKNOWN_MODEL, self._now)
                else:
                    self.queue.push(entry)
        return actions + self._release(self._now)

    def _config_reloaded(self, event: ConfigReloaded) -> list[Action]:
        """Take other tenants and classes; requests that wait are checked against the new rights."""
        self.admission.configure(event.tenants, event.classes, self._now)
        actions: list[Action] = []
        for entry in list(self.queue.oldest(len(self.queue))):
            account = self.admission.account(entry.request.tenant)
            rights = account.tenant.models if account is not None else frozenset()
            if rights is not None and entry.request.model not in rights:
                actions += self._shed(entry, Reason.FORBIDDEN, self._now)
        return actions + self._release(self._now)

    def _policy_changed(self, event: PolicyChanged) -> list[Action]:
        """Let another policy decide from now on; one that was here before comes back as it was.

        Windows stay as they are: `hold` belongs to the fleet's state.
        """
        if self._policies is None:
            raise ValueError("this core was built without a way to make policies")
        scorer, options = self._policies(event.config)
        scorer = self._known.setdefault(event.config, scorer)
        self.options = options
        self._chooser.change(scorer, options)
        self._take_learners()
        self.queue.change(options.k_best, options.fairness, options.alpha_max)
        self.admission.gate.target = options.overload_target
        return self._release(self._now)

    def _trial_changed(self, event: TrialChanged) -> list[Action]:
        """Try another policy beside the active one, from its own beginning; or none any more."""
        trial = None
        if event.plan:
            if self._trials is None:
                raise ValueError("this core was built without a way to make trials")
            planned = self._trials(event.plan)
            scorer = self._known.setdefault(planned.config, planned.scorer)
            trial = Trial(planned.plan, scorer, planned.options)
        self._chooser.attempt(trial)
        self._take_learners()
        return []

    def _verdict(self) -> list[Action]:
        """End a trial that has to end; what its requests began goes on."""
        trial = self._chooser.trial
        why = None if trial is None else trial.verdict()
        if trial is None or why is None:
            return []
        self._chooser.attempt(None)
        self._take_learners()
        return [trial.rolled_back(why)]

    def _take_learners(self) -> None:
        """Active policy and candidate learn from every outcome, whoever decided it."""
        trial = self._chooser.trial
        scorers = [self.scorer] if trial is None else [self.scorer, trial.scorer]
        learners = [s.learner for s in scorers if s.learner is not None]
        self._learners = tuple(dict.fromkeys(learners))

    def _learn(self, outcome: Outcome, entry: Entry) -> None:
        lesson = Lesson(
            entry.slo_class.rank,
            outcome.met,
            0.0 if outcome.prediction is None else outcome.prediction.quality,
            traits_of(outcome, self.state.columns, self.state.routes),
        )
        for learner in self._learners:
            learner.learn(lesson)

    def _model_swapped(self, event: ModelSwapped) -> list[Action]:
        """Let the estimator predict with another model from now on."""
        self.estimator.swap(event.version, event.artifact)
        return self._release(self._now)

    def _feedback_given(self, event: FeedbackGiven) -> list[Action]:
        """Move a variant's base rate, and what quality floors are held against."""
        rate = self.estimator.feedback(event.variant, event.score)
        if rate is not None:
            self.state.rate(event.variant, rate)
        return []

    def _scorer_late(self, event: ScorerLate) -> list[Action]:
        until, oversight = event.at + self.options.late_penalty, self._chooser.oversight
        if oversight is None or not oversight.late(until):
            self._chooser.fall_back(until)
        return []

    def _tick(self, _event: Tick) -> list[Action]:
        return self._release(self._now)

    def _drain(self, _event: Draining) -> list[Action]:
        self._draining = True
        actions: list[Action] = []
        for entry in list(self.queue.oldest(len(self.queue))):
            actions += self._shed(entry, Reason.SHUTTING_DOWN, self._now, retry_after=1.0)
        return actions
