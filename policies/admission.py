"""Admission: hard limits first, then the tenant's quotas; what passes gets its line in the ledger.

A refused request costs nothing. The reservation is min(prompt + P90 of the answer, prompt +
max_tokens, burst).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from domain.columns import Bools
from domain.events import Reason
from domain.length import QUANTILE_GRID
from domain.native import compiled
from domain.ports import Estimator
from domain.request import InferenceRequest, SloClass, Tenant
from policies import kernels
from policies.bucket import Account
from policies.chains import Chains
from policies.fleet_state import FleetState
from policies.ledger import Entry
from policies.overload import FEASIBLE, Gate


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken, and after how many seconds a new try should pass."""

    reason: Reason
    retry_after: float | None = None


class AdmissionControl:
    """Tenants, classes and the order in which a request is checked.

    Days begin at `midnight`, a time on the clock of `now`.
    """

    def __init__(
        self,
        state: FleetState,
        estimator: Estimator,
        tenants: Sequence[Tenant],
        classes: Sequence[SloClass],
        now: float,
        overload_target: float = 0.0,
        midnight: float = 0.0,
    ) -> None:
        self.gate = Gate(overload_target)
        self._chains = Chains()
        self._state = state
        self._midnight = midnight
        self._estimator = estimator
        self._accounts: dict[str, Account] = {}
        self._order = 0
        self._length = compiled(kernels.length_into, np.zeros(1), 0.0, np.zeros(1))
        self.configure(tenants, classes, now)

    def configure(self, tenants: Sequence[Tenant], classes: Sequence[SloClass], now: float) -> None:
        """Take tenants and classes, matched by name; bucket levels are scaled, never refilled."""
        if not classes:
            raise ValueError("at least one SLO class is needed")
        self._classes = {c.name: c for c in classes}
        self._default_class = self._classes.get("standard", classes[0])
        self.gate.configure(classes)
        accounts = {}
        for tenant in tenants:
            account = self._accounts.get(tenant.name)
            if account is None:
                account = Account(tenant, now, self._midnight)
            else:
                account.rescale(tenant, now)
            accounts[tenant.name] = account
        self._accounts = accounts

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names of those who have an account."""
        return tuple(self._accounts)

    def account(self, tenant: str) -> Account | None:
        """The quotas of a tenant."""
        return self._accounts.get(tenant)

    def admit(self, request: InferenceRequest, now: float) -> Entry | Refusal:
        """The request's ledger line with its reservation, or why it is not taken."""
        state, model = self._state, request.model
        allowed = state.by_model.get(model)
        if allowed is None:
            return Refusal(Reason.UNKNOWN_MODEL)
        account = self._accounts.get(request.tenant)
        if account is None:
            return Refusal(Reason.FORBIDDEN)
        rights = account.tenant.models
        if rights is not None and model not in rights:
            return Refusal(Reason.FORBIDDEN)
        prompt = float(ceil(request.prompt_tokens))
        if prompt + 1.0 > state.max_context[model]:
            return Refusal(Reason.CONTEXT)
        if not state.served(allowed):
            return Refusal(Reason.NO_REPLICA, 1.0)
        slo_class = self._classes.get(request.class_name) or self._default_class
        request = self._chains.step(request, slo_class, now)
        weight = account.tenant.weight
        wait = self.gate.refused(request, slo_class, weight, now)
        if wait is not None:
            return Refusal(Reason.OVERLOAD, wait)
        entry = self._entry(request, slo_class, account, allowed, prompt, now)
        if not entry.admission.ok:
            return Refusal(entry.admission.reason or Reason.RATE, entry.admission.retry_after)
        self.gate.admitted(request.tenant, weight, slo_class.name, entry.work, now)
        return entry

    def _entry(
        self,
        request: InferenceRequest,
        slo_class: SloClass,
        account: Account,
        allowed: Bools,
        prompt: float,
        now: float,
    ) -> Entry:
        """The line: length forecast, reservation, and when starting stops being useful."""
        cap = request.max_tokens if request.max_tokens is not None else inf
        cap = max(min(cap, self._state.max_context[request.model] - prompt), 1.0)
        length_q = np.zeros(len(QUANTILE_GRID))
        mean, median, p90 = self._length(self._estimator.length(request).survival, cap, length_q)
        expected = float(max(1, ceil(mean)))
        begins = self._estimator.thinking(request)
        thinking = 0.0 if begins is None else min(begins.quantile(0.5) - 1.0, cap)
        tokens = prompt + min(p90, cap) * request.choices
        admission = account.admit(
            key=request.key,
            model=request.model,
            prompt=prompt,
            tokens=float(ceil(tokens)),
            cost=self._state.price[request.model] * tokens,
            now=now,
        )
        ttft, tpot = self._state.fastest(allowed, prompt, expected)
        slo = request.slo
        limits = (
            slo.ttft if slo.ttft is not None and request.stream else inf,
            slo.tpot if slo.tpot is not None and request.stream else inf,
            slo.e2e if slo.e2e is not None else inf,
        )
        work = ttft + expected * tpot
        start_by = now + min(limits[0] - ttft, limits[2] - work, slo_class.max_wait)
        self._order += 1
        return Entry(
            request=request,
            slo_class=slo_class,
            account=account,
            admission=admission,
            arrived=now,
            order=self._order,
            allowed=allowed,
            prompt=prompt,
            expected=expected,
            median=median,
            p90=p90,
            length_q=length_q,
            thinking=thinking,
            start_by=start_by,
            work=work,
            expires=max(start_by, now),
            limits=limits,
            feasible=ttft <= FEASIBLE * limits[0]
            and tpot <= FEASIBLE * limits[1]
            and work <= FEASIBLE * limits[2],
            row=np.array(
                (
                    prompt,
                    inf if request.max_tokens is None else request.max_tokens,
                    expected,
                    now,
                    *limits,
                    0.0 if slo.quality is None else slo.quality,
                    slo_class.weight,
                )
            ),
        )
