"""Arithmetic around perplexity; the measurement itself is tested against a real server."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.perplexity import (
    FULL_QUALITY,
    GIVEN,
    STRETCH,
    STRETCHES,
    Perplexity,
    only,
    quality_prior,
    stretches,
    text_checksum,
)


@given(st.lists(st.integers(0, 50_000), max_size=1000))
def test_stretches_keep_order_and_lose_only_what_is_past_the_end_or_could_not_be_scored(tokens):
    pieces = stretches(tokens)
    joined = [token for given_, scored in pieces for token in (*given_, *scored)]
    assert joined == tokens[: len(joined)]
    assert min(len(tokens), STRETCHES * STRETCH) - len(joined) <= GIVEN
    assert all(
        len(given_) == GIVEN and 1 <= len(scored) <= STRETCH - GIVEN for given_, scored in pieces
    )


def test_a_grammar_names_each_token_in_order():
    assert only([5, 0, 49151]) == "root ::= <[5]> <[0]> <[49151]>"


def test_perplexity_of_a_uniform_model_is_its_vocabulary():
    assert Perplexity(nats_per_token=math.log(49152), tokens=10).value == pytest.approx(49152)


@given(st.floats(0.1, 8.0), st.floats(0.1, 8.0))
def test_prior_falls_with_perplexity_and_never_exceeds_the_full_variant(full_nats, nats):
    full, variant = (Perplexity(nats_per_token=n, tokens=100) for n in (full_nats, nats))
    prior = quality_prior(variant, full)
    expected = FULL_QUALITY * min(1.0, full.value / variant.value)
    assert prior == pytest.approx(expected)
    assert 0.0 < prior <= FULL_QUALITY


def test_checksum_follows_the_text():
    assert text_checksum("a") != text_checksum("b")
