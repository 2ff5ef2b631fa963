"""One feature schema for fit and predict: a request becomes a flat float64 vector, once.

The vector is what `InferenceRequest.features` carries and the decision log keeps. It has two parts:

- `DENSE` named numbers: sizes, shares of letters, code and scripts, limits, effort, format, tools,
  turn, counts of words that tell a task ("list", "explain", "poem"), and parsed requests ("in one
  word", "list 20", "write 1000 words");
- `SLOTS` word slots: 15-bit hashes of the first and the last words (0 = empty). Bigrams are formed
  from neighbours, so an artifact can own any table over hashed n-grams, and a log without text is
  still enough to fit a new one.

One compiled pass over the UTF-8 bytes does the work. `SCHEMA_HASH` names layout and word groups;
artifacts carry it and refuse to load under another.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]

WORD_BITS = 15
WORD_IDS = 1 << WORD_BITS
SLOTS = 96
HEAD = 48
"""Word slots taken from the start of a prompt that has more than `SLOTS` words."""
SCANNED = 16_384
"""Bytes read from either end of a prompt; what lies between counts by its length only."""

GROUPS: dict[str, str] = {
    "list": "list lists enumerate name bullet bullets bulleted top ideas ways tips examples reasons"
    " suggestions options names titles steps items points facts",
    "explain": "explain describe discuss why how elaborate understand meaning means works",
    "write": "write compose draft essay article blog post report letter email speech paper chapter"
    " story stories novel script dialogue scene screenplay",
    "poem": "poem poems haiku limerick song lyrics rap verse rhyme sonnet joke jokes tweet caption"
    " slogan headline tagline",
    "code": "code function program script python javascript java typescript html css sql c++ rust"
    " bash regex api class implement implementation debug algorithm query compile app react"
    " docker linux server database",
    "fix": "rewrite rephrase paraphrase correct proofread edit improve fix grammar shorten convert"
    " change replace translate translation format",
    "short": "briefly brief short concise concisely shortly quick simple tldr one-word only just"
    " single exactly",
    "long": "detailed detail details comprehensive thorough thoroughly in-depth long extensive full"
    " complete depth everything step-by-step elaborate",
    "summarise": "summarize summarise summary tldr outline overview recap key extract condense",
    "classify": "classify classification category categorize label sentiment positive negative"
    " identify choose select pick which true false yes no detect spam",
    "factoid": "who when where whose capital year date born died many much old tall population"
    " country city first won president king invented",
    "compare": "compare comparison difference differences versus vs pros cons advantages"
    " disadvantages better contrast",
    "plan": "plan itinerary schedule recipe cook strategy guide tutorial course curriculum workout"
    " budget steps lesson create design develop build make generate",
    "math": "calculate compute solve equation sum probability prove proof integral derivative"
    " theorem matrix triangle number percent average find value polynomial",
    "question": "what is are does do did can could should would will was were",
    "advice": "advice help best recommend should suggestion suggestions need want how",
    "table": "table csv json xml yaml markdown columns rows spreadsheet excel schema",
    "roleplay": "act role pretend imagine persona character roleplay play assume you your",
    "answer": "answer answers question questions passage context based following given paragraph"
    " sentence text article below above input output",
    "opinion": "think opinion feel believe moral ethical love life people relationship friend",
    "choice": "option options following correct choices alternatives",
    "think": "reason reasoning think carefully explanation justify rationale show working",
}
NUMBER_WORDS = {
    "one": 1,
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "twelve": 12,
    "fifteen": 15,
    "twenty": 20,
    "fifty": 50,
    "hundred": 100,
    "single": 1,
}
UNITS = {"word": 1, "words": 1, "character": 2, "characters": 2, "sentence": 3, "sentences": 3}
UNITS |= {"line": 4, "lines": 4, "paragraph": 5, "paragraphs": 5, "page": 6, "pages": 6}
UNIT_TOKENS = (0.0, 1.35, 0.25, 25.0, 14.0, 110.0, 600.0)
"""Tokens that one unit of `UNITS` asks for, by rule of thumb; a learner rescales them."""
EFFORTS = {"none": 1.0, "minimal": 2.0, "low": 3.0, "medium": 4.0, "high": 5.0, "xhigh": 6.0}

REQUEST_NAMES = (
    "log_chars",
    "log_system_chars",
    "log_history_tokens",
    "turn",
    "log_max_tokens",
    "has_max_tokens",
    "effort",
    "json_object",
    "json_schema",
    "log_tools",
    "log_choices",
)
TEXT_NAMES = (
    "log_words",
    "word_length",
    "upper",
    "digits",
    "code_marks",
    "space",
    "newlines",
    "non_ascii",
    "cjk",
    "cyrillic",
    "question_marks",
    "ends_question",
    "exclamations",
    "colons",
    "quotes",
    "fences",
    "maths_marks",
    "option_lines",
    "bullet_lines",
    "sentences",
    "numbers",
    "log_largest",
    "log_items",
    "log_asked_tokens",
    "asked_one_word",
    "asked_units",
    "first_group",
    "last_group",
    "blanks",
    "repeats",
)
DENSE: tuple[str, ...] = (
    *REQUEST_NAMES,
    *TEXT_NAMES,
    *(f"has_{group}" for group in GROUPS),
    *(f"opens_{group}" for group in GROUPS),
)
"""Names of the numbers in front of the word slots, in order."""
DENSE_SIZE = len(DENSE)
SIZE = DENSE_SIZE + SLOTS
"""Length of a feature vector."""
TEXT_AT = len(REQUEST_NAMES)
GROUP_COUNT = len(GROUPS)
HAS_AT = TEXT_AT + len(TEXT_NAMES)
OPENS_AT = HAS_AT + GROUP_COUNT
OPENING_WORDS = 8
SPACE, NEWLINE, STOP, LETTER, DIGIT, CODE, QUESTION, EXCLAMATION = range(8)
COLON, QUOTE, FENCE, MATHS, BLANK, OTHER = range(8, 14)
CLASSES = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFacts:
    """What a gateway knows of a request before it is sent.

    `text` is what is asked (the last user message); `system` the system prompt; `history_tokens`
    everything between. `effort` is OpenAI's reasoning effort, `response_format` its type.
    """

    text: str
    system: str = ""
    history_tokens: float = 0.0
    turn: int = 0
    max_tokens: float | None = None
    effort: str | None = None
    response_format: str = "text"
    tools: int = 0
    choices: int = 1


def word_id(word: bytes) -> int:
    """Slot value of one lower-case word: FNV-1a folded to 15 bits, never 0."""
    value = 2_166_136_261
    for byte in word:
        value = ((value ^ byte) * 16_777_619) & 0xFFFFFFFF
    return ((value >> WORD_BITS) ^ value) & (WORD_IDS - 1) or 1


def _tables() -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Bit set of groups, value and unit of every word id, each (WORD_IDS,)."""
    groups = np.zeros(WORD_IDS, np.int64)
    values = np.zeros(WORD_IDS, np.int64)
    units = np.zeros(WORD_IDS, np.int64)
    for bit, words in enumerate(GROUPS.values()):
        for word in words.split():
            groups[word_id(word.encode())] |= 1 << bit
    for word, value in NUMBER_WORDS.items():
        values[word_id(word.encode())] = value
    for word, unit in UNITS.items():
        units[word_id(word.encode())] = unit
    return groups, values, units


