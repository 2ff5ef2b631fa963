"""The token path alone, for `../shared/bench`: server, relay, upstream and a trivial dispatcher.

    python -m tests.benchmarks.relay_gateway --port 18100 --backend http://127.0.0.1:18001

What it costs is what every request pays before a decision is made; the full gateway comes on top.
`--profile FILE` writes the samples of cProfile when the process gets SIGTERM.
"""

import argparse
import asyncio
import cProfile
import gc
import json
import signal

import uvloop

from backends.upstream import Timeouts, UpstreamPool
from backends.wire.openai import RequestParser
from gateway.relay import Plane, Relay
from gateway.server import GatewayServer
from tests.fakes.dispatcher import LeastRequests


class State:
    """The control plane of this benchmark: what is held right now, as JSON."""

    def __init__(self, pools, dispatcher):
        self.pools, self.dispatcher, self.server = pools, dispatcher, None

    async def __call__(self, scope, receive, send):
        """Any path."""
        gc.collect()
        state = {
            "running": sum(self.dispatcher.running),
            "clients": len(self.server.connections),
            "upstream": sum(pool.open for pool in self.pools),
            "idle": sum(pool.idle for pool in self.pools),
            "tasks": len(asyncio.all_tasks()),
            "relays": sum(isinstance(thing, Relay) for thing in gc.get_objects()),
        }
        body = json.dumps(state).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


async def serve(port, backends, profile, stall):
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    pools = [UpstreamPool(url) for url in backends]
    timeouts = Timeouts(first_token=stall, between_tokens=stall)
    dispatcher = LeastRequests(pools, timeouts=timeouts, keep_calls=False)
    state = State(pools, dispatcher)
    server = GatewayServer(Plane(dispatcher=dispatcher, parser=RequestParser()), state)
    state.server = server
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
    parser.add_argument("--stall", type=float, default=60.0, help="limit of silence, seconds")
    args = parser.parse_args()
    uvloop.run(serve(args.port, args.backend, args.profile, args.stall))


if __name__ == "__main__":
    main()
