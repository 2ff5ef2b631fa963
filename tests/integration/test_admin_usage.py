"""`/admin/usage`: what the meters have counted, in this process or over all gateways of a store."""

import asyncio
import contextlib

import httpx
import pytest

from gateway.tenants import hash_of
from tests.fakes.paced_engine import PacedEngine
from tests.fakes.store_server import StoreServer
from tests.fakes.whole_gateway import serving, settled

pytestmark = pytest.mark.integration

TENANTS = {
    "metered": {
        "keys": {
            "web": {"hash": hash_of("k-web"), "quota": {"concurrency": 4}},
            "batch": {"hash": hash_of("k-batch"), "quota": {"requests_per_minute": 60}},
        },
        "quota": {
            "requests_per_minute": 100,
            "tokens_per_minute": 0,  # no refill, so levels are exact
            "burst_tokens": 1000,
            "daily_tokens": 5000,
            "daily_cost": 10,
        },
        "model_quotas": {"m": {"daily_tokens": 4000}},
    },
    "idle": {"keys": {"k": {"hash": hash_of("k-idle")}}, "quota": {"concurrency": 1}},
}
NOTHING = {
    "running": 0,
    "requests_in_window": None,
    "level": None,
    "burst": None,
    "used_today": None,
    "cost_today": None,
}
USED = 7 + 5
"""Tokens of one request at the paced engine, as it tells them."""


@pytest.fixture(scope="module")
def server():
    with StoreServer() as running:
        yield running


async def ask(gateway, key, tokens=5):
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens}
        found = await http.post(
            "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
        )
    assert found.status_code == 200, found.text


async def usage(gateway, path="", **headers):
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        return await http.get(f"/admin/usage{path}", headers=headers)


async def until(check):
    """Wait for another process (the store) to have heard what was sent to it."""
    async with asyncio.timeout(10):
        while not await check():  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.01)


def metered(shared, requests, *, batch, running=0, reserved=0):
    """The tenant's answer after so many requests, of which `batch` with the second key."""
    used = USED * requests + reserved
    return {
        "tenant": "metered",
        "shared": shared,
        "total": {
            "running": running,
            "requests_in_window": requests + running,
            "level": 1000 - used,
            "burst": 1000,
            "used_today": used,
            "cost_today": 0,
        },
        "keys": {
            "web": NOTHING | {"running": running},
            "batch": NOTHING | {"requests_in_window": batch},
        },
        "models": {"m": NOTHING | {"running": running, "used_today": used}},
    }


IDLE = {"tenant": "idle", "total": NOTHING, "keys": {}, "models": {}}


def test_one_gateway_shows_its_own_counts():
    async def run():
        async with PacedEngine().running() as engine:
            async with serving(engine.url, tenants=TENANTS) as gateway:
                for key in ("k-web", "k-web", "k-batch"):
                    await ask(gateway, key)
                await settled(gateway)
                whole = (await usage(gateway)).json()
                assert whole["shared"] is False
                wanted = [metered(shared=False, requests=3, batch=1), IDLE | {"shared": False}]
                assert whole["tenants"] == wanted
                one = await usage(gateway, "/metered")
                assert one.json() == wanted[0]
                nobody = await usage(gateway, "/nobody")
                assert nobody.status_code == 404
                assert "no tenant 'nobody'" in nobody.json()["error"]["message"]

    asyncio.run(run())


def test_what_runs_is_shown_with_its_reservation():
    async def run():
        async with PacedEngine().running() as engine:
            async with serving(engine.url, tenants=TENANTS) as gateway:
                engine.silent = True
                asking = asyncio.create_task(ask(gateway, "k-web", tokens=50))
                while not engine.bodies:  # noqa: ASYNC110 - the gateway's turn
                    await asyncio.sleep(0.005)
                shown = (await usage(gateway, "/metered")).json()
                assert shown["total"]["running"] == shown["keys"]["web"]["running"] == 1
                assert shown["total"]["used_today"] > 50
                assert shown["total"]["level"] == 1000 - shown["total"]["used_today"]
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asking
                await settled(gateway)
                assert (await usage(gateway, "/metered")).json()["total"]["running"] == 0

    asyncio.run(run())


def test_gateways_on_one_store_show_the_same_and_each_its_own_while_it_is_away(server, monkeypatch):
    monkeypatch.setenv("SLUICE_STORE_URL", server.url)
    with contextlib.closing(server.client()) as client:
        client.flushall()
    store = {"kind": "redis", "url_env": "SLUICE_STORE_URL", "answer_timeout_ms": 2000}

    async def run():
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(PacedEngine().running())
            gateways = [
                await stack.enter_async_context(serving(engine.url, tenants=TENANTS, store=store))
                for _ in range(2)
            ]
            before = (await usage(gateways[0])).json()
            wanted = [metered(shared=True, requests=0, batch=0), IDLE | {"shared": True}]
            keys = ("k-web", "k-batch", "k-web", "k-batch")
            assert before == {"shared": True, "tenants": wanted}
            for gateway, key in zip(gateways * 2, keys, strict=True):
                await ask(gateway, key)
                await settled(gateway)
            wanted = metered(shared=True, requests=4, batch=2)
            for gateway in gateways:

                async def told(gateway=gateway):
                    return (await usage(gateway, "/metered")).json() == wanted

                await until(told)
            server.kill()
            for gateway, batch in zip(gateways, (0, 2), strict=True):

                async def away(gateway=gateway):
                    return gateway.shell.store.degraded

                await until(away)
                own = (await usage(gateway, "/metered")).json()
                assert own == metered(shared=False, requests=2, batch=batch)

    asyncio.run(run())


def test_usage_is_behind_the_admin_key():
    async def run():
        async with PacedEngine().running() as engine:
            key = {"port": 0, "admin_key_hash": hash_of("k-admin")}
            async with serving(engine.url, tenants=TENANTS, server=key) as gateway:
                for path in ("", "/metered"):
                    for given in ({}, {"authorization": "Bearer k-web"}):
                        assert (await usage(gateway, path, **given)).status_code == 401
                    opened = await usage(gateway, path, authorization="Bearer k-admin")
                    assert opened.status_code == 200

    asyncio.run(run())
