"""The token path alone, for `../shared/bench`: server, relay, upstream and a trivial dispatcher.

    python -m tests.benchmarks.relay_gateway --port 18100 --backend http://127.0.0.1:18001

What it costs is what every request pays before a decision is made; the full gateway comes on top.
`--profile FILE` writes the samples of cProfile when the process gets SIGTERM.
"""

import argparse
import asyncio
import cProfile
import signal

import uvloop

from backends.upstream import UpstreamPool
from backends.wire.openai import RequestParser
from gateway.relay import Plane
from gateway.server import GatewayServer
from tests.fakes.dispatcher import LeastRequests


async def nothing_here(scope, receive, send):
    """The control plane of this benchmark: 404."""
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def serve(port, backends, profile):
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    pools = [UpstreamPool(url) for url in backends]
    dispatcher = LeastRequests(pools, keep_calls=False)
    server = GatewayServer(Plane(dispatcher=dispatcher, parser=RequestParser()), nothing_here)
    profiler = cProfile.Profile() if profile else None
    if profiler is not None:
        profiler.enable()
    async with server.listening(port=port, grace=1.0):
        await stop.wait()
    if profiler is not None:
        profiler.disable()
        profiler.dump_stats(profile)
    for pool in pools:
        await pool.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--backend", action="append", required=True)
    parser.add_argument("--profile")
    args = parser.parse_args()
    uvloop.run(serve(args.port, args.backend, args.profile))


if __name__ == "__main__":
    main()
