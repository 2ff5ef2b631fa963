"""Another latency model, and feedback, as events: a log fed to a fresh core gives the same."""

from domain.events import Arrived, AttemptEnded, FeedbackGiven, FirstToken, ModelSwapped
from domain.outcome import Cause, Usage, UsageSource
from domain.request import Slo, Tenant
from policies.factory import build_core
from predictors.latency_gbdt import LatencyGbdt
from predictors.learned import LearnedEstimator
from tests.fakes.latency_model import as_bytes, toy
from tests.fakes.shells import CLASSES, Shell, policy, request, small_fleet

DATA = as_bytes(toy(ttft=0.8, tpot=0.4))
VERSION = LatencyGbdt.loads(DATA).version


def make_core():
    return build_core(
        policy("predicted"),
        fleet=small_fleet(),
        estimator=LearnedEstimator(),
        tenants=(Tenant(name="t"),),
        classes=CLASSES,
    )


def history(core, extra):
    """Twenty requests, one after another, with `extra` events after the tenth: what was sent, and
    every event with its actions.
    """
    shell = Shell(core)
    sends = {}
    for i in range(20):
        for event in extra if i == 10 else ():
            shell.tell(event)
        shell.tell(Arrived(float(i), request(f"q{i}")))
        send = sends[f"q{i}"] = shell.sends[f"q{i}"]
        shell.tell(FirstToken(i + 0.05, f"q{i}", send.attempt))
        usage = Usage(prompt=100.0, completion=20.0, source=UsageSource.ENGINE)
        shell.tell(AttemptEnded(i + 0.4, f"q{i}", send.attempt, Cause.FINISHED, usage, i + 0.4))
    return sends, shell.log


def test_the_swap_changes_predictions_from_its_event_on_and_replays():
    core = make_core()
    sends, log = history(core, [ModelSwapped(9.5, VERSION, DATA)])
    assert core.estimator.latency.version == VERSION
    assert VERSION in core.estimator.version
    others, _ = history(make_core(), [])
    assert all(sends[f"q{i}"].prediction == others[f"q{i}"].prediction for i in range(10))
    assert sends["q10"].prediction.ttft != others["q10"].prediction.ttft
    fresh = make_core()
    assert all(fresh.handle(event) == actions for event, actions in log)


def test_a_bad_model_changes_nothing():
    """Cut, of another name, empty: the old one serves on and no exception reaches a request."""
    bad = [
        ModelSwapped(9.5, VERSION, DATA[:100]),
        ModelSwapped(9.5, "latency_gbdt-x", DATA),
        ModelSwapped(9.5, VERSION),
    ]
    core = make_core()
    sends, _ = history(core, bad)
    others, _ = history(make_core(), [])
    assert core.estimator.latency.refused == len(bad)
    assert all(sends[name].prediction == others[name].prediction for name in sends)


def test_feedback_moves_the_base_rate_and_what_floors_are_held_against():
    """int8 starts at 0.7, below a floor of 0.8; clients find its answers good, full's are bad."""
    core = make_core()
    good = [FeedbackGiven(9.5, f"f{i}", "int8", 1.0) for i in range(60)]
    bad = [FeedbackGiven(9.5, f"g{i}", "full", 0.0) for i in range(60)]
    unknown = [FeedbackGiven(9.5, "h", "gone", 1.0)]
    history(core, [*good, *bad, *unknown])
    shell = Shell(core)
    asked = request("floor", slo=Slo(quality=0.8))
    shell.tell(Arrived(30.0, asked))
    replica = shell.sends["floor"].replica
    assert core.fleet.replicas[replica].variant == "int8"
    assert shell.sends["floor"].prediction.quality > 0.8
