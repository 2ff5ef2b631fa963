"""The verbs of the shared store: one Lua file each, with what they have in common in front."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Literal, NamedTuple

Verb = Literal["reserve", "settle", "renew", "reconcile", "usage", "book", "push"]

_METERED: tuple[Verb, ...] = ("reserve", "settle", "renew", "reconcile", "usage")
_FLEET: tuple[Verb, ...] = ("book", "push")


class Script(NamedTuple):
    """A verb as the server runs it; `sha` is what EVALSHA names it by."""

    text: bytes
    sha: bytes


def scripts(clock: str | None = None) -> dict[Verb, Script]:
    """Every verb. `clock` is Lua that defines `clock()`; None takes the server's time."""
    here = files("gateway.store")

    def read(name: str) -> str:
        return here.joinpath(f"{name}.lua").read_text(encoding="utf-8")

    ticking = read("clock") if clock is None else clock
    heads = {verb: ticking + read("meter") for verb in _METERED} | dict.fromkeys(_FLEET, ticking)
    return {verb: _script(head + read(verb)) for verb, head in heads.items()}


def _script(text: str) -> Script:
    data = text.encode()
    digest = hashlib.sha1(data, usedforsecurity=False).hexdigest()
    return Script(data, digest.encode())
