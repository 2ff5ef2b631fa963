"""A latency artifact small enough to know by heart: every forest is one leaf."""

import tempfile
from pathlib import Path

import numpy as np

from domain.columns import LOAD_GRID
from predictors.artifact import Artifact, save
from predictors.latency import COUNT, SCHEMA_HASH
from predictors.latency_gbdt import HEADS, KIND, trees_arrays
from predictors.trees import Forest


def leaf(value: float) -> Forest:
    one = np.zeros(1, np.int32)
    return Forest(one, one - 1, np.array([value]), one, one, np.zeros(1, np.uint8))


def toy(
    ttft: float = 0.0, tpot: float = 0.0, spread: float = 0.1, coupling: float = 1.0, **change
) -> Artifact:
    """TTFT is base * e^ttft, TPOT base * e^tpot, both with this spread; nothing is strange."""
    values = (ttft, np.log(spread), tpot, np.log(spread))
    forests = {name: leaf(value) for name, value in zip(HEADS, values, strict=True)}
    z = np.tile(np.linspace(-1.5, 1.5, len(LOAD_GRID)), (2, 1))
    arrays = trees_arrays(forests, z, np.full(COUNT, -1e9), np.full(COUNT, 1e9), coupling)
    return Artifact(kind=KIND, arrays=arrays | change, schema=SCHEMA_HASH)


def as_bytes(artifact: Artifact) -> bytes:
    """The artifact as its file's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npz"
        save(artifact, path)
        return path.read_bytes()
