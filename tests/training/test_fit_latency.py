"""The latency job on outcomes whose law is known: it finds it and refuses noise; data only."""

import json

import numpy as np
import pytest

pytest.importorskip("lightgbm")

from domain.errors import ConfigError
from predictors.latency import BASE_TTFT, COUNT, ROOF_TPOT, ROOF_TTFT, SCHEMA_HASH, WIDTH
from predictors.latency_gbdt import LatencyGbdt
from training.fit_latency import (
    BAD_INPUT,
    DONE,
    NOT_BETTER,
    FitConfig,
    job,
    main,
)
from training.latency_data import (
    LatencyRows,
    frame_of,
    load_window,
    newest_per_class,
    read_logs,
    row_of,
    save_window,
)

SMALL = FitConfig(centre=40, spread=10, leaves=7)


def outcomes(n=1200, seed=0, law=0.8):
    """log(TTFT / base) = law * first feature + noise whose spread is the second; TPOT alike."""
    rng = np.random.default_rng(seed)
    rows = rng.uniform(0.0, 1.0, (n, WIDTH))
    rows[:, BASE_TTFT] = rows[:, ROOF_TTFT] = np.exp(rng.uniform(-3, 0, n))
    rows[:, ROOF_TPOT] = 0.02
    noise = (0.05 + 0.2 * rows[:, 1]) * rng.standard_normal(n)
    factor = np.exp(law * (rows[:, 0] - 0.5) + noise)
    return LatencyRows(
        rows=rows,
        ttft=rows[:, BASE_TTFT] * factor,
        tpot=rows[:, ROOF_TPOT] * factor,
        tokens=np.full(n, 50.0),
        kind=np.where(np.arange(n) % 4 == 0, "small", "large"),
    )


def test_the_law_is_found_and_the_bound_covers():
    artifact, report = job(outcomes(), SMALL, "test")
    held = report["held_out"]["all"]["ttft"]
    assert held["mape"] < 0.75 * held["mape_roofline"]
    assert held["coverage_p90"] == pytest.approx(0.9, abs=0.06)
    model = LatencyGbdt(artifact)
    fresh = outcomes(seed=1)
    spreads = np.array([model.heads(row)[1] for row in fresh.rows])
    low, high = spreads[fresh.rows[:, 1] < 0.3].mean(), spreads[fresh.rows[:, 1] > 0.7].mean()
    assert low < high
    assert artifact.card["classes"] == {"large": 900, "small": 300}


def test_what_does_not_beat_the_roofline_is_not_written(tmp_path):
    """The roofline knows the truth already: exit 1, no file."""
    frame = outcomes()
    exact = frame.rows.copy()
    exact[:, ROOF_TTFT] = frame.ttft
    save_window(
        LatencyRows(
            rows=exact, ttft=frame.ttft, tpot=frame.tpot, tokens=frame.tokens, kind=frame.kind
        ),
        tmp_path / "window.npz",
    )
    out = tmp_path / "latency.npz"
    assert main(["--window", str(tmp_path / "window.npz"), "--out", str(out)]) == NOT_BETTER
    assert not out.exists()


def test_the_same_window_gives_the_same_artifact(tmp_path):
    save_window(outcomes(600), tmp_path / "window.npz")
    versions = []
    for name in ("a.npz", "b.npz"):
        words = ["--window", str(tmp_path / "window.npz"), "--out", str(tmp_path / name)]
        assert main([*words, "--report", str(tmp_path)]) == DONE
        versions.append(LatencyGbdt.load(tmp_path / name).version)
    assert versions[0] == versions[1]
    assert "held_out" in json.loads((tmp_path / "report.json").read_text())


def test_a_window_keeps_the_newest_of_every_class():
    frame = newest_per_class(outcomes(400), 50)
    assert {k: int((frame.kind == k).sum()) for k in ("large", "small")} == {
        "large": 50,
        "small": 50,
    }
    assert np.array_equal(frame.ttft[-1:], outcomes(400).ttft[-1:])


def record(**change):
    basis = [0.5] * COUNT + [0.1, 0.5, 0.0, 0.1, 0.02, 0.0]
    return {
        "latency_schema": SCHEMA_HASH,
        "kind": "h100/m/fp8",
        "replica": "r0",
        "stream": True,
        "choices": 1,
        "predicted": {"basis": basis},
        "outcome": {
            "cause": "finished",
            "sent": 0.2,
            "ttft": 0.5,
            "tpot": 0.03,
            "completion_tokens": 40,
        },
    } | change


def test_log_lines_become_rows_and_damage_is_left_out(tmp_path):
    log = tmp_path / "decisions.jsonl"
    lines = [
        json.dumps(record()),
        json.dumps(record(latency_schema="older")),
        json.dumps(record(predicted=None)),
        json.dumps({"feedback_to": "a", "score": 1}),
        json.dumps(record(outcome={"cause": "finished"})),
        json.dumps([1, 2]),
        "not json",
        json.dumps(record())[:50],
    ]
    log.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    frame = read_logs([log])
    assert len(frame) == 1
    assert frame.ttft[0] == pytest.approx(0.3)
    assert (frame.tpot[0], frame.kind[0]) == (0.03, "h100/m/fp8")


def test_unstreamed_and_multiple_answers_teach_no_pace():
    ttft, tpot = row_of(record(stream=False))[1:3]
    assert np.isnan(ttft)
    assert np.isnan(tpot)
    assert np.isnan(row_of(record(choices=2))[2])


@pytest.mark.parametrize("data", [b"", b"text", b"PK\x03\x04"])
def test_a_window_that_is_none_is_bad_input(tmp_path, data):
    path = tmp_path / "window.npz"
    path.write_bytes(data)
    with pytest.raises(ConfigError):
        load_window(path)
    assert main(["--window", str(path), "--out", str(tmp_path / "o.npz")]) == BAD_INPUT


def test_too_few_outcomes_are_bad_input():
    with pytest.raises(ConfigError, match="outcomes"):
        job(outcomes(50), SMALL, "test")
    with pytest.raises(ConfigError):
        job(frame_of([]), SMALL, "test")
