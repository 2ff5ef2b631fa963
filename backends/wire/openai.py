"""Request bodies of the OpenAI API: what the gateway must know of them, and what it changes.

A body is read once. A compiled scan finds the top-level fields in the bytes, and a typed decode
checks that the whole is JSON and lifts out what routing needs; everything else is never looked at.
What goes to the engine is the client's own body with at most three replacements by offset: the
model's name, `stream_options.include_usage`, and the salt of the engine's prefix cache. A field
that decides who is charged or what runs may stand only once, since engines disagree on which of two
they take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import numpy as np

from backends.wire.scan import MAX_FIELDS, NOT_AN_OBJECT, TOO_MANY_FIELDS, new_spans, scan_object
from backends.wire.sse import (
    CHAT_CONTENT,
    COMPLETION_CONTENT,
    RESPONSE_CONTENT,
    ContentPattern,
)
from domain.errors import MalformedBody
from domain.native import compiled

MAX_CHOICES: Final = 128
MAX_MODEL_NAME: Final = 256
SALT_FIELDS: Final = frozenset({"cache_salt"})
"""What engines call the salt of their prefix cache: every name that an adapter uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """One inference endpoint.

    `content` tells text in its events; `streams` whether it has any; `asks_usage` that a stream
    reports usage only if `stream_options` asks for it, and ends with `[DONE]`.
    """

    name: str
    path: bytes
    content: ContentPattern
    asks_usage: bool
    streams: bool = True


CHAT: Final = Surface(
    name="chat", path=b"/v1/chat/completions", content=CHAT_CONTENT, asks_usage=True
)
COMPLETIONS: Final = Surface(
    name="text_completion", path=b"/v1/completions", content=COMPLETION_CONTENT, asks_usage=True
)
EMBEDDINGS: Final = Surface(
    name="embeddings",
    path=b"/v1/embeddings",
    content=COMPLETION_CONTENT,
    asks_usage=False,
    streams=False,
)
RESPONSES: Final = Surface(
    name="responses", path=b"/v1/responses", content=RESPONSE_CONTENT, asks_usage=False
)

SURFACES: Final = {s.path: s for s in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES)}


class Edit(NamedTuple):
    """Bytes [start, end) of the body to be replaced by `text`."""

    start: int
    end: int
    text: bytes


class Salt(NamedTuple):
    """A top-level field of the request that keeps the engine's cached prefixes apart: its name in
    `SALT_FIELDS`, and its text.
    """

    field: str
    value: str


@dataclass(slots=True, kw_only=True)
class RequestFacts:
    """What the gateway knows of a body after its one reading.

    `max_tokens` is the larger of the two fields that carry it, None if neither does. `turns` are
    the texts of the prompt in order with their role ("" where the endpoint has none);
    `prompt_chars` counts their characters and those of tool definitions, `prompt_ids` the tokens
    that the client sent as numbers. `wants_usage` says that the client asked for the usage event.
    `model_span`, `usage_edit` and `salt_spans` (values by field, of those that the client sent) are
    offsets into the body, for `splice`.
    """

    surface: Surface
    model: str
    stream: bool
    max_tokens: int | None
    choices: int
    wants_usage: bool
    turns: tuple[tuple[str, str], ...]
    prompt_chars: int
    prompt_ids: int
    has_tools: bool
    has_format: bool
    has_media: bool
    model_span: tuple[int, int]
    usage_edit: Edit | None
    salt_spans: Mapping[str, tuple[int, int]]

    @property
    def user_text(self) -> str:
        """What the user wrote, for predictors: the user's turns, or a bare prompt."""
        return "\n".join(text for role, text in self.turns if role in {"user", ""})

    @property
    def system_text(self) -> str:
        """The instructions that many requests share."""
        return "\n".join(text for role, text in self.turns if role in {"system", "developer"})


class _Part(msgspec.Struct):
    text: str | None = None
    type: str | None = None


