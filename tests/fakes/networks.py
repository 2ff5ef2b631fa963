"""Layers of a set network, drawn or by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.names import NETWORK_INPUTS, NETWORK_SCHEMA


def layers_of(width: int = 1, seed: int | None = None, **named: Any) -> dict[str, Any]:
    """Layers of a network: those named, the others drawn, or zero without a seed."""
    rng = np.random.default_rng(seed)
    h, k = width, len(NETWORK_INPUTS)
    shapes: dict[str, Any] = {
        "w1": (h, k), "b1": h, "w2": (h, 2 * h), "b2": h, "route": h, "hold": h, "shed": h,
        "bias": 2,
    }  # fmt: skip
    drawn = {
        name: (np.zeros(shape) if seed is None else rng.normal(0.0, 0.7, shape)).tolist()
        for name, shape in shapes.items()
    }
    return {"inputs": NETWORK_SCHEMA} | drawn | named
