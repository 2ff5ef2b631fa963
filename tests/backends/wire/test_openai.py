"""Request bodies: the right facts, the smallest change, and no two readings of one body."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.wire.openai import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RESPONSES,
    SALT_FIELDS,
    RequestParser,
    Salt,
    splice,
)
from domain.errors import MalformedBody

parser = RequestParser()
HELLO = [{"role": "user", "content": "hello"}]


def body(**fields):
    return json.dumps({"model": "m", "messages": HELLO, **fields}).encode()


def facts(surface=CHAT, raw=None, **fields):
    return parser.parse(surface, body(**fields) if raw is None else raw)


def refusal(raw, surface=CHAT):
    with pytest.raises(MalformedBody) as caught:
        parser.parse(surface, raw)
    return caught.value


def test_chat_facts():
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = facts(
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "image_url"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ],
        stream=True,
        n=2,
        max_tokens=5,
        max_completion_tokens=9,
        tools=tools,
        response_format={"type": "json_object"},
        stream_options={"include_usage": True},
    )
    assert (found.model, found.stream, found.choices, found.max_tokens) == ("m", True, 2, 9)
    assert found.turns == (("system", "be brief"), ("user", "what"), ("tool", "42"))
    assert (found.system_text, found.user_text) == ("be brief", "what")
    assert found.prompt_chars == 8 + 4 + 2 + len('[{"id": "1"}]') + len(json.dumps(tools))
    assert (found.has_tools, found.has_format, found.has_media) == (True, True, True)
    assert found.wants_usage
    assert found.usage_edit is None


def test_absent_and_null_fields_are_the_same():
    raw = body(stream=None, n=None, max_tokens=None, tools=None, response_format=None)
    found = facts(raw=raw)
    assert (found.stream, found.choices, found.max_tokens) == (False, 1, None)
    assert (found.has_tools, found.has_format, found.has_media) == (False, False, False)
    assert found.prompt_chars == 5


@pytest.mark.parametrize(
    ("prompt", "turns", "ids"),
    [
        ("abc", (("", "abc"),), 0),
        (["a", "bc"], (("", "a"), ("", "bc")), 0),
        ([1, 2, 3], (), 3),
        ([[1, 2], [3]], (), 3),
    ],
)
def test_bare_prompts(prompt, turns, ids):
    raw = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 4, "stream": True}).encode()
    found = parser.parse(COMPLETIONS, raw)
    assert (found.turns, found.prompt_ids, found.max_tokens) == (turns, ids, 4)
    assert found.usage_edit is not None
    raw = json.dumps({"model": "m", "input": prompt}).encode()
    found = parser.parse(EMBEDDINGS, raw)
    assert (found.turns, found.prompt_ids, found.max_tokens) == (turns, ids, 0)


def test_embeddings_never_stream():
    raw = json.dumps({"model": "m", "input": "a", "stream": True}).encode()
    assert parser.parse(EMBEDDINGS, raw).stream is False


def test_responses_facts():
    raw = json.dumps(
        {
            "model": "m",
            "instructions": "be brief",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            "max_output_tokens": 7,
            "stream": True,
            "store": False,
        }
    ).encode()
    found = parser.parse(RESPONSES, raw)
    assert found.turns == (("system", "be brief"), ("user", "hi"))
    assert (found.max_tokens, found.stream, found.usage_edit) == (7, True, None)


@pytest.mark.parametrize(
    "field",
    [
        {"previous_response_id": "resp_1"},
        {"store": True},
        {"conversation": "conv_1"},
        {"background": True},
    ],
)
def test_answers_kept_on_the_server_are_a_clear_refusal(field):
    raw = json.dumps({"model": "m", "input": "hi", **field}).encode()
    error = refusal(raw, RESPONSES)
    assert error.param == next(iter(field))
    assert "conversation in 'input'" in error.message


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b"null", None),
        (b'"model"', None),
        (b'{"model":"m"', None),
        (b'{"model":"m","messages":[{}]} x', None),
        (b'{"messages":[{}]}', "model"),
        (b'{"model":"","messages":[{}]}', "model"),
        (b'{"model":7,"messages":[{}]}', "model"),
        (json.dumps({"model": "m" * 257, "messages": HELLO}).encode(), "model"),
        (b'{"model":"m"}', "messages"),
        (b'{"model":"m","messages":[]}', "messages"),
        (b'{"model":"m","messages":"hi"}', "messages"),
        (b'{"model":"m","messages":[{"content":5}]}', "messages"),
        (body(n=0), "n"),
        (body(n=129), "n"),
        (body(n="2"), "n"),
        (body(stream="yes"), "stream"),
        (body(max_tokens=-1), "max_tokens"),
        (body(max_completion_tokens=1 << 40), "max_completion_tokens"),
        (body(stream=True, stream_options=7), "stream_options"),
        (b'{"model":"m","messages":[{"content":"\xff"}]}', None),
        (b"[" * 100_000, None),
        (b'{"a":' * 100_000, None),
        (body(**{f"f{i}": 0 for i in range(130)}), None),
    ],
)
def test_what_is_wrong_is_named(raw, param):
    assert refusal(raw).param == param


ONCE = [
    "model",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stream",
    "stream_options",
    *sorted(SALT_FIELDS),
]


@pytest.mark.parametrize("field", [*ONCE, "messages"])
@pytest.mark.parametrize("disguise", [False, True])
def test_a_field_that_decides_may_stand_only_once(field, disguise):
    """Authorise one and run the other: escapes do not hide the second key either."""
    values = {"model": '"m"', "stream": "true", "stream_options": "{}", "messages": "[{}]"}
    value = values.get(field, "1")
    key = f"\\u{ord(field[0]):04x}{field[1:]}" if disguise else field
    whole = '{"model":"m","messages":[{}],'
    raw = whole + f'"{field}":{value},"{key}":{value}}}'
    error = refusal(raw.encode())
    assert error.param == field
    assert "twice" in error.message


def test_other_fields_may_stand_twice_and_nested_ones_are_not_counted():
    raw = b'{"model":"m","messages":[{"model":1,"n":2}],"x":1,"x":{"model":"z","stream":1}}'
    assert facts(raw=raw).model == "m"


def test_a_disguised_key_is_the_field_it_spells():
    raw = b'{"mod\\u0065l":"m","messages":[{}]}'
    assert splice(raw, facts(raw=raw), "other") == b'{"mod\\u0065l":"other","messages":[{}]}'


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            None,
            '{"stream_options":{"include_usage":true},"model":"e","messages":[{}],"stream":true}',
        ),
        (
            "null",
            '{"model":"e","messages":[{}],"stream":true,"stream_options":{"include_usage":true}}',
        ),
        (
            "{}",
            '{"model":"e","messages":[{}],"stream":true,"stream_options":{"include_usage":true}}',
        ),
        (
            '{"include_usage": false }',
            '{"model":"e","messages":[{}],"stream":true,"stream_options":{"include_usage": true }}',
        ),
        (
            '{ "x":[1]}',
            (
                '{"model":"e","messages":[{}],"stream":true,'
                '"stream_options":{"include_usage":true, "x":[1]}}'
            ),
        ),
        (
            '{"include_usage":true}',
            '{"model":"e","messages":[{}],"stream":true,"stream_options":{"include_usage":true}}',
        ),
    ],
)
def test_usage_is_always_asked_for(options, expected):
    tail = f',"stream_options":{options}' if options is not None else ""
    raw = f'{{"model":"m","messages":[{{}}],"stream":true{tail}}}'.encode()
    assert splice(raw, facts(raw=raw), "e").decode() == expected


def test_two_include_usage_are_refused():
    raw = (
        b'{"model":"m","messages":[{}],"stream":true,'
        b'"stream_options":{"include_usage":false,"include_usage":false}}'
    )
    assert refusal(raw).param == "stream_options"


def test_an_engine_that_refuses_stream_options_gets_none():
    raw = body(stream=True)
    assert splice(raw, facts(raw=raw), "m", ask_usage=False) == raw


def test_without_a_change_the_body_is_the_same_object():
    raw = body()
    assert splice(raw, facts(raw=raw), "m") is raw


def test_a_model_name_is_escaped():
    raw = body()
    out = splice(raw, facts(raw=raw), 'a"b\\c\n')
    assert json.loads(out)["model"] == 'a"b\\c\n'


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(ONCE), inner, max_size=3)
    ),
    max_leaves=8,
)
keys = st.text(max_size=6).filter(
    lambda key: key not in {*ONCE, "messages", "tools", "response_format"}
)
spaces = st.sampled_from(["", " ", "\n\t ", "\r\n"])


@st.composite
def bodies(draw):
    """A chat body in any order, spacing and escaping, with strange fields around."""
    ascii_only = draw(st.booleans())
    pairs = [
        ("model", draw(st.text(min_size=1, max_size=8))),
        ("messages", [{"role": "user", "content": draw(st.text(max_size=20))}]),
        ("stream", draw(st.booleans())),
    ]
    options = draw(
        st.none() | st.just({}) | st.fixed_dictionaries({"include_usage": st.booleans()})
    )
    if draw(st.booleans()):
        pairs.append(("stream_options", options))
    if draw(st.booleans()):
        pairs.append(("cache_salt", draw(values)))
    pairs += draw(st.dictionaries(keys, values, max_size=4)).items()
    pairs = draw(st.permutations(pairs))
    a, b, c = draw(spaces), draw(spaces), draw(spaces)
    fields = (
        f"{a}{json.dumps(k, ensure_ascii=ascii_only)}{b}:{c}"
        f"{json.dumps(v, ensure_ascii=ascii_only)}{a}"
        for k, v in pairs
    )
    return f"{c}{{{','.join(fields)}}}{b}".encode()


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("", '{"cache_salt":"s","model":"m","messages":[{}]}'),
        (',"cache_salt": "theirs" ', '{"model":"m","messages":[{}],"cache_salt": "s" }'),
        (',"cache_salt":null', '{"model":"m","messages":[{}],"cache_salt":"s"}'),
        (',"cache_salt":{"cache_salt":1}', '{"model":"m","messages":[{}],"cache_salt":"s"}'),
        (',"cache\\u005fsalt":"x"', '{"model":"m","messages":[{}],"cache\\u005fsalt":"s"}'),
    ],
)
def test_a_salt_is_put_in_or_takes_the_place_of_the_clients(field, expected):
    raw = f'{{"model":"m","messages":[{{}}]{field}}}'.encode()
    found = facts(raw=raw)
    assert splice(raw, found, "m", salt=Salt("cache_salt", "s")).decode() == expected
    assert splice(raw, found, "m") is raw


@given(
    raw=bodies(),
    name=st.text(min_size=1, max_size=10),
    salt=st.none() | st.builds(Salt, st.just("cache_salt"), st.text(min_size=1, max_size=5)),
)
def test_every_other_byte_is_the_clients_own(raw, name, salt):
    """Undoing the edits gives the body back; and the engine reads what we meant, nothing else."""
    found = facts(raw=raw)
    out = splice(raw, found, name, salt=salt)
    before, after = json.loads(raw), json.loads(out)
    if salt is not None:
        before.pop("cache_salt", None)
        assert after.pop("cache_salt") == salt.value
    if found.stream:
        asked = dict(before.get("stream_options") or {}, include_usage=True)
        assert after.pop("stream_options") == asked
        before.pop("stream_options", None)
    assert after == {**before, "model": name}
    edits = [] if name == found.model else [(*found.model_span, msgspec.json.encode(name))]
    if found.usage_edit is not None:
        edits.append(found.usage_edit)
    if salt is not None:
        value = msgspec.json.encode(salt.value)
        start = raw.index(b"{") + 1
        own = (start, start, b'"cache_salt":' + value + b",")
        span = found.salt_spans.get("cache_salt")
        edits.append(own if span is None else (*span, value))
    at, there = 0, 0
    for start, end, text in sorted(edits):
        kept = raw[at:start] + text
        assert out[there : there + len(kept)] == kept
        at, there = end, there + len(kept)
    assert out[there:] == raw[at:]


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(noise):
    for surface in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES):
        try:
            parser.parse(surface, noise)
        except MalformedBody:
            continue


@given(raw=bodies(), data=st.data())
def test_a_damaged_body_is_refused_or_is_json(raw, data):
    """What we accept, a strict JSON parser accepts: nothing undecided reaches an engine."""
    at = data.draw(st.integers(0, len(raw) - 1))
    damaged = raw[:at] + data.draw(st.binary(max_size=2)) + raw[at + data.draw(st.integers(0, 2)) :]
    try:
        found = facts(raw=damaged)
    except MalformedBody:
        return
    body_ = json.loads(damaged)
    assert body_["model"] == found.model
    assert bool(body_.get("stream")) == found.stream
