"""What the set scorer sees of the decisions that a `FleetVectorEnv` asks for.

One compiled call writes the same numbers, by the same function, as the kernel reads in serving
(`policies.scorers.network.observe_into`): inputs of every candidate, the marginal rule's value and
what others lose, and whether the rule would let the request wait.
"""
# Inside compiled code numba, not mypy, knows the types of array elements.
# mypy: disable-error-code="arg-type, no-any-return, assignment, call-overload"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from domain.columns import Floats, Params, Routes, Scores, scores
from domain.ports import Scorer
from policies.scorers.marginal import marginal_kernel
from policies.scorers.network import RULE, K, observe_into
from predictors import roofline
from training.borrowed import at, borrowed, inlined
from training.env_loop import NONE, Fleets, Scratch, look
from training.fleet_env import FleetVectorEnv

roofline_into = inlined(roofline.roofline_into)


class View(NamedTuple):
    """F decisions with M candidates each; what is not in the environment's mask is zero."""

    inputs: NDArray[np.float32]  # (F, M, K)
    value: NDArray[np.float32]  # (F, M) requests
    harm: NDArray[np.float32]  # (F, M) requests
    worth: NDArray[np.float32]  # (F,)
    may_wait: NDArray[np.bool_]  # (F,) while the rule may hold it back


class _Rows(NamedTuple):
    """One decision's columns."""

    inputs: Floats  # (M, K)
    harm: Floats
    routes: Routes
    draws: Floats
    scores: Scores


class Watcher:
    """Views of an environment's decisions under the marginal rule of a `network` scorer; the arrays
    are written again by every call.
    """

    def __init__(self, env: FleetVectorEnv, scorer: Scorer) -> None:
        self._env = env
        self._rule, self._until = scorer.params[:RULE], float(scorer.params[RULE])
        f, m = env.num_envs, env.hold
        self.view = View(
            inputs=np.zeros((f, m, K), np.float32),
            value=np.zeros((f, m), np.float32),
            harm=np.zeros((f, m), np.float32),
            worth=np.ones(f, np.float32),
            may_wait=np.zeros(f, np.bool_),
        )
        self._rows = _Rows(
            inputs=np.zeros((m, K)),
            harm=np.zeros(m),
            routes=Routes(
                decode=np.arange(m),
                prefill=np.arange(m),
                variant=np.zeros(m, np.int64),
                price=np.zeros(m),
            ),
            draws=np.zeros((1, m)),
            scores=scores(1, m),
        )

    def look(self) -> View:
        """The present decisions."""
        fleets, scratch = self._env.columns
        _view_all(fleets, scratch, self._rule, self._until, self._rows, self.view)
        return self.view


@njit(cache=True, error_model="numpy")
def _view_all(
    fleets: Fleets, scratch: Scratch, rule: Params, until: float, rows: Any, out: View
) -> None:
    """Every fleet's decision into `out`; writes scratch and rows."""
    fleets, sc = borrowed(fleets), borrowed(scratch)
    es, rq = sc.estimates, sc.requests
    for f in range(out.worth.shape[0]):
        out.inputs[f] = 0.0
        out.value[f] = 0.0
        out.harm[f] = 0.0
        out.may_wait[f] = False
        x = at(fleets, f)
        i, now = x.state[0].asking, x.state[0].now
        if i == NONE:
            continue
        g = x.requests[i].gateway
        fl = at(x.columns, g)
        look(x, sc, fl, g, i)
        roofline_into(rq, fl, sc.routes, sc.room, sc.scales, now, es)
        for c in range(sc.room.shape[1]):
            rows.routes.price[c] = fl.price[c]
            if sc.room[0, c]:
                es.p_slo[0, c] = es.p_raw[0, c]
                es.quality[0, c] = x.quality[c]
        marginal_kernel(rule, rq, fl, rows.routes, es, sc.room, rows.draws, now, rows.scores)
        value = rows.scores.route[0]
        worth, free = observe_into(
            rows.inputs, value, rows.harm, rule, rq, fl, rows.routes, es, sc.room, 0, now
        )
        out.worth[f] = worth
        end = rq.arrived[0] + until * rq.ttft[0]
        out.may_wait[f] = not free and now < end < np.inf
        for c in range(sc.room.shape[1]):
            if sc.room[0, c]:
                out.value[f, c] = value[c]
                out.harm[f, c] = rows.harm[c]
                for k in range(K):
                    out.inputs[f, c, k] = rows.inputs[c, k]
