"""A small real fleet on this machine: llama.cpp servers in child processes, kept alive and ours.

    async with LocalFleet([LocalReplica(name="a", variant="f16")]) as fleet:
        fleet.urls["a"]    # http://127.0.0.1:…, the same after every restart

One child serves one variant (`backends.variants`) on one thread with a few slots. Each child has a
keeper, a loop over its lives:

    starting ─ready─► ready ─exit, or silent for `hung_after`─► down ─back-off─► starting …
        └─exit, or not ready within `start_timeout`─► down (the fleet fails if it never was ready)

A child ends with its parent in every way a parent can end: closed here (SIGTERM, then SIGKILL), and
otherwise by the kernel and by the end of its standard input (`backends.local_child`).

Taken: processes rather than threads of one engine, since a crash or a SIGKILL then costs one
replica, as on a real fleet. Rejected: choosing a port here and polling it, because somebody else
may take the port in between; the child takes a free one, says which, and its successors ask for
the same.
"""

import asyncio
import itertools
import json
import logging
import os
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import httpx

from backends import perplexity, variants
from backends.backoff import Backoff, BackoffRule
from domain.errors import BackendProtocolError, ConfigError
from domain.units import Probability, Seconds

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[1]  # children import `backends` from where we did
_BATCH = 64  # prompt tokens per step: a cancel is seen between steps, so this bounds its delay
_LOG_TAIL = 1000  # bytes of a dead child's last words that are passed on


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalReplica:
    """One child to run: `slots` requests at once, each with `context` tokens for prompt and answer.

    Raises: ValueError if a number is out of range.
    """

    name: str
    variant: str
    slots: int = 4  # more than four streams on one core are slower than reading speed
    context: int = 2048
    port: int = 0  # 0: any free port

    def __post_init__(self) -> None:
        if self.slots < 1 or self.context < 256 or not 0 <= self.port < 65536:
            raise ValueError(f"need slots >= 1, context >= 256 and a port, got {self}")


class ReplicaState(StrEnum):
    """Where a child is in its life."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaChange:
    """A child changed state.

    `url` is None until it was ready once; `reason` and `retry_in` come with `down`.
    """

    name: str
    state: ReplicaState
    url: str | None = None
    reason: str | None = None
    retry_in: Seconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalVariant:
    """What is known of one variant before any request: file, perplexity, prior of quality."""

    name: str
    model: str
    description: str
    path: Path
    file_bytes: int
    perplexity: perplexity.Perplexity
    quality: Probability


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the fleet waits for a child before it calls it dead."""

    start_timeout: Seconds = Seconds(90.0)  # 270 MB from a cold disk on a busy machine
    poll_every: Seconds = Seconds(1.0)  # a hung child is rare; exits are noticed at once
    hung_after: Seconds = Seconds(20.0)  # a starved machine answers late, a hung child never
    end_timeout: Seconds = Seconds(2.0)  # from SIGTERM to SIGKILL


def _ignore(change: ReplicaChange) -> None:
    """Nobody asked to be told."""


class _Child:
    """The seat of one replica: outlives the processes that sit in it."""

    def __init__(self, replica: LocalReplica, model: Path, backoff: Backoff) -> None:
        self.replica = replica
        self.model = model
        self.backoff = backoff
        self.port = replica.port
        self.url: str | None = None
        self.pid: int | None = None
        self.served_from: float | None = None
        self.first_life: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def command(self) -> list[str]:
        """Argument vector of the next process."""
        options = {
            "model": self.model,
            "alias": variants.model_name(self.replica.variant),
            "port": self.port,
            "slots": self.replica.slots,
            "context": self.replica.context,
            "batch": _BATCH,
            "parent": os.getpid(),
        }
        flags = itertools.chain.from_iterable((f"--{key}", str(options[key])) for key in options)
        return [sys.executable, "-P", "-m", "backends.local_child", *flags]


