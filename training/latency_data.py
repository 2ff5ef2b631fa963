"""Rows of latency outcomes to fit on: from decision logs, from a gateway's window, or simulated.

One row is one outcome with what the gateway had seen when it decided (`predictors.latency`). The
window that a background refit reads is such a frame as a plain `.npz` file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from domain.errors import ConfigError
from predictors.latency import SCHEMA_HASH, WIDTH

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyRows:
    """n outcomes, oldest first. `rows` (n, WIDTH); `ttft` (n,) seconds from the decision to the
    first token and `tpot` (n,) seconds per token, NaN where unknown; `tokens` (n,) of output;
    `kind` (n,) the replica's class.
    """

    rows: Floats
    ttft: Floats
    tpot: Floats
    tokens: Floats
    kind: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.ttft)

    def take(self, keep: NDArray[Any]) -> LatencyRows:
        """The rows given by mask or index."""
        return LatencyRows(**{f.name: getattr(self, f.name)[keep] for f in fields(self)})


def joined(parts: Sequence[LatencyRows]) -> LatencyRows:
    """Several frames, one after the other."""
    return LatencyRows(
        **{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(LatencyRows)}
    )


def newest_per_class(frame: LatencyRows, most: int) -> LatencyRows:
    """A stratified window: the newest `most` rows of every class, in their order."""
    keep = np.zeros(len(frame), bool)
    for kind in np.unique(frame.kind):
        keep[np.flatnonzero(frame.kind == kind)[-most:]] = True
    return frame.take(keep)


def row_of(record: dict[str, Any]) -> tuple[list[float], float, float, float, str] | None:
    """(basis, TTFT from the decision, TPOT, tokens, class) of a decision-log record; None where it
    tells nothing about latency or was written by another version.
    """
    predicted, end = record.get("predicted"), record.get("outcome")
    if not predicted or not end or record.get("latency_schema") != SCHEMA_HASH:
        return None
    basis = predicted.get("basis", ())
    if len(basis) != WIDTH or record.get("replica") is None or end["sent"] is None:
        return None
    nan = float("nan")
    streamed = record["stream"]
    ttft = end["ttft"] - end["sent"] if streamed and end["ttft"] is not None else nan
    whole = streamed and end["cause"] == "finished" and record["choices"] == 1
    tpot = end["tpot"] if whole and end["tpot"] is not None else nan
    return list(basis), ttft, tpot, float(end["completion_tokens"]), record["kind"]


def frame_of(rows: Sequence[tuple[Sequence[float], float, float, float, str]]) -> LatencyRows:
    """The frame of such tuples."""
    return LatencyRows(
        rows=np.array([r[0] for r in rows], np.float64).reshape(-1, WIDTH),
        ttft=np.array([r[1] for r in rows], np.float64),
        tpot=np.array([r[2] for r in rows], np.float64),
        tokens=np.array([r[3] for r in rows], np.float64),
        kind=np.array([r[4] for r in rows], np.str_),
    )


def read_logs(paths: Iterable[Path]) -> LatencyRows:
    """Outcomes of decision logs (JSON lines); a line cut short by a crash is left out.

    Raises: ConfigError for a file that cannot be read.
    """
    rows = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as exc:
            raise ConfigError(f"{path}: {exc.strerror or exc}") from exc
        for line in text.splitlines():
            try:
                record = json.loads(line)
                row = row_of(record) if isinstance(record, dict) else None
            except (ValueError, KeyError, TypeError):
                continue
            if row is not None:
                rows.append(row)
    return frame_of(rows)


def save_window(frame: LatencyRows, path: Path) -> None:
    """Write a frame as plain arrays."""
    np.savez(path, **{f.name: getattr(frame, f.name) for f in fields(frame)})


def load_window(path: Path) -> LatencyRows:
    """Read what `save_window` wrote. Raises: ConfigError."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            frame = LatencyRows(**{f.name: arrays[f.name] for f in fields(LatencyRows)})
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as exc:
        raise ConfigError(f"{path}: no window of outcomes ({exc})") from exc
    if frame.rows.ndim != 2 or frame.rows.shape[1] != WIDTH:
        raise ConfigError(f"{path}: rows of another version; expected {WIDTH} columns")
    return frame
