"""Deadlines of chains: the steps of one session share one budget, and each gets what is left.

A chain begins with the first request of its session, or with the first after its deadline and a
quiet time as long again: an agent that starts over under the same id is not punished for ever. A
step that comes when nothing is left keeps `LEAST`: its limit is as good as missed, and admission
treats it so. State lives here alone, by tenant and session, the longest unused first to go; it is
changed by `Arrived` events only, so a replay has the same.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from domain.request import InferenceRequest, Slo, SloClass
from domain.units import Seconds

SESSIONS = 10_000
"""Chains remembered at most."""
LEAST = 1e-3
"""Seconds that a step is given when nothing is left: a limit is never zero."""

Key = tuple[str, str, str]


class Chains:
    """When each chain began. `step` changes it."""

    def __init__(self, limit: int = SESSIONS) -> None:
        self._limit = limit
        self._began: OrderedDict[Key, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._began)

    def step(self, request: InferenceRequest, slo_class: SloClass, now: float) -> InferenceRequest:
        """The request with its end-to-end limit cut to what its chain has left, in seconds.

        The same request where its class has no chain deadline or it has no session.
        """
        budget = slo_class.chain
        if budget is None or request.session is None:
            return request
        key = (request.tenant, slo_class.name, request.session)
        began = self._began.get(key)
        if began is None or now - began > 2.0 * budget:
            began = self._began[key] = now
        self._began.move_to_end(key)
        if len(self._began) > self._limit:
            self._began.popitem(last=False)
        left = Seconds(max(began + budget - now, LEAST))
        own = request.slo.e2e
        if own is not None and own <= left:
            return request
        slo = request.slo
        limits = Slo(ttft=slo.ttft, tpot=slo.tpot, e2e=left, quality=slo.quality)
        return replace(request, slo=limits)
