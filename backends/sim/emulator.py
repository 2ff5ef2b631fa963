"""Replicas of `backends.sim.replica` behind real OpenAI servers, in real time.

Model time is (real time - start) / `dilate`; nothing is paced by sleeping from one token to the
next: every step has its absolute time, and a late wake-up catches up without moving the schedule.
A client that leaves aborts its job. A prompt's text counts at 4 characters a token and its chunks
of 64 tokens are the prefix blocks. The answer's length is `n_predict`, or `max_tokens` with
`ignore_eos`, else a draw (fixed by the prompt and `seed`) from a log-normal, under `min_tokens` and
`max_tokens`.

Metrics carry vLLM's names; the pages that routers of vLLM and SGLang ask for are there. Faults are
switched on by `POST /emulator/fault` with a JSON of `Faults`.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import orjson

from backends.openai_server import CHARS_PER_TOKEN, Call, Handler, OpenAIServer, Page, error_page
from backends.sim import replica as physics
from domain.fleet import ReplicaSpec
from domain.native import compiled

BLOCK = 64
"""Tokens of a prefix block."""
WORDS = (" the", " a", " of", " one", " and", " more", " was", " over", " it", " has", " time")
"""What tokens spell; about four characters each, so that a gateway's estimate of tokens from
characters is right here."""
CAPACITY = 4096
"""Jobs a replica holds, running and waiting; more are refused with 503."""


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong; the defaults are a healthy replica.

    `slow` multiplies step times. `hang`: steps stand still, requests are taken. `die_after`:
    connections are cut after so many tokens of an answer. `status`: inference requests are refused
    with it (429, 500, 503 ...). `stale_metrics`: `/metrics` keeps showing what it showed.
    `unhealthy`: `/health` answers 503.
    """

    slow: float = 1.0
    hang: bool = False
    die_after: int | None = None
    status: int | None = None
    stale_metrics: bool = False
    unhealthy: bool = False

    def __post_init__(self) -> None:
        if not self.slow > 0:
            raise ValueError(f"slow must be above 0, not {self.slow}")
        if self.status is not None and not 400 <= self.status <= 599:
            raise ValueError(f"status must be an HTTP error, not {self.status}")


_decode_faults = msgspec.json.Decoder(Faults).decode
_SCALED = (
    "overhead", "weights", "per_sequence", "per_context", "per_token", "per_attention", "experts",
)  # fmt: skip


class _Kernels:
    """The physics, resolved once for the types at hand."""

    def __init__(self, ph: physics.Physics) -> None:
        ids = np.zeros(1, np.int64)
        self.set_job = compiled(physics.set_job, ph, 0, 0, 0, 0, 0, 0)
        self.enter = compiled(physics.enter, ph, 0, 0, 0.0)
        self.plan = compiled(physics.plan, ph, 0, 0.0)
        self.fire = compiled(physics.fire, ph, 0, ids, ids)
        self.abort = compiled(physics.abort, ph, 0, 0.0)
        self.progress = compiled(physics.progress_into, ph, 0.0, ids, ids, ids)
        self.next_step = compiled(physics.next_step, ph, 0, 0.0)


