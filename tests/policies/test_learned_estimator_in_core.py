"""The decision core over the learned estimator that ships: length from the prompt."""

from domain.events import Arrived, AttemptEnded, FirstToken
from domain.outcome import Cause, Usage, UsageSource
from domain.request import Tenant
from policies.factory import build_core
from predictors.features import PromptFacts, encode
from predictors.learned import PACKAGED, LearnedEstimator, load_parts
from tests.fakes.shells import CLASSES, Shell, policy, request, small_fleet

TEXTS = ("What is the capital of France?", "Write a complete Python web server with a database")


def learned():
    return LearnedEstimator(*load_parts(PACKAGED / "length.npz", PACKAGED / "quality.npz"))


def test_requests_are_served_and_nothing_is_left():
    """Features, learned quality and outcomes pass through; a long task is booked longer."""
    core = build_core(
        policy("best_fit"),
        fleet=small_fleet(),
        estimator=learned(),
        tenants=(Tenant(name="t"),),
        classes=CLASSES,
    )
    shell = Shell(core)
    promised = {}
    for i in range(40):
        vector = tuple(encode(PromptFacts(text=TEXTS[i % 2])).tolist())
        asked = request(f"q{i}", features=vector, max_tokens=None)
        shell.tell(Arrived(float(i), asked))
        send = shell.sends.get(asked.id)
        if send is None:
            continue
        promised[i] = send.prediction.length_mean
        shell.tell(FirstToken(i + 0.1, asked.id, send.attempt))
        usage = Usage(prompt=100.0, completion=150.0, source=UsageSource.ENGINE)
        shell.tell(AttemptEnded(i + 0.9, asked.id, send.attempt, Cause.FINISHED, usage, i + 0.8))
    assert len(promised) >= 30
    assert promised[1] > promised[0]
    shell.assert_empty()
