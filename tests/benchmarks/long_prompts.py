"""What a long prompt adds: latency through the token path over the engine alone, by body size.

    python -m tests.benchmarks.long_prompts

An engine here answers at once; the token path is a child process. Prints p50 and p99 to the first
byte in milliseconds, one request at a time, the gateway's CPU per request (which a busy machine
does not change much) and the parser's share of it, for three kinds of text.
"""

import argparse
import asyncio
import json
import statistics
import time

from backends.wire.openai import CHAT, RequestParser, splice
from tests.benchmarks.soak import Engine, surroundings

SIZES = (1_000, 32_000, 220_000, 1_000_000)
KINDS = {"ASCII": "word ", "escapes": 'a"\n', "UTF-8": "é☃ "}


def body_of(kind, size):
    """A chat body of about `size` bytes."""
    unit = KINDS[kind]
    text = unit * (size // len(json.dumps(unit, ensure_ascii=False)[1:-1].encode()) + 1)
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]}
    return json.dumps(body, ensure_ascii=False).encode()


def parse_ms(raw):
    """Parse and splice, milliseconds of CPU, best of five."""
    parser, best = RequestParser(), float("inf")
    for _ in range(5):
        start = time.process_time()
        splice(raw, parser.parse(CHAT, raw), "other")
        best = min(best, time.process_time() - start)
    return best * 1e3


async def latencies(port, raw, count):
    """Milliseconds from the send to the first byte, one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw)
    took = []
    for _ in range(count):
        start = time.perf_counter()
        writer.write(head + raw)
        await reader.readuntil(b"\r\n\r\n")
        took.append((time.perf_counter() - start) * 1e3)
        await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    return statistics.median(took), sorted(took)[int(len(took) * 0.99)]


async def main():
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    Engine.words, Engine.gap = 1, 0.0
    loop = asyncio.get_running_loop()
    engine = await loop.create_server(Engine, "127.0.0.1", 0)
    direct_port = engine.sockets[0].getsockname()[1]
    print("| text | body bytes | direct p50 | gateway p50 / p99 | added p50 | CPU | parse |")  # noqa: T201
    print("|---" * 7 + "|")  # noqa: T201
    async with surroundings() as (port, process):
        await latencies(port, body_of("ASCII", 1000), 20)
        for kind in KINDS:
            for size in SIZES:
                raw = body_of(kind, size)
                direct, _ = await latencies(direct_port, raw, args.count)
                before = process.cpu_times()
                p50, p99 = await latencies(port, raw, args.count)
                after = process.cpu_times()
                cpu = (after.user + after.system - before.user - before.system) / args.count
                print(  # noqa: T201
                    f"| {kind} | {len(raw):,} | {direct:.2f} | {p50:.2f} / {p99:.2f} "
                    f"| {p50 - direct:.2f} | {cpu * 1e3:.2f} | {parse_ms(raw):.3f} |"
                )
    engine.close()


if __name__ == "__main__":
    asyncio.run(main())
