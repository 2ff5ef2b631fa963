"""Feedback through HTTP: by request id, from the tenant it was answered for, once; and replayed."""

import asyncio

import httpx
import pytest

from gateway.event_log import read, read_header, replay
from gateway.tenants import hash_of
from sluice.recorded import core_of
from tests.fakes.paced_engine import PacedEngine
from tests.fakes.whole_gateway import serving

pytestmark = pytest.mark.integration

TENANTS = {
    "a": {"keys": {"k": {"hash": hash_of("k-a")}}},
    "b": {"keys": {"k": {"hash": hash_of("k-b")}}},
}
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def test_feedback_is_taken_from_whom_it_concerns_and_reaches_the_core(tmp_path):
    events = tmp_path / "events.bin"
    logs = {"decisions": str(tmp_path / "decisions.jsonl"), "events": str(events)}

    async def run():
        async with (
            PacedEngine().running() as engine,
            serving(engine.url, tenants=TENANTS, logs=logs) as gateway,
            httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http,
        ):

            async def judge(key, **body):
                return await http.post("/v1/feedback", headers=bearer(key), json=body)

            answer = await http.post("/v1/chat/completions", headers=bearer("k-a"), json=BODY)
            request_id = answer.headers["x-request-id"]
            core = gateway.shell._core
            before = core.estimator._quality.copy()
            assert (await judge("nobody", id=request_id, score=0)).status_code == 401
            theirs = await judge("k-b", id=request_id, score=0)
            assert theirs.status_code == 404
            assert theirs.json()["error"]["code"] == "request_not_found"
            wrong = await judge("k-a", id=request_id, score=2)
            assert wrong.status_code == 400
            assert "score" in wrong.json()["error"]["message"]
            long = await http.post("/v1/feedback", headers=bearer("k-a"), content=b" " * 5000)
            assert long.status_code == 413
            assert (core.estimator._quality == before).all()
            taken = await judge("k-a", id=request_id, score=0)
            assert taken.status_code == 200
            assert taken.json() == {
                "object": "feedback",
                "id": request_id,
                "variant": "v",
                "score": 0.0,
            }
            assert (core.estimator._quality < before).all()
            again = await judge("k-a", id=request_id, score=1)
            assert again.status_code == 409
            metrics = (await http.get("/metrics")).text
            assert 'sluice_feedback_total{variant="v"} 1.0' in metrics
            recent = (await http.get("/admin/status")).json()["recent"]
            assert [record["id"] for record in recent] == [request_id]
            return request_id

    request_id = asyncio.run(run())
    lines = (tmp_path / "decisions.jsonl").read_text().splitlines()
    assert any(f'"feedback_to":"{request_id}"' in line for line in lines)
    assert replay(read(events), core_of(read_header(events)).handle).differs_at is None
