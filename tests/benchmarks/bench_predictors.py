"""CPU time of the learned predictors per request: `make bench`.

Prints microseconds of process time (steady on a shared machine) and holds them to the budgets:
features of a 1 KB prompt 60 µs (DESIGN section 5), a length forecast with features given 600 µs.
"""

import time
from collections.abc import Callable

import numpy as np
import pytest

from domain.length import LengthDistribution
from predictors.features import PromptFacts, encode
from predictors.learned import PACKAGED
from predictors.length_gbdt import LengthGbdt

SENTENCE = "Explain how the memory of a computer works and give 5 examples in Python. "
OWN = LengthDistribution.lognormal(200.0, 0.9)


def microseconds(call: Callable[[], object], times: int = 400) -> float:
    """Best of five rounds, process time per call."""
    call()
    rounds = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(times):
            call()
        rounds.append((time.process_time() - start) / times * 1e6)
    return min(rounds)


@pytest.mark.parametrize("size", [100, 1024, 8192])
def test_features(size):
    facts = PromptFacts(text=(SENTENCE * (size // len(SENTENCE) + 1))[:size])
    spent = microseconds(lambda: encode(facts))
    print(f"features of {size} bytes: {spent:.1f} µs")  # noqa: T201 - what a benchmark is for
    assert spent <= max(60.0, 60.0 * size / 1024)


@pytest.mark.parametrize("size", [100, 1024])
def test_length_forecast(size):
    model = LengthGbdt.load(PACKAGED / "length.npz")
    vector = encode(PromptFacts(text=(SENTENCE * (size // len(SENTENCE) + 1))[:size]))
    kept = tuple(vector.tolist())
    spent = microseconds(lambda: model.predict(np.array(kept, np.float64), "llama-8b", OWN))
    print(f"length forecast of {size} bytes: {spent:.1f} µs")  # noqa: T201 - what a benchmark is for
    assert spent <= 600.0
