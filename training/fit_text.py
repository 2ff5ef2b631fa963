"""Distil a sentence encoder into the small text network: `python -m training.fit_text`.

    python -m training.fit_text --teacher MODEL_DIR --words words.txt --data ../shared/data

Teacher: all-MiniLM-L6-v2 (Apache-2.0), a folder with `model.safetensors` and `tokenizer.json`.
Student: `predictors.text` (word table, convolution over three words, attention pooling), which
needs no torch to run. It sees prompts and sentences of sets whose licence allows it, instructions
made from templates, and single words, and learns the teacher's first principal components. No
lengths or scores take part.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import struct
import sys
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from predictors.artifact import Artifact, save
from predictors.features import SCHEMA_HASH, SLOTS, WORD_IDS, PromptFacts, encode, slots, word_id
from predictors.text import KIND, TextEncoder
from training.dataset import data_folder, texts_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WORD = 64
HIDDEN = 192
HEADS = 6
OUT = 64
FREQUENT_WORDS = 20_000
TEXT_SETS = ("arena_hard_answers", "mmlu_pro_cot", "llmrouter_scores", "zeroeval")


class Teacher:
    """BERT of six layers, mean pooling, unit length; reads safetensors by itself."""

    def __init__(self, folder: Path) -> None:
        raw = (folder / "model.safetensors").read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        header: dict[str, Any] = json.loads(raw[8 : 8 + size])
        self._w: dict[str, Tensor] = {}
        for name, entry in header.items():
            if name == "__metadata__" or entry["dtype"] != "F32":
                continue
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            array = np.frombuffer(raw[start:end], np.float32).reshape(entry["shape"])
            self._w[name] = torch.from_numpy(array.copy())
        self._vocabulary: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())[
            "model"
        ]["vocab"]

    def tokens(self, text: str, most: int) -> list[int]:
        """WordPiece ids, lower case without accents, between [CLS] and [SEP]."""
        flat = unicodedata.normalize("NFD", text.lower())
        flat = "".join(c for c in flat if unicodedata.category(c) != "Mn")
        out = [101]
        for word in re.findall(r"\w+|[^\w\s]", flat):
            out += self._pieces(word)
            if len(out) >= most - 1:
                break
        return [*out[: most - 1], 102]

    def _pieces(self, word: str) -> list[int]:
        found, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = ("##" if start else "") + word[start:end]
                if piece in self._vocabulary:
                    break
            else:
                return [100]
            found.append(self._vocabulary[piece])
            start = end
        return found

    @torch.no_grad()
    def embed(self, texts: Sequence[str], most: int = 96, batch: int = 64) -> Floats:
        """Unit vectors (n, 384)."""
        ids = [self.tokens(text, most) for text in texts]
        order = np.argsort([len(i) for i in ids])
        out = np.zeros((len(texts), 384))
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            longest = max(len(ids[j]) for j in chosen)
            block = torch.zeros(len(chosen), longest, dtype=torch.long)
            mask = torch.zeros(len(chosen), longest)
            for row, j in enumerate(chosen):
                block[row, : len(ids[j])] = torch.tensor(ids[j])
                mask[row, : len(ids[j])] = 1.0
            out[chosen] = self._forward(block, mask).numpy()
        return out

    def _forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        w = self._w

        def linear(x: Tensor, name: str) -> Tensor:
            return F.linear(x, w[name + ".weight"], w[name + ".bias"])

        def norm(x: Tensor, name: str) -> Tensor:
            return F.layer_norm(x, (384,), w[name + ".weight"], w[name + ".bias"], 1e-12)

        x = w["embeddings.word_embeddings.weight"][ids]
        x = x + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        n, length, _ = x.shape
        hidden = (mask[:, None, None, :] == 0).float() * -1e9
        for layer in range(6):
            at = f"encoder.layer.{layer}."
            q, k, v = (
                linear(x, f"{at}attention.self.{name}").view(n, length, 12, 32).transpose(1, 2)
                for name in ("query", "key", "value")
            )
            mixed = ((q @ k.transpose(-1, -2)) / 32**0.5 + hidden).softmax(-1) @ v
            mixed = mixed.transpose(1, 2).reshape(n, length, 384)
            x = norm(
                linear(mixed, at + "attention.output.dense") + x, at + "attention.output.LayerNorm"
            )
            inner = F.gelu(linear(x, at + "intermediate.dense"))
            x = norm(linear(inner, at + "output.dense") + x, at + "output.LayerNorm")
        weight = mask[:, :, None]
        return F.normalize((x * weight).sum(1) / weight.sum(1), dim=-1)


class Student(nn.Module):
    """The network of `predictors.text.TextEncoder`, in torch."""

    def __init__(self, table: Floats) -> None:
        super().__init__()
        self.table = nn.Embedding(WORD_IDS, WORD, padding_idx=0)
        self.table.weight.data = torch.tensor(table, dtype=torch.float32)
        self.convolve = nn.Linear(3 * WORD, HIDDEN)
        self.attend = nn.Linear(HIDDEN, HEADS, bias=False)
        self.project = nn.Linear((HEADS + 1) * HIDDEN, OUT)

    def forward(self, ids: Tensor) -> Tensor:
        """Unit vectors (n, OUT) of word slots (n, SLOTS)."""
        position = torch.arange(ids.shape[1])
        last = (position * (ids > 0)).max(1).values
        ids = ids[:, : int(last.max()) + 1]
        inside = position[: ids.shape[1]] <= last[:, None]
        words = self.table(ids)
        nothing = torch.zeros_like(words[:, :1])
        before = torch.cat([nothing, words[:, :-1]], 1)
        after = torch.cat([words[:, 1:], nothing], 1)
        h = torch.relu(self.convolve(torch.cat([before, words, after], -1)))
        score = self.attend(h).clamp(-30, 30).masked_fill(~inside[:, :, None], -1e9)
        pooled = torch.einsum("nlh,nla->nah", h, score.softmax(1)).flatten(1)
        mean = (h * inside[:, :, None]).sum(1) / inside.sum(1, keepdim=True)
        return F.normalize(self.project(torch.cat([pooled, mean], 1)), dim=-1)


def corpus(folder: Path, words: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """Prompts, sentences of prompts, and `count` instructions from templates."""
    prompts = [
        text for name in TEXT_SETS for text in texts_of(folder / name / "prompts.parquet").values()
    ]
    questions = [re.split(r"\n[A-D][.)]", text)[0][:800] for text in prompts]
    sentences = [
        s.strip()
        for text in questions
        for s in re.split(r"(?<=[.?!])\s+|\n+", text)
        if 15 < len(s.strip()) < 250
    ]
    rng.shuffle(sentences)
    made = [instruction(words, sentences, rng) for _ in range(count)]
    return list(dict.fromkeys(questions + sentences[:count] + made))


KINDS = "poem,story,essay,email,cover letter,song,speech,tweet,headline,review,script,joke,report"
THINGS = "ideas,names,tips,examples,reasons,ways,facts,questions,books,steps,foods,synonyms,places"
VERBS = "make,build,fix,clean,learn,cook,find,install,write,sell,draw,measure,sort,parse,repair"
TEMPLATES = (
    "Write a {kind} about {topic}",
    "Can you write a {kind} for {topic}?",
    "Write me a {kind} on {topic} in {number} words",
    "Explain {topic}",
    "Explain how {topic} works to a child",
    "Explain the difference between {topic} and {topic}",
    "What is {topic}?",
    "What does {topic} mean?",
    "What are the best {things} for {topic}?",
    "Give me {number} {things} for {topic}",
    "List {number} {things} about {topic}",
    "Come up with {things} for {topic}",
    "Who invented {topic}?",
    "When did {topic} happen?",
    "Where is {topic}?",
    "Why is {topic} important?",
    "How do I {verb} {topic}?",
    "How many {topic} are there?",
    "How long does it take to {verb} {topic}?",
    "Is {topic} better than {topic}?",
    "Can {topic} {verb} {topic}?",
    "Translate into French: {sentence}",
    "Correct the grammar: {sentence}",
    "Rewrite this to be more formal: {sentence}",
    "Summarize the following text: {sentence} {sentence}",
    "Classify the sentiment of this review as positive or negative: {sentence}",
    "Is the following statement true or false? {sentence}",
    "Extract the {topic} from the text: {sentence}",
    "Write a Python function to {verb} a {topic}",
    "Write a SQL query to find the {topic} with the most {topic}",
    "Create an HTML page with a {topic}",
    "Plan a {number} day trip to {topic}",
    "Give me a recipe for {topic} with {topic}",
    "I want to {verb} {topic}. What should I do?",
    "Pretend you are a {topic}. {sentence}",
    "Tell me a joke about {topic}",
    "Describe {topic} in one sentence",
    "Describe the process of {topic} in detail",
    "Discuss the pros and cons of {topic}",
    "Answer in one word: {sentence}",
    "Solve the equation {number}x + {number} = {number}",
    "What is {number} times {number}?",
    "What would happen if {topic} {verb} {topic}?",
    "Provide a step by step guide to {verb} {topic}",
    "{sentence}\n\nWhat is the main point of this passage?",
    "Identify the {topic} in the sentence: {sentence}",
    "Complete the sentence: {sentence}",
)


def instruction(words: Sequence[str], sentences: Sequence[str], rng: random.Random) -> str:
    """One template filled at random."""

    def fill(match: re.Match[str]) -> str:
        choices: dict[str, Callable[[], str]] = {
            "topic": lambda: " ".join(rng.choice(words) for _ in range(rng.choice((1, 1, 2)))),
            "kind": lambda: rng.choice(KINDS.split(",")),
            "things": lambda: rng.choice(THINGS.split(",")),
            "verb": lambda: rng.choice(VERBS.split(",")),
            "number": lambda: str(rng.choice((2, 3, 5, 7, 8, 10, 15, 20, 50, 100, 200, 500))),
            "sentence": lambda: rng.choice(sentences),
        }
        return choices[match[1]]()

    return re.sub(r"\{(\w+)\}", fill, rng.choice(TEMPLATES))


def word_table(words: Sequence[str], vectors: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Start of the word table from the teacher's vectors of single words; frequent words win."""
    centred = vectors - vectors.mean(0)
    axes = np.linalg.svd(centred[:FREQUENT_WORDS], full_matrices=False)[2][:WORD]
    small = centred @ axes.T
    small *= 0.3 / small.std()
    table = np.zeros((WORD_IDS, WORD))
    used = np.zeros(WORD_IDS, bool)
    for word, vector in reversed(list(zip(words, small, strict=True))):
        table[word_id(word.encode())] = vector
        used[word_id(word.encode())] = True
    return table, used


