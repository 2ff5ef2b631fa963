"""From a parsed body and its headers to the request that the decision core sees.

Everything of HTTP ends here: header names, milliseconds, keys. What comes out has seconds and
tokens.
"""

from __future__ import annotations

import functools
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from backends.wire.openai import RequestFacts
from domain.errors import MalformedBody, ModelForbidden
from domain.request import BLOCK_TOKENS, InferenceRequest, Slo, SloClass, Tenant
from domain.units import Probability, SecondsPerToken, seconds_from_ms
from gateway.relay import Relay
from gateway.tenants import Identity

TTFT = (b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")
TPOT = (b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")
E2E = (b"x-slo-e2e-ms",)
QUALITY = (b"x-slo-quality",)
CLASS = (b"x-slo-class", b"x-gateway-inference-objective")
PACED = frozenset((*TTFT, *TPOT))
ASKED = frozenset((*TTFT, *TPOT, *E2E, *QUALITY, *CLASS))
"""Headers by which a request asks for anything of its own."""
SESSION = b"x-session-id"
PASSED_ON = frozenset((b"traceparent", b"tracestate"))

BLOCK_BYTES = 4 * BLOCK_TOKENS
"""Prompt bytes that one prefix block covers, at four bytes a token."""
MAX_BLOCKS = 256
"""Blocks hashed at most (64 KiB of prompt): a longer common prefix is told apart no further."""
GROUP_CHARS = 2048
"""Characters of the system prompt that tell one route of an application from another."""

Headers = Mapping[bytes, bytes]
Identify = Callable[[bytes | None], Identity]
"""Whose key an `Authorization` header carries. Raises: Unauthenticated."""
Estimate = Callable[[str, int], float]
"""Prompt tokens of so many characters under a model name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Reads requests. Constant after construction but for the counter that makes ids.

    `classes` by name; `default_class` is that of tenants that name none. `features` gives the
    predictors' vector, where one is configured.
    """

    identify: Identify
    classes: Mapping[str, SloClass]
    default_class: str
    estimate: Estimate
    features: Callable[[RequestFacts], tuple[float, ...]] | None = None
    new_id: Callable[[], str]

    def read(self, relay: Relay, request_id: str) -> InferenceRequest:
        """The request of a relay, under the id it is given. The relay is told the tenant's salt.

        Raises: MalformedBody, Unauthenticated, ModelForbidden.
        """
        headers = dict(reversed(relay.request.headers))  # of a header sent twice the first counts
        tenant, key, relay.cache_salt = self.identify(headers.get(b"authorization"))
        facts = relay.facts()
        if ASKED.isdisjoint(headers):
            promised = self.classes[tenant.class_name or self.default_class]
            slo = promised.slo if facts.stream else _unstreamed(promised.slo)
        else:
            promised = self._class_of(tenant, headers)
            slo = limits(headers, promised.slo, stream=facts.stream)
        tokens = float(facts.prompt_ids)
        if facts.prompt_chars or not facts.prompt_ids:
            tokens += self.estimate(facts.model, facts.prompt_chars)
        session = headers.get(SESSION)
        return InferenceRequest(
            id=request_id,
            tenant=tenant.name,
            model=facts.model,
            prompt_tokens=tokens,
            max_tokens=None if facts.max_tokens is None else float(facts.max_tokens),
            slo=slo,
            class_name=promised.name,
            stream=facts.stream,
            choices=facts.choices,
            tie=zlib.crc32(request_id.encode()) & 0x7FFF_FFFF,
            key=key,
            session=None if session is None else session.decode("latin-1")[:128],
            blocks=prefix_blocks(facts, tenant.name if tenant.isolate_cache else ""),
            features=() if self.features is None else self.features(facts),
            text_group=zlib.crc32(
                f"{tenant.name}\0{facts.model}\0{facts.system_text[:GROUP_CHARS]}".encode(
                    "utf-8", "replace"
                )
            ),
            prompt_chars=facts.prompt_chars,
        )

    def _class_of(self, tenant: Tenant, headers: Headers) -> SloClass:
        """The class asked for, at most as high as the tenant's own; else the tenant's."""
        own = self.classes[tenant.class_name or self.default_class]
        asked = _first(headers, CLASS)
        if asked is None:
            return own
        name = asked[1].decode("latin-1")
        wanted = self.classes.get(name)
        if wanted is None:
            known = ", ".join(sorted(self.classes))
            raise MalformedBody(f"unknown class {name!r}; known: {known}", param=asked[0].decode())
        if wanted.rank < own.rank:
            raise ModelForbidden(
                f"class {name!r} is above this key's class {own.name!r}", param=asked[0].decode()
            )
        return wanted


def request_ids() -> Callable[[], str]:
    """Ids that no other gateway and no earlier run gives: a random prefix and a counter."""
    prefix = f"req-{os.urandom(6).hex()}-"
    numbers = count(1)
    return lambda: f"{prefix}{next(numbers):x}"


def limits(headers: Headers, promised: Slo, *, stream: bool) -> Slo:
    """The limits of a request: its headers over those of its class. What is not streamed has no
    first token and no pace.

    Raises: MalformedBody naming the header.
    """
    if stream and ASKED.isdisjoint(headers):
        return promised
    ttft = _number(headers, TTFT)
    tpot = _number(headers, TPOT)
    e2e = _number(headers, E2E)
    quality = _number(headers, QUALITY)
    if quality is not None and quality > 1:
        raise MalformedBody(f"x-slo-quality must lie in (0, 1], not {quality:g}")
    return Slo(
        ttft=None if not stream else promised.ttft if ttft is None else seconds_from_ms(ttft),
        tpot=None
        if not stream
        else promised.tpot
        if tpot is None
        else SecondsPerToken(tpot / 1000.0),
        e2e=promised.e2e if e2e is None else seconds_from_ms(e2e),
        quality=promised.quality if quality is None else Probability(quality),
    )


def ignored_limits(names: Iterable[bytes]) -> str:
    """Limits that an unstreamed request asked for in vain by these headers, comma-separated."""
    asked = PACED.intersection(names)
    if not asked:
        return ""
    found = (("ttft", TTFT), ("tpot", TPOT))
    return ", ".join(limit for limit, spelled in found if not asked.isdisjoint(spelled))


@functools.lru_cache(maxsize=256)
def _unstreamed(slo: Slo) -> Slo:
    """What is left of a class's promise where nothing is streamed."""
    return Slo(e2e=slo.e2e, quality=slo.quality)


def prefix_blocks(facts: RequestFacts, salt: str) -> tuple[int, ...]:
    """Chained 63-bit hashes of the prompt's prefixes, `BLOCK_BYTES` apart; whole blocks only.

    `salt` keeps the blocks of a tenant apart from everybody else's.
    """
    room = BLOCK_BYTES * MAX_BLOCKS
    if facts.prompt_chars < BLOCK_BYTES // 4:
        return ()
    parts = []
    length = 0
    for role, text in facts.turns:
        parts.append(f"{role}\0{text}\0")
        length += len(text)
        if length >= room:
            break
    data = "".join(parts).encode("utf-8", "replace")[:room]
    chain = hashlib.blake2b(salt.encode(), digest_size=8)
    blocks = []
    for end in range(BLOCK_BYTES, len(data) + 1, BLOCK_BYTES):
        chain.update(data[end - BLOCK_BYTES : end])
        blocks.append(int.from_bytes(chain.copy().digest(), "little") >> 1)
    return tuple(blocks)


def _first(headers: Headers, names: tuple[bytes, ...]) -> tuple[bytes, bytes] | None:
    for name in names:
        value = headers.get(name)
        if value is not None:
            return name, value
    return None


def _number(headers: Headers, names: tuple[bytes, ...]) -> float | None:
    found = _first(headers, names)
    if found is None:
        return None
    try:
        value = float(found[1])
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        text = found[1].decode("latin-1")
        name = found[0].decode()
        raise MalformedBody(f"{name} must be a number above 0, not {text!r}", param=name)
    return value
