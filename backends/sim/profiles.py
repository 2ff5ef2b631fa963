"""Profiles as files: what a GPU, an engine, a model and a precision make of the step time.

A file holds a source, its licence and profiles by name; times are in seconds, as in
`domain.fleet.Profile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from domain.errors import ConfigError
from domain.fleet import Profile, ProfileKey

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The C parser where there is one: hundreds of profiles take a second in Python."""


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
    try:
        stamp = path.stat().st_mtime_ns
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc
    return dict(_parsed(path, stamp))


@cache
def _parsed(path: Path, stamp: int) -> dict[str, Profile]:  # noqa: ARG001 - a file of another time
    """The same, once for every version of a file: a grid of simulations asks hundreds of times."""
    try:
        data = yaml.load(path.read_text(), Loader=_Loader)  # noqa: S506 - a safe one
    except (OSError, yaml.YAMLError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    if not isinstance(data, dict) or not {"source", "licence", "profiles"} <= set(data):
        raise ConfigError(f"{path}: a profile file has source, licence and profiles")
    return {name: _profile(fields, f"{path}: {name}") for name, fields in data["profiles"].items()}


def _profile(fields: dict[str, Any], where: str) -> Profile:
    rest = {name: value for name, value in fields.items() if name not in {"key", "residuals"}}
    try:
        return Profile(key=ProfileKey(**fields.get("key", {})), **rest)
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"{where}: {exc}") from exc


def write_profiles(
    path: Path,
    *,
    source: str,
    licence: str,
    profiles: Mapping[str, tuple[Profile, Mapping[str, float]]],
) -> None:
    """Write a file that `read_profiles` takes: profiles with their residuals, a line each."""
    lines = [yaml.safe_dump({"source": source, "licence": licence}, width=98, sort_keys=False)]
    lines.append("profiles:\n")
    for name, (profile, residuals) in profiles.items():
        rounded = {k: float(f"{v:.3g}") for k, v in residuals.items()}
        entry = {name: {**dump(profile), "residuals": rounded}}
        word = yaml.safe_dump(entry, default_flow_style=True, width=10**6, sort_keys=False)
        lines.append(f"  {word.strip()[1:-1]}\n")
    path.write_text("".join(lines))


SELDOM = (
    "per_uneven", "spec_tokens", "spec_acceptance", "spec_batch", "spec_draft", "lora_slots",
    "lora_load",
)  # fmt: skip
"""Fields that most profiles leave at their defaults, and files therefore out."""


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
    usual = Profile()
    told = [*names.split(), *(n for n in SELDOM if getattr(profile, n) != getattr(usual, n))]
    rest = {
        n: v if isinstance(v, int) else float(f"{v:.4g}")
        for n in told
        for v in [getattr(profile, n)]
    }
    return {"key": key, **rest}
