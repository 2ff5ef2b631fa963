"""Records come out whole, in order, across rotations; a slow disk loses lines, never time."""

import asyncio

import orjson
import pytest

from gateway.decision_log import PENDING_BATCHES, DecisionLog, log_files, search


def lines(path):
    files = reversed(list(log_files(path)))
    return [orjson.loads(line)["id"] for f in files for line in f.read_bytes().splitlines()]


def test_records_are_written_when_it_closes(tmp_path):
    path = tmp_path / "deep" / "decisions.jsonl"

    async def run():
        async with DecisionLog(path) as log:
            for i in range(50):
                log.append(lambda i=i: {"id": f"r{i}"})
            assert log.find("r49") == {"id": "r49"}
        assert (log.written, log.dropped) == (50, 0)

    asyncio.run(run())
    assert lines(path) == [f"r{i}" for i in range(50)]


def test_files_rotate_and_the_oldest_is_lost(tmp_path):
    path = tmp_path / "d.jsonl"

    async def run():
        async with DecisionLog(path, max_bytes=100, keep=2) as log:
            for i in range(40):
                log.append(lambda i=i: {"id": f"r{i:02d}"})
                log.recent()  # a batch each

    asyncio.run(run())
    kept = lines(path)
    assert kept == [f"r{i:02d}" for i in range(40 - len(kept), 40)]
    assert 10 <= len(kept) < 40
    assert len(list(log_files(path))) == 3


def test_a_stuck_writer_drops_and_counts(tmp_path):
    async def run():
        log = DecisionLog(tmp_path / "d.jsonl")
        log._writer = True  # never started: nothing takes batches
        for i in range(PENDING_BATCHES + 5):
            log.append(lambda i=i: {"id": str(i)})
            log.recent()
        log._timer.cancel()
        return log.dropped

    assert asyncio.run(run()) == 5


def test_without_a_path_recent_ones_are_kept():
    async def run():
        async with DecisionLog(None, recent=3) as log:
            for i in range(5):
                log.append(lambda i=i: {"id": str(i)})
            return [r["id"] for r in log.recent()]

    assert asyncio.run(run()) == ["4", "3", "2"]


@pytest.mark.parametrize("wanted", ["a", "b", "cut", "none"])
def test_search_finds_the_latest_whole_line(tmp_path, wanted):
    path = tmp_path / "d.jsonl"
    path.with_name("d.jsonl.1").write_bytes(b'{"id":"b","n":1}\n')
    path.write_bytes(b'{"id":"a","n":1}\n{"id":"a","n":2,"x":"b"}\n{"id":"cut"')
    expected = {"a": {"id": "a", "n": 2, "x": "b"}, "b": {"id": "b", "n": 1}}
    assert search(path, wanted) == expected.get(wanted)