def _byte_classes() -> NDArray[np.int64]:
    """What each byte counts as, (256,); `)` ends an option and counts as a stop."""
    of = np.full(256, OTHER)
    of[128:] = LETTER
    of[ord("a") : ord("z") + 1] = LETTER
    of[ord("0") : ord("9") + 1] = DIGIT
    marks = {SPACE: " \t\r", NEWLINE: "\n", STOP: ".)", CODE: "{}[](;=<>#", QUESTION: "?"}
    marks |= {EXCLAMATION: "!", COLON: ":", QUOTE: '"', FENCE: "`", MATHS: "\\$^+", BLANK: "_"}
    for kind, characters in marks.items():
        for character in characters:
            of[ord(character)] = kind
    return of


_GROUPS, _VALUES, _UNITS = _tables()
_CLASSES = _byte_classes()
_UNIT_TOKENS = np.array(UNIT_TOKENS)
SCHEMA_HASH = hashlib.sha256(
    repr((3, DENSE, SLOTS, HEAD, SCANNED, WORD_BITS, GROUPS, NUMBER_WORDS, UNITS)).encode()
).hexdigest()[:16]
"""Names this layout; artifacts fitted under another do not load."""


def encode(facts: PromptFacts) -> Floats:
    """The feature vector of one request, (SIZE,) float64; every element is finite.

    Absurd numbers (negative, NaN, huge) are clamped, never raised: no exception reaches a request.
    """
    out = np.zeros(SIZE)
    data = facts.text.encode("utf-8", "replace")
    limit = facts.max_tokens
    known = limit is not None and limit > 0
    out[0] = math.log1p(len(data))
    out[1] = math.log1p(len(facts.system))
    out[2] = _log(facts.history_tokens)
    out[3] = min(max(facts.turn, 0), 64)
    out[4] = _log(limit) if limit is not None and known else _log(131_072.0)
    out[5] = float(known)
    out[6] = EFFORTS.get(facts.effort or "", 0.0)
    out[7] = facts.response_format == "json_object"
    out[8] = facts.response_format == "json_schema"
    out[9] = _log(facts.tools)
    out[10] = _log(facts.choices)
    if len(data) > 2 * SCANNED:
        data = data[:SCANNED] + data[-SCANNED:]
    scan(np.frombuffer(data, np.uint8), _GROUPS, _VALUES, _UNITS, _UNIT_TOKENS, _CLASSES, out)
    return out


