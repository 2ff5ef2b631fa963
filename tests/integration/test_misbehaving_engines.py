"""What an unchanged OpenAI client sees when engines misbehave, through the whole token path.

Each case is an engine's script; the second engine, where there is one, is healthy. The table that
the cases make is printed by `python -m tests.integration.test_misbehaving_engines`.
"""

import asyncio
import contextlib

import httpx
import openai
import pytest
import uvloop

from backends.upstream import Timeouts
from domain.outcome import Cause, UsageSource
from tests.fakes.engine import (
    ANSWER,
    DONE,
    LAST_CHUNK,
    ROLE,
    SSE_HEAD,
    STOP,
    USAGE,
    ScriptedEngine,
    always,
    answer,
    chunk,
    event,
    once,
    stream,
    word,
)
from tests.fakes.gateway import running_gateway

pytestmark = pytest.mark.integration

GOOD_STREAM = stream(ROLE, word("one"), word(" two"), STOP, USAGE, DONE)
GOOD = answer()
FAST = Timeouts(first_token=0.3, between_tokens=0.3, total=2.0)


def crlf(*events):
    return stream(*(e.replace(b"\n", b"\r\n") for e in events))


def bytewise(wire):
    return [wire[at : at + 1] for at in range(len(wire))]


async def slow_head(engine, connection):
    await engine.take(connection)
    for piece in (SSE_HEAD[:9], SSE_HEAD[9:40], SSE_HEAD[40:]):
        await connection.send(piece)
        await asyncio.sleep(0.02)
    await connection.send(GOOD_STREAM[len(SSE_HEAD) :])


async def endless(engine, connection):
    await engine.take(connection)
    await connection.send(SSE_HEAD + chunk(ROLE))
    while True:
        await connection.send(chunk(word("la")))
        await asyncio.sleep(0.01)


async def silent_after(engine, connection, *pieces):
    await engine.take(connection)
    for piece in pieces:
        await connection.send(piece)
    await connection.gone()
    engine.left.set()


async def never(engine, connection):
    await silent_after(engine, connection)


async def bad_chunk(engine, connection):
    await engine.take(connection)
    await connection.send(SSE_HEAD + chunk(word("one")))
    await engine.seen.wait()
    await connection.send(b"zz\r\n")


async def stalls(engine, connection):
    await silent_after(engine, connection, SSE_HEAD + chunk(ROLE) + chunk(word("one")))


# name: (engine's script, text the SDK gets, error the SDK raises, cause of the last attempt)
STREAMED = {
    "healthy": (always(GOOD_STREAM), "one two", None, Cause.FINISHED),
    "slow headers": (slow_head, "one two", None, Cause.FINISHED),
    "split frames": (once(*bytewise(GOOD_STREAM)), "one two", None, Cause.FINISHED),
    "CRLF frames": (
        once(crlf(ROLE, word("one"), word(" two"), STOP, USAGE, DONE)),
        "one two",
        None,
        Cause.FINISHED,
    ),
    "100-continue": (
        once(b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD_STREAM),
        "one two",
        None,
        Cause.FINISHED,
    ),
    "missing usage": (
        always(stream(ROLE, word("one"), word(" two"), STOP, DONE)),
        "one two",
        None,
        Cause.FINISHED,
    ),
    "duplicate usage": (
        always(stream(ROLE, word("one"), word(" two"), STOP, USAGE, USAGE, DONE)),
        "one two",
        None,
        Cause.FINISHED,
    ),
    "duplicate finish": (
        always(stream(ROLE, word("one"), word(" two"), STOP, STOP, USAGE, DONE)),
        "one two",
        None,
        Cause.FINISHED,
    ),
    "comments": (
        always(stream(b": hi\n\n", ROLE, word("one"), b": hi\n\n", word(" two"), STOP, DONE)),
        "one two",
        None,
        Cause.FINISHED,
    ),
    "no [DONE]": (
        always(stream(ROLE, word("one"), word(" two"), STOP)),
        "one two",
        None,
        Cause.FINISHED,
    ),
    "not chunked": (
        once(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
            + b"".join([ROLE, word("one"), word(" two"), STOP, USAGE, DONE])
        ),
        "one two",
        None,
        Cause.FINISHED,
    ),
    "500": (always(answer(b"boom", b"500 X")), "", openai.InternalServerError, Cause.REFUSED),
    "429 of the engine": (
        always(answer(b"{}", b"429 X")),
        "",
        openai.InternalServerError,
        Cause.REFUSED,
    ),
    "400 of the engine": (
        always(answer(b'{"error":{"message":"bad","type":"x"}}', b"400 X")),
        "",
        openai.BadRequestError,
        Cause.REJECTED,
    ),
    "404 in HTML": (
        always(answer(b"<html>", b"404 X", b"text/html")),
        "",
        openai.NotFoundError,
        Cause.REJECTED,
    ),
    "wrong content type": (
        always(answer(b"<html>", kind=b"text/html")),
        "",
        openai.InternalServerError,
        Cause.REFUSED,
    ),
    "not HTTP": (once(b"SSH-2.0\r\n"), "", openai.InternalServerError, Cause.REFUSED),
    "hangs up": (once(), "", openai.InternalServerError, Cause.REFUSED),
    "dies after the head": (once(SSE_HEAD), "", openai.InternalServerError, Cause.REFUSED),
    "dies after the role": (
        once(SSE_HEAD, chunk(ROLE)),
        "",
        openai.InternalServerError,
        Cause.REFUSED,
    ),
    "error event first": (
        always(stream(ROLE, event(error={"message": "out of memory"}), DONE)),
        "",
        openai.InternalServerError,
        Cause.REFUSED,
    ),
    "empty stream": (always(stream(ROLE)), "", openai.InternalServerError, Cause.REFUSED),
    "dies after a word": (
        once(SSE_HEAD, chunk(ROLE), chunk(word("one"))),
        "one",
        openai.APIError,
        Cause.INTERRUPTED,
    ),
    "dies within a frame": (
        once(SSE_HEAD, chunk(word("one")), chunk(word(" two")[:30])),
        "one",
        openai.APIError,
        Cause.INTERRUPTED,
    ),
    "error event after a word": (
        always(stream(ROLE, word("one"), event(error={"message": "out of memory"}))),
        "one",
        openai.APIError,
        Cause.INTERRUPTED,
    ),
    "ends without an end": (
        always(stream(ROLE, word("one"))),
        "one",
        openai.APIError,
        Cause.INTERRUPTED,
    ),
    "bad chunk after a word": (
        bad_chunk,
        "one",
        openai.APIError,
        Cause.INTERRUPTED,
    ),
    "never answers": (never, "", openai.InternalServerError, Cause.TIMEOUT),
    "stalls after a word": (stalls, "one", openai.APIError, Cause.TIMEOUT),
    "endless stream": (endless, "la", openai.APIError, Cause.TIMEOUT),
}

