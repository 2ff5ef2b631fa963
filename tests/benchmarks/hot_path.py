"""What a request and a token cost in this process alone: the whole gateway between fake transports.

    python -m tests.benchmarks.hot_path --streams 200 --profile

Real server, relay, upstream, shell, core, memory store and decision log over eight replicas; a
tenant with a key and quotas. No sockets, so no kernel: what is printed is the CPU time of our code
and of the libraries under it, as the least of several repetitions, which other load on the machine
hardly moves.
"""

import argparse
import asyncio
import cProfile
import gc
import json
import pstats
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from backends.breaker import Breaker
from backends.upstream import Timeouts, UpstreamPool, _Connection
from backends.wire.openai import RequestParser
from domain.fleet import FleetSpec, ReplicaSpec, Variant
from domain.request import Quota, Slo, SloClass, Tenant
from gateway.decision_log import DecisionLog
from gateway.intake import Intake, request_ids
from gateway.metrics import Metrics
from gateway.relay import Plane
from gateway.server import ClientConnection, GatewayServer
from gateway.shell import Seat, Shell
from gateway.tenants import KeyTable, hash_of
from policies.config import BestFitPolicy
from policies.factory import build_core
from predictors.estimator import BaselineEstimator
from predictors.tokens import TokenRatio
from tests.fakes.dispatcher import LeastRequests
from tests.fakes.engine import DONE, LAST_CHUNK, ROLE, SSE_HEAD, STOP, chunk, event, word

KEY = "sk-local-bench-0123456789abcdef0123456789abcdef"
REPLICAS = 8
TOKENS = 128
GAP = 0.005
"""Seconds between two tokens of a stream, on the fake clock."""


