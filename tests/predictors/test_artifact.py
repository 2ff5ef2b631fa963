import io
import json
import zipfile

import numpy as np
import pytest

from predictors.artifact import Artifact, ArtifactError, load, numbers, save

GOOD = Artifact(kind="toy", schema="s1", arrays={"a": np.arange(6.0).reshape(2, 3)}, card={"n": 1})


def written(tmp_path, artifact=GOOD):
    path = tmp_path / "toy.npz"
    save(artifact, path)
    return path


def rewritten(path, change):
    """The same zip with members changed by `change(name, bytes) -> bytes | None`."""
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in members.items():
            kept = change(name, data)
            if kept is not None:
                new.writestr(name, kept)
    return path


def test_what_is_saved_is_loaded(tmp_path):
    """Arrays, card and version survive; the same artifact gives the same bytes."""
    path = written(tmp_path)
    back = load(path, kind="toy", schema="s1")
    assert back.arrays["a"].tolist() == GOOD.arrays["a"].tolist()
    assert back.card == {"n": 1}
    assert back.version == GOOD.version
    first = path.read_bytes()
    save(GOOD, path)
    assert path.read_bytes() == first


def test_missing_file(tmp_path):
    with pytest.raises(ArtifactError, match="no such artifact"):
        load(tmp_path / "none.npz", kind="toy")


@pytest.mark.parametrize(("kind", "schema"), [("other", "s1"), ("toy", "s2")])
def test_other_kind_or_schema(tmp_path, kind, schema):
    """An artifact of another purpose or feature schema says so."""
    with pytest.raises(ArtifactError, match=r"expected 'other'|fit it again"):
        load(written(tmp_path), kind=kind, schema=schema)


@pytest.mark.parametrize("keep", [0, 1, 10, 200])
def test_cut_off_files(tmp_path, keep):
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ArtifactError):
        load(path, kind="toy", schema="s1")


def test_every_flipped_byte_is_noticed_or_harmless(tmp_path):
    """One damaged byte anywhere gives an ArtifactError or the same arrays, nothing else."""
    path = written(tmp_path)
    whole = bytearray(path.read_bytes())
    for at in range(0, len(whole), 3):
        harmed = bytearray(whole)
        harmed[at] ^= 0x5A
        path.write_bytes(harmed)
        try:
            back = load(path, kind="toy", schema="s1")
        except ArtifactError:
            continue
        assert back.arrays["a"].tolist() == GOOD.arrays["a"].tolist()


def test_pickles_are_never_read(tmp_path):
    """An object array, which would need pickle, is refused."""
    buffer = io.BytesIO()
    np.save(buffer, np.array([{}], dtype=object), allow_pickle=True)
    path = rewritten(written(tmp_path), lambda n, d: buffer.getvalue() if n.endswith(".npy") else d)
    with pytest.raises(ArtifactError):
        load(path, kind="toy", schema="s1")


def test_older_format(tmp_path):
    def older(name, data):
        if name.endswith(".json"):
            return json.dumps(json.loads(data) | {"format": 0}).encode()
        return data

    with pytest.raises(ArtifactError, match="format 0"):
        load(rewritten(written(tmp_path), older), kind="toy", schema="s1")


def test_changed_numbers_and_bombs(tmp_path):
    """Arrays that do not match the digest, and files that unpack too large, are refused."""
    other = io.BytesIO()
    np.save(other, np.zeros((2, 3)))
    path = rewritten(written(tmp_path), lambda n, d: other.getvalue() if n == "a.npy" else d)
    with pytest.raises(ArtifactError, match="digest"):
        load(path, kind="toy", schema="s1")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("artifact.json", b"0" * (65 * 1024 * 1024))
    with pytest.raises(ArtifactError, match="larger"):
        load(path, kind="toy", schema="s1")


@pytest.mark.parametrize("value", [None, True, "1", float("nan")])
def test_card_numbers(value):
    with pytest.raises(ArtifactError):
        numbers({"n": value}, "n")
    assert numbers({"n": 2}, "n") == 2.0
