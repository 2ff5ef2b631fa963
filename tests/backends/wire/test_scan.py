"""The compiled scan against the standard library's reading of the same bytes."""

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.wire.scan import (
    MAX_FIELDS,
    NOT_AN_OBJECT,
    TOO_MANY_FIELDS,
    new_spans,
    scan_object,
)


def scan(raw, kernel=scan_object):
    spans = new_spans()
    count = kernel(np.frombuffer(raw, np.uint8), 0, len(raw), spans)
    return count, [(raw[a:b], raw[c:d]) for a, b, c, d in spans[: max(count, 0)].tolist()]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(
    pairs=st.lists(st.tuples(st.text(), json_values), max_size=8),
    indent=st.none() | st.integers(0, 2),
    ascii_only=st.booleans(),
)
def test_keys_and_values_are_those_of_the_standard_library(pairs, indent, ascii_only):
    def dump(value):
        return json.dumps(value, indent=indent, ensure_ascii=ascii_only)

    raw = ("{" + ",".join(f" {dump(k)}\n:\t{dump(v)} " for k, v in pairs) + "}").encode()
    count, found = scan(raw)
    assert count == len(pairs)
    assert [(json.loads(b'"%b"' % k), json.loads(v)) for k, v in found] == pairs


@given(st.binary(max_size=120))
def test_compiled_and_plain_python_agree_on_any_bytes(noise):
    raw = b'{"a":' + noise
    assert scan(raw) == scan(raw, scan_object.py_func)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b" ", b"[]", b"{", b'{"', b'{"a', b'{"a"', b'{"a":', b'{"a":}', b'{"a":1',
        b'{"a":1,',
        b'{"a":1,}', b'{"a" 1}', b"{a:1}", b'{"a":1}x', b'{"a":"', b'{"a":"\\',
        b'{"a":[', b'{"a":"x"y}',
    ],
)  # fmt: skip
def test_what_is_no_object_is_told(raw):
    assert scan(raw) == (NOT_AN_OBJECT, [])


def test_an_empty_object_has_no_fields():
    assert scan(b" { } ") == (0, [])


def test_too_many_fields_are_told():
    assert scan(json.dumps(dict.fromkeys(map(str, range(MAX_FIELDS)), 1)).encode())[0] == MAX_FIELDS
    raw = json.dumps(dict.fromkeys(map(str, range(MAX_FIELDS + 1)), 1)).encode()
    assert scan(raw)[0] == TOO_MANY_FIELDS


@pytest.mark.parametrize("piece", [b"[],", b'"",', b'"\\"",', b"1,", b"[[[[", b'{"a":', b"\\\\"])
def test_a_megabyte_of_anything_takes_milliseconds(piece):
    """No body is slow by its shape. The bound is generous: 20 times what this costs unloaded."""
    raw = b'{"a":[' + piece * (1_000_000 // len(piece)) + b"1]}"
    scan(b"{}")
    start = time.process_time()
    scan(raw)
    assert time.process_time() - start < 0.1
