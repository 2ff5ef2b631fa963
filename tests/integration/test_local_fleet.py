"""The local fleet with real llama.cpp children: answers, deaths, hand-overs of ports, endings."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from backends import perplexity, variants
from backends.local import LocalReplica, Patience, ReplicaState
from domain.errors import ConfigError
from tests.integration.local_fleets import RunningFleet, running

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PAIR = [
    LocalReplica(name="a", variant="q4_0", slots=2, context=1024),
    LocalReplica(name="b", variant="q4_0", slots=2, context=1024),
]


@pytest.fixture(scope="module")
def pair(local_cache: Path) -> Iterator[RunningFleet]:
    with running(PAIR, local_cache) as fleet:
        yield fleet


def question(text: str, **options: object) -> dict[str, object]:
    return {
        "model": variants.model_name("q4_0"),
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "stream": True,
        **options,
    }


def deltas(response: httpx.Response) -> Iterator[str]:
    """Content pieces of a streamed chat answer."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                yield choice["delta"].get("content") or ""


def ask(url: str, text: str, **options: object) -> list[str]:
    body = question(text, **options)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as response:
        assert response.status_code == 200
        return [piece for piece in deltas(response) if piece]


def busy_slots(http: httpx.Client, url: str) -> int:
    return sum(slot["is_processing"] for slot in http.get(f"{url}/slots").json())


def test_a_real_answer_streams_and_is_the_same_everywhere_at_temperature_zero(pair):
    text = "What is the capital of France? Answer in one short sentence."
    answers = [ask(pair.urls[name], text, max_tokens=24) for name in ("a", "b", "a", "b")]
    assert len(answers[0]) > 3, "it came in pieces"
    assert "Paris" in "".join(answers[0])
    assert all(answer == answers[0] for answer in answers)


def test_usage_and_timings_come_with_the_stream(pair):
    body = question("Hello", max_tokens=5, stream_options={"include_usage": True})
    with httpx.stream(
        "POST", f"{pair.urls['a']}/v1/chat/completions", json=body, timeout=120
    ) as response:
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if "{" in line]
    assert chunks[-1]["choices"] == []
    assert 1 <= chunks[-1]["usage"]["completion_tokens"] <= 5
    assert chunks[-1]["model"] == "smollm2-135m-q4_0"


def test_children_listen_on_loopback_only_and_show_slots_and_metrics(pair):
    for name, pid in pair.fleet.pids.items():
        listening = [
            each.laddr.ip
            for each in psutil.Process(pid).net_connections("inet")
            if each.status == psutil.CONN_LISTEN
        ]
        assert listening == ["127.0.0.1"]
        assert len(httpx.get(f"{pair.urls[name]}/slots").json()) == 2
        assert "llamacpp:requests_processing" in httpx.get(f"{pair.urls[name]}/metrics").text


def test_a_reader_that_leaves_while_decoding_frees_its_slot(pair):
    url = pair.urls["a"]
    body = question("Tell a long story about the sea.", max_tokens=900, ignore_eos=True)
    with httpx.Client(timeout=30) as http:
        with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            next(piece for piece in deltas(response) if piece)
            assert busy_slots(http, url) == 1
        left = time.monotonic()
        while busy_slots(http, url) and time.monotonic() - left < 10.0:
            pass
        took = time.monotonic() - left
    print(f"slot free {took:.3f} s after the reader left")  # noqa: T201
    assert took < 2.0, "0.05 s on an idle machine; a decode step may be starved on a busy one"


def test_a_killed_child_comes_back_at_the_same_address(pair):
    before = pair.fleet.pids["b"]
    os.kill(before, signal.SIGKILL)
    down = pair.wait_for("b", ReplicaState.DOWN)
    assert "exited with -9" in down.reason
    assert down.retry_in == 0.25
    ready = pair.wait_for("b", ReplicaState.READY)
    assert ready.url == pair.urls["b"]
    assert pair.fleet.pids["b"] != before
    assert httpx.get(f"{ready.url}/health").status_code == 200
    assert ask(ready.url, "Say hello.", max_tokens=4) != []


def test_a_hung_child_is_replaced(local_cache):
    patience = Patience(poll_every=0.1, hung_after=1.0)
    with running(PAIR[:1], local_cache, patience) as fleet:
        stopped = fleet.fleet.pids["a"]
        os.kill(stopped, signal.SIGSTOP)
        down = fleet.wait_for("a", ReplicaState.DOWN)
        assert down.reason == "no answer on /health for 1 s"
        assert fleet.wait_for("a", ReplicaState.READY).url == fleet.urls["a"]
        assert not psutil.pid_exists(stopped)


