"""Arrays that compiled code only borrows, and what else keeps them cheap to hand around.

Numba counts references, with atomic instructions, whenever it takes an array out of a tuple. In the
compiled loop that was three quarters of the time (`perf record`, 8 replicas, round robin). An array
without an owner is not counted. A call copies the description of every array it is handed, 2 KB
for a fleet's columns; that was a quarter of what was left, so large functions are `inlined`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
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


def inlined(function: Any) -> Any:
    """A compiled function of another module, to be put in place of every call; for functions of
    many arrays that are called from one or two places.
    """
    return njit(error_model="numpy", forceinline=True)(function.py_func)


def _prefetch(_typing: Any, kind: Any, i: Any, k: Any) -> Any:
    def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        array = make_array(kind)(context, builder, arguments[0])  # type: ignore[no-untyped-call]
        place = [context.cast(builder, arguments[1], i, types.intp)]
        place.append(context.cast(builder, arguments[2], k, types.intp))
        at = cgutils.get_item_pointer(  # type: ignore[no-untyped-call]
            context, builder, kind, array, place, wraparound=False
        )
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kinds = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        hint = cgutils.get_or_insert_function(builder.module, kinds, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]
        read, near, data = flag(0), flag(3), flag(1)
        builder.call(hint, [builder.bitcast(at, byte), read, near, data])
        return context.get_dummy_value()

    return types.void(kind, i, k), code


prefetch: Any = intrinsic(_prefetch)
"""Ask the processor for the cache line of array[i, k], which will be read soon; the indices are
not checked.
"""
