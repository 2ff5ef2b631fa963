"""Output length from the request: boosted trees over a hazard in the model's own time.

Every (model, group) has its own distribution S_m, kept by `predictors.running`. What a prompt
changes is how fast that distribution is used up. With v = -log S_m(L), which is exponential with
mean 1 whatever the model, the trees give a factor exp(f_k) on the hazard in each of K stretches of
v, and the answer is

    S(L | request) = exp(-sum_k exp(f_k) * |[0, v(L)] in stretch k|)

so f = 0 gives the model's own distribution back, an unseen model is served by its prior, and a
model that starts to answer longer moves at once, without a new fit. On the bins of
`domain.length` this is a discrete hazard with complementary log-log link; a censored answer adds
its exposure and no event, which is a Poisson likelihood with offset (Friedman, "Piecewise
exponential models for survival data with covariates", Ann. Statist. 1982).

Features of the trees: the dense numbers of the request, scores of kernel ridge regressions over
text embedding and dense numbers, what the model's name says, the shape of S_m, and k. The text
reaches the trees through the scores only: with a few hundred distinct prompts they would learn
embeddings by heart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from domain.errors import ShapeError
from domain.length import BINS, EDGES, LengthDistribution
from domain.native import compiled
from predictors.artifact import Artifact, ArtifactError, load
from predictors.features import DENSE_SIZE, MODEL_SIZE, SCHEMA_HASH, SIZE, model_features
from predictors.text import TextEncoder
from predictors.trees import Forest, check

Floats = NDArray[np.float64]

KIND = "length_gbdt"
LEVELS = np.array([0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
"""Ranks at which the K stretches start."""
STRETCHES = len(LEVELS)
KNOTS: Floats = -np.log1p(-LEVELS)
"""Starts of the stretches in v, (K,); the last has no end."""
OWN_SIZE = 4
NORMAL = NormalDist()
MAX_FACTOR = 4.0
"""|f| is cut here: e^4, 55 times the hazard."""
SPREAD = 0.2
"""Weight of one standard deviation of a dense number beside the unit-length text embedding."""


class Kernel(NamedTuple):
    """Kernel ridge regression on landmarks (Nyström): scores = phi(x) @ alpha.

    `mean`, `std` (DENSE_SIZE,) standardise, `landmarks` (R, D + DENSE_SIZE), `alpha` (R, S),
    `width` is the kernel's length scale.
    """

    mean: Floats
    std: Floats
    landmarks: Floats
    alpha: Floats
    width: float

    def position(self, dense: Floats, embedding: Floats) -> Floats:
        """Where requests lie: (n, D + DENSE_SIZE) from (n, DENSE_SIZE) and (n, D)."""
        z = np.clip((dense - self.mean) / self.std, -3.0, 3.0) * SPREAD
        return np.concatenate([embedding, z], axis=-1)

    def phi(self, position: Floats) -> Floats:
        """Similarities to the landmarks, (n, R)."""
        norms = (position**2).sum(-1)[:, None] + (self.landmarks**2).sum(-1)
        squared = np.maximum(norms - 2.0 * position @ self.landmarks.T, 0.0)
        similar: Floats = np.exp(squared / (-2.0 * self.width**2))
        return similar


class KernelScores:
    """Scores of one request at a time by a kernel and the text encoder it was fitted with."""

    def __init__(self, kernel: Kernel, text: TextEncoder) -> None:
        if kernel.landmarks.shape[1] != text.size + DENSE_SIZE:
            raise ShapeError(f"landmarks have {kernel.landmarks.shape[1]} columns")
        self._kernel, self._text = kernel, text
        self._columns = np.ascontiguousarray(kernel.landmarks.T, np.float32)
        self._alpha = np.ascontiguousarray(kernel.alpha)
        self._scale = -0.5 / kernel.width**2
        self._native: Callable[..., None] | None = None

    def __call__(self, features: Floats) -> Floats:
        """Scores (S,) of a request's vector."""
        position = self._kernel.position(features[:DENSE_SIZE], self._text.embed(features))
        found = np.zeros(self._alpha.shape[1])
        near = position.astype(np.float32)
        arguments = (near, self._columns, self._alpha, self._scale, found)
        if self._native is None:
            self._native = compiled(_score, *arguments)
        self._native(*arguments)
        return found


