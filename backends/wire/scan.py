"""Where the top-level keys and values of a JSON object stand in its bytes.

A compiled scan, because it must hold its pace on any body: a megabyte of brackets or of empty
strings costs a millisecond, as a megabyte of text does. It never recurses and never reads outside
the buffer, whatever the bytes are. It is no validator: callers decode the body as well.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

MAX_FIELDS: Final = 128
"""Top-level fields of one body; the OpenAI API knows about forty."""

NOT_AN_OBJECT: Final = -1
TOO_MANY_FIELDS: Final = -2

Bytes = NDArray[np.uint8]
Spans = NDArray[np.int64]


def new_spans() -> Spans:
    """A buffer for `scan_object`: (MAX_FIELDS, 4) int64, reused from call to call."""
    return np.zeros((MAX_FIELDS, 4), np.int64)


@njit(cache=True)
def skip_space(data: Bytes, at: int, end: int) -> int:
    """First position from `at` that holds no JSON white space, or `end`."""
    while at < end and data[at] in (32, 10, 13, 9):
        at += 1
    return at


@njit(cache=True)
def skip_string(data: Bytes, at: int, end: int) -> int:
    """Position after the string whose opening quote stands at `at`; above `end` if it is open."""
    at += 1
    while at < end:
        if data[at] == 92:  # backslash: the next byte is taken as it is
            at += 2
        elif data[at] == 34:
            return at + 1
        else:
            at += 1
    return end + 1


@njit(cache=True)
def skip_value(data: Bytes, at: int, end: int) -> int:
    """Position after the value that starts at `at`; above `end` if it is open."""
    depth = 0
    while at < end:
        byte = data[at]
        if byte == 34:
            at = skip_string(data, at, end)
            if depth == 0:
                return at
            continue
        if byte in (123, 91):
            depth += 1
        elif byte in (125, 93):
            if depth == 0:
                return at  # the end of the object around a bare literal
            depth -= 1
            if depth == 0:
                return at + 1
        elif depth == 0 and byte in (44, 32, 10, 13, 9):
            return at
        at += 1
    return end + 1 if depth else end


@njit(cache=True)
def scan_object(data: Bytes, at: int, end: int, spans: Spans) -> int:
    """Fill `spans` with the fields of the object in data[at:end]; return how many there are.

    Rows are (key start, key end, value start, value end); keys without their quotes, escapes as
    they stand. Returns NOT_AN_OBJECT or TOO_MANY_FIELDS instead, both negative.
    Shapes: data (bytes,) uint8; spans (MAX_FIELDS, 4) int64.
    """
    at = skip_space(data, at, end)
    if at >= end or data[at] != 123:
        return NOT_AN_OBJECT
    at = skip_space(data, at + 1, end)
    if at < end and data[at] == 125:
        return 0 if skip_space(data, at + 1, end) == end else NOT_AN_OBJECT
    count = 0
    while at < end and data[at] == 34:
        after = skip_string(data, at, end)
        colon = skip_space(data, after, end)
        if colon >= end or data[colon] != 58:
            return NOT_AN_OBJECT
        value = skip_space(data, colon + 1, end)
        stop = skip_value(data, value, end)
        if stop > end or stop == value:
            return NOT_AN_OBJECT
        if count == spans.shape[0]:
            return TOO_MANY_FIELDS
        spans[count, 0] = at + 1
        spans[count, 1] = after - 1
        spans[count, 2] = value
        spans[count, 3] = stop
        count += 1
        at = skip_space(data, stop, end)
        if at < end and data[at] == 125:
            return count if skip_space(data, at + 1, end) == end else NOT_AN_OBJECT
        if at >= end or data[at] != 44:
            return NOT_AN_OBJECT
        at = skip_space(data, at + 1, end)
    return NOT_AN_OBJECT
