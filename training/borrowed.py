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
