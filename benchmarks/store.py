"""Quotas over several gateways: limits under load, an outage of the store, and what it costs.

    python benchmarks/store.py [limits] [outage] [cost] [--seconds 75]

Starts its own store server and one process per gateway (a decision core, the shared store and
replicas that answer on a schedule; no HTTP). Prints one table per part. `limits`: 4 gateways and 64
clients that want far more than they may. `outage`: the store is killed in the middle and comes back
empty, once below the limit and once above. `cost`: CPU per request, memory against shared store.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from domain.events import Commit, Committed, Settle
from domain.outcome import Cause, Outcome
from domain.request import InferenceRequest, Quota, Tenant
from gateway.store.redis import RedisStore
from tests.fakes.scripted_gateway import Plan
from tests.fakes.store_fleet import (
    Run,
    most_at_once,
    most_in_window,
    run_gateways,
    sleep_until,
    worst_token_excess,
)
from tests.fakes.store_server import StoreServer

GATEWAYS = 4


def gateways(plan: Plan, count: int = GATEWAYS) -> list[Plan]:
    """The same plan for each of several gateways."""
    return [replace(plan, name=f"g{i}") for i in range(count)]


def line(name: str, *cells: object) -> None:
    """One row of a table."""
    print(f"  {name:<44}", *(f"{cell!s:>12}" for cell in cells))


def limits(seconds: float) -> None:
    """64 clients on four gateways, one limit at a time."""
    print(f"limits: {GATEWAYS} gateways, 64 clients, {seconds:.0f} s")
    base = Plan(name="", url=None, clients=16, duration=seconds, cancelled=0.1)
    with StoreServer() as server:
        plan = replace(base, url=server.url, quota={"requests_per_minute": 300.0})
        run = run_gateways(gateways(plan))
        most = most_in_window([s.admitted or 0.0 for s in run.admitted])
        line("requests asked / admitted", len(run.stories), len(run.admitted))
        line("most in any 60 s / limit 300", most, "ok" if most <= 300 + GATEWAYS else "OVER")
    with StoreServer() as server:
        quota = {"tokens_per_minute": 60_000.0, "burst_tokens": 5_000.0}
        run = run_gateways(gateways(replace(base, url=server.url, quota=quota)))
        excess = worst_token_excess(run, 5_000.0, 1_000.0)
        used = sum(s.used for s in run.admitted)
        line("requests asked / admitted", len(run.stories), len(run.admitted))
        line(
            "tokens used / of burst + rate x T", round(used), f"{used / (5e3 + 1e3 * seconds):.2f}"
        )
        line("worst excess over the bound, tokens", round(excess), "ok" if excess <= 0 else "OVER")
    with StoreServer() as server:
        quota = {"concurrency": 12.0}
        run = run_gateways(gateways(replace(base, url=server.url, quota=quota, duration=10.0)))
        line(
            "most open at once / limit 12", most_open(run), "ok" if most_open(run) <= 12 else "OVER"
        )
    with StoreServer() as server:
        plan = replace(base, url=server.url, replicas=2, max_seqs=8, duration=10.0)
        run = run_gateways(gateways(plan))
        most_of = most_at_once(run)
        line("most on a replica of 8 slots (by replica)", *most_of.values())
        refusals = sum(g["counts"]["refused_bookings"] for g in run.gateways)
        line("bookings refused / requests sent", refusals, len(run.admitted))


def most_open(run: Run) -> int:
    """The most admitted requests open at one time, over all gateways."""
    edges = sorted(
        edge for s in run.admitted for edge in ((s.admitted or 0.0, 1), (s.ended or 0.0, -1))
    )
    now = most = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


def outage(seconds: float) -> None:
    """The store is killed after a third of the run and is back, empty, after two thirds."""
    print(f"outage: {GATEWAYS} gateways, {seconds:.0f} s, the store is away for the middle third")
    quota = {
        "tokens_per_minute": 60_000.0,
        "burst_tokens": 4_000.0,
        "requests_per_minute": 600.0,
        "concurrency": 40.0,
    }
    base = Plan(name="", url=None, duration=seconds, quota=quota)
    mean = 50.0 + 74.0  # prompt and a mean answer of 80, capped at 200
    cases = {
        "at 55 % of the token limit": replace(base, rate=0.55 * 1000.0 / mean / GATEWAYS),
        "at 55 % of the request limit": replace(
            base, rate=0.55 * 10.0 / GATEWAYS, answer=10.0, prompt=10.0, max_tokens=60.0
        ),
        "flooded": replace(base, clients=16),
    }
    for name, plan in cases.items():
        with StoreServer() as server:
            times: dict[str, float] = {}

            def meanwhile(
                _: list[int], server: StoreServer = server, times: dict[str, float] = times
            ) -> None:
                start = time.time()
                sleep_until(start + seconds / 3)
                server.kill()
                times["killed"] = time.time()
                sleep_until(start + 2 * seconds / 3)
                server.start()
                times["back"] = time.time()

            run = run_gateways(gateways(replace(plan, url=server.url)), meanwhile)
        reasons = sorted({s.reason for s in run.refused if s.reason})
        line(name + ": asked / refused / reasons", len(run.stories), len(run.refused), reasons)
        killed, back = times["killed"], times["back"]
        away = [s for s in run.admitted if killed <= (s.admitted or 0.0) <= back]
        spent = sum(s.used for s in away)
        allowed = 4_000.0 + 1_000.0 * (back - killed)
        line("  tokens while away / of the quota's own", round(spent), f"{spent / allowed:.2f}")
        used = sum(s.used for s in run.admitted)
        line(
            "  tokens in all / of burst + rate x T",
            round(used),
            f"{used / (4e3 + 1e3 * seconds):.2f}",
        )
        on = [
            next((t for t, is_away in g["signals"] if is_away and t > killed - 0.1), float("inf"))
            for g in run.gateways
        ]
        off = [
            next((t for t, is_away in g["signals"] if not is_away and t > killed), float("inf"))
            for g in run.gateways
        ]
        line(
            "  signal on / off after, ms (slowest)",
            f"{1e3 * (max(on, default=0.0) - killed):.0f}",
            f"{1e3 * (max(off, default=0.0) - back):.0f}",
        )
        waited = max(s.waited or 0.0 for s in run.admitted if not s.held)
        line("  longest wait for the store, ms", round(1e3 * waited))


def cost(seconds: float) -> None:
    """CPU of a gateway process per request, and of the store's client alone."""
    print("cost: CPU per request, one gateway")
    roomy = {"tokens_per_minute": 1e9, "requests_per_minute": 1e6, "concurrency": 1000.0}
    base = Plan(
        name="g", url=None, rate=150.0, duration=min(seconds, 10.0), quota=roomy, replicas=8
    )
    for round_ in range(2):
        with StoreServer() as server:
            for name, url in (("memory", None), ("shared", server.url)):
                run = run_gateways([replace(base, url=url)])
                us = 1e6 * run.gateways[0]["cpu"] / len(run.stories)
                waits = sorted(s.waited or 0.0 for s in run.admitted)
                wait = f"{1e3 * waits[len(waits) // 2]:.2f} ms"
                line(f"round {round_}: {name}, us / median wait", round(us), wait)
    with StoreServer() as server:
        for width in (1, 32):
            us = asyncio.run(client_cost(server.url, width, 6000))
            line(f"store client alone, {width} at a time, us", round(us))


