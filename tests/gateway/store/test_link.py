"""Bytes to replies, wherever the network cuts them, and store addresses."""

import pytest

from gateway.store.link import ReplyReader, StoreRefusal, address, command

WIRE = b"+OK\r\n:42\r\n$5\r\na\r\nbc\r\n$-1\r\n-ERR no\r\n$0\r\n\r\n:1\r\n"
REPLIES = [b"OK", 42, b"a\r\nbc", None, StoreRefusal("ERR no"), b"", 1]


@pytest.mark.parametrize("cut", range(1, len(WIRE)))
def test_replies_survive_any_split(cut):
    reader = ReplyReader()
    assert reader.feed(WIRE[:cut]) + reader.feed(WIRE[cut:]) == REPLIES


def test_one_byte_at_a_time():
    reader = ReplyReader()
    assert [r for i in range(len(WIRE)) for r in reader.feed(WIRE[i : i + 1])] == REPLIES


def test_an_array_is_no_reply_of_ours():
    with pytest.raises(ValueError, match="unexpected reply"):
        ReplyReader().feed(b"*1\r\n:1\r\n")


def test_commands_are_length_prefixed():
    assert command(b"AUTH", b"p\r\n") == b"*2\r\n$4\r\nAUTH\r\n$3\r\np\r\n\r\n"


def test_addresses_are_parsed_and_the_password_is_decoded():
    where = address("rediss://me:p%40ss@store.example:7000/3")
    assert (where.host, where.port, where.user, where.password) == (
        "store.example",
        7000,
        "me",
        "p@ss",
    )
    assert (where.database, where.tls) == (3, True)
    assert address("valkey://127.0.0.1").port == 6379


@pytest.mark.parametrize("url", ["http://h", "redis://", "h:6379", "redis://h/x"])
def test_other_addresses_are_refused(url):
    with pytest.raises(ValueError):  # noqa: PT011 - two messages, one of them int's own
        address(url)
