"""Distillation: what is packed is what was trained."""

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from predictors.features import (  # noqa: E402 - after the optional dependency
    SCHEMA_HASH,
    SLOTS,
    WORD_IDS,
    PromptFacts,
    encode,
    slots,
    word_id,
)
from predictors.text import KIND, TextEncoder  # noqa: E402
from training.fit_text import OUT, WORD, Student, distil, instruction, pack  # noqa: E402

WORDS = [f"word{i}" for i in range(40)]


def toy():
    """Texts whose target is the mean of their words' random vectors, and a start table."""
    rng = np.random.default_rng(0)
    meaning = rng.normal(size=(len(WORDS), OUT))
    table = np.zeros((WORD_IDS, WORD))
    used = np.zeros(WORD_IDS, bool)
    for word in WORDS:
        table[word_id(word.encode())] = rng.normal(size=WORD) * 0.3
        used[word_id(word.encode())] = True
    drawn = [rng.integers(0, len(WORDS), 5) for _ in range(1500)]
    texts = [" ".join(WORDS[i] for i in row) for row in drawn]
    ids = np.array([slots(encode(PromptFacts(text=t))) for t in texts])
    target = np.array([meaning[row].sum(0) for row in drawn])
    return texts, ids, target / np.linalg.norm(target, axis=1, keepdims=True), table, used


def test_packed_network_says_what_the_student_says():
    """Numpy from 8-bit words gives the student's embedding, and the student learned the target."""
    texts, ids, target, table, used = toy()
    student, cosine = distil(ids, target, table, epochs=5, seed=0)
    assert cosine > 0.5
    artifact = pack(student, used, {})
    assert artifact.kind == KIND
    assert artifact.schema == SCHEMA_HASH
    encoder = TextEncoder.from_arrays(artifact.arrays, "")
    with torch.no_grad():
        wanted = student(torch.tensor(ids[:20])).numpy()
    got = np.array([encoder.embed(encode(PromptFacts(text=t))) for t in texts[:20]])
    assert (got * wanted).sum(1) == pytest.approx(np.ones(20), abs=2e-3)


def test_gap_of_long_prompts_counts_as_an_empty_word():
    """The empty slot between head and tail is inside the text, for student and packed net alike."""
    _, _, _, table, used = toy()
    torch.manual_seed(1)
    student = Student(table)
    text = " ".join(WORDS[i % len(WORDS)] for i in range(SLOTS + 30))
    vector = encode(PromptFacts(text=text))
    encoder = TextEncoder.from_arrays(pack(student, used, {}).arrays, "")
    with torch.no_grad():
        wanted = student(torch.tensor(slots(vector)[None])).numpy()[0]
    assert encoder.embed(vector) @ wanted == pytest.approx(1.0, abs=2e-3)


def test_templates_are_filled():
    rng = random.Random(0)
    made = [instruction(WORDS, ["It rains."], rng) for _ in range(300)]
    assert all("{" not in text for text in made)
    assert len(set(made)) > 200
