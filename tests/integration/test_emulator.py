"""The emulator through real sockets: the wire, the pace, aborts, faults, what routers ask for."""

import asyncio
import time

import httpx
import numpy as np
import openai
import pytest

from backends.adapters.detect import discover
from backends.adapters.table import read_load
from backends.adapters.vllm import VLLM
from backends.sim import replica as physics
from backends.sim.emulator import EmulatedReplica, Emulator, Faults
from domain.fleet import Profile, ReplicaSpec
from tests.backends.sim.test_replica import drive

pytestmark = pytest.mark.integration

PAGES = ("/health", "/health_generate", "/ping", "/version", "/get_load", "/server_info",
         "/get_server_info", "/model_info", "/get_model_info")  # fmt: skip
FAST = Profile(overhead=0.0, weights=0.004, per_token=1e-5, chunk=512, max_seqs=64)


def replica(profile=FAST, **options):
    spec = ReplicaSpec(name="e", variant="v", profile=profile)
    return EmulatedReplica(spec, model="tiny", **options)


def run(body, *replicas):
    """Run `body(emulator, client)` inside the emulator's lifetime."""

    async def main():
        async with (
            Emulator(replicas) as emulator,
            httpx.AsyncClient(
                base_url=next(iter(emulator.urls.values())), trust_env=False, timeout=30
            ) as client,
        ):
            return await body(emulator, client)

    return asyncio.run(main())


