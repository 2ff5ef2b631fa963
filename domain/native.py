"""Calling a compiled kernel without type dispatch: what the hot path does with arguments whose
types never change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def compiled(kernel: Any, *arguments: Any) -> Callable[..., Any]:
    """The compiled code of a numba kernel for exactly the types of `arguments`; compiles, or loads
    from the cache.

    Looking up the types of the columns' forty-odd arrays costs more than most kernels do. The
    caller promises to pass the same types in the same order ever after (C-contiguous arrays of the
    same dtype and rank), by position. A plain function (numba switched off) is returned as it is.
    """
    if not hasattr(kernel, "overloads"):
        return kernel  # type: ignore[no-any-return]
    signature = tuple(kernel.typeof_pyval(argument) for argument in arguments)
    kernel.compile(signature)
    return kernel.overloads[signature].entry_point  # type: ignore[no-any-return]
