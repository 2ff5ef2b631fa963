"""Names of what learned scorers see, where configs can read them without loading a compiler."""

from __future__ import annotations

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
