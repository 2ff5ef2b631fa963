"""`sluice policy` on a folder."""

import json

import pytest

from sluice.cli import main


@pytest.fixture
def call(tmp_path, capsys):
    def run(*words, code=0):
        assert main(["policy", "--registry", str(tmp_path), "--json", *words]) == code
        return capsys.readouterr()

    return run


def test_from_add_to_rollback(call):
    added = json.loads(call("add", "gentle", "--kind", "linear", "--set", "within=0.1").out)
    assert added[0]["entry"] == "gentle"
    shown = json.loads(call("show", "gentle").out)
    assert shown["policy"]["within"] == 0.1
    assert json.loads(call("shadow", "gentle").out)["trial"] == "gentle"
    assert json.loads(call("promote").out)["share"] == 0.01
    state = json.loads(call("promote", "--share", "30", "--by-session").out)
    assert (state["share"], state["unit"]) == (0.3, "session")
    rows = {r["name"]: r["role"] for r in json.loads(call("list").out)}
    assert rows == {"gentle": "canary 30 %", "(config)": "active"}
    assert json.loads(call("rollback", "--note", "dull").out)["trial"] is None
    steps = [s["verb"] for s in json.loads(call("show").out)]
    assert steps == ["shadow", "promote", "promote", "rollback"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["add", "x", "--kind", "linucd"], "linucd"),
        (["add", "x", "--kind", "linear", "--set", "weights"], "NAME=VALUE"),
        (["add", "x y", "--kind", "linear"], "no name"),
        (["shadow", "nobody"], "nobody"),
        (["promote"], "nothing is tried"),
        (["rollback"], "nothing to go back to"),
    ],
)
def test_bad_input_is_named(call, words, named):
    assert named in call(*words, code=2).err


def test_an_entry_changed_by_hand_is_listed_as_unusable(call, tmp_path):
    call("add", "gentle", "--kind", "linear")
    path = tmp_path / "entries" / "gentle.json"
    path.write_text(path.read_text().replace('"p_slo": 1.0', '"p_slo": 2.0'))
    assert "unusable" in json.loads(call("list").out)[0]["role"]
    assert "hash" in call("shadow", "gentle", code=2).err
