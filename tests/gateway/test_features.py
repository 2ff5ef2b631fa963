import json
import math

import pytest

from backends.wire.openai import CHAT, RequestParser
from gateway.features import feature_vector
from predictors.features import DENSE, SIZE


def named(**body) -> dict[str, float]:
    raw = json.dumps({"model": "m", **body}).encode()
    vector = feature_vector(RequestParser().parse(CHAT, raw))
    assert len(vector) == SIZE
    return dict(zip(DENSE, vector, strict=False))


def test_the_last_user_turn_is_what_is_asked():
    """Instructions, earlier turns, limit, format and tools each go to their own number."""
    seen = named(
        messages=[
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "x" * 400},
            {"role": "assistant", "content": "y" * 400},
            {"role": "user", "content": "List 20 rivers"},
        ],
        max_tokens=99,
        response_format={"type": "json_object"},
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    assert seen["log_items"] == pytest.approx(math.log1p(20))
    assert seen["log_system_chars"] == pytest.approx(math.log1p(7))
    assert seen["log_history_tokens"] > math.log1p(190)
    assert seen["turn"] == 1.0
    assert seen["log_max_tokens"] == pytest.approx(math.log1p(99))
    assert seen["json_schema"] == 1.0
    assert seen["log_tools"] > 0


def test_a_request_without_text_has_a_vector():
    """A lone system message, or an empty prompt, gives zeros and no error."""
    assert named(messages=[{"role": "system", "content": "s"}])["log_words"] == 0.0
    assert named(messages=[{"role": "user", "content": ""}])["log_words"] == 0.0
