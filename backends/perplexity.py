"""Perplexity of a running llama.cpp replica on a fixed text, over HTTP alone.

The server gives no log-probabilities for a prompt, but it does for every generated token, computed
from the raw logits before any sampler, and its grammars can name single tokens. A grammar that
allows exactly one continuation therefore makes the model *generate* our text while it reports, at
each step, the log-probability it gave to that token. This is ordinary teacher forcing; a test
checks it against the full distribution asked for one position at a time.

    perplexity = exp(−(1/N) Σ log p(token | the tokens before it in its stretch))

The text is ours (written for this purpose, so no model was trained on it), cut into stretches of
`STRETCHES` stretches of `STRETCH` tokens; the first `GIVEN` of each are context and not scored.
Figures from it compare variants of one model; they say nothing against figures on other texts.
"""

import asyncio
import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from domain.errors import BackendProtocolError
from domain.units import Probability

STRETCH = 160  # tokens; fits any slot of 256 tokens or more
GIVEN = 32  # tokens of context at the start of each stretch
STRETCHES = 4  # decoded together: one pass over the weights serves all of them

REFERENCE_TEXT = Path(__file__).with_name("reference_text.txt")

FULL_QUALITY = 0.9
"""P(good enough) of the full variant before any feedback: a round prior, not a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """Mean negative log-likelihood of a text, nats per token, over `tokens` scored tokens."""

    nats_per_token: float
    tokens: int

    @property
    def value(self) -> float:
        """Exponential of the mean: as unsure as among this many equally likely tokens."""
        return math.exp(self.nats_per_token)


def quality_prior(variant: Perplexity, full: Perplexity) -> Probability:
    """Prior of quality: FULL_QUALITY × min(1, ppl_full / ppl_variant).

    The ratio is the geometric mean, per token, of the probability the variant kept of what the full
    one gave to the text. It orders variants and is close to 1 for mild quantisation; it is no claim
    about answers, and the quality predictor replaces it as feedback arrives.
    """
    return Probability(
        FULL_QUALITY * min(1.0, math.exp(full.nats_per_token - variant.nats_per_token))
    )


def text_checksum(text: str) -> str:
    """Eight hex digits that change with the text or with how it is cut."""
    return hashlib.sha256(f"{STRETCHES}/{STRETCH}/{GIVEN}/{text}".encode()).hexdigest()[:8]


def stretches(tokens: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Cut the start of a text into (given, scored) token lists, each with a scored token."""
    used = tokens[: STRETCHES * STRETCH]
    cuts = [used[start : start + STRETCH] for start in range(0, len(used), STRETCH)]
    return [(list(cut[:GIVEN]), list(cut[GIVEN:])) for cut in cuts if len(cut) > GIVEN]


def only(tokens: Sequence[int]) -> str:
    """A llama.cpp grammar with one sentence: these tokens, in this order."""
    return "root ::= " + " ".join(f"<[{token}]>" for token in tokens)


async def measure(http: httpx.AsyncClient, url: str, text: str) -> Perplexity:
    """Perplexity of the model behind the llama.cpp server at `url` on `text`.

    Takes as long as generating four answers of 128 tokens at once.
    Raises: BackendProtocolError if the server did not follow the text, httpx.HTTPError.
    """
    answer = await http.post(f"{url}/tokenize", json={"content": text})
    answer.raise_for_status()
    pieces = stretches(answer.json()["tokens"])
    async with asyncio.TaskGroup() as group:
        runs = [group.create_task(_score(http, url, *piece)) for piece in pieces]
    logs = list(itertools.chain.from_iterable(run.result() for run in runs))
    return Perplexity(nats_per_token=-math.fsum(logs) / len(logs), tokens=len(logs))


async def _score(
    http: httpx.AsyncClient, url: str, given: Sequence[int], scored: Sequence[int]
) -> list[float]:
    """Log-probability of each scored token after all tokens before it."""
    answer = await http.post(
        f"{url}/completion",
        json={
            "prompt": list(given),
            "grammar": only(scored),
            "n_predict": len(scored),
            "n_probs": 1,
            "temperature": 0,
            "cache_prompt": False,  # roundings then do not depend on what ran before
        },
    )
    answer.raise_for_status()
    steps = answer.json()["completion_probabilities"]
    if [step["id"] for step in steps] != list(scored):
        raise BackendProtocolError(f"{url} did not generate the text it was held to")
    return [step["logprob"] for step in steps]
