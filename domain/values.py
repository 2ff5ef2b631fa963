"""The decorator of values that are made for every request.

To type checkers it is `dataclasses.dataclass`, so `frozen=True` is checked. At run time nothing
guards the fields: a frozen dataclass sets each through `object.__setattr__`, which makes its
construction three to five times as dear, and a request makes a dozen of them with a hundred fields.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - re-exported
else:

    def dataclass(*, frozen: bool, **options: Any) -> Any:
        """A dataclass that hashes as a frozen one does; that nobody changes it is mypy's to see."""
        return dataclasses.dataclass(unsafe_hash=frozen, **options)
