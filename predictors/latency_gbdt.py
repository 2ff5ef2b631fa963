"""Latency beyond the base: boosted trees on log(actual / base), with their spread.

For TTFT and TPOT each, two forests read a row of `predictors.latency`: one gives the centre mu of
log(actual / base), one the log of its spread s. With z the quantiles of (log(actual / base) - mu) /
s on data the trees had not seen, the prediction at load quantile u is

    base * exp(mu + s * kappa * z(u))

with kappa the running conformal factor of the replica's class (1 at first). TTFT and TPOT share
one cause, the load, but not all of it: with `coupling` r, measured by the fit, their joint law is
r times the one where the same u drives both plus 1 - r times the one where each has its own, so
P(all limits) is two sums over grids of u and length.
The roofline scores every replica; this scores the `shortlist` best of them, in one compiled call.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from domain.columns import LOAD_GRID, EstimateColumns, Floats, Ints, Mask, RequestColumns, Routes
from domain.errors import ShapeError
from predictors.artifact import Artifact, ArtifactError, load
from predictors.latency import (
    BASE_TTFT,
    COUNT,
    ROOF_TPOT,
    SCHEMA_HASH,
    WIDTH,
    Live,
    row_into,
)
from predictors.length_gbdt import forest_from
from predictors.trees import Forest, check

KIND = "latency_gbdt"
HEADS = ("ttft_at", "ttft_spread", "tpot_at", "tpot_spread")
"""The four forests, in the order of an artifact's `heads`."""
MIDDLE = len(LOAD_GRID) // 2
MOST = 2.5
"""|mu| is cut here: no prediction is further than a factor of 12 from its base."""
LEAST_SPREAD, MOST_SPREAD = 0.005, 1.5
STRANGE = COUNT // 6
"""Features that may lie outside what the fit saw before the roofline is kept instead."""


class Trees(NamedTuple):
    """All four forests in one: `heads` (5,) says where in `root` each begins and ends."""

    root: NDArray[np.int32]
    feature: NDArray[np.int32]
    threshold: Floats
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    missing: NDArray[np.uint8]
    heads: Ints
    z: Floats  # (2, U)
    low: Floats  # (COUNT,)
    high: Floats  # (COUNT,)
    coupling: Floats  # (1,) in [0, 1]


def no_trees() -> Trees:
    """Trees that say nothing: what the kernels are compiled with before there is a model."""
    one = np.zeros(1, np.int32)
    leaf = (one, one - 1, np.zeros(1), one, one, np.zeros(1, np.uint8))
    z = np.zeros((2, len(LOAD_GRID)))
    heads, row = np.zeros(len(HEADS) + 1, np.int64), np.zeros(COUNT)
    return Trees(*leaf, heads, z, row, row, np.ones(1))


@njit(cache=True, error_model="numpy")
def strange(row: Floats, trees: Trees) -> bool:
    """Whether too many features lie outside what the fit saw, or one is no number."""
    outside = 0
    for k in range(trees.low.shape[0]):
        if not np.isfinite(row[k]):
            return True
        if row[k] < trees.low[k] or row[k] > trees.high[k]:
            outside += 1
    return outside > STRANGE


@njit(cache=True, error_model="numpy")
def heads_into(row: Floats, trees: Trees, out: Floats) -> None:
    """Mu and s of TTFT, mu and s of TPOT, (4,), from a row; always finite and within bounds."""
    for h in range(4):
        total = 0.0
        for t in range(trees.heads[h], trees.heads[h + 1]):
            node = trees.root[t]
            while trees.feature[node] >= 0:
                if row[trees.feature[node]] <= trees.threshold[node]:
                    node = trees.left[node]
                else:
                    node = trees.right[node]
            total += trees.threshold[node]
        if h % 2 == 0:
            out[h] = min(max(total, -MOST), MOST)
        else:
            out[h] = min(max(np.exp(min(max(total, -20.0), 5.0)), LEAST_SPREAD), MOST_SPREAD)


