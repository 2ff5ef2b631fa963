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
    """Lengths learned from prompts and latency from outcomes, watched and taken back when wrong.

    `length` is an artifact of `sluice train length`, None the one that ships. `quality` is one of
    `sluice train quality`; None leaves the variants' priors. `latency` is one of `sluice train
    latency`; None is the one that ships. It is fitted again from what this gateway sees, in a
    process of its own, every `refit_minutes` (0: never) once `refit_least` outcomes are new.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["learned"] = "learned"
    length: Path | None = None
    quality: Path | None = None
    latency: Path | None = None
    refit_minutes: float = Field(default=10.0, ge=0.0)  # a fit takes seconds of one core
    refit_least: int = Field(default=500, ge=200)  # fewer say little about four forests


EstimatorConfig = Annotated[BaselineConfig | LearnedConfig, Field(discriminator="kind")]
