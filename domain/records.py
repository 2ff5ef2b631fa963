"""One line of the decision log: features, candidates, propensity, prediction and outcome; no
text.
"""

from __future__ import annotations

from typing import Any

from domain.events import Candidate
from domain.outcome import Outcome

SCHEMA_VERSION = 1


def feedback_record(
    request_id: str, tenant: str, variant: str, score: float, at: float
) -> dict[str, Any]:
    """The JSON object of one feedback in the decision log: `at` in Unix seconds, `score` in
    [0, 1]. It names its request under `feedback_to`, so that the request's own line stays the one
    with its id.
    """
    return {
        "schema": SCHEMA_VERSION,
        "feedback_to": request_id,
        "at": at,
        "tenant": tenant,
        "variant": variant,
        "score": score,
    }


def decision_record(
    outcome: Outcome,
    candidates: tuple[Candidate, ...],
    *,
    replicas: tuple[str, ...],
    variants: tuple[str, ...],
    routes: tuple[str, ...],
    wall_offset: float,
    feature_schema: str = "",
    shadow: Candidate | None = None,
    kinds: tuple[str, ...] = (),
    latency_schema: str = "",
) -> dict[str, Any]:
    """The JSON object of one decision-log line.

    `wall_offset` turns the shell's monotonic clock into Unix time (s). Names resolve indices. Keys
    are stable within `SCHEMA_VERSION`; times in seconds.
    """
    request = outcome.request
    usage = outcome.usage
    prediction = outcome.prediction
    return {
        "schema": SCHEMA_VERSION,
        "id": request.id,
        "at": outcome.arrived + wall_offset,
        "tenant": request.tenant,
        "model": request.model,
        "class": request.class_name,
        "session": request.session,
        "stream": request.stream,
        "choices": request.choices,
        "prompt_tokens": request.prompt_tokens,
        "prompt_chars": request.prompt_chars,
        "max_tokens": request.max_tokens,
        "slo": {
            "ttft": request.slo.ttft,
            "tpot": request.slo.tpot,
            "e2e": request.slo.e2e,
            "quality": request.slo.quality,
        },
        "feature_schema": feature_schema,
        "features": list(request.features),
        "policy": outcome.policy,
        "version": outcome.version,
        "propensity": outcome.propensity,
        "attempts": outcome.attempts,
        "route": None if outcome.route is None else routes[outcome.route],
        "replica": None if outcome.replica is None else replicas[outcome.replica],
        "variant": None if outcome.variant is None else variants[outcome.variant],
        "kind": kinds[outcome.replica] if kinds and outcome.replica is not None else "",
        "latency_schema": latency_schema,
        "candidates": [
            {
                "route": routes[c.route],
                "score": c.score,
                "p_slo": c.p_slo,
                "ttft": c.ttft,
                "tpot": c.tpot,
                "quality": c.quality,
            }
            for c in candidates
        ],
        "shadow": None
        if shadow is None
        else {"route": routes[shadow.route], "p_slo": shadow.p_slo, "score": shadow.score},
        "predicted": None
        if prediction is None
        else {
            "ttft": list(prediction.ttft),
            "tpot": list(prediction.tpot),
            "p_slo": prediction.p_slo,
            "quality": prediction.quality,
            "length_mean": prediction.length_mean,
            "length_p50": prediction.length_p50,
            "length_p90": prediction.length_p90,
            "cached": prediction.cached,
            "wait": prediction.wait,
            "running": prediction.running,
            "context": prediction.context,
            "backlog": prediction.backlog,
            "staleness": prediction.staleness,
            "basis": list(prediction.basis),
            "thinking_p50": prediction.thinking_p50,
        },
        "outcome": {
            "cause": outcome.cause.value,
            "reason": outcome.reason,
            "sent": None if outcome.sent is None else outcome.sent - outcome.arrived,
            "ttft": outcome.ttft,
            "tpot": outcome.tpot,
            "e2e": outcome.e2e,
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "cached_tokens": usage.cached,
            "thinking_tokens": usage.thinking,
            "usage_source": usage.source.value,
            "met": outcome.met,
            "miss": outcome.miss.value,
        },
    }
