"""Memory of many open streams, and a soak with cancels and failing engines.

    python -m tests.benchmarks.soak --streams 10000            # RSS per open stream
    python -m tests.benchmarks.soak --minutes 10 --rate 100    # RSS, descriptors, tasks over time

Three processes: engines here, the token path (`relay_gateway`) in a child, clients here too. In the
soak a third of the clients leave at a random moment and a fifth of the engines' answers break off,
stall, refuse or are nonsense. At the end everything is let go, and what the gateway still holds is
asked of it: running requests, relays, connections and tasks must be zero (the one that asks aside).
Exit code 1 if they are not, or if RSS in the last third of the soak is above the second third by
more than 5 %. Each process needs two
descriptors per stream.
"""

import argparse
import asyncio
import contextlib
import json
import random
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import uvloop

ROOT = Path(__file__).parents[2]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data):
    """One chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(delta, finish=None):
    """One chat event as a chunk."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return chunk(
        b"data: " + json.dumps({"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"
    )


ROLE, WORD = event({"role": "assistant", "content": ""}), event({"content": "word"})
END = event({}, "stop") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
FAULTS = ("break", "stall", "refuse", "nonsense", "reset")


class Engine(asyncio.Protocol):
    """Answers each request with `words` words, `gap` seconds apart; some answers go wrong."""

    words, gap, faults = 10, 0.02, 0.0

    def connection_made(self, transport):
        """Open."""
        self.transport, self.left, self.timer, self.buffer = transport, 0, None, b""

    def connection_lost(self, exc):
        """Gone."""
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data):
        """A request, in one or more reads."""
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found or len(body) < int(head.rpartition(b"content-length: ")[2].split(b"\r\n")[0]):
            return
        self.buffer = b""
        fault = random.choice(FAULTS) if random.random() < self.faults else None
        if fault == "refuse":
            self.transport.write(b"HTTP/1.1 503 X\r\ncontent-length: 2\r\n\r\n{}")
        elif fault == "nonsense":
            self.transport.write(b"\0\0\0")
        elif fault == "reset":
            self.transport.abort()
        else:
            self.transport.write(HEAD + ROLE)
            self.left = random.randint(0, self.words) if fault else self.words
            self.fault = fault
            self.step()

    def step(self):
        """The next word."""
        if self.transport.is_closing():
            return
        if self.left > 0:
            self.left -= 1
            self.transport.write(WORD)
        elif self.fault == "break":
            self.transport.abort()
            return
        elif self.fault == "stall":
            return
        else:
            self.transport.write(END)
            return
        self.timer = asyncio.get_running_loop().call_later(self.gap, self.step)


class Client(asyncio.Protocol):
    """Sends one streamed request; `begun` and `over` tell how far it is."""

    def __init__(self):
        self.begun, self.over = asyncio.Event(), asyncio.Event()
        self.tail = b""

    def connection_made(self, transport):
        """Send."""
        self.transport = transport
        body = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"%b"}]}' % (
            b"x" * 900
        )
        transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )

    def data_received(self, data):
        """Only the end is looked at."""
        self.tail = (self.tail + data)[-400:]
        self.begun.set()
        if self.tail.endswith(b"0\r\n\r\n") or b'"error":' in self.tail:
            self.transport.abort()

    def connection_lost(self, exc):
        """Over, one way or the other."""
        self.begun.set()
        self.over.set()


