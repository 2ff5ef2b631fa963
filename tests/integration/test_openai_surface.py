"""The OpenAI surface through the unchanged SDK: what clients and engines send passes unharmed."""

import asyncio
import json

import httpx
import openai
import pytest
import uvloop

from backends.upstream import UpstreamPool
from backends.wire.openai import SURFACES, RequestParser
from gateway.asgi import answer as asgi_answer
from gateway.relay import ClientRequest, Plane
from tests.fakes.dispatcher import LeastRequests
from tests.fakes.engine import (
    ANSWER,
    DONE,
    ROLE,
    STOP,
    USAGE,
    ScriptedEngine,
    always,
    answer,
    chunk,
    event,
    stream,
    word,
)
from tests.fakes.engine import SSE_HEAD as HEAD
from tests.fakes.gateway import running_gateway

pytestmark = pytest.mark.integration


def serve(wire, ask, **options):
    """Answer with `wire`; run `ask(client)`; return its result and the request the engine got."""

    async def main():
        engine = ScriptedEngine(always(wire))
        async with engine.running(), running_gateway(engine.url, **options) as gateway:
            client = openai.AsyncOpenAI(base_url=gateway.url, api_key="k", max_retries=0)
            async with client:
                result = await ask(client)
            head, body = engine.requests[0]
            return result, head.split(b" ")[1], json.loads(body), gateway.reports()

    return uvloop.run(asyncio.wait_for(main(), 20))


async def collect(pending):
    return [part async for part in await pending]


TOOLS = [
    {
        "type": "function",
        "function": {"name": "get", "parameters": {"type": "object", "properties": {}}},
    }
]
RICH = {
    "model": "m",
    "messages": [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what is this? ☃"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
            ],
        },
    ],
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    "logprobs": True,
    "top_logprobs": 2,
    "n": 2,
    "stop": ["\n", "END"],
    "seed": 7,
    "temperature": 0,
    "logit_bias": {"50256": -100},
    "user": "u",
}
UNKNOWN = {"guided_json": {"a": [1, 2.5, None]}, "min_p": 0.1, "vllm_xargs": {"x": "y"}}


def test_everything_a_client_sends_reaches_the_engine_unharmed():
    async def ask(client):
        return await client.chat.completions.create(**RICH, extra_body=UNKNOWN)

    reply, path, body, _ = serve(answer(), ask)
    assert path == b"/v1/chat/completions"
    assert body == {**RICH, **UNKNOWN}
    assert reply.choices[0].message.content == "one two"
    assert reply.usage.total_tokens == 9


def test_the_model_may_have_another_name_at_the_engine():
    async def ask(client):
        return await client.chat.completions.create(**RICH)

    _, _, body, _ = serve(answer(), ask, model="org/Model-7B:q4")
    assert body == {**RICH, "model": "org/Model-7B:q4"}


def tool_event(index, **call):
    return event(
        id="c",
        object="chat.completion.chunk",
        created=1,
        model="m",
        choices=[{"index": 0, "delta": {"tool_calls": [{"index": index, **call}]}}],
    )


def test_parallel_tool_calls_keep_their_indices():
    events = [
        ROLE,
        tool_event(0, id="a", type="function", function={"name": "get", "arguments": ""}),
        tool_event(0, function={"arguments": '{"x":'}),
        tool_event(0, function={"arguments": "1}"}),
        tool_event(1, id="b", type="function", function={"name": "get", "arguments": ""}),
        tool_event(1, function={"arguments": '{"y":2}'}),
        word("", "tool_calls"),
        USAGE,
        DONE,
    ]

    async def ask(client):
        return await collect(
            client.chat.completions.create(
                model="m", messages=RICH["messages"], tools=TOOLS, stream=True
            )
        )

    parts, _, _, reports = serve(stream(*events), ask)
    calls = {}
    for part in parts:
        for call in part.choices[0].delta.tool_calls or ():
            calls[call.index] = calls.get(call.index, "") + call.function.arguments
    assert calls == {0: '{"x":1}', 1: '{"y":2}'}
    reasons = [part.choices[0].finish_reason for part in parts]
    assert [reason for reason in reasons if reason] == ["tool_calls"]
    assert reports[0].usage.completion == 2


