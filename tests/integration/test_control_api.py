"""The control API of a real gateway under schemathesis: no 5xx, answers as the schema says."""

import contextlib
import subprocess
import sys

import httpx
import pytest
import schemathesis
from hypothesis import given, settings

from gateway.tenants import hash_of
from tests.fakes.paced_engine import PacedEngine
from tests.fakes.whole_gateway import LoopThread, serving

pytestmark = [pytest.mark.integration, pytest.mark.slow]

EXAMPLES = 40
PATHS = {
    "/",
    "/health",
    "/ready",
    "/metrics",
    "/v1/models",
    "/v1/models/{name}",
    "/v1/feedback",
    "/admin/status",
    "/admin/usage",
    "/admin/usage/{tenant}",
    "/admin/requests/{request_id}",
    "/admin/replicas/{name}/{verb}",
    "/admin/plan",
}


@contextlib.asynccontextmanager
async def gateway_alone():
    tenants = {"t": {"keys": {"k": {"hash": hash_of("k-one")}}}}
    async with (
        PacedEngine().running() as engine,
        serving(engine.url, tenants=tenants, elastic={}) as gateway,
    ):
        yield gateway


@pytest.fixture(scope="module")
def url():
    with LoopThread() as loop, loop.holding(gateway_alone) as gateway:
        yield gateway.url


@pytest.mark.parametrize("key", ["k-one", "nobody"])
def test_every_answer_is_one_that_the_schema_names(url, key):
    """Whatever the path, the method, the headers: no crash, and status, type and body as told."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= PATHS

    for operation in operations:

        @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True)
        @given(case=operation.as_strategy())
        def holds(case):
            response = case.call(headers={"authorization": f"Bearer {key}"})
            assert response.status_code < 500
            case.validate_response(response)

        holds()


def test_methods_headers_and_values_that_nobody_declared(url, tmp_path):
    """What schemathesis tries at the edges of the schema, by its own command."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"]
    command += ["--phases", "coverage,fuzzing", "-n", "30", "--seed", "1", "--no-color"]
    command += ["-H", "authorization: Bearer k-one"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout
    assert "Tested: 13" in done.stdout


def test_answers_about_things_that_are_there(url):
    """A model, a replica and a request that exist: the answers that chance never finds."""
    headers = {"authorization": "Bearer k-one"}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with httpx.Client(base_url=url, headers=headers, trust_env=False) as http:
        answer = http.post("/v1/chat/completions", json=body)
    feedback = {"id": answer.headers["x-request-id"], "score": 1.0}
    names = {
        "/v1/models/{name}": {"name": "m"},
        "/admin/usage/{tenant}": {"tenant": "t"},
        "/admin/requests/{request_id}": {"request_id": answer.headers["x-request-id"]},
        "/admin/replicas/{name}/{verb}": {"name": "r0", "verb": "restore"},
    }
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        judged = operation.path == "/v1/feedback"
        told = {"body": feedback, "media_type": "application/json"} if judged else {}
        case = operation.Case(path_parameters=names.get(operation.path), **told)
        response = case.call_and_validate(headers=headers)
        assert response.status_code == 200, operation.label
