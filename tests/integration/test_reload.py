"""Another config while a gateway serves over scripted engines."""

import asyncio
import contextlib

import httpx
import openai
import pytest
import yaml

from domain.errors import ConfigError
from gateway.event_log import read, read_header, replay
from gateway.tenants import hash_of
from sluice.assembly import reloadable
from sluice.recorded import core_of
from sluice.reload import digest
from sluice.settings import Settings
from tests.fakes.paced_engine import PacedEngine
from tests.fakes.whole_gateway import settings_for, settled

pytestmark = pytest.mark.integration

PROMPT = [{"role": "user", "content": "hello there"}]


def client(gateway, key="k"):
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, timeout=20)


async def answered_by(api, **options):
    """The replica that answers one short request."""
    answer = await api.chat.completions.with_raw_response.create(
        model="m", messages=PROMPT, max_tokens=2, **options
    )
    return answer.headers["x-sluice-replica"]


def fleet(**urls):
    return [{"kind": "url", "name": n, "url": u, "variant": "v"} for n, u in urls.items()]


def other(settings: Settings, **sections) -> Settings:
    """The same settings with other sections."""
    return Settings.model_validate(settings.model_dump(mode="json", by_alias=True) | sections)


async def until(condition, within=10.0):
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110 - looks from outside
            await asyncio.sleep(0.01)


def test_a_removed_replica_drains_and_a_new_one_takes_over():
    """The stream under way ends where it runs; what comes later goes to the replica that joined."""

    async def run():
        async with PacedEngine(pace=0.05).running() as a, PacedEngine().running() as b:
            settings = settings_for(fleet=fleet(a=a.url))
            async with reloadable(settings) as reloader:
                gateway = reloader.gateway
                async with client(gateway) as api:
                    stream = await api.chat.completions.create(
                        model="m", messages=PROMPT, max_tokens=20, stream=True
                    )
                    words = [await anext(stream)]
                    said = await reloader.take(other(settings, fleet=fleet(b=b.url)))
                    assert said == []
                    assert {await answered_by(api) for _ in range(3)} == {"b"}
                    words += [c async for c in stream]
                    text = "".join(c.choices[0].delta.content or "" for c in words if c.choices)
                    assert text.split() == [f"w{i}" for i in range(20)]
                    await reloader.take(other(settings, fleet=fleet(a=a.url)))
                    assert await answered_by(api) == "a"
                await settled(gateway)

    asyncio.run(run())


def test_tenants_come_and_go_and_bucket_levels_stay():
    """A new capacity scales the level, a removed tenant's key opens nothing any more."""
    quota = {"tokens_per_minute": 1, "burst_tokens": 1000}

    def tenants(burst, *names):
        return {
            n: {"keys": {"k": {"hash": hash_of(n)}}, "quota": quota | {"burst_tokens": burst}}
            for n in names
        }

    async def run():
        async with PacedEngine().running() as engine:
            settings = settings_for(engine.url, tenants=tenants(1000, "old", "stays"))
            async with reloadable(settings) as reloader:
                gateway = reloader.gateway
                core = gateway.shell._core
                async with client(gateway, "stays") as api, client(gateway, "old") as gone:
                    await answered_by(api)
                    await settled(gateway)
                    level = core.account("stays").usage(0.0)["tenant"].level
                    assert level < 1000
                    await reloader.take(other(settings, tenants=tenants(2000, "stays", "new")))
                    after = core.account("stays").usage(0.0)["tenant"].level
                    assert after == pytest.approx(2 * level, rel=0.01)
                    with pytest.raises(openai.AuthenticationError):
                        await answered_by(gone)
                    assert await answered_by(api) == "r0"
                async with client(gateway, "new") as api:
                    assert await answered_by(api) == "r0"

    asyncio.run(run())


def test_another_policy_decides_at_once_and_the_log_replays(tmp_path):
    """The scorer is swapped by an event, so a fresh core lives through it the same."""
    events = tmp_path / "events.bin"

    async def run():
        async with PacedEngine().running() as a, PacedEngine().running() as b:
            settings = settings_for(
                fleet=fleet(a=a.url), logs={"decisions": None, "events": str(events)}
            )
            async with reloadable(settings) as reloader:
                gateway = reloader.gateway
                async with client(gateway) as api:
                    await answered_by(api)
                    await reloader.take(
                        other(
                            settings,
                            fleet=fleet(a=a.url, b=b.url),
                            policy={"kind": "round_robin"},
                        )
                    )
                    assert {await answered_by(api) for _ in range(4)} == {"a", "b"}
                    await reloader.take(other(settings, fleet=fleet(b=b.url)))
                    assert await answered_by(api) == "b"
                await settled(gateway)
                policies = [r["policy"] for r in gateway.log.recent()]
                assert policies == ["marginal", *["round_robin"] * 4, "marginal"]

    asyncio.run(run())
    assert replay(read(events), core_of(read_header(events)).handle).differs_at is None


def test_what_cannot_be_served_leaves_the_old_config():
    """An address under an old name, and sections that need a restart."""

    async def run():
        async with PacedEngine().running() as engine:
            settings = settings_for(engine.url)
            async with reloadable(settings) as reloader:
                moved = settings_for("http://127.0.0.1:9")
                with pytest.raises(ConfigError, match="needs another name"):
                    await reloader.take(moved)
                said = await reloader.take(
                    other(settings, server={"port": 1}, store={"kind": "redis"})
                )
                assert [line.split(":")[0] for line in said] == ["server", "store"]
                assert digest(reloader.settings) == digest(settings)
                async with client(reloader.gateway) as api:
                    assert await answered_by(api) == "r0"

    asyncio.run(run())


def test_the_file_is_watched_and_a_bad_one_is_not_taken(tmp_path):
    """A good file is taken and shows in the metrics, a bad one is counted and changes nothing."""
    file = tmp_path / "sluice.yaml"

    async def run():
        async with PacedEngine().running() as a, PacedEngine().running() as b:
            settings = settings_for(fleet=fleet(a=a.url))

            def write(**sections):
                data = other(settings, **sections).model_dump(mode="json", by_alias=True)
                file.write_text(yaml.safe_dump(data))

            write()
            async with reloadable(settings) as reloader:
                gateway = reloader.gateway
                watch = asyncio.create_task(reloader.watching(file))
                await asyncio.sleep(0)
                first = digest(reloader.settings)
                file.write_text("fleet: [")
                reloader.wake.set()  # what SIGHUP does
                await until(lambda: reloader.refused == 1)
                assert digest(reloader.settings) == first
                write(fleet=fleet(a=a.url, b=b.url))
                await until(lambda: reloader.taken == 1)
                async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
                    text = (await http.get("/metrics")).text
                assert f'hash="{digest(reloader.settings)}"' in text
                assert first not in text
                assert 'sluice_config_reloads{result="refused"} 1.0' in text
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch

    asyncio.run(run())
