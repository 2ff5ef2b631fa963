"""When the steps that run began: a token that came last came then."""

from __future__ import annotations

import numpy as np
from numba import njit

from backends.sim.replica import Floats, Physics, span, steps_before


@njit(cache=True, error_model="numpy")
def began_into(ph: Physics, now: float, out: Floats) -> None:
    """Seconds on the clock at which the running step of every replica began, (m,); now where it
    stands.
    """
    for r in range(len(ph.replica)):
        out[r] = now
        if ph.replica[r].stretch > 0 and np.isfinite(ph.replica[r].end):
            out[r] = ph.replica[r].clock + span(ph, r, steps_before(ph, r, now, True))
