"""Whether an outcome met its limits, and which part is to blame where it did not."""

from __future__ import annotations

from dataclasses import replace

from domain.events import Reason
from domain.outcome import Cause, Miss, Outcome, limits_met


def judged(outcome: Outcome) -> Outcome:
    """The outcome, drafted as met, with `met` and the part to blame put right (DESIGN section 11).

    A client's cancel leaves the denominator if no limit had been missed by then; a request the
    engine refused as invalid does so too. Blame: the queue if the wait alone explains the miss, the
    prediction if the request was sent although it was expected to be met, admission if it was sent
    without hope, the engine if it failed.
    """
    match outcome.cause:
        case Cause.FINISHED:
            return (
                outcome
                if limits_met(outcome)
                else replace(outcome, met=False, miss=_blame(outcome))
            )
        case Cause.REJECTED:
            return replace(outcome, met=None)
        case Cause.CLIENT_GONE:
            if _missed_by_now(outcome):
                return replace(outcome, met=False, miss=_blame(outcome))
            return replace(outcome, met=None, miss=Miss.CLIENT)
        case Cause.SHED:
            queued = outcome.reason == Reason.EXPIRED.value
            return replace(outcome, met=False, miss=Miss.QUEUE if queued else Miss.ADMISSION)
        case _:
            return replace(outcome, met=False, miss=Miss.ENGINE)


def _missed_by_now(outcome: Outcome) -> bool:
    slo = outcome.request.slo
    if slo.e2e is not None and outcome.e2e > slo.e2e:
        return True
    if not outcome.request.stream:
        return False
    if slo.ttft is not None:
        late = outcome.ttft if outcome.ttft is not None else outcome.e2e
        if late > slo.ttft:
            return True
    return slo.tpot is not None and outcome.tpot is not None and outcome.tpot > slo.tpot


def _blame(outcome: Outcome) -> Miss:
    slo = outcome.request.slo
    waited = (outcome.sent if outcome.sent is not None else outcome.ended) - outcome.arrived
    over = 0.0
    if slo.e2e is not None:
        over = max(over, outcome.e2e - slo.e2e)
    if slo.ttft is not None and outcome.request.stream:
        late = outcome.ttft if outcome.ttft is not None else outcome.e2e
        over = max(over, late - slo.ttft)
    if over > 0 and waited >= over:
        return Miss.QUEUE
    if outcome.prediction is not None and outcome.prediction.p_slo >= 0.5:
        return Miss.PREDICTION
    return Miss.ADMISSION
