"""Open-loop load against any OpenAI URL: requests go out when they are due, whatever happens.

Every clock starts at the *scheduled* time, so a client that falls behind makes the figures worse,
not better (no coordinated omission). The client is the gateway's own upstream client: no task, no
parser and no JSON per token, since it shares its machine with the engines.

    plan (trace, Poisson rate or decision log) --> send at due times --> Result per request
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import orjson

from backends.upstream import Exchange, Timeouts, UpstreamPool
from backends.wire.http import Headers
from backends.wire.openai import CHAT
from backends.wire.sse import StreamMeter
from domain.errors import BackendError, BackendTimeout
from domain.request import Slo
from training.traces import Floats, Trace, trace

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "this",
    "are",
    "or",
    "his",
    "from",
    "at",
    "which",
    "but",
    "have",
    "an",
    "had",
    "they",
    "you",
    "were",
    "their",
    "one",
    "all",
    "we",
    "can",
    "her",
    "has",
    "there",
    "been",
    "if",
    "more",
    "when",
    "will",
    "would",
    "who",
    "so",
    "no",
    "out",
    "up",
    "into",
    "do",
    "any",
    "your",
    "what",
    "some",
    "could",
    "than",
    "other",
    "then",
    "now",
    "only",
    "its",
    "time",
    "two",
    "may",
    "first",
    "these",
    "like",
    "our",
    "over",
    "man",
    "me",
    "even",
    "most",
    "made",
    "after",
    "also",
    "well",
    "where",
    "how",
    "very",
    "know",
    "year",
    "work",
    "world",
]
"""Common words, one token each under the usual vocabularies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPlan:
    """How requests of one class are sent and judged; `header` is the class named to the gateway."""

    slo: Slo = field(default_factory=Slo)
    header: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How requests look on the wire. `length_field` carries the wanted number of output tokens:
    `max_tokens` tells it to the gateway, `n_predict` (llama.cpp) only to the engine.
    """

    model: str = "auto"
    stream: bool = True
    length_field: str = "max_tokens"
    ignore_eos: bool = False
    temperature: float | None = 0.0
    timeouts: Timeouts = Timeouts(connect=10.0, first_token=None, between_tokens=None, total=300.0)
    limits_in_headers: bool = True


@dataclass(slots=True)
class Result:
    """What became of one request; times in seconds from the start of the run."""

    index: int
    due: float
    prompt: int
    wanted: int
    class_name: str
    tenant: str
    sent: float | None = None
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    status: int = 0
    code: str = ""
    error: str = ""
    tokens: float = 0.0
    prompt_tokens: float = 0.0
    replica: str = ""
    variant: str = ""
    request_id: str = ""
    p_slo: float | None = None
    predicted_ttft: float | None = None
    predicted_tpot: float | None = None
    gaps: list[float] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether the whole answer came."""
        return self.status == 200 and not self.error and self.ended is not None

    @property
    def quota(self) -> bool:
        """Refused because its tenant was above its limit: outside the denominator."""
        return self.status == 429 and self.code in {"rate_limit_exceeded", "insufficient_quota"}

    @property
    def ttft(self) -> float | None:
        """From the scheduled time to the first content."""
        return None if self.first is None else self.first - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for one token or none."""
        if self.first is None or self.last is None or self.tokens <= 1:
            return None
        return (self.last - self.first) / (self.tokens - 1)

    @property
    def e2e(self) -> float | None:
        """From the scheduled time to the end."""
        return None if self.ended is None else self.ended - self.due

    def met(self, slo: Slo, *, stream: bool) -> bool:
        """Whether every limit was met; one token meets any TPOT (DESIGN section 11)."""
        if not self.finished:
            return False
        if slo.e2e is not None and (self.e2e is None or self.e2e > slo.e2e):
            return False
        if not stream:
            return True
        if slo.ttft is not None and (self.ttft is None or self.ttft > slo.ttft):
            return False
        return not (slo.tpot is not None and self.tpot is not None and self.tpot > slo.tpot)


# ---- plans


def from_decision_log(path: Path) -> Trace:
    """The requests of a decision log, as they came.

    Raises: ValueError for a log without requests; OSError.
    """
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines() if line.endswith(b"}")]
    rows = [row for row in rows if "feedback_to" not in row]
    if not rows:
        raise ValueError(f"{path} holds no decisions")
    rows.sort(key=lambda r: r["at"])
    tenants = tuple(dict.fromkeys(r["tenant"] for r in rows))
    classes = tuple(dict.fromkeys(r["class"] for r in rows))
    sessions: dict[str, int] = {}
    for i, r in enumerate(rows):
        sessions.setdefault(r["session"] or f"\0{i}", len(sessions))
    found = trace(
        np.array([r["at"] - rows[0]["at"] for r in rows]),
        np.array([max(1, round(r["prompt_tokens"])) for r in rows]),
        np.array(
            [max(1, round(r["outcome"]["completion_tokens"] or r["max_tokens"] or 1)) for r in rows]
        ),
        session=np.array([sessions[r["session"] or f"\0{i}"] for i, r in enumerate(rows)]),
        tenant_id=np.array([tenants.index(r["tenant"]) for r in rows]),
        tenants=tenants,
    )
    ids = np.array([classes.index(r["class"]) for r in rows], np.int64)
    return replace(found, classes=classes, class_id=ids)


def prompt_text(tokens: int, seed: int) -> str:
    """A prompt of about so many tokens; equal seeds give texts that begin alike."""
    rng = np.random.default_rng(seed)
    return " ".join(WORDS[k] for k in rng.integers(0, len(WORDS), max(1, tokens)))


def bodies(plan: Trace, options: Options, seed: int) -> list[bytes]:
    """The request bodies, made before the run so that it only sends.

    Requests that share prefix blocks share the text that stands for them.
    """
    texts: dict[int, str] = {}
    made = []
    for i in range(len(plan)):
        parts = []
        left = int(plan.prompt[i])
        for block in plan.blocks_of(i).tolist():
            size = min(left, round(plan.block_tokens))
            if size <= 0:
                break
            if block not in texts:
                texts[block] = prompt_text(round(plan.block_tokens), block + 1)
            parts.append(" ".join(texts[block].split()[:size]))
            left -= size
        if left > 0:
            parts.append(prompt_text(left, (seed << 32) + i))
        body: dict[str, object] = {
            "model": options.model,
            "messages": [{"role": "user", "content": " ".join(parts)}],
            options.length_field: int(plan.output[i]),
        }
        if options.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if options.temperature is not None:
            body["temperature"] = options.temperature
        if options.ignore_eos:
            body["ignore_eos"] = True
        made.append(orjson.dumps(body))
    return made


# ---- the run


class _Sent:
    """Takes one answer in; the sink of its exchange."""

    __slots__ = ("_body", "_done", "_gap_from", "_meter", "_start", "result")

    def __init__(
        self, result: Result, start: float, stream: bool, done: Callable[[Result], None]
    ) -> None:
        self.result = result
        self._start = start
        self._done = done
        self._meter = (
            StreamMeter(CHAT.content, keep_usage=True) if stream and CHAT.content else None
        )
        self._body: list[bytes] = []
        self._gap_from: float | None = None

    def on_head(self, status: int, headers: Headers) -> None:
        """Keep the status and what the gateway says about itself."""
        result = self.result
        result.status = status
        if status != 200:
            self._meter = None
        for name, value in headers:
            match name:
                case b"x-sluice-replica":
                    result.replica = value.decode("latin-1")
                case b"x-sluice-variant":
                    result.variant = value.decode("latin-1")
                case b"x-request-id":
                    result.request_id = value.decode("latin-1")
                case b"x-sluice-p-slo":
                    result.p_slo = float(value)
                case b"x-sluice-predicted-ttft-ms":
                    result.predicted_ttft = float(value) / 1000
                case b"x-sluice-predicted-tpot-ms":
                    result.predicted_tpot = float(value) / 1000

    def on_data(self, data: bytes, now: float) -> bool:
        """Count tokens and the gaps between them."""
        meter = self._meter
        if meter is None:
            self._body.append(data)
            return True
        before = meter.events
        meter.feed(data, now)
        if meter.events > before:
            if self._gap_from is not None:
                self.result.gaps.append(now - self._gap_from)
            self._gap_from = now
            return True
        return False

    def on_end(self) -> None:
        """The answer is whole."""
        result, meter = self.result, self._meter
        now = time.monotonic()
        result.ended = now - self._start
        if meter is not None:
            meter.finish(now)
            usage = meter.usage()
            result.tokens = float(meter.events) if usage is None else usage.completion
            result.prompt_tokens = 0.0 if usage is None else usage.prompt
            if meter.first_at is not None and meter.last_at is not None:
                result.first = meter.first_at - self._start
                result.last = meter.last_at - self._start
            if meter.error is not None or not meter.complete:
                result.error = "stream broke off"
        else:
            self._read_body(b"".join(self._body))
        self._done(result)

    def on_error(self, error: BackendError) -> None:
        """The answer will not become whole."""
        result = self.result
        result.ended = time.monotonic() - self._start
        result.error = "timeout" if isinstance(error, BackendTimeout) else type(error).__name__
        if self._meter is not None:
            result.tokens = float(self._meter.events)
        self._done(result)

    def on_stall(self) -> None:
        """Never: this client reads as fast as it can."""

    def _read_body(self, body: bytes) -> None:
        result = self.result
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            result.error = result.error or "body is not JSON"
            return
        if result.status != 200:
            error = value.get("error") if isinstance(value, dict) else None
            result.code = str(error.get("code")) if isinstance(error, dict) else ""
            result.error = result.code or f"status {result.status}"
            return
        usage = value.get("usage") or {}
        result.tokens = float(usage.get("completion_tokens") or 0.0)
        result.prompt_tokens = float(usage.get("prompt_tokens") or 0.0)


class Replay:
    """One run. `keys` are API keys by tenant name; "" is the key of tenants without one.

    `on_progress` is called with (sent, over) counts whenever an answer ends.
    """

    def __init__(
        self,
        plan: Trace,
        url: str,
        *,
        options: Options,
        classes: Mapping[str, ClassPlan],
        keys: Mapping[str, str],
        seed: int = 0,
        on_progress: Callable[[int, int], None] = lambda _sent, _over: None,
    ) -> None:
        self._plan = plan
        self._url = url.rstrip("/").removesuffix("/v1")
        self._options = options
        self._classes = classes
        self._keys = keys
        self._bodies = bodies(plan, options, seed)
        self._on_progress = on_progress
        self._sent = 0
        self._over = 0
        self._exchanges: dict[int, Exchange] = {}
        self._followers: dict[int, list[int]] = {}
        self._results: list[Result] = []
        self._start = 0.0
        self._finished = asyncio.Event()
        self._timers: set[asyncio.TimerHandle] = set()

    async def run(self) -> list[Result]:
        """Send everything and wait for every answer; results in the plan's order."""
        plan = self._plan
        headers = self._headers()
        async with UpstreamPool(self._url) as pool:
            self._start = time.monotonic() + 0.1
            zero = float(plan.arrival[0]) if len(plan) else 0.0
            for i in range(len(plan)):
                self._results.append(
                    Result(
                        index=i,
                        due=float(plan.arrival[i]) - zero,
                        prompt=int(plan.prompt[i]),
                        wanted=int(plan.output[i]),
                        class_name=plan.classes[plan.class_id[i]],
                        tenant=plan.tenants[plan.tenant_id[i]],
                    )
                )
                before = int(plan.follows[i])
                if before != i:
                    self._followers.setdefault(before, []).append(i)
            roots = np.flatnonzero(plan.roots).tolist()
            for i in roots:
                due = self._start + self._results[i].due
                if (wait := due - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                self._send(pool, headers, i)
            if len(plan):
                await self._finished.wait()
            for timer in self._timers:
                timer.cancel()
        return self._results

    def _send(self, pool: UpstreamPool, headers: Sequence[bytes], i: int) -> None:
        result = self._results[i]
        result.sent = time.monotonic() - self._start
        self._sent += 1
        sink = _Sent(
            result,
            self._start,
            self._options.stream,
            lambda done: self._ended(pool, headers, done),
        )
        self._exchanges[i] = pool.send(
            CHAT.path, self._bodies[i], sink, self._options.timeouts, headers=headers[i]
        )

    def _ended(self, pool: UpstreamPool, headers: Sequence[bytes], result: Result) -> None:
        self._over += 1
        self._exchanges.pop(result.index, None)
        now = time.monotonic()
        for i in self._followers.get(result.index, ()):
            follower = self._results[i]
            think = float(self._plan.think[i])
            follower.due = now + think - self._start
            timer = asyncio.get_running_loop().call_later(think, self._send, pool, headers, i)
            self._timers.add(timer)
        self._on_progress(self._sent, self._over)
        if self._over == len(self._results):
            self._finished.set()

    def _headers(self) -> list[bytes]:
        """Header lines of every request: key, class, limits, session."""
        lines = []
        sessions = Counter(self._plan.session.tolist())
        for i in range(len(self._plan)):
            name = self._plan.classes[self._plan.class_id[i]]
            tenant = self._plan.tenants[self._plan.tenant_id[i]]
            wanted = self._classes.get(name, ClassPlan())
            key = self._keys.get(tenant, self._keys.get("", ""))
            found = f"authorization: Bearer {key}\r\n" if key else ""
            if wanted.header is not None:
                found += f"x-slo-class: {wanted.header}\r\n"
            if self._options.limits_in_headers:
                slo = wanted.slo
                for header, limit in (("ttft", slo.ttft), ("tpot", slo.tpot), ("e2e", slo.e2e)):
                    if limit is not None:
                        found += f"x-slo-{header}-ms: {1000 * limit:g}\r\n"
            session = int(self._plan.session[i])
            if sessions[session] > 1:
                found += f"x-session-id: s{session}\r\n"
            lines.append(found.encode("latin-1"))
        return lines


def lateness(results: Sequence[Result]) -> Floats:
    """Seconds that each request was sent after it was due: how well the client kept up."""
    return np.array([r.sent - r.due for r in results if r.sent is not None])
