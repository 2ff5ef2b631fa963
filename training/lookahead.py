"""Clairvoyant look-ahead: a policy that has seen the whole run before.

True answer lengths, a strong rule, and rehearsal: the case is played, requests that missed their
limits are turned away at the door the next time, some of them are let in again, and the best play
counts, the blind one among them: a rule that holds back is sometimes better off less sure. Each
play can be carried out by somebody who knows the future, so the result is a *lower* bound on the
best possible; how far below is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from policies.config import PolicyConfig
from training.measures import MET, MISSED, Bools, Report, Run, fair, measure
from training.scenario import Case
from training.traces import rows

ROUNDS = 5
LABEL = "look-ahead"

Play = Callable[[Case, PolicyConfig], Run]


def look_ahead(case: Case, policies: Sequence[PolicyConfig], play: Play) -> Report:
    """The best report, by size-fair attainment, of `ROUNDS` rehearsals under each of `policies`."""
    known = replace(case, scenario=case.scenario.model_copy(update={"length_sigma": 0.0}))
    best: Report | None = None
    for policy in policies:
        for run in [play(case, policy), *_rehearsals(known, policy, play)]:
            report = measure(case, run, LABEL)
            if best is None or fair(report) > fair(best):
                best = report
    assert best is not None
    return best


def _rehearsals(case: Case, policy: PolicyConfig, play: Play) -> list[Run]:
    """Runs of the case: everybody let in, then only who met, then some of the rest again."""
    run = play(case, policy)
    runs = [run]
    if not case.trace.roots.all():
        return runs  # who is turned away would end a session
    rng = np.random.default_rng([case.seed, 6])
    met = run.verdict == MET
    for k in range(1, ROUNDS):
        inside = met if k % 2 else met | (rng.random(len(met)) < 0.3)
        if not inside.any():
            break
        run = _among(case, inside, policy, play)
        met = run.verdict == MET
        runs.append(run)
    return runs


def _among(case: Case, inside: Bools, policy: PolicyConfig, play: Play) -> Run:
    """The run of the case when only these requests are let in."""
    part = replace(
        case,
        trace=rows(case.trace, inside),
        ttft=case.ttft[inside],
        tpot=case.tpot[inside],
        e2e=case.e2e[inside],
    )
    run = play(part, policy)
    n = len(case.trace)

    def spread(values: np.ndarray, fill: float) -> np.ndarray:
        whole = np.full(n, fill, values.dtype)
        whole[inside] = values
        return whole

    return replace(
        run,
        arrival=case.trace.arrival.copy(),
        sent=spread(run.sent, np.nan),
        first=spread(run.first, np.nan),
        last=spread(run.last, np.nan),
        replica=spread(run.replica, 0),
        cached=spread(run.cached, 0),
        verdict=spread(run.verdict, MISSED),
    )
