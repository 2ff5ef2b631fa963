"""A gateway follows its registry: who is active, what is tried; and tells it of rollbacks.

An entry that cannot be used never reaches the core: the policy of the config goes on deciding (or
the last good one), an error is logged and `sluice_policy_alarm` is 1 until it is put right.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from domain.errors import ConfigError
from domain.events import RolledBack
from gateway.metrics import Gauge
from policies import registry
from policies.config import PolicyConfig

if TYPE_CHECKING:
    from gateway.app import Gateway

EVERY = 1.0
"""Seconds between two looks at the state."""

_log = logging.getLogger("sluice")


@dataclass(slots=True)
class RegistryWatch:
    """Takes the registry's state into a gateway. `configured` is the config's own policy, asked
    anew each time, since the config may change; `warm` compiles a policy's kernels elsewhere.
    """

    folder: Path
    gateway: Gateway
    configured: Callable[[], PolicyConfig]
    warm: Callable[[PolicyConfig], None]
    alarm: bool = False
    _plan: str = ""
    _policy: str = field(init=False)

    def __post_init__(self) -> None:
        self._policy = self.configured().model_dump_json()
        self.gateway.shell.rolled_back = self.ended
        self.gateway.metrics.gauges.append(
            Gauge(
                "sluice_policy_alarm",
                "1 while the registry asks for a policy that cannot be used.",
                (),
                lambda: [((), float(self.alarm))],
                max,
            )
        )

    async def look(self) -> None:
        """Take the state as it is now; what cannot be used is left."""
        try:
            state = registry.read_state(self.folder)
            configured = self.configured()
            wanted = configured
            if state.active is not None:
                wanted = registry.read_entry(self.folder, state.active).policy
            plan = registry.trial_json(self.folder, state)
            policy = wanted.model_dump_json()
            if policy != self._policy:
                await asyncio.to_thread(self._ready, wanted)
            if plan != self._plan and state.trial is not None:
                entry = registry.read_entry(self.folder, state.trial)
                await asyncio.to_thread(self._ready, entry.policy)
        except ConfigError as exc:
            if not self.alarm:
                _log.error("the registry's policy cannot be used, the old one goes on: %s", exc)
            self.alarm = True
            return
        self.alarm = False
        if policy != self._policy:
            _log.info("policy %s is active", state.active or "of the config")
            self.gateway.shell.change_policy(policy)
            self._policy = policy
        if plan != self._plan:
            _log.info("tried beside it: %s", state.trial or "nothing")
            self.gateway.shell.change_trial(plan)
            self._plan = plan

    def _ready(self, policy: PolicyConfig) -> None:
        registry.probe(policy)
        self.warm(policy)

    def ended(self, action: RolledBack) -> None:
        """The core has rolled a trial back: note it for everybody."""
        _log.error("trial %s rolled back (%s): %s", action.trial, action.reason, action.detail)
        detail = f"{action.reason}: {action.detail}"
        try:
            registry.change_state(
                self.folder, lambda s: registry.ended(s, action.trial, time.time(), detail)
            )
        except (ConfigError, OSError) as exc:
            # It is not tried here again: the plan is the one that was taken.
            _log.error("the registry could not be told: %s", exc)

    async def watching(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.sleep(EVERY)
            try:
                await self.look()
            except Exception:  # noqa: BLE001 - outermost loop of a background task: log and count
                self.alarm = True
                _log.exception("the registry was not read")
