"""What is counted is what Prometheus reads back."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from domain.outcome import Cause, Miss, Outcome, Prediction, Usage, UsageSource
from domain.request import InferenceRequest
from gateway.metrics import MAX_TENANTS, Gauge, Metrics

REQUEST = InferenceRequest(id="r", tenant="acme", model="m", prompt_tokens=3)


def outcome(**changes):
    fields = {
        "request": REQUEST,
        "cause": Cause.FINISHED,
        "arrived": 10.0,
        "sent": 10.1,
        "first_token": 10.3,
        "last_token": 10.9,
        "ended": 11.0,
        "usage": Usage(prompt=5, completion=4, source=UsageSource.ENGINE),
        "prediction": Prediction(ttft=(0.05, 0.1, 0.4)),
        "met": True,
    }
    return Outcome(**(fields | changes))


def scraped(metrics):
    """Samples by name and labels."""
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for s in family.samples
    }


def test_a_met_request():
    metrics = Metrics(models=["m"])
    metrics.settled(outcome(), "gpu0")
    seen = scraped(metrics)
    labels = (("cause", "finished"), ("class", "standard"), ("tenant", "acme"))
    assert seen["sluice_requests_total", labels] == 1
    assert seen["sluice_slo_met_total", (("class", "standard"),)] == 1
    model = ("gen_ai_request_model", "m")
    name = "gen_ai_server_time_to_first_token_seconds"
    assert seen[f"{name}_sum", (model,)] == pytest.approx(0.3)
    assert seen[f"{name}_bucket", (model, ("le", "0.25"))] == 0
    assert seen[f"{name}_bucket", (model, ("le", "0.5"))] == 1
    assert seen[f"{name}_bucket", (model, ("le", "+Inf"))] == 1
    name = "gen_ai_server_time_per_output_token_seconds"
    assert seen[f"{name}_sum", (model,)] == pytest.approx(0.2)
    ratio = "sluice_ttft_actual_over_predicted_sum"
    assert seen[ratio, (("replica", "gpu0"),)] == pytest.approx(2.0)
    tokens = "gen_ai_client_token_usage_sum"
    assert seen[tokens, (model, ("gen_ai_token_type", "output"))] == 4


def test_misses_carry_their_reason_and_refusals_theirs():
    metrics = Metrics(models=["m"])
    metrics.settled(
        outcome(
            cause=Cause.SHED,
            met=False,
            miss=Miss.ADMISSION,
            reason="unreachable",
            first_token=None,
            usage=Usage(),
        ),
        None,
    )
    seen = scraped(metrics)
    cls = ("class", "standard")
    assert seen["sluice_slo_missed_total", (cls, ("reason", "admission"))] == 1
    assert seen["sluice_shed_total", (cls, ("reason", "unreachable"))] == 1
    assert not any(name.startswith("gen_ai_client_token") for name, _ in seen)


def test_unknown_counts_are_not_reported_as_zero_tokens():
    metrics = Metrics(models=["m"])
    metrics.settled(outcome(usage=Usage(completion=7)), None)
    assert not any("token_usage" in name for name, _ in scraped(metrics))


def test_labels_are_bounded():
    """Made-up model names and endless tenants end in `other`."""
    metrics = Metrics(models=["m"])
    for i in range(3 * MAX_TENANTS):
        request = InferenceRequest(id="r", tenant=f"t{i}", model=f"x{i}", prompt_tokens=1)
        metrics.settled(outcome(request=request), None)
    seen = scraped(metrics)
    tenants = {
        dict(labels).get("tenant") for name, labels in seen if name == "sluice_requests_total"
    }
    models = {dict(labels)["gen_ai_request_model"] for name, labels in seen if "duration" in name}
    assert len(tenants) == MAX_TENANTS + 1
    assert models == {"other"}


def test_gauges_are_read_at_scrape_time():
    metrics = Metrics(models=[])
    value = [1.0]
    metrics.gauges.append(Gauge("sluice_waiting", "Queue.", ("q",), lambda: [(("a",), value[0])]))
    assert scraped(metrics)["sluice_waiting", (("q", "a"),)] == 1
    value[0] = 5.0
    assert scraped(metrics)["sluice_waiting", (("q", "a"),)] == 5


def test_workers_are_told_as_one_and_the_dead_keep_their_counts():
    one, two, dead = (Metrics(models=["m"]) for _ in range(3))
    for metrics, times in ((one, 1), (two, 2), (dead, 4)):
        for _ in range(times):
            metrics.settled(outcome(), "gpu0")
        gauges = (("open", sum), ("age", max))
        for name, together in gauges:
            read = lambda times=times: [((), times)]  # noqa: E731
            metrics.gauges.append(Gauge(f"sluice_{name}", "Help.", (), read, together))
    kept = dead.snapshot(counters_only=True)
    text = one.text([two.snapshot(), kept]).decode()
    seen = {
        (s.name, s.labels.get("le")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    assert seen["sluice_slo_met_total", None] == 7
    name = "gen_ai_server_time_to_first_token_seconds"
    assert seen[f"{name}_count", None] == 7
    assert seen[f"{name}_sum", None] == pytest.approx(7 * 0.3)
    assert seen[f"{name}_bucket", "0.25"] == 0
    assert seen[f"{name}_bucket", "0.5"] == 7
    assert seen["sluice_open", None] == 3  # nothing of the dead is open any more
    assert seen["sluice_age", None] == 2
