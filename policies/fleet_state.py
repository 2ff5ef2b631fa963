"""The fleet as the core sees it: columns, routes, readings, claims on windows, and the prefix
index.

Load is own counts plus what a reading showed beyond them (CORE section 3.11). Replicas keep their
index for life; one that left the config drains. The compiled functions that change the columns are
called from here alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import numpy as np

from domain.columns import Bools, FleetColumns, Floats, fleet_columns, route_table
from domain.events import ForeignLoad, Progress, Reading
from domain.fleet import FleetSpec, ReplicaView
from domain.native import compiled
from domain.request import BLOCK_TOKENS, InferenceRequest
from policies import kernels
from policies.ledger import Attempt, Entry
from policies.prefix_index import PrefixIndex

FRESH = 1.0
"""Seconds for which the other gateways' own counts are better than a replica's metrics."""


class FleetState:
    """Columns of a fleet and everything that changes them.

    `hold` False opens every window: replicas queue for themselves.
    """

    def __init__(self, spec: FleetSpec, *, hold: bool) -> None:
        self._hold = hold
        self._pushed_at = -inf
        self._claims: dict[int, tuple[Entry, float]] = {}
        self._rates: dict[str, float] = {}
        self.spec = FleetSpec(replicas=(), variants=())
        self.columns: FleetColumns = fleet_columns(())
        self.measured_at: Floats = np.zeros(0)
        self.claimed = np.zeros(0, np.int64)
        self.prefix = PrefixIndex(())
        self._take(spec)
        columns, row, ids = self.columns, np.zeros(1), np.zeros(1, np.int64)
        self._any_open = compiled(kernels.any_open, self.windows, row, 0.0, 0.0)
        self._book = compiled(kernels.book, self._bookings, 0, 0, 0, *(0.0,) * 7)
        self._unbook = compiled(kernels.unbook, self._bookings, 0, 0, 0, 0.0)
        self._first_token = compiled(kernels.first_token, self._bookings, 0, 0, 0, 0.0)
        self._progress = compiled(kernels.progress_many, self._bookings, ids, ids, ids, 0.0)
        self._merge = compiled(kernels.merge_reading, columns, 0, *(0.0,) * 4)
        self._fastest = compiled(
            kernels.fastest, self._speeds, ids, ids, np.zeros(1, np.bool_), 0.0, 0.0
        )

    # ---- what others ask

    def replica(self, index: int) -> ReplicaView:
        """One replica's state as a row."""
        return self.columns.replica(index, self.spec.replicas[index])

    def served(self, allowed: Bools, excluded: Sequence[int] = ()) -> bool:
        """Whether any usable replica is behind one of these routes, those excluded left out."""
        usable = self.columns.usable
        for c, r in enumerate(self.decode):
            if allowed[c] and usable[r] and c not in excluded:
                return True
        return False

    def any_open(self, prompt: float, now: float) -> bool:
        """Whether some usable replica's window is open for a prompt of so many tokens."""
        return bool(self._any_open(self.windows, self.measured_at, prompt, now))

    def fastest(self, allowed: Bools, prompt: float, expected: float) -> tuple[float, float]:
        """Least (TTFT, TPOT) in seconds that an idle replica behind these routes could give."""
        routes = self.routes
        ttft, tpot = self._fastest(
            self._speeds, routes.decode, routes.prefill, allowed, prompt, expected
        )
        return ttft, tpot

    def cached_into(self, entry: Entry, out: Floats) -> None:
        """Prompt tokens that each route's prefill replica is thought to hold, (c,)."""
        matched = self.prefix.matched(entry.request.blocks)
        most = max(entry.prompt - 1.0, 0.0)
        for c, p in enumerate(self.prefill):
            out[c] = min(float(matched[p] * BLOCK_TOKENS), most)

    def sticky_into(self, tenant: str, session: str, out: Floats) -> None:
        """1 for each route whose prefill replica the session ran on last, else 0; (c,)."""
        home = self.prefix.home(tenant, session)
        for c, p in enumerate(self.prefill):
            out[c] = float(p == home)

    def sent(self, attempt: Attempt, request: InferenceRequest) -> None:
        """The attempt's prefill replica now holds the prompt's prefix and the session."""
        if request.blocks:
            self.prefix.add(attempt.prefill, request.blocks)
        if request.session is not None:
            self.prefix.join(request.tenant, request.session, attempt.prefill)

    def floor_into(self, floor: float, allowed: Bools) -> None:
        """Close routes whose variant falls short of a quality floor; if none reaches it, the best
        stay.
        """
        reach = allowed & (self.quality >= floor)
        if not reach.any():
            reach = allowed & (self.quality >= self.quality[allowed].max(initial=0.0))
        allowed[:] = reach

    @property
    def usable(self) -> int:
        """How many replicas take requests."""
        return int(self.columns.usable.sum())

    def rate(self, variant: str, quality: float) -> None:
        """Hold quality floors against another base rate of a variant; kept over fleets."""
        self._rates[variant] = quality
        for c, v in enumerate(self.variant):
            if self.spec.variants[v].name == variant:
                self.quality[c] = quality

    # ---- bookings

    def book(self, entry: Entry, attempt: Attempt, now: float) -> None:
        """Add the attempt's stream and its prefill."""
        self._book(
            self._bookings,
            attempt.replica,
            attempt.prefill,
            attempt.slot,
            entry.prompt,
            max(entry.prompt - float(int(attempt.prediction.cached)), 0.0),
            entry.expected,
            entry.limits[1],
            entry.arrived + entry.limits[0],
            entry.arrived + entry.limits[2],
            now,
        )

    def unbook(self, attempt: Attempt, now: float) -> None:
        """Take it out again; idempotent."""
        self._unbook(self._bookings, attempt.replica, attempt.prefill, attempt.slot, now)

    def first_token(self, attempt: Attempt, now: float) -> None:
        """The attempt's prefill is over."""
        self._first_token(self._bookings, attempt.replica, attempt.prefill, attempt.slot, now)

    def revise(self, attempt: Attempt, prompt: float, expected: float) -> None:
        """Expect another output of a running attempt, in tokens; its room is reserved anew."""
        columns, r = self.columns, attempt.replica
        count = int(columns.n_streams[r])
        for k in np.flatnonzero(columns.slot[r, :count] == attempt.slot).tolist():
            columns.kv_used[r] += prompt + expected - columns.reserved[r, k]
            columns.reserved[r, k] = prompt + expected
            columns.expected[r, k] = expected

    def progress(self, event: Progress, now: float) -> None:
        """Token counts of many streams."""
        self._progress(
            self._bookings,
            np.array(event.replicas, np.int64),
            np.array(event.slots, np.int64),
            np.array(event.tokens, np.int64),
            now,
        )

    # ---- the world around

    def read(self, event: Reading) -> bool:
        """Merge a replica's own metrics; False if it was overtaken by a younger reading."""
        if event.measured_at < self.measured_at[event.replica]:
            return False
        self.measured_at[event.replica] = event.measured_at
        if event.at - self._pushed_at < FRESH:
            return True
        nan = float("nan")
        self._merge(
            self.columns,
            event.replica,
            event.measured_at,
            nan if event.running is None else event.running,
            nan if event.waiting is None else event.waiting,
            nan if event.kv_used is None else event.kv_used,
        )
        return True

    def foreign(self, event: ForeignLoad) -> None:
        """Take the other gateways' own counts; readings do not overwrite them while they come
        regularly.
        """
        self._pushed_at = event.at
        count = min(len(event.running), len(self.spec.replicas))
        self.columns.foreign_running[:count] = event.running[:count]
        self.columns.foreign_context[:count] = event.kv[:count]
        self.columns.foreign_backlog[:count] = event.backlog[:count]
        self.measured_at[:count] = np.maximum(self.measured_at[:count], event.at)

    def set_usable(self, replica: int, usable: bool) -> None:
        """A replica that comes back has an empty prefix cache."""
        if self.columns.usable[replica] and not usable:
            self.prefix.clear(replica)
        self.columns.usable[replica] = usable

    def change(self, spec: FleetSpec) -> None:
        """Take another fleet: replicas are matched by name, removed ones drain."""
        wanted = {r.name: r for r in spec.replicas}
        names = set(wanted)
        kept = tuple(wanted.pop(r.name, r) for r in self.spec.replicas)
        removed = [i for i, r in enumerate(self.spec.replicas) if r.name not in names]
        variants = {v.name: v for v in self.spec.variants} | {v.name: v for v in spec.variants}
        self._take(FleetSpec(replicas=(*kept, *wanted.values()), variants=tuple(variants.values())))
        for i in removed:
            self.columns.usable[i] = False

    def _take(self, spec: FleetSpec) -> None:
        """Widen the columns to this fleet; replicas so far keep their index and their state."""
        replicas = spec.replicas
        before = len(self.spec.replicas)
        columns = fleet_columns(replicas)
        _carry(self.columns, columns, before)
        measured = np.full(len(replicas), -inf)
        measured[:before] = self.measured_at
        claimed = np.full(len(replicas), kernels.NONE, np.int64)
        claimed[:before] = self.claimed
        if not self._hold:
            columns.window.fill(inf)
            columns.kv_capacity.fill(inf)
            columns.max_seqs.fill(inf)
        self.spec, self.columns = spec, columns
        self.windows = kernels.view(kernels.Windows, columns)
        self._bookings = kernels.view(kernels.Bookings, columns)
        self._speeds = kernels.view(kernels.Speeds, columns)
        self.measured_at, self.claimed = measured, claimed
        self.size = max(len(replicas), 1)
        table = route_table(spec)
        self.routes, self.by_model = table.routes, table.by_model
        self.decode: list[int] = table.routes.decode.tolist()
        self.prefill: list[int] = table.routes.prefill.tolist()
        self.variant: list[int] = table.routes.variant.tolist()
        names = [v.name for v in spec.variants]
        self.variant_of = [names.index(r.variant) for r in replicas]
        variants = [spec.variants[v] for v in self.variant]
        rates = [self._rates.get(v.name, v.quality) for v in variants]
        self.quality: Floats = np.array(rates, np.float64)
        self.max_context: dict[str, float] = {}
        self.price: dict[str, float] = {}
        for model, mask in self.by_model.items():
            served = np.flatnonzero(mask).tolist()
            context = [replicas[self.decode[c]].profile.max_context for c in served]
            self.max_context[model] = float(max(context, default=0))
            self.price[model] = max((variants[c].price_per_token for c in served), default=0.0)
        self.prefix.extend(
            [max(int(r.profile.kv_capacity / BLOCK_TOKENS), 1) for r in replicas[before:]]
        )

    # ---- claims

    def press_claims(self, oldest: Iterable[Entry], now: float) -> None:
        """A request past its patience closes one replica's window for others until it fits (CORE
        section 3.10).

        A claim ends with the request, the replica, or one more patience.
        """
        for replica, (entry, until) in list(self._claims.items()):
            if now >= until or not self.columns.usable[replica]:
                self.release_claim(entry)
        for entry in oldest:
            if now - entry.arrived <= entry.slo_class.patience:
                break
            if entry.claim is not None:
                continue
            free = [
                r
                for c, r in enumerate(self.decode)
                if entry.allowed[c] and self.columns.usable[r] and self.claimed[r] == kernels.NONE
            ]
            if not free:
                continue
            replica = min(free, key=lambda r: (float(self.columns.kv_used[r]), r))
            entry.claim = replica
            self.claimed[replica] = entry.request.tie
            self._claims[replica] = (entry, now + entry.slo_class.patience)

    def release_claim(self, entry: Entry) -> None:
        """The entry claims nothing any more."""
        if entry.claim is not None:
            self.claimed[entry.claim] = kernels.NONE
            self._claims.pop(entry.claim, None)
            entry.claim = None

    def next_change(self, now: float) -> float:
        """When time alone changes something next: the end of a claim, or a reading that becomes
        stale.
        """
        at = min((until for _, until in self._claims.values()), default=inf)
        for measured in self.measured_at.tolist():
            if now < measured + kernels.STALE:
                at = min(at, measured + kernels.STALE)
        return at


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