def test_two_choices_and_logprobs_pass_through_a_stream():
    def choice(index, text, finish=None):
        logprobs = {
            "content": [{"token": text, "logprob": -0.1, "bytes": None, "top_logprobs": []}]
        }
        return event(
            id="c",
            object="chat.completion.chunk",
            created=1,
            model="m",
            choices=[
                {
                    "index": index,
                    "delta": {"content": text} if text else {},
                    "logprobs": logprobs if text else None,
                    "finish_reason": finish,
                }
            ],
        )

    events = [choice(0, "a"), choice(1, "b"), choice(0, "", "stop"), choice(1, "", "length"), DONE]

    async def ask(client):
        return await collect(
            client.chat.completions.create(
                model="m", messages=RICH["messages"], n=2, logprobs=True, stream=True
            )
        )

    parts, _, _, _ = serve(stream(*events), ask)
    seen = [(p.choices[0].index, p.choices[0].finish_reason) for p in parts]
    assert seen == [(0, None), (1, None), (0, "stop"), (1, "length")]
    assert parts[0].choices[0].logprobs.content[0].token == "a"


@pytest.mark.parametrize("asked", [False, True])
def test_the_sdk_sees_usage_only_when_it_asked(asked):
    async def ask(client):
        options = {"stream_options": {"include_usage": True}} if asked else {}
        return await collect(
            client.chat.completions.create(
                model="m", messages=RICH["messages"], stream=True, **options
            )
        )

    parts, _, body, reports = serve(stream(ROLE, word("a"), STOP, USAGE, DONE), ask)
    assert body["stream_options"] == {"include_usage": True}
    assert [p.usage.total_tokens for p in parts if p.usage] == ([9] if asked else [])
    assert all(p.choices for p in parts) is not asked
    assert reports[0].usage.prompt == 7


def test_completions():
    def text(word_, finish=None):
        return event(
            id="c",
            object="text_completion",
            created=1,
            model="m",
            choices=[{"index": 0, "text": word_, "logprobs": None, "finish_reason": finish}],
        )

    async def ask(client):
        return await collect(
            client.completions.create(model="m", prompt="a", max_tokens=5, stream=True, echo=True)
        )

    parts, path, body, reports = serve(stream(text("x"), text("y", "stop"), USAGE, DONE), ask)
    assert path == b"/v1/completions"
    assert body["echo"] is True
    assert "".join(p.choices[0].text for p in parts) == "xy"
    assert reports[0].usage.completion == 2
    assert reports[0].first_token is not None


def test_embeddings_short_and_long():
    for dimensions in (4, 20_000):
        body = {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.25] * dimensions}],
            "model": "m",
            "usage": {"prompt_tokens": 3, "total_tokens": 3},
        }

        async def ask(client):
            return await client.embeddings.create(
                model="m", input=["a", "b"], encoding_format="float"
            )

        reply, path, sent, reports = serve(answer(json.dumps(body).encode()), ask)
        assert path == b"/v1/embeddings"
        assert sent["input"] == ["a", "b"]
        assert reply.data[0].embedding == [0.25] * dimensions
        assert reports[0].usage.prompt == 3


def response_event(kind, **body):
    return b"event: %b\n" % kind.encode() + event(type=kind, sequence_number=0, **body)


