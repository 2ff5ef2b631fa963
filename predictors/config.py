"""Configuration of the predictors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class BaselineConfig(BaseModel):
    """Running lengths, roofline latency with on-line scales, quality priors; nothing to train."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["baseline"] = "baseline"


class LearnedConfig(BaseModel):
    """Lengths learned from prompts, with conformal bound and drift alarm; the rest as baseline.

    `length` is an artifact of `sluice train length`, None the one that ships. `quality` is one of
    `sluice train quality`; None leaves the variants' priors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["learned"] = "learned"
    length: Path | None = None
    quality: Path | None = None


EstimatorConfig = Annotated[BaselineConfig | LearnedConfig, Field(discriminator="kind")]
