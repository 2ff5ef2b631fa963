"""The store that several gateways share: Redis or Valkey, one Lua verb per round trip.

What is agreed there: every quota of a tenant (reserve, settle), under leases that end by themselves
when a gateway dies; and room on a replica, by one booking that refuses when with the other
gateways' load the replica's window would overflow. Every verb is idempotent, by request id or
because it writes a gateway's whole load.

When the store is away (no connection, an error, or no answer within `answer_timeout`) requests are
decided at once on this gateway's part of every quota (`gateway.store.share` has the arithmetic and
the bound) and bookings on its own ledger. `degraded` says so. When it is back, what was let pass
alone is charged, what ended meanwhile is settled, what is still open is adopted, in that order and
before anything new. A store that came back empty is told the levels last seen, so a restart
refills no bucket.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from domain.columns import FleetColumns
from domain.events import Commit, Committed, ForeignLoad, Settle
from domain.ports import Store
from domain.request import QuotaUsage, Tenant
from gateway.store.link import Link, Reply, address
from gateway.store.quota_wire import Path, Paths, Seen, all_quotas, encode, tenant_keys, wired
from gateway.store.scripts import scripts
from gateway.store.share import Traffic, alone, part
from policies.bucket import DAY, Account, Admission, RequestWindow

LEASE = 15.0
"""Seconds after which a hold ends that nobody renewed."""

KEEP = 60.0
"""Seconds for which the end of a request is remembered, so that a repetition changes nothing."""

PUSH_INTERVAL = 0.05
"""Seconds between two reports of this gateway's load to the others."""

LOAD_LEASE = 2.0
"""Seconds for which such a report counts: a dead gateway's load is gone after that."""

ANSWER_TIMEOUT = 0.25
"""Seconds after which a store that does not answer counts as away."""

CONNECT_TIMEOUT = 1.0
"""Seconds for a connection to be made and logged in."""

RETRY_INTERVAL = 0.25
"""Seconds between two attempts to reach a store that is away."""

RENEW_BATCH = 500
"""Leases renewed by one call."""


class _Answer(NamedTuple):
    """What meter.lua's `answer` gives."""

    status: int
    reason: str
    wait: float
    epoch: str
    spent: float
    seen: list[list[float]]


_answers = msgspec.msgpack.Decoder(_Answer)
_usages = msgspec.msgpack.Decoder(list[tuple[float, float, float, float, float]])
_loads = msgspec.msgpack.Decoder(tuple[int, list[tuple[float, float, float]]])


class LedgerView(NamedTuple):
    """This gateway's own ledger: replica names, and the core's columns in their order."""

    names: tuple[str, ...]
    columns: FleetColumns


class _Place(Enum):
    """Who knows of a reservation: it is being asked for; the store has it; it was decided here; it
    was decided here after the store had been asked and had not answered.
    """

    ASKED = auto()
    STORE = auto()
    LOCAL = auto()
    UNSURE = auto()


class _Booking(NamedTuple):
    """What `book.lua` is given."""

    keys: tuple[bytes, bytes]
    numbers: list[bytes]


@dataclass(slots=True)
class _Held:
    """One open request."""

    id: bytes
    tenant: str
    path: Path
    key: str | None
    model: str
    tokens: float
    cost: float
    at: float
    place: _Place = _Place.ASKED
    refused: Committed | None = None
    followers: list[_Pending] = field(default_factory=list)
    admission: Admission | None = None


@dataclass(slots=True)
class _Pending:
    """A commit whose answer is awaited. `held` is what it reserves; `earlier` what an earlier
    commit of the same id does, whose answer comes first and may be no.
    """

    action: Commit
    replies: int
    held: _Held | None
    earlier: _Held | None
    lost: bool = False
    booked: bool = True
    answer: _Answer | None = None


@dataclass(slots=True)
class _End:
    """A settlement that the store has not confirmed."""

    held: _Held
    used: float
    cost: float
    revoke: bool
    known: bool


@dataclass(slots=True)
class _Tally:
    """What one meter let pass while the store was away and that has ended: tokens and cost; and
    requests, ended or not.
    """

    tokens: float = 0.0
    cost: float = 0.0
    requests: int = 0


class _Outage(NamedTuple):
    """What is to be charged for one outage, under the id that makes it be charged once."""

    id: str
    since: float
    tallies: dict[str, _Tally]


