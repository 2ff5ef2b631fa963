"""The measurement of thinking and answer apart."""

import numpy as np

from training.parts_eval import Outputs, evaluate


def test_the_boundary_is_worth_something_and_both_parts_are_covered():
    """Answers of a known law: knowing that the thinking is over beats the whole's hazard."""
    rng = np.random.default_rng(3)
    n = 2500
    thought = np.ceil(300.0 * np.exp(rng.standard_normal(n)))
    whole = thought + np.ceil(0.2 * thought * np.exp(0.4 * rng.standard_normal(n)))
    thought[::20] = whole[::20]  # some never come to an answer
    scores = evaluate(Outputs(rng.integers(0, 3, n), whole, thought), every=50)
    given = scores["left at the boundary: answer given thinking"]
    assert given["pinball"] < 0.9 * scores["left at the boundary: answer's own"]["pinball"]
    assert given["pinball"] < 0.6 * scores["left at the boundary: single hazard"]["pinball"]
    assert given["answers"] < n - 500
    for part in ("thinking", "answer"):
        assert 0.87 <= scores[part]["p90"] <= 0.93
