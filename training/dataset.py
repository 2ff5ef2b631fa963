"""Tables of answers from public data sets and decision logs, in one frame.

Data come at run time from a folder (`--data`, or the environment's SLUICE_DATA), laid out as their
READMEs say. One row is one answer: which prompt, which model, how many tokens, whether the answer
was cut there (censored), and its score where one exists. Prompts are encoded once into feature
vectors; texts are not kept beside them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from domain.errors import ConfigError
from predictors.features import SCHEMA_HASH, SIZE, PromptFacts, encode

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SHIPPABLE = ("arena_hard", "mmlu_pro", "gsm", "math-l5", "crux", "numersense-v2")
"""Sets whose licence (Apache-2.0, MIT) allows a fit on them to be shipped; AlpacaEval is CC BY-NC
4.0 and must stay out of a released artifact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Columns of n answers to p prompts.

    `vectors` (p, SIZE) are the prompts' features, `prompt_ids` (p,) their names; `prompt` (n,) int
    points into them. `dataset` and `model` (n,) are names, `tokens` (n,) output tokens, `censored`
    (n,) whether the answer was cut there, `score` (n,) in [0, 1] or NaN, `at` (n,) Unix seconds or
    NaN.
    """

    vectors: Floats
    prompt_ids: NDArray[np.str_]
    prompt: Ints
    dataset: NDArray[np.str_]
    model: NDArray[np.str_]
    tokens: Floats
    censored: Bools
    score: Floats
    at: Floats

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: Bools | Ints) -> Answers:
        """The rows given by mask or index; prompts stay."""
        columns = ("prompt", "dataset", "model", "tokens", "censored", "score", "at")
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})


def data_folder(given: str | None) -> Path:
    """Where the data sets lie: the flag, else SLUICE_DATA, else `../shared/data` beside the repo.

    Raises: ConfigError when there is no such folder.
    """
    default = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(given or os.environ.get("SLUICE_DATA") or default)
    if not folder.is_dir():
        raise ConfigError(f"no data folder {folder}; give one with --data or SLUICE_DATA")
    return folder


def load_lengths(folder: Path, sets: Sequence[str] | None = None) -> Answers:
    """Answers with text and a usable length, of the named sets (None: every set there is).

    Names: alpaca_eval, arena_hard, mmlu_pro (runs capped at 2,048 tokens or more), and ZeroEval's
    gsm, math-l5, crux, numersense-v2.
    Raises: ConfigError for an unknown name or a missing folder.
    """
    readers = {
        "alpaca_eval": _alpaca_eval,
        "arena_hard": _arena_hard,
        "mmlu_pro": _mmlu_pro,
        "zeroeval": _zeroeval,
    }
    tasks = ("gsm", "math-l5", "crux", "numersense-v2")
    known = {"alpaca_eval", "arena_hard", "mmlu_pro", *tasks}
    wanted = set(sets) if sets else known
    if wanted - known:
        raise ConfigError(f"unknown sets {sorted(wanted - known)}; known: {sorted(known)}")
    parts = []
    for name, reader in readers.items():
        needed = bool(wanted & set(tasks)) if name == "zeroeval" else name in wanted
        if needed:
            part = reader(folder)
            parts.append(part.take(np.isin(part.dataset, sorted(wanted))))
    return join(parts)


def join(parts: Iterable[Answers]) -> Answers:
    """One frame of several; a prompt that occurs in two keeps one vector per part."""
    parts = list(parts)
    offsets = np.cumsum([0] + [len(part.vectors) for part in parts])
    return Answers(
        vectors=np.concatenate([part.vectors for part in parts]),
        prompt_ids=np.concatenate([part.prompt_ids for part in parts]),
        prompt=np.concatenate(
            [part.prompt + start for part, start in zip(parts, offsets[:-1], strict=True)]
        ),
        **{
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("dataset", "model", "tokens", "censored", "score", "at")
        },
    )


def hashed(names: NDArray[np.str_], salt: str) -> Floats:
    """A fixed uniform number in [0, 1) per name: splits that do not depend on order or seed."""
    unique, back = np.unique(names, return_inverse=True)
    share = [
        int(hashlib.sha256(f"{salt}|{name}".encode()).hexdigest()[:8], 16) / 2**32
        for name in unique
    ]
    drawn: Floats = np.array(share)[back]
    return drawn


@dataclass(frozen=True, slots=True)
class Split:
    """Masks over rows. `train`: known prompts, known models. `test`: new prompts, known models.
    `unseen`: new prompts, new models. The rest is used by neither.
    """

    train: Bools
    test: Bools
    unseen: Bools


def split(
    answers: Answers, *, prompts: float = 0.3, models: float = 0.2, salt: str = "sluice-1"
) -> Split:
    """By prompt and by model: that share of each is held out. Same prompt text, same side, in every
    set; a set with fewer than five models holds none out.
    """
    new_prompt = hashed(answers.prompt_ids, f"{salt}|prompt")[answers.prompt] < prompts
    new_model = hashed(answers.model, f"{salt}|model") < models
    for name in np.unique(answers.dataset):
        here = answers.dataset == name
        if len(np.unique(answers.model[here])) < 5:
            new_model &= ~here
    return Split(~new_prompt & ~new_model, new_prompt & ~new_model, new_prompt & new_model)


def split_by_time(answers: Answers, share: float = 0.3) -> Split:
    """The latest `share` of the rows that carry a time is the test."""
    known = np.isfinite(answers.at)
    border = np.quantile(answers.at[known], 1.0 - share) if known.any() else np.inf
    late = known & (answers.at > border)
    return Split(known & ~late, late, np.zeros(len(answers), bool))


def read_decision_logs(paths: Iterable[Path], *, by: str = "model") -> Answers:
    """Finished and cut answers of decision logs (JSON lines) whose feature schema is ours.

    Cancelled, timed-out and cut answers are censored at what they had reached. `score` is the
    client's feedback where one came. `by` is what `model` is to hold: the `model` asked for, or the
    `variant` that answered.
    """
    vectors, rows = [], []
    scores: dict[str, float] = {}
    for path in paths:
        with path.open() as lines:
            for line in lines:
                record = json.loads(line)
                if "feedback_to" in record:
                    scores[record["feedback_to"]] = float(record["score"])
                if "outcome" not in record:
                    continue
                end = record["outcome"]
                tokens = float(end["completion_tokens"])
                features = record["features"]
                if record["feature_schema"] != SCHEMA_HASH or len(features) != SIZE or tokens < 1:
                    continue
                limit = record["max_tokens"]
                cut = end["cause"] != "finished" or (limit is not None and tokens >= limit)
                vectors.append(features)
                rows.append((record["id"], record[by], tokens, cut, float(record["at"])))
    count = len(rows)
    return Answers(
        vectors=np.array(vectors, np.float64).reshape(count, SIZE),
        prompt_ids=np.array([row[0] for row in rows], np.str_),
        prompt=np.arange(count),
        dataset=np.full(count, "log", dtype="<U16"),
        model=np.array([row[1] for row in rows], np.str_),
        tokens=np.array([row[2] for row in rows], np.float64),
        censored=np.array([row[3] for row in rows], bool),
        score=np.array([scores.get(row[0], np.nan) for row in rows], np.float64),
        at=np.array([row[4] for row in rows], np.float64),
    )


# ---- readers, one per data set


def read_columns(path: Path, *columns: str) -> list[list[Any]]:
    """Columns of a Parquet file as Python lists, in the order asked for."""
    import pyarrow.parquet as pq

    if not path.is_file():
        raise ConfigError(f"no file {path}; is the data folder complete?")
    table = pq.read_table(path, columns=list(columns))
    return [table.column(name).to_pylist() for name in columns]


def frame(
    texts: dict[str, str],
    dataset: Sequence[str],
    prompt: Sequence[str],
    model: Sequence[str],
    tokens: Sequence[float],
    censored: Bools,
    score: Sequence[float | None] | None = None,
) -> Answers:
    """Encode the prompts and keep the rows whose prompt has text."""
    names = np.array(sorted(texts), np.str_)
    place = {name: i for i, name in enumerate(names.tolist())}
    keep = np.array([p in place for p in prompt], bool)
    n = len(prompt)
    scores = np.array(score if score is not None else [None] * n, np.float64)
    rows = Answers(
        vectors=np.array([encode(PromptFacts(text=texts[name])) for name in names.tolist()]),
        prompt_ids=names,
        prompt=np.array([place.get(p, 0) for p in prompt], np.int64),
        dataset=np.array(dataset, np.str_),
        model=np.array(model, np.str_),
        tokens=np.maximum(np.array(tokens, np.float64), 1.0),
        censored=censored,
        score=scores,
        at=np.full(n, np.nan),
    )
    return rows.take(keep)


def texts_of(path: Path) -> dict[str, str]:
    """Text by prompt id, of the prompts that have one."""
    ids, texts = read_columns(path, "prompt_id", "text")
    return {i: t for i, t in zip(ids, texts, strict=True) if t}


def _alpaca_eval(folder: Path) -> Answers:
    base = folder / "alpaca_eval_lengths"
    prompt, model, tokens = read_columns(
        base / "responses.parquet", "prompt_id", "model", "output_tokens"
    )
    n = len(prompt)
    never = np.zeros(n, bool)
    return frame(
        texts_of(base / "prompts.parquet"), ["alpaca_eval"] * n, prompt, model, tokens, never
    )


def _arena_hard(folder: Path) -> Answers:
    base = folder / "arena_hard_answers"
    prompt, model, tokens = read_columns(
        base / "responses.parquet", "prompt_id", "model", "output_tokens"
    )
    n = len(prompt)
    never = np.zeros(n, bool)
    return frame(
        texts_of(base / "prompts.parquet"), ["arena_hard"] * n, prompt, model, tokens, never
    )


def _mmlu_pro(folder: Path) -> Answers:
    import csv

    base = folder / "mmlu_pro_cot"
    caps: dict[str, float] = {}
    with (base / "models.csv").open() as lines:
        for row in csv.DictReader(lines):
            caps[row["model"]] = float(row["likely_output_cap_tokens"] or np.inf)
    prompt, model, tokens, score = read_columns(
        base / "responses.parquet", "prompt_id", "model", "output_tokens", "score"
    )
    rows = [
        row
        for row in zip(prompt, model, tokens, score, strict=True)
        if caps[row[1]] >= 2048  # the other runs stopped at 256 tokens: no lengths to learn
    ]
    prompt, model, tokens, score = (list(column) for column in zip(*rows, strict=True))
    # tokens are a common ruler, not the model's own: allow 7 % below the cap
    censored = np.array(tokens) >= 0.93 * np.array([caps[name] for name in model])
    sets = ["mmlu_pro"] * len(prompt)
    return frame(texts_of(base / "prompts.parquet"), sets, prompt, model, tokens, censored, score)


def _zeroeval(folder: Path) -> Answers:
    base = folder / "zeroeval"
    prompt, model, task, tokens, score = read_columns(
        base / "responses.parquet", "prompt_id", "model", "task", "output_tokens", "score"
    )
    censored = np.array(tokens, np.float64) >= 0.93 * 4096
    return frame(texts_of(base / "prompts.parquet"), task, prompt, model, tokens, censored, score)
