"""The stream meter: tokens counted, usage taken out, every other byte passed on as it came."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.wire.sse import (
    CHAT_CONTENT,
    COMPLETION_CONTENT,
    MAX_EVENT,
    RESPONSE_CONTENT,
    StreamMeter,
    payload,
)
from domain.errors import BackendProtocolError
from domain.outcome import Usage, UsageSource


def event(body, end=b"\n\n", spaced=False):
    separators = None if spaced else (",", ":")
    return b"data: " + json.dumps(body, separators=separators).encode() + end


def chunk(delta, finish=None, index=0, **more):
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {"id": "c1", "object": "chat.completion.chunk", "choices": [choice], **more}


ROLE = event(chunk({"role": "assistant", "content": ""}))
WORDS = [event(chunk({"content": word})) for word in ("Hel", "lo", ' "content":"" ', "\n\n")]
STOP = event(chunk({}, finish="stop"))
COUNT = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
USAGE = event({"id": "c1", "object": "chat.completion.chunk", "choices": [], "usage": COUNT})
DONE = b"data: [DONE]\n\n"
STREAM = [ROLE, *WORDS, STOP, USAGE, DONE]


def run(pieces, **options):
    """Feed pieces at times 1, 2, 3, ...; return the meter and the bytes that came out."""
    meter = StreamMeter(options.pop("content", CHAT_CONTENT), **options)
    out = b"".join(meter.feed(piece, float(at)) for at, piece in enumerate(pieces, 1))
    return meter, out + meter.finish(99.0)


def test_the_usage_event_is_taken_out_and_read():
    meter, out = run(STREAM)
    assert out == b"".join(STREAM).replace(USAGE, b"")
    assert meter.usage() == Usage(prompt=9, completion=4, source=UsageSource.ENGINE)


def test_the_usage_event_is_kept_for_who_asked():
    meter, out = run(STREAM, keep_usage=True)
    assert out == b"".join(STREAM)
    assert meter.usage().completion == 4


def test_two_usage_events_become_the_last_one():
    first = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}})
    meter, out = run([ROLE, WORDS[0], STOP, first, USAGE, DONE], keep_usage=True)
    assert out == ROLE + WORDS[0] + STOP + USAGE + DONE
    assert meter.usage().completion == 4


def test_the_role_is_no_token_and_the_clock_starts_with_the_first_word():
    meter, _ = run(STREAM)
    assert (meter.events, meter.first_at, meter.last_at) == (4, 2.0, 5.0)
    assert meter.done
    assert meter.complete


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("cut", range(1, sum(map(len, STREAM)), 7))
def test_a_cut_anywhere_changes_nothing(cut, keep):
    wire = b"".join(STREAM)
    meter, out = run([wire[:cut], wire[cut:]], keep_usage=keep)
    assert out == (wire if keep else wire.replace(USAGE, b""))
    assert (meter.events, meter.usage().completion, meter.done) == (4, 4, True)


@pytest.mark.parametrize("ends", [b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r\r"])
@pytest.mark.parametrize("spaced", [False, True])
def test_every_line_end_and_spacing(ends, spaced):
    bodies = [chunk({"role": "assistant"}), chunk({"content": "a"}), chunk({"content": "b"})]
    last = {"choices": [], "usage": COUNT}
    stream = [event(body, ends, spaced) for body in [*bodies, chunk({}, "stop"), last]]
    stream.append(b"data: [DONE]" + ends)
    for pieces in (stream, [b"".join(stream)], [bytes([b]) for b in b"".join(stream)]):
        meter, out = run(pieces)
        assert out == b"".join(stream).replace(stream[4], b"")
        assert (meter.events, meter.usage().completion, meter.done) == (2, 4, True)


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"},
        {"reasoning_content": "hm"},
        {"reasoning": "hm", "content": ""},
        {"content": None, "reasoning_content": "hm"},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, "id": "t", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": '{"a":'}}]},
        {"function_call": {"name": "f", "arguments": ""}},
        {"role": "assistant", "content": "x"},
    ],
)
def test_text_reasoning_and_tool_calls_are_content(delta):
    meter, _ = run([event(chunk(delta))])
    assert (meter.events, meter.first_at) == (1, 1.0)


@pytest.mark.parametrize(
    "body",
    [
        chunk({"role": "assistant"}),
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": None, "tool_calls": []}),
        chunk({"content": "", "tool_calls": None}, finish="stop"),
        {"choices": [], "prompt_filter_results": []},
        {"choices": [], "usage": None},
    ],
)
def test_roles_ends_and_bookkeeping_are_not(body):
    meter, out = run([event(body)])
    assert (meter.events, meter.first_at) == (0, None)
    assert out == event(body)


def test_comments_and_named_events_pass_and_count_nothing():
    pieces = [b": keep-alive\n\n", b"event: ping\ndata: {}\n\n", b"id: 1\nretry: 100\n\n"]
    meter, out = run(pieces)
    assert out == b"".join(pieces)
    assert (meter.events, meter.complete) == (0, False)


def test_logprobs_are_not_text():
    body = chunk({})
    body["choices"][0]["logprobs"] = {"content": [{"token": "x", "top_logprobs": []}]}
    meter, _ = run([event(body)])
    assert meter.events == 0


def test_a_reason_to_finish_goes_out_once():
    meter, out = run([*WORDS, STOP, STOP, DONE])
    assert out == b"".join(WORDS) + STOP + DONE
    assert meter.complete


def test_each_choice_may_finish_once():
    stops = [event(chunk({}, "stop", index=i)) for i in (0, 1)]
    _, out = run([*stops, stops[1], DONE], choices=2)
    assert out == b"".join(stops) + DONE


def test_several_choices_in_one_event_do_not_hide_the_end():
    both = event(
        {"choices": [chunk({"content": w}, index=i)["choices"][0] for i, w in enumerate("ab")]}
    )
    meter, out = run([both, both + DONE, both + USAGE], choices=2)
    assert meter.done
    assert out == both + both + DONE + both


def test_usage_beside_the_last_choice_stays_where_it_is():
    last = event(chunk({}, "stop", usage=COUNT))
    meter, out = run([*WORDS, last, DONE])
    assert out == b"".join(WORDS) + last + DONE
    assert meter.usage().completion == 4


def test_usage_in_every_event_counts_as_its_last():
    pieces = [event(chunk({"content": "x"}, usage={"completion_tokens": n})) for n in (1, 2, 3)]
    meter, out = run([*pieces, STOP, DONE])
    assert meter.usage().completion == 3
    assert meter.events == 3
    assert out == b"".join([*pieces, STOP, DONE])


def test_without_usage_there_is_none_to_report():
    meter, _ = run([*WORDS, STOP, DONE])
    assert meter.usage() is None
    assert meter.events == 4


@pytest.mark.parametrize(
    "usage", [{"completion_tokens": -1}, {"completion_tokens": 1e300}, {}, {"prompt_tokens": "x"}]
)
def test_absurd_usage_is_no_usage(usage):
    meter, _ = run([event({"choices": [], "usage": usage}), DONE])
    assert meter.usage() is None


@pytest.mark.parametrize(
    "wire",
    [
        event({"error": {"message": "boom", "code": 500}}),
        b'event: error\ndata: {"error": "boom"}\n\n',
        event({"type": "error", "message": "boom"}),
    ],
)
def test_an_error_event_is_noticed_and_passed(wire):
    meter, out = run([WORDS[0], wire])
    assert b"boom" in meter.error
    assert out == WORDS[0] + wire


def test_the_word_error_in_text_is_no_error():
    meter, _ = run([event(chunk({"content": '{"error": "boom"}'})), event({"error": None})])
    assert meter.error is None


def test_a_last_event_without_its_blank_line_is_passed_at_a_clean_end():
    meter, out = run([*WORDS, STOP, b"data: [DONE]"])
    assert out.endswith(b"data: [DONE]")
    assert meter.done


def test_half_an_event_stays_behind_when_the_stream_breaks():
    meter = StreamMeter(CHAT_CONTENT)
    assert meter.feed(WORDS[0] + WORDS[1][:20], 1.0) == WORDS[0]


def test_an_endless_event_is_refused():
    meter = StreamMeter(CHAT_CONTENT)
    with pytest.raises(BackendProtocolError, match="exceeds"):
        all(meter.feed(b"a" * 65536, 1.0) == b"" for _ in range(MAX_EVENT // 65536 + 2))


def test_completions_count_text():
    stream = [event({"choices": [{"index": 0, "text": t, "finish_reason": None}]}) for t in "ab"]
    meter, _ = run([event({"choices": [{"text": ""}]}), *stream, DONE], content=COMPLETION_CONTENT)
    assert (meter.events, meter.first_at) == (2, 2.0)


def test_responses_count_deltas_and_end_without_done():
    def named(kind, **body):
        return b"event: %b\n" % kind.encode() + event({"type": kind, **body})

    stream = [
        named("response.created", response={"status": "in_progress", "usage": None}),
        named("response.output_text.delta", delta="a"),
        named("response.output_text.delta", delta="b"),
        named("response.output_text.done", text="ab"),
        named(
            "response.completed",
            response={
                "error": None,
                "output": [{"content": [{"text": "ab"}]}],
                "tools": [{"parameters": {"properties": {"error": {"type": "object"}}}}],
                "usage": {"input_tokens": 3, "output_tokens": 2},
            },
        ),
    ]
    meter, out = run(stream, content=RESPONSE_CONTENT)
    assert out == b"".join(stream)
    assert (meter.events, meter.complete) == (2, True)
    assert meter.usage() == Usage(prompt=3, completion=2, source=UsageSource.ENGINE)


def thinking(words, field="reasoning_content", **more):
    return [event(chunk({field: word, **more})) for word in words]


def answering(words, **more):
    return [event(chunk({"content": word, **more})) for word in words]


@pytest.mark.parametrize("glued", [1, 2, 5])
@pytest.mark.parametrize(
    "stream",
    [
        thinking("abc") + answering("xy"),
        thinking("abc", "reasoning") + answering("xy", reasoning=None),
        thinking("abc", content=None) + answering("xy", reasoning_content=""),
        [*thinking("abc", content=""), event(chunk({"tool_calls": [{"index": 0}]}))],
        answering(["<think>", "b", "</think>", "x", "y"]),
        answering(["\n<think>\nb", "c", "</think>\n", "x"]),
        [e.replace(b"<", rb"\u003c") for e in answering(["<think>", "b", "</think>", "x"])],
        [event({"choices": [{"text": t}]}) for t in ["<think>", "b", "</think>", "x"]],
    ],
)
def test_the_end_of_thinking_is_seen(stream, glued):
    """In a field of its own or in tags, however many events one read brings."""
    text = b'"text":' in stream[0]
    events = [ROLE, *stream, STOP, DONE]
    wire = [b"".join(events[i : i + glued]) for i in range(0, len(events), glued)]
    meter, out = run(wire, content=COMPLETION_CONTENT if text else CHAT_CONTENT)
    assert out == b"".join(wire)
    assert (meter.events, meter.thought) == (len(stream), 3)
    assert meter.answer_at is not None
    assert meter.thinking(200.0) == pytest.approx(200.0 * 3 / len(stream))


def test_the_boundary_is_dated_by_its_read():
    """The answer begins when its first text comes."""
    meter, _ = run([ROLE, *thinking("abc"), *answering("xy")])
    assert meter.answer_at == 5.0


def test_a_stream_that_does_not_think_has_no_boundary():
    """Nor does one that speaks of tags in its answer, or has gone back to thinking after it."""
    meter, _ = run([ROLE, *answering(["I", " write </think>", "."]), *thinking("z"), STOP, DONE])
    assert (meter.thought, meter.answer_at, meter.thinking(4.0)) == (None, None, 0.0)


def test_thinking_that_never_ends_is_all_there_is():
    """In a field of its own it is known to be thinking; a tag may have been closed in pieces."""
    meter, _ = run([ROLE, *thinking("abc"), event(chunk({}, finish="length")), DONE])
    assert (meter.thought, meter.thinking(30.0)) == (None, 30.0)
    meter, _ = run([ROLE, *answering(["<think>", "b", "</", "think>", "x"]), STOP, DONE])
    assert (meter.thought, meter.thinking(30.0)) == (None, None)


def test_several_choices_and_responses_are_not_told_apart():
    """Their parts mix, or look alike."""
    meter, _ = run([ROLE, *thinking("abc"), *answering("xy")], choices=2)
    assert (meter.events, meter.thinking(9.0)) == (5, None)
    delta = event({"type": "response.reasoning_text.delta", "delta": "hm"})
    meter, _ = run([delta], content=RESPONSE_CONTENT)
    assert (meter.events, meter.thinking(9.0)) == (1, None)


def test_payload_joins_data_lines():
    assert payload(b"event: x\r\ndata: a\r\ndata:b\r\n\r\n") == b"a\nb"


text = st.text(max_size=12) | st.sampled_from(
    ['"content":"', '\\"content":"x', "\n\n", "data: [DONE]", '"usage":{', "\r\n\r\n", '"'] * 2
)


@given(
    words=st.lists(text, max_size=8),
    ascii_only=st.booleans(),
    end=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    keep=st.booleans(),
    cuts=st.lists(st.integers(0, 3000), max_size=10),
)
def test_whatever_the_text_says_the_count_is_right_and_the_bytes_are_kept(
    words, ascii_only, end, keep, cuts
):
    """Against the decoded stream as the oracle: text full of our own patterns fools nothing."""
    events = [
        b"data: " + json.dumps(chunk({"content": w}), ensure_ascii=ascii_only).encode() + end
        for w in words
    ]
    usage = b"data: " + json.dumps({"choices": [], "usage": COUNT}).encode() + end
    stream = [*events, b"data: " + json.dumps(chunk({}, "stop")).encode() + end, usage]
    stream.append(b"data: [DONE]" + end)
    wire = b"".join(stream)
    edges = [0, *sorted(cut for cut in cuts if cut < len(wire)), len(wire)]
    meter, out = run([wire[a:b] for a, b in itertools.pairwise(edges) if b > a], keep_usage=keep)
    assert out == (wire if keep else b"".join(stream[:-2]) + stream[-1])
    assert meter.events == sum(1 for w in words if w)
    assert meter.usage().completion == 4
    assert meter.done


@given(st.lists(st.binary(max_size=60), max_size=10))
def test_any_bytes_come_out_as_they_went_in(pieces):
    """Noise holds no usage event, so nothing may be taken out of it."""
    noise = [piece.replace(b"usage", b"").replace(b"finish", b"") for piece in pieces]
    _, out = run(noise)
    assert out == b"".join(noise)