def free_port():
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.asynccontextmanager
async def surroundings(replicas=2):
    """Engines here and a gateway in a child process; gives its port and psutil handle."""
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(Engine, "127.0.0.1", 0, backlog=4096) for _ in range(replicas)
    ]
    port = free_port()
    command = [sys.executable, "-m", "tests.benchmarks.relay_gateway", "--port", str(port)]
    command += ["--stall", "3"]
    for server in servers:
        command += ["--backend", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"]
    child = subprocess.Popen(command, cwd=ROOT)  # noqa: ASYNC220 - it is only started here
    try:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(OSError):
                    await state(port)
                    break
                await asyncio.sleep(0.1)
        yield port, psutil.Process(child.pid)
    finally:
        child.terminate()
        child.wait(20)
        for server in servers:
            server.close()


async def state(port):
    """What the gateway holds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /state HTTP/1.0\r\n\r\n")
    wire = await reader.read()
    writer.close()
    return json.loads(wire.partition(b"\r\n\r\n")[2])


async def request(port):
    """Open one client."""
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(Client, "127.0.0.1", port)
    return client


async def many(streams):
    """Hold streams open; report the gateway's RSS before, with them, and after."""
    Engine.words, Engine.gap = 10_000, 1.0
    async with surroundings() as (port, process):
        await (await request(port)).begun.wait()
        empty = process.memory_info().rss
        clients = []
        for _ in range(0, streams, 200):
            clients += await asyncio.gather(*(request(port) for _ in range(200)))
            await asyncio.gather(*(client.begun.wait() for client in clients[-200:]))
        held = await state(port)
        await asyncio.sleep(3)
        full = process.memory_info().rss
        cpu = process.cpu_times()
        await asyncio.sleep(5)
        after = process.cpu_times()
        busy = (after.user + after.system - cpu.user - cpu.system) / 5
        for client in clients:
            client.transport.abort()
        await settled(port)
        print(  # noqa: T201
            json.dumps(
                {
                    "streams": len(clients),
                    "running": held["running"],
                    "rss_mib_empty": round(empty / 2**20, 1),
                    "rss_mib_full": round(full / 2**20, 1),
                    "kib_per_stream": round((full - empty) / 1024 / len(clients), 2),
                    "cpu_us_per_token": round(busy / len(clients) * 1e6, 1),
                    "rss_mib_after": round(process.memory_info().rss / 2**20, 1),
                    "left": await state(port),
                }
            )
        )
    return 0


async def settled(port):
    """Wait until the gateway holds nothing; return the last state."""
    held = {}
    for _ in range(100):
        held = await state(port)
        if held["running"] == 0 and held["clients"] <= 1:
            return held
        await asyncio.sleep(0.1)
    return held


async def visit(port, leave):
    """One client's life; with `leave` it goes at a random moment."""
    client = await request(port)
    if leave:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.over.wait(), random.random() * 0.3)
        client.transport.abort()
    await client.over.wait()


async def soak(minutes, rate):
    """Arrivals at `rate` a second; a line every tenth of the time."""
    Engine.words, Engine.gap, Engine.faults = 10, 0.02, 0.2
    samples, done = [], 0
    async with surroundings(replicas=4) as (port, process):
        begun = time.monotonic()
        visits = set()
        while (now := time.monotonic() - begun) < minutes * 60:
            if now >= minutes * 6 * len(samples):
                sample = {
                    "minute": round(now / 60, 1),
                    "requests": done,
                    "rss_mib": round(process.memory_info().rss / 2**20, 2),
                    "descriptors": process.num_fds(),
                }
                samples.append(sample)
                print(json.dumps(sample), flush=True)  # noqa: T201
            visit_ = asyncio.ensure_future(visit(port, random.random() < 0.33))
            visits.add(visit_)
            visit_.add_done_callback(visits.discard)
            done += 1
            await asyncio.sleep(random.expovariate(rate))
        await asyncio.gather(*visits, return_exceptions=True)
        left = await settled(port)
        left["descriptors"] = process.num_fds()
        print(json.dumps({"requests": done, "left": left}))  # noqa: T201
    rss = [sample["rss_mib"] for sample in samples]
    third = len(rss) // 3
    flat = max(rss[-third:]) <= 1.05 * max(rss[third : 2 * third])
    clean = left["running"] == left["relays"] == 0 and left["clients"] <= 1
    clean = clean and left["upstream"] == left["idle"]
    return 0 if flat and clean else 1


def main():
    """Choose."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=100.0)
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    job = many(args.streams) if args.streams else soak(args.minutes, args.rate)
    return uvloop.run(job)


if __name__ == "__main__":
    sys.exit(main())
