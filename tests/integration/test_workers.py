"""`sluice serve --workers 2`: one gateway to whoever looks, however many processes answer."""

import asyncio
import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gateway.decision_log import log_files, search
from gateway.tenants import hash_of
from sluice.settings import Settings
from sluice.workers import Job, held_port, own
from tests.fakes.paced_engine import PacedEngine
from tests.fakes.store_server import StoreServer
from tests.fakes.whole_gateway import settings_for

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
KEY = "k-one"
HEADERS = {"authorization": f"Bearer {KEY}", "connection": "close"}
"""A connection each, so that the kernel spreads the requests over the workers."""


class Served:
    """A `sluice serve` process and what it said."""

    def __init__(self, process, url):
        self.process = process
        self.url = url

    @property
    def workers(self):
        """Process ids of the workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]


@contextlib.asynccontextmanager
async def served(config, folder, env):
    """`sluice serve` over these settings, told to stop at the end."""
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice", "serve", "-c", str(file), "--workers", "2", "--json"),
        cwd=ROOT,
        env=os.environ | env | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
    )
    try:
        told = json.loads(await process.stdout.readline())
        yield Served(process, told["url"])
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def config_for(engine, folder, **sections):
    quota = {"concurrency": 4}
    settings = settings_for(
        engine.url,
        tenants={"t": {"keys": {"k": {"hash": hash_of(KEY)}}, "quota": quota}},
        store={"kind": "redis", "answer_timeout_ms": 2000},
        logs={"decisions": str(folder / "decisions.jsonl")},
        **sections,
    )
    return settings.model_dump(mode="json", by_alias=True)


async def ask(http, url, **changes):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    return await http.post(f"{url}/v1/chat/completions", json=body | changes, headers=HEADERS)


def run_ids(answers):
    """The random part of request ids, which each process has to itself."""
    return collections.Counter(a.headers["x-request-id"].split("-")[1] for a in answers)


def requests_kept(folder):
    """Requests that ended with an answer, as the workers keep their counts."""
    shots = [json.loads(file.read_bytes()) for file in folder.glob("sluice-*/*.json")]
    rows = [row for shot in shots for row in shot["counters"]["sluice_requests"]]
    return sum(count for (_, _, cause), count in rows if cause == "finished")


def counted(text, name):
    """The sum of a metric over its labels."""
    return sum(float(v) for v in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


async def until(check, within=20.0):
    """The first true value of an async check."""
    async with asyncio.timeout(within):
        while not (found := await check()):  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.02)
        return found


def alive(pids):
    """Those that have not ended; one that waits to be reaped has."""
    return [pid for pid in pids if _command(pid)]


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_two_workers_are_one_gateway(tmp_path):
    async def run(env):
        engine = PacedEngine(slots=8)
        async with (
            engine.running(),
            served(config_for(engine, tmp_path), tmp_path, env) as sluice,
            httpx.AsyncClient(trust_env=False, timeout=30) as http,
        ):
            first = list(sluice.workers)
            assert len(first) == 2
            answers = [await ask(http, sluice.url) for _ in range(40)]
            assert {a.status_code for a in answers} == {200}
            assert len(run_ids(answers)) == 2  # chance of all at one: 2e-12

            # metrics: whoever is asked tells the sum, and it never goes down
            for _ in range(8):
                text = (await http.get(f"{sluice.url}/metrics", headers=HEADERS)).text
                assert counted(text, "sluice_requests_total") == 40
                assert counted(text, "gen_ai_server_request_duration_seconds_count") == 40

            # administration: both workers' requests, from either
            for _ in range(4):
                status = await http.get(f"{sluice.url}/admin/status", headers=HEADERS)
                assert status.json()["workers"] == 2
                assert len(status.json()["recent"]) == 40
            for answer in answers[:8]:
                wanted = answer.headers["x-request-id"]
                found = await http.get(f"{sluice.url}/admin/requests/{wanted}", headers=HEADERS)
                assert found.json()["id"] == wanted

            # one quota: of ten at once, four are admitted, wherever they land
            engine.pace = 0.2
            many = await asyncio.gather(*(ask(http, sluice.url) for _ in range(10)))
            assert sorted(a.status_code for a in many) == [200] * 4 + [429] * 6
            engine.pace = 0.002

            # a drained replica gets nothing from either
            await http.post(f"{sluice.url}/admin/replicas/r0/drain", headers=HEADERS)
            ready = [await http.get(f"{sluice.url}/ready", headers=HEADERS) for _ in range(12)]
            assert {r.status_code for r in ready} == {503}

            # the config file is read again by both
            file = tmp_path / "config.yaml"
            changed = json.loads(file.read_text())
            changed["models"]["m"]["variants"]["v"]["quality"] = 0.5
            file.write_text(json.dumps(changed))
            sluice.process.send_signal(signal.SIGHUP)

            async def taken():
                text = (await http.get(f"{sluice.url}/metrics", headers=HEADERS)).text
                hashes = re.findall(r'^sluice_config_info\{hash="(.*?)"', text, re.MULTILINE)
                done = counted(text, "sluice_config_reloads")
                return done >= 2 and len(hashes) == 2 and len(set(hashes)) == 1

            await until(taken)

            # a worker that dies is replaced, and what it counted is not lost
            async def kept():  # once a second, for whoever survives
                return requests_kept(tmp_path) == 50 - 6

            await until(kept)
            os.kill(first[0], signal.SIGKILL)

            async def replaced():
                now = sluice.workers
                try:
                    status = await http.get(f"{sluice.url}/admin/status", headers=HEADERS)
                except httpx.TransportError:  # it reached the one that dies
                    return False
                return len(now) == 2 and first[0] not in now and status.json()["workers"] == 2

            await until(replaced)
            for _ in range(8):
                text = (await http.get(f"{sluice.url}/metrics", headers=HEADERS)).text
                assert counted(text, "sluice_slo_met_total") == 44
            ready = [await http.get(f"{sluice.url}/ready", headers=HEADERS) for _ in range(12)]
            assert {r.status_code for r in ready} == {503}  # the new one leaves it alone too
            await http.post(f"{sluice.url}/admin/replicas/r0/restore", headers=HEADERS)
            more = [await ask(http, sluice.url) for _ in range(20)]
            assert {a.status_code for a in more} == {200}
            assert len(run_ids(more)) == 2

            # SIGTERM: what runs ends, nothing is left
            engine.pace = 0.05
            last = [asyncio.ensure_future(ask(http, sluice.url)) for _ in range(4)]

            async def busy():
                return engine.busy == 4

            await until(busy)
            workers = sluice.workers
            sluice.process.terminate()
            assert {a.status_code for a in await asyncio.gather(*last)} == {200}
            assert await sluice.process.wait() == 0
            assert alive(workers) == []
        log = tmp_path / "decisions.jsonl"
        assert len(list(log_files(log))) == 2
        for answer in answers:
            assert search(log, answer.headers["x-request-id"]) is not None

    with StoreServer() as store:
        asyncio.run(run({"SLUICE_REDIS_URL": store.url}))


def test_workers_end_with_their_parent(tmp_path):
    async def run(env):
        engine = PacedEngine()
        async with (
            engine.running(),
            served(config_for(engine, tmp_path), tmp_path, env) as sluice,
        ):
            workers = sluice.workers
            sluice.process.kill()

            async def gone():
                return not alive(workers)

            await until(gone)

    with StoreServer() as store:
        asyncio.run(run({"SLUICE_REDIS_URL": store.url}))


def told_to_serve(config, folder):
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))
    command = [sys.executable, "-m", "sluice", "serve", "-c", str(file), "--workers", "2"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_workers_without_a_store_are_refused_with_the_remedy(tmp_path):
    config = settings_for("http://127.0.0.1:9").model_dump(mode="json", by_alias=True)
    done = told_to_serve(config, tmp_path)
    assert done.returncode == 2
    assert "kind: redis" in done.stderr
    assert "SLUICE_REDIS_URL" in done.stderr


def test_a_port_that_is_taken_is_told(tmp_path):
    with contextlib.closing(held_port("127.0.0.1", 0)) as taken:
        taken.listen()
        config = config_for(PacedEngine(), tmp_path)
        config["server"]["port"] = taken.getsockname()[1]
        done = told_to_serve(config, tmp_path)
    assert done.returncode == 2
    assert "cannot listen on 127.0.0.1" in done.stderr


def test_a_worker_that_cannot_start_ends_the_start(tmp_path, monkeypatch):
    monkeypatch.delenv("SLUICE_REDIS_URL", raising=False)
    done = told_to_serve(config_for(PacedEngine(), tmp_path), tmp_path)
    assert done.returncode == 2
    assert "ended with code 2" in done.stderr
    assert "set SLUICE_REDIS_URL" in done.stderr


def test_a_worker_has_logs_and_a_name_in_the_store_of_its_own(tmp_path):
    config = config_for(PacedEngine(), tmp_path)
    config["logs"]["events"] = str(tmp_path / "events.log")
    settings = Settings.model_validate(config)
    job = Job(
        settings=settings.model_dump_json(by_alias=True),
        config=None,
        given={},
        number=1,
        name="1.2",
        folder="",
        local={},
        verbose=False,
    )
    assert Settings.model_validate_json(job.settings) == settings
    worker = own(job, settings)
    assert worker.logs.decisions == tmp_path / "decisions.worker-1.jsonl"
    assert worker.logs.events == tmp_path / "events.worker-1.2.log"
    assert worker.store.name().endswith(f"-{os.getpid()}")
    assert [place.url for place in worker.places] == [settings.fleet[0].url]