async def client_cost(url: str, width: int, count: int) -> float:
    """Microseconds of CPU per commit, answer and settlement, `width` open at a time."""
    waiting: dict[str, asyncio.Future[Committed]] = {}
    quota = Quota(tokens_per_minute=1e9, requests_per_minute=1e6, concurrency=1000)
    loop = asyncio.get_running_loop()

    def answer(committed: Committed) -> None:
        waiting.pop(committed.id).set_result(committed)

    async def one(id_: str) -> None:
        waiting[id_] = future = loop.create_future()
        commit = Commit(id_, 1, "t", None, 200.0, model="m")
        store.commit(commit, loop.time())
        assert (await future).reserved
        request = InferenceRequest(id=id_, tenant="t", model="m", prompt_tokens=1.0)
        outcome = Outcome(request=request, cause=Cause.FINISHED, arrived=0.0, ended=0.0)
        store.settle(Settle(id_, "t", 120.0, 80.0, outcome), loop.time())

    tenants = {"t": Tenant(name="t", quota=quota)}
    async with RedisStore(url=url, gateway="g", tenants=tenants, answer=answer) as store:
        start = time.process_time()
        for i in range(0, count, width):
            await asyncio.gather(*(one(f"{width}-{i + j}") for j in range(width)))
        return 1e6 * (time.process_time() - start) / count


def main(argv: list[str] | None = None) -> int:
    """Run the parts that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=["limits", "outage", "cost", []], default=[])
    parser.add_argument("--seconds", type=float, default=75.0)
    args = parser.parse_args(argv)
    parts = {"limits": limits, "outage": outage, "cost": cost}
    for name in args.parts or parts:
        parts[name](args.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
