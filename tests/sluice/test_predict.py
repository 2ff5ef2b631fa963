"""`sluice predict` and `sluice train` from the command line."""

import json

import pytest

from sluice.cli import BAD_INPUT, DONE, main


def predicted(capsys, *words):
    assert main(["predict", "--json", *words]) == DONE
    return json.loads(capsys.readouterr().out)


def test_a_long_task_is_longer_and_the_reasons_say_why(capsys):
    long = predicted(capsys, "--text", "Write a complete Python web server with a database")
    short = predicted(capsys, "--text", "In one word: what is the capital of France?")
    assert short["length"]["p50"] < long["length"]["p50"]
    assert long["length"]["p10"] <= long["length"]["p50"] <= long["length"]["p90"]
    assert short["own"] == long["own"]
    factors = [reason["factor"] for reason in short["reasons"]]
    assert factors
    assert min(factors) < 1.0


def test_a_limit_caps_everything(capsys):
    shown = predicted(capsys, "--text", "Write an essay about rivers", "--max-tokens", "20")
    assert max(shown["length"].values()) <= 20


def test_people_get_sentences(capsys):
    assert main(["predict", "--text", "Explain tides", "--model", "llama-8b"]) == DONE
    said = capsys.readouterr().out
    assert "llama-8b" in said
    assert "artifact length_gbdt-" in said


@pytest.mark.parametrize(
    "words",
    [
        ["--max-tokens", "0"],
        ["--median", "nan"],
        ["--prior", "1.5"],
        ["--length", "no-such-file.npz"],
    ],
)
def test_bad_input_is_said(capsys, words):
    assert main(["predict", "--text", "x", *words]) == BAD_INPUT
    assert capsys.readouterr().err


def test_train_passes_the_flags_on(capsys, tmp_path):
    """A log without latency rows is bad input; the job itself says so."""
    log = tmp_path / "decisions.jsonl"
    log.write_text('{"schema": 1}\n{"cut')
    out = tmp_path / "latency.npz"
    assert main(["train", "latency", "--logs", str(log), "--out", str(out)]) == BAD_INPUT
    assert "outcomes" in capsys.readouterr().err
    assert not out.exists()


def test_train_refuses_other_kinds():
    with pytest.raises(SystemExit):
        main(["train", "horoscope"])
