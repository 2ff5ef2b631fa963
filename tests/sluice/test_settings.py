"""A bad config says line, value and remedy; every shipped one loads."""

import json
from pathlib import Path

import pytest

from gateway.tenants import hash_of, load_tenants
from sluice.cli import main
from sluice.settings import BadConfig, load, parse

ROOT = Path(__file__).parents[2]
GOOD = """\
models:
  m:
    variants:
      v: {}
fleet:
  - kind: url
    name: a
    url: http://127.0.0.1:1
    variant: v
"""


KEYS = f"keys: {{k: {{hash: '{hash_of('k')}'}}}}"


def problems(text):
    with pytest.raises(BadConfig) as caught:
        parse(text, "x.yaml")
    return [str(p) for p in caught.value.problems]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_load(path):
    """A file without a fleet is one of tenants, to be named by `tenants_file`."""
    if "\nfleet:" not in path.read_text():
        assert load_tenants(path)
        return
    settings = load(path)
    assert settings.fleet
    assert settings.classes


def test_the_smallest_config():
    settings = parse(GOOD, "x.yaml")
    assert settings.policy.kind == "marginal"
    assert settings.timeouts.connect_ms == 2000
    assert settings.local_replicas == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("variant: v", "variant: w"), "x.yaml:9: fleet[0].variant: unknown variant 'w'; known: v"),
        (
            ("    url:", "    urk:"),
            "x.yaml:8: fleet[0].urk: unknown key 'urk'; did you mean 'url'? known: api_key_env,",
        ),
        (("kind: url", "kind: cloud"), "x.yaml:6: fleet[0].kind: unknown kind 'cloud'; known: loc"),
        (
            ("  - kind: url\n    name", "  - name"),
            "x.yaml:6: fleet[0].kind: is required and missing",
        ),
        (("    name: a\n", ""), "x.yaml:6: fleet[0].name: is required and missing"),
        (("variants:\n      v: {}", "variants: {}"), "x.yaml:3: models.m.variants: dictionary sho"),
        (("  m:\n", "  auto:\n"), "x.yaml:2: models.auto: 'auto' is reserved"),
        (("http://", "ftp://"), "x.yaml:8: fleet[0].url: string should match pattern"),
        (
            ("http://", "http://user:secret@"),
            "x.yaml:8: fleet[0].url: must hold no user or password; api_key_env names",
        ),
        (("models", "model"), "x.yaml:1: model: unknown key 'model'; did you mean 'models'?"),
    ],
)
def test_problems_name_line_value_and_remedy(change, expected):
    assert any(p.startswith(expected) for p in problems(GOOD.replace(*change)))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("default_class: x\n", "x.yaml:10: default_class: unknown class 'x'; known: standard"),
        (
            "policy:\n  kind: best_fit\n  shed_belo: 1\n",
            "x.yaml:12: policy.shed_belo: unknown key 'shed_belo'; did you mean 'shed_below'?",
        ),
        (
            "policy:\n  kind: best_fti\n",
            "x.yaml:11: policy.kind: unknown kind 'best_fti'; did you mean 'best_fit'?",
        ),
        ("tenants:\n  t: {}\n", "x.yaml:11: tenants.t: no key opens this tenant"),
        (
            f"tenants:\n  t:\n    {KEYS}\n    class: gold\n",
            "x.yaml:13: tenants.t.class: unknown class 'gold'; known: standard",
        ),
        (
            f"tenants:\n  t: {{{KEYS}}}\n  u: {{{KEYS}}}\n",
            "x.yaml:12: tenants.u.keys.k: this key opens 't' too",
        ),
        (
            f"tenants:\n  t: {{{KEYS}, models: [q]}}\n",
            "x.yaml:11: tenants.t.models: unknown model 'q'; known: m",
        ),
        (
            "timeouts:\n  connect_ms: -1\n",
            "x.yaml:11: timeouts.connect_ms: input should be greater",
        ),
        ("server:\n  port: 70000\n", "x.yaml:11: server.port: input should be less than or equal"),
        ("fleet: []\n", "x.yaml:10: file: not YAML: key 'fleet' stands twice"),
        ("a: [\n", "x.yaml:11: file: not YAML:"),
    ],
)
def test_problems_of_other_sections(more, expected):
    found = problems(GOOD + more)
    assert any(p.startswith(expected) for p in found), found


def test_all_problems_come_at_once():
    text = GOOD.replace("variant: v", "variant: w") + "default_class: x\n"
    assert len(problems(text)) == 3  # the class, the variant, and the variant that nobody serves


def test_tenants_of_a_file_of_their_own_join(tmp_path):
    (tmp_path / "t.yaml").write_text(f"tenants:\n  t: {{{KEYS}}}\n")
    path = tmp_path / "c.yaml"
    path.write_text(GOOD + "tenants_file: t.yaml\n")
    assert list(load(path).tenants) == ["t"]
    (tmp_path / "t.yaml").write_text(f"tenants:\n  t: {{class: gold, {KEYS}}}\n")
    with pytest.raises(BadConfig, match=r"t.yaml:0: tenants.t.class: unknown class 'gold'"):
        load(path)


def test_a_key_in_the_place_of_its_hash_is_not_repeated():
    found = problems(GOOD + "tenants:\n  t: {keys: {k: {hash: sk-secret}}}\n")
    assert len(found) == 1
    assert "sluice key" in found[0]
    assert "sk-secret" not in found[0]


def test_key_prints_a_key_and_its_hash(capsys):
    assert main(["key", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert hash_of(made["key"]) == made["hash"]
    assert main(["key"]) == 0
    assert "hash" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "3", "- a\n", "null"])
def test_what_is_no_mapping_is_refused(text):
    assert problems(text)


@pytest.mark.parametrize(
    ("raw", "line", "message"),
    [
        (b"a: 1\nb: \xff\n", 2, "not UTF-8: byte 0xff"),
        (b"a: 1\n\nb: \x00\n", 3, "special characters are not allowed"),
        (b"a: 1\nb: &b [*b]\n", 2, "an anchor holds itself"),
        (b"[" * 5000, 1, "nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_read_as_yaml_is_a_problem_with_a_line(tmp_path, raw, line, message):
    file = tmp_path / "bad.yaml"
    file.write_bytes(raw)
    with pytest.raises(BadConfig) as caught:
        load(file)
    [problem] = caught.value.problems
    assert (problem.line, problem.where) == (line, "file")
    assert message in problem.message


def test_an_anchor_may_be_used_more_than_once():
    assert parse(GOOD + "monitor: &m {every_ms: 500}\n", "f").monitor.every_ms == 500
    assert not any("anchor" in p for p in problems("a: &a [1]\nb: [*a, *a]\n"))


def test_check_prints_problems_and_exits_with_2(tmp_path, capsys):
    bad = tmp_path / "bad.yaml"
    bad.write_text(GOOD.replace("variant: v", "variant: w"))
    assert main(["check", str(bad)]) == 2
    assert "unknown variant 'w'" in capsys.readouterr().out
    assert main(["check", str(bad), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert told["problems"][0]["line"] == 9
    assert main(["check", str(tmp_path / "none.yaml")]) == 2
    good = tmp_path / "good.yaml"
    good.write_text(GOOD)
    assert main(["check", str(good)]) == 0


def test_schema_describes_every_section(capsys):
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"models", "fleet", "classes", "tenants", "policy"} <= set(schema["properties"])
