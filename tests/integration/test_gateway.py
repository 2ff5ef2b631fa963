"""The whole gateway over scripted engines: answers, refusals, deaths, disconnects, logs."""

import asyncio
import contextlib
import gc
import json
import random
import time

import httpx
import openai
import pytest

from backends.breaker import State
from backends.wire.openai import SURFACES
from gateway.event_log import read, read_header, replay
from gateway.relay import Relay
from gateway.tenants import hash_of
from sluice.recorded import core_of
from tests.fakes.engine import refused_url
from tests.fakes.paced_engine import PacedEngine
from tests.fakes.whole_gateway import left_behind, serving, settings_for, settled

pytestmark = pytest.mark.integration

PROMPT = [{"role": "user", "content": "hello there"}]


def client(gateway, **options):
    return openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1", api_key="k", max_retries=0, timeout=20, **options
    )


async def tokens(stream):
    return [
        c.choices[0].delta.content async for c in stream if c.choices and c.choices[0].delta.content
    ]


def test_streamed_and_whole_answers_say_where_they_come_from():
    async def run():
        async with PacedEngine().running() as engine, serving(engine.url) as gateway:
            async with client(gateway) as api:
                answer = await api.chat.completions.with_raw_response.create(
                    model="m", messages=PROMPT, max_tokens=5
                )
                headers = answer.headers
                assert headers["x-sluice-replica"] == "r0"
                assert headers["x-sluice-variant"] == "v"
                assert headers["x-request-id"].startswith("req-")
                assert 0 <= float(headers["x-sluice-p-slo"]) <= 1
                assert float(headers["x-sluice-predicted-ttft-ms"]) > 0
                assert answer.parse().usage.completion_tokens == 5
                stream = await api.chat.completions.create(
                    model="auto", messages=PROMPT, max_tokens=4, stream=True
                )
                assert await tokens(stream) == ["w0 ", "w1 ", "w2 ", "w3 "]
            assert engine.bodies[0]["model"] == "paced"  # the engine's own name was spliced in
            assert engine.bodies[1]["stream_options"] == {"include_usage": True}
            await settled(gateway)
            cause = [r["outcome"]["cause"] for r in gateway.log.recent()]
            counted = [r["outcome"]["usage_source"] for r in gateway.log.recent()]
            assert cause == ["finished", "finished"]
            assert counted == ["engine", "engine"]

    asyncio.run(run())


def test_models_health_metrics_dashboard_and_unknown_paths():
    async def run():
        async with PacedEngine().running() as engine, serving(engine.url) as gateway:
            async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
                listed = (await http.get("/v1/models")).json()
                assert [m["id"] for m in listed["data"]] == ["m", "auto"]
                assert (await http.get("/v1/models/m")).json()["object"] == "model"
                missing = await http.get("/v1/models/none")
                assert missing.status_code == 404
                assert missing.json()["error"]["code"] == "model_not_found"
                assert (await http.get("/health")).json() == {"status": "ok"}
                assert (await http.get("/ready")).json()["ready"] is True
                assert "sluice_open 0.0" in (await http.get("/metrics")).text
                assert "<title>Sluice</title>" in (await http.get("/")).text
                unknown = await http.get("/nope")
                assert unknown.status_code == 404
                assert set(unknown.json()["error"]) == {"message", "type", "param", "code"}
                status = (await http.get("/admin/status")).json()
                assert [r["name"] for r in status["replicas"]] == ["r0"]

    asyncio.run(run())


TENANTS = {
    "big": {"keys": {"k": {"hash": hash_of("k-big")}}, "class": "gold"},
    "small": {
        "keys": {"k": {"hash": hash_of("k-small")}},
        "class": "bronze",
        "quota": {"concurrency": 1, "requests_per_minute": 100},
    },
    "narrow": {"keys": {"k": {"hash": hash_of("k-narrow")}}, "models": []},
}
CLASSES = {
    "gold": {"rank": 0, "ttft_ms": 5000},
    "standard": {"rank": 1},
    "bronze": {"rank": 2, "e2e_ms": 60000},
}


