"""Conformance of the upstream client against engines that follow a script, on both event loops."""

import asyncio
import contextlib

import pytest
import uvloop

from backends.upstream import Timeouts, UpstreamLimits, UpstreamPool
from domain.errors import (
    BackendProtocolError,
    BackendTimeout,
    BackendUnavailable,
    StreamInterrupted,
)
from tests.fakes.engine import (
    LAST_CHUNK,
    SSE_HEAD,
    ScriptedEngine,
    always,
    answer,
    chunk,
    once,
    refused_url,
)

pytestmark = pytest.mark.integration

BODY = b'{"model":"m"}'
LENGTH = answer(b"hello world")
CHUNKED = SSE_HEAD + chunk(b"hello ") + chunk(b"world") + LAST_CHUNK


class Collect:
    """A sink that keeps what it gets; `over` resolves with the last callback."""

    def __init__(self, *, progress=True):
        self.progress = progress
        self.status = None
        self.body = b""
        self.error = None
        self.ended = 0
        self.stalled = False
        self.over = asyncio.get_running_loop().create_future()
        self.started = asyncio.Event()

    def on_head(self, status, headers):
        """Once."""
        assert self.status is None
        self.status = status
        self.headers = headers

    def on_data(self, data, now):
        """Never after the end."""
        assert self.ended == 0
        self.body += data
        self.started.set()
        return self.progress

    def on_end(self):
        """The good end."""
        self.ended += 1
        self.over.set_result(None)

    def on_error(self, error):
        """The bad end."""
        self.ended += 1
        self.error = error
        self.over.set_result(None)

    def on_stall(self):
        """Our own slowness."""
        self.ended += 1
        self.stalled = True
        self.over.set_result(None)


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request):
    def runner(coroutine):
        return request.param(asyncio.wait_for(coroutine, 20))

    return runner


@contextlib.asynccontextmanager
async def engine_and_pool(script, **limits):
    engine = ScriptedEngine(script)
    async with (
        engine.running() as running,
        UpstreamPool(running.url, limits=UpstreamLimits(**limits)) as pool,
    ):
        yield engine, pool


async def fetch(pool, timeouts=None, sink=None, body=BODY, headers=b""):
    sink = sink or Collect()
    pool.send(b"/v1/chat/completions", body, sink, timeouts or Timeouts(), headers=headers)
    await sink.over
    return sink


@pytest.mark.parametrize("wire", [LENGTH, CHUNKED], ids=["length", "chunked"])
def test_bodies_arrive_whole_and_the_connection_is_reused(run, wire):
    async def main():
        async with engine_and_pool(always(wire)) as (engine, pool):
            for _ in range(5):
                sink = await fetch(pool)
                assert (sink.status, sink.body, sink.error) == (200, b"hello world", None)
                assert (pool.idle, pool.open) == (1, 1)
            assert engine.connections == 1
            assert len(engine.requests) == 5

    run(main())


@pytest.mark.parametrize("wire", [LENGTH, CHUNKED], ids=["length", "chunked"])
def test_cuts_at_every_byte(run, wire):
    """Each cut is its own exchange; the engine sends the second part when told that the first
    was read, or at once where nothing can be seen of it.
    """

    async def main():
        cuts = iter(range(1, len(wire)))

        async def script(engine, connection):
            while True:
                await engine.take(connection)
                cut = next(cuts)
                await connection.send(wire[:cut])
                await asyncio.sleep(0)
                await connection.send(wire[cut:])

        async with engine_and_pool(script) as (engine, pool):
            for _ in range(1, len(wire)):
                sink = await fetch(pool)
                assert (sink.body, sink.error) == (b"hello world", None)
            assert engine.connections == 1

    run(main())


def test_the_request_is_what_was_asked_for(run):
    async def main():
        async with (
            engine_and_pool(always(LENGTH)) as (engine, _),
            UpstreamPool(engine.url + "/prefix/", headers=b"authorization: Bearer k\r\n") as pool,
        ):
            await fetch(pool, headers=b"traceparent: 00-1\r\n")
            head, body = engine.requests[0]
            assert body == BODY
            lines = head.split(b"\r\n")
            assert lines[0] == b"POST /prefix/v1/chat/completions HTTP/1.1"
            assert set(lines[1:-2]) == {
                b"host: 127.0.0.1:%d" % engine.port,
                b"content-type: application/json",
                b"authorization: Bearer k",
                b"content-length: %d" % len(BODY),
                b"traceparent: 00-1",
            }

    run(main())


