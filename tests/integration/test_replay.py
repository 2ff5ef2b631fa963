"""Open-loop load: due times hold, whatever the server does; plans come from logs too."""

import asyncio
import json

import numpy as np
import pytest

from domain.request import Slo
from sluice.cli import main
from tests.fakes.engine import refused_url
from tests.fakes.paced_engine import PacedEngine
from tests.fakes.whole_gateway import LoopThread, serving
from training.replay import ClassPlan, Options, Replay, bodies, from_decision_log
from training.replay_report import summary
from training.traces import trace

pytestmark = pytest.mark.integration


def plan(arrivals, prompt=20, output=4, **columns):
    n = len(arrivals)
    return trace(np.array(arrivals, float), np.full(n, prompt), np.full(n, output), **columns)


def run(found, url, **options):
    async def go():
        replay = Replay(
            found,
            url,
            options=Options(**options),
            classes={"standard": ClassPlan(slo=Slo(ttft=5.0))},
            keys={"": "k"},
        )
        return await replay.run()

    return asyncio.run(go())


def over(engine, found, **options):
    async def go():
        async with engine.running():
            replay = Replay(
                found,
                engine.url,
                options=Options(**options),
                classes={"standard": ClassPlan(slo=Slo(ttft=5.0))},
                keys={},
            )
            return await replay.run()

    return asyncio.run(go())


def test_every_request_is_sent_when_due_and_counted():
    engine = PacedEngine(slots=8)
    results = over(engine, plan([0.0, 0.05, 0.05, 0.2]))
    assert [r.due for r in results] == pytest.approx([0.0, 0.05, 0.05, 0.2])
    assert all(r.finished and r.tokens == 4 for r in results)
    assert all(r.prompt_tokens == 7 for r in results)  # the engine's own count
    assert all(0 <= r.sent - r.due < 1.0 for r in results)
    assert len(results[0].gaps) <= 3


def test_a_slow_server_does_not_slow_the_clock():
    """With one slot, the last of five waits for four others, and that is in its figure."""
    engine = PacedEngine(slots=1, prefill=0.1, pace=0.001)
    results = over(engine, plan([0.0] * 5))
    waits = sorted(r.ttft for r in results)
    assert waits[-1] > 4 * 0.1
    assert max(r.sent for r in results) < 0.4


def test_followers_wait_for_their_predecessor_and_think():
    engine = PacedEngine(slots=4)
    found = plan(
        [0.0, 0.0],
        follows=np.array([0, 0]),
        think=np.array([0.0, 0.1]),
        session=np.array([5, 5]),
    )
    first, second = over(engine, found)
    assert second.due == pytest.approx(first.ended + 0.1, abs=0.02)
    assert second.finished


def test_dead_servers_are_errors_not_hangs():
    results = run(plan([0.0, 0.01]), asyncio.run(refused_url()))
    assert [r.error for r in results] == ["BackendUnavailable"] * 2
    assert summary(results, {})["attainment"] == 0.0


def test_lengths_can_be_hidden_from_the_gateway():
    made = json.loads(bodies(plan([0.0], output=9), Options(length_field="n_predict"), 0)[0])
    assert made["n_predict"] == 9
    assert "max_tokens" not in made


def test_shared_prefix_blocks_share_text():
    found = plan([0.0, 0.0], prompt=30, blocks=[[1, 2], [1, 3]], block_tokens=10.0)
    one, two = (
        json.loads(b)["messages"][0]["content"].split() for b in bodies(found, Options(), 0)
    )
    assert one[:10] == two[:10]
    assert one[10:20] != two[10:20]
    assert len(one) == 30


def test_the_command_replays_a_decision_log_through_a_gateway(tmp_path, capsys):
    """Requests that went through a gateway go through it again, and the report says how it went."""
    log = tmp_path / "d.jsonl"
    with LoopThread() as loop:
        engine = PacedEngine(slots=8)
        with (
            loop.holding(engine.running),
            loop.holding(lambda: serving(engine.url, logs={"decisions": log})) as gateway,
        ):
            asked = ["replay", "--url", gateway.url, "--poisson", "--count", "12", "--rate", "60"]
            assert main([*asked, "--output", "5", "--slo", "ttft=5000", "--json"]) == 0
            first = json.loads(capsys.readouterr().out)
    assert (first["requests"], first["errors"]) == (12, {})
    assert first["attainment"] == 1.0
    assert first["shares"] == {"r0": 1.0}
    assert first["predictions"]["n"] == 12
    found = from_decision_log(log)
    assert len(found) == 12
    assert set(found.tenants) == {"anonymous"}
    assert np.all(found.output >= 1)


@pytest.mark.parametrize(
    "words",
    [
        ["--poisson", "--slo", "speed=3"],
        ["--poisson", "--class", "x=much"],
        ["--trace", "nothing"],
        ["--log", "/nonexistent"],
        ["--poisson", "-c", "/nonexistent.yaml"],
    ],
)
def test_bad_input_exits_with_2(words, capsys):
    assert main(["replay", "--url", "http://127.0.0.1:1", *words]) == 2
    assert capsys.readouterr().err