class _Turn(msgspec.Struct):
    role: str = ""
    content: str | list[str | _Part] | None = None
    tool_calls: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Common(msgspec.Struct):
    model: str = ""
    stream: bool | None = None
    n: int | None = None


class _Chat(_Common):
    messages: list[_Turn] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream_options: _StreamOptions | None = None
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    response_format: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_Ids = list[int]


class _Completion(_Common):
    prompt: str | list[str | int | _Ids] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream_options: _StreamOptions | None = None
    response_format: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Embedding(_Common):
    input: str | list[str | int | _Ids] | None = None


class _Response(_Common):
    input: str | list[_Turn] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    previous_response_id: str | None = None
    conversation: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    store: bool | None = None
    background: bool | None = None


_decode_chat = msgspec.json.Decoder(_Chat).decode
_decode_completion = msgspec.json.Decoder(_Completion).decode
_decode_embedding = msgspec.json.Decoder(_Embedding).decode
_decode_response = msgspec.json.Decoder(_Response).decode

_ONCE: Final = frozenset(
    field.encode()
    for body in (_Chat, _Completion, _Embedding, _Response)
    for field in body.__struct_fields__
) | {field.encode() for field in SALT_FIELDS}
_SALT_KEYS: Final = tuple((field, field.encode()) for field in sorted(SALT_FIELDS))


class RequestParser:
    """Reads bodies; holds the scan's buffer, so one belongs to one thread."""

    def __init__(self) -> None:
        self._spans = new_spans()
        nothing = np.frombuffer(b"{}", np.uint8)
        self._scan_object = compiled(scan_object, nothing, 0, 0, self._spans)

    def parse(self, surface: Surface, body: bytes) -> RequestFacts:
        """Facts of `body` as a request to `surface`.

        Raises: MalformedBody naming the field, for what is not JSON, what has the wrong type, what
        stands twice, and what the gateway cannot serve.
        """
        try:
            if not body.isascii():
                body.decode()  # the typed decode skips what it does not know, unchecked
            match surface.name:
                case "chat":
                    facts = _chat(surface, _decode_chat(body))
                case "text_completion":
                    facts = _completion(surface, _decode_completion(body))
                case "embeddings":
                    facts = _embedding(surface, _decode_embedding(body))
                case _:
                    facts = _response(surface, _decode_response(body))
        except msgspec.ValidationError as exc:
            raise MalformedBody(f"request body: {exc}", param=_param(str(exc))) from exc
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise MalformedBody(f"request body is not JSON: {exc}") from exc
        except RecursionError as exc:
            raise MalformedBody("request body is nested too deeply") from exc
        fields = self._fields(body)
        span = fields.get(b"model")
        if span is None or not 0 < len(facts.model) <= MAX_MODEL_NAME:
            raise MalformedBody(
                f"'model' must be a name of 1 to {MAX_MODEL_NAME} characters", param="model"
            )
        facts.model_span = span
        facts.salt_spans = {name: fields[key] for name, key in _SALT_KEYS if key in fields}
        if facts.stream and surface.asks_usage and not facts.wants_usage:
            facts.usage_edit = self._ask_usage(body, fields)
        return facts

    def _fields(self, body: bytes) -> dict[bytes, tuple[int, int]]:
        """Value spans of the top-level fields.

        Raises: MalformedBody where a field that the gateway reads stands twice.
        """
        fields = {}
        for key_start, key_end, start, end in self._scan(body, 0, len(body)):
            key = body[key_start:key_end]
            if b"\\" in key:
                key = msgspec.json.decode(body[key_start - 1 : key_end + 1], type=str).encode()
            if key in fields and key in _ONCE:
                name = key.decode()
                raise MalformedBody(f"'{name}' stands twice in the request body", param=name)
            fields[key] = (start, end)
        return fields

    def _scan(self, body: bytes, start: int, end: int) -> list[list[int]]:
        count = self._scan_object(np.frombuffer(body, np.uint8), start, end, self._spans)
        if count == TOO_MANY_FIELDS:
            raise MalformedBody(f"request body has more than {MAX_FIELDS} fields")
        if count == NOT_AN_OBJECT:
            raise MalformedBody("request body must be a JSON object")
        rows: list[list[int]] = self._spans[:count].tolist()
        return rows

    def _ask_usage(self, body: bytes, fields: dict[bytes, tuple[int, int]]) -> Edit:
        """The edit that makes a stream report usage, wherever the client left it out."""
        span = fields.get(b"stream_options")
        if span is None:
            at = body.index(b"{") + 1
            return Edit(at, at, b'"stream_options":{"include_usage":true},')
        start, end = span
        if body[start:end] == b"null":
            return Edit(start, end, b'{"include_usage":true}')
        rows = self._scan(body, start, end)
        found = [row for row in rows if body[row[0] : row[1]] == b"include_usage"]
        if any(b"\\" in body[row[0] : row[1]] for row in rows) or len(found) > 1:
            raise MalformedBody(
                "'include_usage' stands twice or in escapes in 'stream_options'",
                param="stream_options",
            )
        if found:
            return Edit(found[0][2], found[0][3], b"true")
        comma = b"," if rows else b""
        return Edit(start + 1, start + 1, b'"include_usage":true' + comma)