class EmulatedReplica:
    """A generator whose tokens come when the model says. `url` is its server's, once entered."""

    def __init__(
        self,
        spec: ReplicaSpec,
        *,
        model: str,
        dilate: float = 1.0,
        host: str = "127.0.0.1",
        port: int = 0,
        output_median: float = 74.0,
        output_sigma: float = 1.1,
        seed: int = 0,
    ) -> None:
        if not dilate > 0:
            raise ValueError(f"dilate must be above 0, not {dilate}")
        self.spec = spec
        self.models = (model,)
        self.faults = Faults()
        self.server = OpenAIServer(
            self,
            host=host,
            port=port,
            pages=self._pages(),
            owner="vllm",
            max_context=spec.profile.max_context,
        )
        self._dilate = dilate
        self._length = math.log(output_median), output_sigma
        self._seed = seed
        self._table = _BlockTable(spec.profile.kv_capacity)
        width = max(-(-spec.profile.max_context // BLOCK), 1)
        self._width = width
        blocks = np.zeros(CAPACITY * width, np.int64)
        blocks[0] = self._table.size - 1  # the largest number, so that the tables are wide enough
        self._ph = physics.physics([spec], CAPACITY, blocks=blocks, block_tokens=BLOCK)
        self._k = _Kernels(self._ph)
        self._calls: list[Call | None] = [None] * CAPACITY
        self._free = list(range(CAPACITY - 1, -1, -1))
        room = 2 * spec.profile.max_seqs + 2
        self._kinds, self._jobs = np.zeros(room, np.int64), np.zeros(room, np.int64)
        self._where = np.zeros(room, np.int64)
        self._counts = np.zeros(room, np.int64)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._epoch = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._hung_at: float | None = None
        self._frozen: Page | None = None
        self.finished = 0
        self.aborted = 0
        self.tokens = 0
        self.prompt_tokens = 0

    # ---- time

    def start(self, loop: asyncio.AbstractEventLoop, epoch: float) -> None:
        """Model time 0 is `epoch` on this loop's clock."""
        self._loop, self._epoch = loop, epoch

    def stop(self) -> None:
        """No wake-ups any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = math.inf

    @property
    def now(self) -> float:
        """Model time in seconds."""
        assert self._loop is not None
        return (self._loop.time() - self._epoch) / self._dilate

    def _catch_up(self) -> float:
        """Let everything happen that was due by now; returns now. The replica may still work."""
        now = self.now
        if self._hung_at is not None:
            return now
        replica = self._ph.replica
        while replica["end"][0] <= now:
            at = float(replica["end"][0])
            count = self._k.fire(self._ph, 0, self._kinds, self._jobs)
            ended = [(int(self._kinds[i]), int(self._jobs[i])) for i in range(count)]
            for kind, job in ended:
                call = self._calls[job]
                if call is None:
                    continue
                if kind == physics.FIRST_TOKEN:
                    call.cached_tokens = int(self._ph.job["hits"][job])
                    self._feed(call, 1)
                else:
                    self._feed(call, int(self._ph.job["output"][job]))
                    self._end(job, call)
            self._k.plan(self._ph, 0, at)
        n = self._k.progress(self._ph, now, self._where, self._jobs, self._counts)
        for job, given in zip(self._jobs[:n].tolist(), self._counts[:n].tolist(), strict=True):
            call = self._calls[job]
            if call is not None and given > call.sent:
                self._feed(call, given)
        return now

    def _wake(self) -> None:
        self._timer, self._due = None, math.inf
        self._catch_up()
        self._arm()

    def _arm(self) -> None:
        """Wake at the end of the running step."""
        if self._loop is None or self._hung_at is not None:
            return
        due = self._epoch + self._dilate * self._k.next_step(self._ph, 0, self.now)
        if due == self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = due
        if due < math.inf:
            self._timer = self._loop.call_at(due, self._wake)

    # ---- generator

    def submit(self, call: Call) -> None:
        """Take a call; the job enters the model now."""
        faults = self.faults
        if faults.status is not None:
            call.fail(faults.status, "refused by a fault switch")
            return
        limit = self.spec.profile.max_context - call.prompt_tokens
        if limit < 1:
            message = (
                f"This model's maximum context length is {self.spec.profile.max_context} tokens."
            )
            call.fail(400, message, "invalid_request_error")
            return
        if not self._free:
            call.fail(503, "too many requests wait")
            return
        now = self._catch_up()
        job = self._free.pop()
        output = min(self._output(call), limit)
        low = job * self._width
        self._table.write(call, self._ph, low)
        high = low + -(-call.prompt_tokens // BLOCK)
        self._k.set_job(self._ph, job, call.prompt_tokens, output, physics.NONE, low, high)
        call.handle = job
        self._calls[job] = call
        self.prompt_tokens += call.prompt_tokens
        if not self._k.enter(self._ph, 0, job, now):
            self._calls[job] = None
            self._free.append(job)
            call.fail(400, "the request does not fit the KV cache", "invalid_request_error")
            return
        if self._ph.replica["stretch"][0] == 0 and self._hung_at is None:
            self._k.plan(self._ph, 0, now)
        self._arm()

    def cancel(self, call: Call) -> None:
        """The client is gone: its job leaves at the end of the running step."""
        job = call.handle
        if job is None or self._calls[job] is not call:
            return
        now = self._catch_up()
        if self._calls[job] is not call:
            return
        self._k.abort(self._ph, job, now)
        self.aborted += 1
        self._calls[job] = None
        self._lingering(job)
        if self._ph.replica["stretch"][0] == 0 and self._hung_at is None:
            self._k.plan(self._ph, 0, now)
        self._arm()

    def _lingering(self, job: int) -> None:
        """Reuse the job's place once the model has let go of it."""
        if self._ph.job["state"][job] == physics.DONE:
            self._free.append(job)
        else:
            assert self._loop is not None
            wait = self._dilate * max(float(self._ph.replica["end"][0]) - self.now, 0.0)
            self._loop.call_later(min(wait, 60.0) + 0.001, self._lingering, job)

    def _feed(self, call: Call, given: int) -> None:
        """Write the tokens up to the given count."""
        new = given - call.sent
        if new <= 0 or call.over:
            return
        self.tokens += new
        cut = self.faults.die_after
        if cut is not None and given >= cut:
            call.drop()
            return
        for _ in range(new):
            call.token(WORDS[call.sent % len(WORDS)])

    def _end(self, job: int, call: Call) -> None:
        self._calls[job] = None
        self._free.append(job)
        self.finished += 1
        if not call.over:
            call.finish("length" if call.sent == call.facts.max_tokens else "stop")

    def _output(self, call: Call) -> int:
        """Tokens of the answer."""
        facts = call.facts
        if call.exact is not None:
            return max(call.exact, 1)
        median, sigma = self._length
        text = zlib.crc32(facts.user_text.encode())
        rng = np.random.default_rng([self._seed, text, call.index])
        drawn = int(np.exp(rng.normal(median, sigma)))
        most = facts.max_tokens if facts.max_tokens is not None else 1 << 30
        return max(min(max(drawn, call.min_tokens), most), 1)

    # ---- faults

    def set_faults(self, faults: Faults) -> None:
        """Switch faults on or off; what ran before keeps its schedule up to now."""
        now = self._catch_up()
        replica, before = self._ph.replica, self.faults
        if faults.slow != before.slow:
            for name in _SCALED:
                replica[name][0] = getattr(self.spec.profile, name) * faults.slow
        if faults.hang and self._hung_at is None:
            self._hung_at = now
            self.stop()
        elif not faults.hang and self._hung_at is not None:
            replica["clock"][0] += now - self._hung_at
            replica["end"][0] += now - self._hung_at
            self._hung_at = None
            if replica["stretch"][0] == 0:
                self._k.plan(self._ph, 0, now)
        if faults.stale_metrics and self._frozen is None:
            self._frozen = self._metrics(b"")
        elif not faults.stale_metrics:
            self._frozen = None
        self.faults = faults
        self._arm()

    # ---- pages

    def _pages(self) -> dict[tuple[str, str], Handler]:
        pages: dict[tuple[str, str], Handler] = {
            ("GET", "/metrics"): self._metrics,
            ("POST", "/emulator/fault"): self._take_faults,
        }
        for path in ("/health", "/health_generate", "/ping"):
            pages["GET", path] = self._health
        for path in ("/server_info", "/get_server_info"):
            pages["GET", path] = self._server_info
        for path in ("/model_info", "/get_model_info"):
            pages["GET", path] = self._model_info
        pages["GET", "/version"] = lambda _body: Page(b'{"version":"0.11.0"}')
        pages["GET", "/get_load"] = self._load
        return pages

    def _health(self, _body: bytes) -> Page:
        if self.faults.unhealthy:
            return Page(b"", 503, "text/plain")
        return Page(b"", 200, "text/plain")

    def _take_faults(self, body: bytes) -> Page:
        try:
            self.set_faults(_decode_faults(body or b"{}"))
        except (msgspec.DecodeError, ValueError) as exc:
            return error_page(400, str(exc), "invalid_request_error")
        return Page(msgspec.json.encode(self.faults))

    def _server_info(self, _body: bytes) -> Page:
        profile = self.spec.profile
        return Page(
            orjson.dumps(
                {
                    "model_path": self.models[0],
                    "served_model_name": self.models[0],
                    "tp_size": profile.key.tp,
                    "dp_size": 1,
                    "max_running_requests": profile.max_seqs,
                    "max_total_num_tokens": int(profile.kv_capacity),
                    "context_length": profile.max_context,
                    "version": "0.11.0",
                }
            )
        )

    def _model_info(self, _body: bytes) -> Page:
        return Page(
            orjson.dumps(
                {
                    "model_path": self.models[0],
                    "tokenizer_path": self.models[0],
                    "served_model_name": self.models[0],
                    "is_generation": True,
                    "max_context_length": self.spec.profile.max_context,
                }
            )
        )

    def running(self) -> tuple[int, int, float]:
        """(running, waiting, share of KV pages in use) now."""
        self._catch_up()
        replica = self._ph.replica[0]
        running = int(replica["n_decode"]) + int(replica["n_prefill"])
        idle = int(replica["free"]) + int(replica["evictable"]) * self._ph.block_pages
        return running, int(replica["n_waiting"]), 1.0 - idle / max(int(replica["pages"]), 1)

    def _load(self, _body: bytes) -> Page:
        running, waiting, share = self.running()
        tokens = int(share * self.spec.profile.kv_capacity)
        load = {"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting,
                "num_tokens": tokens}  # fmt: skip
        return Page(orjson.dumps([load]))

    def _metrics(self, _body: bytes) -> Page:
        if self._frozen is not None:
            return self._frozen
        running, waiting, share = self.running()
        replica = self._ph.replica[0]
        blocks = int(replica["pages"]) * self._ph.page // physics.PAGE
        label = f'{{engine="0",model_name="{self.models[0]}"}}'
        lines: list[str] = []

        def show(name: str, kind: str, value: float) -> None:
            lines.extend((f"# TYPE vllm:{name} {kind}", f"vllm:{name}{label} {value:g}"))

        show("num_requests_running", "gauge", running)
        show("num_requests_waiting", "gauge", waiting)
        show("kv_cache_usage_perc", "gauge", share)
        show("gpu_cache_usage_perc", "gauge", share)
        show("num_preemptions_total", "counter", int(replica["preemptions"]))
        show("prompt_tokens_total", "counter", self.prompt_tokens)
        show("generation_tokens_total", "counter", self.tokens)
        show("request_success_total", "counter", self.finished)
        lines.append("# TYPE vllm:cache_config_info gauge")
        lines.append(
            f'vllm:cache_config_info{{block_size="{physics.PAGE}",enable_prefix_caching="True",'
            f'num_gpu_blocks="{blocks}"}} 1'
        )
        return Page(("\n".join(lines) + "\n").encode(), 200, "text/plain; version=0.0.4")


class _BlockTable:
    """Numbers for prefix blocks of text: equal prefixes get equal numbers while they are known."""

    def __init__(self, kv_capacity: float) -> None:
        self.size = max(4 * int(kv_capacity) // BLOCK, 1024)
        self._number: dict[int, int] = {}
        self._hash: list[int | None] = [None] * self.size
        self._next = 0

    def write(self, call: Call, ph: physics.Physics, low: int) -> None:
        """Write the block numbers of a call's prompt from place `low` on."""
        text = "\x00".join(f"{role}\x01{text}" for role, text in call.facts.turns)
        step = int(BLOCK * CHARS_PER_TOKEN)
        chain = hash(call.facts.prompt_ids)
        for k in range(-(-call.prompt_tokens // BLOCK)):
            chain = hash((chain, text[k * step : (k + 1) * step]))
            ph.blocks[low + k] = self._number_of(chain, ph)

    def _number_of(self, chain: int, ph: physics.Physics) -> int:
        known = self._number.get(chain)
        if known is not None:
            return known
        for _ in range(self.size):
            at = self._next
            self._next = (at + 1) % self.size
            old = self._hash[at]
            if old is None or ph.holders[0, at] == physics.NONE:
                break
        if old is not None:
            del self._number[old]
        self._hash[at] = chain
        self._number[chain] = at
        return at


class Emulator(AbstractAsyncContextManager["Emulator"]):
    """A fleet of emulated replicas, each on its own port; `async with` is its lifetime."""

    def __init__(self, replicas: Sequence[EmulatedReplica]) -> None:
        self.replicas = list(replicas)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        epoch = loop.time()
        async with AsyncExitStack() as stack:
            for replica in self.replicas:
                replica.start(loop, epoch)
                stack.callback(replica.stop)
                await stack.enter_async_context(replica.server)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    @property
    def urls(self) -> dict[str, str]:
        """Base URL by replica name."""
        return {r.spec.name: r.server.url for r in self.replicas}