@pytest.mark.parametrize(
    ("key", "headers", "body", "status", "code"),
    [
        ("nobody", {}, {}, 401, "invalid_api_key"),
        ("k-big", {}, {"model": "x"}, 404, "model_not_found"),
        ("k-narrow", {}, {}, 403, "model_forbidden"),
        ("k-big", {}, {"messages": []}, 400, "invalid_request"),
        ("k-big", {"x-slo-ttft-ms": "soon"}, {}, 400, "invalid_request"),
        ("k-big", {"x-slo-class": "lead"}, {}, 400, "invalid_request"),
        ("k-small", {"x-slo-class": "gold"}, {}, 403, "model_forbidden"),
        ("k-big", {"x-slo-ttft-ms": "0.001"}, {"stream": True}, 503, "slo_unreachable"),
        (
            "k-big",
            {},
            {"messages": [{"role": "user", "content": "x " * 20_000}]},
            400,
            "context_length_exceeded",
        ),
    ],
)
def test_refusals(key, headers, body, status, code):
    async def run():
        async with PacedEngine().running() as engine:
            async with serving(engine.url, tenants=TENANTS, classes=CLASSES) as gateway:
                async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
                    answer = await http.post(
                        "/v1/chat/completions",
                        json={"model": "m", "messages": PROMPT, "max_tokens": 4} | body,
                        headers={"authorization": f"Bearer {key}"} | headers,
                    )
                assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
                assert answer.headers["x-request-id"]
                if status == 503:
                    assert int(answer.headers["retry-after"]) >= 1
                assert engine.bodies == []
                await settled(gateway)

    asyncio.run(run())


def test_concurrency_limit_is_a_429_and_costs_nothing():
    async def run():
        async with PacedEngine(pace=0.05).running() as engine:
            async with serving(engine.url, tenants=TENANTS, classes=CLASSES) as gateway:
                async with client(gateway) as api:
                    api.api_key = "k-small"
                    first = await api.chat.completions.create(
                        model="m", messages=PROMPT, max_tokens=10, stream=True
                    )
                    with pytest.raises(openai.RateLimitError) as caught:
                        await api.chat.completions.create(model="m", messages=PROMPT, max_tokens=1)
                    rates = caught.value.response.headers
                    assert rates["x-ratelimit-limit-requests"] == "100"
                    assert int(rates["retry-after"]) >= 1
                    assert len(await tokens(first)) == 10
                    await api.chat.completions.create(model="m", messages=PROMPT, max_tokens=1)
                await settled(gateway)

    asyncio.run(run())


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_a_client_that_leaves_frees_everything_within_a_second(phase):
    """`gateways.md` 4.H.1: upstream cancelled, slot, gauge and reservation released, once."""
    quota = {"concurrency": 10, "tokens_per_minute": 60_000}
    tenants = {"t": {"keys": {"k": {"hash": hash_of("k")}}, "quota": quota}}

    async def run():
        engine = PacedEngine(slots=1, pace=0.05, prefill=5 if phase == "prefill" else 0.01)
        async with (
            engine.running(),
            serving(engine.url, tenants=tenants) as gateway,
            client(gateway) as api,
        ):
            account = gateway.shell._core.account("t")

            def held():
                return account.usage(time.monotonic())["tenant"]

            asked = {"model": "m", "messages": PROMPT, "max_tokens": 500, "stream": True}
            running = asyncio.ensure_future(api.chat.completions.create(**asked))
            await until(lambda: held().running == 1)
            if phase == "decode":
                stream = await running
                await anext(aiter(stream))
                await stream.close()
            elif phase == "prefill":
                await until(lambda: engine.busy == 1)
                running.cancel()
            else:
                blocking = await running
                waiting = asyncio.ensure_future(api.chat.completions.create(**asked))
                await until(lambda: gateway.shell.queued == 1)
                waiting.cancel()
                await until(lambda: gateway.shell.open_requests == 1)
                assert engine.busy == 1
                await blocking.close()
            await settled(gateway, within=1.0)
            await until(lambda: engine.busy == 0, within=1.0)
            assert held().running == 0
            assert held().level > 0.99 * held().burst  # 500 tokens were reserved, few were used
            text = gateway.metrics.text().decode()
            assert "sluice_open 0.0" in text
            assert 'sluice_replica_running{replica="r0"} 0.0' in text

    asyncio.run(run())


