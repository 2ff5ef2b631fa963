"""The client-facing server against raw sockets: limits, pipelining, framing, leaving, draining."""

import asyncio
import contextlib
import itertools
import json
import tracemalloc
from socket import IPPROTO_TCP, TCP_NODELAY

import pytest
import uvloop

from backends.upstream import Timeouts
from backends.wire.openai import SURFACES
from gateway import server as server_module
from gateway.server import ServerLimits
from tests.fakes.engine import (
    ANSWER,
    DONE,
    LAST_CHUNK,
    ROLE,
    SSE_HEAD,
    STOP,
    ScriptedEngine,
    always,
    answer,
    chunk,
    stream,
    word,
)
from tests.fakes.gateway import running_gateway

pytestmark = pytest.mark.integration

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
GOOD_STREAM = stream(ROLE, word("one"), word(" two"), STOP, DONE)


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request):
    def runner(coroutine):
        return request.param(asyncio.wait_for(coroutine, 20))

    return runner


def post(body, path=b"/v1/chat/completions", headers=b"", version=b"1.1"):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"POST %b HTTP/%b\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (
        path,
        version,
        headers,
        len(raw),
        raw,
    )


class Client:
    """A raw HTTP/1.1 client."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def send(self, data):
        """Write and wait until the kernel has it."""
        self.writer.write(data)
        await self.writer.drain()

    async def head(self):
        """Status and headers of the next response."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
        status = int(lines[0].split(b" ")[1])
        return status, dict(line.split(b": ", 1) for line in lines[1:])

    async def chunk(self):
        """The next chunk of a body; empty at its end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def reply(self):
        """Status, headers and body of the next response."""
        status, headers = await self.head()
        if b"content-length" in headers:
            return status, headers, await self.reader.readexactly(int(headers[b"content-length"]))
        if headers.get(b"transfer-encoding") == b"chunked":
            body = b""
            while piece := await self.chunk():
                body += piece
            return status, headers, body
        return status, headers, await self.reader.read()

    async def closed(self):
        """Whether the server closes the connection, with nothing more to read."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read() == b""
        return True


