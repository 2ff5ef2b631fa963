"""Artifacts: what a fit leaves behind, as data only.

A file is a zip of plain arrays (`.npy`, never pickled) and one JSON document. The JSON names kind,
format, feature schema, versions, where the data came from and their licence, and a digest of the
arrays; loading checks all of it before anything is used. A missing, corrupt, hostile or older file
is an `ArtifactError` with the remedy, at start-up; the caller falls back to its prior.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from domain.errors import ConfigError

FORMAT = 1
MAX_BYTES = 64 * 1024 * 1024
"""Largest artifact, unpacked; a bigger file is refused before it is read."""
_DOCUMENT = "artifact.json"
_KINDS = frozenset("fiub")
_EPOCH = (2026, 1, 1, 0, 0, 0)


class ArtifactError(ConfigError):
    """An artifact that cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """Arrays by name and what is known of them.

    `schema` is the feature schema the fit saw ("" if it uses none). `card` holds JSON values:
    sources with licences, split, scores, training ranges, package versions.
    """

    kind: str
    arrays: Mapping[str, NDArray[Any]]
    schema: str = ""
    card: Mapping[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """Hash of kind, schema and arrays: what decides, for every log line."""
        return f"{self.kind}-{_digest(self.kind, self.schema, self.arrays)[:12]}"


def save(artifact: Artifact, path: Path) -> None:
    """Write atomically (temporary file, then rename); the same artifact gives the same bytes."""
    document = {
        "format": FORMAT,
        "kind": artifact.kind,
        "schema": artifact.schema,
        "digest": _digest(artifact.kind, artifact.schema, artifact.arrays),
        "card": dict(artifact.card),
    }
    temporary = path.with_suffix(path.suffix + ".tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as out:
        info = zipfile.ZipInfo(_DOCUMENT, _EPOCH)
        info.compress_type = zipfile.ZIP_DEFLATED
        out.writestr(info, json.dumps(document, indent=1, sort_keys=True))
        for name in sorted(artifact.arrays):
            buffer = io.BytesIO()
            np.save(buffer, np.ascontiguousarray(artifact.arrays[name]), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            out.writestr(info, buffer.getvalue())
    temporary.replace(path)


def load(path: Path | BinaryIO, *, kind: str, schema: str = "") -> Artifact:
    """Read and check one artifact, from a file by its path or from an open one.

    Raises: ArtifactError when it is missing, not an artifact, of another kind, format or feature
    schema, too large, damaged, or holds anything but finite plain numbers.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive, path, kind, schema)
    except ArtifactError:
        raise
    except FileNotFoundError as exc:
        raise ArtifactError(
            f"{path}: no such artifact; fit one or drop it from the config"
        ) from exc
    except (OSError, zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError) as exc:
        raise ArtifactError(f"{path}: damaged or not an artifact ({exc}); fit it again") from exc
    except (TypeError, RuntimeError) as exc:  # odd headers, encryption, unknown compression
        raise ArtifactError(f"{path}: cannot be unpacked ({exc}); fit it again") from exc


def _read(archive: zipfile.ZipFile, path: Path | BinaryIO, kind: str, schema: str) -> Artifact:
    members = archive.infolist()
    if sum(member.file_size for member in members) > MAX_BYTES or len(members) > 256:
        raise ArtifactError(f"{path}: larger than {MAX_BYTES} bytes unpacked; refused")
    document = json.loads(archive.read(_DOCUMENT))
    if not isinstance(document, dict) or not isinstance(document.get("card"), dict):
        raise ArtifactError(f"{path}: {_DOCUMENT} is not an artifact's document; fit it again")
    if document.get("format") != FORMAT:
        raise ArtifactError(
            f"{path}: format {document.get('format')!r}, this version reads {FORMAT}; fit it again"
        )
    if document.get("kind") != kind:
        raise ArtifactError(f"{path}: holds {document.get('kind')!r}, expected {kind!r}")
    if document.get("schema") != schema:
        raise ArtifactError(
            f"{path}: fitted on feature schema {document.get('schema')!r}, this version computes"
            f" {schema!r}; fit it again"
        )
    arrays = {
        member.filename.removesuffix(".npy"): np.load(
            io.BytesIO(archive.read(member)), allow_pickle=False
        )
        for member in members
        if member.filename != _DOCUMENT
    }
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in _KINDS:
            raise ArtifactError(f"{path}: {name} is no array of plain numbers; fit it again")
        if array.dtype.kind == "f" and np.any(np.isinf(array)):
            raise ArtifactError(f"{path}: {name} holds infinite values; fit it again")
    if document.get("digest") != _digest(kind, schema, arrays):
        raise ArtifactError(f"{path}: arrays do not match their digest; fit it again")
    return Artifact(kind=kind, arrays=arrays, schema=schema, card=document["card"])


def numbers(card: Mapping[str, Any], name: str) -> float:
    """A finite number of a card.

    Raises: ArtifactError where it is absent or no number.
    """
    value = card.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ArtifactError(f"card value {name!r} must be a finite number, not {value!r}")
    return float(value)


def _digest(kind: str, schema: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(f"{kind}|{schema}".encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"|{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