class LocalFleet:
    """llama.cpp children for `replicas`, from entering the context to leaving it.

    Entering makes missing model files and measures missing perplexities (both once per cache
    folder), starts every child and returns when all answer. `on_change` is called on the event loop
    at every change of a child's state and must not block.
    Raises on entering: ConfigError if a wheel is missing, a variant is unknown or a child cannot
    start.
    """

    def __init__(
        self,
        replicas: Sequence[LocalReplica],
        cache: Path | None = None,
        *,
        on_change: Callable[[ReplicaChange], None] = _ignore,
        backoff: BackoffRule | None = None,
        patience: Patience | None = None,
    ) -> None:
        names = [replica.name for replica in replicas]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"a local fleet needs replicas with distinct names, got {names}")
        self._replicas = list(replicas)
        self._cache = variants.default_cache() if cache is None else cache
        self._on_change = on_change
        self._rule = BackoffRule() if backoff is None else backoff
        self._patience = Patience() if patience is None else patience
        self._children: list[_Child] = []
        self._variants: dict[str, LocalVariant] = {}
        self._open = AsyncExitStack()

    @property
    def urls(self) -> Mapping[str, str]:
        """Base URL of each replica by name, without `/v1`; stable over restarts."""
        return {child.replica.name: child.url for child in self._children if child.url is not None}

    @property
    def pids(self) -> Mapping[str, int]:
        """Process id of each living child by replica name."""
        return {child.replica.name: child.pid for child in self._children if child.pid is not None}

    @property
    def variants(self) -> Mapping[str, LocalVariant]:
        """What is known of each variant in use, by name."""
        return self._variants

    async def __aenter__(self) -> Self:
        """Start everything; on failure nothing stays behind."""
        paths = await _model_files({replica.variant for replica in self._replicas}, self._cache)
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(
                httpx.AsyncClient(trust_env=False, timeout=300.0)
            )
            keepers = await stack.enter_async_context(asyncio.TaskGroup())
            for replica in self._replicas:
                child = _Child(replica, paths[replica.variant], Backoff(self._rule))
                self._children.append(child)
                stack.callback(keepers.create_task(self._keep(child, http)).cancel)
            # By value: an exception that crosses the group of keepers would come out wrapped.
            failure = await self._first_failure() or await self._measure(http, paths)
            if failure is None:
                self._open = stack.pop_all()
        if failure is not None:
            raise ConfigError(failure)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every child; returns when the last process is gone."""
        await self._open.aclose()

    async def _first_failure(self) -> str | None:
        """Wait until every child was ready once, or one has failed to get there."""
        for first_life in asyncio.as_completed([child.first_life for child in self._children]):
            if (failure := await first_life) is not None:
                return failure
        return None

    async def _keep(self, child: _Child, http: httpx.AsyncClient) -> None:
        """Run one child after another in this seat until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._announce(child, ReplicaState.STARTING)
                child.served_from = None
                try:
                    reason = await self._live(child, http)
                except OSError as error:  # no process could be had: out of memory, out of files
                    reason = str(error)
                served = loop.time() - child.served_from if child.served_from is not None else 0.0
                delay = child.backoff.after_death(Seconds(served))
                logger.warning("replica %s is down: %s", child.replica.name, reason)
                self._announce(child, ReplicaState.DOWN, reason=reason, retry_in=delay)
                if not child.first_life.done():
                    child.first_life.set_result(
                        f"local replica '{child.replica.name}' did not start: {reason}"
                    )
                await asyncio.sleep(delay)
        finally:
            self._announce(child, ReplicaState.STOPPED)

    async def _live(self, child: _Child, http: httpx.AsyncClient) -> str:
        """One life of one child, from start to death; returns why it ended."""
        with tempfile.TemporaryFile() as log:
            process = await asyncio.create_subprocess_exec(
                *child.command(),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env=_environment(),
                start_new_session=True,  # Ctrl-C reaches the parent alone, which drains first
            )
            child.pid = process.pid
            try:
                try:
                    async with asyncio.timeout(self._patience.start_timeout):
                        url = await _ready_url(process, http)
                except TimeoutError:
                    return f"not ready within {self._patience.start_timeout:g} s"
                if url is not None:
                    self._serve(child, url)
                    if not await self._watch(process, url, http):
                        return f"no answer on /health for {self._patience.hung_after:g} s"
                return f"exited with {await process.wait()} {_last_words(log)}".rstrip()
            finally:
                child.pid = None
                await _end(process, self._patience.end_timeout)

    def _serve(self, child: _Child, url: str) -> None:
        child.url = url
        child.port = httpx.URL(url).port or child.port
        child.served_from = asyncio.get_running_loop().time()
        if not child.first_life.done():
            child.first_life.set_result(None)
        self._announce(child, ReplicaState.READY)

    async def _watch(self, process: Process, url: str, http: httpx.AsyncClient) -> bool:
        """Watch a serving child: True when it has exited, False when it stopped answering."""
        loop = asyncio.get_running_loop()
        answered = loop.time()
        while loop.time() - answered <= self._patience.hung_after:
            try:
                async with asyncio.timeout(self._patience.poll_every):
                    await process.wait()
                    return True
            except TimeoutError:
                if await _healthy(url, http, self._patience.hung_after / 4):
                    answered = loop.time()
        return False

    def _announce(
        self,
        child: _Child,
        state: ReplicaState,
        *,
        reason: str | None = None,
        retry_in: Seconds | None = None,
    ) -> None:
        name, url = child.replica.name, child.url
        self._on_change(
            ReplicaChange(name=name, state=state, url=url, reason=reason, retry_in=retry_in)
        )

    async def _measure(self, http: httpx.AsyncClient, paths: Mapping[str, Path]) -> str | None:
        """Learn perplexity and prior of each variant in use; returns what went wrong."""
        urls = {child.replica.variant: child.url for child in self._children}
        failure = None
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    name: group.create_task(_perplexity_of(http, str(url), paths[name]))
                    for name, url in urls.items()
                }
        except* (httpx.HTTPError, BackendProtocolError, OSError) as errors:
            failure = f"could not measure perplexity: {errors.exceptions[0]!r}"
        if failure is None:
            self._variants = _described({name: tasks[name].result() for name in tasks}, paths)
        return failure


