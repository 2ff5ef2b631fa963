"""Figures of a replay on results made by hand."""

import numpy as np
import pytest

from domain.request import Slo
from training.replay import ClassPlan, Result
from training.replay_report import summary


def result(i, *, due=None, first=0.1, gap=0.01, tokens=11, **changes):
    due = float(i) if due is None else due
    fields = {
        "index": i,
        "due": due,
        "prompt": 100,
        "wanted": 10,
        "class_name": "standard",
        "tenant": "t",
        "sent": due,
        "first": due + first,
        "last": due + first + gap * (tokens - 1),
        "ended": due + first + gap * (tokens - 1),
        "status": 200,
        "tokens": float(tokens),
        "replica": "a",
    }
    return Result(**(fields | changes))


CLASSES = {"standard": ClassPlan(slo=Slo(ttft=0.2, tpot=0.02))}


def test_goodput_counts_every_arrival_but_those_above_their_quota():
    results = [
        result(0),
        result(1, first=0.3),
        result(2, gap=0.03),
        result(3, status=503, error="slo_unreachable"),
        result(4, status=429, code="rate_limit_exceeded", error="rate_limit_exceeded"),
        result(5, error="stream broke off"),
    ]
    report = summary(results, CLASSES)
    assert (report["requests"], report["quota_refused"], report["met"]) == (6, 1, 1)
    assert report["rate"] == pytest.approx(1.0)
    assert report["attainment"] == pytest.approx(1 / 5)
    assert report["goodput"] == pytest.approx(1 / 6)
    assert report["errors"] == {"slo_unreachable": 1, "stream broke off": 1}


def test_one_token_meets_any_pace_and_lateness_counts():
    late = result(0, due=0.0, sent=0.15, first=0.25, tokens=1)
    assert not late.met(Slo(ttft=0.2), stream=True)
    assert late.met(Slo(ttft=0.3, tpot=1e-9), stream=True)
    assert late.met(Slo(ttft=0.2, e2e=0.3), stream=False)


def test_work_weighs_long_requests():
    results = [result(0, prompt=1000), result(1, prompt=10, wanted=1, first=0.5)]
    report = summary(results, CLASSES)
    assert report["attainment"] == 0.5
    assert report["attainment_by_work"] == pytest.approx(1050 / (1050 + 15))


def test_groups_shares_and_predictions():
    rng = np.random.default_rng(0)
    results = [
        result(
            i,
            first=0.1 if i % 2 else 0.3,
            class_name="x" if i % 2 else "y",
            replica="ab"[i % 2],
            p_slo=0.9 if i % 2 else 0.2,
            predicted_ttft=0.1,
            prompt=int(rng.integers(10, 1000)),
        )
        for i in range(40)
    ]
    report = summary(results, dict.fromkeys("xy", CLASSES["standard"]))
    assert report["by_class"]["x"] == {"n": 20, "attainment": 1.0}
    assert report["by_class"]["y"] == {"n": 20, "attainment": 0.0}
    assert report["shares"] == {"a": 0.5, "b": 0.5}
    assert sum(g["n"] for g in report["by_prompt_quartile"].values()) == 40
    found = report["predictions"]
    assert found["brier"] == pytest.approx(0.5 * (0.1**2 + 0.2**2))
    assert found["brier_base_rate"] == pytest.approx(0.25)


def test_nothing_sent_is_an_error():
    with pytest.raises(ValueError, match="no requests"):
        summary([], {})
