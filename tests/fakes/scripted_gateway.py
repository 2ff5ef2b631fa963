"""A gateway without HTTP: a decision core, a shared store and replicas that answer on a schedule.

As a program it is one process of a test with several gateways:

    python -m tests.fakes.scripted_gateway '{"name": "g0", "url": "redis://...", ...}'

It prints "ready", waits for a line on standard input, runs its clients for `duration` seconds and
prints what happened as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from domain.events import (
    Abort,
    Action,
    Arrived,
    AttemptEnded,
    ClientGone,
    Commit,
    Event,
    FirstToken,
    Hold,
    Send,
    Settle,
    Shed,
    Tick,
)
from domain.fleet import FleetSpec, Profile, ReplicaSpec, Variant
from domain.outcome import Cause, Usage, UsageSource
from domain.ports import Store
from domain.request import InferenceRequest, Quota, SloClass, Tenant
from gateway.store.memory import MemoryStore
from gateway.store.redis import LedgerView, RedisStore
from policies.config import ClassicPolicy
from policies.core import DecisionCore
from policies.factory import build_core
from predictors.estimator import BaselineEstimator


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one gateway process does. Times in seconds, answers in tokens."""

    name: str
    url: str | None
    """None: the memory store."""
    quota: dict[str, float] = field(default_factory=dict)
    tenants: int = 1
    clients: int = 16
    rate: float | None = None
    """Requests per second in all instead of clients that wait for their answers."""
    duration: float = 5.0
    replicas: int = 4
    max_seqs: int = 64
    prompt: float = 50.0
    max_tokens: float | None = 200.0
    answer: float = 80.0
    """Mean length; lengths are exponential."""
    ttft: float = 0.01
    tpot: float = 0.0005
    cancelled: float = 0.0
    """Share of requests whose client leaves."""
    patience: float = 0.2
    """A refused client tries again after at most this long."""
    lease: float = 15.0
    answer_timeout: float = 2.0
    """Above the store's default: a busy test machine is not an outage; a killed server still is."""
    seed: int = 0


@dataclass(slots=True)
class Story:
    """One request, on the wall clock."""

    id: str
    tenant: str
    asked: float
    admitted: float | None = None
    ended: float | None = None
    reason: str | None = None
    retry_after: float | None = None
    reserved: float = 0.0
    used: float = 0.0
    replica: int | None = None
    held: bool = False
    waited: float | None = None
    """Seconds from the core's `Commit` to the store's answer."""


def fleet_of(plan: Plan) -> FleetSpec:
    """Equal replicas of one variant."""
    profile = Profile(max_seqs=plan.max_seqs, overhead=1e-4, weights=1e-4, per_token=1e-6)
    return FleetSpec(
        replicas=tuple(
            ReplicaSpec(name=f"r{i}", variant="v", profile=profile) for i in range(plan.replicas)
        ),
        variants=(Variant(name="v", model="m"),),
    )


