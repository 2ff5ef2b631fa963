"""What a prompt is about, as a short vector: a table of word vectors and a small network over it.

The table holds one row per known word hash (`predictors.features.word_id`), 8-bit. Without a
network the embedding is the mean of the rows; with one, a convolution over three neighbouring words
and attention pooling read order and context. Both were distilled from a sentence encoder by
`training/fit_text.py`; nothing but numpy is needed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from domain.errors import ShapeError
from domain.native import compiled
from predictors.artifact import Artifact, load
from predictors.features import DENSE_SIZE, SCHEMA_HASH, WORD_IDS

Floats = NDArray[np.float64]

KIND = "text_encoder"
REMEMBERED = 4096
"""Words whose products with the convolution are kept: about one in twenty words of a prompt is none
of these, and three additions a word and channel are left of the convolution."""
LANES = 8
"""Attention heads are padded to so many, which compiled code handles as one vector."""


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
            lanes = -(-a // LANES) * LANES
            self._attend = np.zeros((h, lanes), np.float32)
            self._attend[:, :a] = attend
            self._keys = np.full(REMEMBERED, -1, np.int64)
            self._products = np.zeros((REMEMBERED, 3 * h), np.float32)
            self._native: Callable[..., float] | None = None
        self._last: tuple[bytes, Floats] = b"", np.zeros(self.size)

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
    def of(cls, artifact: Artifact, loaded: TextEncoder | None = None) -> TextEncoder:
        """The encoder a model was fitted with: its own arrays, else the one that ships, which may
        be `loaded` already.

        Raises: ShapeError where the fit used another version of the one that ships.
        """
        if "text_index" in artifact.arrays:
            return cls.from_arrays(artifact.arrays, "text_")
        encoder = cls.packaged() if loaded is None or not loaded.version else loaded
        if artifact.card.get("text") != encoder.version:
            raise ShapeError(
                f"fitted with text encoder {artifact.card.get('text')!r}, this version ships"
                f" {encoder.version!r}; fit it again"
            )
        return encoder

    def embed(self, features: Floats) -> Floats:
        """Embedding (D,) of one feature vector; not to be written to. The last one is remembered:
        several models ask about the same request.
        """
        words = features[DENSE_SIZE:].tobytes()
        if self._last[0] != words:
            self._last = words, self._embed(features)
        return self._last[1]

    def _embed(self, features: Floats) -> Floats:
        if self._network is None:
            ids = np.clip(features[DENSE_SIZE:], 0, WORD_IDS - 1).astype(np.int64)
            vector = self._table[self._index[ids]].sum(0).astype(np.float64)
            unit: Floats = vector / max(float(np.sqrt((vector**2).sum())), 1e-9)
            return unit
        convolve, bias, attend, project, offset = self._network
        out = np.zeros(self.size)
        arguments = (
            np.ascontiguousarray(features[DENSE_SIZE:], np.float64), self._index, self._table,
            convolve, bias, self._attend, attend.shape[1], project, offset, self._keys,
            self._products, out,
        )  # fmt: skip
        if self._native is None:
            self._native = compiled(_network, *arguments)
        self._native(*arguments)
        return out

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
def _network(  # type: ignore[no-untyped-def]  # noqa: ANN202
    slots,  # noqa: ANN001
    index,  # noqa: ANN001
    table,  # noqa: ANN001
    convolve,  # noqa: ANN001
    bias,  # noqa: ANN001
    attend,  # noqa: ANN001
    heads,  # noqa: ANN001
    project,  # noqa: ANN001
    offset,  # noqa: ANN001
    keys,  # noqa: ANN001
    products,  # noqa: ANN001
    out,  # noqa: ANN001
):
    """Unit embedding of word slots into out (D,), zero where there is no word.

    Plain loops: a library's threads would fight the gateway for its core. A convolution is a sum of
    one product a word and place, so products of words seen lately are kept (`keys`, `products`);
    what is kept changes no result.
    """
    n = 0
    for i in range(slots.shape[0]):
        if slots[i] != 0.0:
            n = i + 1
    if n == 0:
        return
    d = table.shape[1]
    h = bias.shape[0]
    lanes = attend.shape[1]
    unknown = table.shape[0] - 1
    hidden = np.empty((n, h), np.float32)
    for i in range(n):
        for k in range(h):
            hidden[i, k] = bias[k]
    for j in range(n):
        word = index[int(min(max(slots[j], 0.0), index.shape[0] - 1.0))]
        if word < 0 or word >= unknown:
            continue
        at = word % keys.shape[0]
        product = products[at]
        if keys[at] != word:
            keys[at] = word
            product[:] = 0.0
            for o in range(3):
                for c in range(d):
                    x = table[word, c]
                    for k in range(h):
                        product[o * h + k] += x * convolve[o * d + c, k]
        for o in range(3):
            i = j + 1 - o
            if 0 <= i < n:
                for k in range(h):
                    hidden[i, k] += product[o * h + k]
    pooled = np.zeros((heads + 1, h), np.float32)
    total = np.zeros(heads + 1, np.float32)
    weight = np.empty(lanes, np.float32)
    for i in range(n):
        weight[:] = 0.0
        for k in range(h):
            value = max(hidden[i, k], np.float32(0.0))
            hidden[i, k] = value
            for a in range(lanes):
                weight[a] += value * attend[k, a]
        for a in range(heads + 1):  # the last one is the plain mean
            w = np.float32(1.0)
            if a < heads:
                w = np.exp(min(max(weight[a], np.float32(-30.0)), np.float32(30.0)))
            total[a] += w
            for k in range(h):
                pooled[a, k] += w * hidden[i, k]
    vector = np.empty(out.shape[0], np.float32)
    for m in range(out.shape[0]):
        vector[m] = offset[m]
    for a in range(heads + 1):
        for k in range(h):
            share = pooled[a, k] / total[a]
            for m in range(out.shape[0]):
                vector[m] += share * project[a * h + k, m]
    norm = 0.0
    for m in range(out.shape[0]):
        norm += float(vector[m]) * float(vector[m])
    norm = max(np.sqrt(norm), 1e-9)
    for m in range(out.shape[0]):
        out[m] = vector[m] / norm