class Clock:
    """Time that the benchmark moves."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Wire:
    """A transport that takes everything; upstream ones say so in `sent`."""

    def __init__(self, sent=None):
        self.sent, self.end = sent, None

    def write(self, data):
        if self.sent is not None:
            self.sent.append(self.end)

    def is_closing(self):
        return False

    def set_write_buffer_limits(self, high):
        pass

    def get_write_buffer_size(self):
        return 0

    def get_extra_info(self, name):
        return ("127.0.0.1", 4711)


class Handle:
    """A timer that never fires."""

    def cancel(self):
        pass


class Loop:
    """The timers of connections."""

    def call_later(self, delay, call):
        return Handle()


def request(stream):
    """A request as the load generator sends it, about 1 KB."""
    body = {"model": "mock-model", "messages": [{"role": "user", "content": "x" * 900}]}
    body |= {"max_tokens": TOKENS}
    if stream:
        body["stream"] = True
    text = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {KEY}\r\ncontent-length: {len(text)}\r\n\r\n"
    )
    return head.encode() + text


def answer():
    """An unstreamed answer."""
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "mock-model",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "y" * 400}}],
        "usage": {"prompt_tokens": 230, "completion_tokens": 100, "total_tokens": 330},
    }
    text = json.dumps(body).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n"
    return head.encode() + b"\r\n" + text


USAGE = event(
    id="c",
    model="m",
    choices=[],
    usage={"prompt_tokens": 230, "completion_tokens": TOKENS, "total_tokens": 230 + TOKENS},
)


class Bench:
    """One gateway, its clients and its engines."""

    def __init__(self, log, *, whole):
        self.clock = Clock()
        self.sent = []
        pools = [
            UpstreamPool(f"http://127.0.0.1:{i + 1}", clock=self.clock) for i in range(REPLICAS)
        ]
        dispatcher = self.shell(pools, log) if whole else LeastRequests(pools, keep_calls=False)
        plane = Plane(dispatcher=dispatcher, parser=RequestParser(), clock=self.clock)
        self.server = GatewayServer(plane, None)
        self.server.loop = Loop()
        for pool in pools:
            pool._loop = self.server.loop
            for _ in range(200):
                wire = Wire(self.sent)
                wire.end = _Connection(pool)
                wire.end.connection_made(wire)
                wire.end.idle_since = 1e12
                pool._idle.append(wire.end)
        self.clients = []

    def shell(self, pools, log):
        variant = Variant(name="mock", model="mock-model")
        specs = [
            ReplicaSpec(name=f"r{i}", variant="mock", engine_model="mock-model")
            for i in range(len(pools))
        ]
        fleet = FleetSpec(replicas=tuple(specs), variants=(variant,))
        plenty = Quota(
            burst_tokens=1e11, concurrency=10000, requests_per_minute=1e9, tokens_per_minute=1e12
        )
        tenant = Tenant(name="bench", class_name="standard", quota=plenty)
        standard = SloClass(name="standard", rank=1, slo=Slo(ttft=5.0, tpot=0.5))
        core = build_core(
            BestFitPolicy(),
            fleet=fleet,
            estimator=BaselineEstimator(),
            tenants=[tenant],
            classes=[standard],
            now=self.clock.now,
        )
        tokens = TokenRatio()
        self.core = core
        return Shell(
            core=core,
            fleet=fleet,
            seats=[
                Seat(name=s.name, model="mock-model", pool=p, breaker=Breaker())
                for s, p in zip(specs, pools, strict=True)
            ],
            routes=tuple(s.name for s in specs),
            intake=Intake(
                identify=KeyTable([tenant], {"bench": {"k": hash_of(KEY)}}).identify,
                classes={"standard": standard},
                default_class="standard",
                estimate=tokens.estimate,
                new_id=request_ids(),
            ),
            timeouts=Timeouts(),
            log=log,
            metrics=Metrics(models=["mock-model"]),
            learn_tokens=tokens.observe,
            clock=self.clock,
        )

    def client(self):
        connection = ClientConnection(self.server)
        connection.connection_made(Wire())
        return connection

    def answered(self, clients, raw, reply):
        """One unstreamed request of each client, all open at once."""
        for client in clients:
            self.clock.now += 1e-4
            client.data_received(raw)
        while self.sent:
            self.clock.now += 1e-4
            self.sent.pop(0).data_received(reply)

    def opened(self, clients, raw, piece):
        """Streams up to their first token, 3 ms apart as in the load generator's ramp; returns the
        engines' ends. What is held is sent when the tokens of others make room.
        """
        engines = []
        for client in clients:
            self.clock.now += 3e-3
            client.data_received(raw)
            self.begun(engines, piece)
        return engines

    def begun(self, engines, piece):
        while self.sent:
            engine = self.sent.pop()
            engine.data_received(SSE_HEAD + chunk(ROLE))
            engine.data_received(piece)
            engines.append(engine)

    def tokens(self, engines, piece, count):
        """`count` tokens of each stream, one read each."""
        step = GAP / len(engines)
        clock = self.clock
        for _ in range(count):
            for engine in engines:
                clock.now += step
                engine.data_received(piece)

    def ended(self, engines, last):
        for engine in engines:
            self.clock.now += 1e-4
            engine.data_received(last)


async def measure(options):
    with tempfile.TemporaryDirectory() as folder:
        async with DecisionLog(Path(folder) / "decisions.jsonl") as log:
            for whole in (False, True):
                bench = Bench(log, whole=whole)
                clients = [bench.client() for _ in range(options.streams)]
                name = "whole gateway" if whole else "relay alone"
                profiler = cProfile.Profile() if options.profile and whole else None
                figures = await repeated(bench, clients, log, options, profiler)
                shown = " ".join(f"{thing} {cost:.2f} us" for thing, cost in figures.items())
                print(name, shown)  # noqa: T201
                if profiler is not None:
                    pstats.Stats(profiler).sort_stats(options.sort).print_stats(options.lines)


async def written(log):
    """The decision log's share of the work, its thread's included."""
    log._flush()
    while log._batches.qsize():  # noqa: ASYNC110 - the thread cannot set an event of this loop
        await asyncio.sleep(0.001)


async def repeated(bench, clients, log, options, profiler):
    """Least CPU microseconds per thing over the repetitions."""
    unstreamed, streamed, reply = request(False), request(True), answer()
    piece = chunk(word("t1@1292648623423_"))
    last = chunk(STOP) + chunk(USAGE) + chunk(DONE) + LAST_CHUNK
    best = {}
    few = clients[:32]

    def note(name, began, count):
        took = (time.process_time() - began) / count * 1e6
        best[name] = min(best.get(name, 1e9), took)

    for _ in range(3):  # warm
        bench.answered(few, unstreamed, reply)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    for round_ in range(options.rounds):
        if profiler is not None and round_ == options.rounds - 1 and options.what == "request":
            profiler.enable()
        began = time.process_time()
        for _ in range(30):
            bench.answered(few, unstreamed, reply)
            await asyncio.sleep(0)
        await written(log)
        if profiler is not None:
            profiler.disable()
        note("request", began, 30 * len(few))
        if profiler is not None and round_ == options.rounds - 1 and options.what == "stream":
            profiler.enable()
        began = time.process_time()
        engines = bench.opened(clients, streamed, piece)
        opened = time.process_time() - began
        began = time.process_time()
        bench.tokens(engines, piece, TOKENS - 1)
        note("token", began, (TOKENS - 1) * len(clients))
        began = time.process_time() - opened
        bench.ended(engines, last)
        await written(log)
        note("stream", began, len(clients))
        if profiler is not None:
            profiler.disable()
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--what", choices=["request", "stream"], default="request")
    parser.add_argument("--sort", default="tottime")
    parser.add_argument("--lines", type=int, default=60)
    uvloop.run(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
