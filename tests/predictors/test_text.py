import numpy as np
import pytest

from domain.errors import ShapeError
from predictors.artifact import Artifact
from predictors.features import DENSE_SIZE, SIZE, WORD_IDS, PromptFacts, encode, word_id
from predictors.text import TextEncoder

INDEX = np.full(WORD_IDS, -1)
INDEX[word_id(b"a")] = 0
INDEX[word_id(b"b")] = 1
ROWS = np.array([[100, -50, 3], [-20, 90, 127]], np.int8)
SCALE = np.array([0.01, 0.02, 0.005])


def network(rng):
    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    return {
        "convolve": draw(9, 8),
        "bias": draw(8),
        "attend": draw(8, 2),
        "project": draw(24, 5),
        "offset": draw(5),
    }


def by_hand(net, words):
    """The network as formulas over Python loops."""
    table = ROWS * SCALE
    x = [np.zeros(3)] + [table[w] if w is not None else np.zeros(3) for w in words] + [np.zeros(3)]
    hidden = []
    for i in range(1, len(x) - 1):
        window = np.concatenate([x[i - 1], x[i], x[i + 1]])
        hidden.append(np.maximum(window @ net["convolve"] + net["bias"], 0.0))
    pooled = []
    for head in range(2):
        weights = np.array([np.exp(h @ net["attend"][:, head]) for h in hidden])
        pooled.append(sum(w * h for w, h in zip(weights, hidden, strict=True)) / weights.sum())
    pooled.append(np.mean(hidden, axis=0))
    vector = np.concatenate(pooled) @ net["project"] + net["offset"]
    return vector / np.linalg.norm(vector)


def test_network_matches_the_formula():
    """Convolution, attention and mean pooling as written down, unit length."""
    net = network(np.random.default_rng(0))
    encoder = TextEncoder(INDEX, ROWS, SCALE, net)
    got = encoder.embed(encode(PromptFacts(text="A unknown b a")))
    assert got == pytest.approx(by_hand(net, [0, None, 1, 0]), abs=1e-5)


def test_mean_without_network():
    encoder = TextEncoder(INDEX, ROWS, SCALE)
    total = (ROWS[0] + ROWS[1].astype(float)) * SCALE
    got = encoder.embed(encode(PromptFacts(text="a b")))
    assert got == pytest.approx(total / np.linalg.norm(total), abs=1e-6)


def test_empty_and_unknown_texts_are_zero():
    encoder = TextEncoder(INDEX, ROWS, SCALE)
    assert encoder.embed(np.zeros(SIZE)).tolist() == [0, 0, 0]
    assert encoder.embed(encode(PromptFacts(text="zzz"))).tolist() == [0, 0, 0]


def test_hostile_word_ids_stay_inside_the_table():
    """A log line may hold any number where a word hash should be."""
    encoder = TextEncoder(INDEX, ROWS, SCALE)
    vector = np.zeros(SIZE)
    vector[DENSE_SIZE:] = 1e15
    assert np.all(np.isfinite(encoder.embed(vector)))
    vector[DENSE_SIZE:] = -5
    assert np.all(np.isfinite(encoder.embed(vector)))


def test_round_trip_through_arrays():
    net = network(np.random.default_rng(1))
    encoder = TextEncoder(INDEX, ROWS, SCALE, net)
    again = TextEncoder.from_arrays(encoder.arrays("t_"), "t_")
    vector = encode(PromptFacts(text="b a"))
    assert again.embed(vector) == pytest.approx(encoder.embed(vector), abs=0.02)


def test_shapes_are_checked():
    net = network(np.random.default_rng(1)) | {"bias": np.zeros(3, np.float32)}
    with pytest.raises(ShapeError):
        TextEncoder(INDEX, ROWS, SCALE, net)
    with pytest.raises(ShapeError):
        TextEncoder(INDEX, ROWS, np.zeros(2))


def test_the_packaged_encoder_knows_what_belongs_together():
    """Rephrasings lie closer than other subjects."""
    encoder = TextEncoder.packaged()
    texts = ("How do I cook rice?", "Give me a recipe for rice", "Write Python code to sort a list")
    cook, recipe, code = (encoder.embed(encode(PromptFacts(text=t))) for t in texts)
    assert cook @ recipe > max(cook @ code, recipe @ code) + 0.1


def test_models_name_the_encoder_they_were_fitted_with():
    """A fit on the encoder that ships carries its version only, and no other serves it."""
    encoder = TextEncoder.packaged()
    assert encoder.arrays("text_") == {}
    fitted = Artifact(kind="any", arrays={}, card={"text": encoder.version})
    assert TextEncoder.of(fitted).size == encoder.size
    with pytest.raises(ShapeError, match="fit it again"):
        TextEncoder.of(Artifact(kind="any", arrays={}, card={"text": "text_encoder-0"}))
