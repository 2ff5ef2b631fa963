"""From the body's facts to the predictors' feature vector; the text goes no further."""

from __future__ import annotations

from backends.wire.openai import RequestFacts
from predictors.features import PromptFacts, encode


def feature_vector(facts: RequestFacts) -> tuple[float, ...]:
    """The vector that `InferenceRequest.features` carries; never raises.

    What is asked is the last user turn; what came between it and the instructions counts by its
    size, four characters a token.
    """
    users = [i for i, (role, _) in enumerate(facts.turns) if role in {"user", ""}]
    text = facts.turns[users[-1]][1] if users else ""
    rest = facts.prompt_chars - len(text) - len(facts.system_text)
    vector = encode(
        PromptFacts(
            text=text,
            system=facts.system_text,
            history_tokens=max(rest, 0) / 4.0,
            turn=max(len(users) - 1, 0),
            max_tokens=None if facts.max_tokens is None else float(facts.max_tokens),
            response_format="json_schema" if facts.has_format else "text",
            tools=int(facts.has_tools),
            choices=facts.choices,
        )
    )
    return tuple(vector.tolist())