def test_a_body_delimited_by_the_end_of_the_connection(run):
    async def main():
        wire = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello"
        async with engine_and_pool(once(wire, b" world")) as (_, pool):
            sink = await fetch(pool)
            assert (sink.body, sink.error) == (b"hello world", None)
            assert (pool.idle, pool.open) == (0, 0)

    run(main())


def test_a_half_closed_engine_has_answered_and_is_not_reused(run):
    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            await connection.send(CHUNKED)
            connection.half_close()
            await connection.gone()
            engine.left.set()

        async with engine_and_pool(script) as (engine, pool):
            sink = await fetch(pool)
            assert (sink.body, sink.error) == (b"hello world", None)
            await engine.left.wait()
            sink = await fetch(pool)
            assert sink.body == b"hello world"
            assert engine.connections == 2

    run(main())


def test_interim_responses_are_skipped(run):
    async def main():
        wire = b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH
        async with engine_and_pool(always(wire)) as (engine, pool):
            for _ in range(2):
                assert (await fetch(pool)).body == b"hello world"
            assert engine.connections == 1

    run(main())


def test_a_kept_connection_that_the_engine_closed_is_replaced_unseen(run):
    """The crossing: the engine closes an idle connection just as the request goes out."""

    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            await connection.send(LENGTH)
            if engine.connections == 1:
                await engine.take(connection)  # the second request dies here, without a byte

        async with engine_and_pool(script) as (engine, pool):
            await fetch(pool)
            sink = await fetch(pool)
            assert (sink.body, sink.error) == (b"hello world", None)
            assert engine.connections == 2
            assert len(engine.requests) == 3

    run(main())


def test_a_fresh_connection_that_closes_is_not_tried_again(run):
    async def main():
        async with engine_and_pool(once()) as (engine, pool):
            sink = await fetch(pool)
            assert isinstance(sink.error, BackendUnavailable)
            assert engine.connections == 1

    run(main())


def test_the_replacement_is_tried_once(run):
    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            if len(engine.requests) == 1:
                await connection.send(LENGTH)
                await engine.take(connection)

        async with engine_and_pool(script) as (engine, pool):
            await fetch(pool)
            sink = await fetch(pool)
            assert isinstance(sink.error, BackendUnavailable)
            assert engine.connections == 2

    run(main())


def test_nobody_listens(run):
    async def main():
        async with UpstreamPool(await refused_url()) as pool:
            sink = await fetch(pool)
            assert isinstance(sink.error, BackendUnavailable)
            assert (pool.open, pool.idle) == (0, 0)

    run(main())


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("wire", [LENGTH[:-3], CHUNKED[: -len(LAST_CHUNK)]])
def test_an_early_close_is_an_interrupted_stream(run, wire, how):
    async def main():
        sink = Collect()

        async def script(engine, connection):
            await engine.take(connection)
            await connection.send(wire)
            await sink.started.wait()
            if how == "reset":
                connection.reset()

        async with engine_and_pool(script) as (_, pool):
            await fetch(pool, sink=sink)
            assert isinstance(sink.error, StreamInterrupted)
            assert sink.body
            assert (pool.open, pool.idle) == (0, 0)

    run(main())


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        SSE_HEAD + b"zz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: " + b"a" * 5000,
        b"HTTP/1.1 200 OK\r\n" + b"x: a\r\n" * 1000 + b"\r\n",
    ],
    ids=["ssh", "two-lengths", "bad-chunk", "long-header", "many-headers"],
)
def test_what_is_not_http_within_limits_is_refused_and_closed(run, wire):
    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            await connection.send(wire)
            await connection.gone()
            engine.left.set()

        async with engine_and_pool(script, max_head_bytes=2048) as (engine, pool):
            sink = await fetch(pool)
            assert isinstance(sink.error, BackendProtocolError)
            await engine.left.wait()

    run(main())


