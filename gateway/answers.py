"""A store of one gateway alone: the core's own accounts and ledger are the whole truth."""

from __future__ import annotations

from domain.events import Commit, Committed, Settle


class YesStore:
    """Agrees at once: there is nobody to disagree with."""

    def commit(self, action: Commit, now: float) -> Committed:
        """Reserved and booked."""
        return Committed(now, action.id, action.attempt)

    def settle(self, action: Settle, now: float) -> None:
        """Nothing is kept, so nothing goes back."""