UNSTREAMED = {
    "healthy": (always(GOOD), "one two", None, Cause.FINISHED),
    "split": (once(*bytewise(GOOD)), "one two", None, Cause.FINISHED),
    "100-continue": (
        once(b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD),
        "one two",
        None,
        Cause.FINISHED,
    ),
    "until close": (
        once(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + ANSWER),
        "one two",
        None,
        Cause.FINISHED,
    ),
    "500": (always(answer(b"boom", b"500 X")), "", openai.InternalServerError, Cause.REFUSED),
    "401 of the engine": (
        always(answer(b"{}", b"401 X")),
        "",
        openai.InternalServerError,
        Cause.REFUSED,
    ),
    "422 of the engine": (
        always(answer(b'{"error":{"message":"bad"}}', b"422 X")),
        "",
        openai.UnprocessableEntityError,
        Cause.REJECTED,
    ),
    "wrong content type": (
        always(answer(b"<html>", kind=b"text/html")),
        "",
        openai.InternalServerError,
        Cause.REFUSED,
    ),
    "empty answer": (always(answer(b"")), "", openai.InternalServerError, Cause.REFUSED),
    "dies in the body": (once(GOOD[:-9]), "", openai.InternalServerError, Cause.REFUSED),
    "never answers": (never, "", openai.InternalServerError, Cause.TIMEOUT),
}


async def ask(url, *, streamed, **more):
    """Text, error and, for streams, the reasons to finish that the SDK sees."""
    text, error, finishes = "", None, []
    async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0, timeout=5) as client:
        messages = [{"role": "user", "content": "count"}]
        try:
            reply = await client.chat.completions.create(
                model="m", messages=messages, stream=streamed, **more
            )
            if streamed:
                async for part in reply:
                    for choice in part.choices:
                        text += choice.delta.content or ""
                        finishes += [choice.finish_reason] if choice.finish_reason else []
            else:
                text = reply.choices[0].message.content
        except openai.APIError as exc:
            error = exc
    return text, error, finishes


async def observe(script, *, streamed, spare=None):
    """Run one case; return text, error, finishes and the reports."""
    engine, second = ScriptedEngine(script), ScriptedEngine(spare or always(b""))
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(engine.running())
        await stack.enter_async_context(second.running())
        urls = [engine.url, second.url] if spare else [engine.url]
        gateway = await stack.enter_async_context(
            running_gateway(*urls, timeouts=FAST, max_attempts=len(urls), on_first=engine.seen.set)
        )
        if not streamed:
            gateway.dispatcher.timeouts = Timeouts(total=0.3)
        gateway.dispatcher._turn = 1  # the first engine is tried first
        seen = await ask(gateway.url, streamed=streamed)
        await gateway.settled()
        return *seen, gateway.reports()