def distil(
    ids: Ints, target: Floats, table: Floats, epochs: int, seed: int
) -> tuple[Student, float]:
    """Train on cosine and pairwise similarity; returns the student and its held-out cosine."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    held = rng.random(len(ids)) < 0.03
    x, y = torch.tensor(ids), torch.tensor(target, dtype=torch.float32)
    train = np.flatnonzero(~held)
    student = Student(table)
    rest = [p for name, p in student.named_parameters() if not name.startswith("table")]
    optimiser = torch.optim.Adam(
        [{"params": student.table.parameters(), "lr": 1e-3}, {"params": rest, "lr": 2e-3}]
    )
    batch = 256
    steps = epochs * (len(train) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, [2e-3, 3e-3], total_steps=steps + 1)
    length = (ids > 0).sum(1)
    for _ in range(epochs):
        order = rng.permutation(train)
        # neighbours of like length share a batch, so that padding is short
        blocks = np.array_split(order, max(1, len(order) // 8192))
        order = np.concatenate([b[np.argsort(length[b], kind="stable")] for b in blocks])
        starts = rng.permutation(len(order) // batch) * batch
        for start in starts:
            rows = torch.tensor(order[start : start + batch])
            words = x[rows]
            drop = (torch.rand(words.shape) < 0.05) & ((words > 0).sum(1, keepdim=True) > 4)
            out = student(torch.where(drop, torch.zeros_like(words), words))
            want = y[rows]
            loss = (1.0 - (out * want).sum(1)).mean()
            loss = loss + 2.0 * ((out @ out.T - want @ want.T) ** 2).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    with torch.no_grad():
        cosine = float((student(x[held]) * y[held]).sum(1).mean())
    return student, cosine


def pack(student: Student, used: NDArray[np.bool_], card: dict[str, Any]) -> Artifact:
    """The artifact that `TextEncoder.packaged` reads."""
    weights = student.table.weight.detach().numpy()
    rows = np.flatnonzero(used)
    rows = rows[rows > 0]
    index = np.full(WORD_IDS, -1)
    index[rows] = np.arange(len(rows))
    scale = np.abs(weights[rows]).max(0) / 127.0 + 1e-12
    network = {
        "convolve": student.convolve.weight.detach().numpy().T,
        "bias": student.convolve.bias.detach().numpy(),
        "attend": student.attend.weight.detach().numpy().T,
        "project": student.project.weight.detach().numpy().T,
        "offset": student.project.bias.detach().numpy(),
    }
    eight = np.round(weights[rows] / scale).astype(np.int8)
    encoder = TextEncoder(index, eight, scale.astype(np.float64), network)
    return Artifact(kind=KIND, schema=SCHEMA_HASH, arrays=encoder.arrays(""), card=card)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; 0 when the artifact was written."""
    parser = argparse.ArgumentParser(prog="fit_text", description=__doc__)
    parser.add_argument("--teacher", type=Path, required=True, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--words", type=Path, required=True, help="words by frequency, one a line")
    parser.add_argument("--data", help="folder of the public data sets (default: SLUICE_DATA)")
    parser.add_argument("--made", type=int, default=30_000, help="instructions from templates")
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("text.npz"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    teacher = Teacher(args.teacher)
    words = [w for w in args.words.read_text().split("\n") if re.fullmatch(r"[a-z0-9]+", w)]
    texts = corpus(data_folder(args.data), words[1000:12_000], args.made, rng)
    text_vectors = teacher.embed(texts)
    word_vectors = teacher.embed(words, most=12, batch=256)
    mean = text_vectors.mean(0)
    axes = np.linalg.svd((text_vectors - mean)[:FREQUENT_WORDS], full_matrices=False)[2][:OUT]
    table, used = word_table(words, word_vectors)
    ids = np.array([slots(encode(PromptFacts(text=text))) for text in texts])
    single = np.zeros((min(len(words), FREQUENT_WORDS), SLOTS), np.int64)
    single[:, 0] = [word_id(word.encode()) for word in words[: len(single)]]
    every = np.concatenate([text_vectors, word_vectors[: len(single)]])
    target = (every - mean) @ axes.T
    target /= np.linalg.norm(target, axis=1, keepdims=True) + 1e-9
    student, cosine = distil(np.concatenate([ids, single]), target, table, args.epochs, args.seed)
    used[np.unique(ids)] = True
    card = {
        "teacher": "all-MiniLM-L6-v2 (Apache-2.0)",
        "texts": len(texts),
        "words": len(words),
        "sources": [*TEXT_SETS, "templates"],
        "held_out_cosine": cosine,
    }
    save(pack(student, used, card), args.out)
    print(json.dumps(card | {"out": str(args.out)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
