"""Two whole gateways that agree through one real store, and what happens when it goes away."""

import asyncio

import httpx
import pytest

from gateway.tenants import hash_of
from tests.fakes.paced_engine import PacedEngine
from tests.fakes.store_server import StoreServer
from tests.fakes.whole_gateway import serving, settled

pytestmark = pytest.mark.integration

KEY = "k-one"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}


@pytest.fixture
def sections(monkeypatch):
    """Config of a gateway on a fresh store, with a tenant that may have two requests open."""
    with StoreServer() as server:
        monkeypatch.setenv("SLUICE_REDIS_URL", server.url)
        quota = {"concurrency": 2}
        yield (
            server,
            {
                "tenants": {"t": {"keys": {"k": {"hash": hash_of(KEY)}}, "quota": quota}},
                "store": {"kind": "redis", "answer_timeout_ms": 2000},
            },
        )


def client(gateway):
    return httpx.AsyncClient(
        base_url=gateway.url,
        trust_env=False,
        timeout=20,
        headers={"authorization": f"Bearer {KEY}"},
    )


async def ask(http, **changes):
    return await http.post("/v1/chat/completions", json=BODY | changes)


def named(sections, name):
    return sections | {"store": sections["store"] | {"gateway": name}}


def test_a_limit_holds_over_both_gateways(sections):
    _, config = sections

    async def run():
        engine = PacedEngine(slots=8, pace=0.02)
        async with (
            engine.running(),
            serving(engine.url, **named(config, "a")) as one,
            serving(engine.url, **named(config, "b")) as two,
            client(one) as http_one,
            client(two) as http_two,
        ):
            answers = await asyncio.gather(*(ask(h) for h in (http_one, http_two) * 3))
            codes = sorted(a.status_code for a in answers)
            assert codes == [200, 200, 429, 429, 429, 429]
            await settled(one)
            await settled(two)
            later = await asyncio.gather(ask(http_one), ask(http_two))
            assert [a.status_code for a in later] == [200, 200]
            assert "x-sluice-degraded" not in later[0].headers

    asyncio.run(run())


def test_a_store_that_is_away_degrades_and_says_so(sections):
    server, config = sections
    config = config | {"store": config["store"] | {"answer_timeout_ms": 100}}

    async def run():
        engine = PacedEngine()
        async with engine.running(), serving(engine.url, **named(config, "a")) as gateway:
            async with client(gateway) as http:
                assert (await ask(http)).status_code == 200
                await asyncio.to_thread(server.kill)
                statuses, degraded = [], False
                async with asyncio.timeout(10):
                    while not degraded:
                        answer = await ask(http)
                        statuses.append(answer.status_code)
                        degraded = answer.headers.get("x-sluice-degraded") == "store"
                assert set(statuses) == {200}  # never a false 429
                text = (await http.get("/metrics")).text
                assert "sluice_store_degraded 1.0" in text
            await settled(gateway)

    asyncio.run(run())
