"""What every scorer is at run time: a name, a unit, flat parameters and a compiled kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import numpy as np

from domain.columns import Floats, Params
from domain.ports import Kernel, OnlineLearner, Scorer


def no_params() -> Params:
    """The parameter vector of a scorer without parameters; one unused number, since kernels index
    it.
    """
    return np.zeros(1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelScorer:
    """A compiled kernel with its parameters; conforms to `domain.ports.Scorer`.

    `random` says that the kernel reads the draws: its logged propensity is then conditional on
    them, and off-policy estimates must not use it. `learner` writes into `params`; `version` names
    them as they were at first.
    """

    name: str
    kernel: Kernel
    unit: Literal["rank", "value"] = "rank"
    needs_estimates: bool = False
    random: bool = False
    params: Params = field(default_factory=no_params)
    learner: OnlineLearner | None = None
    envelope: Floats | None = None
    version: str = ""
    """Name and a hash of the parameters, and of what was given here: other settings."""

    def __post_init__(self) -> None:
        settings = np.ascontiguousarray(self.params).tobytes() + self.version.encode()
        digest = blake2b(settings, digest_size=4).hexdigest()
        object.__setattr__(self, "version", f"{self.name}-{digest}")


_conforms: type[Scorer] = KernelScorer
