"""What a prompt is about, as a short vector: a table of word vectors and a small network over it.

The table holds one row per known word hash (`predictors.features.word_id`), 8-bit. Without a
network the embedding is the mean of the rows; with one, a convolution over three neighbouring words
and attention pooling read order and context. Both were distilled from a sentence encoder by
`training/fit_text.py`; nothing but numpy is needed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from domain.errors import ShapeError
from predictors.artifact import Artifact, load
from predictors.features import DENSE_SIZE, SCHEMA_HASH, WORD_IDS

Floats = NDArray[np.float64]

KIND = "text_encoder"


class TextEncoder:
    """Embeds the word slots of a feature vector; unit length, zero for a text of unknown words.

    `index` (WORD_IDS,) int gives a row of `rows` (n, d) or -1; `scale` (d,) undoes the 8 bits.
    `network` holds float32 arrays: `convolve` (3 d, h), `bias` (h,), `attend` (h, a), `project`
    ((a + 1) h, D), `offset` (D,); None for the plain mean (D = d). `version` names the encoder that
    ships, "" is any other.
    """

    def __init__(
        self,
        index: NDArray[np.int64],
        rows: NDArray[np.int8],
        scale: Floats,
        network: Mapping[str, NDArray[np.float32]] | None = None,
        *,
        version: str = "",
    ) -> None:
        self.version = version
        d = rows.shape[1]
        if index.shape != (WORD_IDS,) or scale.shape != (d,):
            raise ShapeError("word index and scale do not fit the table")
        if np.any((index < -1) | (index >= len(rows))):
            raise ShapeError("word index points outside the table")
        self._index = index
        # one zero row at the end stands for empty slots and unknown words
        table = np.vstack([rows.astype(np.float32) * scale.astype(np.float32), np.zeros((1, d))])
        self._table = np.ascontiguousarray(table, np.float32)
        self._network = None
        self.size = d
        if network is not None:
            convolve, bias, attend, project, offset = (
                np.ascontiguousarray(network[name], np.float32)
                for name in ("convolve", "bias", "attend", "project", "offset")
            )
            h, a = attend.shape
            shapes = (convolve.shape, bias.shape, project.shape, offset.shape)
            want = ((3 * d, h), (h,), ((a + 1) * h, project.shape[1]), (project.shape[1],))
            if shapes != want:
                raise ShapeError(f"text network has shapes {shapes}, not {want}")
            self._network = (convolve, bias, attend, project, offset)
            self.size = int(project.shape[1])

    @classmethod
    def packaged(cls) -> TextEncoder:
        """The encoder that ships with Sluice.

        Raises: ArtifactError when its file is damaged.
        """
        path = Path(__file__).parent / "artifacts" / "text.npz"
        artifact = load(path, kind=KIND, schema=SCHEMA_HASH)
        encoder = cls.from_arrays(artifact.arrays, "")
        encoder.version = artifact.version
        return encoder

    @classmethod
    def of(cls, artifact: Artifact) -> TextEncoder:
        """The encoder a model was fitted with: its own arrays, else the one that ships.

        Raises: ShapeError where the fit used another version of the one that ships.
        """
        if "text_index" in artifact.arrays:
            return cls.from_arrays(artifact.arrays, "text_")
        encoder = cls.packaged()
        if artifact.card.get("text") != encoder.version:
            raise ShapeError(
                f"fitted with text encoder {artifact.card.get('text')!r}, this version ships"
                f" {encoder.version!r}; fit it again"
            )
        return encoder

    def embed(self, features: Floats) -> Floats:
        """Embedding (D,) of one feature vector."""
        ids = features[DENSE_SIZE:].astype(np.int64)
        used = np.flatnonzero(ids)
        if len(used) == 0:
            return np.zeros(self.size)
        ids = ids[: used[-1] + 1]
        words = self._table[self._index[np.clip(ids, 0, WORD_IDS - 1)]]
        if self._network is None:
            vector = words.sum(0).astype(np.float64)
        else:
            vector = np.zeros(self.size)
            _network(words, *self._network, vector)
        norm = float(np.sqrt((vector**2).sum()))
        unit: Floats = vector / max(norm, 1e-9)
        return unit

    def embed_many(self, features: Floats) -> Floats:
        """Embeddings (n, D) of feature vectors (n, SIZE)."""
        return np.array([self.embed(row) for row in features]).reshape(len(features), self.size)

    def arrays(self, prefix: str) -> dict[str, NDArray[Any]]:
        """What `from_arrays` reads; nothing where the encoder is the one that ships."""
        if self.version:
            return {}
        rows = self._table[:-1]
        scale = np.abs(rows).max(0) / 127.0 + 1e-12
        out: dict[str, NDArray[Any]] = {
            prefix + "index": self._index.astype(np.int16),
            prefix + "rows": np.round(rows / scale).astype(np.int8),
            prefix + "scale": scale.astype(np.float64),
        }
        if self._network is not None:
            names = ("convolve", "bias", "attend", "project", "offset")
            out |= {prefix + name: a for name, a in zip(names, self._network, strict=True)}
        return out

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], prefix: str) -> TextEncoder:
        """The encoder of an artifact.

        Raises: KeyError or ShapeError when it is not whole.
        """
        network = None
        if prefix + "convolve" in arrays:
            names = ("convolve", "bias", "attend", "project", "offset")
            network = {name: arrays[prefix + name] for name in names}
        rows = arrays[prefix + "rows"]
        if rows.ndim != 2 or rows.dtype != np.int8:
            raise ShapeError("word rows must be two-dimensional 8-bit integers")
        return cls(
            arrays[prefix + "index"].astype(np.int64),
            rows,
            np.asarray(arrays[prefix + "scale"], np.float64),
            network,
        )


@njit(cache=True)
def _network(words, convolve, bias, attend, project, offset, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Convolution, attention and projection in plain loops: a library's threads would fight the
    gateway for its core.
    """
    n, d = words.shape
    h, heads = attend.shape
    hidden = np.empty((n, h), np.float32)
    weights = np.empty((n, heads), np.float32)
    for i in range(n):
        for k in range(h):
            hidden[i, k] = bias[k]
        for o in range(3):
            j = i + o - 1
            if j < 0 or j >= n:
                continue
            at = o * d
            whole = d - d % 4
            for c in range(0, whole, 4):  # four at a time: a sum is read and written once for all
                w, x, y, z = words[j, c], words[j, c + 1], words[j, c + 2], words[j, c + 3]
                for k in range(h):
                    hidden[i, k] += (
                        w * convolve[at + c, k]
                        + x * convolve[at + c + 1, k]
                        + y * convolve[at + c + 2, k]
                        + z * convolve[at + c + 3, k]
                    )
            for c in range(whole, d):
                for k in range(h):
                    hidden[i, k] += words[j, c] * convolve[at + c, k]
        for a in range(heads):
            weights[i, a] = 0.0
        for k in range(h):
            hidden[i, k] = max(hidden[i, k], np.float32(0.0))
            for a in range(heads):
                weights[i, a] += hidden[i, k] * attend[k, a]
        for a in range(heads):
            weights[i, a] = np.exp(min(max(weights[i, a], np.float32(-30.0)), np.float32(30.0)))
    for k in range(out.shape[0]):
        out[k] = offset[k]
    pooled = np.zeros(h)
    for a in range(heads + 1):  # the last one is the plain mean
        total = 0.0
        pooled[:] = 0.0
        for i in range(n):
            weight = float(weights[i, a]) if a < heads else 1.0
            total += weight
            for k in range(h):
                pooled[k] += weight * hidden[i, k]
        for k in range(h):
            x = pooled[k] / total
            for m in range(out.shape[0]):
                out[m] += x * project[a * h + k, m]
