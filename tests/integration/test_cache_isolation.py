"""An isolated tenant's salt reaches the engines that have one; no other body is touched."""

import asyncio
import json

import httpx
import pytest

from gateway.tenants import hash_of
from tests.fakes.engine import DONE, ROLE, STOP, USAGE, ScriptedEngine, answer, stream, word
from tests.fakes.whole_gateway import serving

pytestmark = pytest.mark.integration

TENANTS = {
    "alone": {"isolate_cache": True, "keys": {"k": {"hash": hash_of("k-alone")}}},
    "apart": {"isolate_cache": True, "keys": {"k": {"hash": hash_of("k-apart")}}},
    "open": {"keys": {"k": {"hash": hash_of("k-open")}}},
}
EVENTS = stream(ROLE, word("one "), word("two"), STOP, USAGE, DONE)
OWN = b'{ "model":"m",\n "messages":[{"role":"user","content":"hi"}], "stream":true%b}'


def engine(owner):
    """An engine that its model list says is `owner`'s; `requests` holds the prompts only."""
    listed = {"object": "list", "data": [{"id": "own", "object": "model", "owned_by": owner}]}

    async def script(self, connection):
        while True:
            head = await connection._reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                page = json.dumps(listed).encode() if b" /v1/models " in head else b"{}"
                await connection.send(answer(page))
                continue
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            self.requests.append((head, await connection._reader.readexactly(length)))
            await connection.send(EVENTS)

    return ScriptedEngine(script)


async def asked(gateway, key, body):
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        found = await http.post(
            "/v1/chat/completions", content=body, headers={"authorization": f"Bearer {key}"}
        )
    assert found.status_code == 200, found.text


def bodies_at(owner, *asks):
    """What an engine reads of these (key, body)."""

    async def run():
        async with engine(owner).running() as replica:
            async with serving(replica.url, tenants=TENANTS) as gateway:
                for key, body in asks:
                    await asked(gateway, key, body)
            return [body for _, body in replica.requests]

    return asyncio.run(run())


def test_vllm_gets_the_tenants_salt_and_every_other_byte_is_the_clients():
    plain, theirs = OWN % b"", OWN % b', "cache_salt" : "theirs"'
    first, again, replaced, apart, left, passed = bodies_at(
        "vllm",
        ("k-alone", plain),
        ("k-alone", plain),
        ("k-alone", theirs),
        ("k-apart", plain),
        ("k-open", plain),
        ("k-open", theirs),
    )
    salt = json.loads(first)["cache_salt"]
    asking = b'"stream_options":{"include_usage":true},'
    own = b'"model":"own"'
    salted = b'{"cache_salt":"%b",' % salt.encode() + asking
    assert first == again == plain.replace(b'"model":"m"', own).replace(b"{", salted, 1)
    renamed = theirs.replace(b'"model":"m"', own)
    assert replaced == renamed.replace(b"theirs", salt.encode()).replace(b"{", b"{" + asking, 1)
    assert "alone" not in salt
    assert json.loads(apart)["cache_salt"] != salt
    assert "cache_salt" not in json.loads(left)
    assert passed == renamed.replace(b"{", b"{" + asking, 1)


@pytest.mark.parametrize("owner", ["llamacpp", "somebody"])
def test_an_engine_without_a_salt_is_sent_none(owner):
    for body in bodies_at(owner, ("k-alone", OWN % b""), ("k-open", OWN % b"")):
        assert "cache_salt" not in json.loads(body)


def test_an_engine_that_comes_up_late_is_salted_from_its_first_request():
    async def run():
        replica = engine("vllm")
        async with replica.running():
            port = replica.port
        async with serving(f"http://127.0.0.1:{port}", tenants=TENANTS) as gateway:
            assert not gateway.shell.ready
            server = await asyncio.start_server(replica._serve, "127.0.0.1", port)
            async with server, asyncio.timeout(10):
                while not gateway.shell.ready:  # noqa: ASYNC110 - the monitor changes it
                    await asyncio.sleep(0.01)
                await asked(gateway, "k-alone", OWN % b"")
        assert len(json.loads(replica.requests[0][1])["cache_salt"]) == 64

    asyncio.run(run())