def _described(
    measured: Mapping[str, perplexity.Perplexity], paths: Mapping[str, Path]
) -> dict[str, LocalVariant]:
    """Join what is known of each variant; the best of them is the reference if "full" is absent."""
    best = min(measured.values(), key=lambda each: each.nats_per_token)
    full = measured.get(variants.REFERENCE, best)
    return {
        name: LocalVariant(
            name=name,
            model=variants.model_name(name),
            description=variants.PRECISIONS[name].description,
            path=paths[name],
            file_bytes=paths[name].stat().st_size,
            perplexity=value,
            quality=perplexity.quality_prior(value, full),
        )
        for name, value in measured.items()
    }


def _environment() -> dict[str, str]:
    """Ours, with one OpenMP thread that sleeps when idle, and our packages importable."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


async def _model_files(names: set[str], cache: Path) -> dict[str, Path]:
    """Paths of the variants; missing ones are made in a process that shows its progress.

    A process, because it takes half a gigabyte that a gateway should not carry afterwards.
    Raises: ConfigError.
    """
    paths = variants.variant_paths(names, cache)
    missing = sorted(name for name, path in paths.items() if not path.exists())
    if missing:
        command = [sys.executable, "-P", "-m", "backends.variants", "--cache", str(cache), *missing]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.DEVNULL, env=_environment()
        )
        try:
            code = await process.wait()
        finally:
            await _end(process, Seconds(2.0))
        if code != 0:
            raise ConfigError(f"could not make the local model files in {cache}: see above")
    return paths


async def _ready_url(process: Process, http: httpx.AsyncClient) -> str | None:
    """The URL that the child prints when loaded, once /health agrees; None if it exits."""
    assert process.stdout is not None  # asked for with PIPE
    line = await process.stdout.readline()
    if not line:
        return None
    url = line.decode().strip()
    while not await _healthy(url, http, within=5.0):
        if process.returncode is not None:
            return None
        await asyncio.sleep(0.02)
    return url


async def _healthy(url: str, http: httpx.AsyncClient, within: float) -> bool:
    try:
        return (await http.get(f"{url}/health", timeout=within)).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


async def _end(process: Process, grace: Seconds) -> None:
    """Terminate the process, kill it after `grace`, and reap it; cancelled, it kills at once."""
    if process.returncode is not None:
        return
    try:
        process.terminate()
        async with asyncio.timeout(grace):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _last_words(log: IO[bytes]) -> str:
    """The last whole lines of what the child wrote to standard error."""
    size = log.seek(0, os.SEEK_END)
    if size > _LOG_TAIL:
        log.seek(size - _LOG_TAIL)
        log.readline()
    else:
        log.seek(0)
    return log.read().decode(errors="replace").strip()


async def _perplexity_of(http: httpx.AsyncClient, url: str, path: Path) -> perplexity.Perplexity:
    """From the file beside the model, else measured there and kept."""
    text = perplexity.REFERENCE_TEXT.read_text()
    kept = path.with_suffix(f".ppl-{perplexity.text_checksum(text)}.json")
    try:
        stored = json.loads(kept.read_text())
        return perplexity.Perplexity(
            nats_per_token=float(stored["nats_per_token"]), tokens=int(stored["tokens"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        measured = await perplexity.measure(http, url, text)
    record = {
        "nats_per_token": measured.nats_per_token,
        "perplexity": measured.value,
        "tokens": measured.tokens,
        "model": path.name,
    }
    unfinished = kept.with_name(f".{kept.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    unfinished.replace(kept)
    logger.info("perplexity of %s: %.2f over %d tokens", path.name, measured.value, measured.tokens)
    return measured