@pytest.mark.parametrize("name", STREAMED)
def test_streamed(name):
    script, text, error, cause = STREAMED[name]

    async def main():
        got, raised, finishes, reports = await observe(script, streamed=True)
        assert set(got.split("la")) <= {""} if name == "endless stream" else got == text
        assert type(raised) is error if error is openai.APIError else _is(raised, error)
        assert [r.cause for r in reports] == [cause]
        assert finishes == (["stop"] if cause is Cause.FINISHED else [])
        usage = reports[0].usage
        if cause is Cause.FINISHED:
            counted = name in {"missing usage", "comments", "no [DONE]"}
            assert usage.source is (UsageSource.COUNTED if counted else UsageSource.ENGINE)
            assert usage.completion == 2

    uvloop.run(asyncio.wait_for(main(), 15))


def _is(raised, error):
    return raised is None if error is None else isinstance(raised, error)


@pytest.mark.parametrize("name", UNSTREAMED)
def test_unstreamed(name):
    script, text, error, cause = UNSTREAMED[name]

    async def main():
        got, raised, _, reports = await observe(script, streamed=False)
        assert got == text
        assert _is(raised, error)
        assert [r.cause for r in reports] == [cause]
        if cause is Cause.FINISHED:
            assert reports[0].usage.completion == 2

    uvloop.run(asyncio.wait_for(main(), 15))


@pytest.mark.parametrize(
    ("name", "streamed"),
    [(n, True) for n, c in STREAMED.items() if c[3] in {Cause.REFUSED, Cause.TIMEOUT} and not c[1]]
    + [(n, False) for n, c in UNSTREAMED.items() if c[3] in {Cause.REFUSED, Cause.TIMEOUT}],
)
def test_before_the_first_content_another_replica_answers_unseen(name, streamed):
    """The whole text once, whatever the first engine had sent before it failed."""
    script = (STREAMED if streamed else UNSTREAMED)[name][0]
    spare = always(GOOD_STREAM if streamed else GOOD)

    async def main():
        got, raised, finishes, reports = await observe(script, streamed=streamed, spare=spare)
        assert (got, raised) == ("one two", None)
        assert finishes == (["stop"] if streamed else [])
        assert [r.cause for r in reports][1:] == [Cause.FINISHED]
        assert reports[0].retryable

    uvloop.run(asyncio.wait_for(main(), 15))


@pytest.mark.parametrize("name", [n for n, c in STREAMED.items() if c[3] is Cause.INTERRUPTED])
def test_after_the_first_content_nothing_is_sent_twice(name):
    """`gateways.md` 4.H.6: no restart, an error event, then the end; the spare is never asked."""

    async def main():
        got, raised, _, reports = await observe(
            STREAMED[name][0], streamed=True, spare=always(GOOD_STREAM)
        )
        assert got == "one"
        assert isinstance(raised, openai.APIError)
        assert [r.cause for r in reports] == [Cause.INTERRUPTED]
        assert not reports[0].retryable

    uvloop.run(asyncio.wait_for(main(), 15))


@pytest.mark.parametrize("asked", [False, True])
def test_usage_reaches_who_asked_and_nobody_else(asked):
    async def main():
        engine = ScriptedEngine(always(GOOD_STREAM))
        async with engine.running(), running_gateway(engine.url) as gateway:
            body = {
                "model": "m",
                "stream": True,
                "messages": [{"role": "user", "content": "x"}],
                **({"stream_options": {"include_usage": True}} if asked else {}),
            }
            async with httpx.AsyncClient() as client:
                reply = await client.post(f"{gateway.url}/chat/completions", json=body)
            assert b'"include_usage":' in engine.requests[0][1].replace(b" ", b"")
            assert (USAGE in reply.content) is asked
            assert reply.content.endswith(DONE)
            assert reply.headers["content-type"] == "text/event-stream"

    uvloop.run(asyncio.wait_for(main(), 15))


def test_an_interrupted_stream_ends_as_http_wants_it():
    """The error is seen in the events; the message itself is whole, and the connection closes."""

    async def main():
        engine = ScriptedEngine(once(SSE_HEAD, chunk(word("one"))))
        async with engine.running(), running_gateway(engine.url) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            body = b'{"model":"m","stream":true,"messages":[{"content":"x"}]}'
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            wire = await reader.read()
            writer.close()
            assert wire.count(word("one")) == 1
            assert b'"code":"stream_interrupted"' in wire
            assert b"[DONE]" not in wire
            assert wire.endswith(LAST_CHUNK)

    uvloop.run(asyncio.wait_for(main(), 15))


def table():
    """The cases as a Markdown table, observed."""
    print("| engine | what the SDK gets | attempts |\n|---|---|---|")  # noqa: T201
    for streamed, cases in ((True, STREAMED), (False, UNSTREAMED)):
        for name, case in cases.items():
            text, error, finishes, reports = uvloop.run(observe(case[0], streamed=streamed))
            kind = "stream" if streamed else "JSON"
            shown = text if len(text) < 12 else text[:8] + "..."
            raised = f" then {type(error).__name__}" if error else f" {finishes}"
            causes = ", ".join(r.cause for r in reports)
            print(f"| {kind}, {name} | {shown!r}{raised} | {causes} |")  # noqa: T201


if __name__ == "__main__":
    table()
