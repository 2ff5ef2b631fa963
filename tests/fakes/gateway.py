"""A whole token path on a free port: server, relay, upstream, a trivial dispatcher, no core."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from backends.upstream import Timeouts, UpstreamPool
from backends.wire.openai import RequestParser
from gateway.relay import Plane
from gateway.server import GatewayServer, ServerLimits
from tests.fakes.dispatcher import LeastRequests


async def echo_app(scope, receive, send):
    """An ASGI app that tells what it was asked."""
    message = await receive()
    text = f"{scope['method']} {scope['path']} {scope['query_string'].decode()} ".encode()
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-type", b"text/plain")],
        }
    )
    await send({"type": "http.response.body", "body": text, "more_body": True})
    await send({"type": "http.response.body", "body": message["body"]})


@dataclass
class RunningGateway:
    """Where it listens and what its dispatcher saw."""

    port: int
    server: GatewayServer
    dispatcher: LeastRequests

    @property
    def url(self) -> str:
        """Base URL of the OpenAI API."""
        return f"http://127.0.0.1:{self.port}/v1"

    def names(self) -> list[str]:
        """The dispatcher's calls by name."""
        return [call[0] for call in self.dispatcher.calls]

    def reports(self):
        """All attempt reports."""
        return [call[2] for call in self.dispatcher.calls if call[0] == "ended"]

    async def settled(self, *, within: float = 2.0) -> None:
        """Wait until no replica is held any more."""
        async with asyncio.timeout(within):
            while any(self.dispatcher.running):  # noqa: ASYNC110 - looks from outside
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running_gateway(
    *urls: str,
    timeouts: Timeouts | None = None,
    limits: ServerLimits | None = None,
    keep_alive: float | None = None,
    app=echo_app,
    model: str | None = None,
    grace: float = 0.2,
    **options,
) -> AsyncIterator[RunningGateway]:
    """Serve in front of the engines at `urls`."""
    async with contextlib.AsyncExitStack() as stack:
        pools = [await stack.enter_async_context(UpstreamPool(url)) for url in urls]
        dispatcher = LeastRequests(pools, timeouts=timeouts, model=model, **options)
        plane = Plane(dispatcher=dispatcher, parser=RequestParser(), keep_alive=keep_alive)
        server = GatewayServer(plane, app, limits=limits)
        _, port = await stack.enter_async_context(server.listening(grace=grace))
        yield RunningGateway(port, server, dispatcher)
