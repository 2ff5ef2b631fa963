"""Workers answer one another; one that is gone is remembered by what it had counted."""

import asyncio

from gateway.siblings import Alone, Siblings


def test_each_answers_the_other_and_not_itself(tmp_path):
    async def run():
        one, two = Siblings(tmp_path, "0"), Siblings(tmp_path, "1")
        asked = []
        async with (
            one.answering({"say": lambda x: f"one {x}", "counts": lambda _: 1}, lambda: 1),
            two.answering({"say": asked.append, "counts": lambda _: 2}, lambda: 2),
        ):
            assert await two.ask("say", "hi") == ["one hi"]
            assert await one.ask("say", "é\n") == []  # it answered nothing
            assert asked == ["é\n"]
            assert await one.counts() == [2]
            assert await two.counts() == [1]

    asyncio.run(run())


def test_the_counts_of_one_that_ended_are_kept(tmp_path):
    async def run():
        one, two = Siblings(tmp_path, "0"), Siblings(tmp_path, "1")
        total = [0]
        async with one.answering({}, lambda: 0):
            async with two.answering({"counts": lambda _: total[0]}, lambda: total[0]):
                total[0] = 7
                assert await one.counts() == [7]
            assert await one.counts() == [7]
            assert await one.ask("counts") == []

    asyncio.run(run())


def test_one_that_does_not_answer_in_time_is_left_out(tmp_path):
    async def run():
        one = Siblings(tmp_path, "0", patience=0.05)
        (tmp_path / "1.json").write_bytes(b"5\n")
        async with one.answering({}, lambda: 0):
            stuck = asyncio.Event()

            async def never(reader, writer):
                await stuck.wait()
                writer.close()

            async with await asyncio.start_unix_server(never, str(tmp_path / "1.sock")):
                assert await one.ask("status") == []
                assert await one.counts() == [5]
                stuck.set()

    asyncio.run(run())


def test_alone_there_is_nobody():
    async def run():
        assert await Alone().ask("status") == await Alone().counts() == []

    asyncio.run(run())
