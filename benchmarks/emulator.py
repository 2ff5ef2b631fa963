"""`sluice emulate` against virtual time, what one core carries, and foreign routers in front of it.

    python benchmarks/emulator.py                        # all three parts, about eight minutes
    python benchmarks/emulator.py --part pace --dilate 4
    python benchmarks/emulator.py --part core --levels 4,2,1,0.5
    python benchmarks/emulator.py --part routers --routers /opt/routers

`pace`: requests at fixed times reach the eight replicas of `configs/emulated.yaml` in turn, once
through sockets and once through `backends.sim.fleet`; percentiles of TTFT and TPOT side by side, in
model time. A request's time runs from when it was due, so what this client is late counts too.
`core`: nearly as many streams as its H100s hold, at ever smaller `--dilate`, the emulator on one
core and the client on another: tokens a second, CPU of both, and whether the pace still holds (it
needs both cores for itself; CPU a token does not).
`routers`: vllm-router, sglang-router and smg in front of two emulated replicas. They are looked
for on PATH and as v-NAME/bin/NAME or bin/NAME under `--routers`; one that is not there is skipped
(`pip install vllm-router sglang-router smg`).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
import uvloop
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from backends.sim.emulator import BLOCK
from backends.sim.fleet import FleetModel, Happening
from domain.fleet import ReplicaSpec
from sluice.emulate import emulated
from sluice.settings import load

CONFIG = ROOT / "configs" / "emulated.yaml"
BARS = (0.03, 0.10)
"""Largest relative error of P50 and of P99 at which the pace holds."""
SHARED = 4
"""Prefix blocks that requests of one system prompt have in common."""
ALIKE = 5
"""Replicas of the fleet that are about as fast as each other, its H100s: `core` uses these."""
ROUTERS = ("vllm-router", "sglang-router", "smg")
POLICIES = ("round_robin", "cache_aware", "power_of_two")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival, (n,): model seconds, tokens, the system prompt (-1: none)."""

    at: np.ndarray[Any, np.dtype[np.float64]]
    prompt: np.ndarray[Any, np.dtype[np.int64]]
    output: np.ndarray[Any, np.dtype[np.int64]]
    group: np.ndarray[Any, np.dtype[np.int64]]

    def text(self, i: int) -> str:
        """A prompt of request i that counts as `prompt[i]` tokens, four characters each."""
        own: str = f"{i:<8}" * (int(self.prompt[i]) // 2 + 1)
        if self.group[i] >= 0:
            system = f"system {self.group[i]:<5}" * (SHARED * BLOCK // 3 + 1)
            own = system[: 4 * SHARED * BLOCK] + own
        return own[: 4 * int(self.prompt[i])]

    def blocks(self) -> tuple[np.ndarray[Any, np.dtype[np.int64]], list[tuple[int, int]]]:
        """Block numbers of all prompts, and where each prompt's begin and end."""
        numbers: list[int] = []
        where = []
        fresh = SHARED * (int(self.group.max()) + 1)
        for i in range(len(self.at)):
            low, count = len(numbers), -(-int(self.prompt[i]) // BLOCK)
            first = range(SHARED * self.group[i], SHARED * self.group[i] + SHARED)
            common = list(first)[:count] if self.group[i] >= 0 else []
            numbers += common + list(range(fresh, fresh + count - len(common)))
            fresh += count
            where.append((low, len(numbers)))
        return np.array(numbers, np.int64), where


def mixed(count: int, rate: float, seed: int) -> Trace:
    """Poisson arrivals, log-normal lengths, every third request under one of four system prompts
    of 256 tokens.
    """
    rng = np.random.default_rng(seed)
    prompt = np.clip(np.exp(rng.normal(np.log(400), 0.9, count)), 16, 4000).astype(np.int64)
    group = np.where(rng.random(count) < 1 / 3, rng.integers(0, 4, count), -1)
    return Trace(
        at=np.cumsum(rng.exponential(1 / rate, count)),
        prompt=np.where(group >= 0, prompt + SHARED * BLOCK, prompt),
        output=np.clip(np.exp(rng.normal(np.log(80), 0.8, count)), 2, 800).astype(np.int64),
        group=group,
    )


def full(streams: int, tokens: int, ramp: float) -> Trace:
    """So many streams of so many tokens, begun one after the other within `ramp` model seconds."""
    return Trace(
        at=np.linspace(0.0, ramp, streams),
        prompt=np.full(streams, 16, np.int64),
        output=np.full(streams, tokens, np.int64),
        group=np.full(streams, -1, np.int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """TTFT and TPOT of every request, (n,), model seconds; NaN where it did not end well."""

    ttft: np.ndarray[Any, np.dtype[np.float64]]
    tpot: np.ndarray[Any, np.dtype[np.float64]]

    @classmethod
    def of(cls, trace: Trace, first: Any, last: Any) -> Times:
        """From the times of first and last tokens, in model seconds."""
        return cls(ttft=first - trace.at, tpot=(last - first) / (trace.output - 1))


def virtual(specs: Sequence[ReplicaSpec], trace: Trace) -> Times:
    """The trace dealt to the replicas in turn, in virtual time."""
    n, blocks = len(trace.at), trace.blocks()
    model = FleetModel(specs, n, blocks=blocks[0], block_tokens=BLOCK)
    first, last = np.full(n, nan), np.full(n, nan)
    i = 0
    while True:
        at, r = model.next_at()
        arrival = float(trace.at[i]) if i < n else inf
        now = min(at, arrival)
        if now == inf:
            return Times.of(trace, first, last)
        if at == now:
            for kind, job in model.happen(r):
                (first if kind is Happening.FIRST_TOKEN else last)[job] = now
        else:
            to = i % len(specs)
            prompt, output = int(trace.prompt[i]), int(trace.output[i])
            model.put(i, prompt, output, to, to, blocks[1][i], now)
            i += 1
        model.settle(now)


class Stream(asyncio.Protocol):
    """One streamed completion over its own connection; notes when its first and last token came."""

    def __init__(self, request: bytes, tokens: int, done: asyncio.Future[bool]) -> None:
        self._request, self._left, self._done = request, tokens, done
        self._tail = b""
        self.first = self.last = nan

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        cast("asyncio.Transport", transport).write(self._request)
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        """Count tokens; a mark that the network cut is found with the bytes that follow."""
        data = self._tail + data
        count = data.count(b"data: {")
        self._tail = data[-6:] if not data.endswith(b"\n") else b""
        if count and self._left > 0:
            self.last = self._loop.time()
            if self.first != self.first:
                self.first = self.last
            self._left -= count

    def connection_lost(self, exc: Exception | None) -> None:
        """The answer is over; good if every token came."""
        if not self._done.done():
            self._done.set_result(exc is None and self._left <= 0)


async def _drive(
    urls: Sequence[str], models: Sequence[str], trace: Trace, dilate: float
) -> tuple[Times, int, float]:
    """(times, requests that went wrong, longest lateness of this client in model seconds)."""
    loop, n = asyncio.get_running_loop(), len(trace.at)
    requests = [_request(urls[i % len(urls)], models[i % len(models)], trace, i) for i in range(n)]
    where = [(str(urlsplit(url).hostname), int(urlsplit(url).port or 80)) for url in urls]
    streams: list[Stream] = []
    done = [loop.create_future() for _ in range(n)]
    late = 0.0
    began = loop.time() + 0.5
    tasks = []
    for i in range(n):
        due = began + dilate * float(trace.at[i])
        await asyncio.sleep(due - loop.time())
        late = max(late, loop.time() - due)
        streams.append(Stream(requests[i], int(trace.output[i]), done[i]))
        opening = loop.create_connection(partial(_same, streams[-1]), *where[i % len(urls)])
        tasks.append(loop.create_task(opening))
    await asyncio.gather(*tasks)
    good = np.array(await asyncio.gather(*done))
    first = (np.array([s.first for s in streams]) - began) / dilate
    last = (np.array([s.last for s in streams]) - began) / dilate
    first[~good] = last[~good] = nan
    return Times.of(trace, first, last), int((~good).sum()), late / dilate


def _same(stream: Stream) -> Stream:
    return stream


def _request(url: str, model: str, trace: Trace, i: int) -> bytes:
    tokens = int(trace.output[i])
    body = json.dumps(
        {"model": model, "prompt": trace.text(i), "stream": True,
         "max_tokens": tokens, "ignore_eos": True}
    ).encode()  # fmt: skip
    host = urlsplit(url).netloc
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


# ---- the emulator as a process


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Emulation:
    """`sluice emulate` as a child: where the replicas are, what they are, and its CPU seconds."""

    def __init__(self, process: subprocess.Popen[str], config: Path, urls: dict[str, str]) -> None:
        self._process = process
        pairs = [pair for pair in emulated(load(config)) if pair[0].name in urls]
        self.specs = [spec for spec, _ in pairs]
        self.models = [model for _, model in pairs]
        self.urls = [urls[spec.name] for spec in self.specs]

    def cpu(self) -> float:
        """CPU seconds, user and system, so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def emulating(
    dilate: float, *, core: int | None = None, only: int | None = None
) -> Iterator[Emulation]:
    """The fleet of `configs/emulated.yaml`, its first `only` replicas, on free ports; pinned to a
    core where one is given.
    """
    settings = yaml.safe_load(CONFIG.read_text())
    settings["fleet"] = settings["fleet"][:only]
    named = {r["variant"] for r in settings["fleet"]}
    for model in settings["models"].values():
        model["variants"] = {k: v for k, v in model["variants"].items() if k in named}
    ports = free_ports(len(settings["fleet"]))
    for replica, port in zip(settings["fleet"], ports, strict=True):
        replica["url"] = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "fleet.yaml"
        config.write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "sluice", "emulate", "-c", str(config), "--json"]
        command += ["--dilate", f"{dilate:g}"]
        pinned = ["taskset", "-c", str(core)] if core is not None else []
        process = subprocess.Popen([*pinned, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the emulator did not start")
            yield Emulation(process, config, json.loads(line))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
            process.stdout.close()


# ---- parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """One run beside virtual time; model seconds. Errors are emulated / virtual - 1."""

    dilate: float
    requests: int
    wrong: int
    seconds: float
    tokens_per_second: float
    streams: float
    ttft_p50: float
    ttft_p50_error: float
    ttft_p99: float
    ttft_p99_error: float
    tpot_p50: float
    tpot_p50_error: float
    tpot_p99: float
    tpot_p99_error: float
    client_late: float
    emulator_cpu: float
    client_cpu: float

    @property
    def holds(self) -> bool:
        """Whether all went well and every percentile is within its bar."""
        errors = [
            abs(self.ttft_p50_error) / BARS[0], abs(self.ttft_p99_error) / BARS[1],
            abs(self.tpot_p50_error) / BARS[0], abs(self.tpot_p99_error) / BARS[1],
        ]  # fmt: skip
        return not self.wrong and max(errors) <= 1


def pace(trace: Trace, dilate: float, *, core: int | None = None, only: int | None = None) -> Pace:
    """The trace through sockets and in virtual time. CPU is in cores, while requests ran."""
    with emulating(dilate, core=core, only=only) as fleet:
        warm = full(len(fleet.urls), 4, 0.1)
        uvloop.run(_drive(fleet.urls, fleet.models, warm, dilate))
        expected = virtual(fleet.specs, trace)
        gc.collect()
        gc.freeze()
        before, mine = fleet.cpu(), _cpu()
        times, wrong, late = uvloop.run(_drive(fleet.urls, fleet.models, trace, dilate))
        spent, mine = fleet.cpu() - before, _cpu() - mine
        gc.unfreeze()
    ends = trace.at + times.ttft + times.tpot * (trace.output - 1)
    span = dilate * float(np.nanmax(ends) - trace.at[0])
    lived = float(np.nansum(ends - trace.at))
    found: dict[str, float] = {}
    for name in ("ttft", "tpot"):
        for q in (50, 99):
            a = float(np.nanpercentile(getattr(times, name), q))
            b = float(np.nanpercentile(getattr(expected, name), q))
            found |= {f"{name}_p{q}": a, f"{name}_p{q}_error": a / b - 1}
    return Pace(
        dilate=dilate,
        requests=len(trace.at),
        wrong=wrong,
        seconds=span,
        tokens_per_second=float(trace.output.sum()) / span,
        streams=lived * dilate / span,
        client_late=late,
        emulator_cpu=spent / span,
        client_cpu=mine / span,
        **found,
    )


def _cpu() -> float:
    times = os.times()
    return times.user + times.system


def shown(rows: Sequence[Pace]) -> None:
    """A table on the terminal."""
    print(
        f"{'dilate':>7}{'requests':>9}{'wrong':>6}{'streams':>8}{'tokens/s':>9}"
        f"{'TTFT p50':>16}{'p99':>17}{'TPOT p50':>16}{'p99':>16}"
        f"{'CPU':>6}{'us/token':>9}{'client':>7}  pace"
    )
    for r in rows:
        cells = "".join(
            f"{1e3 * getattr(r, k):>8.1f} {100 * getattr(r, k + '_error'):>+6.2f}%"
            for k in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
        )
        print(
            f"{r.dilate:>7g}{r.requests:>9}{r.wrong:>6}{r.streams:>8.0f}{r.tokens_per_second:>9.0f}"
            f" {cells}{r.emulator_cpu:>6.2f}{1e6 * r.emulator_cpu / r.tokens_per_second:>9.1f}"
            f"{r.client_cpu:>7.2f}"
            f"  {'holds' if r.holds else 'lost'}",
            flush=True,
        )


def router_binary(name: str, folder: Path | None) -> str | None:
    """Where a router's command is, None if nowhere."""
    if folder is not None:
        for path in (folder / f"v-{name}" / "bin" / name, folder / "bin" / name, folder / name):
            if path.is_file():
                return str(path)
    return shutil.which(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """What came of requests through a router: answers whole, by replica."""

    router: str
    policy: str
    requests: int
    whole: int
    by_replica: tuple[int, ...]
    note: str = ""

    @property
    def works(self) -> bool:
        """Whether every answer was whole, and each replica gave some; a cache-aware router may keep
        what comes one by one on one of them.
        """
        spread = self.policy == "cache_aware" or min(self.by_replica, default=0) > 0
        return self.whole == self.requests and spread


def through_router(name: str, binary: str, policy: str, *, requests: int = 24) -> Routed:
    """Streamed and whole chat completions through a router over two emulated replicas."""
    with emulating(1.0, only=2) as fleet, tempfile.TemporaryDirectory() as folder:
        port, prometheus = free_ports(2)
        command = [binary, *([] if name == "vllm-router" else ["launch"])]
        command += ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *fleet.urls]
        command += ["--policy", policy, "--prometheus-host", "127.0.0.1"]
        command += ["--prometheus-port", str(prometheus)]
        log = Path(folder) / "log"
        with log.open("w") as file:
            process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file)
        url = f"http://127.0.0.1:{port}"
        try:
            why = _ready(url, process)
            if why:
                return Routed(
                    router=name, policy=policy, requests=requests, whole=0, by_replica=(),
                    note=f"{why}: {log.read_text()[-300:]}",
                )  # fmt: skip
            whole, note = 0, ""
            for i in range(requests):
                try:
                    whole += _whole(url, fleet.models[0], i)
                except (OSError, ValueError) as exc:
                    note = str(exc)
            return Routed(
                router=name,
                policy=policy,
                requests=requests,
                whole=whole,
                by_replica=tuple(_served(u) for u in fleet.urls),
                note=note,
            )
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(url: str, process: subprocess.Popen[bytes]) -> str:
    """Wait until the router lists a model or routes a request; else why not."""
    for _ in range(600):
        if process.poll() is not None:
            return f"ended with {process.returncode}"
        try:
            with urllib.request.urlopen(f"{url}/readiness", timeout=5) as answer:
                if answer.status == 200:
                    return ""
        except OSError:
            pass
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
    return "not ready after a minute"


def _whole(url: str, model: str, i: int) -> bool:
    """Ask for 12 tokens, streamed every other time; whether they all came."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{i} please " * (20 + i)}],
        "max_tokens": 12,
        "ignore_eos": True,
        "stream": i % 2 == 0,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    if i % 2:
        return bool(json.loads(text)["usage"]["completion_tokens"] == 12)
    lines = [x[6:] for x in text.splitlines() if x.startswith("data: ")]
    events = [json.loads(x) for x in lines if x != "[DONE]"]
    tokens = [c for e in events for c in e["choices"] if c["delta"].get("content")]
    return lines[-1] == "[DONE]" and len(tokens) == 12


def _served(url: str) -> int:
    """Requests that a replica has completed, by its own metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = [x for x in lines if x.startswith("vllm:request_success_total")]
    return int(sum(float(x.split()[-1]) for x in found))


def routers(folder: Path | None) -> list[Routed]:
    """Every router that is there, under every policy."""
    rows = []
    for name in ROUTERS:
        binary = router_binary(name, folder)
        if binary is None:
            print(f"{name:<16}skipped: not on PATH and not under {folder}")
            continue
        for policy in POLICIES:
            row = through_router(name, binary, policy)
            print(
                f"{name:<16}{policy:<16}{row.whole} of {row.requests} whole, by replica "
                f"{row.by_replica}  {'works' if row.works else 'FAILS'}  {row.note}",
                flush=True,
            )
            rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Print the parts asked for; 1 if the pace at `--dilate` or a router failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("pace", "core", "routers", "all"), default="all")
    parser.add_argument("--dilate", type=float, default=4.0)
    parser.add_argument("--count", type=int, default=1000, help="requests of `pace`")
    parser.add_argument("--rate", type=float, default=40.0, help="of `pace`, per model second")
    parser.add_argument("--levels", default="4,2,1,0.5", help="values of --dilate in `core`")
    parser.add_argument("--streams", type=int, default=1200, help="of `core`")
    parser.add_argument("--tokens", type=int, default=256, help="of each stream of `core`")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--routers", type=Path, help="folder of the routers")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    found: dict[str, Any] = {}
    failed = False
    if args.part in {"pace", "all"}:
        row = pace(mixed(args.count, args.rate, args.seed), args.dilate)
        shown([row])
        found["pace"], failed = asdict(row), failed or not row.holds
    if args.part in {"core", "all"}:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 1:
            os.sched_setaffinity(0, set(cores[1:]))
        trace = full(args.streams, args.tokens, 2.0)
        rows = []
        for dilate in map(float, args.levels.split(",")):
            rows.append(pace(trace, dilate, core=cores[0], only=ALIKE))
            shown(rows[-1:])
        os.sched_setaffinity(0, set(cores))
        found["core"] = [asdict(row) for row in rows]
    if args.part in {"routers", "all"}:
        answers = routers(args.routers)
        found["routers"] = [asdict(row) for row in answers]
        failed = failed or not all(row.works for row in answers)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
