"""The unchanged OpenAI SDK against real llama.cpp engines behind the whole gateway."""

import asyncio
import time
from contextlib import ExitStack

import httpx
import openai
import pytest

from sluice.assembly import gateway_of
from sluice.settings import Settings
from tests.fakes.whole_gateway import LoopThread, left_behind

pytestmark = pytest.mark.integration

KEY = "sk-test"
QUESTION = [{"role": "user", "content": "Name three colours of the rainbow."}]


def settings(cache) -> Settings:
    return Settings.model_validate(
        {
            "server": {"port": 0, "drain_ms": 500},
            "models": {"smollm2-135m": {"variants": {"q8": {}, "q4": {}}}},
            "fleet": [
                {
                    "kind": "local",
                    "name": name,
                    "variant": name,
                    "precision": precision,
                    "slots": 2,
                    "context": 512,
                }
                for name, precision in (("q8", "q8_0"), ("q4", "q4_0"))
            ],
            "logs": {"decisions": None},
            "local_cache": str(cache),
        }
    )


@pytest.fixture(scope="module")
def running(local_cache):
    with ExitStack() as stack:
        loop = stack.enter_context(LoopThread())
        gateway = stack.enter_context(loop.holding(lambda: gateway_of(settings(local_cache))))
        yield gateway, loop


@pytest.fixture
def gateway(running):
    return running[0]


@pytest.fixture
def api(gateway):
    options = {"base_url": f"{gateway.url}/v1", "api_key": KEY, "max_retries": 0, "timeout": 120}
    with openai.OpenAI(**options) as client:
        yield client


def free(running, within=1.0, engines_within=6.0):
    """Wait until the gateway, then the engines, hold nothing; seconds it took.

    An engine sees a closed socket between two steps, and a step is long while other tests want the
    same cores, so it has more time than the gateway; on an idle machine it needs 50 ms.
    """
    gateway, loop = running

    async def empty():
        return left_behind(gateway)

    began = time.monotonic()
    while left := loop.run(empty()):
        assert time.monotonic() - began < within, left
    with httpx.Client(trust_env=False) as http:
        for replica in gateway.shell.fleet.replicas:
            while any(
                slot["is_processing"]
                for slot in http.get(f"{replica.url}/slots", timeout=10).json()
            ):
                assert time.monotonic() - began < engines_within, replica.name
    return time.monotonic() - began


def ask(api, **options):
    asked = {
        "model": "smollm2-135m",
        "messages": QUESTION,
        "max_tokens": 12,
        "temperature": 0,
    } | options
    return api.chat.completions.create(**asked)


def text_of(chunks):
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_models_are_listed(api):
    assert [m.id for m in api.models.list()] == ["smollm2-135m", "auto"]
    assert api.models.retrieve("smollm2-135m").id == "smollm2-135m"


def test_real_text_the_same_streamed_or_not_and_every_time(api):
    """At temperature 0 one variant gives one text; the quality floor holds it to the full one."""
    best = {"x-slo-quality": "1.0"}
    whole = ask(api, extra_headers=best)
    text = whole.choices[0].message.content
    assert len(text.split()) > 3
    assert whole.usage.completion_tokens > 3
    for _ in range(2):
        assert text_of(ask(api, stream=True, extra_headers=best)) == text
    assert ask(api, extra_headers=best).choices[0].message.content == text


def test_usage_comes_only_when_asked_for(api):
    without = list(ask(api, stream=True))
    assert all(c.usage is None for c in without)
    assert all(c.choices for c in without)
    asked = list(ask(api, stream=True, stream_options={"include_usage": True}))
    assert asked[-1].choices == []
    assert asked[-1].usage.completion_tokens >= 1
    assert asked[-1].usage.prompt_tokens > 5


def test_async_clients_share_the_fleet(gateway):
    async def run():
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0, timeout=120
        ) as api:

            async def one(i):
                stream = await api.chat.completions.create(
                    model="auto",
                    messages=[{"role": "user", "content": f"Say the number {i}."}],
                    max_tokens=6,
                    stream=True,
                )
                return [c async for c in stream]

            return await asyncio.gather(*(one(i) for i in range(8)))

    answers = asyncio.run(run())
    assert all(text_of(a) for a in answers)
    assert all(a[-1].choices[0].finish_reason in {"stop", "length"} for a in answers)


@pytest.mark.parametrize(
    ("options", "error", "code"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found"),
        ({"messages": []}, openai.BadRequestError, "invalid_request"),
        (
            {"messages": [{"role": "user", "content": "word " * 3000}]},
            openai.BadRequestError,
            "context_length_exceeded",
        ),
    ],
)
def test_errors_are_what_sdk_users_catch(api, options, error, code):
    with pytest.raises(error) as caught:
        ask(api, **options)
    assert caught.value.code == code
    assert caught.value.request_id.startswith("req-")


def test_a_client_that_times_out_or_cancels_frees_everything(running, api):
    with pytest.raises(openai.APITimeoutError):
        ask(api.with_options(timeout=0.3), max_tokens=60)
    # This build of llama.cpp sees a closed socket only when it writes to it, so an answer in one
    # piece is generated to its end; the gateway's own books are free at once.
    free(running, engines_within=60)
    stream = ask(api, max_tokens=400, stream=True)
    for _ in range(3):
        next(stream)
    stream.close()
    free(running)


def test_a_client_that_leaves_the_queue_frees_its_place(running, gateway):
    async def run():
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0, timeout=120
        ) as api:

            async def one():
                stream = await api.chat.completions.create(
                    model="auto", messages=QUESTION, max_tokens=300, stream=True
                )
                async for _ in stream:
                    pass

            asking = [asyncio.ensure_future(one()) for _ in range(10)]
            async with asyncio.timeout(30):
                while gateway.shell.queued < 2:  # noqa: ASYNC110 - looks from outside
                    await asyncio.sleep(0.01)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(run())
    free(running)


def test_predictions_and_outcomes_join(running, api):
    """Every finished request has one record with its prediction and the engine's own count."""
    before = {r["id"] for r in running[0].log.recent()}
    answer = api.chat.completions.with_raw_response.create(
        model="auto", messages=QUESTION, max_tokens=8, stream=True
    )
    list(answer.parse())
    free(running, within=5)
    new = [r for r in running[0].log.recent() if r["id"] not in before]
    assert [r["id"] for r in new] == [answer.headers["x-request-id"]]
    record = new[0]
    assert record["replica"] == answer.headers["x-sluice-replica"]
    assert record["outcome"]["usage_source"] == "engine"
    assert record["predicted"]["ttft"] == sorted(record["predicted"]["ttft"])
    assert record["candidates"][0]["route"] in {"q8", "q4"}
