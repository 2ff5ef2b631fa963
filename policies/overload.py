"""Overload: who is refused early, with which probability, and when to come back.

The signal is *shortfall*: 1 - P(SLO) of the best route at the moment of each decision (1 for a
request whose waiting ran out), averaged per class over the last seconds; requests that even an idle
fleet would hardly serve in time are left out. A proportional-integral rule, as PIE's (RFC 8033),
moves one number, the level, so that the worst class's shortfall (the top's counts double) stays
near its target:

    error = shortfall - target
    integral += KI clip(error / target, -1, 1) dt        level = integral + KP max(error, 0)

The level is spent along a line of steps, each one unit long: sheddable classes from the lowest to
the top, first of tenants that offer more than their fair share, then of everybody. A request on
step i is refused with probability min(max(level - i, 0), 1). So what is refused grows continuously
with load, the lowest class goes first, and a tenant inside its share is spared while another
floods. Fair shares are max-min over the offered work of the last seconds, weighted, of the most
that was sent lately.

A refused client is told a time that is kept for it: slots follow one another at a rate below that
at which its class is being admitted now. Who comes back with the same request after its time is let
pass this gate; who comes early waits like everybody else.

Everything moves with the time of events alone; chance is the hash of the request's id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from domain.request import InferenceRequest, SloClass

MEMORY = 2.0
"""Seconds over which shortfall is averaged."""
RATE_MEMORY = 10.0
"""Seconds over which offered and sent work are averaged."""
CAPACITY_MEMORY = 60.0
"""Seconds over which the most that was sent is forgotten: what is sent while much is refused says
little of what could be."""
PRIOR = 8.0
"""Decisions without shortfall that are assumed before any was seen: damps a few bad ones."""
KI = 0.05
"""Steps of level per second at most: slower than a queue drains, so that it does not overshoot."""
KP = 8.0
"""Steps of level per unit of shortfall beyond the target."""
EVERY = 0.1
"""Seconds between two updates of the level."""
KEPT_SHARE = 0.7
"""Share of the present admissions of a class that is promised to those who were refused."""
SOONEST = 1.0
"""Least `Retry-After` in seconds: the header has whole seconds."""
LATEST = 120.0
"""Longest time promised; beyond it nothing is kept."""
VALID = 30.0
"""Seconds for which a kept time stays good."""
TICKETS = 20_000
"""Kept times at most; the oldest are forgotten first."""
FEASIBLE = 0.8
"""Share of a limit that an idle fleet may use for a request to count as feasible."""


class Faded:
    """A sum that fades: `rate` is what was added per second over the last `memory` seconds."""

    __slots__ = ("at", "memory", "total")

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.total = 0.0
        self.at = 0.0

    def add(self, amount: float, now: float) -> None:
        """Add an amount at this time."""
        self.total = self.value(now) + amount
        self.at = now

    def value(self, now: float) -> float:
        """The faded sum."""
        return self.total * exp(-max(now - self.at, 0.0) / self.memory)

    def rate(self, now: float) -> float:
        """What is added per second."""
        return self.value(now) / self.memory


Mark = tuple[object, ...]
"""What is the same when a client sends a refused request again."""


@dataclass(slots=True)
class _Class:
    """What is known of one class."""

    step: int | None
    """Steps below it, None where it is never refused."""
    shortfall: Faded
    decisions: Faded
    admitted: Faded
    kept_until: float = 0.0


class Gate:
    """The level, fair shares and kept times. Changed by every call that takes `now` (seconds).

    `target` is the shortfall that is tolerated; 0 switches the gate off.
    """

    def __init__(self, target: float) -> None:
        self.target = target
        """Shortfall that is tolerated; 0: the gate is open."""
        self._classes: dict[str, _Class] = {}
        self._steps = 0
        self._integral = 0.0
        self._updated = 0.0
        self._offered: dict[str, Faded] = {}
        self._weights: dict[str, float] = {}
        self._sent = Faded(RATE_MEMORY)
        self._capacity = 0.0
        self._over: frozenset[str] = frozenset()
        self._work: dict[str, float] = {}
        self._tickets: OrderedDict[Mark, float] = OrderedDict()
        self.level = 0.0
        """Steps that are refused now."""

    def configure(self, classes: Sequence[SloClass]) -> None:
        """Take the classes; what was measured of those that stay is kept."""
        ladder = sorted((c for c in classes if c.sheddable), key=lambda c: (-c.rank, c.name))
        steps = {c.name: i for i, c in enumerate(ladder)}
        self._steps = len(ladder)
        old = self._classes
        self._classes = {}
        for c in classes:
            known = old.get(c.name)
            if known is None:
                known = _Class(None, Faded(MEMORY), Faded(MEMORY), Faded(RATE_MEMORY))
            known.step = steps.get(c.name)
            self._classes[c.name] = known

    # ---- what is asked at an arrival

    def refused(
        self, request: InferenceRequest, slo_class: SloClass, weight: float, now: float
    ) -> float | None:
        """Seconds after which to come back if the request is refused, None if it may pass."""
        if self.target <= 0.0:
            return None
        self._update(now)
        if self.level <= 0.0 and not self._tickets:
            return None
        mark = fingerprint(request)
        if self._kept(mark, now):
            return None
        chance = ((request.tie * 0x9E3779B1) & 0xFFFFFFFF) / 4294967296.0
        if chance >= self.probability(slo_class.name, request.tenant):
            return None
        self._offer(request.tenant, weight, self._work.get(request.tenant, 1.0), now)
        return self._keep(self._classes[slo_class.name], mark, now)

    def probability(self, name: str, tenant: str) -> float:
        """The probability with which a request of this class and tenant is refused now."""
        step = self._classes[name].step
        if step is None:
            return 0.0
        if tenant not in self._over:
            step += self._steps
        return min(max(self.level - step, 0.0), 1.0)

    def come_back(self, request: InferenceRequest, slo_class: SloClass, now: float) -> float:
        """When a request that passed and was given up later should come again, in seconds."""
        known = self._classes.get(slo_class.name)
        if known is None or self.level <= 0.0:
            return 0.0
        return self._keep(known, fingerprint(request), now)

    def drain(self, work: float, now: float) -> float:
        """Seconds until `work` seconds of predicted service have been sent, at the present pace."""
        return min(work / max(self._sent.rate(now), 1.0), LATEST)

    # ---- what is told

    def admitted(self, tenant: str, weight: float, name: str, work: float, now: float) -> None:
        """A request of this class and `work` predicted seconds of service passed."""
        if self.target <= 0.0:
            return
        self._offer(tenant, weight, work, now)
        self._work[tenant] = work + 0.9 * (self._work.get(tenant, work) - work)
        self._classes[name].admitted.add(1.0, now)

    def decided(self, name: str, chance: float, work: float, now: float) -> None:
        """A request was sent (or given up: work 0) with this P(SLO) on its best route."""
        known = self._classes.get(name)
        if known is None:
            return
        known.shortfall.add(1.0 - chance, now)
        known.decisions.add(1.0, now)
        if work > 0.0:
            self._sent.add(work, now)

    # ---- inside

    def _offer(self, tenant: str, weight: float, work: float, now: float) -> None:
        """A tenant asked for `work` seconds of service, refused or not."""
        known = self._offered.get(tenant)
        if known is None:
            known = self._offered[tenant] = Faded(RATE_MEMORY)
        known.add(work / weight, now)
        self._weights[tenant] = weight

    def _update(self, now: float) -> None:
        elapsed = now - self._updated
        if elapsed < EVERY:
            return
        self._updated = now
        worst = 0.0
        for known in self._classes.values():
            seen = known.decisions.value(now) + PRIOR
            height = 0.0 if known.step is None else (known.step + 1.0) / self._steps
            worst = max(worst, (1.0 + height) * known.shortfall.value(now) / seen)
        over = worst - self.target
        most = 2.0 * self._steps
        step = KI * min(max(over / self.target, -1.0), 1.0) * min(elapsed, 1.0)
        self._integral = min(max(self._integral + step, 0.0), most)
        self.level = min(self._integral + KP * max(over, 0.0), most)
        self._capacity *= exp(-min(elapsed, CAPACITY_MEMORY) / CAPACITY_MEMORY)
        self._capacity = max(self._capacity, self._sent.rate(now))
        if self.level > 0.0:
            self._share_out(now)

    def _share_out(self, now: float) -> None:
        """Which tenants offer more than their max-min fair share of what is being sent."""
        rates = sorted((known.rate(now), name) for name, known in self._offered.items())
        left = self._capacity
        weight = sum(self._weights[name] for _, name in rates)
        over = {name for _, name in rates}
        for rate, name in rates:
            if rate * weight > left or weight <= 0.0:
                break
            over.discard(name)
            left -= rate * self._weights[name]
            weight -= self._weights[name]
        self._over = frozenset(over)
        for name in [n for n, known in self._offered.items() if known.value(now) < 1e-6]:
            del self._offered[name], self._weights[name]
            self._work.pop(name, None)

    def _kept(self, mark: Mark, now: float) -> bool:
        """Whether this request's kept time has come; it is used up."""
        due = self._tickets.get(mark)
        if due is None or now < due:
            return False
        del self._tickets[mark]
        return now <= due + VALID

    def _keep(self, known: _Class, mark: Mark, now: float) -> float:
        """Keep a time for a refused request; seconds until it."""
        rate = max(KEPT_SHARE * known.admitted.rate(now), 1.0 / LATEST)
        soonest = max(known.kept_until, now + SOONEST)
        due = soonest + 1.0 / rate
        if due - now > LATEST:
            return LATEST
        known.kept_until = due
        self._tickets[mark] = due
        self._tickets.move_to_end(mark)
        if len(self._tickets) > TICKETS:
            self._tickets.popitem(last=False)
        return due - now


def fingerprint(request: InferenceRequest) -> Mark:
    """What is the same when a client sends a refused request again."""
    return (
        request.tenant,
        request.key,
        request.model,
        request.class_name,
        request.session,
        request.prompt_chars,
        request.max_tokens,
        request.text_group,
        request.blocks[-1:],
    )
