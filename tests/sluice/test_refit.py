"""The refit beside a gateway: a window in bounded memory, a child that fits, a swap in one step."""

import asyncio

import numpy as np
import pytest

pytest.importorskip("lightgbm")

from predictors.latency_layer import LatencyLayer
from sluice.refit import CLASSES, Refitter, Window, gauges
from tests.training.test_fit_latency import outcomes, record


class Swaps:
    """The shell's part: takes models."""

    def __init__(self, layer):
        self.layer = layer
        self.taken = []

    def swap_model(self, version, data):
        self.taken.append(version)
        self.layer.swap(version, data)


def refitter(tmp_path, frame=None):
    layer = LatencyLayer()
    window = Window()
    if frame is not None:
        for i in range(len(frame)):
            predicted = {"basis": frame.rows[i].tolist()}
            end = {
                "cause": "finished",
                "sent": 0.0,
                "ttft": float(frame.ttft[i]),
                "tpot": float(frame.tpot[i]),
                "completion_tokens": 50,
            }
            window.saw(record(kind=str(frame.kind[i]), predicted=predicted, outcome=end))
    shell = Swaps(layer)
    made = Refitter(shell, layer, window, every=1.0, least=200, folder=tmp_path)
    return made, shell, layer


def test_the_window_is_bounded_by_class_and_by_classes():
    window = Window(per_class=5)
    for i in range(CLASSES + 10):
        for _ in range(7):
            window.saw(record(kind=f"k{i}"))
    window.saw({"feedback_to": "x"})
    assert len(window.rows()) == 5 * CLASSES
    assert window.rows()[-1][4] == f"k{CLASSES + 9}"


@pytest.mark.integration
def test_a_child_fits_and_the_model_is_swapped(tmp_path):
    made, shell, layer = refitter(tmp_path, outcomes(900))
    assert asyncio.run(made.fit()) == "swapped"
    assert shell.taken == [layer.version]
    assert layer.version.startswith("latency_gbdt-")
    metrics = {g.name: dict(g.read()) for g in gauges(layer, made)}
    assert metrics["sluice_latency_refits"][("swapped",)] == 1.0
    assert metrics["sluice_latency_model_info"] == {(layer.version,): 1.0}


@pytest.mark.integration
def test_a_fit_that_is_no_better_or_fails_changes_nothing(tmp_path):
    frame = outcomes(900)
    frame.rows[:, -3] = frame.ttft  # the roofline knew
    made, shell, layer = refitter(tmp_path, frame)
    assert asyncio.run(made.fit()) == "not_better"
    few, _, _ = refitter(tmp_path, outcomes(20))
    assert asyncio.run(few.fit()) == "failed"
    gone, _, _ = refitter(tmp_path / "no" / "folder", outcomes(20))
    assert asyncio.run(gone.fit()) == "failed"
    assert (shell.taken, layer.model) == ([], None)
    assert np.array_equal(layer._active, np.zeros(0))
