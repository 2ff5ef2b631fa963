"""The response reader: whole answers whatever the cuts, and nothing that is not HTTP/1.1."""

import itertools

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.wire.http import MAX_INFORMATIONAL, ResponseReader, header_line
from domain.errors import BackendProtocolError

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 11\r\n\r\nhello world"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b"6\r\nhello \r\n5;ext=1\r\nworld\r\n0\r\nx-trailer: 1\r\n\r\n"
)
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello world"


def read(*pieces, max_head=4096):
    reader = ResponseReader(max_head)
    return reader, b"".join(reader.feed(piece) for piece in pieces)


@pytest.mark.parametrize("wire", [LENGTH, CHUNKED])
def test_a_body_comes_out_whole_wherever_the_network_cuts(wire):
    for cut in range(1, len(wire)):
        reader, body = read(wire[:cut], wire[cut:])
        assert (body, reader.complete, reader.reusable) == (b"hello world", True, True), cut
        assert reader.head.status == 200


@pytest.mark.parametrize("wire", [LENGTH, CHUNKED])
def test_a_body_comes_out_whole_byte_by_byte(wire):
    reader, body = read(*(bytes([byte]) for byte in wire))
    assert (body, reader.complete, reader.reusable) == (b"hello world", True, True)


def test_header_names_are_in_lower_case_and_in_order():
    reader, _ = read(LENGTH)
    assert reader.head.headers == [(b"content-type", b"text/plain"), (b"content-length", b"11")]


def test_a_trailer_is_no_header():
    reader, _ = read(CHUNKED)
    assert reader.head.headers == [(b"transfer-encoding", b"chunked")]


def test_a_body_without_a_length_ends_with_the_connection():
    reader, body = read(UNTIL_CLOSE)
    assert (body, reader.complete) == (b"hello world", False)
    assert reader.eof() is True
    assert reader.reusable is False


@pytest.mark.parametrize("wire", [LENGTH, CHUNKED])
def test_a_body_cut_by_the_end_of_the_connection_is_not_complete(wire):
    for cut in range(len(wire) - 1):
        reader, _ = read(wire[:cut])
        assert reader.eof() is False, cut


def test_interim_responses_are_skipped():
    reader, body = read(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + LENGTH
    )
    assert (reader.head.status, body, reader.complete) == (200, b"hello world", True)
    assert (b"link", b"x") not in reader.head.headers


def test_interim_responses_without_end_are_refused():
    with pytest.raises(BackendProtocolError):
        read(b"HTTP/1.1 100 Continue\r\n\r\n" * (MAX_INFORMATIONAL + 1))


@pytest.mark.parametrize(
    "junk", [b"\x00\x01", b"garbage", LENGTH, b"HTTP/1.1 100 Continue\r\n\r\n", b"H"]
)
@pytest.mark.parametrize("apart", [False, True])
def test_bytes_after_the_end_spoil_the_connection_but_not_the_answer(junk, apart):
    reader, body = read(LENGTH, junk) if apart else read(LENGTH + junk)
    assert body == b"hello world"
    assert reader.complete is True
    assert reader.reusable is False


def test_connection_close_is_not_reusable():
    reader, _ = read(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    assert (reader.complete, reader.reusable) == (True, False)


def test_http_1_0_is_not_reusable():
    reader, _ = read(b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi")
    assert (reader.complete, reader.reusable) == (True, False)


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_body_is_complete_with_its_head(status):
    reader, body = read(b"HTTP/1.1 %d X\r\n\r\n" % status)
    assert (body, reader.complete, reader.reusable) == (b"", True, True)


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused(wire):
    with pytest.raises(BackendProtocolError):
        read(wire)


@pytest.mark.parametrize("piece", [1, 100, 5000])
def test_a_head_above_the_limit_is_refused_before_it_ends(piece):
    reader = ResponseReader(2048)
    endless = b"HTTP/1.1 200 OK\r\nx: " + b"a" * 10_000
    pieces = [endless[at : at + piece] for at in range(0, len(endless), piece)]
    with pytest.raises(BackendProtocolError, match="2048"):
        all(reader.feed(piece) is not None for piece in pieces)


def test_trailers_above_the_limit_of_a_head_are_refused_before_they_end():
    reader = ResponseReader(2048)
    reader.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ")
    with pytest.raises(BackendProtocolError, match="trailers exceed 2048 bytes"):
        all(reader.feed(b"a" * 100) == b"" for _ in range(30))


def test_many_small_chunks_do_not_count_as_trailers():
    reader = ResponseReader(64)
    reader.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    body = b"".join(reader.feed(piece) for _ in range(100) for piece in (b"1\r\n", b"a", b"\r\n"))
    reader.feed(b"0\r\n\r\n")
    assert (body, reader.complete) == (b"a" * 100, True)


def test_a_long_body_in_the_same_read_does_not_count_as_head():
    wire = b"HTTP/1.1 200 OK\r\ncontent-length: 9000\r\n\r\n" + b"a" * 9000
    reader, body = read(wire, max_head=256)
    assert (len(body), reader.complete) == (9000, True)


def test_one_reader_reads_one_answer_after_another():
    reader = ResponseReader(4096)
    for wire in (CHUNKED, LENGTH, CHUNKED):
        reader.reset()
        assert not reader.started
        assert reader.feed(wire) == b"hello world"
        assert reader.reusable


@given(
    body=st.binary(max_size=400),
    sizes=st.lists(st.integers(1, 60), max_size=8),
    cuts=st.lists(st.integers(0, 900), max_size=6),
)
def test_any_chunking_and_any_cuts_give_the_body(body, sizes, cuts):
    chunks, rest = [], body
    for size in [*sizes, len(body) or 1]:
        piece, rest = rest[:size], rest[size:]
        if piece:
            chunks.append(b"%x\r\n%b\r\n" % (len(piece), piece))
    wire = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(chunks) + b"0\r\n\r\n"
    )
    edges = [0, *sorted(cut for cut in cuts if cut < len(wire)), len(wire)]
    pieces = [wire[a:b] for a, b in itertools.pairwise(edges) if b > a]
    reader, out = read(*pieces)
    assert (out, reader.complete, reader.reusable) == (body, True, True)


@given(st.binary(max_size=300), st.sampled_from([LENGTH, CHUNKED, UNTIL_CLOSE, b""]), st.data())
def test_any_bytes_are_read_or_refused_but_never_crash(noise, wire, data):
    cut = data.draw(st.integers(0, len(wire)))
    reader = ResponseReader(4096)
    try:
        reader.feed(wire[:cut] + noise)
        reader.feed(wire[cut:])
    except BackendProtocolError:
        return
    assert reader.reusable <= reader.complete


@pytest.mark.parametrize("value", [b"a\r\nx: y", b"a\n", b"a\0b"])
def test_a_header_value_cannot_forge_another_header(value):
    with pytest.raises(ValueError, match="line break"):
        header_line(b"x-request-id", value)


def test_a_header_line_is_what_a_parser_reads_back():
    seen = []

    class Collect:
        def on_header(self, name, value):
            seen.append((name, value))

    parser = httptools.HttpResponseParser(Collect())
    parser.feed_data(b"HTTP/1.1 200 OK\r\n" + header_line(b"x-a", b"b c") + b"\r\n")
    assert seen == [(b"x-a", b"b c")]
