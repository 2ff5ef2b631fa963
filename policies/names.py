"""Names of what learned scorers see, where configs can read them without loading a compiler."""

from __future__ import annotations

import zlib
from typing import Literal, get_args

Trait = Literal[
    "one",
    "p_slo",
    "quality",
    "ttft_share",
    "tpot_share",
    "e2e_share",
    "ttft",
    "e2e",
    "running",
    "backlog",
    "cached",
    "cost",
]
"""One of the numbers that `policies.traits.traits_into` writes: `*_share` are predicted / limit;
`ttft` and `e2e` log(1 + s) from arrival; `running` log(1 + sequences) and `backlog` log(1 + prompt
tokens) in front; `cached` the share of the prompt; `cost` log(1 + price x seconds of work)."""

TRAITS: tuple[Trait, ...] = get_args(Trait)
"""All of them, in the order of the vector (D,)."""

LOGGED = TRAITS[:8]
"""Those that a decision log holds of every candidate, not only of the chosen one."""

MOST_SHARE = 4.0
"""Bound of predicted / limit: four times the limit is as hopeless as any."""

ActorTrait = Literal[
    "one",
    "p_slo",
    "lost",
    "cost",
    "ttft_used",
    "tpot_used",
    "e2e_used",
    "batch",
    "backlog",
    "slow",
    "tighter",
    "foreign",
]
"""What the learned set scorer sees of a candidate, each in [0, 1]: limits that others lose, price x
work, predictions over what is left of the limits, sequences, seconds of prefill in front, the fixed
part of a step, the share of own streams with a tighter pace, other gateways' sequences."""

ActorContext = Literal["one", "tight", "long", "pressure"]
"""What its weights depend on: the request's pace and length, and what the whole fleet runs."""

HoldContext = Literal["tight", "long", "pressure", "waited", "chance"]
"""What holding back depends on: the same, how much of the TTFT limit was waited, and P(SLO) on the
best route."""

ACTOR_TRAITS: tuple[ActorTrait, ...] = get_args(ActorTrait)
ACTOR_CONTEXTS: tuple[ActorContext, ...] = get_args(ActorContext)
HOLD_CONTEXTS: tuple[HoldContext, ...] = get_args(HoldContext)

NETWORK_INPUTS = (
    *TRAITS, "behind", "harm", "tight", "long", "heavy", "waited", "first", "slow", "foreign",
)  # fmt: skip
"""What the network sees of a candidate: the traits; how far the rule's value is behind the best,
and what others lose; the request's pace, length and prompt, the share of its TTFT limit that is
gone, whether its class is the first; the fixed part of a step, other gateways' sequences."""

NETWORK_SCHEMA = f"{zlib.crc32(' '.join(NETWORK_INPUTS).encode()):08x}"
"""Hash of the inputs in their order; weights for others are refused."""