@contextlib.asynccontextmanager
async def serving(*scripts, **options):
    """Engines, a gateway before them, and a way to connect to it."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [ScriptedEngine(script) for script in scripts]
        for engine in engines:
            await stack.enter_async_context(engine.running())
        gateway = await stack.enter_async_context(
            running_gateway(*(engine.url for engine in engines), **options)
        )
        clients = []

        async def connect():
            client = Client(*await asyncio.open_connection("127.0.0.1", gateway.port))
            clients.append(client)
            return client

        try:
            yield gateway, engines, connect
        finally:
            for client in clients:
                client.writer.close()


def test_a_request_cut_at_every_byte_is_served_on_one_connection(run):
    async def main():
        async with serving(always(answer())) as (_, engines, connect):
            client = await connect()
            wire = post(CHAT)
            for cut in range(1, len(wire), 3):
                await client.send(wire[:cut])
                await asyncio.sleep(0)
                await client.send(wire[cut:])
                status, headers, body = await client.reply()
                assert (status, body) == (200, ANSWER)
                assert headers[b"x-sluice-replica"] == b"0"
            assert {body for _, body in engines[0].requests} == {json.dumps(CHAT).encode()}

    run(main())


def test_pipelined_requests_are_answered_in_order(run):
    async def main():
        async with serving(always(answer()), app=None) as (_, engines, connect):
            client = await connect()
            bodies = [{**CHAT, "user": str(i)} for i in range(8)]
            await client.send(b"".join(post(body) for body in bodies))
            for _ in bodies:
                assert (await client.reply())[2] == ANSWER
            assert [json.loads(body)["user"] for _, body in engines[0].requests] == list("01234567")

    run(main())


def test_hot_and_cold_requests_share_a_connection(run):
    async def main():
        async with serving(always(GOOD_STREAM)) as (_, _, connect):
            client = await connect()
            for _ in range(3):
                await client.send(
                    post({**CHAT, "stream": True})
                    + b"GET /admin/x%20y?q=1 HTTP/1.1\r\nhost: x\r\n\r\n"
                    + post(b"payload", path=b"/v1/feedback")
                    + b"GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n"
                )
                assert (await client.reply())[2].count(b"data: ") == 5
                assert (await client.reply())[2] == b"GET /admin/x y q=1 "
                assert (await client.reply())[2] == b"POST /v1/feedback  payload"
                assert (await client.reply())[2] == b"GET /v1/chat/completions  "

    run(main())


def test_too_many_pipelined_requests_close_the_connection(run):
    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            await connection.gone()

        limits = ServerLimits(max_pipelined=4)
        async with serving(script, limits=limits) as (gateway, _, connect):
            client = await connect()
            await client.send(post(CHAT) * 10)
            assert await client.closed()
            await gateway.settled()

    run(main())


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize(
    ("wire", "status"),
    [
        (b"what is this?\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nlong: %b\r\n\r\n" % (b"x" * 40_000), 431),
        (b"POST /other HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n", 413),
    ],
)
def test_a_request_that_cannot_be_read_is_refused_in_its_turn(run, wire, status, ahead):
    """What was asked before it on the connection has its whole reply first."""

    async def main():
        limits = ServerLimits(max_body_bytes=1000)
        async with serving(always(GOOD_STREAM), limits=limits) as (gateway, _, connect):
            client = await connect()
            await client.send(post({**CHAT, "stream": True}) * ahead + wire)
            for _ in range(ahead):
                assert (await client.reply())[2].count(b"data: ") == 5
            assert (await client.reply())[0] == status
            assert await client.closed()
            await gateway.settled()

    run(main())


@pytest.mark.parametrize("size", [999, 1000, 1001])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_above_the_limit_is_refused_before_it_is_read(run, size, chunked):
    async def main():
        limits = ServerLimits(max_body_bytes=1000)
        async with serving(always(answer()), limits=limits) as (_, _, connect):
            client = await connect()
            head = b"POST /other HTTP/1.1\r\nhost: x\r\n"
            if chunked:
                await client.send(head + b"transfer-encoding: chunked\r\n\r\n")
                await client.send(chunk(b"a" * size) + LAST_CHUNK)
            else:
                await client.send(head + b"content-length: %d\r\n\r\n" % size)
                if size <= 1000:
                    await client.send(b"a" * size)
            status, _, body = await client.reply()
            assert status == (200 if size <= 1000 else 413)
            if size > 1000:
                assert json.loads(body)["error"]["code"] == "payload_too_large"
                assert await client.closed()

    run(main())


def test_a_body_above_the_limit_is_refused_once_when_it_comes_with_its_head(run):
    async def main():
        failures = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        limits = ServerLimits(max_body_bytes=1000, max_head_bytes=2000)
        async with serving(always(answer()), limits=limits) as (_, _, connect):
            client = await connect()
            head = b"POST /other HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n"
            await client.send(head + b"a" * 5000)
            assert (await client.reply())[0] == 413
            assert await client.closed()
        assert failures == []

    run(main())


@pytest.mark.parametrize("together", [False, True])
def test_a_head_above_the_limit_is_refused(run, together):
    async def main():
        limits = ServerLimits(max_head_bytes=2000)
        async with serving(always(answer()), limits=limits) as (_, _, connect):
            client = await connect()
            await client.send(b"GET / HTTP/1.1\r\n" + b"x: aaaaa\r\n" * 300)
            if together:
                await client.send(b"\r\n")
            assert (await client.reply())[0] == 431
            assert await client.closed()

    run(main())


def test_trailers_above_the_limit_of_a_head_are_refused(run):
    async def main():
        limits = ServerLimits(max_head_bytes=2000)
        async with serving(always(answer()), limits=limits) as (_, _, connect):
            client = await connect()
            await client.send(
                b"POST /other HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
                + chunk(b"body")
                + b"0\r\nx: "
            )
            with contextlib.suppress(ConnectionError):
                for _ in range(200):  # more than one read holds
                    await client.send(b"a" * 10_000)
                await client.send(b"\r\n\r\n")
            assert (await client.reply())[0] == 431
            assert await client.closed()

    run(main())


def test_small_chunks_and_short_trailers_pass_whatever_they_add_up_to(run):
    async def main():
        limits = ServerLimits(max_head_bytes=200)
        async with serving(always(answer()), limits=limits) as (_, _, connect):
            client = await connect()
            for _ in range(2):
                await client.send(
                    b"POST /other HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                for piece in range(400):
                    await client.send(b"1\r\n" if piece % 2 == 0 else b"a\r\n")
                await client.send(b"0\r\nx: y\r\n\r\n")
                status, _, body = await client.reply()
                assert (status, body.count(b"a")) == (200, 200)

    run(main())


@pytest.mark.parametrize(
    "wire",
    [
        b"\x16\x03\x01\x02\x00",
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, identity\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: +1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n folded: x\r\n\r\n",
    ],
)
def test_what_is_not_http_or_could_be_read_two_ways_is_refused(run, wire):
    """Request smuggling needs a message that two parsers cut differently (RFC 9112, 11.2)."""

    async def main():
        async with serving(always(answer())) as (gateway, _, connect):
            client = await connect()
            await client.send(wire)
            status, _, body = await client.reply()
            assert status == 400
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
            assert await client.closed()
            assert gateway.names() == []

    run(main())


def test_a_body_in_tiny_chunks_takes_memory_like_any_other(run):
    """A quarter of a megabyte, two bytes a chunk: a few copies of it, not an object a chunk."""
    body = json.dumps({**CHAT, "user": "u" * 250_000}).encode()
    head = post(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    chunks = b"".join(b"2\r\n%b\r\n" % body[i : i + 2] for i in range(0, len(body) - 1, 2))
    rest = b"1\r\n%b\r\n" % body[-1:] if len(body) % 2 else b""

    async def main():
        async with serving(always(answer())) as (_, engines, connect):
            client = await connect()
            await client.send(post(CHAT))
            assert (await client.reply())[0] == 200
            tracemalloc.start()
            try:
                await client.send(head + chunks + rest + b"0\r\n\r\n")
                assert (await client.reply())[0] == 200
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak < 16 * len(body)
            assert engines[0].requests[-1][1] == body

    run(main())


def test_100_continue_is_sent_before_the_body_and_only_when_it_will_be_read(run):
    async def main():
        limits = ServerLimits(max_body_bytes=1000)
        async with serving(always(answer()), limits=limits) as (_, _, connect):
            client = await connect()
            head, body = post(CHAT, headers=b"expect: 100-continue\r\n").split(b"\r\n\r\n")
            await client.send(head + b"\r\n\r\n")
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(body)
            assert (await client.reply())[0] == 200
            await client.send(post(b"a" * 2000, headers=b"expect: 100-continue\r\n")[:110])
            assert (await client.reply())[0] == 413

    run(main())


@pytest.mark.parametrize(
    ("sent", "status"), [(b"POST / HTT", 408), (post(CHAT)[:-3], 408), (b"", None)]
)
def test_a_client_that_dawdles_is_cut_off(run, sent, status, monkeypatch):
    monkeypatch.setattr(server_module, "SWEEP_SECONDS", 0.02)

    async def main():
        limits = ServerLimits(head_seconds=0.1, body_seconds=0.1, idle_seconds=0.1)
        async with serving(always(answer()), limits=limits) as (gateway, _, connect):
            client = await connect()
            await client.send(sent)
            if status:
                assert (await client.reply())[0] == status
            assert await client.closed()
            client.writer.close()
            async with asyncio.timeout(1):
                while gateway.server.connections:  # noqa: ASYNC110 - looks from outside
                    await asyncio.sleep(0.005)

    run(main())


def test_an_idle_connection_is_closed_after_its_limit_but_a_waiting_one_is_not(run, monkeypatch):
    monkeypatch.setattr(server_module, "SWEEP_SECONDS", 0.02)

    async def main():
        gate = asyncio.Event()

        async def script(engine, connection):
            await engine.take(connection)
            await gate.wait()
            await connection.send(answer())
            await connection.gone()

        limits = ServerLimits(head_seconds=0.1, body_seconds=0.1, idle_seconds=0.1)
        async with serving(script, limits=limits) as (_, _, connect):
            client = await connect()
            await client.send(post(CHAT))
            asyncio.get_running_loop().call_later(0.4, gate.set)  # four limits long
            assert (await client.reply())[0] == 200
            assert await client.closed()

    run(main())


@pytest.mark.parametrize("phase", ["dialling", "prefill", "decode", "json"])
def test_a_client_that_leaves_frees_the_engine_within_a_second(run, phase):
    """`gateways.md` 4.H.1: cancelled upstream at once, every hold released exactly once."""

    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            if phase == "decode":
                await connection.send(SSE_HEAD + chunk(ROLE) + chunk(word("one")))
            engine.seen.set()
            await connection.gone()
            engine.left.set()

        async with serving(script) as (gateway, (engine,), connect):
            client = await connect()
            await client.send(post({**CHAT, "stream": phase != "json"}))
            if phase == "decode":
                await client.head()
                assert b"one" in await client.chunk()
            elif phase != "dialling":
                await engine.seen.wait()
            client.writer.transport.abort()
            await gateway.settled(within=1)
            if phase != "dialling":
                await asyncio.wait_for(engine.left.wait(), 1)
            assert gateway.dispatcher.running == [0]
            assert gateway.names() in (
                ["open", "client_gone"],
                ["open", "first_token", "client_gone"],
                [],
            )
            if phase == "decode":
                assert gateway.dispatcher.calls[-1][2].completion == 1

    run(main())


def test_a_client_that_half_closes_counts_as_gone(run):
    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            engine.seen.set()
            await connection.gone()
            engine.left.set()

        async with serving(script) as (gateway, (engine,), connect):
            client = await connect()
            await client.send(post(CHAT))
            await engine.seen.wait()
            client.writer.write_eof()
            await asyncio.wait_for(engine.left.wait(), 1)
            await gateway.settled()

    run(main())


def test_a_client_that_reads_slowly_slows_its_engine_and_loses_nothing(run):
    async def main():
        words = 2000
        payload = "x" * 16_000
        sent = 0

        async def script(engine, connection):
            nonlocal sent
            await engine.take(connection)
            await connection.send(SSE_HEAD)
            for _ in range(words):
                await connection.send(chunk(word(payload)))
                sent += 1
            await connection.send(chunk(STOP) + chunk(DONE) + LAST_CHUNK)

        async with serving(script) as (_, _, connect):
            client = await connect()
            await client.send(post({**CHAT, "stream": True}))
            await client.head()
            before = -1
            while before != sent:
                before = sent
                await asyncio.sleep(0.1)
            assert sent < words
            seen = 0
            while piece := await client.chunk():
                seen += piece.count(payload.encode())
            assert seen == words

    run(main())


def test_a_client_that_never_reads_is_dropped_after_the_limit_between_tokens(run):
    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            await connection.send(SSE_HEAD)
            with contextlib.suppress(ConnectionError):
                while True:
                    await connection.send(chunk(word("x" * 50_000)))
            engine.left.set()

        timeouts = Timeouts(between_tokens=0.2)
        async with serving(script, timeouts=timeouts) as (gateway, (engine,), connect):
            client = await connect()
            await client.send(post({**CHAT, "stream": True}))
            await client.head()
            await asyncio.wait_for(engine.left.wait(), 5)
            await gateway.settled()
            assert gateway.names()[-1] == "client_gone"

    run(main())


PAGE = 16 << 20  # more than the kernel takes for two sockets


def page_app(served, *, pieces=1):
    """An ASGI app that answers everything with `PAGE` bytes and counts its calls."""

    async def app(scope, receive, send):
        served.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": LENGTH})
        for left in reversed(range(pieces)):
            body = b"x" * (PAGE // pieces)
            await send({"type": "http.response.body", "body": body, "more_body": left > 0})

    return app


LENGTH = [(b"content-length", b"%d" % PAGE)]


async def gone(gateway):
    """Wait until the server holds no connection."""
    async with asyncio.timeout(10):
        while gateway.server.connections:  # noqa: ASYNC110 - looks from outside
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("pieces", [1, 64])
@pytest.mark.parametrize("together", [False, True])
def test_a_client_that_leaves_replies_unread_is_served_no_further_and_cut(
    run, pieces, together, monkeypatch
):
    monkeypatch.setattr(server_module, "SWEEP_SECONDS", 0.02)

    async def main():
        served = []
        limits = ServerLimits(idle_seconds=0.3)
        app = page_app(served, pieces=pieces)
        async with serving(always(answer()), limits=limits, app=app) as (gateway, _, connect):
            client = await connect()
            wire = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n"
            await client.send(wire * 4 if together else wire)
            await client.head()
            with contextlib.suppress(ConnectionError):
                for _ in range(3):
                    if not together:
                        await client.send(wire)
            await gone(gateway)
            assert served == ["/x"]

    run(main())


def test_a_client_that_catches_up_is_served_what_it_sent_ahead(run):
    async def main():
        served = []
        async with serving(always(answer()), app=page_app(served)) as (_, _, connect):
            client = await connect()
            wire = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n"
            await client.send(wire * 3)
            await client.head()
            await client.send(wire[:7])
            assert len(await client.reader.readexactly(PAGE)) == PAGE
            await client.send(wire[7:])
            for _ in range(3):
                assert len((await client.reply())[2]) == PAGE
            assert len(served) == 4
            await client.send(post(CHAT))
            assert (await client.reply())[2] == ANSWER

    run(main())


@pytest.mark.parametrize("headers", [b"", b"connection: close\r\n"])
def test_an_answer_may_take_longer_than_the_idle_limit_to_be_taken(run, headers, monkeypatch):
    monkeypatch.setattr(server_module, "SWEEP_SECONDS", 0.02)

    async def main():
        limits = ServerLimits(idle_seconds=0.25)
        async with serving(always(answer()), limits=limits, app=page_app([])) as (_, _, connect):
            client = await connect()
            await client.send(b"GET /x HTTP/1.1\r\nhost: x\r\n%b\r\n" % headers)
            await client.head()
            for _ in range(64):
                await client.reader.readexactly(PAGE // 64)
                await asyncio.sleep(0.015)  # the pace of a slow link
            assert await client.closed()

    run(main())


def test_the_beginning_of_the_next_request_does_not_end_a_running_reply(run, monkeypatch):
    monkeypatch.setattr(server_module, "SWEEP_SECONDS", 0.02)

    async def main():
        gate = asyncio.Event()

        async def script(engine, connection):
            await engine.take(connection)
            await connection.send(SSE_HEAD + chunk(ROLE))
            await gate.wait()
            await connection.send(chunk(word("one")) + chunk(STOP) + chunk(DONE) + LAST_CHUNK)

        limits = ServerLimits(head_seconds=0.1, idle_seconds=0.1)
        async with serving(script, limits=limits) as (_, _, connect):
            client = await connect()
            await client.send(post({**CHAT, "stream": True}) + b"POST /v1/ch")
            asyncio.get_running_loop().call_later(0.4, gate.set)  # four limits long
            assert (await client.reply())[2].endswith(DONE)
            assert (await client.reply())[0] == 408
            assert await client.closed()

    run(main())


@pytest.mark.parametrize(
    ("version", "headers", "keeps"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"connection: close\r\n", False),
        (b"1.0", b"", False),
        (b"1.0", b"connection: keep-alive\r\n", True),
    ],
)
def test_connections_are_kept_as_the_client_asks(run, version, headers, keeps):
    async def main():
        async with serving(always(answer())) as (_, _, connect):
            client = await connect()
            await client.send(post(CHAT, version=version, headers=headers))
            _, reply_headers, body = await client.reply()
            assert body == ANSWER
            if keeps:
                assert reply_headers.get(b"connection") != b"close"
                await client.send(post(CHAT, version=version, headers=headers))
                assert (await client.reply())[2] == ANSWER
            else:
                assert reply_headers[b"connection"] == b"close"
                assert await client.closed()

    run(main())


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"


@pytest.mark.parametrize("where", ["together", "head first", "in the head", "bytewise"])
def test_an_offer_to_upgrade_is_ignored_and_its_request_served_once(run, where):
    async def main():
        async with serving(always(answer()), app=None) as (gateway, engines, connect):
            client = await connect()
            client.writer.get_extra_info("socket").setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
            wire = post(CHAT, headers=H2C)
            cuts = {
                "together": [],
                "head first": [wire.index(b"\r\n\r\n") + 4],
                "in the head": [wire.index(b"Upgrade: h2c") + 4],
                "bytewise": range(1, len(wire)),
            }[where]
            for at, end in itertools.pairwise([0, *cuts, len(wire)]):
                await client.send(wire[at:end])
                await asyncio.sleep(0)
            assert (await client.reply())[2] == ANSWER
            await client.send(post(CHAT) + post(CHAT, headers=H2C) * 2 + post(CHAT))
            for _ in range(4):
                assert (await client.reply())[2] == ANSWER
            assert {body for _, body in engines[0].requests} == {json.dumps(CHAT).encode()}
            assert gateway.names().count("open") == 5

    run(main())


def test_an_offer_to_upgrade_with_a_chunked_body_and_expect_is_served(run):
    async def main():
        async with serving(always(answer())) as (_, _, connect):
            client = await connect()
            await client.send(
                b"POST /other HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
                b"expect: 100-continue\r\n" + H2C + b"\r\n"
            )
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(chunk(b"body") + LAST_CHUNK)
            assert (await client.reply())[2].endswith(b"body")
            await client.send(b"GET /x HTTP/1.1\r\nhost: x\r\n" + H2C + b"\r\n")
            assert (await client.reply())[2] == b"GET /x  "

    run(main())


def test_limits_hold_for_a_request_that_offers_to_upgrade(run):
    async def main():
        limits = ServerLimits(max_body_bytes=1000, max_head_bytes=2000)
        async with serving(always(answer()), limits=limits) as (_, _, connect):
            for wire, status in [
                (post(b"a" * 1001, headers=H2C), 413),
                (post(b"a", headers=H2C + b"x: aaaaa\r\n" * 300), 431),
                (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\nGET / HTTP/1.1\r\n\r\n", 501),
            ]:
                client = await connect()
                await client.send(wire)
                assert (await client.reply())[0] == status
                assert await client.closed()

    run(main())


def test_http_1_0_gets_a_stream_without_chunks(run):
    async def main():
        async with serving(always(GOOD_STREAM)) as (_, _, connect):
            client = await connect()
            await client.send(post({**CHAT, "stream": True}, version=b"1.0"))
            _, headers, body = await client.reply()
            assert b"transfer-encoding" not in headers
            assert body == ROLE + word("one") + word(" two") + STOP + DONE

    run(main())


def test_head_requests_get_no_body(run):
    async def main():
        async with serving(always(answer())) as (_, _, connect):
            client = await connect()
            await client.send(b"HEAD /x HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await client.head())[0] == 200
            await client.send(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await client.reply())[2] == b"GET /x  "

    run(main())


def test_draining_lets_streams_end_and_takes_nothing_new(run):
    async def main():
        gate = asyncio.Event()

        async def script(engine, connection):
            await engine.take(connection)
            await connection.send(SSE_HEAD + chunk(ROLE) + chunk(word("one")))
            await gate.wait()
            await connection.send(chunk(word(" two")) + chunk(STOP) + chunk(DONE) + LAST_CHUNK)

        engine = ScriptedEngine(script)
        async with engine.running():
            async with running_gateway(engine.url, grace=5.0) as gateway:
                busy = Client(*await asyncio.open_connection("127.0.0.1", gateway.port))
                idle = Client(*await asyncio.open_connection("127.0.0.1", gateway.port))
                await busy.send(post({**CHAT, "stream": True}))
                await busy.head()
                assert b"one" in await busy.chunk()
                port = gateway.port
                asyncio.get_running_loop().call_soon(gate.set)
            assert await idle.closed()
            body = b""
            while piece := await busy.chunk():
                body += piece
            assert body == word(" two") + STOP + DONE
            assert await busy.closed()
            with pytest.raises(OSError):  # noqa: PT011 - any refusal to connect
                await asyncio.open_connection("127.0.0.1", port)
            idle.writer.close()
            busy.writer.close()

    run(main())


def test_what_does_not_end_in_its_grace_is_cut(run):
    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            engine.seen.set()
            await connection.gone()

        engine = ScriptedEngine(script)
        async with engine.running():
            async with running_gateway(engine.url, grace=0.05) as gateway:
                client = Client(*await asyncio.open_connection("127.0.0.1", gateway.port))
                await client.send(post(CHAT))
                await engine.seen.wait()
            assert await client.closed()
            assert gateway.dispatcher.running == [0]
            client.writer.close()

    run(main())


def test_a_silent_stream_gets_comments_and_may_still_move_to_another_replica(run, monkeypatch):
    monkeypatch.setattr(server_module, "SWEEP_SECONDS", 0.02)

    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            await engine.seen.wait()

        async with serving(script, always(GOOD_STREAM), keep_alive=0.05) as (gateway, es, connect):
            gateway.dispatcher._turn = 1
            client = await connect()
            await client.send(post({**CHAT, "stream": True}))
            status, headers = await client.head()
            assert (status, headers[b"content-type"]) == (200, b"text/event-stream")
            assert await client.chunk() == b": keep-alive\n\n"
            es[0].seen.set()
            body = b""
            while piece := await client.chunk():
                body += piece
            assert body.replace(b": keep-alive\n\n", b"") == (
                ROLE + word("one") + word(" two") + STOP + DONE
            )

    run(main())


def test_an_exception_in_the_app_is_a_500(run, caplog):
    async def broken(scope, receive, send):
        raise ZeroDivisionError

    async def main():
        async with serving(always(answer()), app=broken) as (_, _, connect):
            client = await connect()
            for _ in range(2):
                await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await client.reply())[0] == 500

    run(main())
    assert "ZeroDivisionError" in caplog.text


def test_a_megabyte_prompt_passes_whole(run):
    """`gateways.md` 4.H.10; its latency is in the benchmark's table."""

    async def main():
        async with serving(always(answer())) as (_, engines, connect):
            client = await connect()
            body = {**CHAT, "messages": [{"role": "user", "content": "é" * 500_000}]}
            raw = json.dumps(body, ensure_ascii=False).encode()
            await client.send(post(raw))
            assert (await client.reply())[0] == 200
            assert engines[0].requests[0][1] == raw

    run(main())


