"""A fleet of modelled replicas in virtual time, as a shell sees it: jobs in, happenings out.

The kernels are those of `backends.sim.replica`; here their compiled code is resolved once, and a
replica that something entered stands still until the shell has dealt with everything that happens
at that instant (`settle`), so that whoever comes at the same time joins the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from backends.sim import replica as kernels
from backends.sim.phase import began_into
from domain.fleet import Profile, ReplicaSpec
from domain.native import compiled

Ints = kernels.Ints


class Happening(IntEnum):
    """What a job's replica did."""

    FIRST_TOKEN = kernels.FIRST_TOKEN
    FINISHED = kernels.FINISHED
    LOST = kernels.LOST


class FleetModel:
    """Replicas by index, jobs by index (at most `jobs` of them, reused by `put`)."""

    def __init__(
        self,
        replicas: Sequence[ReplicaSpec],
        jobs: int,
        *,
        blocks: Ints | None = None,
        block_tokens: float = kernels.PAGE,
    ) -> None:
        self.physics = kernels.physics(replicas, jobs, blocks=blocks, block_tokens=block_tokens)
        ph, ids = self.physics, np.zeros(1, np.int64)
        k = kernels
        self._set = compiled(k.set_job, ph, 0, 0, 0, 0, 0, 0)
        self._enter = compiled(k.enter, ph, 0, 0, 0.0)
        self._plan = compiled(k.plan, ph, 0, 0.0)
        self._fire = compiled(k.fire, ph, 0, ids, ids)
        self._deliver = compiled(k.deliver, ph, ids, ids)
        self._abort = compiled(k.abort, ph, 0, 0.0)
        self._hand_over = compiled(k.hand_over, ph, 0, 0, 0.0)
        self._kill = compiled(k.kill, ph, 0, 0.0, ids)
        self._revive = compiled(k.revive, ph, 0)
        self._next = compiled(k.next_event, ph)
        self._progress = compiled(k.progress_into, ph, 0.0, ids, ids, ids)
        self._reading = compiled(k.reading_into, ph, 0, 0.0, np.zeros(1))
        self._room = room = max((r.profile.max_seqs for r in replicas), default=1)
        self._kinds, self._jobs = np.zeros(2 * room, np.int64), np.zeros(2 * room, np.int64)
        self._lost = np.zeros(jobs, np.int64)
        width = room * max(len(replicas), 1)
        self._seen = [np.zeros(width, np.int64) for _ in range(3)]
        self._load = np.zeros(3)
        self._dirty: list[int] = []
        self._steps = np.zeros(len(replicas))
        self._began = compiled(began_into, ph, 0.0, self._steps)

    def put(
        self,
        job: int,
        prompt: int,
        output: int,
        replica: int,
        prefill: int,
        blocks: tuple[int, int],
        now: float,
    ) -> bool:
        """Send a job: its prompt to `prefill`, the rest to `replica`. False if that is down or too
        small.
        """
        decode_on = kernels.NONE if prefill == replica else replica
        self._set(self.physics, job, prompt, output, decode_on, *blocks)
        if not self._enter(self.physics, prefill, job, now):
            return False
        self._dirty.append(prefill)
        return True

    def abort(self, job: int, now: float) -> None:
        """The job's client is gone."""
        self._abort(self.physics, job, now)
        where = int(self.physics.job["where"][job])
        if where != kernels.NONE:
            self._dirty.append(where)

    def hand_over(self, job: int, to: int, now: float) -> bool:
        """The job, which decodes, goes on on replica `to` once its KV is there; False if it does
        not decode, is there already or about to leave. LOST happens where `to` cannot take it.
        """
        where = int(self.physics.job["where"][job])
        if not self._hand_over(self.physics, job, to, now):
            return False
        self._dirty.append(where)
        return True

    def empty(self, r: int) -> bool:
        """Whether no job is on replica r or will come there from where it is now."""
        ph = self.physics
        state = ph.job["state"]
        coming = (ph.job["decode_on"] == r) & (state != kernels.ABSENT) & (state != kernels.DONE)
        busy = ("n_decode", "n_waiting", "stretch")
        return not (coming.any() or any(ph.replica[name][r] for name in busy))

    def close(self, r: int) -> None:
        """Empty replica r takes nothing any more, until `revive`. Its caches are gone."""
        self._kill(self.physics, r, 0.0, self._lost)

    def check_shape(self, profile: Profile) -> None:
        """Raises: ValueError for a profile of more sequences than this model has room for."""
        if profile.max_seqs > self._room:
            raise ValueError(f"max_seqs must be at most {self._room} here, not {profile.max_seqs}")

    def reshape(self, r: int, profile: Profile) -> None:
        """Closed replica r is another one from now on. Raises: ValueError as `check_shape` does."""
        self.check_shape(profile)
        spec = ReplicaSpec(name="", variant="", profile=profile)
        ph = self.physics
        row = kernels.physics([spec], 0, block_tokens=ph.block).replica
        for name in (*kernels.PROFILE_FIELDS, "spec_gain", "pages"):
            ph.replica[name][r] = row[name][0]
        ph.replica["free"][r] = row["pages"][0]

    def settle(self, now: float) -> None:
        """Let replicas that stand still and got something begin their next step."""
        for r in self._dirty:
            if self.physics.replica["stretch"][r] == 0:
                self._plan(self.physics, r, now)
        self._dirty.clear()

    def next_at(self) -> tuple[float, int]:
        """When something happens next, inf if nothing does, and where."""
        at, r = self._next(self.physics)
        return at, r

    def happen(self, r: int) -> list[tuple[Happening, int]]:
        """Let the event that `next_at` told of r happen; call `settle` afterwards."""
        if r == kernels.NONE:
            count = self._deliver(self.physics, self._kinds, self._jobs)
            if count == 0 or self._kinds[0] == kernels.LOST:
                return [(Happening.LOST, int(self._jobs[0]))] if count else []
            self._dirty.append(int(self.physics.job["where"][self._jobs[0]]))
            return []
        count = self._fire(self.physics, r, self._kinds, self._jobs)
        self._dirty.append(r)
        kinds, jobs = self._kinds[:count].tolist(), self._jobs[:count].tolist()
        return [(Happening(kind), job) for kind, job in zip(kinds, jobs, strict=True)]

    def kill(self, r: int, now: float) -> list[int]:
        """Replica r dies; the jobs that were on it."""
        count = self._kill(self.physics, r, now, self._lost)
        found: list[int] = self._lost[:count].tolist()
        return found

    def revive(self, r: int) -> None:
        """Replica r serves again, empty."""
        self._revive(self.physics, r)

    def progress(self, now: float) -> tuple[Ints, Ints, Ints]:
        """(replica, job, whole tokens) of every decoding job; views that the next call reuses."""
        n = self._progress(self.physics, now, *self._seen)
        replicas, jobs, counts = self._seen
        return replicas[:n], jobs[:n], counts[:n]

    def began(self, now: float) -> kernels.Floats:
        """When every replica began its running step, (m,) s; a view that the next call reuses."""
        self._began(self.physics, now, self._steps)
        return self._steps

    def reading(self, r: int, now: float) -> tuple[float, float, float]:
        """(running, waiting, share of KV in use) as the replica's metrics would show."""
        self._reading(self.physics, r, now, self._load)
        running, waiting, share = self._load.tolist()
        return running, waiting, share

    def hits(self, job: int) -> int:
        """Prompt tokens of the job that were found in the prefix cache."""
        return max(int(self.physics.job["hits"][job]), 0)
