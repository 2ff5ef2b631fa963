"""Questions to an engine: kept connections, late and broken answers."""

import asyncio

import pytest

from backends.probe import Probe, asked
from domain.errors import BackendError, BackendTimeout, BackendUnavailable

pytestmark = pytest.mark.integration

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def serve(script):
    """Run `scenario(url, heads)` against a server whose connections run the script."""

    def run(scenario):
        async def body():
            heads = []

            async def connected(reader, writer):
                try:
                    await script(reader, writer, heads)
                except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                    pass
                finally:
                    writer.close()

            server = await asyncio.start_server(connected, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            try:
                await asyncio.wait_for(scenario(f"http://127.0.0.1:{port}", heads), 10)
            finally:
                server.close()

        asyncio.run(body())

    return run


def answering(*answers, close=False):
    """A script that gives these answers to the requests of a connection, then others the last."""

    async def script(reader, writer, heads):
        for i in range(100):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answers[min(i, len(answers) - 1)])
            await writer.drain()
            if close:
                return

    return script


def test_answers_share_a_connection_and_carry_prefix_and_key():
    @serve(answering(OK, b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n"))
    async def scenario(url, heads):
        async with Probe(f"{url}/pre", timeout=5, api_key="k") as probe:
            first, second = await probe.get("/health"), await probe.get("/other")
        assert (first.status, first.body, first.good) == (200, b"ok", True)
        assert (second.status, second.body, second.good) == (404, b"", False)
        assert heads[0].startswith(b"GET /pre/health HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"authorization: Bearer k\r\n" in heads[0]


def test_a_connection_closed_in_between_is_opened_again():
    @serve(answering(OK, close=True))
    async def scenario(url, heads):
        async with Probe(url, timeout=5) as probe:
            for _ in range(3):
                assert (await probe.get("/")).body == b"ok"
        assert len(heads) == 3


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", b"not http at all\r\n\r\n"],
)
def test_broken_answers_are_errors_and_unknown_questions_none(answer):
    @serve(answering(answer, close=True))
    async def scenario(url, heads):
        async with Probe(url, timeout=5) as probe:
            with pytest.raises(BackendError):
                await probe.get("/")
            assert await asked(probe, "/") is None


def test_silence_is_a_timeout():
    async def silent(reader, writer, heads):
        await reader.read()

    @serve(silent)
    async def scenario(url, heads):
        async with Probe(url, timeout=0.05) as probe:
            with pytest.raises(BackendTimeout):
                await probe.get("/")


def test_nobody_there():
    async def run():
        async with Probe("http://127.0.0.1:1", timeout=5) as probe:
            with pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1:1/x"):
                await probe.get("/x")

    asyncio.run(run())


@pytest.mark.parametrize("url", ["ftp://h", "nonsense", "http://"])
def test_other_urls_are_refused(url):
    with pytest.raises(ValueError, match="URL must be"):
        Probe(url, timeout=1)
