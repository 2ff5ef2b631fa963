"""Boosted trees as flat arrays, walked by compiled code.

A gateway never calls the tree library: `flatten` turns a fitted LightGBM model into the arrays of
`Forest` once, and `walk` adds up the leaves for one row. Equal to the library's raw score to 1e-9.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from domain.errors import ShapeError

Floats = NDArray[np.float64]


class Forest(NamedTuple):
    """All nodes of all trees, one after another, parents before children.

    `root` (T,) int32 is the first node of each tree. `feature`, `threshold`, `left`, `right` are
    (N,); a leaf has feature -1 and its value in `threshold`. `missing` (N,) uint8 says what a NaN
    does: 0 counts as 0.0, 1 goes left, 2 goes right.
    """

    root: NDArray[np.int32]
    feature: NDArray[np.int32]
    threshold: Floats
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    missing: NDArray[np.uint8]


def flatten(booster: Any) -> Forest:
    """Arrays of a fitted `lightgbm.Booster` with numeric splits only.

    Raises: ValueError for categorical splits or zero-as-missing, which no fit here uses.
    """
    roots: list[int] = []
    nodes: list[list[float]] = []

    def add(node: dict[str, Any]) -> int:
        at = len(nodes)
        if "leaf_value" in node:
            nodes.append([-1, float(node["leaf_value"]), at, at, 0])
            return at
        if node["decision_type"] != "<=" or node["missing_type"] == "Zero":
            raise ValueError(f"cannot flatten a split of type {node['decision_type']!r}")
        missing = 0 if node["missing_type"] == "None" else 1 if node["default_left"] else 2
        nodes.append([node["split_feature"], float(node["threshold"]), 0, 0, missing])
        nodes[at][2] = add(node["left_child"])
        nodes[at][3] = add(node["right_child"])
        return at

    for tree in booster.dump_model()["tree_info"]:
        roots.append(len(nodes))
        add(tree["tree_structure"])
    table = np.array(nodes, np.float64).reshape(-1, 5)
    return Forest(
        np.array(roots, np.int32),
        table[:, 0].astype(np.int32),
        np.ascontiguousarray(table[:, 1]),
        table[:, 2].astype(np.int32),
        table[:, 3].astype(np.int32),
        table[:, 4].astype(np.uint8),
    )


def check(forest: Forest, features: int) -> None:
    """Refuse arrays that would read out of bounds or never end.

    Raises: ShapeError, naming what is wrong.
    """
    n = len(forest.feature)
    if any(len(column) != n for column in forest[1:]) or n == 0:
        raise ShapeError("columns of a forest must have one length above 0")
    at = np.arange(n)
    leaf = forest.feature == -1
    if np.any((forest.feature < -1) | (forest.feature >= features)):
        raise ShapeError(f"a tree splits on a feature outside the {features} there are")
    for child in (forest.left, forest.right):
        if np.any((child[~leaf] <= at[~leaf]) | (child[~leaf] >= n)):
            raise ShapeError("a tree's child does not come after its parent")
    if np.any((forest.root < 0) | (forest.root >= n)) or not np.all(np.isfinite(forest.threshold)):
        raise ShapeError("a tree has no root or a value that is not finite")
    if np.any(forest.missing > 2):
        raise ShapeError("unknown rule for missing values")


@njit(cache=True)
def walk(x, root, feature, threshold, left, right, missing):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Sum of the leaves that row `x` (F,) reaches: the raw score of the model."""
    total = 0.0
    for tree in range(root.shape[0]):
        node = root[tree]
        while feature[node] >= 0:
            value = x[feature[node]]
            if np.isnan(value):
                rule = missing[node]
                if rule == 1:
                    node = left[node]
                    continue
                if rule == 2:
                    node = right[node]
                    continue
                value = 0.0
            node = left[node] if value <= threshold[node] else right[node]
        total += threshold[node]
    return total


@njit(cache=True)
def walk_many(rows, root, feature, threshold, left, right, missing, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """`walk` for every row of (n, F) into `out` (n,)."""
    for i in range(rows.shape[0]):
        out[i] = walk(rows[i], root, feature, threshold, left, right, missing)


def predict(forest: Forest, rows: Floats) -> Floats:
    """Raw scores of (n, F) rows, (n,)."""
    out = np.empty(len(rows))
    walk_many(np.ascontiguousarray(rows, np.float64), *forest, out)
    return out