def test_an_engine_s_4xx_neither_opens_nor_closes_its_breaker():
    """`gateways.md` 4.H.7: the client's fault says nothing about the replica."""

    async def run():
        engine = PacedEngine()
        engine.refusing = True
        breaker = {"failures": 2, "pause_ms": 50}
        async with (
            engine.running(),
            serving(engine.url, breaker=breaker) as gateway,
            client(gateway) as api,
        ):
            (seat,) = gateway.shell.seats
            for _ in range(6):
                with pytest.raises(openai.BadRequestError, match="no such template"):
                    await api.chat.completions.create(model="m", messages=PROMPT, max_tokens=2)
            assert seat.breaker.state is State.CLOSED
            assert len(engine.bodies) == 6  # none was tried again

            engine.refusing, engine.failing = False, True
            for _ in range(2):
                with pytest.raises(openai.APIStatusError):
                    await api.chat.completions.create(model="m", messages=PROMPT, max_tokens=2)
            assert seat.breaker.state is not State.CLOSED
            engine.refusing, engine.failing = True, False
            await until(lambda: seat.breaker.state is State.HALF_OPEN)
            with pytest.raises(openai.BadRequestError):
                await api.chat.completions.create(model="m", messages=PROMPT, max_tokens=2)
            assert seat.breaker.state is State.HALF_OPEN
            engine.refusing = False
            await api.chat.completions.create(model="m", messages=PROMPT, max_tokens=2)
            assert seat.breaker.state is State.CLOSED

    asyncio.run(run())


@pytest.mark.parametrize("path", SURFACES)
def test_every_route_runs_through_quota_and_log(path):
    """`gateways.md` 4.H.9: no `/v1/*` route is outside the one place that counts."""
    tenants = {"t": {"keys": {"k": {"hash": hash_of("k")}}, "quota": {"requests_per_minute": 1}}}
    body = {"model": "m", "messages": PROMPT, "prompt": "x", "input": "x", "max_tokens": 1}
    if b"completions" not in path:
        del body["messages"], body["max_tokens"]

    async def run():
        engine = PacedEngine()
        async with engine.running(), serving(engine.url, tenants=tenants) as gateway:
            headers = {"authorization": "Bearer k"}
            async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
                answers = [
                    await http.post(path.decode(), json=body, headers=headers) for _ in range(2)
                ]
            assert [a.status_code for a in answers] == [200, 429]
            assert len(engine.bodies) == 1
            for answer in answers:
                assert gateway.log.find(answer.headers["x-request-id"])["tenant"] == "t"

    asyncio.run(run())


async def until(condition, within=5.0):
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110 - looks from outside
            await asyncio.sleep(0.002)


def test_a_replica_that_refuses_is_retried_elsewhere_unseen():
    async def run():
        bad, good = PacedEngine(), PacedEngine()
        bad.failing = True
        async with bad.running(), good.running(), serving(bad.url, good.url) as gateway:
            async with client(gateway) as api:
                for _ in range(200):  # equal replicas are told apart by chance: three will go there
                    answer = await api.chat.completions.with_raw_response.create(
                        model="m", messages=PROMPT, max_tokens=2
                    )
                    assert answer.headers["x-sluice-replica"] == "r1"
                    if not gateway.shell.seats[0].breaker.admits():
                        break
            assert len(bad.bodies) == 3  # three failures in a row opened its breaker
            await settled(gateway)
            bad.failing = False
            await until(lambda: gateway.shell.seats[0].usable)
            async with client(gateway) as api:
                await until_served(api, "r0")
            assert gateway.shell.seats[0].breaker.state.value == "closed"

    asyncio.run(run())


async def until_served(api, replica):
    """Ask until this replica answers."""
    for _ in range(50):
        answers = await asyncio.gather(
            *(
                api.chat.completions.with_raw_response.create(
                    model="m", messages=PROMPT, max_tokens=2
                )
                for _ in range(4)
            )
        )
        if replica in {a.headers["x-sluice-replica"] for a in answers}:
            return
    raise AssertionError(f"{replica} never served")


def test_what_ended_is_freed_at_once_not_by_the_garbage_collector():
    async def run():
        bad, good = PacedEngine(), PacedEngine()
        bad.failing = True
        async with bad.running(), good.running(), serving(bad.url, good.url) as gateway:
            async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
                path, body = "/v1/chat/completions", {"model": "m", "messages": PROMPT}
                gc.collect()
                gc.disable()
                try:
                    for _ in range(5):
                        for more in ({}, {"stream": True}, {"max_tokens": -1}):
                            await http.post(path, json={"max_tokens": 3} | body | more)
                        gone = body | {"max_tokens": 1000, "stream": True}
                        async with http.stream("POST", path, json=gone) as answer:
                            assert await anext(answer.aiter_lines())
                    await settled(gateway)
                    assert gateway.log.recent()  # what waits to be logged is still held
                    assert [o for o in gc.get_objects() if type(o) is Relay] == []
                finally:
                    gc.enable()

    asyncio.run(run())