def test_responses():
    text = {"item_id": "i", "output_index": 0, "content_index": 0, "logprobs": []}
    whole = {
        "id": "r",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "status": "completed",
    }
    usage = {
        "input_tokens": 5,
        "output_tokens": 2,
        "total_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    events = [
        response_event("response.created", response={**whole, "status": "in_progress"}),
        response_event("response.output_text.delta", delta="one", **text),
        response_event("response.output_text.delta", delta=" two", **text),
        response_event("response.output_text.done", text="one two", **text),
        response_event("response.completed", response={**whole, "usage": usage}),
    ]

    async def ask(client):
        return await collect(client.responses.create(model="m", input="hi", stream=True))

    parts, path, body, reports = serve(stream(*events), ask)
    assert path == b"/v1/responses"
    assert "stream_options" not in body
    assert [p.type for p in parts][-1] == "response.completed"
    assert "".join(p.delta for p in parts if p.type.endswith("text.delta")) == "one two"
    used = reports[0].usage
    assert (used.prompt, used.completion, used.cached) == (5, 2, 4)


@pytest.mark.parametrize("field", [{"previous_response_id": "r"}, {"store": True}])
def test_responses_that_need_a_memory_are_refused(field):
    async def main():
        async with (
            running_gateway() as gateway,
            openai.AsyncOpenAI(base_url=gateway.url, api_key="k") as client,
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="m", input="hi", **field)
            assert caught.value.param == next(iter(field))

    uvloop.run(asyncio.wait_for(main(), 20))


# ---- under a foreign ASGI server


async def over_asgi(wire, body, script=None):
    """POST `body` to the relay behind an ASGI app, as uvicorn would; return the response."""
    engine = ScriptedEngine(script or always(wire))
    async with engine.running(), UpstreamPool(engine.url) as pool:
        dispatcher = LeastRequests([pool], max_attempts=1)
        plane = Plane(dispatcher=dispatcher, parser=RequestParser())

        async def app(scope, receive, send):
            message = await receive()
            request = ClientRequest(
                surface=SURFACES[scope["path"].encode()],
                headers=scope["headers"],
                body=message["body"],
                received_at=plane.clock(),
            )
            await asgi_answer(plane, request, receive, send)

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            reply = await client.post("/v1/chat/completions", json=body)
        return reply, dispatcher


CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize("streamed", [False, True])
def test_the_same_relay_answers_under_any_asgi_server(streamed):
    wire = stream(ROLE, word("a"), STOP, USAGE, DONE) if streamed else answer()

    async def main():
        reply, dispatcher = await over_asgi(wire, {**CHAT, "stream": streamed})
        assert reply.status_code == 200
        assert reply.headers["x-sluice-replica"] == "0"
        assert reply.content == (ROLE + word("a") + STOP + DONE if streamed else ANSWER)
        assert dispatcher.running == [0]

    uvloop.run(asyncio.wait_for(main(), 20))


def test_a_refusal_under_asgi():
    async def main():
        reply, _ = await over_asgi(answer(), {"model": "m"})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "messages"

    uvloop.run(asyncio.wait_for(main(), 20))


def test_a_client_that_leaves_an_asgi_server_frees_the_engine():
    async def main():
        async def script(engine, connection):
            await engine.take(connection)
            await connection.send(HEAD + chunk(ROLE) + chunk(word("a")))
            await connection.gone()
            engine.left.set()

        engine = ScriptedEngine(script)
        async with engine.running(), UpstreamPool(engine.url) as pool:
            dispatcher = LeastRequests([pool])
            plane = Plane(dispatcher=dispatcher, parser=RequestParser())
            request = ClientRequest(
                surface=SURFACES[b"/v1/chat/completions"],
                headers=[],
                body=json.dumps({**CHAT, "stream": True}).encode(),
                received_at=plane.clock(),
            )
            first = asyncio.Event()

            async def receive():
                await first.wait()
                return {"type": "http.disconnect"}

            async def send(message):
                if b"a" in message.get("body", b""):
                    first.set()

            await asgi_answer(plane, request, receive, send)
            await asyncio.wait_for(engine.left.wait(), 1)
            assert dispatcher.running == [0]
            assert dispatcher.calls[-1][0] == "client_gone"

    uvloop.run(asyncio.wait_for(main(), 20))
