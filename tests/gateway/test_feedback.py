"""Feedback: taken once, from the tenant whose answer it was, in bounded memory."""

import pytest

from domain.errors import FeedbackRepeated, MalformedBody, PayloadTooLarge, UnknownRequest
from gateway.feedback import LONGEST_BODY, AnsweredRequests, read_feedback


def test_a_feedback_is_an_id_and_a_score():
    told = read_feedback(b'{"id": "req-1", "score": 1}')
    assert (told.id, told.score) == ("req-1", 1.0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"id": "a"}',
        b'{"id": "", "score": 0.5}',
        b'{"id": "a", "score": 1.01}',
        b'{"id": "a", "score": -0.01}',
        b'{"id": "a", "score": NaN}',
        b'{"id": "a", "score": "1"}',
        b'{"id": "a", "score": true}',
        b'{"id": 1, "score": 1}',
        b'{"id": "a", "score": 1, "comment": "x"}',
        b'{"id": "' + b"a" * 200 + b'", "score": 1}',
        b'{"id": "\xff", "score": 1}',
        b"[" * 3000,
    ],
)
def test_anything_else_is_refused_with_what_it_should_be(body):
    with pytest.raises(MalformedBody, match="score"):
        read_feedback(body)


def test_a_long_body_is_not_parsed():
    with pytest.raises(PayloadTooLarge):
        read_feedback(b" " * (LONGEST_BODY + 1))


def test_only_the_tenant_of_an_answer_may_judge_it_and_only_once():
    answers = AnsweredRequests()
    answers.remember("req-1", "a", "fp8")
    with pytest.raises(UnknownRequest) as theirs:
        answers.judge("req-1", "b")
    with pytest.raises(UnknownRequest) as nobodys:
        answers.judge("req-2", "b")
    assert str(theirs.value).replace("req-1", "") == str(nobodys.value).replace("req-2", "")
    assert answers.judge("req-1", "a") == "fp8"
    with pytest.raises(FeedbackRepeated):
        answers.judge("req-1", "a")


def test_the_oldest_answers_are_forgotten():
    answers = AnsweredRequests(capacity=3)
    for i in range(5):
        answers.remember(f"req-{i}", "a", "v")
    assert len(answers) == 3
    with pytest.raises(UnknownRequest):
        answers.judge("req-1", "a")
    assert answers.judge("req-2", "a") == "v"
