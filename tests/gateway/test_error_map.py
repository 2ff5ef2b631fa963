"""Every error of the tree and every refusal of the core has exactly one HTTP answer."""

import openai
import orjson
import pytest

from domain import errors
from domain.events import Reason, Shed
from gateway.error_map import ROWS, refusal, reply


def leaves(cls):
    children = cls.__subclasses__()
    return {cls} if not children else set().union(*map(leaves, children))


def test_every_leaf_of_the_tree_has_a_row():
    assert leaves(errors.ServingError) <= set(ROWS)


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_becomes_an_error_with_a_message(reason):
    answer = reply(refusal(Shed("r", reason)))
    error = orjson.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if answer.status in {429, 503} and reason is not Reason.QUOTA:
        assert answer.retry_after >= 1


@pytest.mark.parametrize("reason", Reason)
def test_details_of_the_core_reach_the_client(reason):
    assert refusal(Shed("r", reason, detail="because")).message == "because"


@pytest.mark.parametrize(("wait", "seconds"), [(0.0, 1), (0.2, 1), (1.0, 1), (1.01, 2), (7.5, 8)])
def test_retry_after_is_whole_seconds_never_early(wait, seconds):
    answer = reply(errors.RateLimited("slow down", retry_after=wait))
    assert answer.retry_after == seconds
    assert (b"retry-after", str(seconds).encode()) in answer.headers


@pytest.mark.parametrize(
    ("error", "sdk"),
    [
        (errors.Unauthenticated("no key"), openai.AuthenticationError),
        (errors.UnknownModel("no model"), openai.NotFoundError),
        (errors.ContextTooLong("long"), openai.BadRequestError),
        (errors.RateLimited("slow"), openai.RateLimitError),
        (errors.NoReplica("none"), openai.InternalServerError),
    ],
)
def test_status_codes_raise_what_sdk_users_catch(error, sdk):
    assert sdk in type_of_status(reply(error).status)


def type_of_status(status):
    import httpx

    client = openai.OpenAI(api_key="k", base_url="http://127.0.0.1:1")
    response = httpx.Response(status, request=httpx.Request("POST", "http://127.0.0.1:1"))
    return type(client._make_status_error("m", body=None, response=response)).__mro__


def test_sse_form_is_one_event():
    event = reply(errors.StreamInterrupted("gone")).sse
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
