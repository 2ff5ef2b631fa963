"""Speed of the local fleet's variants, alone and beside a busy neighbour: `make bench`.

Prints one row per variant: CPU-seconds of its process (steady on a shared machine) and wall-clock
speeds (not steady there). Prompts differ in their first words, so that no prefix is cached.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from backends import variants
from backends.local import LocalReplica
from tests.integration.local_fleets import running

PROMPT_TOKENS = 400
ANSWER_TOKENS = 96


@pytest.fixture(scope="module")
def cache(pytestconfig: pytest.Config) -> Path:
    return pytestconfig.cache.mkdir("local-fleet")


@dataclass(frozen=True, slots=True)
class Speed:
    """What one replica did."""

    prefill: float  # prompt tokens per second
    decode: float  # generated tokens per second, all streams together
    cpu: float  # seconds of processor time


def texts() -> Iterator[str]:
    """Prompts of about PROMPT_TOKENS tokens that share no prefix."""
    number = 0
    while True:
        number += 1
        yield (
            f"{number * 7919} " * 4
            + "the harbour keeps its own counsel and the tide its own time " * 30
        )


def generate(url: str, prompt: str, tokens: int) -> dict[str, float]:
    """Timings of one completion, by the engine's own clock."""
    body = {
        "prompt": prompt,
        "n_predict": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    answer = httpx.post(f"{url}/completion", json=body, timeout=300)
    answer.raise_for_status()
    return answer.json()["timings"]


def measure(url: str, pid: int, prompts: Iterator[str], streams: int) -> Speed:
    """One prefill, then `streams` answers decoded together."""
    clock = psutil.Process(pid).cpu_times
    prefill = generate(url, next(prompts), 1)["prompt_per_second"]
    before, started = clock(), time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        runs = [
            pool.submit(generate, url, f"Story {next(prompts)[:12]}", ANSWER_TOKENS)
            for _ in range(streams)
        ]
        tokens = sum(run.result()["predicted_n"] for run in runs)
    took, after = time.monotonic() - started, clock()
    cpu = after.user + after.system - before.user - before.system
    return Speed(prefill=prefill, decode=tokens / took, cpu=cpu)


def row(label: str, one: Speed, four: Speed, rss: float) -> None:
    print(  # noqa: T201
        f"{label:22} prefill {one.prefill:6.1f} tok/s   decode ×1 {one.decode:5.1f} tok/s "
        f"({one.cpu:4.1f} cpu-s)   ×4 {four.decode:5.1f} tok/s ({four.cpu:4.1f} cpu-s)   "
        f"rss {rss:.0f} MB"
    )


@pytest.mark.parametrize("variant", variants.PRECISIONS)
def test_one_replica_alone(variant: str, cache: Path) -> None:
    prompts = texts()
    with running([LocalReplica(name="a", variant=variant)], cache) as fleet:
        pid = fleet.fleet.pids["a"]
        one, four = (measure(fleet.urls["a"], pid, prompts, streams) for streams in (1, 4))
        row(variant, one, four, psutil.Process(pid).memory_info().rss / 1e6)


@pytest.mark.parametrize("variant", variants.PRECISIONS)
def test_two_replicas_at_once(variant: str, cache: Path) -> None:
    names = ("a", "b")
    with (
        running([LocalReplica(name=name, variant=variant) for name in names], cache) as fleet,
        ThreadPoolExecutor(2) as pool,
    ):
        pids, urls = fleet.fleet.pids, fleet.urls
        for streams in (1, 4):
            runs = [
                pool.submit(measure, urls[name], pids[name], texts(), streams) for name in names
            ]
            for name, run in zip(names, runs, strict=True):
                speed = run.result()
                print(  # noqa: T201
                    f"{variant} {name} of two, ×{streams}: prefill {speed.prefill:6.1f} tok/s   "
                    f"decode {speed.decode:5.1f} tok/s ({speed.cpu:4.1f} cpu-s)"
                )
