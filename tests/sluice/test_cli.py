"""Every subcommand explains itself, and bad input is told apart from a failure."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from domain.errors import ConfigError
from sluice.cli import SUBCOMMANDS, main
from sluice.explain import story

ROOT = Path(__file__).parents[2]
RECORD = {
    "id": "req-1",
    "tenant": "t",
    "class": "interactive",
    "model": "m",
    "stream": True,
    "slo": {"ttft": 0.5, "tpot": None, "e2e": None, "quality": 0.8},
    "prompt_tokens": 12.0,
    "policy": "best_fit",
    "propensity": 1.0,
    "attempts": 1,
    "route": "a",
    "replica": "a",
    "variant": "v",
    "candidates": [
        {"route": r, "score": s, "p_slo": 0.9, "ttft": 0.1, "tpot": 0.02, "quality": 0.9}
        for r, s in (("a", 2.0), ("b", 1.0))
    ],
    "predicted": {
        "ttft": [0.1, 0.2, 0.3],
        "tpot": [0.01, 0.02, 0.03],
        "p_slo": 0.93,
        "length_p50": 20,
        "length_p90": 60,
        "running": 2,
        "backlog": 30,
    },
    "outcome": {
        "cause": "finished",
        "reason": "",
        "ttft": 0.61,
        "tpot": 0.02,
        "e2e": 1.4,
        "completion_tokens": 40,
        "usage_source": "engine",
        "met": False,
        "miss": "prediction",
    },
}


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_shows_an_example(name, capsys):
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "example:" in text
    assert f"sluice {name}" in text.split("example:")[1]
    assert "--json" in text


def test_overview_lists_all(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text for name in SUBCOMMANDS)


def test_bad_input_exits_with_2(capsys):
    assert main([]) == 2
    assert main(["nonsense"]) == 2
    assert "no subcommand 'nonsense'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["serve"])
    assert caught.value.code == 2


def test_a_port_that_is_taken_is_said_in_one_line(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = tmp_path / "c.yaml"
        config.write_text(
            "models: {m: {variants: {v: {}}}}\n"
            "fleet: [{kind: url, name: a, variant: v, url: 'http://127.0.0.1:9'}]\n"
            "logs: {decisions: null}\n"
            f"server: {{port: {port}}}\n"
        )
        assert main(["serve", "-c", str(config)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"cannot listen on 127.0.0.1:{port}: ")
    assert "--port" in line


def test_what_is_no_bad_input_still_fails_loudly(monkeypatch):
    def broken(_args):
        raise ExceptionGroup("tasks", [ConfigError("a"), ValueError("b")])

    monkeypatch.setattr("sluice.key.run", broken)
    with pytest.raises(ExceptionGroup):
        main(["key"])


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://[x", "http://x:y", "http://u:p@x"])
def test_a_backend_must_be_a_plain_address(url, capsys):
    assert main(["serve", "--backend", url]) == 2
    assert capsys.readouterr().err.startswith("--backend must ")


def test_replay_of_nothing_is_refused(capsys):
    assert main(["replay", "--poisson", "--count", "0"]) == 2
    assert "--count must be at least 1" in capsys.readouterr().err


def test_the_command_starts_without_the_heavy_parts():
    """`sluice --help` does not wait for numba, FastAPI or a subcommand's module."""
    script = (
        "import sys; from sluice.cli import main; main(['--help'])\n"
        "assert not {'numba', 'fastapi', 'sluice.serve', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True)


def test_explain_finds_and_tells(tmp_path, capsys):
    log = tmp_path / "d.jsonl"
    log.write_text(json.dumps(RECORD) + "\n")
    assert main(["explain", "req-1", "--log", str(log)]) == 0
    text = capsys.readouterr().out
    assert "sent to a (v) by policy best_fit" in text
    assert "missed; to blame: prediction" in text
    chosen = next(line for line in text.splitlines() if "chosen" in line)
    assert chosen.startswith("a ")
    assert main(["explain", "req-1", "--log", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == RECORD


def test_explain_tells_a_missing_request_from_a_missing_log(tmp_path, capsys):
    log = tmp_path / "d.jsonl"
    assert main(["explain", "x", "--log", str(log)]) == 2
    log.write_text(json.dumps(RECORD) + "\n")
    assert main(["explain", "x", "--log", str(log)]) == 1
    assert "no request 'x'" in capsys.readouterr().err


def test_a_request_that_was_never_sent_says_why():
    outcome = RECORD["outcome"] | {"cause": "shed", "reason": "unreachable", "ttft": None}
    lines = list(story(RECORD | {"predicted": None, "candidates": [], "outcome": outcome}))
    assert "never sent: unreachable" in lines