@njit(cache=True, error_model="numpy")
def shortlist_into(mask: Mask, p: Floats, ttft: Floats, i: int, most: int, picks: Ints) -> int:
    """The `most` masked routes of request i with the highest P(SLO), then least TTFT; how many."""
    count = 0
    for c in range(mask.shape[1]):
        if not mask[i, c]:
            continue
        if count < most:
            picks[count] = c
            count += 1
            continue
        worst = 0
        for k in range(1, count):
            a, b = picks[k], picks[worst]
            if p[i, a] < p[i, b] or (
                p[i, a] == p[i, b] and ttft[i, a, MIDDLE] > ttft[i, b, MIDDLE]
            ):
                worst = k
        b = picks[worst]
        if p[i, c] > p[i, b] or (p[i, c] == p[i, b] and ttft[i, c, MIDDLE] < ttft[i, b, MIDDLE]):
            picks[worst] = c
    return count


@njit(cache=True, error_model="numpy")
def refine_into(
    requests: RequestColumns,
    fleet: Live,
    routes: Routes,
    mask: Mask,
    rows: Floats,
    fixed_of: Floats,
    trees: Trees,
    kappa: Floats,
    active: Floats,
    curve: Floats,
    most: int,
    now: float,
    row: Floats,
    heads: Floats,
    picks: Ints,
    kept: Floats,
    out: EstimateColumns,
) -> None:
    """Put learned TTFT, TPOT, raw and calibrated P(SLO) in place of the roofline's.

    Only on the shortlist, only on replicas whose class is `active` (m,), and only where the row is
    nothing strange. `kappa` (2, m). `kept` (n, c, 3) says where, and what the roofline's medians
    were. `row`, `heads`, `picks` are scratch.
    """
    us, qs = out.ttft.shape[2], requests.length_q.shape[1]
    bins = curve.shape[0] - 1
    for i in range(mask.shape[0]):
        for c in range(mask.shape[1]):
            kept[i, c, 0] = 0.0
        count = shortlist_into(mask, out.p_slo, out.ttft, i, most, picks)
        waited = now - requests.arrived[i]
        for k in range(count):
            c = picks[k]
            d, p = routes.decode[c], routes.prefill[c]
            if active[d] == 0.0 or active[p] == 0.0:
                continue
            row_into(
                requests,
                fleet,
                routes,
                rows,
                fixed_of,
                i,
                c,
                out.cached[i, c],
                out.ttft[i, c, MIDDLE],
                out.tpot[i, c, MIDDLE],
                now,
                row,
            )
            if strange(row, trees):
                continue
            heads_into(row, trees, heads)
            kept[i, c, 0] = 1.0
            kept[i, c, 1] = out.ttft[i, c, MIDDLE]
            kept[i, c, 2] = out.tpot[i, c, MIDDLE]
            for u in range(us):
                ttft = np.exp(heads[0] + heads[1] * kappa[0, p] * trees.z[0, u])
                tpot = np.exp(heads[2] + heads[3] * kappa[1, d] * trees.z[1, u])
                out.ttft[i, c, u] = row[BASE_TTFT] * ttft
                out.tpot[i, c, u] = row[ROOF_TPOT] * tpot
            same, free = 0, 0
            for u in range(us):
                began = waited + out.ttft[i, c, u]
                if began > requests.ttft[i]:
                    continue
                for v in range(us):
                    pace = out.tpot[i, c, v]
                    if pace > requests.tpot[i]:
                        continue
                    for q in range(qs):
                        length = max(requests.length_q[i, q] - 1.0, 0.0)
                        if began + length * pace <= requests.e2e[i]:
                            free += 1
                            if u == v:
                                same += 1
            shared = trees.coupling[0]
            raw = shared * same / (us * qs) + (1.0 - shared) * free / (us * us * qs)
            out.p_raw[i, c] = raw
            x = raw * bins
            b = min(int(x), bins - 1)
            out.p_slo[i, c] = curve[b] + (x - b) * (curve[b + 1] - curve[b])


