"""Arrays that compiled code only borrows.

Numba counts references, with atomic instructions, whenever it takes an array out of a tuple. In the
compiled loop that was three quarters of the time (`perf record`, 8 replicas, round robin). An array
without an owner is not counted.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array


def _borrowed(_typing: Any, kind: Any) -> Any:
    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _stripped(context, builder, kind, arguments[0])

    return kind(kind), code


def _stripped(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value=value)
        for owner in ("meminfo", "parent"):
            pointer = getattr(array, owner).type
            setattr(array, owner, cgutils.get_null_value(pointer))  # type: ignore[no-untyped-call]
        return array._getvalue()  # noqa: SLF001 - how numba's own code reads a proxy
    if isinstance(kind, types.BaseTuple):
        parts: Any = kind
        for i, part in enumerate(parts.types):
            inside = _stripped(context, builder, part, builder.extract_value(value, i))
            value = builder.insert_value(value, inside, i)
    return value


borrowed: Any = intrinsic(_borrowed)
"""The same array, or named tuple with arrays in it, without owners; only for compiled code.

The caller promises to keep the owners alive for as long as the result is used, and not to return
it.
"""


def _lowered(kind: Any) -> Any:
    if isinstance(kind, types.Array):
        return types.Array(kind.dtype, kind.ndim - 1, "C")
    if isinstance(kind, types.BaseNamedTuple):
        parts: Any = kind
        lowered = [_lowered(part) for part in parts.types]
        return types.NamedTuple(lowered, parts.instance_class)  # type: ignore[no-untyped-call]
    return kind


def _at(_typing: Any, kind: Any, index: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, i = arguments
        i = context.cast(builder, i, index, types.intp)
        return _inside(context, builder, kind, signature.return_type, value, i)

    return _lowered(kind)(kind, index), code


def _inside(context: Any, builder: Any, kind: Any, result: Any, value: Any, i: Any) -> Any:
    if isinstance(kind, types.Array):
        whole = make_array(kind)(context, builder, value)  # type: ignore[no-untyped-call]
        part = make_array(result)(context, builder)  # type: ignore[no-untyped-call]
        strides = cgutils.unpack_tuple(builder, whole.strides, kind.ndim)  # type: ignore[no-untyped-call]
        populate_array(
            part,
            cgutils.pointer_add(builder, whole.data, builder.mul(i, strides[0])),  # type: ignore[no-untyped-call]
            shape=cgutils.unpack_tuple(builder, whole.shape, kind.ndim)[1:],  # type: ignore[no-untyped-call]
            strides=strides[1:],
            itemsize=whole.itemsize,
            meminfo=None,
        )
        return part._getvalue()  # noqa: SLF001 - how numba's own code reads a proxy
    if isinstance(kind, types.BaseNamedTuple):
        kinds: Any = kind
        made = context.get_constant_undef(result)
        for k, (one, lower) in enumerate(zip(kinds.types, result.types, strict=True)):
            inside = _inside(context, builder, one, lower, builder.extract_value(value, k), i)
            made = builder.insert_value(made, inside, k)
        return made
    return value


at: Any = intrinsic(_at)
"""A named tuple of the i-th parts along the first axis of every array in this one, borrowed; what
is no array stays. Arrays must be C-contiguous, with two axes or more; the index is not checked.
"""