def test_closing_the_fleet_leaves_no_process(local_cache):
    with running(PAIR, local_cache) as fleet:
        pids = dict(fleet.fleet.pids)
        assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids.values())
    assert fleet.fleet.pids == {}
    final = [fleet.changes.get_nowait() for _ in range(fleet.changes.qsize())][-2:]
    assert [change.state for change in final] == [ReplicaState.STOPPED] * 2


PARENT = """
import asyncio, sys
from pathlib import Path
from backends.local import LocalFleet, LocalReplica

async def main():
    replica = LocalReplica(name="a", variant="q4_0", slots=1)
    async with LocalFleet([replica], Path(sys.argv[1])) as f:
        print(f.pids["a"], flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_child_ends_with_its_parent_however_that_ends(ending, local_cache):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(local_cache)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(ending)
        parent.wait(timeout=20)
        child.wait(timeout=10)
        assert not child.is_running()


def test_a_file_that_is_no_model_fails_the_start_and_names_the_replica(tmp_path):
    path = variants.variant_paths(["q4_0"], tmp_path)["q4_0"]
    path.write_bytes(b"not a model")
    before = set(psutil.Process().children(recursive=True))
    with (
        pytest.raises(ConfigError, match="local replica 'a' did not start: exited with 1"),
        running(PAIR[:1], tmp_path),
    ):
        pass
    assert set(psutil.Process().children(recursive=True)) <= before


def test_forced_generation_gives_the_probabilities_of_the_full_distribution(pair):
    """Oracle: ask for all 49,152 probabilities at one position after another."""
    text = perplexity.REFERENCE_TEXT.read_text()[:400]
    with httpx.Client(base_url=pair.urls["a"], timeout=120) as http:
        tokens = http.post("/tokenize", json={"content": text}).json()["tokens"][:24]
        body = {"n_probs": 1, "temperature": 0, "cache_prompt": False}
        forced = http.post(
            "/completion",
            json={
                **body,
                "prompt": tokens[:8],
                "grammar": perplexity.only(tokens[8:]),
                "n_predict": 16,
            },
        ).json()["completion_probabilities"]
        for position in (8, 9, 15, 23):
            everything = http.post(
                "/completion",
                json={**body, "prompt": tokens[:position], "n_predict": 1, "n_probs": 49152},
            ).json()["completion_probabilities"][0]["top_logprobs"]
            oracle = {each["id"]: each["logprob"] for each in everything}
            assert len(oracle) == 49152
            assert forced[position - 8]["logprob"] == pytest.approx(
                oracle[tokens[position]], abs=0.01
            )


def test_perplexity_is_measured_once_and_kept(pair, local_cache):
    variant = pair.fleet.variants["q4_0"]
    assert 20 < variant.perplexity.value < 60
    checksum = perplexity.text_checksum(perplexity.REFERENCE_TEXT.read_text())
    kept = list(local_cache.glob(f"*q4_0*.ppl-{checksum}.json"))
    assert len(kept) == 1
    assert json.loads(kept[0].read_text())["perplexity"] == variant.perplexity.value
    before = kept[0].stat().st_mtime_ns
    with running(PAIR[:1], local_cache) as again:
        assert again.fleet.variants["q4_0"].perplexity == variant.perplexity
    assert kept[0].stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_made_variant_holds_the_source_weights_at_its_precision(tmp_path):
    """Types and text as promised, values within half a quantisation step of the source."""
    gguf = pytest.importorskip("gguf")
    calls = []
    made = variants.make(["q8_0"], tmp_path, lambda *call: calls.append(call))["q8_0"]
    assert calls[-1] == ("q8_0", 272, 272)
    assert [each.name for each in tmp_path.iterdir()] == [made.name], "nothing unfinished stays"
    source = gguf.GGUFReader(variants.source().locate())
    copy = gguf.GGUFReader(made)
    assert "re-encoded from Q4_1" in copy.get_field("general.name").contents()
    assert copy.get_field("tokenizer.ggml.merges").contents() == (
        source.get_field("tokenizer.ggml.merges").contents()
    )
    theirs, ours = ({tensor.name: tensor for tensor in reader.tensors} for reader in (source, copy))
    assert theirs.keys() == ours.keys()
    for name in ("blk.0.attn_q.weight", "blk.29.ffn_down.weight", "token_embd.weight"):
        assert ours[name].tensor_type == gguf.GGMLQuantizationType.Q8_0
        before, after = (
            gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(-1, 32)
            for tensor in (theirs[name], ours[name])
        )
        step = abs(before).max(axis=1, keepdims=True) / 127
        # Half a step of rounding, and the scale itself is kept in 11 bits: 127 · 2⁻¹¹ steps more.
        assert (abs(after - before) <= 0.57 * step).all()
    written = made.stat().st_mtime_ns
    variants.make(["q8_0"], tmp_path, lambda *call: calls.append(call))
    assert made.stat().st_mtime_ns == written