def _log(value: float) -> float:
    """log(1 + value) with absurd values clamped to [0, 1e9]."""
    return math.log1p(min(max(value, 0.0), 1e9)) if value == value else 0.0  # noqa: PLR0124


@njit(cache=True)
def scan(data, groups, values, units, unit_tokens, classes, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Fill the text part of `out` from UTF-8 bytes in one pass.

    A word is a run of letters, digits and bytes above 127, lower-cased; `1,000` is one number.
    """
    n = data.shape[0]
    words = np.empty(n // 2 + 2, np.int64)
    count = 0
    marks = np.zeros(CLASSES, np.int64)
    upper = digits = letters = high = cjk = cyrillic = 0
    options = bullets = sentences = numbers = 0
    largest = items = asked = one_word = 0.0
    asked_unit = 0
    value = np.uint32(2_166_136_261)
    length = 0
    is_number = True
    number = 0.0
    pending = 0.0  # the last number, and how many words ago it and a list word stood
    since = list_since = 99
    line_start = True
    last = np.uint8(0)
    for i in range(n + 1):
        byte = data[i] if i < n else np.uint8(32)
        if 65 <= byte <= 90:
            upper += 1
            byte = np.uint8(byte + 32)
        kind = classes[byte]
        plus = byte == 43 and ((length == 1 and last == 99) or (length == 2 and last == 43))  # c++
        if kind in (LETTER, DIGIT) or plus:
            letters += 1
            if byte >= 128:
                high += 1
                if 0xE3 <= byte <= 0xE9:
                    cjk += 1
                elif 0xD0 <= byte <= 0xD1:
                    cyrillic += 1
            if kind == DIGIT:
                digits += 1
                if number < 1e8:
                    number = number * 10.0 + (byte - 48)
            else:
                is_number = False
            value = np.uint32((value ^ byte) * np.uint32(16_777_619))
            length += 1
            last = byte
            continue
        if length > 0:
            if byte == 44 and is_number and i + 1 < n and classes[data[i + 1]] == DIGIT:
                continue
            folded = ((value >> np.uint32(15)) ^ value) & np.uint32(32_767)
            word = np.int64(folded) if folded != 0 else np.int64(1)
            words[count] = word
            count += 1
            if kind == STOP and (i + 1 >= n or classes[data[i + 1]] <= NEWLINE):
                if line_start and length == 1:
                    options += 1
                elif byte == 46:
                    sentences += 1
            since += 1
            list_since += 1
            if is_number:
                numbers += 1
                largest = max(largest, number)
                pending, since = number, 0
            elif values[word] > 0:
                pending, since = float(values[word]), 0
            if since == 0 and list_since <= 3 and 1 <= pending <= 200:
                items = max(items, pending)
            unit = units[word]
            if unit > 0 and since <= 2 and pending > 0:
                if pending * unit_tokens[unit] > asked:
                    asked, asked_unit = pending * unit_tokens[unit], unit
                if unit == 1 and pending == 1:
                    one_word = 1.0
            if groups[word] & 1:  # a list word on either side of a number
                if since <= 2 and 1 < pending <= 200:
                    items = max(items, pending)
                list_since = 0
            length, number, is_number = 0, 0.0, True
            value = np.uint32(2_166_136_261)
            line_start = False
        marks[kind] += i < n
        if kind == NEWLINE:
            line_start = True
        elif kind != SPACE:
            last = byte
            bullets += line_start and (byte == 45 or byte == 42)  # noqa: PLR1714
            line_start = False
    size = max(float(n), 1.0)
    base = TEXT_AT
    out[base] = np.log1p(count)
    out[base + 1] = letters / max(count, 1)
    out[base + 2] = upper / size
    out[base + 3] = digits / size
    out[base + 4] = marks[CODE] / size
    out[base + 5] = (marks[SPACE] + marks[NEWLINE]) / size
    out[base + 6] = np.log1p(marks[NEWLINE])
    out[base + 7] = high / size
    out[base + 8] = cjk / size
    out[base + 9] = cyrillic / size
    out[base + 10] = np.log1p(marks[QUESTION])
    out[base + 11] = 1.0 if last == 63 else 0.0
    out[base + 12] = np.log1p(marks[EXCLAMATION])
    out[base + 13] = np.log1p(marks[COLON])
    out[base + 14] = np.log1p(marks[QUOTE])
    out[base + 15] = np.log1p(marks[FENCE])
    out[base + 16] = marks[MATHS] / size
    out[base + 17] = options
    out[base + 18] = np.log1p(bullets)
    out[base + 19] = np.log1p(sentences)
    out[base + 20] = np.log1p(numbers)
    out[base + 21] = np.log1p(largest)
    out[base + 22] = np.log1p(items)
    out[base + 23] = np.log1p(asked)
    out[base + 24] = one_word
    out[base + 25] = asked_unit
    out[base + 28] = np.log1p(marks[BLANK])
    repeats = 0
    for i in range(count):
        repeats += i > 0 and words[i] == words[i - 1]
        bits = groups[words[i]]
        if bits == 0:
            continue
        lowest = 0
        while not (bits >> lowest) & 1:
            lowest += 1
        if i < 4 and out[base + 26] == 0.0:
            out[base + 26] = lowest + 1.0
        if i >= count - 12:
            out[base + 27] = lowest + 1.0
        for bit in range(lowest, GROUP_COUNT):
            if (bits >> bit) & 1:
                out[HAS_AT + bit] += 1.0
                if i < OPENING_WORDS:
                    out[OPENS_AT + bit] += 1.0
    out[base + 29] = repeats / max(count, 1)
    for bit in range(GROUP_COUNT):
        out[HAS_AT + bit] = np.log1p(out[HAS_AT + bit])
    if count <= SLOTS:
        out[DENSE_SIZE : DENSE_SIZE + count] = words[:count]
    else:
        out[DENSE_SIZE : DENSE_SIZE + HEAD] = words[:HEAD]
        tail = SLOTS - HEAD - 1  # one empty slot marks the gap
        out[DENSE_SIZE + HEAD + 1 :] = words[count - tail : count]


MODEL_NAMES = (
    "log_size",
    "chat",
    "base",
    "concise",
    "verbose",
    "reasoning",
    "quantised",
    "many_calls",
    "distilled_preferences",
)
MODEL_SIZE = len(MODEL_NAMES)
_SIZE = re.compile(r"(?:(\d+)\s?x\s?)?(\d+(?:\.\d+)?)\s?b(?![a-z])")


@lru_cache(maxsize=4096)
def model_features(name: str) -> tuple[float, ...]:
    """What a model's or variant's name tells, (MODEL_SIZE,); NaN where it does not say its size."""
    low = name.lower().replace("_", "-")
    size = _SIZE.search(low)
    billions = float(size[2]) * float(size[1] or 1) if size else math.nan

    def says(pattern: str) -> float:
        return float(re.search(pattern, low) is not None)

    return (
        math.log(max(billions, 1e-3)) if size else math.nan,
        says(r"chat|instruct|-it\b|-inst\b|turbo|gpt|claude|gemini|vicuna|zephyr|tulu"),
        says(r"-hf\b|base|-v0\.\d$"),
        says(r"concise|-brief"),
        says(r"verbose|-long"),
        says(r"\bo[134]\b|\bo[134]-|\br1\b|qwq|think|reason|sky-t1|-rl\b"),
        says(r"fp8|int[48]|awq|gptq|q[2-8]|w[48]a\d+|nf4|quant"),
        says(r"best-of|\bmoa\b|moe-agg|ensemble|cascade"),
        says(r"dpo|ppo|simpo|orpo|kto|rlhf|expo|reward|sppo|wpo"),
    )


def slots(vectors: Floats) -> NDArray[np.int64]:
    """Word ids of one or many vectors: the last axis becomes (SLOTS,)."""
    return vectors[..., DENSE_SIZE:].astype(np.int64)