def test_a_replica_that_dies_mid_stream_ends_with_an_error_event():
    async def run():
        engine = PacedEngine(pace=0.02)
        async with engine.running(), serving(engine.url) as gateway:
            async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
                body = {"model": "m", "messages": PROMPT, "max_tokens": 100, "stream": True}
                async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                    text = ""
                    async for piece in answer.aiter_text():
                        text += piece
                        if text.count("w2") == 1 and engine.busy:
                            await engine.kill()
            last = text.strip().split("\n\n")[-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stream_interrupted"
            assert "[DONE]" not in text
            await settled(gateway)
            record = gateway.log.recent()[0]
            assert record["outcome"]["cause"] == "interrupted"
            assert record["outcome"]["miss"] == "engine"

    asyncio.run(run())


def test_a_replica_that_is_not_there_yet_joins_when_it_is():
    async def run():
        late = PacedEngine()
        url = await refused_url()
        late.port = int(url.rsplit(":", 1)[1])
        async with serving(url) as gateway, client(gateway) as api:
            with pytest.raises(openai.InternalServerError) as caught:
                await api.chat.completions.create(model="m", messages=PROMPT, max_tokens=2)
            assert caught.value.code == "no_replica"
            assert not gateway.shell.ready
            await late.start()
            try:
                await until(lambda: gateway.shell.ready)
                await api.chat.completions.create(model="m", messages=PROMPT, max_tokens=2)
            finally:
                await late.kill()

    asyncio.run(run())


def test_no_first_token_in_time_is_a_504():
    async def run():
        engine = PacedEngine()
        engine.silent = True
        limits = {"first_token_ms": 100}
        async with engine.running(), serving(engine.url, timeouts=limits) as gateway:
            async with client(gateway) as api:
                with pytest.raises(openai.APIStatusError) as caught:
                    await api.chat.completions.create(
                        model="m", messages=PROMPT, max_tokens=2, stream=True
                    )
            assert caught.value.status_code == 504
            assert caught.value.code == "backend_timeout"
            await settled(gateway)

    asyncio.run(run())


def test_draining_refuses_what_is_new_and_finishes_what_runs():
    async def run():
        engine = PacedEngine(pace=0.02)
        async with engine.running(), serving(engine.url) as gateway, client(gateway) as api:
            stream = await api.chat.completions.create(
                model="m", messages=PROMPT, max_tokens=20, stream=True
            )
            draining = asyncio.ensure_future(gateway.shell.drain(5.0))
            await until(lambda: gateway.shell.draining)
            with pytest.raises(openai.InternalServerError) as caught:
                await api.chat.completions.create(model="m", messages=PROMPT, max_tokens=1)
            assert caught.value.code == "shutting_down"
            assert len(await tokens(stream)) == 20
            await draining
            assert not gateway.shell.ready

    asyncio.run(run())


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://elsewhere.example"},
        {"origin": "null"},
        {"host": "elsewhere.example"},
        {"host": "[bad"},
        {"x-forwarded-for": "10.0.0.1"},
        {"forwarded": "for=10.0.0.1"},
    ],
)
def test_without_an_admin_key_pages_and_proxies_do_not_administer(headers):
    """A browser on this machine posts for any page; a proxy on it for anybody."""

    async def run():
        engine = PacedEngine()
        async with engine.running(), serving(engine.url) as gateway:
            async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
                path = "/admin/replicas/r0/drain"
                assert (await http.post(path, headers=headers)).status_code == 401
                assert gateway.shell.seats[0].usable
                own = {"origin": gateway.url}
                assert (await http.post(path, headers=own)).json()["usable"] is False

    asyncio.run(run())


def test_a_drained_replica_gets_nothing_new():
    async def run():
        one, two = PacedEngine(), PacedEngine()
        async with one.running(), two.running(), serving(one.url, two.url) as gateway:
            async with (
                httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http,
                client(gateway) as api,
            ):
                assert (await http.post("/admin/replicas/r0/drain")).json()["usable"] is False
                for _ in range(5):
                    await api.chat.completions.create(model="m", messages=PROMPT, max_tokens=1)
                assert (one.served, two.served) == (0, 5)
                assert (await http.post("/admin/replicas/r0/restore")).json()["usable"] is True
                await until_served(api, "r0")

    asyncio.run(run())