class LengthGbdt:
    """A fitted length model; pure, so the same question gives the same answer.

    Raises: ArtifactError at construction when the arrays do not fit each other or this version.
    """

    def __init__(self, artifact: Artifact) -> None:
        try:
            arrays = dict(artifact.arrays)
            self.version = artifact.version
            self.text = TextEncoder.of(artifact)
            kernel = kernel_from(arrays)
            self._kernel_scores = KernelScores(kernel, self.text)
            self._forest = forest_from(arrays)
            self._row_size = row_size(kernel.alpha.shape[1])
            check(self._forest, self._row_size)
            self._low = np.asarray(arrays["range_low"], np.float64)
            self._high = np.asarray(arrays["range_high"], np.float64)
            self._check_shapes()
            self._walk: Callable[..., None] | None = None
        except (KeyError, ShapeError, ValueError, TypeError, IndexError) as exc:
            raise ArtifactError(f"length artifact does not fit together: {exc}") from exc

    def _check_shapes(self) -> None:
        if self._low.shape != (DENSE_SIZE,) or self._high.shape != (DENSE_SIZE,):
            raise ShapeError(f"training ranges must be ({DENSE_SIZE},)")

    @classmethod
    def load(cls, path: Path) -> LengthGbdt:
        """Read an artifact file.

        Raises: ArtifactError as `predictors.artifact.load` and the constructor.
        """
        return cls(load(path, kind=KIND, schema=SCHEMA_HASH))

    def predict(self, features: Floats, model: str, own: LengthDistribution) -> LengthDistribution:
        """Length of the answer of `model` to the request with this vector; `own` is S_m.

        Features that are missing, of another length, not finite or far outside what the fit saw
        give `own` back: never an exception.
        """
        if own.shift or not self.knows(features):
            return own
        return self.forecast(features, self.scores(features), model, own)

    def forecast(
        self, features: Floats, scores: Floats, model: str, own: LengthDistribution
    ) -> LengthDistribution:
        """As `predict`, with scores that were computed, and perhaps aligned, before."""
        return reshape(own, self.factors(features, scores, model, own))

    def knows(self, features: Floats) -> bool:
        """Whether the vector has this schema's size, is finite and in or near the training
        range.
        """
        if features.shape != (SIZE,) or not np.all(np.isfinite(features)):
            return False
        dense = features[:DENSE_SIZE]
        outside = (dense < self._low) | (dense > self._high)
        return int(outside.sum()) <= DENSE_SIZE // 8

    def scores(self, features: Floats) -> Floats:
        """Kernel regressions of one request, (S,): expected rank of its length as a z value."""
        return self._kernel_scores(features)

    def factors(
        self, features: Floats, scores: Floats, model: str, own: LengthDistribution
    ) -> Floats:
        """exp(f_k), (STRETCHES,), from a request's vector and `scores`."""
        row = np.empty(self._row_size)
        row[:DENSE_SIZE] = features[:DENSE_SIZE]
        at = DENSE_SIZE + len(scores)
        row[DENSE_SIZE:at] = scores
        row[at : at + MODEL_SIZE] = model_features(model)
        at += MODEL_SIZE
        row[at : at + OWN_SIZE] = own_features(own)
        out = np.empty(STRETCHES)
        arguments = (row, *self._forest, out)
        if self._walk is None:
            self._walk = compiled(_factors, *arguments)
        self._walk(*arguments)
        return out


def z_of(own: LengthDistribution, tokens: float) -> float:
    """Rank of a length within S_m as a standard normal value, within +-2.6."""
    rank = 1.0 - own.survives(tokens)
    return NORMAL.inv_cdf(min(max(rank, 0.005), 0.995))


def row_size(scores: int) -> int:
    """Columns of the trees' input with that many kernel scores; the last is k."""
    return DENSE_SIZE + scores + MODEL_SIZE + OWN_SIZE + 1


def own_features(own: LengthDistribution) -> Floats:
    """Shape of a model's own distribution, (OWN_SIZE,): log median, spread below and above, and
    the share beyond 2,000 tokens.
    """
    low, middle, high = np.log1p(own.quantiles(np.array([0.1, 0.5, 0.9])))
    return np.array([middle, middle - low, high - middle, own.survives(2000.0)])


def reshape(own: LengthDistribution, factors: Floats) -> LengthDistribution:
    """S(L | request) from S_m and the K hazard factors."""
    survival = np.empty(BINS + 1)
    _reshape(own.survival, factors, KNOTS, survival)
    return LengthDistribution(survival)


def exposure(own_survival: Floats) -> Floats:
    """Length of [0, v(L)] in each stretch, (..., K), for survivals (...,) in (0, 1]."""
    v = -np.log(np.maximum(own_survival, 1e-12))[..., None]
    ends = np.append(KNOTS[1:], np.inf)
    return np.clip(v - KNOTS, 0.0, ends - KNOTS)


def survival_at(own: Floats, tokens: Floats) -> Floats:
    """S_m(L) of lengths (n,), linear inside a bin of survival (BINS + 1,)."""
    return np.interp(tokens, EDGES, own)


