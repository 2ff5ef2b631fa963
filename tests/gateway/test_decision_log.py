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


def test_a_record_that_cannot_be_made_is_one_line_lost(tmp_path):
    path = tmp_path / "d.jsonl"

    async def run():
        async with DecisionLog(path) as log:
            log.append(lambda: {"id": "a"})
            log.append(lambda: {"id": int("x")})
            log.append(lambda: {"id": "b"})
            assert [r["id"] for r in log.recent()] == ["b", "a"]
        assert (log.written, log.dropped) == (2, 1)

    asyncio.run(run())
    assert lines(path) == ["a", "b"]


def test_a_file_that_cannot_be_opened_loses_lines_and_the_log_still_ends(tmp_path):
    path = tmp_path / "d.jsonl"
    path.mkdir()

    async def run():
        async with DecisionLog(path) as log:
            for i in range(PENDING_BATCHES + 5):
                log.append(lambda i=i: {"id": str(i)})
                log.recent()
        assert (log.written, log.dropped) == (0, PENDING_BATCHES + 5)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_rotation_that_fails_loses_lines_and_the_log_goes_on(tmp_path):
    path = tmp_path / "d.jsonl"
    blocker = tmp_path / "d.jsonl.1"
    blocker.mkdir()
    (blocker / "x").touch()  # nothing can be moved over it

    async def run():
        async with DecisionLog(path, max_bytes=20, keep=1) as log:
            for i in range(4):
                log.append(lambda i=i: {"id": f"r{i:08d}"})
                log.recent()
        assert log.dropped > 0
        assert log.written + log.dropped == 4

    asyncio.run(asyncio.wait_for(run(), 10))
