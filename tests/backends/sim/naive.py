"""An engine that walks through every iteration, written from the words of `backends.sim.replica`
and from nothing else of it: the oracle of its closed forms.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from math import gcd


@dataclass(eq=False)
class Job:
    """A request on its way."""

    name: int
    prompt: int
    output: int
    blocks: list[int] = field(default_factory=list)
    decode_on: int | None = None
    given: int = 0
    done: int = 0  # prompt tokens (and recomputed ones) whose KV exists
    held: list[int] = field(default_factory=list)
    first: float | None = None
    finish: float | None = None
    began: float | None = None
    gone: float = 0.0  # when its client left, 0 while it is there
    lost: float | None = None
    adapter: int | None = None
    handed_to: int | None = None
    handed_at: float = 0.0
    moved: bool = False
    decoding: bool = False

    @property
    def goal(self):
        """Tokens whose KV is needed before the next token can come."""
        return self.prompt + self.given


class Engine:
    """One replica, step by step."""

    def __init__(self, profile, block):
        self.p = profile
        self.block = block
        self.page = gcd(16, block)
        self.total = int(profile.kv_capacity // self.page)
        self.queue: list[Job] = []
        self.running: list[Job] = []  # in order of admission
        self.cache: OrderedDict[int, int] = (
            OrderedDict()
        )  # block -> holders; idle ones in LRU order
        self.ends: float | None = None
        self.work: dict[Job, int] = {}
        self.up = True
        self.preemptions = 0
        self.credit = 0  # parts of 2^-16 token
        self.gain = 0  # tokens that the running step gives
        self.adapters: OrderedDict[int, None] = OrderedDict()  # resident, by last admission
        self.loads = 0
        a = profile.spec_acceptance
        even = profile.spec_tokens + 1 if a == 1 else (1 - a ** (profile.spec_tokens + 1)) / (1 - a)
        self.parts = round(even * 65536)

    def own_pages(self, job, tokens):
        """Pages of its own that a job needs for this many tokens."""
        return -(-(tokens - len(job.held) * self.block) // self.page)

    def resident(self, job):
        """Tokens a running job has pages for: its whole prompt is reserved while it prefills."""
        return job.done if job.decoding else job.goal

    def used(self):
        """Pages taken."""
        own = sum(self.own_pages(j, self.resident(j)) for j in self.running)
        return own + len(self.cache) * (self.block // self.page)

    def room(self):
        """Pages that are free or held by nobody."""
        idle = sum(1 for holders in self.cache.values() if holders == 0)
        return self.total - self.used() + idle * (self.block // self.page)

    def make_free(self, pages):
        """Evict idle blocks until so many pages are free."""
        while self.total - self.used() < pages:
            oldest = next(b for b, holders in self.cache.items() if holders == 0)
            del self.cache[oldest]

    def let_go(self, job):
        """A running job stops running."""
        for b in reversed(job.held):
            self.cache[b] -= 1
            if self.cache[b] == 0:
                self.cache.move_to_end(b)
        job.held = []
        self.running.remove(job)

    def hold(self, job, b):
        """One more holder of block b."""
        self.cache[b] = self.cache.get(b, 0) + 1
        job.held.append(b)

    def growing(self):
        """Pages that the next decode step takes."""
        return sum(
            self.own_pages(j, j.done + self.p.spec_tokens + 1) - self.own_pages(j, j.done)
            for j in self.running
            if j.decoding
        )

    def begin(self, now):
        """Form the next step."""
        self.ends, self.work = None, {}
        if not self.up:
            return
        preempted = False
        while self.growing() > self.room():
            last = self.running[-1]
            self.let_go(last)
            last.done, last.decoding = 0, False
            self.queue.insert(0, last)
            self.preemptions += 1
            preempted = True
        budget, before = self.p.chunk, self.loads
        for j in self.running:
            if not j.decoding:
                self.work[j] = min(budget, j.goal - j.done)
                budget -= self.work[j]
        while self.queue and budget > 0 and not preempted and len(self.running) < self.p.max_seqs:
            j = self.queue[0]
            moved = j.moved
            hit = []
            if not moved:
                for k, b in enumerate(j.blocks[: j.prompt // self.block]):
                    if b not in self.cache or (k + 1) * self.block > j.goal - 1:
                        break
                    hit.append(b)
            tokens = j.done if moved else j.goal
            need = -(-(tokens - len(hit) * self.block) // self.page)
            if moved:
                need = -(-(tokens + self.p.spec_tokens + 1) // self.page)
            pinned = sum(self.block // self.page for b in hit if self.cache[b] == 0)
            if need + self.growing() > self.room() - pinned:
                break
            if self.p.lora_slots and j.adapter is not None and not self.seat(j.adapter):
                break
            self.queue.pop(0)
            for b in hit:
                self.hold(j, b)
            self.make_free(-(-(tokens - len(hit) * self.block) // self.page))
            self.running.append(j)
            if moved:
                j.decoding, j.moved = True, False
                continue
            j.done = len(hit) * self.block
            if j.began is None:
                j.began = now
            self.work[j] = min(budget, j.goal - j.done)
            budget -= self.work[j]
        if not self.running:
            return
        p = self.p
        decoding = [j for j in self.running if j.decoding]
        n = len(decoding)
        speculates = p.spec_tokens > 0 and n <= p.spec_batch
        parts = self.parts if speculates else 65536
        self.gain = (self.credit + parts) // 65536
        grown = sum(self.own_pages(j, j.done + self.gain) - self.own_pages(j, j.done)
                    for j in decoding)  # fmt: skip
        self.make_free(grown)
        contexts = [j.prompt + j.given for j in decoding]
        tokens = sum(self.work.values())
        pairs = sum(new * (j.done + new / 2) for j, new in self.work.items())
        memory = p.weights + p.per_context * (sum(contexts) + n * self.credit / 65536)
        memory += p.per_uneven * sum(max(contexts) - c for c in contexts)
        verified = n * (p.spec_tokens + 1) if speculates else n
        compute = p.per_token * (verified + tokens) + p.per_attention * pairs
        work = verified + tokens
        touched = p.experts * work / (work + p.expert_tokens)
        step = p.overhead + p.per_sequence * n + touched + max(memory, compute)
        step += p.lora_load * (self.loads - before)
        if speculates and n:
            step += p.spec_draft * p.spec_tokens
        if n:
            self.credit = (self.credit + parts) % 65536
        self.ends = now + step

    def seat(self, adapter):
        """Make an adapter resident, if it is not; False if every slot is in use."""
        busy = {j.adapter for j in self.running}
        if adapter not in self.adapters:
            if len(self.adapters) == self.p.lora_slots:
                idle = [a for a in self.adapters if a not in busy]
                if not idle:
                    return False
                del self.adapters[idle[0]]
            self.adapters[adapter] = None
            self.loads += 1
        self.adapters.move_to_end(adapter)
        return True

    def finish_step(self):
        """End the running step; returns jobs that move on to another engine."""
        now, out = self.ends, []
        decoding = [j for j in self.running if j.decoding]
        for j in decoding:
            j.done += self.gain
            j.given += self.gain
        for j, new in self.work.items():
            j.done += new
            self.publish(j)
        leaving = [j for j in self.running if j.gone or j.handed_to is not None]
        for j in sorted(leaving, key=lambda j: j.handed_at or j.gone):
            if j.gone:
                self.let_go(j)
            elif j.given < j.output:
                self.let_go(j)
                j.decode_on, j.handed_to, j.handed_at, j.decoding = j.handed_to, None, 0.0, False
                out.append((j, None))
        for j in decoding:
            if not j.gone and j.given >= j.output:
                j.finish = now
                self.let_go(j)
        for j in self.work:
            if j.gone or j.done < j.goal:
                continue
            j.given += 1
            j.decoding = True
            if j.first is None:
                j.first = now
            if j.given == j.output:
                j.finish = now
                self.let_go(j)
            elif j.decode_on is not None:
                self.let_go(j)
                j.decoding = False
                out.append((j, self.work[j]))
        self.ends = None
        return out

    def publish(self, job):
        """Computed blocks of the prompt become shareable."""
        whole = min(len(job.blocks), min(job.done, job.prompt) // self.block)
        while len(job.held) < whole:
            self.hold(job, job.blocks[len(job.held)])


class Fleet:
    """Engines under a script of (time, kind, engine or job); everything else follows."""

    def __init__(self, profiles, block, move_per_token, move_latency, layers):
        self.engines = [Engine(p, block) for p in profiles]
        self.link = move_per_token, move_latency, layers

    def run(self, script):
        """Script entries: (t, "enter", job, engine), (t, "abort", job, None), (t, "hand", job,
        engine), (t, "kill", None, engine), (t, "revive", None, engine); in order of time.
        """
        events = [(t, k, *rest) for k, (t, *rest) in enumerate(script)]
        heapq.heapify(events)
        tie = len(events)
        while True:
            busy = [(e.ends, i) for i, e in enumerate(self.engines) if e.ends is not None]
            step = min(busy, default=(float("inf"), -1))
            if not events and not busy:
                return
            if events and events[0][0] <= step[0]:
                now, _, kind, job, r = heapq.heappop(events)
                self.act(now, kind, job, r)
                continue
            now, r = step
            for job, last in self.engines[r].finish_step():
                per_token, latency, layers = self.link
                if last is None:
                    at = now + job.done * per_token
                else:
                    at = max(now + last * per_token / layers, job.began + job.done * per_token)
                tie += 1
                heapq.heappush(events, (at + latency, tie, "arrive", job, job.decode_on))
            self.engines[r].begin(now)

    def act(self, now, kind, job, r):
        """One line of the script."""
        if kind == "abort":
            job.gone = now
            for e in self.engines:
                if job in e.queue:
                    e.queue.remove(job)
            return
        if kind == "hand":
            here = [e for e in self.engines if job in e.running]
            free = job.decoding and not job.gone and job.handed_to is None
            if here and free and here[0] is not self.engines[r]:
                job.handed_to, job.handed_at = r, now
            return
        e = self.engines[r]
        if kind == "kill":
            for j in e.running + e.queue:
                if not j.gone:
                    j.lost = now
            e.__init__(e.p, e.block)
            e.up = False
        elif kind == "revive":
            e.up = True
        else:
            if kind == "arrive":
                if job.gone:
                    return
                job.decode_on, job.moved = None, True
            if not e.up:
                job.lost = now
                return
            e.queue.append(job)
            if e.ends is None:
                e.begin(now)