@pytest.mark.parametrize("path", SURFACES)
def test_every_inference_route_goes_through_the_dispatcher(run, path):
    """`gateways.md` 4.H.9: quota and trace stand in one place, which no route can pass by."""

    async def main():
        async with serving(always(answer())) as (gateway, _, connect):
            client = await connect()
            body = {"model": "m", "messages": [{"content": "x"}], "prompt": "x", "input": "x"}
            if path in {b"/v1/embeddings", b"/v1/responses"}:
                del body["messages"]
            await client.send(post(body, path=path) + post(b"{}", path=path + b"?api-version=1"))
            assert (await client.reply())[0] == 200
            assert (await client.reply())[0] == 400
            assert gateway.names() == ["open", "ended", "open"]

    run(main())


def test_a_pipelining_client_that_leaves_is_noticed(run):
    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            engine.seen.set()
            await connection.gone()
            engine.left.set()

        async with serving(script) as (gateway, (engine,), connect):
            client = await connect()
            await client.send(post(CHAT) * 3)
            await engine.seen.wait()
            client.writer.transport.abort()
            await asyncio.wait_for(engine.left.wait(), 1)
            await gateway.settled()

    run(main())


def test_two_servers_share_a_port(run):
    async def main():
        async with running_gateway() as first:
            shared = first.server.listening(reuse_port=True)
            async with (
                shared as (host, port),
                first.server.listening(host, port, reuse_port=True),
            ):
                client = Client(*await asyncio.open_connection(host, port))
                await client.send(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await client.reply())[0] == 200
                client.writer.close()

    run(main())