def splice(
    body: bytes,
    facts: RequestFacts,
    model: str,
    *,
    ask_usage: bool = True,
    salt: Salt | None = None,
) -> bytes:
    """The body for an engine that calls the model `model`: every byte else is the client's own.

    `salt` takes the place of one that the client sent.
    """
    edits = []
    if model != facts.model:
        edits.append(Edit(*facts.model_span, msgspec.json.encode(model)))
    if ask_usage and facts.usage_edit is not None:
        edits.append(facts.usage_edit)
    if salt is not None:
        edits.append(_salted(body, facts, salt))
    if not edits:
        return body
    pieces: list[bytes | memoryview] = []
    view, at = memoryview(body), 0
    for edit in sorted(edits):
        pieces += (view[at : edit.start], edit.text)
        at = edit.end
    pieces.append(view[at:])
    return b"".join(pieces)


def _salted(body: bytes, facts: RequestFacts, salt: Salt) -> Edit:
    value = msgspec.json.encode(salt.value)
    span = facts.salt_spans.get(salt.field)
    if span is not None:
        return Edit(*span, value)
    at = body.index(b"{") + 1
    return Edit(at, at, b"%b:%b," % (msgspec.json.encode(salt.field), value))


def _facts(
    surface: Surface,
    body: _Common,
    *,
    turns: list[tuple[str, str]],
    max_tokens: int | None,
    extra_chars: int = 0,
    prompt_ids: int = 0,
    wants_usage: bool = False,
    has_tools: bool = False,
    has_format: bool = False,
    has_media: bool = False,
) -> RequestFacts:
    choices = 1 if body.n is None else body.n
    if not 1 <= choices <= MAX_CHOICES:
        raise MalformedBody(f"'n' must lie in 1 to {MAX_CHOICES}, not {choices}", param="n")
    return RequestFacts(
        surface=surface,
        model=body.model,
        stream=bool(body.stream) and surface.streams,
        max_tokens=max_tokens,
        choices=choices,
        wants_usage=wants_usage,
        turns=tuple(turns),
        prompt_chars=sum(len(text) for _, text in turns) + extra_chars,
        prompt_ids=prompt_ids,
        has_tools=has_tools,
        has_format=has_format,
        has_media=has_media,
        model_span=(0, 0),
        usage_edit=None,
        salt_spans={},
    )


def _chat(surface: Surface, body: _Chat) -> RequestFacts:
    if not body.messages:
        raise MalformedBody("'messages' must hold at least one message", param="messages")
    turns, media, extra = _turns(body.messages)
    tools = _length(body.tools)
    return _facts(
        surface,
        body,
        turns=turns,
        max_tokens=_larger(body.max_tokens, body.max_completion_tokens),
        extra_chars=extra + tools,
        wants_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        has_tools=tools > len(b"[]"),
        has_format=_length(body.response_format) > 0,
        has_media=media,
    )


