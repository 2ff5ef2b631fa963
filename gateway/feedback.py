"""Who may say what of an answer: the latest answers by request id, in bounded memory.

A score is taken once, from the tenant whose request it was. An id that is not known, or is somebody
else's, is the same to a client: not found.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from domain.errors import FeedbackRepeated, MalformedBody, PayloadTooLarge, UnknownRequest

REMEMBERED = 16_384
"""Answers that feedback may come for; the oldest are forgotten first."""
LONGEST_BODY = 4096
"""Bytes of a feedback."""


class Feedback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client says: of which request (`x-request-id` of its answer), and how good, 0 to 1."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    score: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


_DECODER = msgspec.json.Decoder(Feedback)


def read_feedback(body: bytes) -> Feedback:
    """A feedback from its JSON. Raises: MalformedBody, PayloadTooLarge."""
    if len(body) > LONGEST_BODY:
        raise PayloadTooLarge(f"a feedback has at most {LONGEST_BODY} bytes, not {len(body)}")
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedBody(
            f'feedback must be {{"id": "REQUEST-ID", "score": 0 to 1}}: {exc}'
        ) from exc


class Answered(NamedTuple):
    """One answer that may be judged."""

    tenant: str
    variant: str
    given: bool = False


class AnsweredRequests:
    """The latest `capacity` answers by request id."""

    def __init__(self, capacity: int = REMEMBERED) -> None:
        self._capacity = capacity
        self._of: dict[str, Answered] = {}

    def __len__(self) -> int:
        return len(self._of)

    def remember(self, request_id: str, tenant: str, variant: str) -> None:
        """An answer went out."""
        self._of[request_id] = Answered(tenant, variant)
        if len(self._of) > self._capacity:
            del self._of[next(iter(self._of))]

    def judge(self, request_id: str, tenant: str) -> str:
        """Mark the answer as judged by its tenant; the variant that gave it.

        Raises: UnknownRequest for an id that is not known or another tenant's; FeedbackRepeated.
        """
        found = self._of.get(request_id)
        if found is None or found.tenant != tenant:
            raise UnknownRequest(
                f"no recent answer {request_id!r} of this key; its id is the answer's"
                " x-request-id header",
                param="id",
            )
        if found.given:
            raise FeedbackRepeated(f"request {request_id!r} has been judged already", param="id")
        self._of[request_id] = found._replace(given=True)
        return found.variant