@njit(cache=True)
def _reshape(own, factors, knots, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    stretches = knots.shape[0]
    out[0] = 1.0
    last = out.shape[0] - 1
    for j in range(1, last):
        if own[j] <= 1e-12:
            out[j] = 0.0
            continue
        v = -np.log(own[j])
        used = 0.0
        for k in range(stretches):
            if v <= knots[k]:
                break
            end = knots[k + 1] if k + 1 < stretches else np.inf
            used += factors[k] * (min(v, end) - knots[k])
        out[j] = min(out[j - 1], np.exp(-used))
    out[last] = 0.0


@njit(cache=True)
def _score(position, columns, alpha, scale, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Sum of exp(scale * |position - landmark|^2) * alpha; `columns` is (D, R), both float32."""
    squared = np.zeros(columns.shape[1], np.float32)
    for d in range(columns.shape[0]):
        x = position[d]
        for r in range(columns.shape[1]):
            gap = x - columns[d, r]
            squared[r] += gap * gap
    for r in range(columns.shape[1]):
        weight = np.exp(scale * float(squared[r]))
        for s in range(out.shape[0]):
            out[s] += weight * alpha[r, s]


@njit(cache=True)
def _factors(row, root, feature, threshold, left, right, missing, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Clipped sums of leaves for k = 0, 1, ... in the row's last column: each tree is walked once.

    Where a node asks for k the stretches part: those up to its threshold go left, the rest right.
    """
    stretches = out.shape[0]
    last = row.shape[0] - 1
    out[:] = 0.0
    # one entry a time the stretches part, and they can part no more often than there are of them
    nodes = np.empty(stretches + 1, np.int64)
    firsts = np.empty(stretches + 1, np.int64)
    ends = np.empty(stretches + 1, np.int64)
    for tree in range(root.shape[0]):
        nodes[0], firsts[0], ends[0] = root[tree], 0, stretches
        waiting = 1
        while waiting > 0:
            waiting -= 1
            node, first, end = nodes[waiting], firsts[waiting], ends[waiting]
            while feature[node] >= 0:
                if feature[node] == last:
                    cut = first
                    while cut < end and cut <= threshold[node]:
                        cut += 1
                    if cut == end:
                        node = left[node]
                    elif cut == first:
                        node = right[node]
                    else:
                        nodes[waiting], firsts[waiting], ends[waiting] = right[node], cut, end
                        waiting += 1
                        node, end = left[node], cut
                    continue
                value = row[feature[node]]
                if np.isnan(value):
                    if missing[node] == 1:
                        node = left[node]
                        continue
                    if missing[node] == 2:
                        node = right[node]
                        continue
                    value = 0.0
                node = left[node] if value <= threshold[node] else right[node]
            for k in range(first, end):
                out[k] += threshold[node]
    for k in range(stretches):
        out[k] = np.exp(min(max(out[k], -MAX_FACTOR), MAX_FACTOR))


# ---- arrays of an artifact


def kernel_arrays(kernel: Kernel) -> dict[str, NDArray[Any]]:
    """A kernel as arrays of an artifact; landmarks and weights as float32."""
    return {
        "kernel_mean": kernel.mean,
        "kernel_std": kernel.std,
        "kernel_landmarks": kernel.landmarks.astype(np.float32),
        "kernel_alpha": kernel.alpha.astype(np.float32),
        "kernel_width": np.array([kernel.width]),
    }


def kernel_from(arrays: Mapping[str, NDArray[Any]]) -> Kernel:
    """The kernel of an artifact.

    Raises: KeyError or ShapeError when it is not whole.
    """
    kernel = Kernel(
        np.ascontiguousarray(arrays["kernel_mean"], np.float64),
        np.ascontiguousarray(arrays["kernel_std"], np.float64),
        np.ascontiguousarray(arrays["kernel_landmarks"], np.float64),
        np.ascontiguousarray(arrays["kernel_alpha"], np.float64),
        float(arrays["kernel_width"][0]),
    )
    if kernel.mean.shape != (DENSE_SIZE,) or kernel.std.shape != (DENSE_SIZE,):
        raise ShapeError(f"standardisation must be ({DENSE_SIZE},)")
    if kernel.landmarks.ndim != 2 or kernel.alpha.ndim != 2:
        raise ShapeError("landmarks and weights must have two axes")
    if len(kernel.landmarks) != len(kernel.alpha):
        raise ShapeError("one row of weights per landmark")
    finite = all(np.all(np.isfinite(a)) for a in kernel[:4]) and math.isfinite(kernel.width)
    if not finite or not kernel.width > 0 or not np.all(kernel.std > 0):
        raise ShapeError("kernel values must be finite, its width and deviations above 0")
    return kernel


def forest_arrays(forest: Forest, prefix: str = "forest_") -> dict[str, NDArray[Any]]:
    """A forest as arrays of an artifact."""
    return {prefix + name: getattr(forest, name) for name in Forest._fields}


def forest_from(arrays: Mapping[str, NDArray[Any]], prefix: str = "forest_") -> Forest:
    """The forest of an artifact, of the exact types the kernels are compiled for.

    Raises: KeyError when a column is absent.
    """
    types = (np.int32, np.int32, np.float64, np.int32, np.int32, np.uint8)
    return Forest(
        *(
            np.ascontiguousarray(arrays[prefix + name], kind)
            for name, kind in zip(Forest._fields, types, strict=True)
        )
    )