def _completion(surface: Surface, body: _Completion) -> RequestFacts:
    turns, ids = _prompt(body.prompt)
    return _facts(
        surface,
        body,
        turns=turns,
        max_tokens=_larger(body.max_tokens, body.max_completion_tokens),
        prompt_ids=ids,
        wants_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        has_format=_length(body.response_format) > 0,
    )


def _embedding(surface: Surface, body: _Embedding) -> RequestFacts:
    if body.input is None:
        raise MalformedBody("'input' is missing", param="input")
    turns, ids = _prompt(body.input)
    return _facts(surface, body, turns=turns, max_tokens=0, prompt_ids=ids)


def _response(surface: Surface, body: _Response) -> RequestFacts:
    for field, refused in (
        ("previous_response_id", body.previous_response_id is not None),
        ("conversation", _length(body.conversation) > 0),
        ("store", bool(body.store)),
        ("background", bool(body.background)),
    ):
        if refused:
            raise MalformedBody(
                f"'{field}' needs answers kept on the server, which this gateway does not do; "
                "send the whole conversation in 'input'",
                param=field,
            )
    if not body.input:
        raise MalformedBody("'input' is missing", param="input")
    turns: list[tuple[str, str]] = []
    if body.instructions:
        turns.append(("system", body.instructions))
    media, extra = False, 0
    if isinstance(body.input, str):
        turns.append(("user", body.input))
    else:
        more, media, extra = _turns(body.input)
        turns += more
    tools = _length(body.tools)
    return _facts(
        surface,
        body,
        turns=turns,
        max_tokens=_checked(body.max_output_tokens, "max_output_tokens"),
        extra_chars=extra + tools,
        has_tools=tools > len(b"[]"),
        has_format=_length(body.text) > 0,
        has_media=media,
    )


def _turns(messages: list[_Turn]) -> tuple[list[tuple[str, str]], bool, int]:
    """Texts with their roles, whether an image or sound is among them, characters of tool calls."""
    turns, media, extra = [], False, 0
    for turn in messages:
        content = turn.content
        if isinstance(content, str):
            turns.append((turn.role, content))
        elif content is not None:
            for part in content:
                text = part if isinstance(part, str) else part.text
                if text is None:
                    media = True
                else:
                    turns.append((turn.role, text))
        if turn.tool_calls is not msgspec.UNSET:
            extra += _length(turn.tool_calls)
    return turns, media, extra


def _prompt(prompt: str | list[str | int | _Ids] | None) -> tuple[list[tuple[str, str]], int]:
    """Texts of a bare prompt, and how many token ids it holds."""
    if prompt is None:
        return [], 0
    if isinstance(prompt, str):
        return [("", prompt)], 0
    turns, ids = [], 0
    for item in prompt:
        if isinstance(item, str):
            turns.append(("", item))
        else:
            ids += 1 if isinstance(item, int) else len(item)
    return turns, ids


def _larger(max_tokens: int | None, max_completion_tokens: int | None) -> int | None:
    old = _checked(max_tokens, "max_tokens")
    new = _checked(max_completion_tokens, "max_completion_tokens")
    if old is None or new is None:
        return new if old is None else old
    return max(old, new)


def _checked(count: int | None, field: str) -> int | None:
    if count is not None and not 0 <= count <= 1 << 31:
        raise MalformedBody(f"'{field}' must not be negative or absurd: {count}", param=field)
    return count


def _length(raw: msgspec.Raw | msgspec.UnsetType) -> int:
    """Bytes of a field that is only weighed, 0 where it is absent or null."""
    if raw is msgspec.UNSET:
        return 0
    size = memoryview(raw).nbytes
    return 0 if size == len(b"null") and bytes(raw) == b"null" else size


def _param(message: str) -> str | None:
    """The field that a validation message of msgspec points at with its `$.path`."""
    _, found, path = message.rpartition("$.")
    return path.split("`", 1)[0].split("[", 1)[0].split(".", 1)[0] if found else None