class ScriptedGateway:
    """Runs a core and a store on the running loop; `ask` is a client's request."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tenants = {
            f"t{i}": Tenant(name=f"t{i}", quota=Quota(**plan.quota)) for i in range(plan.tenants)
        }
        fleet = fleet_of(plan)
        self.loop = asyncio.get_running_loop()
        self.core: DecisionCore = build_core(
            ClassicPolicy(kind="least_requests"),
            fleet=fleet,
            estimator=BaselineEstimator(),
            tenants=list(self.tenants.values()),
            classes=[SloClass(name="standard", sheddable=False)],
            now=self.loop.time(),
        )
        names = tuple(r.name for r in fleet.replicas)
        self.store: Store
        self.shared: RedisStore | None = None
        if plan.url is None:
            self.store = MemoryStore()
        else:
            self.store = self.shared = RedisStore(
                url=plan.url,
                gateway=plan.name,
                tenants=self.tenants,
                answer=self.tell,
                clock=self.loop.time,
                ledger=lambda: LedgerView(names, self.core.columns),
                foreign=self.tell,
                signal=self._signal,
                lease=plan.lease,
                answer_timeout=plan.answer_timeout,
            )
        self.random = random.Random(f"{plan.seed}{plan.name}")
        self.stories: dict[str, Story] = {}
        self.signals: list[tuple[float, bool]] = []
        self._ends: dict[str, asyncio.Future[Story]] = {}
        self._timers: dict[str, list[asyncio.TimerHandle]] = {}
        self._commits: dict[str, float] = {}
        self._inbox: list[Event] = []
        self._busy = False
        self._tick: asyncio.TimerHandle | None = None
        self._serial = 0

    def _signal(self, away: bool) -> None:
        self.signals.append((time.time(), away))

    # ---- the shell

    def tell(self, event: Event) -> None:
        """Hand an event to the core and carry out what follows; events in between wait."""
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        while self._inbox:
            for action in self.core.handle(self._inbox.pop(0)):
                self._act(action)
        self._busy = False
        self._wake()

    def _wake(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        at = self.core.wake_at
        if at is not None:
            at = max(at, self.loop.time() + 0.001)
            self._tick = self.loop.call_at(at, lambda: self.tell(Tick(self.loop.time())))

    def _act(self, action: Action) -> None:
        now = self.loop.time()
        match action:
            case Commit():
                if action.tokens > 0:
                    self.stories[action.id].reserved = action.tokens
                self._commits.setdefault(action.id, now)
                answer = self.store.commit(action, now)
                if answer is not None:
                    self._inbox.append(answer)
            case Send():
                self._send(action, now)
            case Hold():
                self.stories[action.id].held = True
            case Shed():
                story = self.stories[action.id]
                story.reason, story.retry_after = action.reason.value, action.retry_after
            case Abort():
                pass
            case Settle():
                self.store.settle(action, now)
                self._settled(action)

    def _send(self, send: Send, now: float) -> None:
        story = self.stories[send.id]
        story.admitted, story.replica = time.time(), send.replica
        story.waited = now - self._commits.pop(send.id)
        plan = self.plan
        limit = plan.max_tokens or 1e9
        tokens = min(1.0 + int(self.random.expovariate(1.0 / plan.answer)), limit)
        end = now + plan.ttft + tokens * plan.tpot
        usage = Usage(prompt=plan.prompt, completion=tokens, source=UsageSource.ENGINE)

        def first() -> None:
            self.tell(FirstToken(self.loop.time(), send.id, send.attempt))

        def ended() -> None:
            at = self.loop.time()
            self.tell(AttemptEnded(at, send.id, send.attempt, Cause.FINISHED, usage, at))

        timers = [self.loop.call_at(now + plan.ttft, first), self.loop.call_at(end, ended)]
        if self.random.random() < plan.cancelled:
            part = self.random.random()
            seen = int(tokens * part)
            so_far = Usage(prompt=plan.prompt, completion=seen, source=UsageSource.COUNTED)
            at = now + plan.ttft + tokens * plan.tpot * part
            timers.append(self.loop.call_at(at, lambda: self.tell(ClientGone(at, send.id, so_far))))
        self._timers[send.id] = timers

    def _settled(self, settle: Settle) -> None:
        for timer in self._timers.pop(settle.id, ()):
            timer.cancel()
        story = self.stories[settle.id]
        story.ended, story.used = time.time(), settle.tokens
        self._ends.pop(settle.id).set_result(story)

    # ---- clients

    async def ask(self, tenant: str) -> Story:
        """One request; its story when it is over."""
        self._serial += 1
        id_ = f"{self.plan.name}-{self._serial}"
        end: asyncio.Future[Story] = self.loop.create_future()
        self._ends[id_] = end
        self.stories[id_] = Story(id_, tenant, time.time())
        request = InferenceRequest(
            id=id_,
            tenant=tenant,
            model="m",
            prompt_tokens=self.plan.prompt,
            max_tokens=self.plan.max_tokens,
            tie=self.random.getrandbits(31),
        )
        self.tell(Arrived(self.loop.time(), request))
        return await end

    async def client(self, number: int, until: float) -> None:
        """Ask again and again; after a refusal wait as told, within this client's patience."""
        tenant = f"t{number % self.plan.tenants}"
        while self.loop.time() < until:
            story = await self.ask(tenant)
            if story.reason is not None:
                wait = min(story.retry_after or 0.05, self.plan.patience)
                await asyncio.sleep(wait * (0.5 + self.random.random()))

    async def steady(self, rate: float, until: float) -> None:
        """Requests at a steady rate, whatever becomes of them."""
        next_at = self.loop.time()
        async with asyncio.TaskGroup() as group:
            while next_at < until:
                await asyncio.sleep(max(next_at - self.loop.time(), 0.0))
                group.create_task(self.ask(f"t{self._serial % self.plan.tenants}"))
                next_at += 1.0 / rate

    async def load(self) -> None:
        """All clients for the plan's duration."""
        until = self.loop.time() + self.plan.duration
        if self.plan.rate is not None:
            await self.steady(self.plan.rate, until)
            return
        async with asyncio.TaskGroup() as group:
            for number in range(self.plan.clients):
                group.create_task(self.client(number, until))


async def run(plan: Plan, go: Callable[[], Any]) -> dict[str, Any]:
    """One gateway's run; `go` blocks until it may start."""
    gateway = ScriptedGateway(plan)

    async def serve() -> dict[str, Any]:
        await gateway.ask("t0")  # every kernel is compiled before the clock starts
        await asyncio.to_thread(go)
        cpu = time.process_time()
        started = time.time()
        await gateway.load()
        return {
            "name": plan.name,
            "started": started,
            "ended": time.time(),
            "cpu": time.process_time() - cpu,
            "stories": [asdict(story) for story in gateway.stories.values()],
            "signals": gateway.signals,
            "left": len(gateway.core.open),
            "counts": asdict(gateway.shared.counts) if gateway.shared else {},
        }

    if gateway.shared is None:
        return await serve()
    async with gateway.shared:
        return await serve()


def main() -> None:
    """Run the plan given as JSON."""
    plan = Plan(**json.loads(sys.argv[1]))

    def go() -> None:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()

    sys.stdout.write(json.dumps(asyncio.run(run(plan, go))) + "\n")


if __name__ == "__main__":
    main()
