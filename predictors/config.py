"""Configuration of the predictors."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class BaselineConfig(BaseModel):
    """Running lengths, roofline latency with on-line scales, quality priors; nothing to train."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["baseline"] = "baseline"


EstimatorConfig = BaselineConfig
