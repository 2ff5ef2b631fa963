"""Requests that wait, without everything around them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace

from domain.request import SloClass, Tenant

PATIENT = SloClass(name="batch", patience=1e9, max_wait=1e9)
_orders = count()


@dataclass(eq=False)
class Waiting:
    """What the waiting room reads of an entry."""

    start_by: float = 100.0
    work: float = 1.0
    tenant: str = "t"
    model: str = "m"
    arrived: float = 0.0
    expires: float = 1e9
    prompt: float = 10.0
    slo_class: SloClass = PATIENT
    weight: float = 1.0
    ticket: int = 0
    order: int = field(default_factory=lambda: next(_orders))

    @property
    def request(self):
        """Whose it is, and for which model."""
        return SimpleNamespace(tenant=self.tenant, model=self.model)

    @property
    def account(self):
        """Who is charged."""
        return SimpleNamespace(tenant=Tenant(name=self.tenant, weight=self.weight))

    @property
    def ripe(self) -> float:
        """When its patience ends."""
        return self.arrived + self.slo_class.patience