class LatencyGbdt:
    """A fitted latency model; pure.

    `spreads` (2,) are the mean absolute errors (nats) of TTFT and TPOT on data it had not seen.
    Raises: ArtifactError at construction when the arrays do not fit each other or this version.
    """

    def __init__(self, artifact: Artifact) -> None:
        try:
            self.version = artifact.version
            arrays = artifact.arrays
            forest: Forest = forest_from(arrays)
            check(forest, COUNT)
            heads = np.ascontiguousarray(arrays["heads"], np.int64)
            z = np.ascontiguousarray(arrays["z"], np.float64)
            low = np.ascontiguousarray(arrays["range_low"], np.float64)
            high = np.ascontiguousarray(arrays["range_high"], np.float64)
            coupling = np.ascontiguousarray(arrays["coupling"], np.float64)
            self.trees = Trees(*forest, heads, z, low, high, coupling)
            self._check_shapes()
        except (KeyError, ShapeError, ValueError, TypeError, IndexError, OverflowError) as exc:
            raise ArtifactError(f"latency artifact does not fit together: {exc}") from exc

    def _check_shapes(self) -> None:
        trees = self.trees
        if trees.heads.shape != (len(HEADS) + 1,) or trees.heads[0] != 0:
            raise ShapeError("heads must say where the four forests begin and end")
        if np.any(np.diff(trees.heads) < 0) or trees.heads[-1] != len(trees.root):
            raise ShapeError("heads do not cover the roots")
        if trees.z.shape != (2, len(LOAD_GRID)) or not np.all(np.isfinite(trees.z)):
            raise ShapeError(f"z must be finite and (2, {len(LOAD_GRID)})")
        if np.any(np.diff(trees.z, axis=1) < 0):
            raise ShapeError("z must not fall")
        if trees.low.shape != (COUNT,) or trees.high.shape != (COUNT,):
            raise ShapeError(f"training ranges must be ({COUNT},)")
        if trees.coupling.shape != (1,) or not 0.0 <= trees.coupling[0] <= 1.0:
            raise ShapeError("coupling must be one number in [0, 1]")
        if np.any(np.isnan(trees.low)) or np.any(np.isnan(trees.high)):
            raise ShapeError("training ranges must be numbers")

    @classmethod
    def load(cls, path: Path) -> LatencyGbdt:
        """Read an artifact file.

        Raises: ArtifactError as `predictors.artifact.load` and the constructor.
        """
        return cls(load(path, kind=KIND, schema=SCHEMA_HASH))

    @classmethod
    def loads(cls, data: bytes) -> LatencyGbdt:
        """Read an artifact from its bytes. Raises: ArtifactError."""
        return cls(load(io.BytesIO(data), kind=KIND, schema=SCHEMA_HASH))

    def heads(self, row: Floats) -> Floats:
        """Mu and s of TTFT, mu and s of TPOT, (4,), of one row (WIDTH,)."""
        if row.shape != (WIDTH,):
            raise ShapeError(f"a row has {WIDTH} numbers, not {row.shape}")
        out = np.zeros(4)
        heads_into(row, self.trees, out)
        return out


def trees_arrays(
    forests: Mapping[str, Forest], z: Floats, low: Floats, high: Floats, coupling: float
) -> dict[str, NDArray[Any]]:
    """The arrays of an artifact from the four forests by the names of `HEADS`."""
    parts = [forests[name] for name in HEADS]
    offsets = np.cumsum([0] + [len(f.feature) for f in parts])
    joined: dict[str, NDArray[Any]] = {}
    for name in Forest._fields:
        columns = [getattr(f, name) for f in parts]
        if name in {"root", "left", "right"}:
            columns = [c + start for c, start in zip(columns, offsets[:-1], strict=True)]
        joined[f"forest_{name}"] = np.concatenate(columns).astype(getattr(parts[0], name).dtype)
    heads = np.cumsum([0] + [len(f.root) for f in parts])
    return (
        joined
        | {"heads": heads, "z": z, "range_low": low, "range_high": high}
        | {"coupling": np.array([coupling])}
    )
