import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictors.features import (
    DENSE,
    DENSE_SIZE,
    HEAD,
    SIZE,
    SLOTS,
    PromptFacts,
    encode,
    model_features,
    word_id,
)


def dense(text: str, **more) -> dict[str, float]:
    vector = encode(PromptFacts(text=text, **more))
    return dict(zip(DENSE, vector[:DENSE_SIZE].tolist(), strict=True))


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("List 20 cities in Peru", "log_items", math.log1p(20)),
        ("Give me ten tips for sleep", "log_items", math.log1p(10)),
        ("Write 1,000 words about rain", "log_asked_tokens", math.log1p(1350)),
        ("Answer in one word: is it wet?", "asked_one_word", 1.0),
        ("Two paragraphs on tides", "log_asked_tokens", math.log1p(220)),
        ("Is water wet?", "ends_question", 1.0),
        ("Is water wet? Say it.", "ends_question", 0.0),
        ("Pick one\nA. red\nB. blue\n", "option_lines", 2.0),
        ("1+1", "numbers", math.log1p(2)),
    ],
)
def test_parsed_requests(text, name, value):
    """What the prompt asks for in numbers is read as a number."""
    assert dense(text)[name] == pytest.approx(value)


def test_sizes_and_shares():
    """Shares are of bytes, sizes are logarithms; CJK and code are seen."""
    assert dense("abc DEF")["upper"] == pytest.approx(3 / 7)
    assert dense("為什麼天空是藍的")["cjk"] > 0.3
    assert dense("f(x) = {x: [1]};")["code_marks"] > 0.3
    assert dense("one two three")["log_words"] == pytest.approx(math.log1p(3))


def test_request_part_is_read():
    """Limits, effort, format, tools, turn and system prompt each have their place."""
    seen = dense(
        "hi",
        system="x" * 10,
        turn=3,
        max_tokens=100,
        effort="high",
        response_format="json_schema",
        tools=2,
        history_tokens=50,
    )
    assert seen["log_max_tokens"] == pytest.approx(math.log1p(100))
    assert seen["has_max_tokens"] == 1.0
    assert seen["effort"] > dense("hi", effort="low")["effort"] > dense("hi")["effort"]
    assert seen["json_schema"] == 1.0
    assert seen["log_tools"] == pytest.approx(math.log1p(2))
    assert seen["turn"] == 3.0
    assert seen["log_system_chars"] == pytest.approx(math.log1p(10))


def test_groups_do_not_depend_on_case():
    """Words that tell a task count in any case."""
    assert dense("EXPLAIN tides")["opens_explain"] == dense("explain tides")["opens_explain"] == 1.0


def test_slots_hold_first_and_last_words():
    """A long prompt keeps its beginning and its end, with one empty slot between."""
    words = [f"w{i}" for i in range(300)]
    slots = encode(PromptFacts(text=" ".join(words)))[DENSE_SIZE:]
    assert slots[0] == word_id(b"w0")
    assert slots[HEAD] == 0
    assert slots[-1] == word_id(b"w299")
    assert slots[HEAD + 1] == word_id(f"w{300 - (SLOTS - HEAD - 1)}".encode())


def test_c_plus_plus_is_a_word():
    """Plus signs belong to c++ and to nothing else."""
    slots = encode(PromptFacts(text="in C++ 1+1"))[DENSE_SIZE:]
    assert slots[:4].tolist() == [word_id(w) for w in (b"in", b"c++", b"1", b"1")]


@given(
    st.text(max_size=400),
    st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)),
    st.integers(-5, 10**9),
)
def test_any_input_gives_a_finite_vector(text, limit, turn):
    """No text, limit or turn raises or leaves the finite numbers."""
    vector = encode(PromptFacts(text=text, max_tokens=limit, turn=turn, tools=turn))
    assert vector.shape == (SIZE,)
    assert np.all(np.isfinite(vector))


def test_lone_surrogates_and_megabytes():
    """Text that cannot be encoded, and more text than is read, are taken as they come."""
    assert np.all(np.isfinite(encode(PromptFacts(text="\ud800 x" * 10))))
    long = encode(PromptFacts(text="word " * 400_000))
    assert long[0] == pytest.approx(math.log1p(2_000_000))


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Meta-Llama-3.1-70B-Instruct", 70), ("Mixtral-8x7B-v0.1", 56), ("phi-2", math.nan)],
)
def test_model_names_tell_their_size(name, billions):
    assert model_features(name)[0] == pytest.approx(math.log(billions), nan_ok=True)