def ask(tokens, prompt="word " * 40, **fields):
    return {"model": "tiny", "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens, "ignore_eos": True, **fields}  # fmt: skip


def test_the_openai_client_gets_a_stream_and_its_usage():
    async def body(emulator, _client):
        client = openai.AsyncOpenAI(base_url=emulator.urls["e"] + "/v1", api_key="x")
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello there " * 30}],
            max_tokens=17,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
        await client.close()
        return chunks

    chunks = run(body, replica())
    texts = [c.choices[0].delta.content for c in chunks if c.choices]
    assert len([t for t in texts if t]) == 17
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 17
    assert chunks[-1].usage.prompt_tokens == round(12 * 30 / 4)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("choices", [1, 3])
def test_whole_answers_carry_every_choice(path, choices):
    async def body(_emulator, client):
        fields = ask(5) if "chat" in path else {"model": "tiny", "prompt": "abc " * 9,
                                                "max_tokens": 5, "ignore_eos": True}  # fmt: skip
        return (await client.post(path, json={**fields, "n": choices})).json()

    answer = run(body, replica())
    assert len(answer["choices"]) == choices
    assert answer["usage"]["completion_tokens"] == 5 * choices
    assert {c["finish_reason"] for c in answer["choices"]} == {"length"}


def test_lengths_are_drawn_once_and_for_all_where_nobody_sets_them():
    async def body(_emulator, client):
        async def one(prompt):
            fields = ask(400, prompt=prompt, ignore_eos=False)
            answer = (await client.post("/v1/chat/completions", json=fields)).json()
            return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

        return [await one(prompt) for prompt in ("one", "two", "three", "one")]

    found = run(body, replica(Profile(overhead=0, weights=1e-4, per_token=1e-6)))
    assert found[0] == found[3]
    assert len(set(found)) == 3
    assert all(reason == ("length" if n == 400 else "stop") for n, reason in found)


class Recorded(EmulatedReplica):
    """Notes when calls came, in model time."""

    def submit(self, call):
        """Take a call, and note it."""
        self.came = [*getattr(self, "came", []), (self.now, call)]
        super().submit(call)


def test_a_batch_keeps_the_pace_of_the_model():
    """Eight requests in real time at dilate 4, against the same arrivals in virtual time."""
    profile = Profile(
        overhead=0.002, weights=0.01, per_sequence=5e-4, per_token=5e-5, chunk=256, max_seqs=6
    )
    spec = ReplicaSpec(name="e", variant="v", profile=profile)
    lengths = [30, 10, 50, 20, 40, 12, 25, 33]
    dilate = 4.0

    async def body(emulator, client):
        watched = emulator.replicas[0]
        loop = asyncio.get_running_loop()
        times = {n: [] for n in lengths}

        async def one(tokens):
            fields = ask(tokens, f"{tokens}" + "pace " * 160, stream=True)
            async with client.stream("POST", "/v1/chat/completions", json=fields) as answer:
                async for line in answer.aiter_lines():
                    if '"content":" ' in line:
                        times[tokens].append((loop.time() - watched._epoch) / dilate)

        await asyncio.gather(*map(one, lengths))
        return watched.came, times

    came, times = run(body, Recorded(spec, model="tiny", dilate=dilate))
    ph = physics.physics([spec], len(lengths))
    script = []
    for j, (at, call) in enumerate(came):
        physics.set_job(ph, j, call.prompt_tokens, call.facts.max_tokens, physics.NONE, 0, 0)
        script.append((at, "enter", j, 0))
    first, last, _ = drive(ph, script, len(lengths))
    order = [call.facts.max_tokens for _, call in came]
    assert [len(times[n]) for n in order] == order
    late = np.array([times[n][0] for n in order] + [times[n][-1] for n in order])
    late -= np.concatenate([first, last])
    assert late.min() > -0.001  # never early, by more than a tick of the loop's timer
    assert np.median(late) < 0.01


def test_a_client_that_leaves_frees_its_place():
    async def body(emulator, client):
        watched = emulator.replicas[0]
        async with client.stream(
            "POST", "/v1/chat/completions", json=ask(100_000 // 20, stream=True)
        ) as answer:
            async for line in answer.aiter_lines():
                if '"content":" ' in line:
                    break
            busy = watched.running()
        for _ in range(200):
            if watched.running()[0] == 0:
                break
            await asyncio.sleep(0.01)
        return busy, watched.running(), watched.aborted, sum(c is not None for c in watched._calls)

    busy, after, aborted, calls = run(body, replica())
    assert busy[0] == 1
    assert after == (0, 0, pytest.approx(0.0))
    assert aborted == 1
    assert calls == 0


def test_it_looks_like_vllm_to_those_who_ask():
    async def body(_emulator, client):
        async def get(path):
            answer = await client.get(path)
            return answer.content if answer.is_success else None

        pages = {}
        for path in PAGES:
            pages[path] = await get(path)
        return await discover(get), pages, read_load(VLLM, (await get("/metrics")).decode())

    found, pages, load = run(body, replica())
    assert found.adapter is VLLM
    assert found.models == ("tiny",)
    assert found.max_context == 8192
    assert found.kv_capacity == pytest.approx(FAST.kv_capacity, abs=64)
    assert None not in pages.values()
    assert (load.running, load.waiting, load.kv_used) == (0, 0, 0)


def test_a_repeated_prompt_is_found_in_the_prefix_cache():
    async def body(_emulator, client):
        usage = []
        for _ in range(2):
            answer = await client.post("/v1/chat/completions", json=ask(2, "prefix " * 400))
            usage.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        return usage

    assert run(body, replica()) == [0, 640]  # 700 tokens hold ten whole blocks


def test_fault_switches():
    async def body(_emulator, client):
        async def fault(**fields):
            return (await client.post("/emulator/fault", json=fields)).status_code

        async def status():
            return (await client.post("/v1/chat/completions", json=ask(3))).status_code

        seen = [await fault(status=429), await status(), await fault(status=500), await status()]
        assert await fault(die_after=2) == 200
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/chat/completions", json=ask(50))
        assert await fault(unhealthy=True) == 200
        seen.append((await client.get("/health")).status_code)
        assert await fault(hang=True) == 200
        hung = asyncio.create_task(status())
        done, _ = await asyncio.wait([hung], timeout=0.3)
        assert not done
        assert await fault() == 200
        seen += [await hung, await fault(slow=0.0), await fault(nonsense=1)]
        return seen

    assert run(body, replica()) == [200, 429, 200, 500, 503, 200, 400, 400]


def test_slow_and_stale():
    async def body(emulator, client):
        async def took():
            began = time.monotonic()
            await client.post("/v1/chat/completions", json=ask(40))
            return time.monotonic() - began

        plain = await took()
        emulator.replicas[0].set_faults(Faults(slow=5.0, stale_metrics=True))
        slow = await took()
        return plain, slow, (await client.get("/metrics")).text

    plain, slow, metrics = run(body, replica())
    assert slow > 3 * plain
    assert 'generation_tokens_total{engine="0",model_name="tiny"} 40' in metrics


def test_bad_requests_are_told_so():
    async def body(_emulator, client):
        bad = await client.post("/v1/chat/completions", content=b"{nonsense")
        long = await client.post("/v1/chat/completions", json=ask(5, "long " * 20_000))
        lost = await client.get("/nowhere")
        return bad, long, lost

    bad, long, lost = run(body, replica())
    assert (bad.status_code, long.status_code, lost.status_code) == (400, 400, 404)
    assert "maximum context length" in long.json()["error"]["message"]