@pytest.mark.parametrize("junk", [b"x", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"])
@pytest.mark.parametrize("apart", [False, True])
def test_junk_after_the_end_costs_the_connection_only(run, junk, apart):
    async def main():
        sink = Collect()

        async def script(engine, connection):
            await engine.take(connection)
            if apart:
                await connection.send(LENGTH)
                await asyncio.wait([sink.over])
                await connection.send(junk)
            else:
                await connection.send(LENGTH + junk)
            await connection.gone()
            engine.left.set()

        async with engine_and_pool(script) as (engine, pool):
            await fetch(pool, sink=sink)
            assert (sink.body, sink.error) == (b"hello world", None)
            await engine.left.wait()
            assert pool.idle == 0

    run(main())


def test_abort_closes_the_engine_s_connection_at_once_and_is_silent(run):
    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            await connection.send(SSE_HEAD + chunk(b"a"))
            await connection.gone()
            engine.left.set()

        async with engine_and_pool(script) as (engine, pool):
            sink = Collect()
            exchange = pool.send(b"/x", BODY, sink, Timeouts())
            await sink.started.wait()
            exchange.abort()
            exchange.abort()
            assert exchange.over
            await asyncio.wait_for(engine.left.wait(), 1)
            assert sink.ended == 0
            assert (pool.idle, pool.open) == (0, 0)

    run(main())


def test_abort_while_dialling_is_silent(run):
    async def main():
        async with engine_and_pool(always(LENGTH)) as (engine, pool):
            sink = Collect()
            pool.send(b"/x", BODY, sink, Timeouts()).abort()
            await fetch(pool)
            assert sink.ended == 0
            assert len(engine.requests) == 1

    run(main())


@pytest.mark.parametrize("turns", range(6))
def test_abort_at_any_moment_of_a_dial_leaves_no_connection_behind(run, turns):
    """Also between the socket's opening and the dial's end, which the loop alone sees."""

    async def main():
        async with engine_and_pool(always(LENGTH)) as (_, pool):
            for _ in range(20):
                exchange = pool.send(b"/x", BODY, Collect(), Timeouts())
                for _ in range(turns):
                    await asyncio.sleep(0)
                exchange.abort()
            await fetch(pool)
            assert (pool.open, pool.idle) == (1, 1)

    run(main())


@pytest.mark.parametrize(
    ("wire", "limits", "phase"),
    [
        (b"", {"first_token": 0.05}, "first_token"),
        (SSE_HEAD, {"first_token": 0.05}, "first_token"),
        (SSE_HEAD + chunk(b"a"), {"between_tokens": 0.05}, "between_tokens"),
        (SSE_HEAD + chunk(b"a"), {"total": 0.05}, "total"),
    ],
)
def test_each_timeout_names_its_phase_and_closes_the_connection(run, wire, limits, phase):
    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            await connection.send(wire)
            await connection.gone()
            engine.left.set()

        async with engine_and_pool(script) as (engine, pool):
            timeouts = Timeouts(
                **{"first_token": 9.0, "between_tokens": 9.0, "total": 9.0, **limits}
            )
            sink = await fetch(pool, timeouts)
            assert isinstance(sink.error, BackendTimeout)
            assert sink.error.phase == phase
            await engine.left.wait()

    run(main())


def test_data_without_progress_does_not_end_the_first_token_phase(run):
    """Keep-alive comments of an engine must not stand for a token."""

    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            await connection.send(SSE_HEAD)
            while True:
                await connection.send(chunk(b": ping\n\n"))
                await asyncio.sleep(0.005)

        async with engine_and_pool(script) as (_, pool):
            sink = await fetch(pool, Timeouts(first_token=0.1), Collect(progress=False))
            assert sink.error.phase == "first_token"
            assert sink.body

    run(main())


def test_progress_keeps_a_stream_alive_beyond_the_limit_between_tokens(run):
    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            await connection.send(SSE_HEAD)
            for _ in range(12):
                await connection.send(chunk(b"x"))
                await asyncio.sleep(0.02)
            await connection.send(LAST_CHUNK)

        async with engine_and_pool(script) as (_, pool):
            sink = await fetch(pool, Timeouts(between_tokens=0.15))
            assert (sink.body, sink.error) == (b"x" * 12, None)

    run(main())


def test_connect_has_its_own_limit(run):
    """A full backlog: the kernel drops SYNs, and no answer comes."""

    async def main():
        import socket

        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            port = listener.getsockname()[1]
            held = []
            for _ in range(4):
                one = socket.socket()
                one.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    one.connect(("127.0.0.1", port))
                held.append(one)
            async with UpstreamPool(f"http://127.0.0.1:{port}") as pool:
                sink = await fetch(pool, Timeouts(connect=0.05))
                assert isinstance(sink.error, BackendTimeout)
                assert sink.error.phase == "connect"
            for one in held:
                one.close()

    run(main())


def test_a_paused_exchange_slows_the_engine_down(run):
    """What is sent while paused stays in the kernel; the engine's writes stop being taken."""

    async def main():
        sent = 0

        async def script(engine, connection):
            nonlocal sent
            await engine.take(connection)
            await connection.send(SSE_HEAD)
            for _ in range(2000):
                await connection.send(chunk(b"x" * 16384))
                sent += 16384
            await connection.send(LAST_CHUNK)

        async with engine_and_pool(script) as (_, pool):
            sink = Collect()
            exchange = pool.send(b"/x", BODY, sink, Timeouts())
            await sink.started.wait()
            exchange.pause()
            before = -1
            while before != sent:  # until the engine no longer gets rid of anything
                before = sent
                await asyncio.sleep(0.1)
            held = len(sink.body)
            assert sent < 2000 * 16384
            exchange.resume()
            await sink.over
            assert sink.error is None
            assert held < len(sink.body) == 2000 * 16384

    run(main())


def test_a_pause_longer_than_the_limit_between_tokens_is_a_stall_of_the_sink(run):
    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            await connection.send(SSE_HEAD + chunk(b"a"))
            await connection.gone()
            engine.left.set()

        async with engine_and_pool(script) as (engine, pool):
            sink = Collect()
            exchange = pool.send(b"/x", BODY, sink, Timeouts(between_tokens=0.05))
            await sink.started.wait()
            exchange.pause()
            await sink.over
            assert sink.stalled
            assert sink.error is None
            await engine.left.wait()

    run(main())


def test_a_slow_engine_gets_a_large_request_whole(run):
    async def main():
        body = b"[" + b"1," * 600_000 + b"1]"
        async with engine_and_pool(always(LENGTH)) as (engine, pool):
            sink = await fetch(pool, body=body)
            assert sink.error is None
            assert engine.requests[0][1] == body

    run(main())


def test_an_answer_before_the_request_was_read_costs_the_connection(run):
    """What is left of the request in our buffer must not run into the next one."""

    async def main():
        async def script(engine, connection):
            if engine.connections > 1:
                await engine.take(connection)
            await connection.send(LENGTH)
            await engine.seen.wait()

        async with engine_and_pool(script) as (engine, pool):
            sink = await fetch(pool, body=b"[" + b"1," * 8_000_000 + b"1]")
            assert (sink.body, sink.error) == (b"hello world", None)
            assert pool.idle == 0
            assert (await fetch(pool)).body == b"hello world"
            assert engine.connections == 2
            engine.seen.set()

    run(main())


def test_many_at_once_open_many_and_keep_few(run):
    async def main():
        async with engine_and_pool(always(LENGTH), max_idle=3) as (engine, pool):
            sinks = [Collect() for _ in range(20)]
            for sink in sinks:
                pool.send(b"/x", BODY, sink, Timeouts())
            await asyncio.gather(*(sink.over for sink in sinks))
            assert all(sink.body == b"hello world" for sink in sinks)
            assert engine.connections == 20
            assert pool.idle == 3

    run(main())


def test_old_idle_connections_are_not_used(run):
    async def main():
        now = 0.0
        engine = ScriptedEngine(always(LENGTH))
        async with engine.running():
            limits = UpstreamLimits(idle_seconds=10.0)
            async with UpstreamPool(engine.url, limits=limits, clock=lambda: now) as pool:
                await fetch(pool)
                now = 9.0
                await fetch(pool)
                assert engine.connections == 1
                now = 20.0
                await fetch(pool)
                assert engine.connections == 2

    run(main())


def test_closing_the_pool_ends_what_runs_with_an_error(run):
    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            await connection.send(SSE_HEAD + chunk(b"a"))
            await connection.gone()

        async with engine_and_pool(script) as (_, pool):
            sink, dialling = Collect(), Collect()
            pool.send(b"/x", BODY, sink, Timeouts())
            await sink.started.wait()
            pool.send(b"/x", BODY, dialling, Timeouts())
            await pool.close()
            await asyncio.gather(sink.over, dialling.over)
            assert isinstance(sink.error, StreamInterrupted)
            assert isinstance(dialling.error, BackendUnavailable)

    run(main())


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:80", "http://", ""])
def test_a_base_url_must_be_one(url):
    with pytest.raises(ValueError, match="base URL"):
        UpstreamPool(url)


def test_a_timeout_of_nothing_is_refused():
    with pytest.raises(ValueError, match="total"):
        Timeouts(total=0.0)


PART = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc"


@pytest.mark.parametrize(
    ("wires", "kind"), [((), BackendUnavailable), ((PART,), StreamInterrupted)]
)
def test_errors_for_the_client_do_not_tell_where_the_engine_is(run, wires, kind):
    async def main():
        async with engine_and_pool(once(*wires)) as (_, pool):
            sink = await fetch(pool)
            assert type(sink.error) is kind
            assert "127.0.0.1" not in sink.error.message
            assert f"{pool.host}:{pool.port}" in sink.error.detail
        async with UpstreamPool(await refused_url()) as pool:
            sink = await fetch(pool)
            assert sink.error.message == "cannot connect to the engine"
            assert f"{pool.host}:{pool.port}" in sink.error.detail

    run(main())