async def history(gateway, engines, rng, count):
    """Random requests of which many end badly: cancelled, timed out, refused, cut off."""
    room = asyncio.Semaphore(24)

    async def one(http):
        stream = rng.random() < 0.7
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "x " * rng.randrange(1, 200)}],
            "max_tokens": rng.randrange(1, 40),
            "stream": stream,
        }
        headers = {}
        if rng.random() < 0.2:
            headers["x-slo-ttft-ms"] = str(rng.choice([1, 20, 200]))
        patience = rng.choice([0.001, 0.01, 0.05, 10, 10, 10])
        async with room:
            with contextlib.suppress(TimeoutError, httpx.HTTPError):
                async with asyncio.timeout(patience):
                    await http.post("/v1/chat/completions", json=body, headers=headers)

    async def trouble():
        while True:
            await asyncio.sleep(rng.uniform(0.02, 0.2))
            engine = rng.choice(engines)
            match rng.randrange(4):
                case 0:
                    await engine.kill()
                    await asyncio.sleep(rng.uniform(0.0, 0.1))
                    await engine.start()
                case 1:
                    engine.failing = not engine.failing
                case 2:
                    engine.silent = not engine.silent
                case _:
                    engine.failing = engine.silent = False

    async with httpx.AsyncClient(
        base_url=gateway.url, trust_env=False, timeout=30, limits=httpx.Limits(max_connections=64)
    ) as http:
        making = asyncio.ensure_future(trouble())
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(count):
                    tasks.create_task(one(http))
                    await asyncio.sleep(rng.expovariate(150))
        finally:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)


@pytest.mark.parametrize(("count", "seed"), [(80, 1), pytest.param(500, 2, marks=pytest.mark.slow)])
def test_random_histories_leave_nothing_and_replay_identically(tmp_path, count, seed):
    """Whatever happens to requests: no booking, slot or queue entry stays, every request is logged
    once, and a fresh core fed the event log acts the same.
    """
    events = tmp_path / "events.bin"

    async def run():
        engines = [PacedEngine(slots=2 + i, pace=0.002 * (i + 1)) for i in range(3)]
        async with contextlib.AsyncExitStack() as stack:
            for engine in engines:
                await stack.enter_async_context(engine.running())
            gateway = await stack.enter_async_context(
                serving(
                    *(e.url for e in engines),
                    timeouts={"first_token_ms": 150, "between_tokens_ms": 150, "total_ms": 600},
                    breaker={"failures": 2, "pause_ms": 50, "longest_pause_ms": 100},
                    # Nothing is refused early: what is not let in has no history.
                    policy={"kind": "best_fit", "shed_below": 0.0, "overload_target": 0.0},
                    logs={"decisions": tmp_path / "d.jsonl", "events": events},
                )
            )
            await history(gateway, engines, random.Random(seed), count)
            await settled(gateway, within=3.0)
            for engine in engines:
                await until(lambda e=engine: e.busy == 0)

    asyncio.run(run())
    lines = [json.loads(line) for line in (tmp_path / "d.jsonl").read_bytes().splitlines()]
    ids = [line["id"] for line in lines]
    assert len(ids) == len(set(ids))
    assert count * 0.4 <= len(ids) <= count  # a client may leave before its request is whole
    causes = {line["outcome"]["cause"] for line in lines}
    assert {"finished", "client_gone"} < causes  # and at least one more, which chance decides
    result = replay(read(events), core_of(read_header(events)).handle)
    assert result.differs_at is None, result.differing
    assert result.events > 3 * len(ids)


def test_the_checks_for_leftovers_see_a_leftover():
    async def run():
        engine = PacedEngine(pace=0.05)
        async with engine.running(), serving(engine.url) as gateway, client(gateway) as api:
            stream = await api.chat.completions.create(
                model="m", messages=PROMPT, max_tokens=50, stream=True
            )
            await anext(aiter(stream))
            assert {"open", "running", "core open", "streams", "kv_used"} <= set(
                left_behind(gateway)
            )
            await stream.close()
            await settled(gateway)

    asyncio.run(run())


def test_settings_for_engines_validate():
    assert settings_for("http://127.0.0.1:1").fleet[0].name == "r0"
