"""Profiles as files: what is written is what is read."""

from dataclasses import fields, replace

from backends.sim.profiles import dump, read_profiles, write_profiles
from domain.fleet import Profile, ProfileKey

KEY = ProfileKey(gpu="g", engine="e", model="m", precision="p", tp=2, pp=3, ep=4)


def other(profile, name):
    """Another value of a field, allowed and exact in four digits."""
    value = getattr(profile, name)
    return value + 3 if isinstance(value, int) else 2 * value or 0.25


def test_every_field_survives_a_file(tmp_path):
    """Also one that comes to `Profile` tomorrow: the fields are asked for, not listed."""
    plain = Profile(key=KEY)
    names = [f.name for f in fields(Profile) if f.name != "key"]
    changed = replace(plain, **{name: other(plain, name) for name in names})
    path = tmp_path / "p.yaml"
    profiles = {"plain": (plain, {}), "changed": (changed, {"median": 0.1})}
    write_profiles(path, source="here", licence="MIT", profiles=profiles)
    assert read_profiles(path) == {"plain": plain, "changed": changed}


def test_what_is_off_is_not_written():
    assert not {"spec_tokens", "spec_batch", "lora_slots", "per_uneven"} & set(dump(Profile()))
