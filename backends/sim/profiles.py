"""Profiles as files: what a GPU, an engine, a model and a precision make of the step time.

A file holds a source, its licence and profiles by name; times are in seconds, as in
`domain.fleet.Profile`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from domain.errors import ConfigError
from domain.fleet import Profile, ProfileKey


def shipped() -> Path:
    """The folder of profiles in the repository."""
    return Path(__file__).resolve().parents[2] / "configs" / "profiles"


def load_profiles(folder: Path) -> dict[str, Profile]:
    """Every profile in the YAML files of a folder, by name.

    Raises: ConfigError naming the file for what is missing, unknown or there twice.
    """
    found: dict[str, Profile] = {}
    for path in sorted(folder.glob("*.yaml")):
        for name, profile in read_profiles(path).items():
            if name in found:
                raise ConfigError(f"{path}: profile {name!r} stands in another file too")
            found[name] = profile
    return found


def read_profiles(path: Path) -> dict[str, Profile]:
    """The profiles of one file. Raises: ConfigError."""
    data = yaml.safe_load(path.read_text())
    if not isinstance(data, dict) or not {"source", "licence", "profiles"} <= set(data):
        raise ConfigError(f"{path}: a profile file has source, licence and profiles")
    return {name: _profile(fields, f"{path}: {name}") for name, fields in data["profiles"].items()}


def _profile(fields: dict[str, Any], where: str) -> Profile:
    rest = {name: value for name, value in fields.items() if name not in {"key", "residuals"}}
    try:
        return Profile(key=ProfileKey(**fields.get("key", {})), **rest)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"{where}: {exc}") from exc


def dump(profile: Profile) -> dict[str, Any]:
    """A profile as the mapping that `read_profiles` takes; numbers to four digits."""
    key = {
        n: getattr(profile.key, n)
        for n in ("gpu", "engine", "model", "precision", "tp", "pp", "ep")
    }
    names = (
        "overhead weights per_sequence per_context per_token per_attention experts "
        "expert_tokens chunk max_seqs kv_capacity max_context price power uncertainty"
    )
    rest = {
        n: v if isinstance(v, int) else float(f"{v:.4g}")
        for n in names.split()
        for v in [getattr(profile, n)]
    }
    return {"key": key, **rest}