@dataclass(slots=True)
class _TenantState:
    """Everything kept of one tenant."""

    paths: Paths
    traffic: Traffic = field(default_factory=Traffic)
    windows: dict[str, RequestWindow] = field(default_factory=dict)
    tallies: dict[str, _Tally] = field(default_factory=dict)
    uncharged: list[_Outage] = field(default_factory=list)
    account: Account | None = None
    epoch: str = ""
    """The life of the store's own record of the tenant, as last seen."""


@dataclass(slots=True)
class StoreCounts:
    """For the metrics: everything that a store has seen since the start."""

    commits: int = 0
    refused: int = 0
    refused_bookings: int = 0
    decided_alone: int = 0
    outages: int = 0
    errors: int = 0


class RedisStore:
    """The shared store; an async context manager that owns its connection and its two timers.

    `answer` is called with every `Committed` that `commit` did not return; `foreign` with the other
    gateways' load when it changes; `signal` with True when the store goes away and False when it is
    back. `ledger` gives this gateway's own load, which already contains what is being committed.
    `clock` is the core's clock, `wall` Unix time. `lua_clock` replaces the server's time in tests.
    """

    def __init__(
        self,
        *,
        url: str,
        gateway: str,
        tenants: Mapping[str, Tenant],
        answer: Callable[[Committed], None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        ledger: Callable[[], LedgerView] | None = None,
        foreign: Callable[[ForeignLoad], None] | None = None,
        signal: Callable[[bool], None] | None = None,
        prefix: str = "sluice",
        lease: float = LEASE,
        load_lease: float = LOAD_LEASE,
        push_interval: float = PUSH_INTERVAL,
        answer_timeout: float = ANSWER_TIMEOUT,
        connect_timeout: float = CONNECT_TIMEOUT,
        retry_interval: float = RETRY_INTERVAL,
        lua_clock: str | None = None,
    ) -> None:
        self._boot = secrets.token_hex(8)
        # Two containers may share a name, and a restarted process is another gateway.
        self._gateway = f"{gateway}:{self._boot[:6]}".encode()
        self._answer = answer
        self._clock = clock
        self._wall = wall
        self._ledger = ledger
        self._foreign = foreign
        self._signal = signal
        self._prefix = prefix
        self._lease = lease
        self._load_lease = load_lease
        self._push_interval = push_interval
        self._link = Link(
            address(url),
            scripts(lua_clock),
            on_up=self._came_back,
            on_down=self._went_away,
            refused=self._refused,
            answer_timeout=answer_timeout,
            connect_timeout=connect_timeout,
            retry_interval=retry_interval,
        )
        self._numbers = {
            "lease": repr(lease).encode(),
            "keep": repr(KEEP).encode(),
            "load": repr(load_lease).encode(),
        }
        self._tenants = {name: _TenantState(Paths(prefix, t)) for name, t in tenants.items()}
        self._held: dict[str, _Held] = {}
        self._unsettled: list[_End] = []
        self._heard: tuple[tuple[float, float, float], ...] = ()
        self._heard_at = self._away_since = clock()
        self._pushing = False
        self._group: asyncio.TaskGroup | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.gateways = 1
        """Gateways alive, this one included, as last heard."""
        self.counts = StoreCounts()

    @property
    def degraded(self) -> bool:
        """Whether requests are decided on the local share."""
        return not self._link.up

    @property
    def open(self) -> int:
        """Requests reserved here and not settled."""
        return len(self._held)

    # ---- lifetime

    async def __aenter__(self) -> Self:
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._tasks = [
            self._group.create_task(self._link.keep()),
            self._group.create_task(self._renewing()),
            self._group.create_task(self._pushing_on()),
        ]
        await self._link.tried.wait()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._ledger is not None and self._link.up:
            self._push(self._ledger(), leaving=True)
        for task in self._tasks:
            task.cancel()
        if self._group is not None:
            await self._group.__aexit__(None, None, None)

    async def _renewing(self) -> None:
        while True:
            await asyncio.sleep(self._lease / 3)
            self._renew()

    async def _pushing_on(self) -> None:
        while True:
            if self._ledger is not None and not self._pushing:
                self._push(self._ledger())
            if not self._link.up and self._clock() - self._heard_at > self._load_lease:
                self._hear(((0.0, 0.0, 0.0),) * len(self._heard))
            await asyncio.sleep(self._push_interval)

    # ---- the port

    def commit(self, action: Commit, now: float) -> Committed | None:
        """Reserve and book in one round trip; None when the answer comes through `answer`."""
        self.counts.commits += 1
        held = self._new_hold(action, now)
        book = self._booking(action)
        earlier = self._held.get(action.id) if held is None else None
        if held is None and book is None:
            if earlier is None or earlier.place is not _Place.ASKED:
                return Committed(now, action.id, action.attempt)
            earlier.followers.append(_Pending(action, 1, None, earlier))
            return None
        pending = _Pending(action, (held is not None) + (book is not None), held, earlier)
        if not self._link.up:
            return self._alone(pending, now)
        if held is not None:
            self._send_reserve(pending, held, now)
        if book is not None:
            self._send_book(pending, book)
        return None

    def settle(self, action: Settle, now: float) -> None:
        """Give back what was reserved and not used, once; unknown requests are nobody's."""
        held = self._held.pop(action.id, None)
        if held is None:
            return
        revoke = action.tokens <= 0.0
        used = 0.0 if revoke else held.tokens - action.refund
        cost = 0.0 if revoke else held.cost if action.cost is None else action.cost
        state = self._tenants[held.tenant]
        if revoke:
            for window in self._windows(state, held.path):
                window.revoke(held.at, now)
        if state.account is not None and held.admission is not None:
            if revoke:
                state.account.revoke(held.admission, now=now)
            else:
                state.account.settle(held.admission, used=used, now=now, cost=cost)
        if held.place is _Place.LOCAL and not self._link.up:
            for name in held.path.names:
                tally = state.tallies.setdefault(name, _Tally())
                tally.tokens += used
                tally.cost += cost
                tally.requests -= revoke
            return
        end = _End(held, used, cost, revoke, known=held.place is _Place.STORE)
        if not self._send_settle(end, now):
            self._unsettled.append(end)

    def reload(self, tenants: Mapping[str, Tenant]) -> None:
        """Take other quotas; tenants are matched by name, levels are kept (DESIGN section 10). The
        store rescales a meter when it is next used.
        """
        states = {}
        for name, tenant in tenants.items():
            state = self._tenants.get(name) or _TenantState(Paths(self._prefix, tenant))
            state.paths.reload(tenant)
            state.windows.clear()
            states[name] = state
        gone = {h.tenant for h in self._held.values()} - states.keys()
        self._tenants = states | {name: self._tenants[name] for name in gone}

    async def usage(self, tenants: Sequence[str]) -> Mapping[str, Mapping[str, QuotaUsage]] | None:
        """What the store has counted, all tenants in one round trip; None while it is away."""
        known = [name for name in tenants if name in self._tenants]
        found = await asyncio.gather(*map(self._usage, known))
        counted = {}
        for name, meters in zip(known, found, strict=True):
            if meters is None:
                return None
            counted[name] = meters
        return counted if self._link.up else None

    async def _usage(self, tenant: str) -> dict[str, QuotaUsage] | None:
        quotas = all_quotas(self._tenants[tenant].paths.tenant)
        wire = [wired(name, quota) for name, quota in quotas.items()]
        answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def done(reply: Reply) -> None:
            if not answered.done():  # who asked may have left
                answered.set_result(reply)

        keys = tenant_keys(self._prefix, tenant)
        reply = await answered if self._link.call("usage", keys, [encode(wire)], done) else None
        if not isinstance(reply, bytes):
            return None
        return {
            str(quota[0]): _usage(float(quota[2]), *counted)
            for quota, counted in zip(wire, _usages.decode(reply), strict=True)
        }

    def _new_epoch(self) -> bytes:
        """The name of a tenant's record should this call be the one that makes it."""
        return f"{self._boot}:{self.counts.outages}".encode()

    # ---- reserve and book

    def _new_hold(self, action: Commit, now: float) -> _Held | None:
        """The hold of a first commit; None if nothing has to be reserved."""
        state = self._tenants.get(action.tenant)
        if state is None or action.tokens <= 0 or action.id in self._held:
            return None
        path = state.paths.path(action.key, action.model)
        if not path.limited:
            return None
        held = _Held(
            id=action.id.encode(),
            tenant=action.tenant,
            path=path,
            key=action.key,
            model=action.model,
            tokens=min(action.tokens, path.cap),
            cost=action.cost,
            at=now,
        )
        self._held[action.id] = held
        return held

    def _send_reserve(self, pending: _Pending, held: _Held, now: float) -> None:
        args = (
            held.id,
            self._numbers["lease"],
            self._numbers["keep"],
            repr(held.tokens).encode(),
            repr(held.cost).encode(),
            held.path.wire,
            encode([seen.hint(now) for seen in held.path.seen]),
            self._new_epoch(),
        )

        def done(reply: Reply) -> None:
            if isinstance(reply, bytes):
                pending.answer = _answers.decode(reply)
                self._see(held, pending.answer)
            else:
                pending.lost = True
            self._replied(pending)

        if not self._link.call("reserve", held.path.keys, args, done):
            asyncio.get_running_loop().call_soon(done, None)

    def _booking(self, action: Commit) -> _Booking | None:
        """Keys and numbers of `book.lua` for a commit; None where there is nothing to book."""
        d = action.replica
        if d is None or self._ledger is None:
            return None
        names, fleet = self._ledger()
        p = d if action.prefill is None else action.prefill
        numbers = (
            fleet.running[d] - 1.0,
            fleet.kv_used[d] - action.room,
            fleet.backlog_tokens[d] - (action.backlog if d == p else 0.0),
            fleet.running[p],
            fleet.kv_used[p],
            fleet.backlog_tokens[p] - action.backlog,
            action.room,
            action.backlog,
            fleet.max_seqs[d],
            fleet.kv_capacity[d],
            fleet.window[p] / fleet.per_token[p],
        )
        return _Booking(
            (self._load_key(names[d]), self._load_key(names[p])),
            [repr(float(number)).encode() for number in numbers],
        )

    def _send_book(self, pending: _Pending, book: _Booking) -> None:
        def done(reply: Reply) -> None:
            # Without an answer the booking stands on this gateway's own ledger.
            pending.booked = reply != 0
            self._replied(pending)

        args = (self._gateway, self._numbers["load"], *book.numbers)
        if not self._link.call("book", book.keys, args, done):
            asyncio.get_running_loop().call_soon(done, None)

    def _replied(self, pending: _Pending) -> None:
        """Answer the commit once all of its replies are there."""
        pending.replies -= 1
        if pending.replies:
            return
        self._decide(pending, self._clock())
        if pending.held is not None:
            for follower in pending.held.followers:
                self._replied(follower)

    def _decide(self, pending: _Pending, now: float) -> None:
        """Turn the replies of a commit into its answer."""
        if pending.lost:
            self._answer(self._alone(pending, now))
            return
        action, answer = pending.action, pending.answer
        reserved = answer is None or answer.status != 0
        if not pending.booked:
            self.counts.refused_bookings += 1
        if answer is None or pending.held is None:
            self._answer(self._booked(pending, now))
            return
        held = pending.held
        if reserved:
            held.place = _Place.STORE
            for window in self._windows(self._tenants[held.tenant], held.path):
                window.advance(now)
                window.take()
        else:
            self.counts.refused += 1
            self._held.pop(action.id, None)
        committed = Committed(
            now,
            action.id,
            action.attempt,
            reserved,
            pending.booked,
            answer.wait if answer.wait >= 0 else None,
            min((seen[0] for seen in answer.seen), default=None),
        )
        held.refused = None if reserved else committed
        self._answer(committed)

    def _booked(self, pending: _Pending, now: float) -> Committed:
        """The answer to a commit that only books; no if the reservation before it was refused."""
        action = pending.action
        refused = pending.earlier.refused if pending.earlier is not None else None
        wait = refused.retry_after if refused is not None else None
        return Committed(now, action.id, action.attempt, refused is None, pending.booked, wait)

    def _see(self, held: _Held, answer: _Answer) -> None:
        now = self._clock()
        state = self._tenants[held.tenant]
        state.epoch = answer.epoch
        for seen, (level, used, cost) in zip(held.path.seen, answer.seen, strict=True):
            seen.level, seen.used, seen.cost, seen.at = level, used, cost, now
        if answer.status == 1:
            state.traffic.note(held.tokens, answer.spent, now)

    def _windows(self, state: _TenantState, path: Path) -> list[RequestWindow]:
        """This gateway's own counts of the meters of a path that limit requests."""
        windows = []
        for name, quota in zip(path.names, path.quotas, strict=True):
            limit, width = float(quota[3]), float(quota[4])
            if limit > 0:
                window = state.windows.get(name)
                if window is None:
                    window = RequestWindow(limit / width, self._clock())
                    state.windows[name] = window
                windows.append(window)
        return windows

    # ---- settle and renew

    def _send_settle(self, end: _End, now: float) -> bool:
        held = end.held
        known = (held.tokens, held.cost) if end.known else (0.0, 0.0)
        args = (
            held.id,
            self._numbers["keep"],
            repr(end.used).encode(),
            repr(end.cost).encode(),
            b"1" if end.revoke else b"0",
            repr(known[0]).encode(),
            repr(known[1]).encode(),
            held.path.wire,
            encode([seen.hint(now) for seen in held.path.seen]),
            self._new_epoch(),
        )

        def done(reply: Reply) -> None:
            if reply is None:
                self._unsettled.append(end)

        return self._link.call("settle", held.path.keys, args, done)

    def _renew(self) -> None:
        """Renew every lease; what the store has lost is adopted."""
        by_tenant: dict[str, list[_Held]] = {}
        for held in self._held.values():
            if held.place is not _Place.ASKED:
                by_tenant.setdefault(held.tenant, []).append(held)
        for holds in by_tenant.values():
            for start in range(0, len(holds), RENEW_BATCH):
                self._send_renew(holds[start : start + RENEW_BATCH])

    def _send_renew(self, holds: list[_Held]) -> None:
        now = self._clock()
        paths = list({id(held.path): held.path for held in holds}.values())
        index = {id(path): i + 1 for i, path in enumerate(paths)}
        items = [
            (h.id.decode(), h.tokens, h.cost, index[id(h.path)], int(h.place is not _Place.STORE))
            for h in holds
        ]
        args = (
            self._numbers["lease"],
            self._numbers["keep"],
            encode([path.quotas for path in paths]),
            encode([[seen.hint(now) for seen in path.seen] for path in paths]),
            encode(items),
            self._new_epoch(),
        )

        def done(reply: Reply) -> None:
            if reply is not None:
                for held in holds:
                    held.place = _Place.STORE

        if self._link.call("renew", paths[0].keys, args, done):
            for held in holds:
                if held.place is _Place.LOCAL:
                    held.place = _Place.UNSURE

    # ---- other gateways

    def _load_key(self, replica: str) -> bytes:
        return f"{self._prefix}:{{fleet}}:load:{replica}".encode()

    def _push(self, view: LedgerView, *, leaving: bool = False) -> None:
        names, fleet = view
        rows = [
            (float(fleet.running[r]), float(fleet.kv_used[r]), float(fleet.backlog_tokens[r]))
            for r in range(len(names))
        ]
        keys = [f"{self._prefix}:{{fleet}}:gateways".encode(), *map(self._load_key, names)]
        lease = b"0" if leaving else self._numbers["load"]

        def done(reply: Reply) -> None:
            self._pushing = False
            if isinstance(reply, bytes):
                self.gateways, heard = _loads.decode(reply)
                self.gateways = max(self.gateways, 1)
                self._heard_at = self._clock()
                self._hear(tuple(heard))

        self._pushing = self._link.call("push", keys, (self._gateway, lease, encode(rows)), done)

    def _hear(self, heard: tuple[tuple[float, float, float], ...]) -> None:
        if self._foreign is None or (heard == self._heard and not any(map(any, heard))):
            return
        self._heard = heard
        running, kv, backlog = zip(*heard, strict=True) if heard else ((), (), ())
        self._foreign(ForeignLoad(self._clock(), running, kv, backlog))

    # ---- away and back

    def _refused(self, message: str) -> None:
        self.counts.errors += 1
        del message  # the connection is closed; the count and `degraded` are what is watched

    def _went_away(self) -> None:
        self.counts.outages += 1
        self._away_since = self._clock()
        self._pushing = False
        if self._signal is not None:
            self._signal(True)

    def _account(self, name: str, now: float) -> Account:
        """The account over this gateway's part of a tenant's quotas, made when first needed; what
        is open already runs on it.
        """
        state = self._tenants[name]
        if state.account is None:
            tenant = state.paths.tenant
            midnight = now - self._wall() % DAY
            factor = part(self.gateways, state.traffic.share())
            seen = state.paths.all_seen
            state.account = alone(tenant, factor, seen, state.windows, now, midnight)
            for held in self._held.values():
                if held.tenant == name and held.place is _Place.STORE:
                    held.admission = state.account.adopt(
                        key=held.key,
                        model=held.model,
                        tokens=held.tokens,
                        cost=held.cost,
                        at=held.at,
                    )
        return state.account

    def _alone(self, pending: _Pending, now: float) -> Committed:
        """Decide a commit without the store."""
        action, held = pending.action, pending.held
        self.counts.decided_alone += 1
        if held is None:
            return self._booked(pending, now)
        state = self._tenants[held.tenant]
        admission = self._account(held.tenant, now).admit(
            key=held.key,
            model=held.model,
            prompt=0.0,
            tokens=held.tokens,
            now=now,
            cost=held.cost,
        )
        asked = pending.lost  # the reservation may have reached the store
        if not admission.ok:
            self.counts.refused += 1
            if self._held.pop(action.id, None) is not None and asked:
                self._unsettled.append(_End(held, 0.0, 0.0, True, known=False))
        elif action.id not in self._held:  # settled while its answer was awaited
            self._account(held.tenant, now).revoke(admission, now=now)
        else:
            held.admission = admission
            held.place = _Place.UNSURE if asked else _Place.LOCAL
            for window in self._windows(state, held.path):
                window.advance(now)
                window.take()
            for name in () if asked else held.path.names:
                state.tallies.setdefault(name, _Tally()).requests += 1
        committed = Committed(
            now, action.id, action.attempt, admission.ok, pending.booked, admission.retry_after
        )
        held.refused = None if admission.ok else committed
        return committed

    def _came_back(self) -> None:
        """Charge, settle, adopt: in this order on one connection, before anything new."""
        now = self._clock()
        for name, state in self._tenants.items():
            if state.paths.all_seen:
                id_ = f"outage:{self._gateway.decode()}:{self._boot}:{self.counts.outages}"
                state.uncharged.append(_Outage(id_, self._away_since, state.tallies))
                state.tallies = {}
            uncharged, state.uncharged = state.uncharged, []
            for outage in uncharged:
                self._send_reconcile(name, state, outage, now)
            state.account = None
        unsettled, self._unsettled = self._unsettled, []
        for end in unsettled:
            if not self._send_settle(end, now):
                self._unsettled.append(end)
        self._renew()
        for held in self._held.values():
            held.admission = None
        if self._signal is not None:
            self._signal(False)

    def _send_reconcile(self, name: str, state: _TenantState, outage: _Outage, now: float) -> None:
        tenant = state.paths.tenant
        quotas = all_quotas(tenant)
        touched = [n for n in quotas if n in state.paths.all_seen]
        if not touched:
            return
        away = []
        for meter in touched:
            tally = outage.tallies.get(meter, _Tally())
            window = state.windows.get(meter)
            recent = window.advance(now) if window is not None else 0
            away.append((tally.tokens, tally.cost, tally.requests, recent))
        seen = state.paths.all_seen
        hints = [seen[n].hint(now) if n in seen else (0.0, 0.0, 0.0, 0) for n in touched]
        args = (
            outage.id.encode(),
            self._numbers["keep"],
            encode([wired(n, quotas[n]) for n in touched]),
            encode(hints),
            encode(away),
            state.epoch.encode(),
            self._new_epoch(),
            repr(max(now - outage.since, 0.0)).encode(),
        )

        def done(reply: Reply) -> None:
            if isinstance(reply, bytes):
                self._note(state, touched, _answers.decode(reply))
            else:
                state.uncharged.append(outage)

        if not self._link.call("reconcile", tenant_keys(self._prefix, name), args, done):
            done(None)

    def _note(self, state: _TenantState, names: list[str], answer: _Answer) -> None:
        now = self._clock()
        state.epoch = answer.epoch
        seen: Mapping[str, Seen] = state.paths.all_seen
        for name, (level, used, cost) in zip(names, answer.seen, strict=True):
            if name in seen:
                one = seen[name]
                one.level, one.used, one.cost, one.at = level, used, cost, now


def _usage(
    burst: float, running: float, requests: float, level: float, used: float, cost: float
) -> QuotaUsage:
    """One meter as `usage.lua` tells it."""
    return QuotaUsage(
        running=int(running),
        requests_in_window=None if requests < 0 else int(requests),
        level=None if burst < 0 else level,
        burst=None if burst < 0 else burst,
        used_today=None if used < 0 else used,
        cost_today=None if cost < 0 else cost,
    )


_conforms: type[Store] = RedisStore
