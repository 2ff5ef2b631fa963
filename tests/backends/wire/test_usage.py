"""Usage of answers in one piece, small and long."""

import json

import pytest

from backends.wire.answer import HOLD_BYTES, AnswerMeter
from backends.wire.usage import usage_in_tail, usage_of
from domain.outcome import Usage, UsageSource

CHAT = {
    "usage": {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
}


def test_each_endpoint_s_spelling():
    engine = UsageSource.ENGINE
    expected = Usage(prompt=10, completion=5, cached=8, source=engine)
    assert usage_of(json.dumps(CHAT).encode()) == expected
    responses = {
        "input_tokens": 10,
        "output_tokens": 5,
        "input_tokens_details": {"cached_tokens": 8},
    }
    assert usage_of(json.dumps({"usage": responses}).encode()) == expected
    assert usage_of(json.dumps({"response": {"usage": responses}}).encode()) == expected
    embedding = {"usage": {"prompt_tokens": 10, "total_tokens": 10}}
    assert usage_of(json.dumps(embedding).encode()) == Usage(prompt=10, source=engine)


@pytest.mark.parametrize("spelling", ["completion_tokens", "output_tokens"])
@pytest.mark.parametrize(("said", "read"), [(3, 3), (0, 0), (7, None), (-1, None), (None, None)])
def test_the_engines_word_on_thinking_is_read(spelling, said, read):
    """Where it makes sense: no more than all tokens."""
    usage = {"prompt_tokens": 1, spelling: 5, f"{spelling}_details": {"reasoning_tokens": said}}
    assert usage_of(json.dumps({"usage": usage}).encode()).thinking == read


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"usage":null}', b'{"usage":{}}', b'{"usage":7}']
)
def test_no_usage_is_none(body):
    assert usage_of(body) is None
    assert usage_in_tail(body) is None


def feed(body, size):
    meter = AnswerMeter()
    early = [meter.feed(body[at : at + size]) for at in range(0, len(body), size)]
    return meter, early, meter.finish()


def test_a_small_answer_is_held_until_it_is_whole():
    body = json.dumps(CHAT).encode()
    meter, early, last = feed(body, 7)
    assert set(early) == {b""}
    assert last == body
    assert meter.usage().completion == 5


@pytest.mark.parametrize("size", [1000, HOLD_BYTES, HOLD_BYTES * 3])
def test_a_long_answer_is_passed_on_and_its_usage_found_at_the_end(size):
    body = json.dumps({"data": [{"embedding": [0.5] * 40_000, "usage": {}}], **CHAT}).encode()
    meter, early, last = feed(body, size)
    assert b"".join(early) + last == body
    assert last == b""
    assert meter.usage() == usage_of(body)


def test_a_long_answer_without_usage_has_none():
    meter, _, _ = feed(b'{"usage":{"prompt_tokens":1' + b" " * HOLD_BYTES * 2, 5000)
    assert meter.usage() is None
