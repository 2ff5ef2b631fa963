"""An adapter is a table: metric names with aliases, paths to ask, marks to recognise an engine by.

Names change between engine versions, so each quantity has a list of aliases, tried in order. A
metric that an engine does not show is unknown (None), never zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Combine = Literal["sum", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One engine's dialect. `owned_by` and `prefix` are its marks: the owner that its
    `/v1/models` names, and how its metric names start.
    """

    name: str
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    kv_used: tuple[str, ...] = ()
    cache_blocks: tuple[str, str, str] | None = None
    """Metric whose labels tell the KV cache, and its labels for block size and block count."""
    metrics_path: str = "/metrics"
    health_path: str = "/health"
    props_path: str | None = None
    owned_by: tuple[str, ...] = ()
    prefix: str = ""
    cache_salt: str | None = None
    """Request field that keeps cached prefixes of different salts apart; None: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a replica said about itself; None is unknown. `kv_used` is a share in [0, 1]."""

    running: float | None = None
    waiting: float | None = None
    kv_used: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a Prometheus text."""

    name: str
    labels: dict[str, str]
    value: float


def samples(text: str) -> list[Sample]:
    """Lines of a Prometheus text exposition; a line that is not one is passed over."""
    found = []
    for line in text.splitlines():
        if not line or line[0] == "#":
            continue
        name, labels, rest = _split(line)
        fields = rest.split()
        if not fields:
            continue
        try:
            value = float(fields[0])
        except ValueError:
            continue
        found.append(Sample(name, labels, value))
    return found


def read_load(adapter: Adapter, text: str) -> Load:
    """The load in a metrics text. Counts of several engines behind one URL add up; of their cache
    shares the fullest counts.
    """
    values: dict[str, list[float]] = {}
    wanted = adapter.running + adapter.waiting + adapter.kv_used
    lines = [line for line in text.splitlines() if line.startswith(wanted)]
    for sample in samples("\n".join(lines)):
        values.setdefault(sample.name, []).append(sample.value)
    return Load(
        running=_first(adapter.running, values, "sum"),
        waiting=_first(adapter.waiting, values, "sum"),
        kv_used=_first(adapter.kv_used, values, "max"),
    )


def kv_capacity(adapter: Adapter, text: str) -> float | None:
    """Tokens that the engine's KV cache holds, where its metrics tell."""
    if adapter.cache_blocks is None:
        return None
    metric, size, count = adapter.cache_blocks
    for sample in samples(text):
        if sample.name == metric:
            try:
                return float(sample.labels[size]) * float(sample.labels[count])
            except (KeyError, ValueError):
                return None
    return None


def _first(aliases: tuple[str, ...], values: dict[str, list[float]], how: Combine) -> float | None:
    for alias in aliases:
        found = values.get(alias)
        if found:
            return sum(found) if how == "sum" else max(found)
    return None


def _split(line: str) -> tuple[str, dict[str, str], str]:
    """Name, labels and the rest of one sample line."""
    brace = line.find("{")
    if brace < 0:
        name, _, rest = line.partition(" ")
        return name, {}, rest
    labels: dict[str, str] = {}
    at = brace + 1
    while at < len(line) and line[at] != "}":
        equals = line.find('="', at)
        if equals < 0:
            break
        key = line[at:equals].strip(", ")
        at = equals + 2
        value = []
        while at < len(line) and line[at] != '"':
            if line[at] == "\\" and at + 1 < len(line):
                at += 1
            value.append(line[at])
            at += 1
        labels[key] = "".join(value)
        at += 1
        while at < len(line) and line[at] in ", ":
            at += 1
    return line[:brace], labels, line[at + 1 :]
