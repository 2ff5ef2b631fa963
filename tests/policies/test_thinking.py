"""A reasoning model in the core: what is promised at arrival, and anew when the thinking ends."""

import pytest

from domain.events import AnswerBegan, Arrived, AttemptEnded, FirstToken, Progress
from domain.outcome import Cause, Usage, UsageSource
from domain.request import Slo
from tests.fakes.shells import Shell, make_core, request

THOUGHT, ANSWER = 400.0, 50.0


def served(shell, name, at, thinking):
    """One request from arrival to end; returns its `Send`."""
    shell.tell(Arrived(at, request(name, max_tokens=None, slo=Slo())))
    send = shell.sends[name]
    shell.tell(FirstToken(at + 0.1, name, send.attempt))
    usage = Usage(
        prompt=100.0,
        completion=THOUGHT + ANSWER,
        thinking=thinking,
        source=UsageSource.ENGINE,
    )
    shell.tell(AttemptEnded(at + 0.5, name, send.attempt, Cause.FINISHED, usage, at + 0.4))
    return send


@pytest.fixture
def shell():
    """A shell whose model has thought about 400 tokens and answered with 50, forty times."""
    shell = Shell(make_core("least_requests"))
    for i in range(40):
        served(shell, f"q{i}", float(i), THOUGHT)
    return shell


def test_the_time_to_the_answer_is_promised(shell):
    """TTFT to the first thought, and the thinking at the pace of the route on top."""
    promised = served(shell, "q", 50.0, THOUGHT).prediction
    assert promised.thinking_p50 == pytest.approx(THOUGHT, rel=0.2)
    middle = len(promised.ttft) // 2
    expected = promised.ttft[middle] + promised.thinking_p50 * promised.tpot[middle]
    assert promised.answer_p50 == pytest.approx(expected)


def test_a_model_that_does_not_think_promises_none():
    """Its first token is that of the answer."""
    shell = Shell(make_core("least_requests"))
    for i in range(5):
        promised = served(shell, f"q{i}", float(i), 0.0).prediction
    assert promised.thinking_p50 == 0.0
    assert promised.answer_p50 is None


def test_the_output_is_forecast_anew_when_the_thinking_ends(shell):
    """After far more thinking than usual the stream is expected to end an answer later, its room
    is reserved anew, and all is given back at the end.
    """
    core = shell.core
    shell.tell(Arrived(60.0, request("q", max_tokens=None, slo=Slo())))
    send = shell.sends["q"]
    r = send.replica
    before = float(core.columns.expected[r, 0])
    shell.tell(FirstToken(60.1, "q", send.attempt))
    shell.tell(Progress(61.0, (r,), (send.slot,), (2000,)))
    shell.tell(AnswerBegan(61.0, "q", send.attempt, 2000))
    after = float(core.columns.expected[r, 0])
    assert before < 1500
    assert 2000 + 0.5 * ANSWER < after < 2000 + 4 * ANSWER
    assert core.columns.kv_used[r] == pytest.approx(100.0 + after)
    usage = Usage(prompt=100.0, completion=2050.0, thinking=2000.0, source=UsageSource.ENGINE)
    shell.tell(AttemptEnded(62.0, "q", send.attempt, Cause.FINISHED, usage, 61.9))
    shell.assert_empty()


def test_word_of_another_attempt_or_request_changes_nothing(shell):
    """Late words are ignored, as those about first tokens are."""
    shell.tell(Arrived(60.0, request("q", max_tokens=None, slo=Slo())))
    send = shell.sends["q"]
    before = float(shell.core.columns.expected[send.replica, 0])
    shell.tell(AnswerBegan(61.0, "q", send.attempt + 1, 2000))
    shell.tell(AnswerBegan(61.0, "nobody", 1, 2000))
    assert float(shell.core.columns.expected[send.replica, 0]) == before


def test_max_tokens_bounds_what_is_expected(shell):
    """No more output is expected than the client asked for."""
    shell.tell(Arrived(60.0, request("q", max_tokens=430.0, slo=Slo())))
    send = shell.sends["q"]
    shell.tell(FirstToken(60.1, "q", send.attempt))
    shell.tell(AnswerBegan(61.0, "q", send.attempt, 420))
    assert float(shell.core.columns.expected[send.replica, 0]) == 430.0
